"""The memory log's own behaviour and its fault switches; what the port promises is in tests/contract."""

import asyncio

import pytest

from evenhand.core.errors import Unavailable
from evenhand.memory import MemoryLog, MemoryLogReader, MemoryLogWriter
from evenhand.ports import LogPosition, LogReplaced

TOPIC = "t"


async def test_an_append_can_be_duplicated() -> None:
    log = MemoryLog(partitions=1)
    log.duplicates_next = 1
    log.append(TOPIC, b"k", b"1")
    log.append(TOPIC, b"k", b"2")
    assert [record.value for record in log.records(TOPIC)] == [b"1", b"1", b"2"]


async def test_a_publish_can_be_done_and_not_acknowledged() -> None:
    log = MemoryLog(partitions=1)
    log.unacknowledged_next = 1
    writer = MemoryLogWriter(log)
    with pytest.raises(Unavailable):
        await writer.publish(TOPIC, b"k", b"1")
    await writer.publish(TOPIC, b"k", b"2")
    assert [record.value for record in log.records(TOPIC)] == [b"1", b"2"]


async def test_a_log_that_is_away_shows_nothing_and_comes_back() -> None:
    log = MemoryLog(partitions=1)
    log.append(TOPIC, b"k", b"1")
    log.available = False
    with pytest.raises(Unavailable):
        await MemoryLogWriter(log).publish(TOPIC, b"k", b"2")
    with pytest.raises(Unavailable):
        await MemoryLogReader(log).partition_count(TOPIC)
    reading = MemoryLogReader(log).read(TOPIC, {0: LogPosition(0)})
    assert await anext(reading) == ()
    log.available = True
    assert [record.value for record in await anext(reading)] == [b"1"]


async def test_a_trimmed_log_is_read_from_what_is_left_and_refuses_lost_positions() -> None:
    log = MemoryLog(partitions=1)
    records = [log.append(TOPIC, b"k", bytes([number])) for number in range(5)]
    log.trim(TOPIC, 0, 3)
    reading = MemoryLogReader(log).read(TOPIC, {0: LogPosition(0)})
    assert [record.offset for record in await anext(reading)] == [3, 4]
    with pytest.raises(LogReplaced):
        await anext(MemoryLogReader(log).read(TOPIC, {0: LogPosition(2, records[1].digest())}))


async def test_a_waiting_reader_wakes_at_an_append() -> None:
    log = MemoryLog(partitions=1)
    waiting = asyncio.ensure_future(log.changed(60.0))
    await asyncio.sleep(0)
    log.append(TOPIC, b"k", b"1")
    await asyncio.wait_for(waiting, 1.0)


async def test_records_carry_the_injected_time() -> None:
    log = MemoryLog(partitions=1, now_ms=lambda: 77)
    assert log.append(TOPIC, b"k", b"1").published_at_ms == 77
