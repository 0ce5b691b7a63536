"""What a state service shows and keeps is bounded, by settings that have an effect."""

import asyncio
import time
from collections.abc import Mapping

import pytest
from prometheus_client.parser import text_string_to_metric_families
from structlog.testing import capture_logs
from tests.integration.test_state_service import SECONDS_MAX, W1, World, announced, batch, eventually

from evenhand.core.ids import Epoch, WorkerId
from evenhand.core.kv import KvMessage, Stored, WorkerLeft, WorkerLoadReported
from evenhand.memory import MemoryMapStore
from evenhand.ports import KV_TOPIC, LogPosition
from evenhand.state.config import StateConfig

QUICK = {"group_ms_max": 1, "idle_commit_ms": 20}


def series(page: bytes) -> set[tuple[str, tuple[tuple[str, str], ...]]]:
    return {
        (sample.name, tuple(sorted(sample.labels.items())))
        for family in text_string_to_metric_families(page.decode())
        for sample in family.samples
    }


async def test_series_are_the_same_whatever_workers_call_themselves() -> None:
    world = World()
    async with world.running() as service:

        async def abuse(round_number: int) -> None:
            for number in range(20):
                name = WorkerId(f"hostile-{round_number}-{number}")
                world.say(announced(name), batch(name, 1, Stored((number,))), batch(name, 9, Stored((5,))))
                world.say(announced(WorkerId(f"{name}-odd"), block_size=32), WorkerLeft(name, Epoch(1)))
                world.log.append(KV_TOPIC, name.encode(), b"\xff" * 9)
            await world.settled()

        world.say(announced(W1))
        await abuse(0)
        once = series(service.metrics_page())
        await abuse(1)
        assert series(service.metrics_page()) == once
        assert b"hostile" not in service.metrics_page()


async def test_reading_pauses_at_the_bound_in_records_too() -> None:
    world = World(config=StateConfig(**QUICK, lag_records_max=5, slice_records_max=1))
    world.say(announced(W1))
    async with world.running() as service:
        await world.settled()
        world.store.available = False
        for _ in range(50):
            world.say(WorkerLoadReported(W1, Epoch(1), 0, 0, 0.0, 0, 0, 0, 1, True))
        await eventually(lambda: "Reading waits for commits" in service.not_ready())
        world.store.available = True
        await world.settled()


async def test_malformed_records_are_logged_up_to_the_bound_and_all_counted() -> None:
    world = World(config=StateConfig(**QUICK, malformed_logged_per_minute_max=3))
    with capture_logs() as logs:
        async with world.running() as service:
            for _ in range(20):
                world.log.append(KV_TOPIC, b"w1", b"\xff" * 9)
            await world.settled()
            assert b'evenhand_state_records_total{outcome="malformed"} 20.0' in service.metrics_page()
    assert len([entry for entry in logs if entry["event"] == "passed a record"]) == 3


async def test_a_stop_waits_for_the_database_as_long_as_the_setting_says() -> None:
    took_s = []
    for stop_ms_max in (50, 600):
        world = World(config=StateConfig(**QUICK, stop_ms_max=stop_ms_max))
        world.say(announced(W1))
        service = world.service()
        task = asyncio.create_task(service.run())
        await world.settled()
        world.store.available = False
        world.say(batch(W1, 1, Stored((1,))))
        await eventually(lambda service=service: service.cache_map.copy_count == 1)  # type: ignore[misc]
        began = time.monotonic()
        service.stop()
        await asyncio.wait_for(asyncio.gather(task, return_exceptions=True), SECONDS_MAX)
        took_s.append(time.monotonic() - began)
    assert took_s[1] >= 0.5
    assert took_s[1] - took_s[0] > 0.3


async def test_tries_at_the_database_are_paced_by_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[int] = []
    positions = MemoryMapStore.positions

    async def counted(store: MemoryMapStore) -> Mapping[int, LogPosition]:
        tries[-1] += 1
        return await positions(store)

    monkeypatch.setattr(MemoryMapStore, "positions", counted)
    for wait_ms in (20, 300):
        world = World(config=StateConfig(**QUICK, retry_ms_min=wait_ms, retry_ms_max=wait_ms))
        world.say(announced(W1))
        async with world.running():
            await world.settled()
            tries.append(0)
            world.store.available = False
            world.say(batch(W1, 1, Stored((1,))))
            await eventually(lambda: tries[-1] > 0)
            await asyncio.sleep(0.4)
            world.store.available = True
            await world.settled()
    assert tries[0] > 2 * tries[1]


async def commit_s(message: KvMessage, **settings: int) -> float:
    """How long a message takes from the log to its commit."""
    world = World(config=StateConfig(**{**QUICK, **settings}))
    world.say(announced(W1))
    async with world.running():
        await world.settled()
        began = time.monotonic()
        world.say(message)
        await world.settled()
        return time.monotonic() - began


LOAD = WorkerLoadReported(W1, Epoch(1), 0, 0, 0.0, 0, 0, 0, 1, True)
TEN = batch(W1, 1, Stored(tuple(range(10))))


@pytest.mark.parametrize(
    ("message", "soon", "late"),
    [
        (TEN, {"group_ms_max": 1}, {"group_ms_max": 1_500}),
        (TEN, {"group_ms_max": 1_500, "group_key_changes_max": 5}, {"group_ms_max": 1_500}),
        (LOAD, {"idle_commit_ms": 10}, {"idle_commit_ms": 1_500}),
    ],
)
async def test_commits_come_when_the_settings_say(
    message: KvMessage, soon: dict[str, int], late: dict[str, int]
) -> None:
    assert await commit_s(message, **soon) < 1.0
    assert await commit_s(message, **late) > 1.0
