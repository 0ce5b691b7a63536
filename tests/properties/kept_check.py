"""The kept worker, by the oracle's own book: it is given to the most-behind, and stays its own.

Where the most-behind user fits nowhere, headroom aside, a worker is kept for it. From then on it stays kept for
that user, whoever is the most behind meanwhile, until something of it is dispatched, fits somewhere, or is in A no
more. Of the scheduler it takes for whom a worker is kept: at each grant, and after the look that found nobody.
"""

from typing import TYPE_CHECKING

from tests.properties.broken import demand
from tests.properties.held_up import HeldUpCheck, KeptFor, Sight, kept_for
from tests.properties.tenant_book import Line, could_run

from evenhand.core.ids import TenantId

if TYPE_CHECKING:
    from tests.properties.fairness_oracle import Oracle


class KeptCheck:
    def __init__(self, oracle: "Oracle", held_up: HeldUpCheck) -> None:
        self.oracle = oracle
        self.held_up = held_up
        self._line: Line | None = None
        """For whom a worker was kept at the look before."""
        self._is_bound = False
        """It has been in A since, and nothing of it was dispatched."""
        self._is_served = False
        """Something of it was dispatched at that look."""

    def granted(self, line: Line, kept: KeptFor | None) -> None:
        """Something was dispatched, by a look that kept a worker for this user."""
        self._line = self._line_of(kept)
        self._is_served = self._line is line
        self._is_bound = self._line is not None and not self._is_served

    def looked(self, sight: Sight) -> Line | None:
        """The look found nobody any more: for whom is a worker kept, and may it be?"""
        line, before = self._line_of(sight.kept), self._line
        if before is not None and before is not line and self._is_bound and self._is_in_a(before):
            may_lose = self._fits_somewhere(before, sight) or not self._could_be_taken(before)
            demand(may_lose, "kept", "what was kept for {} is given up, and it fits nowhere", before.name)
        if line is not None:
            demand(self._is_in_a(line), "kept", "kept for {}, which is not in A", line.name)
            if line is not before or self._is_served:
                first = self._first()
                demand(line is first, "kept", "kept for {}, the most-behind is {}", line.name, first.name)
        self._line, self._is_bound, self._is_served = line, line is not None, False
        return line

    def stepped(self) -> None:
        """A step is over, whether anybody was looked for or not."""
        line = self._line_of(kept_for(self.oracle))
        was_bound = self._is_bound or line is not self._line
        self._line, self._is_served = line, False
        self._is_bound = line is not None and was_bound and self._is_in_a(line)

    def _line_of(self, kept: KeptFor | None) -> Line | None:
        return self.oracle.books[kept.tenant_id].lines[kept.user] if kept is not None else None

    def _is_in_a(self, line: Line) -> bool:
        return line.node.in_a and line.book.node.in_a

    def _fits_somewhere(self, line: Line, sight: Sight) -> bool:
        held_up = self.held_up
        return any(
            held_up.has_room(place, sight) and held_up.fits(waiting, place, sight)
            for place in self.oracle.places.values()
            for waiting in held_up.heads(line)
        )

    def _could_be_taken(self, line: Line) -> bool:
        """By a worker with room enough."""
        oracle, first = self.oracle, self.held_up.heads(line)[0]
        return any(
            place.bit & oracle.members and could_run(first, place.spec) and not oracle.is_excluded(first, place)
            for place in oracle.places.values()
        )

    def _first(self) -> Line:
        """The most-behind user of the most-behind tenant of the most-behind band."""
        oracle = self.oracle
        band = min((node.v, node.key) for node in oracle.pool.nodes if node.in_a)[1]
        tenant = min((node.v, node.key) for node in oracle.bands[band].tenants.nodes if node.in_a)[1]
        return self.held_up.first(oracle.books[TenantId(tenant)])
