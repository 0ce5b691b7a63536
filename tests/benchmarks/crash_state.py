"""kill -9 of the state service at every named fault point, 20 times each, under load; and of Postgres.

    python -m tests.benchmarks.crash_state [--kills 20] [--seed 1]

The service runs as a process on the embedded broker and an embedded Postgres while a load with clears, restarts,
gaps, snapshots and duplicates is published. After the kills it runs to the log's end. Its map must equal, to the
block, the load's own book and the map of a service that read the same log into another database without a kill.
Then Postgres is killed under load, and the time from its return until the service has caught up is printed.
"""

import argparse
import asyncio
import random
import sys
import tempfile
import time
from pathlib import Path

from tests.fixtures.state_load import LoadRecord, StateLoad
from tests.fixtures.state_process import StateProcess, caught_up, held

from evenhand.kafka import KafkaConfig, KafkaLogWriter
from evenhand.local.broker import EmbeddedBroker
from evenhand.local.database import EmbeddedDatabase
from evenhand.ports import KV_TOPIC, StoredMap
from evenhand.postgres.database import Database, DatabaseConfig
from evenhand.postgres.map_store import PostgresMapStore
from evenhand.postgres.migrate import migrate
from evenhand.state.fault import FAULT_POINTS
from evenhand.wire.partition import partition_of

RATE_PER_SECOND = 1_000
RECOVERY_SECONDS_MAX = 10.0
DATABASE_KILLS = 5


class Publishing:
    """Publishes at a rate until it is left."""

    def __init__(self, config: KafkaConfig, load: StateLoad, ends: dict[int, int]) -> None:
        self._writer = KafkaLogWriter(config)
        self._load, self.ends = load, ends
        self._going = True

    async def publish(self, records: list[LoadRecord]) -> None:
        await self._writer.publish_many(KV_TOPIC, [(record.key, record.value) for record in records])
        for record in records:
            self.ends[partition_of(record.key, len(self.ends))] += 1

    async def _run(self) -> None:
        while self._going:
            await self.publish(self._load.take(RATE_PER_SECOND // 20))
            await asyncio.sleep(0.05)

    async def __aenter__(self) -> "Publishing":
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._going = False
        await self._task
        await self._writer.close()


async def load_map(dsn: str, partitions: int) -> StoredMap:
    async with await Database.open(DatabaseConfig(dsn, "crash")) as database:
        return await PostgresMapStore(database, partitions).load()


async def kill_at_points(
    kills: int, chance: random.Random, service: StateProcess, publishing: Publishing, dsn: str
) -> None:
    """Each point ``kills`` times, in a drawn order; then to the end of the log."""
    points = [point for point in FAULT_POINTS for _ in range(kills)]
    chance.shuffle(points)
    done = dict.fromkeys(FAULT_POINTS, 0)
    async with publishing:
        for point in points:
            await service.start(fault=f"{point}:{chance.randint(1, 12)}")
            code = await service.exit_code()
            assert code == -9, f"{point}: exit code {code}\n{service.log[-2000:]}"
            done[point] += 1
            print(f"  killed {sum(done.values())} of {len(points)}: {point}", flush=True)
    await service.start()
    await service.loaded()
    await caught_up(dsn, publishing.ends, exactly=True)


async def run(kills: int, seed: int, folder: Path) -> None:
    """Raises ``AssertionError`` where a map differs or a recovery takes too long."""
    chance = random.Random(seed)
    load = StateLoad(seed, workers=16, blocks_per_worker=1_000, eventful=True)
    async with (
        EmbeddedBroker() as broker,
        EmbeddedDatabase(folder / "killed") as server,
        EmbeddedDatabase(folder / "calm") as calm_server,
    ):
        await migrate(server.dsn)
        await migrate(calm_server.dsn)
        config = KafkaConfig.embedded(broker.bootstrap)
        ends = dict.fromkeys(range(config.partitions), 0)
        publishing = Publishing(config, load, ends)
        await publishing.publish(load.announcements())
        service = StateProcess(server.dsn, broker.bootstrap, folder / "killed.log")
        await kill_at_points(kills, chance, service, publishing, server.dsn)
        calm = StateProcess(calm_server.dsn, broker.bootstrap, folder / "calm.log")
        await calm.start()
        await caught_up(calm_server.dsn, ends, exactly=True)
        assert await calm.stop() == 0
        after, without = await load_map(server.dsn, len(ends)), await load_map(calm_server.dsn, len(ends))
        assert held(after) == load.held() == held(without), f"seed {seed}: the maps differ"
        assert after.positions == without.positions
        blocks = sum(len(keys) for keys in load.held().values())
        print(f"{kills * len(FAULT_POINTS)} kills, {sum(ends.values()):,} records: {blocks:,} blocks, all equal")
        await kill_database(load, config, ends, server, service)


async def kill_database(
    load: StateLoad, config: KafkaConfig, ends: dict[int, int], server: EmbeddedDatabase, service: StateProcess
) -> None:
    worst = 0.0
    async with Publishing(config, load, ends):
        for _ in range(DATABASE_KILLS):
            await asyncio.sleep(1.0)
            await asyncio.to_thread(server.kill)
            await asyncio.sleep(1.0)
            await asyncio.to_thread(server.restart)
            back_at = time.monotonic()
            await caught_up(server.dsn, dict(ends))
            worst = max(worst, time.monotonic() - back_at)
    await caught_up(server.dsn, ends, exactly=True)
    assert await service.stop() == 0
    assert held(await load_map(server.dsn, len(ends))) == load.held(), "the map differs after Postgres was killed"
    print(f"{DATABASE_KILLS} kills of Postgres: caught up at most {worst:.1f} s after its return, all equal")
    assert worst <= RECOVERY_SECONDS_MAX, "recovery took too long"


def main() -> int:
    """Run and tell; a difference is an ``AssertionError`` that names the seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="kills at each fault point")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}")
    with tempfile.TemporaryDirectory(prefix="evenhand-crash-") as folder:
        asyncio.run(run(arguments.kills, arguments.seed, Path(folder)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
