"""When a live map counts as caught up with its log, whatever the clocks of this host and of the writers say."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress

import pytest

from evenhand.core.facts import SchedulerConfig
from evenhand.core.ids import PoolId
from evenhand.core.kv import ControlMessage
from evenhand.core.steps import Input
from evenhand.memory.directory import MemoryDirectory
from evenhand.memory.map_store import MemoryMapStore
from evenhand.ports import KV_TOPIC, LogPosition, LogRecord
from evenhand.scheduler import live_map as module
from evenhand.scheduler.directory_watch import DirectoryWatch
from evenhand.scheduler.live_map import CAUGHT_UP_AGE_MS, CAUGHT_UP_STEADY_S, LiveMap
from evenhand.scheduler.metrics import SchedulerMetrics

POOL = PoolId("p")


class Clock:
    """Stands in for the ``time`` that the live map reads: seconds of a wall clock, set by the test."""

    def __init__(self) -> None:
        self.now_s = 1_000_000.0

    def time(self) -> float:
        return self.now_s

    def monotonic_ns(self) -> int:
        return int(self.now_s * 1e9)

    def perf_counter(self) -> float:
        return self.now_s


class Reader:
    """Gives one record a step and notes, when asked for the next, whether the map was caught up by then.

    A step is (seconds that pass before it, age of its record in seconds by this host's clock); None for the age
    stands for an empty batch.
    """

    def __init__(self, clock: Clock, steps: Sequence[tuple[float, float | None]]) -> None:
        self.clock = clock
        self.steps = steps
        self.attached = True
        self.live: LiveMap | None = None
        self.seen: list[bool] = []
        self.over = asyncio.Event()

    async def partition_count(self, topic: str) -> int:
        return 1

    async def read(self, topic: str, positions: Mapping[int, LogPosition]) -> AsyncIterator[Sequence[LogRecord]]:
        assert self.live is not None
        offsets = itertools.count()
        for passed_s, age_s in self.steps:
            self.clock.now_s += passed_s
            if age_s is None:
                yield ()
            else:
                at_ms = round((self.clock.now_s - age_s) * 1000)
                yield (LogRecord(KV_TOPIC, 0, next(offsets), b"w", b"no message", at_ms),)
            self.seen.append(self.live.caught_up.is_set())
        self.over.set()
        await asyncio.Event().wait()

    async def close(self) -> None:
        return


async def caught_up_after(
    steps: Sequence[tuple[float, float | None]], monkeypatch: pytest.MonkeyPatch, attached: bool = True
) -> list[bool]:
    """Whether the map was caught up, after each step."""
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    told: list[Input] = []
    wishes: list[ControlMessage] = []
    reader = Reader(clock, steps)
    reader.attached = attached
    watch = DirectoryWatch(MemoryDirectory(), POOL, 500, told.append)
    config = SchedulerConfig(pool_id=POOL)
    live = LiveMap(MemoryMapStore(), reader, watch, config, told.append, wishes.append, SchedulerMetrics("p", 8))
    reader.live = live
    task = asyncio.create_task(live.run())
    await asyncio.wait_for(reader.over.wait(), 10)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    return reader.seen


async def test_a_young_record_is_the_tail(monkeypatch: pytest.MonkeyPatch) -> None:
    young_s = CAUGHT_UP_AGE_MS / 1000 / 2
    assert await caught_up_after([(0.1, 60.0), (0.1, young_s)], monkeypatch) == [False, True]


async def test_an_empty_batch_is_the_tail_of_a_log_that_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await caught_up_after([(0.1, None)], monkeypatch) == [True]
    assert await caught_up_after([(0.1, None)], monkeypatch, attached=False) == [False]


async def test_a_clock_that_runs_ahead_keeps_nobody_out_of_office(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each record of a busy log is 20 s old by this host's clock, however soon it is read."""
    steps = [(0.5, 20.0)] * 12
    seen = await caught_up_after(steps, monkeypatch)
    assert seen == sorted(seen)
    waited_s = 0.5 * seen.index(True)
    assert CAUGHT_UP_STEADY_S < waited_s <= CAUGHT_UP_STEADY_S + 0.5


async def test_a_backlog_is_read_to_its_end_however_long_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ages shrink on the way: that is no tail, though it takes many times as long as a steady age has to last."""
    steps = [(1.0, 600.0 - n) for n in range(30)]
    assert not any(await caught_up_after(steps, monkeypatch))
