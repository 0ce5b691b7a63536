"""Warm start of the scheduler: from the stored map to a process that may grant.

    python tests/benchmarks/bench_warm_start.py [--blocks 1000000] [--workers 64] [--rounds 3]

Input: a map of ``--blocks`` distinct blocks spread evenly over ``--workers`` workers, stored in an embedded
Postgres (one packed snapshot a worker, and the last tenth as packed deltas), and an embedded broker. Measured: the
daemon in this process (load of the map, then until it owns the pool), and the whole ``evenhand scheduler`` process
from its exec to the first answer ``owner`` of its status page, imports included. CPU seconds beside it tell what a
busy machine adds.
"""

import argparse
import asyncio
import gc
import json
import os
import platform
import random
import re
import sys
import tempfile
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from evenhand.core.block_key import KEY_SCHEME
from evenhand.core.facts import SchedulerConfig
from evenhand.core.ids import Epoch, PoolId, Seq, WorkerId
from evenhand.core.kv import Stored, WorkerAnnounced, WorkerPosition
from evenhand.kafka.config import KafkaConfig
from evenhand.local.broker import EmbeddedBroker
from evenhand.local.database import EmbeddedDatabase
from evenhand.ports import MapCommit, WorkerDelta
from evenhand.postgres.database import Database, DatabaseConfig
from evenhand.postgres.map_store import PostgresMapStore
from evenhand.postgres.migrate import migrate
from evenhand.scheduler.config import DaemonConfig
from evenhand.scheduler.daemon import SchedulerDaemon
from evenhand.scheduler.main import real_ports

POOL = PoolId("bench")
BLOCK_SIZE = 16
PARTITIONS = 1
SERVICES = Path(__file__).parents[2] / "services"
TARGET_S = 2.0
STATUS_POLL_S = 0.01


@dataclass(frozen=True)
class Round:
    """Seconds of one start."""

    load_s: float
    owner_s: float
    cpu_s: float
    process_s: float


async def fill(dsn: str, blocks: int, workers: int) -> None:
    """Store the map as the state service would."""
    chance = random.Random(1)
    async with await Database.open(DatabaseConfig(dsn, "bench")) as database:
        store = PostgresMapStore(database, PARTITIONS)
        for number in range(workers):
            keys = tuple(chance.getrandbits(64) for _ in range(blocks // workers))
            early = len(keys) * 9 // 10
            announced = WorkerAnnounced(
                worker_id=WorkerId(f"worker-{number:02}"),
                pool_id=POOL,
                epoch=Epoch(1),
                address=f"http://10.0.0.{number}:8000",
                model="bench",
                block_size_tokens=BLOCK_SIZE,
                key_scheme=KEY_SCHEME,
                kv_blocks=100_000,
                slots=16,
                seq=Seq(2),
            )
            for replaced, part in ((True, keys[:early]), (False, keys[early:])):
                position = WorkerPosition(Epoch(1), Seq(2), complete=True)
                delta = WorkerDelta(announced.worker_id, position, announced, replaced, (Stored(part),))
                await store.commit(MapCommit({}, {}, (delta,)))


async def in_process(dsn: str, bootstrap: str, folder: Path) -> tuple[float, float, float]:
    config = DaemonConfig(SchedulerConfig(POOL), folder / "secret", insecure_loopback=True, lease_ttl_ms=1_000)
    async with real_ports(KafkaConfig.embedded(bootstrap), dsn) as ports:
        began, cpu = time.perf_counter(), time.process_time()
        async with SchedulerDaemon(config, ports) as daemon:
            loaded = time.perf_counter() - began
            await daemon.wait_owner()
            owner, cpu = time.perf_counter() - began, time.process_time() - cpu
    gc.collect()
    return loaded, owner, cpu


async def as_process(dsn: str, bootstrap: str, folder: Path) -> float:
    began = time.perf_counter()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "evenhand.cli", "scheduler", "--pool", POOL, "--dsn", dsn, "--kafka", bootstrap),
        *("--kafka-profile", "embedded", "--secret-file", str(folder / "secret"), "--insecure-loopback"),
        *("--listen", "127.0.0.1:0", "--metrics-port", "0", "--log-level", "error", "--lease-ttl-ms", "1000"),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(SERVICES)},
    )
    assert process.stdout is not None
    found = re.search(r"pages on (\S+)", (await process.stdout.readline()).decode())
    assert found, "the scheduler did not start"
    while not await asyncio.to_thread(owns, found.group(1)):
        await asyncio.sleep(STATUS_POLL_S)
    seconds = time.perf_counter() - began
    process.terminate()
    await process.wait()
    return seconds


def owns(pages: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://{pages}/status", timeout=5) as answer:
            return bool(json.load(answer)["owner"])
    except urllib.error.URLError:
        return False


async def measure(dsn: str, blocks: int, workers: int, rounds: int) -> list[Round]:
    await migrate(dsn)
    await fill(dsn, blocks, workers)
    measured = []
    with tempfile.TemporaryDirectory() as folder:
        async with EmbeddedBroker() as broker:
            for _ in range(rounds):
                loaded, owner, cpu = await in_process(dsn, broker.bootstrap, Path(folder))
                await asyncio.sleep(1.5)  # whatever is left of the lease
                measured.append(Round(loaded, owner, cpu, await as_process(dsn, broker.bootstrap, Path(folder))))
                await asyncio.sleep(1.5)
    return measured


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--blocks", type=int, default=1_000_000)
    options.add_argument("--workers", type=int, default=64)
    options.add_argument("--rounds", type=int, default=3)
    arguments = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        database = EmbeddedDatabase(Path(folder) / "database", durable=False)
        database.start()
        try:
            rounds = asyncio.run(measure(database.dsn, arguments.blocks, arguments.workers, arguments.rounds))
        finally:
            database.stop()
    print(f"\n{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    print(f"{arguments.blocks:,} blocks on {arguments.workers} workers")
    print(f"{'round':>5}{'map loaded s':>14}{'owner s':>10}{'CPU s':>8}{'process s':>11}")
    for number, each in enumerate(rounds, 1):
        print(f"{number:>5}{each.load_s:>14.2f}{each.owner_s:>10.2f}{each.cpu_s:>8.2f}{each.process_s:>11.2f}")
    print(f"target: owner ≤ {TARGET_S:.0f} s")


if __name__ == "__main__":
    main()
