"""P2, P3 and P4 judged at the end of a run, when it is known what estimates got wrong.

A gap that stays within the window and one charge needs no more than that; what goes beyond is kept by the
siblings' book, as it was met, and judged here.
"""

from bisect import bisect_left, bisect_right
from typing import NamedTuple

from tests.properties.broken import at_most, demand
from tests.properties.clock_nodes import Anchor, Node, Stretch


class Gap(NamedTuple):
    i: Node
    j: Node
    at: int
    gap: float
    anchor: Anchor
    entered: int


class Excess(NamedTuple):
    stretch: Stretch
    j: Node
    at: int
    last: int
    """Moment of j's last dispatch inside the stretch."""
    booked: float
    weight_max: float
    reach: float
    """T + max v_i − v_j(start) + the last charge."""


class Drift(NamedTuple):
    i: Node
    j: Node
    entered: tuple[int, int]
    since: int
    at: int
    range: float
    in_flight: bool


def judge(nodes: list[Node], gaps: list[Gap], excesses: list[Excess], drifts: list[Drift]) -> None:
    """P2, P3 and P4, with what estimates got wrong."""
    if not (gaps or excesses or drifts):
        return
    sums = {node.index: Sums(node) for node in nodes}
    for i, j, at, gap, anchor, entered in gaps:
        bound = anchor.window + anchor.charge
        bound += sums[i.index].under.at(anchor.at) + sums[j.index].over.largest(entered, at)
        demand(at_most(gap, bound), "P2", "moment {}: v_{} − v_{} = {} > {}", at, i.key, j.key, gap, bound)
    for stretch, j, at, last, booked, weight, reach in excesses:
        wrong = sums[j.index].over.at(stretch.began) + sums[j.index].under.at(last)
        bound = max(0.0, weight * (reach + wrong))
        what = f"moment {at}: {j.key} got {booked} > {bound} while {stretch.node.key} waited"
        demand(at_most(booked, bound), "P3", what)
    for drift in drifts:
        bound = sum(
            half_of_bound(node, entered, drift.since, drift.at, sums[node.index])
            for node, entered in zip((drift.i, drift.j), drift.entered, strict=True)
        )
        if drift.in_flight:
            bound += sum(sums[n.index].open.largest(drift.since - 1, drift.at) for n in (drift.i, drift.j))
        what = f"moment {drift.at}: services of {drift.i.key} and {drift.j.key} drifted {drift.range} > {bound}"
        demand(at_most(drift.range, bound), "P4", what)


class Sums:
    """What a node's open legs were charged too little and too much, and what they held, at each moment."""

    def __init__(self, node: Node) -> None:
        ended = [(s, s.ended if s.ended is not None else 1 << 60) for s in node.spans]
        self.under = Steps([(s.began, end, s.peak - s.charge) for s, end in ended])
        self.over = Steps([(s.began, end, s.peak - s.booked) for s, end in ended])
        self.open = Steps([(s.began, end, s.peak) for s, end in ended])


class Steps:
    """A sum of amounts, each in force from one moment until before another."""

    def __init__(self, spans: list[tuple[int, int, float]]) -> None:
        changes: dict[int, float] = {}
        for began, ended, amount in spans:
            if amount > 0.0:
                changes[began] = changes.get(began, 0.0) + amount
                changes[ended] = changes.get(ended, 0.0) - amount
        self.times = sorted(changes)
        self.sums: list[float] = []
        total = 0.0
        for time in self.times:
            total += changes[time]
            self.sums.append(total)

    def at(self, moment: int) -> float:
        index = bisect_right(self.times, moment) - 1
        return self.sums[index] if index >= 0 else 0.0

    def largest(self, first: int, last: int) -> float:
        """Largest value from one moment to another, both included."""
        inside = self.sums[bisect_left(self.times, first) : bisect_right(self.times, last)]
        return max(self.at(first), max(inside, default=0.0))


def half_of_bound(node: Node, entered: int, since: int, at: int, sums: Sums) -> float:
    """T + ĉ + X̂ of one and its own Ô, over a stay of a pair: half of P4's bound."""
    first = bisect_right(node.anchored, since, key=lambda anchor: anchor.at) - 1
    relevant = [anchor for anchor in node.anchored[max(0, first) :] if anchor.at <= at]
    reach = max(anchor.window + anchor.charge + sums.under.at(anchor.at) for anchor in relevant)
    return reach + sums.over.largest(entered, at)
