"""What an oracle's book knows of one clock: the node it belongs to, and the legs that are booked to it.

Moments number the events of a run (a grant, an end, an arrival …); sets of workers are bit masks.
"""

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from tests.properties.clock_book import Siblings


class Moment:
    """The number of the event that is being told; one for all siblings of a run."""

    __slots__ = ("now",)

    def __init__(self) -> None:
        self.now = 0


class Span:
    """One leg on the clock of one node: when, and how far its bookings went up and came down, ÷ its ticket's φ."""

    __slots__ = ("began", "booked", "charge", "ended", "peak", "stretches", "weight")

    def __init__(self, began: int, charge: float, weight: float) -> None:
        self.began = began
        self.weight = weight
        self.charge = self.booked = self.peak = charge / weight
        self.ended: int | None = None
        self.stretches: list[Stretch] = []
        """Stretches of siblings without a dispatch in which this leg began."""


class Anchor(NamedTuple):
    """What a clock's height is owed to: the last dispatch booked to it, or the last lift."""

    at: int
    workers: int
    """Bounds hold towards siblings that reach all of these."""
    window: float
    charge: float


class Stretch:
    """A node stays in A without a dispatch; what its siblings are booked meanwhile on workers that it reaches."""

    __slots__ = ("began", "booked", "last", "node", "v_max", "v_start", "weight_max")

    def __init__(self, node: "Node", began: int, nodes: "list[Node]") -> None:
        self.node = node
        self.began = began
        self.v_max = node.v
        self.v_start = [other.v for other in nodes]
        self.booked = [0.0] * len(nodes)
        """Cost, by index of the sibling."""
        self.weight_max = [0.0] * len(nodes)
        self.last = [(began, 0.0)] * len(nodes)
        """Moment of the sibling's last dispatch there, and how far it could reach: T + max v_i + its charge."""

    def grow(self, nodes: "list[Node]") -> None:
        """Siblings that came since."""
        for other in nodes[len(self.v_start) :]:
            self.v_start.append(other.v)
            self.booked.append(0.0)
            self.weight_max.append(0.0)
            self.last.append((self.began, 0.0))


class Node:
    """One of the siblings, as the oracle knows it."""

    __slots__ = (
        "anchor",
        "anchored",
        "attained",
        "base",
        "entered",
        "full_since",
        "in_a",
        "index",
        "key",
        "newly",
        "reach",
        "service",
        "siblings",
        "spans",
        "stretch",
        "v",
        "weight",
    )

    def __init__(self, key: str, weight: float, siblings: "Siblings") -> None:
        self.key = key
        self.weight = weight
        self.siblings = siblings
        self.index = len(siblings.nodes)
        self.v = 0.0
        self.base = 0.0
        """Its clock after the last step, and what was booked since."""
        self.newly = 0
        """Workers that it reaches since this step and did not before: the only ones that may lift it."""
        self.in_a = False
        self.reach = 0
        self.entered = 0
        self.full_since = -1
        """Moment since which it is in A and reaches all workers without a lift; −1: it does not."""
        self.anchor = Anchor(0, 0, 0.0, 0.0)
        self.anchored = [self.anchor]
        """All its anchors, in order."""
        self.spans: list[Span] = []
        self.service = 0.0
        """All that is booked, ÷ the tickets' φ: the clock without its lifts."""
        self.attained = 0.0
        """The same of legs that have ended."""
        self.stretch: Stretch | None = None
        siblings.nodes.append(self)


def bits(mask: int) -> tuple[int, ...]:
    """The members of a set of workers."""
    found = _BITS.get(mask)
    if found is None:
        rest, each = mask, []
        while rest:
            bit = rest & -rest
            each.append(bit)
            rest ^= bit
        found = _BITS[mask] = tuple(each)
    return found


_BITS: dict[int, tuple[int, ...]] = {}
