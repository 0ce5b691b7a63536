"""Who is held up, by the oracle's own book: nothing of it can be dispatched to any open worker.

A leg that is backfilled passes siblings that are more than T behind it: ``demand_held_up`` asks of each of them,
at each level, whether there was indeed nothing for it, in the rooms as they were at that moment. And the other way
round: ``check`` asks that no room is idle for want of looking past those that are held up.

What the map and the modelled prefill said at the moment of a decision is gone at the end of a step, so it is noted
when the scheduler explains a backfilled choice (``Sight``), before it is reserved; so are the kept worker and who
has waited long for a warmer one. Rooms, queues and clocks are the book's.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from tests.properties.broken import SLACK, at_most, demand
from tests.properties.clock_nodes import Node
from tests.properties.tenant_book import Book, Line, Place, Waiting, could_run

from evenhand.core.choice import Choice
from evenhand.core.facts import Decision, Ticket
from evenhand.core.held_up import HELD_UP_MAX, HELD_UP_USERS_MAX
from evenhand.core.ids import RequestId, TenantId, WorkerId
from evenhand.core.placement import IDLE_LOAD_MAX

if TYPE_CHECKING:
    from tests.properties.fairness_oracle import Oracle


class KeptFor(NamedTuple):
    """Which worker is kept, and for which user of which tenant."""

    worker_id: WorkerId
    tenant_id: TenantId
    user: str


def kept_for(oracle: "Oracle") -> KeptFor | None:
    kept = oracle.core.placement.keeping.kept
    if kept is None:
        return None
    return KeptFor(kept.worker.spec.worker_id, kept.user.tenant.spec.tenant_id, kept.user.node_id)


class Sight:
    """What the scheduler could see of map, prefill, waits and the kept worker at one moment."""

    def __init__(self, oracle: "Oracle", now_ns: int) -> None:
        self._presence = oracle.presence
        self.pending = {
            worker_id: worker.prefill_pending_tokens(now_ns)
            for worker_id, worker in oracle.core.rooms.workers.items()
        }
        self.kept = kept_for(oracle)
        cold_waits = oracle.core.placement.cold_waits
        self.wait_long = {
            (tenant_id, user.node_id)
            for tenant_id, tenant in oracle.core.outstanding.tenants.items()
            for user in tenant.users_known.values()
            if cold_waits.is_long(user, now_ns)
        }
        """Users whose tenants have been stuck beside an idle worker for as long as affinity may delay others."""
        self.waiting_counts = False
        """The place in question is hardly used: who waits for a warmer one is held up too."""
        self._blocks: dict[tuple[TenantId, RequestId], dict[WorkerId, int]] = {}

    def note_all(self, oracle: "Oracle") -> None:
        """Look up what waits in the scheduler, as of this moment."""
        for tenant in oracle.core.outstanding.tenants.values():
            for queued in tenant.queue.values():
                self._look_up(tenant.spec.tenant_id, queued.request.request_id, queued.request.block_keys)

    def _look_up(self, tenant_id: TenantId, request_id: RequestId, keys: Sequence[int]) -> dict[WorkerId, int]:
        found = {match.worker_id: match.blocks for match in self._presence.match(keys)}
        self._blocks[tenant_id, request_id] = found
        return found

    def cached(self, waiting: Waiting, place: Place) -> int:
        """Usable cached tokens at a place."""
        request, size = waiting.request, place.spec.block_size_tokens
        known = self._blocks.get((request.tenant_id, request.request_id))
        if known is None:
            known = self._look_up(request.tenant_id, request.request_id, request.block_keys)
        return min(known.get(place.spec.worker_id, 0), (request.prompt_tokens - 1) // size) * size


class HeldUpCheck:
    def __init__(self, oracle: "Oracle") -> None:
        self.oracle = oracle
        self._sights: dict[RequestId, Sight] = {}
        self._kept: dict[RequestId, KeptFor | None] = {}
        explainer = oracle.core.explainer
        explain = explainer.decision

        def decision(choice: Choice, charge: float, now_ns: int) -> Decision:
            request_id = choice.queued.request.request_id
            self._kept[request_id] = kept_for(oracle)
            if choice.backfilled or choice.guaranteed:
                sight = Sight(oracle, now_ns)
                sight.note_all(oracle)
                self._sights[request_id] = sight
            return explain(choice, charge, now_ns)

        explainer.decision = decision  # type: ignore[method-assign]

    def kept_at(self, request_id: RequestId) -> KeptFor | None:
        """What was kept when a request was granted."""
        return self._kept.pop(request_id)

    # A backfilled leg

    def demand_held_up(
        self, line: Line, place: Place, ticket: Ticket, windows: tuple[float, float, float]
    ) -> None:
        """Whoever is more than T behind was held up, and somebody was."""
        sight = self._sights.pop(ticket.request_id)
        self._ask_kept(line, place, sight)
        sight.waiting_counts = (
            max(len(place.legs) / place.spec.slots, place.kv_blocks / place.spec.kv_blocks) <= IDLE_LOAD_MAX
        )
        book = line.book
        is_outside = False
        for node, window in zip((book.band.node, book.node, line.node), windows, strict=True):
            is_outside |= self._passed(node, window, line, place, ticket, sight)
        if self.oracle.exact:
            demand(is_outside, "held up", "{} had its turn: it is not backfilled", ticket.request_id)

    def demand_users_held_up(self, line: Line, place: Place, ticket: Ticket, window: float) -> None:
        """A guarantee is its tenant's: of its users, those more than T behind were held up."""
        sight = self._sights.pop(ticket.request_id)
        self._ask_kept(line, place, sight)
        self._passed(line.node, window, line, place, ticket, sight)

    def _passed(self, node: Node, window: float, line: Line, place: Place, ticket: Ticket, sight: Sight) -> bool:
        """Is a sibling more than T behind? Each of them is held up."""
        passed = [
            other
            for other in node.siblings.nodes
            if other.reach & place.bit and other.v + window < node.v and (self.oracle.exact or not other.newly)
        ]
        for other in passed:
            if not at_most(node.v, other.v + window):
                held_up = self._is_node_held_up(other, line, place, sight)
                demand(held_up, "held up", "{} passed {}, which had a place", ticket.request_id, other.key)
        return bool(passed)

    def _ask_kept(self, line: Line, place: Place, sight: Sight) -> None:
        if sight.kept is None:
            return
        worker_id, tenant_id, user = sight.kept
        is_its_own = (tenant_id, user) == (line.book.spec.tenant_id, line.name)
        what = f"{place.spec.worker_id} was kept for {user} of {tenant_id}"
        demand(place.spec.worker_id != worker_id or is_its_own, "held up", what)

    def _is_node_held_up(self, node: Node, line: Line, place: Place, sight: Sight) -> bool:
        """A sibling at any level of the way to a user: all of it that reaches the place."""
        oracle, book = self.oracle, line.book
        if node.siblings is oracle.pool:
            tenants = [each for each in oracle.bands[node.key].tenants.nodes if each.reach & place.bit]
            return all(self._is_tenant_held_up(oracle.books[TenantId(each.key)], place, sight) for each in tenants)
        if node.siblings is book.band.tenants:
            return self._is_tenant_held_up(oracle.books[TenantId(node.key)], place, sight)
        return self.is_held_up(book.lines[node.key], sight)

    def _is_tenant_held_up(self, book: Book, place: Place, sight: Sight) -> bool:
        return all(self.is_held_up(line, sight) for line in self._standing_for(book, place))

    def _standing_for(self, book: Book, place: Place) -> list[Line]:
        """Who stands for a tenant at a place: of its first users those that reach it, or all where none does."""
        users = sorted((node.v, node.key) for node in book.users.nodes if node.in_a)[:HELD_UP_USERS_MAX]
        lines = [book.lines[name] for _, name in users]
        return [line for line in lines if line.node.reach & place.bit] or lines

    def is_held_up(self, line: Line, sight: Sight) -> bool:
        """Nothing of it could be dispatched at any open place; where waits count, whoever may be waiting waits."""
        waiting_counts = sight.waiting_counts or (line.book.spec.tenant_id, line.name) in sight.wait_long
        return all(
            waiting_counts and self._waits(line.book, waiting, place, sight)
            for waiting, place in self._fitting(line, sight, 1.0 - SLACK)
        )

    def _fitting(self, line: Line, sight: Sight, slack: float) -> Iterator[tuple[Waiting, Place]]:
        """What of a user fits where, headroom counted if it has been stuck for long; ``slack`` says to which side
        that looks away."""
        places = self.open_places(sight)
        is_long = (line.book.spec.tenant_id, line.name) in sight.wait_long
        if sight.kept is not None and (line.book.spec.tenant_id, line.name) == sight.kept[1:]:
            places = [place for place in self.oracle.places.values() if self.has_room(place, sight)]
        for place in places:
            for waiting in self.heads(line):
                if is_long and not self._fits_with_headroom(line.book, waiting, place, sight, slack):
                    continue
                if self.fits(waiting, place, sight):
                    yield waiting, place

    # Rooms, in sight of a moment

    def open_places(self, sight: Sight) -> list[Place]:
        """With room for anybody, and not kept."""
        kept = sight.kept.worker_id if sight.kept is not None else None
        return [
            place
            for place in self.oracle.places.values()
            if place.spec.worker_id != kept and self.has_room(place, sight)
        ]

    def heads(self, line: Line) -> list[Waiting]:
        heads = line.queue[: self.oracle.config.requests_considered_max]
        return heads[:1] if heads and heads[0].passed >= self.oracle.config.overtakes_max else heads

    def fits(self, waiting: Waiting, place: Place, sight: Sight) -> bool:
        """Room for it, were its tenant below its share."""
        if not could_run(waiting, place.spec) or self.oracle.is_excluded(waiting, place):
            return False
        return place.kv_blocks + self._blocks(waiting, place, sight) <= place.spec.kv_blocks

    def _blocks(self, waiting: Waiting, place: Place, sight: Sight) -> int:
        tokens = waiting.request.prompt_tokens - sight.cached(waiting, place) + waiting.estimate
        return -(-tokens // place.spec.block_size_tokens)

    def has_room(self, place: Place, sight: Sight) -> bool:
        spec, oracle = place.spec, self.oracle
        if len(place.legs) >= spec.slots or place.kv_blocks >= spec.kv_blocks or not place.bit & oracle.members:
            return False
        if place.is_engine_full(oracle.config.engine_full_fraction):
            return False
        return sight.pending[spec.worker_id] < oracle.config.prefill_pending_max_tokens

    def is_declined(self, book: Book, waiting: Waiting, place: Place, sight: Sight) -> bool:
        """Does a worker that has no room for it hold so much more of it?"""
        oracle, here = self.oracle, sight.cached(waiting, place)
        for other in oracle.places.values():
            if other is place or not other.bit & oracle.members or not could_run(waiting, other.spec):
                continue
            if sight.cached(waiting, other) - here < oracle.config.cold_decline_tokens:
                continue
            if not (self.has_room(other, sight) and self._fits_with_headroom(book, waiting, other, sight, 1.0)):
                return True
        return False

    def _fits_with_headroom(self, book: Book, waiting: Waiting, place: Place, sight: Sight, slack: float) -> bool:
        if not self.fits(waiting, place, sight):
            return False
        in_headroom = self.oracle.in_headroom(place, self._blocks(waiting, place, sight))
        return not in_headroom or self.oracle.below_share(book, slack)

    def _waits(self, book: Book, waiting: Waiting, place: Place, sight: Sight) -> bool:
        """Is it declined, and not known to have waited as long as it may?"""
        if not self.is_declined(book, waiting, place, sight):
            return False
        since_ns = waiting.waits_since_ns
        longest_ns = max(waiting.waits_ns_max, self.oracle.idleness.longest_wait_ns(waiting, place))
        return since_ns is None or self.oracle.now_ns - since_ns < longest_ns

    # Rooms that are left idle

    def check(self, sight: Sight) -> None:
        """P6 past those that are held up."""
        places = self.open_places(sight)
        if not places:
            return
        self._check_all(sight)
        firsts = [self.first(book_of_band) for book_of_band in self._first_books()]
        if any(self._is_surely_held_up(line, sight) for line in firsts):
            self._check_beside(places, sight)

    def _check_all(self, sight: Sight) -> None:
        """Where nobody waits, for a warmer worker or for more than headroom, but for long: nobody of A has
        anything that can be dispatched."""
        lines = [
            line
            for book in self.oracle.books.values()
            if book.node.in_a
            for line in book.lines.values()
            if line.node.in_a
        ]
        if len(lines) > HELD_UP_MAX:
            return
        found: list[tuple[Waiting, Place]] = []
        for line in lines:
            fitting = list(self._fitting(line, sight, 1.0 - SLACK))
            ready = [
                each
                for each in fitting
                if self._fits_with_headroom(line.book, *each, sight, 1.0 - SLACK)
                and not self.is_declined(line.book, *each, sight)
            ]
            if fitting and not ready and (line.book.spec.tenant_id, line.name) not in sight.wait_long:
                return
            found += ready
        for waiting, place in found:
            what = f"{waiting.request.request_id} of {waiting.request.tenant_id} fits, and nobody waits"
            demand(False, "P6", "{} is idle, but {}", place.spec.worker_id, what)

    def _check_beside(self, places: list[Place], sight: Sight) -> None:
        """Where a band's most-behind is held up, those inside the windows about the others may go on."""
        oracle = self.oracle
        for place in places:
            for line in self._beside(place, sight):
                for waiting in self.heads(line):
                    fits = self._fits_with_headroom(line.book, waiting, place, sight, 1.0 - SLACK)
                    if fits and not oracle.idleness.waits(line.book, waiting, place):
                        what = f"{waiting.request.request_id} of {line.book.spec.tenant_id}, not held up, fits"
                        demand(False, "P6", "{} is idle, but {}", place.spec.worker_id, what)

    def _first_books(self) -> list[Book]:
        """The most-behind tenant of each band in A."""
        found = []
        for band in self.oracle.bands.values():
            tenants = [(node.v, node.key) for node in band.tenants.nodes if node.in_a]
            if tenants:
                found.append(self.oracle.books[TenantId(min(tenants)[1])])
        return found

    def first(self, book: Book) -> Line:
        """The most-behind user of a tenant."""
        return book.lines[min((node.v, node.key) for node in book.users.nodes if node.in_a)[1]]

    def _is_surely_held_up(self, line: Line, sight: Sight) -> bool:
        """Held up whatever the scheduler believes of its waits: it fits nowhere."""
        return next(self._fitting(line, sight, 1.0 + SLACK), None) is None

    def _beside(self, place: Place, sight: Sight) -> list[Line]:
        """At each level the first of those not surely held up, inside the window about the least of them."""
        oracle, config, bit = self.oracle, self.oracle.config, place.bit
        found: list[Line] = []
        bands_max = tenants_max = float("inf")
        for band_v, band_name in sorted((n.v, n.key) for n in oracle.pool.nodes if n.reach & bit):
            band = oracle.bands[band_name]
            tenants = sorted((n.v, n.key) for n in band.tenants.nodes if n.reach & bit)
            books = [(v, oracle.books[TenantId(key)]) for v, key in tenants]
            books = [(v, book) for v, book in books if not self._is_surely_all_held_up(book, place, sight)]
            if band_v > bands_max or not books:
                continue
            windows = oracle.windows(books[0][1])
            bands_max, tenants_max = min(bands_max, band_v + windows[0]), books[0][0] + windows[1]
            for v, book in books[: config.tenants_considered_max]:
                if v <= tenants_max:
                    found += self._users_beside(book, bit, oracle.windows(book)[2], sight)
        return found

    def _is_surely_all_held_up(self, book: Book, place: Place, sight: Sight) -> bool:
        return all(self._is_surely_held_up(line, sight) for line in self._standing_for(book, place))

    def _users_beside(self, book: Book, bit: int, window: float, sight: Sight) -> list[Line]:
        users = sorted((node.v, node.key) for node in book.users.nodes if node.in_a)[:HELD_UP_USERS_MAX]
        lines = [(v, book.lines[name]) for v, name in users if book.lines[name].node.reach & bit]
        lines = [(v, line) for v, line in lines if not self._is_surely_held_up(line, sight)]
        lines = lines[: self.oracle.config.users_considered_max]
        return [line for v, line in lines if v <= lines[0][0] + window]
