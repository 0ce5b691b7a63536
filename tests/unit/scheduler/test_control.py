"""Wishes to edges: bounded, coalesced, and not lost by a broker that comes back."""

import asyncio

import pytest

from evenhand.core.ids import Epoch, Seq, WorkerId
from evenhand.core.kv import EpochFloor, KeysRefuted, SnapshotRequested
from evenhand.memory import MemoryLog, MemoryLogWriter
from evenhand.ports import CONTROL_TOPIC
from evenhand.scheduler.control import CONTROL_PENDING_MAX, ControlPublisher
from evenhand.scheduler.metrics import SchedulerMetrics
from evenhand.wire.kv_codec import decode_control_message


@pytest.fixture
def log() -> MemoryLog:
    return MemoryLog(partitions=1)


@pytest.fixture
def publisher(log: MemoryLog) -> ControlPublisher:
    return ControlPublisher(MemoryLogWriter(log), SchedulerMetrics("p", 0))


def published(log: MemoryLog) -> list[object]:
    return [decode_control_message(record.key, record.value) for record in log.records(CONTROL_TOPIC)]


async def run_until(publisher: ControlPublisher, log: MemoryLog, count: int) -> None:
    task = asyncio.create_task(publisher.run())
    async with asyncio.timeout(10):
        while len(published(log)) < count:
            await asyncio.sleep(0.001)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_one_wish_of_a_kind_for_a_worker(publisher: ControlPublisher, log: MemoryLog) -> None:
    worker = WorkerId("w")
    for number in range(10):
        publisher.wish(SnapshotRequested(worker, f"reason {number}"))
        publisher.wish(EpochFloor(worker, Epoch(number)))
    refuted = [KeysRefuted(worker, Epoch(1), Seq(1), (number,)) for number in range(3)]
    for wish in refuted:
        publisher.wish(wish)
    await run_until(publisher, log, 5)
    assert published(log) == [SnapshotRequested(worker, "reason 9"), EpochFloor(worker, Epoch(9)), *refuted]


async def test_wishes_are_bounded(publisher: ControlPublisher) -> None:
    for number in range(CONTROL_PENDING_MAX * 2):
        publisher.wish(KeysRefuted(WorkerId("w"), Epoch(1), Seq(1), (number,)))
    assert len(publisher._pending) == CONTROL_PENDING_MAX


async def test_a_broker_that_is_away_does_not_end_the_task(publisher: ControlPublisher, log: MemoryLog) -> None:
    log.available = False
    publisher.wish(SnapshotRequested(WorkerId("w1"), "lost"))
    task = asyncio.create_task(publisher.run())
    async with asyncio.timeout(10):
        while publisher._pending:
            await asyncio.sleep(0.001)
    log.available = True
    publisher.wish(SnapshotRequested(WorkerId("w2"), "again"))
    async with asyncio.timeout(10):
        while not published(log):
            await asyncio.sleep(0.001)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert published(log) == [SnapshotRequested(WorkerId("w2"), "again")]
