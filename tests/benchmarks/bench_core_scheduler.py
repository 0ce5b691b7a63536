"""Core time of one Submit + Settle cycle, without any I/O.

Input: a cache map of 1 M blocks over the workers; 100 tenants that always have a backlog of 20 requests; prompts
of 64 keys, of which two thirds begin with a prefix that some worker holds; every worker full, so that each settle
frees one slot and the decision looks at K tenants · H requests. A worker's events tell of a prompt's blocks 20
cycles after its dispatch: one batch a cycle, folded outside the measured time; the scheduler's part of it is
measured apart.

    python tests/benchmarks/bench_core_scheduler.py [--workers 4 16 64] [--cycles 5000] [--profile]
"""

import argparse
import cProfile
import gc
import pstats
import random
import statistics
import time
from collections import deque

from evenhand.core.cache_map import CacheMap
from evenhand.core.facts import Request, SchedulerConfig, TenantSpec, Ticket, Usage, WorkerLoad, WorkerSpec
from evenhand.core.fold import fold
from evenhand.core.ids import Epoch, PoolId, RequestId, Seq, TenantId, WorkerId
from evenhand.core.kv import KvBatch, Stored
from evenhand.core.presence import Presence
from evenhand.core.scheduler import PoolScheduler
from evenhand.core.steps import Granted, MapChanged, Settle, Submit, TenantChanged, WorkerHeard, WorkerJoined

POOL = PoolId("pool")
BLOCK = 16
KEYS = 64
TENANTS = 100
BACKLOG = 20
MAP_BLOCKS = 1_000_000
STEP_NS = 500_000
AIM_US = 100.0


class Load:
    """A pool that is kept full."""

    def __init__(self, workers: int, seed: int, slots: int) -> None:
        self.rng = random.Random(seed)
        self.map = CacheMap()
        self.presence = Presence(self.map)
        self.scheduler = PoolScheduler(SchedulerConfig(POOL, prefill_pending_max_tokens=1 << 30), self.presence)
        self.now_ns = 0
        self.workers = [WorkerId(f"w{i:02}") for i in range(workers)]
        self.seqs = dict.fromkeys(self.workers, 0)
        self.running: deque[Ticket] = deque()
        self.count = 0
        self.submit_ns: list[int] = []
        self.settle_ns: list[int] = []
        self.map_ns: list[int] = []
        self.computing: deque[tuple[WorkerId, tuple[int, ...]]] = deque()
        self.keys: dict[RequestId, tuple[int, ...]] = {}
        self.prefixes: list[tuple[int, ...]] = []
        for tenant in range(TENANTS):
            self.scheduler.step(TenantChanged(TenantSpec(TenantId(f"t{tenant:02}"))), 0)
        for worker_id in self.workers:
            spec = WorkerSpec(worker_id, POOL, "http://w", Epoch(1), slots, 200_000, BLOCK)
            self.scheduler.step(WorkerJoined(spec), 0)
            for _ in range(MAP_BLOCKS // workers // KEYS):
                prefix = tuple(self.rng.getrandbits(64) for _ in range(KEYS))
                self.store(worker_id, prefix)
                self.prefixes.append(prefix)
        for tenant in range(TENANTS):
            for _ in range(BACKLOG):
                self.submit(tenant)

    def store(self, worker_id: WorkerId, keys: tuple[int, ...]) -> None:
        self.seqs[worker_id] += 1
        fold(self.map, KvBatch(worker_id, Epoch(1), Seq(self.seqs[worker_id]), (Stored(keys),)))
        began = time.perf_counter_ns()
        self.scheduler.step(MapChanged(worker_id), self.now_ns)
        self.map_ns.append(time.perf_counter_ns() - began)

    def submit(self, tenant: int) -> None:
        self.count += 1
        keys = tuple(self.rng.getrandbits(64) for _ in range(KEYS))
        if self.rng.random() < 0.67:
            shared = self.rng.randrange(8, KEYS)
            keys = self.rng.choice(self.prefixes)[:shared] + keys[shared:]
        request = Request(
            RequestId(f"r{self.count}"), TenantId(f"t{tenant:02}"), keys, KEYS * BLOCK + 5, 128, size_bytes=600
        )
        self.keys[request.request_id] = keys
        began = time.perf_counter_ns()
        effects = self.scheduler.step(Submit(request), self.now_ns)
        self.submit_ns.append(time.perf_counter_ns() - began)
        for effect in effects:
            if isinstance(effect, Granted):
                self.granted(effect.ticket)

    def granted(self, ticket: Ticket) -> None:
        self.running.append(ticket)
        self.computing.append((ticket.worker_id, self.keys.pop(ticket.request_id)))

    def cycle(self) -> None:
        self.now_ns += STEP_NS
        self.running.rotate(-self.rng.randrange(8))
        ticket = self.running.popleft()
        usage = Usage(ticket.prompt_tokens, ticket.predicted_cached_tokens, self.rng.randrange(1, 128))
        began = time.perf_counter_ns()
        effects = self.scheduler.step(Settle(ticket.ticket_id, usage), self.now_ns)
        self.settle_ns.append(time.perf_counter_ns() - began)
        for effect in effects:
            if isinstance(effect, Granted):
                self.granted(effect.ticket)
                self.submit(int(effect.ticket.tenant_id[1:]))
        if len(self.computing) > 20:
            self.store(*self.computing.popleft())
        if self.count % 500 == 0:
            load = WorkerLoad(1, 0, 0.5, self.now_ns)
            for worker_id in self.workers:
                self.scheduler.step(WorkerHeard(worker_id, load), self.now_ns)


def measure(workers: int, cycles: int, seed: int, slots: int, profile: bool) -> float:
    """Microseconds of core time a cycle."""
    load = Load(workers, seed, slots)
    for _ in range(500):
        load.cycle()
    for times in (load.submit_ns, load.settle_ns, load.map_ns):
        times.clear()
    gc.collect()
    gc.freeze()
    profiler = cProfile.Profile()
    if profile:
        profiler.enable()
    for _ in range(cycles):
        load.cycle()
    if profile:
        profiler.disable()
        pstats.Stats(profiler).sort_stats("cumulative").print_stats(45)
    gc.unfreeze()
    columns = [column for times in (load.submit_ns, load.settle_ns, load.map_ns) for column in figures(times)]
    per_cycle_us = statistics.median(load.submit_ns) / 1_000 + statistics.median(load.settle_ns) / 1_000
    print(f"{workers:>8} {per_cycle_us:>8.1f} " + " ".join(f"{column:>8.1f}" for column in columns))
    return per_cycle_us


def figures(times: list[int]) -> tuple[float, float, float]:
    """Median, mean and 99th percentile in microseconds."""
    ordered = sorted(times)
    return (
        statistics.median(ordered) / 1_000,
        statistics.fmean(ordered) / 1_000,
        ordered[int(len(ordered) * 0.99)] / 1_000,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--workers", type=int, nargs="+", default=[4, 16, 64])
    parser.add_argument("--cycles", type=int, default=5_000)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    print(f"seed {options.seed}, {TENANTS} tenants backlogged by {BACKLOG}, {KEYS} keys, {MAP_BLOCKS:,} blocks")
    print("µs; a cycle is the medians of submit and settle, so that other processes of the machine count little")
    print(f"{'workers':>8} {'cycle':>8} {'submit: p50, mean, p99':>26} {'settle':>26} {'map changed':>26}")
    worst = max(
        measure(workers, options.cycles, options.seed, options.slots, options.profile)
        for workers in options.workers
    )
    print(f"aim: {AIM_US} µs a cycle; {'met' if worst <= AIM_US else 'missed'}")


if __name__ == "__main__":
    main()
