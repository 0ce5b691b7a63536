"""Kafka to Postgres, exactly once: block operations a second, and memory over a long run.

    python -m tests.benchmarks.bench_state                    1.5 million block operations, about a minute
    python -m tests.benchmarks.bench_state --operations 10000000

64 workers, batches as in the recorded engines (see ``tests.fixtures.state_load``; the table says what they came
to). The embedded broker, an embedded Postgres that syncs to disk, and the state service are their own processes.
Records are published ahead of the service, a backlog at a time, and the clock runs from the moment the service
may read a backlog until its last record is committed; publishing is not counted, because it shares the cores.
At the end the map in Postgres is compared with the load's own book, to the block.
"""

import argparse
import asyncio
import os
import platform
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from tests.fixtures.state_load import LoadRecord, StateLoad
from tests.fixtures.state_process import StateProcess, caught_up, held

from evenhand.kafka import KafkaConfig, KafkaLogWriter
from evenhand.local.broker import EmbeddedBroker
from evenhand.local.database import EmbeddedDatabase
from evenhand.ports import KV_TOPIC
from evenhand.postgres.database import Database, DatabaseConfig
from evenhand.postgres.map_store import PostgresMapStore
from evenhand.postgres.migrate import migrate
from evenhand.wire.partition import partition_of

TARGET_PER_SECOND = 100_000
PUBLISHED_AT_ONCE = 2_000
SECONDS_MAX = 600.0


@dataclass
class Figures:
    """What was measured, a backlog a row."""

    operations: int = 0
    records: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    """Of the service alone."""
    rows: list[tuple[int, float, float, float]] = field(default_factory=list)
    """Operations so far, rate of the backlog, resident MiB of the service, MiB of the database on disk."""


def resident_mib(pid: int) -> float:
    """Resident memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def cpu_seconds(pid: int) -> float:
    """Processor time a process has used: what a busy machine does not change."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def publish(writer: KafkaLogWriter, records: list[LoadRecord], ends: dict[int, int]) -> None:
    """Publish and book where each partition ends."""
    for start in range(0, len(records), PUBLISHED_AT_ONCE):
        some = records[start : start + PUBLISHED_AT_ONCE]
        await writer.publish_many(KV_TOPIC, [(record.key, record.value) for record in some])
    for record in records:
        ends[partition_of(record.key, len(ends))] += 1


def backlog(load: StateLoad, operations: int) -> list[LoadRecord]:
    """Records of about so many block operations."""
    records, count = [], 0
    while count < operations:
        (record,) = load.take(1)
        records.append(record)
        count += record.block_operations
    return records


async def database_mib(dsn: str) -> float:
    async with (
        await Database.open(DatabaseConfig(dsn, "bench", connections_max=1)) as database,
        database.connection() as connection,
    ):
        size: int = await connection.fetchval("select pg_database_size(current_database())")
    return size / 2**20


async def measure(
    operations_total: int, backlog_operations: int, workers: int, blocks: int, folder: Path
) -> Figures:
    """Run it all; raises ``AssertionError`` if the map is not the load's book at the end."""
    figures = Figures()
    load = StateLoad(2026, workers, blocks, eventful=False)
    async with EmbeddedBroker() as broker, EmbeddedDatabase(folder / "database") as server:
        await migrate(server.dsn)
        config = KafkaConfig.embedded(broker.bootstrap)
        writer = KafkaLogWriter(config)
        ends = dict.fromkeys(range(config.partitions), 0)
        service = StateProcess(server.dsn, broker.bootstrap, folder / "state.log")
        await publish(writer, load.announcements(), ends)
        await service.start()
        await caught_up(server.dsn, ends)
        sizes: list[int] = []
        print(
            f"{'operations':>12} {'records':>10} {'ops/s':>10} {'service MiB':>12} {'database MiB':>13}",
            flush=True,
        )
        while figures.operations < operations_total:
            records = backlog(load, min(backlog_operations, operations_total - figures.operations))
            sizes += [record.block_operations for record in islice(records, 50_000 - len(sizes))]
            # Held still while the backlog grows: what is measured is folding and committing it.
            service.pause()
            await publish(writer, records, ends)
            service.resume()
            started_at, cpu_before = time.monotonic(), cpu_seconds(service.pid)
            await caught_up(server.dsn, ends, SECONDS_MAX)
            seconds = time.monotonic() - started_at
            count = sum(record.block_operations for record in records)
            figures.operations += count
            figures.records += len(records)
            figures.seconds += seconds
            figures.cpu_seconds += cpu_seconds(service.pid) - cpu_before
            row = (figures.operations, count / seconds, resident_mib(service.pid), await database_mib(server.dsn))
            figures.rows.append(row)
            print(
                f"{row[0]:>12,} {figures.records:>10,} {row[1]:>10,.0f} {row[2]:>12.0f} {row[3]:>13.0f}",
                flush=True,
            )
        assert await service.stop() == 0
        await writer.close()
        async with await Database.open(DatabaseConfig(server.dsn, "bench")) as database:
            loaded_at = time.monotonic()
            stored = await PostgresMapStore(database, config.partitions).load()
            load_seconds = time.monotonic() - loaded_at
        assert held(stored) == load.held(), "the map in Postgres is not the load's book"
        blocks_held = sum(len(keys) for keys in load.held().values())
        mean, median = statistics.fmean(sizes), statistics.median(sizes)
        print(f"batches: mean {mean:.1f}, median {median:.0f} block operations; {workers} workers")
        restarts = service.log.count("the log is another one")
        print(f"times the log was taken for another one and read again: {restarts}")
        print(f"map equal to the book: {blocks_held:,} blocks, loaded in {load_seconds * 1000:.0f} ms")
    return figures


def main() -> int:
    """Print the table and the verdict."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operations", type=int, default=1_500_000)
    parser.add_argument("--backlog", type=int, default=500_000, help="block operations published at a time")
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=4_096, help="blocks a worker holds before it evicts")
    arguments = parser.parse_args()
    print(f"python {platform.python_version()}, {os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory(prefix="evenhand-bench-") as folder:
        work = measure(arguments.operations, arguments.backlog, arguments.workers, arguments.blocks, Path(folder))
        figures = asyncio.run(work)
    rate = figures.operations / figures.seconds
    first, last = figures.rows[min(1, len(figures.rows) - 1)], figures.rows[-1]
    print(f"sustained: {rate:,.0f} block operations/s (target {TARGET_PER_SECOND:,})")
    per_cpu = figures.operations / figures.cpu_seconds
    print(f"the service alone: {per_cpu:,.0f} block operations per second of its processor time")
    print(f"load average {os.getloadavg()[0]:.1f} at the end")
    print(f"service memory: {first[2]:.0f} MiB at {first[0]:,}, {last[2]:.0f} MiB at {last[0]:,} operations")
    return 0 if rate >= TARGET_PER_SECOND else 1


if __name__ == "__main__":
    sys.exit(main())
