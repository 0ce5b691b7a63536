"""The timers of an edge follow its settings."""

import asyncio
from dataclasses import replace
from pathlib import Path

from tests.integration.edge_bench import MapReader, bench

from evenhand.core.kv import WorkerLoadReported

WATCHED_S = 1.2


async def test_load_is_told_as_often_as_the_setting_says() -> None:
    told = []
    for interval_ms in (50, 600):
        async with bench() as b, b.edge(replace(b.edge_config(), load_interval_ms=interval_ms)):
            reader = MapReader(b.log)
            await reader.until(lambda reader=reader: reader.count(WorkerLoadReported) > 0, "the first report")  # type: ignore[misc]
            before = reader.count(WorkerLoadReported)
            await asyncio.sleep(WATCHED_S)
            reader.catch_up()
            told.append(reader.count(WorkerLoadReported) - before)
    assert told[0] > 2 * told[1]
    assert 1 <= told[1] <= 3


async def test_a_checkpoint_is_written_as_often_as_the_setting_says(tmp_path: Path) -> None:
    written = []
    for interval_ms in (100, 60_000):
        path = tmp_path / f"{interval_ms}.checkpoint"
        async with bench() as b, b.edge(replace(b.edge_config(path), checkpoint_interval_ms=interval_ms)):
            reader = MapReader(b.log)
            await b.complete(b.prompt(2))
            await reader.until(lambda reader=reader: len(reader.held()) == 2, "two blocks")  # type: ignore[misc]
            size = path.stat().st_size if path.exists() else 0
            await b.complete(b.prompt(40))
            await asyncio.sleep(WATCHED_S)
            written.append((path.stat().st_size if path.exists() else 0) > size)
    assert written == [True, False]
