"""More tenants than K, each with a prefix of its own: the sticky set keeps them where they are warm.

Without it only the K most behind are looked at, and whoever they are goes where a place is free; so every prefix
is computed everywhere, again and again, and the pool gets half as much done.
"""

import heapq

import pytest
from tests.properties.faults import BY_NAME

from evenhand.core.cache_map import CacheMap
from evenhand.core.facts import Request, SchedulerConfig, TenantSpec, Usage, WorkerSpec
from evenhand.core.ids import Epoch, PoolId, RequestId, TenantId, TicketId, WorkerId
from evenhand.core.presence import Presence
from evenhand.core.scheduler import PoolScheduler
from evenhand.core.steps import Effect, Granted, Settle, Submit, TenantChanged, WorkerJoined

POOL = PoolId("pool")
BLOCK = 16
BLOCKS = 64
TENANTS = 12
WORKERS = 4
MS = 1_000_000


class Loop:
    """Every tenant has two requests open at all times; a leg takes a time by its uncached tokens."""

    def __init__(self) -> None:
        config = SchedulerConfig(
            POOL,
            window_fixed=8_000.0,
            tenants_considered_max=2,
            sticky_tenants_max=16,
            cold_wait_factor=0.0,
            worker_stale_after_ms=1 << 30,
            worker_lost_after_ms=1 << 31,
        )
        self.scheduler = PoolScheduler(config, Presence(CacheMap()))
        self.now_ns = self.count = self.served = 0
        self.ends: list[tuple[int, int, TicketId, Usage, int]] = []
        for index in range(WORKERS):
            spec = WorkerSpec(
                WorkerId(f"w{index}"), POOL, "http://w", Epoch(1), 2, 5 * BLOCKS, BLOCK, sends_events=False
            )
            self.scheduler.step(WorkerJoined(spec), 0)
        for index in range(TENANTS):
            self.scheduler.step(TenantChanged(TenantSpec(TenantId(f"t{index:02}"))), 0)
        for index in range(TENANTS):
            for _ in range(2):
                self._take(self._submit(index))

    def served_in(self, ms: int) -> int:
        """Requests that ended in so much time, after as much to warm up."""
        for _ in range(2):
            self.served, until_ns = 0, self.now_ns + ms * MS
            while self.ends[0][0] <= until_ns:
                self.now_ns, _, ticket_id, usage, index = heapq.heappop(self.ends)
                self.served += 1
                self._take(self.scheduler.step(Settle(ticket_id, usage), self.now_ns))
                self._take(self._submit(index))
        return self.served

    def _submit(self, index: int) -> tuple[Effect, ...]:
        self.count += 1
        keys = tuple(range(index * 1_000, index * 1_000 + BLOCKS))
        request = Request(RequestId(f"r{self.count}"), TenantId(f"t{index:02}"), keys, BLOCKS * BLOCK + 1, 16, 16)
        return self.scheduler.step(Submit(request), self.now_ns)

    def _take(self, effects: tuple[Effect, ...]) -> None:
        for effect in effects:
            match effect:
                case Granted(ticket):
                    cached = ticket.predicted_cached_tokens
                    usage = Usage(ticket.prompt_tokens, cached, ticket.output_tokens_max)
                    leg_ms = 20 + (ticket.prompt_tokens - cached) // 8
                    index = int(ticket.tenant_id[1:])
                    end = (self.now_ns + leg_ms * MS, self.count, ticket.ticket_id, usage, index)
                    heapq.heappush(self.ends, end)
                case _:
                    pass


def test_more_tenants_than_k_keep_their_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    with_sticky_set = Loop().served_in(5_000)
    BY_NAME["first_k_only"].install(monkeypatch)
    first_k_only = Loop().served_in(5_000)
    print(f"served: {with_sticky_set} with the sticky set, {first_k_only} without")
    assert first_k_only <= 0.6 * with_sticky_set
