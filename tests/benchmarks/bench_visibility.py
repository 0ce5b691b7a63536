"""How soon an engine's cache event is visible to a decision, on the embedded stack.

    python tests/benchmarks/bench_visibility.py [--engines 4] [--rate 50] [--seconds 20]

Input: engines whose event sockets publish ``--rate`` batches a second each, evenly spaced, through the simulated
engine's own publisher: each batch stores 1–4 fresh blocks under a random parent and removes as many old ones. The
rest is the real stack, every service a process: ZMQ → edge → embedded broker → scheduler.

Measured: the scheduler's own ``evenhand_scheduler_event_lag_seconds``, from the time stamp that the engine puts
into its batch to the moment the batch is folded into the map that decisions read. Both are the wall clock of this
one machine. Where an edge sends several engine batches together, the lag is that of the oldest. Percentiles are
interpolated within the histogram's buckets; the share within 50 ms is exact.
"""

import argparse
import asyncio
import os
import platform
import random
import tempfile
import time
from collections import deque
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp

from evenhand.engine.config import EngineConfig
from evenhand.engine.content import TokenContent
from evenhand.engine.events import GPU, BlockRemoved
from evenhand.engine.server import EngineServer
from evenhand.local.stack import Stack, StackConfig
from evenhand.local.stack_file import StackWorker
from evenhand.postgres.seed import SeedFile, SeedTenant

BLOCK_SIZE = 16
BLOCKS_HELD = 1_000
WARM_UP_SECONDS = 5.0
TARGET_MS = 50.0
METRIC = "evenhand_scheduler_event_lag_seconds_bucket"


class SyntheticEngine:
    """A simulated engine that serves nothing and publishes what it is told to."""

    def __init__(self, number: int, seed: int) -> None:
        config = EngineConfig(name=f"engine-{number}", port=0, kv_events_port=0, kv_replay_port=0)
        self.server = EngineServer(config)
        self._random = random.Random(f"{seed}/{number}")
        self._held: deque[int] = deque()
        self.batches = 0

    @property
    def worker(self) -> StackWorker:
        server = self.server
        return StackWorker(
            address=server.base_url,
            kv_events=server.kv_events_endpoint,
            replay=server.kv_replay_endpoint,
            worker_id=server.config.name,
        )

    def publish(self) -> None:
        """One batch."""
        count = self._random.randint(1, 4)
        tokens = self._random.choices(range(1, 30_000), k=count * BLOCK_SIZE)
        content = TokenContent(tokens, block_size=BLOCK_SIZE)
        names = [name for name in content.names(count) if isinstance(name, int)]
        old = [self._held.popleft() for _ in range(len(self._held) + count - BLOCKS_HELD)]
        removed = [BlockRemoved((name,), GPU, 0) for name in old]
        self._held.extend(names)
        self.server.publisher.publish((*removed, content.stored(0, count)))
        self.batches += 1

    async def run(self, per_second: float, offset_s: float) -> None:
        """Publish at the rate until cancelled."""
        began = time.monotonic() + offset_s
        for number in range(1_000_000_000):
            await asyncio.sleep(max(0.0, began + number / per_second - time.monotonic()))
            self.publish()


async def buckets(http: aiohttp.ClientSession, stack: Stack) -> dict[float, float]:
    """Cumulative counts by upper bound in seconds."""
    async with http.get(f"http://127.0.0.1:{stack.metrics_ports['scheduler']}/metrics") as response:
        page = await response.text()
    found = {}
    for line in page.splitlines():
        if line.startswith(METRIC):
            bound = line.partition('le="')[2].partition('"')[0]
            found[float(bound)] = float(line.rpartition(" ")[2])
    return dict(sorted(found.items()))


def percentile_ms(counts: dict[float, float], share: float) -> float:
    """Interpolated within its bucket; the last finite bound if it lies beyond."""
    wanted = share * max(counts.values())
    below_s, below = 0.0, 0.0
    for bound_s, count in counts.items():
        if count >= wanted:
            if bound_s == float("inf"):
                return below_s * 1_000
            part = (wanted - below) / (count - below) if count > below else 1.0
            return (below_s + part * (bound_s - below_s)) * 1_000
        below_s, below = bound_s, count
    return below_s * 1_000


async def measure(engines: int, rate: float, seconds: float, seed: int) -> tuple[dict[float, float], float]:
    """Histogram of one run, and the engine batches published a second."""
    async with AsyncExitStack() as exit_stack:
        folder = Path(exit_stack.enter_context(tempfile.TemporaryDirectory(prefix="evenhand-bench-")))
        fleet = [SyntheticEngine(number, seed) for number in range(engines)]
        for engine in fleet:
            await engine.server.start()
            exit_stack.push_async_callback(engine.server.stop)
        tenants = SeedFile(tenants=[SeedTenant(tenant_id="any")])
        config = StackConfig(folder, "bench", tenants, tuple(engine.worker for engine in fleet), durable=False)
        stack = await exit_stack.enter_async_context(Stack(config))
        http = await exit_stack.enter_async_context(aiohttp.ClientSession())
        publishing = [
            asyncio.create_task(engine.run(rate, number / (rate * engines))) for number, engine in enumerate(fleet)
        ]
        try:
            await asyncio.sleep(WARM_UP_SECONDS)
            before, published, began = await buckets(http, stack), sum(e.batches for e in fleet), time.monotonic()
            await asyncio.sleep(seconds)
            after = await buckets(http, stack)
            published = sum(engine.batches for engine in fleet) - published
            took_s = time.monotonic() - began
        finally:
            for task in publishing:
                task.cancel()
            await asyncio.gather(*publishing, return_exceptions=True)
    return {bound: after[bound] - before.get(bound, 0.0) for bound in after}, published / took_s


def report(counts: dict[float, float], per_second: float, arguments: argparse.Namespace) -> None:
    total = max(counts.values())
    within = counts[TARGET_MS / 1_000] / total
    p99 = percentile_ms(counts, 0.99)
    print(f"machine             {platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    print(f"input               {arguments.engines} engines, {per_second / arguments.engines:.1f} batches/s each")
    print(f"batches folded      {total:.0f} in {arguments.seconds:.0f} s")
    for share in (0.5, 0.9, 0.99, 0.999):
        print(f"p{share * 100:<5g}              {percentile_ms(counts, share):7.1f} ms")
    print(f"within {TARGET_MS:.0f} ms        {within:8.2%}")
    print(f"target              p99 ≤ {TARGET_MS:.0f} ms: {'met' if p99 <= TARGET_MS else 'MISSED'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--rate", type=float, default=50.0, help="batches a second of each engine")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    print(f"seed                {arguments.seed}")
    counts, per_second = asyncio.run(measure(arguments.engines, arguments.rate, arguments.seconds, arguments.seed))
    report(counts, per_second, arguments)


if __name__ == "__main__":
    main()
