"""P6 by brute force: a worker with room is idle only if nobody of C_w fits, or what does waits, bounded, for a
warmer worker, or it is kept. What is found past those that are held up is ``held_up``'s.

Who is looked at, in which order, and what fits is worked out anew from the oracle's book at each step; remembered
is only since when a request waits for a warmer worker. Of the scheduler it takes the kept worker, the prefill that
it believes pending, and the rates that it believes.
"""

from typing import TYPE_CHECKING

from tests.properties.broken import SLACK, demand
from tests.properties.clock_nodes import Node
from tests.properties.held_up import Sight
from tests.properties.tenant_book import Book, Line, Place, Waiting, could_run

from evenhand.core.ids import TenantId

if TYPE_CHECKING:
    from tests.properties.fairness_oracle import Oracle


class Idleness:
    def __init__(self, oracle: "Oracle") -> None:
        self.oracle = oracle

    def check(self, now_ns: int) -> None:
        """After a step in which the scheduler has looked for somebody to dispatch."""
        oracle = self.oracle
        if not any(band.node.in_a for band in oracle.bands.values()):
            return
        open_places = [place for place in oracle.places.values() if self._has_room(place, now_ns)]
        if not open_places:
            return
        sight = Sight(oracle, now_ns)
        kept_for = oracle.kept.looked(sight)
        for place in open_places:
            is_kept = sight.kept is not None and sight.kept.worker_id == place.spec.worker_id
            self._check_place(place, kept_for if is_kept else None, now_ns)
            if not is_kept:
                self._check_guarantees(place, now_ns)
        oracle.held_up.check(sight)

    def _has_room(self, place: Place, now_ns: int) -> bool:
        spec, oracle = place.spec, self.oracle
        if len(place.legs) >= spec.slots or place.kv_blocks >= spec.kv_blocks:
            return False
        if not place.bit & oracle.members:
            return False
        worker = oracle.core.rooms.workers[spec.worker_id]
        if place.is_engine_full(oracle.config.engine_full_fraction):
            return False
        return worker.prefill_pending_tokens(now_ns) < oracle.config.prefill_pending_max_tokens

    def _check_place(self, place: Place, kept_for: Line | None, now_ns: int) -> None:
        config = self.oracle.config
        for line in self._candidates(place):
            if kept_for is not None and kept_for is not line:
                continue
            heads = line.queue[: config.requests_considered_max]
            if heads[0].passed >= config.overtakes_max:
                heads = heads[:1]
            for waiting in heads:
                if self._fits(line.book, waiting, place) and not self._waits(line.book, waiting, place, now_ns):
                    what = f"{waiting.request.request_id} of {line.book.spec.tenant_id} fits"
                    demand(False, "P6", "{} is idle, but {}", place.spec.worker_id, what)

    def _check_guarantees(self, place: Place, now_ns: int) -> None:
        """None behind on its guarantee waits while something of it fits; of more than K that are, in its turn."""
        oracle = self.oracle
        due = [
            (book.guarantee.tag, tenant_id)
            for tenant_id, book in oracle.books.items()
            if book.node.in_a and book.spec.guaranteed_share and book.guarantee.is_due(oracle.work, -SLACK)
        ]
        if len(due) > oracle.config.tenants_considered_max:
            return  # Those that found nothing are asked in turn, K at a look.
        for _, tenant_id in sorted(due):
            book = oracle.books[tenant_id]
            if not book.node.reach & place.bit:
                continue
            users = sorted(behind(book.users.nodes, place.bit))
            v_max = users[0][0] + oracle.windows(book)[2]
            inside = [book.lines[name] for v, name, _ in users[: oracle.config.users_considered_max] if v <= v_max]
            for line in inside:
                heads = line.queue[: oracle.config.requests_considered_max]
                if heads[0].passed >= oracle.config.overtakes_max:
                    heads = heads[:1]
                for waiting in heads:
                    fits = self._fits(book, waiting, place, True)
                    if fits and not self._waits(book, waiting, place, now_ns):
                        what = f"{waiting.request.request_id} of {book.spec.tenant_id} is due and fits"
                        demand(False, "guarantee", "{} is idle, but {}", place.spec.worker_id, what)

    def _candidates(self, place: Place) -> list[Line]:
        """C_w: at each level the first inside the window, and the tenants served here last."""
        oracle, config, bit = self.oracle, self.oracle.config, place.bit
        found: list[Line] = []
        bands = sorted(behind(oracle.pool.nodes, bit))
        for band_v, band_name, _ in bands:
            band = oracle.bands[band_name]
            tenants = sorted(behind(band.tenants.nodes, bit))
            book = oracle.books[TenantId(tenants[0][1])]
            windows = oracle.windows(book)
            if band_v > bands[0][0] + windows[0]:
                break
            inside = [each for each in tenants if each[0] <= tenants[0][0] + windows[1]]
            sticky = place.served[-config.sticky_tenants_max :]
            for index, (_, tenant_id, _) in enumerate(inside):
                if index >= config.tenants_considered_max and tenant_id not in sticky:
                    continue
                book = oracle.books[TenantId(tenant_id)]
                users = sorted(behind(book.users.nodes, bit))
                v_max = users[0][0] + oracle.windows(book)[2]
                found += [book.lines[name] for v, name, _ in users[: config.users_considered_max] if v <= v_max]
        return found

    def _waits(self, book: Book, waiting: Waiting, place: Place, now_ns: int) -> bool:
        """Is it to be declined here, and not for longer than it may be?"""
        here, warm = self._warm(waiting, place)
        is_declined = any(
            tokens - here >= self.oracle.config.cold_decline_tokens
            and could_run(waiting, other.spec)
            and not (self._has_room(other, now_ns) and self._fits(book, waiting, other))
            for tokens, other in warm
        )
        if not is_declined:
            return False
        longest_ns = self.longest_wait_ns(waiting, place)
        if waiting.waits_since_ns is None:
            waiting.waits_since_ns = now_ns
        # Rates and the map change meanwhile; what it was once allowed it may take.
        waiting.waits_ns_max = max(waiting.waits_ns_max, round(longest_ns) + 1)
        return now_ns - waiting.waits_since_ns < waiting.waits_ns_max

    def _warm(self, waiting: Waiting, place: Place) -> tuple[int, list[tuple[int, Place]]]:
        """Usable cached tokens at a place, and at each other member that holds some."""
        oracle, here = self.oracle, 0
        warm: list[tuple[int, Place]] = []
        for match in oracle.presence.match(waiting.request.block_keys):
            other = oracle.places.get(match.worker_id)
            if other is None:
                continue
            size = other.spec.block_size_tokens
            tokens = min(match.blocks, (waiting.request.prompt_tokens - 1) // size) * size
            if other is place:
                here = tokens
            elif other.bit & oracle.members:
                warm.append((tokens, other))
        return here, warm

    def waits(self, book: Book, waiting: Waiting, place: Place) -> bool:
        return self._waits(book, waiting, place, self.oracle.now_ns)

    def longest_wait_ns(self, waiting: Waiting, place: Place) -> float:
        """Some times what the tokens that it lacks at a place take to compute, as far as may be waited at all."""
        config, workers = self.oracle.config, self.oracle.core.rooms.workers
        here, warm = self._warm(waiting, place)
        if not warm:
            return 0.0
        best, rate = max(
            (tokens, workers[other.spec.worker_id].prefill_rate_tokens_per_s) for tokens, other in warm
        )
        return min(config.cold_wait_factor * (best - here) / rate * 1e9, config.cold_wait_ms_max * 1e6)

    def _fits(self, book: Book, waiting: Waiting, place: Place, is_due: bool = False) -> bool:
        """Room for it; a tenant whose guarantee is due counts as below its share."""
        oracle, spec, request = self.oracle, place.spec, waiting.request
        if not could_run(waiting, place.spec):
            return False
        if oracle.is_excluded(waiting, place):
            return False
        if not self._room_for(book, waiting, place, 0, is_due):
            cached_blocks = 0
            for match in oracle.presence.match(request.block_keys):
                if match.worker_id == spec.worker_id:
                    cached_blocks = min(match.blocks, (request.prompt_tokens - 1) // spec.block_size_tokens)
            return cached_blocks > 0 and self._room_for(book, waiting, place, cached_blocks, is_due)
        return True

    def _room_for(self, book: Book, waiting: Waiting, place: Place, cached_blocks: int, is_due: bool) -> bool:
        spec = place.spec
        tokens = waiting.request.prompt_tokens - cached_blocks * spec.block_size_tokens + waiting.estimate
        blocks = -(-tokens // spec.block_size_tokens)
        if place.kv_blocks + blocks > spec.kv_blocks:
            return False
        return is_due or not self.oracle.in_headroom(place, blocks) or self.oracle.below_share(book, 1.0 - SLACK)


def behind(nodes: list[Node], worker: int = -1) -> list[tuple[float, str, Node]]:
    """Those of A, or those that reach a worker, as they are ordered; ids are unique among them."""
    return [(node.v, node.key, node) for node in nodes if (node.reach & worker if worker > 0 else node.in_a)]
