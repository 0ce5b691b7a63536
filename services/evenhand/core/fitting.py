"""What fits where: room for one request at one worker.

Room is slots, KV blocks and prefill; whether a worker has any is judged in ``rooms``. Here it is asked for one
request: its KV need at that worker, the headroom left to tenants below their share, and the workers that its
client (or a lost leg) has excluded, as long as there is another.

This module changes nothing.
"""

from collections.abc import Sequence

from evenhand.core.estimator import NS_PER_MS, NS_PER_S
from evenhand.core.facts import SchedulerConfig
from evenhand.core.fair_tree import FairTree
from evenhand.core.outstanding import Outstanding
from evenhand.core.queued import Queued
from evenhand.core.rooms import Rooms
from evenhand.core.tenant import Tenant
from evenhand.core.worker import Worker


class Fitting:
    """Answers for the workers that are members now."""

    def __init__(self, config: SchedulerConfig, fair: FairTree, rooms: Rooms, outstanding: Outstanding) -> None:
        self._fair = fair
        self._rooms = rooms
        self._outstanding = outstanding
        self._headroom_divisor = config.headroom_divisor
        self._cold_wait_factor = config.cold_wait_factor
        self._cold_wait_ns_max = config.cold_wait_ms_max * NS_PER_MS
        self._backlog_factor = config.cold_wait_backlog_factor
        self._backlog_ns = 0

    def backlog(self, backlog_ns: int) -> None:
        """Told before each look at what may run: how long the pool works on what waits."""
        self._backlog_ns = backlog_ns

    def fits(self, tenant: Tenant, queued: Queued, worker: Worker, cached_tokens: int) -> bool:
        """Room for this very request at a worker that has room: KV, headroom, exclusion."""
        if not self.fits_but_headroom(queued, worker, cached_tokens):
            return False
        return self.kv_blocks(queued, worker, cached_tokens) <= self.blocks_allowed(tenant, worker)

    def kv_blocks(self, queued: Queued, worker: Worker, cached_tokens: int) -> int:
        """KV blocks reserved for a request at a worker: its uncached prompt and its estimated output."""
        return worker.blocks_for(queued.prompt_tokens - cached_tokens + queued.output_tokens_estimated)

    def fits_but_headroom(self, queued: Queued, worker: Worker, cached_tokens: int) -> bool:
        """As ``fits``, were the tenant below its share."""
        if queued.tokens_total > worker.capacity_tokens:
            return False
        blocks = self.kv_blocks(queued, worker, cached_tokens)
        if worker.kv_reserved_blocks + blocks > worker.spec.kv_blocks:
            return False
        return not (queued.excluded and self.is_excluded(queued, worker))

    @property
    def version(self) -> int:
        """Grows whenever ``is_excluded`` may answer differently."""
        return self._fair.members_version + self._rooms.stale_changes

    def is_excluded(self, queued: Queued, worker: Worker) -> bool:
        """Excluded by name, while another worker could take it some day: asked once for all of a ``version``."""
        if worker.spec.worker_id not in queued.excluded:
            return False
        version = self.version
        if queued.has_others_version != version:
            queued.has_others_version = version
            queued.has_others = any(
                worker_id not in queued.excluded
                and not other.stale
                and queued.tokens_total <= other.capacity_tokens
                for worker_id, other in self._fair.members.items()
            )
        return queued.has_others

    def warmer_without_room(
        self, tenant: Tenant, queued: Queued, worker: Worker, cached_tokens: int, tokens_min: int
    ) -> bool:
        """A worker that may run this, but has no room for it now, holds at least so many more of its tokens."""
        if queued.cached_best - cached_tokens < tokens_min:
            return False
        for worker_id, tokens in queued.cached.items():
            if tokens - cached_tokens < tokens_min:
                continue
            other = self._fair.members.get(worker_id)
            if other is None or other is worker or other.stale or queued.tokens_total > other.capacity_tokens:
                continue
            if queued.excluded and self.is_excluded(queued, other):
                continue
            if other.closed is not None or not self.fits(tenant, queued, other, tokens):
                return True
        return False

    def cold_wait_ns(self, queued: Queued, cached_tokens: int) -> int:
        """How long a request waits for a warmer worker rather than run where so many of its tokens are cached.

        Some times what the warmest one spares it: as long again as the tokens it lacks take to compute there. And
        hardly longer than the pool works on its backlog: a wait spares work, and where hardly anything else waits,
        there is nobody whom that would serve.
        """
        tokens, rate = cached_tokens, 0.0
        for worker_id, held_tokens in queued.cached.items():
            other = self._fair.members.get(worker_id)
            if other is None or other.stale or held_tokens < tokens:
                continue
            if held_tokens > tokens:
                tokens, rate = held_tokens, other.prefill_rate_tokens_per_s
            elif rate:
                rate = max(rate, other.prefill_rate_tokens_per_s)
        if not rate:
            return 0
        wait_ns = self._cold_wait_factor * (tokens - cached_tokens) / rate * NS_PER_S
        if self._backlog_factor > 0.0:
            wait_ns = min(wait_ns, self._backlog_factor * self._backlog_ns)
        return round(min(wait_ns, self._cold_wait_ns_max))

    def warmer_for_each(self, heads: Sequence[Queued], worker: Worker, tokens_min: int) -> tuple[Worker, ...]:
        """For each of some requests a worker as in ``warmer_without_room`` that is closed; empty: not all have."""
        found: list[Worker] = []
        for queued in heads:
            tokens_here = queued.cached.get(worker.spec.worker_id, 0)
            for worker_id, tokens in queued.cached.items():
                other = self._fair.members.get(worker_id)
                if (
                    other is not None
                    and other.closed is not None
                    and not other.stale
                    and tokens - tokens_here >= tokens_min
                    and queued.tokens_total <= other.capacity_tokens
                    and not queued.excluded
                ):
                    found.append(other)
                    break
            else:
                return ()
        return tuple(found)

    def blocks_allowed(self, tenant: Tenant, worker: Worker) -> int:
        """KV blocks a tenant may take at a worker with a free slot; 0: only headroom is left, and not for it."""
        if self._outstanding.below_share(tenant):
            return self.blocks_free(worker)
        return self.blocks_common(worker)

    def is_below_share(self, tenant: Tenant) -> bool:
        """May the tenant use headroom?"""
        return self._outstanding.below_share(tenant)

    def blocks_free(self, worker: Worker) -> int:
        """KV blocks that are not reserved."""
        return worker.spec.kv_blocks - worker.kv_reserved_blocks

    def blocks_common(self, worker: Worker) -> int:
        """KV blocks that any tenant may take; 0 where only headroom is left."""
        slots, kv_blocks, divisor = worker.spec.slots, worker.spec.kv_blocks, self._headroom_divisor
        if worker.slots_used >= slots - slots // divisor:
            return 0
        return kv_blocks - worker.kv_reserved_blocks - kv_blocks // divisor

    def could_take(self, queued: Queued, worker: Worker) -> bool:
        """Could the worker take it as soon as it has room enough?"""
        return (
            worker.is_member
            and not worker.stale
            and queued.tokens_total <= worker.capacity_tokens
            and not (queued.excluded and self.is_excluded(queued, worker))
        )

    def predicted_free_ns(self, queued: Queued, worker: Worker, now_ns: int) -> int:
        """When enough of a worker's tickets have ended, as predicted, for this request."""
        blocks = self.kv_blocks(queued, worker, queued.cached.get(worker.spec.worker_id, 0))
        blocks_free = worker.spec.kv_blocks - worker.kv_reserved_blocks
        slots_free = worker.spec.slots - worker.slots_used
        free_ns = now_ns
        tickets = worker.tickets.values()
        ends = sorted((worker.predicted_end_ns(ticket, now_ns), ticket.kv_blocks) for ticket in tickets)
        for end_ns, kv_blocks in ends:
            if blocks_free >= blocks and slots_free >= 1:
                break
            blocks_free += kv_blocks
            slots_free += 1
            free_ns = end_ns
        return free_ns
