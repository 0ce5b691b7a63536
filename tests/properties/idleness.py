"""P6 by brute force: a worker with room is idle only if nobody of C_w fits there, or it is kept for the most-behind.

Nothing is remembered from step to step: who is looked at, in which order, and what fits is worked out anew from the
oracle's book. Of the scheduler it takes the kept worker and the prefill that it believes pending.
"""

from typing import TYPE_CHECKING

from tests.properties.clock_book import SLACK, demand

from evenhand.core.facts import WorkerSpec

if TYPE_CHECKING:
    from tests.properties.fairness_oracle import Book, Oracle, Place, Waiting


class Idleness:
    def __init__(self, oracle: "Oracle") -> None:
        self.oracle = oracle

    def check(self, now_ns: int) -> None:
        """After a step in which the scheduler has looked for somebody to dispatch."""
        oracle = self.oracle
        if not any([book.node.in_a for book in oracle.books.values()]):
            return
        kept = oracle.scheduler.kept
        open_places = [place for place in oracle.places.values() if self._has_room(place, now_ns)]
        if not open_places:
            return
        window = oracle.window()
        for place in open_places:
            self._check_place(place, window, kept)
        if kept is not None:
            first = min([(b.node.v, i) for i, b in oracle.books.items() if b.node.in_a])
            demand(kept[0] == first[1], "P6", f"{kept[1]} is kept for {kept[0]}, the most-behind is {first[1]}")

    def _has_room(self, place: "Place", now_ns: int) -> bool:
        spec, oracle = place.spec, self.oracle
        if len(place.legs) >= spec.slots or place.kv_blocks >= spec.kv_blocks:
            return False
        if not place.bit & oracle.tenants.members:
            return False
        worker = oracle.core.rooms.workers[spec.worker_id]
        return worker.prefill_pending_tokens(now_ns) < oracle.config.prefill_pending_max_tokens

    def _check_place(self, place: "Place", window: float, kept: tuple[str, str] | None) -> None:
        oracle, config = self.oracle, self.oracle.config
        order = oracle.in_order(place.bit)
        if not order:
            return
        kept_for = kept[0] if kept is not None and kept[1] == place.spec.worker_id else None
        v_max = order[0].node.v + window
        inside = [book for book in order if book.node.v <= v_max]
        considered = inside[: config.tenants_considered_max]
        if len(inside) > len(considered):
            sticky = place.served[-config.sticky_tenants_max :]
            considered += [book for book in inside[len(considered) :] if book.spec.tenant_id in sticky]
        for book in considered:
            if kept_for is not None and kept_for != book.spec.tenant_id:
                continue
            heads = book.queue[: config.requests_considered_max]
            if heads[0].passed >= config.overtakes_max:
                heads = heads[:1]
            for waiting in heads:
                if self._fits(book, waiting, place):
                    what = f"{waiting.request.request_id} of {book.spec.tenant_id} fits"
                    demand(False, "P6", f"{place.spec.worker_id} is idle, but {what}")

    def _fits(self, book: "Book", waiting: "Waiting", place: "Place") -> bool:
        oracle, spec, request = self.oracle, place.spec, waiting.request
        if not could_run(waiting, place.spec):
            return False
        if spec.worker_id in waiting.excluded and any(
            other.bit & oracle.tenants.members
            and other.spec.worker_id not in waiting.excluded
            and could_run(waiting, other.spec)
            for other in oracle.places.values()
        ):
            return False
        if not self._room_for(book, waiting, place, 0):
            cached_blocks = 0
            for match in oracle.presence.match(request.block_keys):
                if match.worker_id == spec.worker_id:
                    cached_blocks = min(match.blocks, (request.prompt_tokens - 1) // spec.block_size_tokens)
            return cached_blocks > 0 and self._room_for(book, waiting, place, cached_blocks)
        return True

    def _room_for(self, book: "Book", waiting: "Waiting", place: "Place", cached_blocks: int) -> bool:
        spec = place.spec
        tokens = waiting.request.prompt_tokens - cached_blocks * spec.block_size_tokens + waiting.estimate
        blocks = -(-tokens // spec.block_size_tokens)
        if place.kv_blocks + blocks > spec.kv_blocks:
            return False
        return not self.oracle.in_headroom(place, blocks) or self.oracle.below_share(book, 1.0 - SLACK)


def could_run(waiting: "Waiting", spec: WorkerSpec) -> bool:
    """Could the worker ever run it, empty as it may be?"""
    tokens = waiting.tokens_total
    longest = spec.model_length_max_tokens or tokens
    return tokens <= min(longest, spec.kv_blocks * spec.block_size_tokens)
