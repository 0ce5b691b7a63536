"""Control messages go out soon, once an interval, and survive a log that is away."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from evenhand.core.ids import Epoch, WorkerId
from evenhand.core.kv import ControlMessage, EpochFloor, SnapshotRequested
from evenhand.memory import MemoryLog, MemoryLogWriter
from evenhand.ports import CONTROL_TOPIC
from evenhand.state.control import ControlPublisher
from evenhand.wire.kv_codec import decode_control_message

W1, W2 = WorkerId("w1"), WorkerId("w2")


class Wishes:
    def __init__(self) -> None:
        self.log = MemoryLog(partitions=1)
        self.counted: list[ControlMessage] = []
        self.publisher = ControlPublisher(MemoryLogWriter(self.log), self.counted.append)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.publisher.run())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])

    def published(self) -> list[ControlMessage]:
        return [decode_control_message(record.key, record.value) for record in self.log.records(CONTROL_TOPIC)]

    async def until_published(self, count: int) -> None:
        async with asyncio.timeout(5):
            while len(self.published()) < count:
                await self.log.changed(0.05)


async def test_wishes_of_two_kinds_and_workers_go_out_once_each() -> None:
    wishes = Wishes()
    said: list[ControlMessage] = [
        SnapshotRequested(W1, "a gap"),
        EpochFloor(W1, Epoch(3)),
        SnapshotRequested(W2, "a gap"),
    ]
    async with wishes.running():
        for message in said:
            wishes.publisher.wish(message)
        await wishes.until_published(3)
    assert wishes.published() == said == wishes.counted
    assert wishes.publisher.waiting == 0


async def test_a_repeated_wish_waits_and_the_latest_word_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evenhand.state.control.REPEAT_SECONDS_MIN", 0.2)
    wishes = Wishes()
    loop = asyncio.get_running_loop()
    async with wishes.running():
        started_at = loop.time()
        wishes.publisher.wish(EpochFloor(W1, Epoch(1)))
        await wishes.until_published(1)
        for epoch in range(2, 50):
            wishes.publisher.wish(EpochFloor(W1, Epoch(epoch)))
        await wishes.until_published(2)
        assert loop.time() - started_at >= 0.2
    assert wishes.published() == [EpochFloor(W1, Epoch(1)), EpochFloor(W1, Epoch(49))]


async def test_one_that_waits_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evenhand.state.control.REPEAT_SECONDS_MIN", 60.0)
    wishes = Wishes()
    async with wishes.running():
        wishes.publisher.wish(EpochFloor(W1, Epoch(1)))
        await wishes.until_published(1)
        wishes.publisher.wish(EpochFloor(W1, Epoch(2)))
        await asyncio.sleep(0)
        wishes.publisher.wish(SnapshotRequested(W2, "a gap"))
        await wishes.until_published(2)
    assert wishes.published() == [EpochFloor(W1, Epoch(1)), SnapshotRequested(W2, "a gap")]


async def test_wishes_wait_for_a_log_that_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evenhand.state.control.RETRY_SECONDS", 0.01)
    wishes = Wishes()
    wishes.log.available = False
    async with wishes.running():
        wishes.publisher.wish(SnapshotRequested(W1, "a gap"))
        await asyncio.sleep(0.05)
        assert wishes.publisher.waiting == 1
        wishes.log.available = True
        await wishes.until_published(1)


def test_waiting_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evenhand.state.control.WAITING_MAX", 3)
    wishes = Wishes()
    for number in range(10):
        wishes.publisher.wish(SnapshotRequested(WorkerId(f"w{number}"), "a gap"))
    assert wishes.publisher.waiting == 3
