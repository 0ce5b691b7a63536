"""A pass that leaves out whom it knows to wait finds what a pass over everybody finds."""

import random
from collections import deque

import pytest

from evenhand.core import placement
from evenhand.core.cache_map import CacheMap
from evenhand.core.facts import Request, SchedulerConfig, TenantSpec, Ticket, Usage, WorkerSpec
from evenhand.core.fold import fold
from evenhand.core.ids import Epoch, PoolId, RequestId, Seq, TenantId, WorkerId
from evenhand.core.kv import KvBatch, Stored
from evenhand.core.presence import Presence
from evenhand.core.queued import BestHead
from evenhand.core.scheduler import PoolScheduler
from evenhand.core.steps import Effect, Granted, Input, Settle, Submit, TenantChanged, WorkerJoined
from evenhand.core.waiting import Waiting
from evenhand.core.worker import Worker

POOL = PoolId("pool")
STEP_NS = 2_000_000
BLOCK = 16
WORKERS, SLOTS, TENANTS, PREFIXES = 6, 8, 30, 12


class Everybody(Waiting):
    """Leaves out nobody."""

    __slots__ = ()

    def _is_waiting(self, head: BestHead) -> bool:
        return False

    def is_cold_only(self, worker: Worker, tight: bool) -> bool:
        return False


def run(seed: int, cycles: int) -> list[tuple[Effect, ...]]:
    """A pool under load whose prompts mostly begin with a prefix that one worker holds; all effects."""
    rng, cache_map = random.Random(seed), CacheMap()
    config = SchedulerConfig(POOL, prefill_pending_max_tokens=1 << 20, tenants_considered_max=8)
    scheduler = PoolScheduler(config, Presence(cache_map))
    told: list[tuple[Effect, ...]] = []
    running: deque[Ticket] = deque()

    def step(input: Input, now_ns: int) -> None:
        effects = scheduler.step(input, now_ns)
        told.append(effects)
        running.extend(effect.ticket for effect in effects if isinstance(effect, Granted))

    for tenant in range(TENANTS):
        step(TenantChanged(TenantSpec(TenantId(f"t{tenant}"), weight=1.0 + tenant % 3)), 0)
    prefixes: list[tuple[int, ...]] = []
    for number in range(WORKERS):
        worker_id = WorkerId(f"w{number}")
        step(WorkerJoined(WorkerSpec(worker_id, POOL, "http://w", Epoch(1), SLOTS, 4_000, BLOCK)), 0)
        for seq in range(PREFIXES):
            prefixes.append(tuple(rng.getrandbits(64) for _ in range(64)))
            fold(cache_map, KvBatch(worker_id, Epoch(1), Seq(seq + 1), (Stored(prefixes[-1]),)))
    for cycle in range(cycles):
        now_ns = (cycle + 1) * STEP_NS
        if len(running) > WORKERS * SLOTS // 2 or (running and rng.random() < 0.5):
            running.rotate(-rng.randrange(8))
            ticket = running.popleft()
            usage = Usage(ticket.prompt_tokens, ticket.predicted_cached_tokens, rng.randrange(1, 64))
            step(Settle(ticket.ticket_id, usage), now_ns)
        for _ in range(rng.randrange(3)):
            keys = tuple(rng.getrandbits(64) for _ in range(64))
            if rng.random() < 0.8:
                keys = rng.choice(prefixes)[: rng.randrange(32, 64)] + keys
            tenant_id = TenantId(f"t{rng.randrange(TENANTS)}")
            request_id = RequestId(f"r{cycle}.{len(told)}")
            step(Submit(Request(request_id, tenant_id, keys[:64], 64 * BLOCK + 5, 64)), now_ns)
    return told


@pytest.mark.parametrize("seed", range(6))
def test_a_pass_without_those_known_to_wait_finds_the_same(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    print(f"seed {seed}")
    found = run(seed, 400)
    assert sum(isinstance(effect, Granted) for effects in found for effect in effects) > 150
    monkeypatch.setattr(placement, "Waiting", Everybody)
    assert run(seed, 400) == found


def test_depth_is_a_workers_part_of_a_match() -> None:
    rng, cache_map = random.Random(5), CacheMap()
    keys = tuple(range(1, 17))
    for number in range(4):
        held = tuple(key for key in keys if rng.random() < 0.8)
        fold(cache_map, KvBatch(WorkerId(f"w{number}"), Epoch(1), Seq(1), (Stored(held),)))
    matched = {match.worker_id: match.blocks for match in cache_map.match(keys)}
    for number in range(5):
        worker_id = WorkerId(f"w{number}")
        assert cache_map.depth(worker_id, keys) == matched.get(worker_id, 0)
