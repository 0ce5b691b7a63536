"""P3 and P8 in time: nobody waits longer than the pool says, where engines behave as they are known to.

A full pool whose tenants are all backlogged; each slot delivers cost at one pace, so R is what it is, and each leg
costs what it was charged. Before a newcomer arrives the status page says how long one could have to wait at worst;
and each time that somebody is served, how long whoever is in A could. Both are held against what happens.
"""

import heapq
import random
from dataclasses import dataclass

import pytest

from evenhand.core.cache_map import CacheMap
from evenhand.core.facts import Request, SchedulerConfig, TenantSpec, Usage, WorkerSpec
from evenhand.core.ids import Epoch, PoolId, RequestId, TenantId, TicketId, WorkerId
from evenhand.core.presence import Presence
from evenhand.core.scheduler import PoolScheduler
from evenhand.core.steps import Granted, Input, Settle, Submit, TenantChanged, WorkerJoined

POOL = PoolId("pool")
MS = 1_000_000
COST_PER_MS = 1.0
"""Of each slot."""

QUEUED = 10


@dataclass
class Wait:
    """Since when a tenant waits for its next grant, and how long it was told that it could be."""

    since_ns: int
    told_ms: float


class Pool:
    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        bands = (("high", 4.0), ("low", 1.0)) if rng.random() < 0.5 else (("high", 1.0),)
        self.config = SchedulerConfig(
            POOL,
            window_delay_ms=rng.choice([0.0, 200.0, 750.0]),
            cold_wait_factor=0.0,
            bands=bands,
            worker_stale_after_ms=1 << 30,
            worker_lost_after_ms=1 << 31,
            ticket_ttl_ms=1 << 30,
            headroom_divisor=rng.choice([8, 2]),
            prefill_pending_max_tokens=1 << 40,
            prefill_rate_default_tokens_per_s=1_000.0 * COST_PER_MS,
            output_token_default_ms=2.0 / COST_PER_MS,
            cost_rate_default_per_s=1_000.0 * COST_PER_MS,
        )
        self.scheduler = PoolScheduler(self.config, Presence(CacheMap()))
        self.now_ns = self.count = 0
        self.ends: list[tuple[int, int, TicketId, Usage]] = []
        self.waits: dict[TenantId, Wait] = {}
        self.queued: dict[TenantId, int] = {}
        self.parts: list[float] = []
        """Each wait, as part of what was told."""
        for index in range(rng.randrange(1, 4)):
            worker_id = WorkerId(f"w{index}")
            spec = WorkerSpec(worker_id, POOL, "http://w", Epoch(1), rng.choice([1, 2, 4, 8]), 1 << 20, 16)
            self.step(WorkerJoined(spec))
        for index in range(rng.randrange(2, 6)):
            self.add(TenantId(f"t{index}"))

    def add(self, tenant_id: TenantId) -> None:
        band = self.rng.choice(self.config.bands)[0]
        self.step(TenantChanged(TenantSpec(tenant_id, self.rng.choice([0.5, 1.0, 3.0]), band=band)))
        self.queued[tenant_id] = 0

    def run(self, until_ns: int) -> None:
        """All that are known ask without end."""
        while self.now_ns < until_ns:
            for tenant_id in self.queued:
                self.fill(tenant_id)
            self.now_ns, _, ticket_id, usage = heapq.heappop(self.ends)
            self.step(Settle(ticket_id, usage))

    def fill(self, tenant_id: TenantId) -> None:
        rng = self.rng
        while self.queued[tenant_id] < QUEUED:
            self.count += 1
            self.queued[tenant_id] += 1
            output = rng.choice([1, 10, 50])
            request = Request(RequestId(f"r{self.count}"), tenant_id, (), rng.randrange(20, 400), output, output)
            self.step(Submit(request))

    def step(self, input: Input) -> None:
        granted = [e.ticket for e in self.scheduler.step(input, self.now_ns) if isinstance(e, Granted)]
        told_ms = self.scheduler.status(self.now_ns).wait_max_ms if granted else 0.0
        for ticket in granted:
            self.queued[ticket.tenant_id] -= 1
            end_ns = self.now_ns + round(ticket.charge / COST_PER_MS) * MS
            usage = Usage(ticket.prompt_tokens, 0, ticket.output_tokens_max)
            heapq.heappush(self.ends, (end_ns, self.count, ticket.ticket_id, usage))
            before = self.waits.get(ticket.tenant_id)
            if before is not None and before.told_ms > 0.0:
                self.parts.append((self.now_ns - before.since_ns) / MS / before.told_ms)
            self.waits[ticket.tenant_id] = Wait(self.now_ns, told_ms)

    def newcomer(self, tenant_id: TenantId) -> float:
        """Wait of a tenant that nobody knew, as part of what a newcomer was told."""
        self.add(tenant_id)
        told_ms, since_ns = self.scheduler.status(self.now_ns).newcomer_wait_max_ms, self.now_ns
        self.fill(tenant_id)
        while tenant_id not in self.waits:
            self.run(self.now_ns + 1)
        return (self.waits[tenant_id].since_ns - since_ns) / MS / told_ms


WARM_UP_S = 20


@pytest.mark.parametrize("seed", range(30))
def test_nobody_waits_longer_than_was_told(seed: int) -> None:
    pool = Pool(seed)
    pool.run(WARM_UP_S * 1_000 * MS)
    pool.parts.clear()
    pool.run((WARM_UP_S + 20) * 1_000 * MS)
    in_a = max(pool.parts)
    newcomers = []
    for index in range(5):
        newcomers.append(pool.newcomer(TenantId(f"n{index}")))
        pool.run(pool.now_ns + 3_000 * MS)
    print(f"seed {seed}: {in_a:.2f} of what was told in A, {max(newcomers):.2f} as a newcomer")
    assert in_a <= 1.0
    assert max(newcomers) <= 1.0
