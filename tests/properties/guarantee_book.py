"""A tenant's guarantee in an oracle's own book: its tag, and what was taken by it outside the windows.

Both are in the pool's work (cost ÷ guaranteed share). What was taken runs off as the pool works: at a booking it
is the most by which the bookings since some earlier one exceed the work since then. It is reckoned from grants and
ends alone, whatever makes a guarantee due; what legs turn out to cost beyond their charge is not in it. Then::

    taken before a booking ≤ burst + what legs of before have given back since
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from tests.properties.broken import at_most, demand

if TYPE_CHECKING:
    from tests.properties.tenant_book import Leg


class GuaranteeBook:
    __slots__ = ("given_back", "tag", "taken", "taken_at")

    def __init__(self) -> None:
        self.tag = 0.0
        """The pool's work up to which what the tenant got has paid its guarantee."""
        self.taken = self.taken_at = self.given_back = 0.0

    def is_due(self, work: float, slack: float = 0.0) -> bool:
        """The guarantee is behind, or just not quite; with ``slack`` below 0: behind beyond all rounding."""
        return self.tag <= work + slack * (1.0 + abs(self.tag) + abs(work))

    def granted(self, leg: "Leg", work: float, burst: float, burst_most: float) -> None:
        """A leg begins. ``burst``: the work of the time that a guarantee is kept for; and the most it ever was."""
        self.tag = max(self.tag, work - burst)
        if leg.ticket.guaranteed:
            self._run_off(work)
            if not self.taken:
                self.given_back = 0.0
            bound = burst_most + self.given_back
            who = leg.ticket.tenant_id
            demand(
                at_most(self.taken, bound), "guarantee", "{} took {} > {} beside its turn", who, self.taken, bound
            )
            self._take(leg.booked / leg.guarantee_share, work)
        self._pay(leg, leg.booked / leg.guarantee_share, work, burst)

    def corrected(self, leg: "Leg", by: float, work: float, burst: float) -> None:
        """A leg's booked cost has changed by so much."""
        if by > 0.0 or leg.ticket.guaranteed:
            self._pay(leg, by / leg.guarantee_share, work, burst)
            if by < 0.0:
                self._take(by / leg.guarantee_share, work)
            return
        # By its turn: it keeps what it moved the tag, up to what it truly cost.
        kept = min(leg.tag_moved, leg.booked / leg.guarantee_share)
        self.given_back += leg.tag_moved - kept
        self.tag -= leg.tag_moved - kept
        leg.tag_moved = kept

    def share_changed(self, legs: Iterable["Leg"], by: float, work: float) -> None:
        """What is paid ahead, owed or taken is a cost: at the share of now it is so many times the work."""
        self._run_off(work)
        self.tag = work + (self.tag - work) * by
        self.given_back = self.given_back * by + self.taken * max(0.0, by - 1.0)
        self.taken *= by
        for leg in legs:
            leg.guarantee_share /= by
            leg.tag_moved *= by

    def restarted(self, work: float, is_guaranteed: bool) -> None:
        """A checkpoint tells of the tags of those that are guaranteed something."""
        if not is_guaranteed:
            self.tag, self.taken = work, 0.0

    def _run_off(self, work: float) -> None:
        self.taken = max(0.0, self.taken - (work - self.taken_at))
        self.taken_at = work

    def _take(self, by: float, work: float) -> None:
        self._run_off(work)
        self.given_back += max(0.0, -by - self.taken)
        self.taken = max(0.0, self.taken + by)

    def _pay(self, leg: "Leg", by: float, work: float, burst: float) -> None:
        """By its turn a leg moves a tag to a burst ahead at most; a guarantee pays in full."""
        if not leg.ticket.guaranteed:
            by = min(by, max(0.0, work + burst - self.tag))
        self.tag += by
        leg.tag_moved += by
