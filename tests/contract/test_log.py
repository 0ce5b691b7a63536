"""What ``LogReader`` and ``LogWriter`` promise, over every implementation."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import replace

import pytest
from tests.contract.conftest import LogUnderTest

from evenhand.core.block_key import pack_keys
from evenhand.ports import LogPosition, LogReader, LogRecord, LogReplaced, LogWriter
from evenhand.wire.partition import partition_of

PATIENCE_SECONDS = 20.0
Positions = Mapping[int, LogPosition]


@pytest.fixture
async def writer(log: LogUnderTest) -> AsyncIterator[LogWriter]:
    writer = log.new_writer()
    yield writer
    await writer.close()


@pytest.fixture
async def reader(log: LogUnderTest) -> AsyncIterator[LogReader]:
    reader = log.new_reader()
    yield reader
    await reader.close()


def attached(reader: LogReader) -> bool:
    return reader.attached


async def from_start(reader: LogReader, topic: str) -> Positions:
    return {number: LogPosition(0) for number in range(await reader.partition_count(topic))}


async def take(reader: LogReader, topic: str, positions: Positions, count: int) -> list[LogRecord]:
    """The first ``count`` records; fails if they do not come in time or if more come with them."""
    taken: list[LogRecord] = []
    batches = reader.read(topic, positions)
    async with asyncio.timeout(PATIENCE_SECONDS), aclosing(batches):  # type: ignore[type-var]
        async for batch in batches:
            taken.extend(batch)
            if len(taken) >= count:
                break
    assert len(taken) == count
    return taken


def position_after(record: LogRecord) -> LogPosition:
    return LogPosition(record.offset + 1, record.digest())


async def test_records_come_back_in_order_per_partition(
    log: LogUnderTest, writer: LogWriter, reader: LogReader
) -> None:
    sent = [(b"worker-%d" % (number % 7), b"value-%d" % number) for number in range(60)]
    for key, value in sent:
        await writer.publish(log.topic, key, value)
    positions = await from_start(reader, log.topic)
    records = await take(reader, log.topic, positions, len(sent))
    for number in positions:
        of_partition = [record for record in records if record.partition == number]
        expected = [(key, value) for key, value in sent if partition_of(key, len(positions)) == number]
        assert [(record.key, record.value) for record in of_partition] == expected
        assert [record.offset for record in of_partition] == list(range(len(expected)))
    assert {record.topic for record in records} == {log.topic}


async def test_overlapping_publishes_of_one_key_keep_their_order(
    log: LogUnderTest, writer: LogWriter, reader: LogReader
) -> None:
    await asyncio.gather(*(writer.publish(log.topic, b"k", b"%d" % number) for number in range(200)))
    records = await take(reader, log.topic, await from_start(reader, log.topic), 200)
    assert [int(record.value) for record in records] == list(range(200))


async def test_reading_goes_on_behind_a_position(log: LogUnderTest, writer: LogWriter, reader: LogReader) -> None:
    for number in range(10):
        await writer.publish(log.topic, b"k", b"%d" % number)
    records = await take(reader, log.topic, await from_start(reader, log.topic), 10)
    third = records[2]
    rest = await take(log.new_reader(), log.topic, {third.partition: position_after(third)}, 7)
    assert rest == records[3:]
    unguarded = await take(log.new_reader(), log.topic, {third.partition: LogPosition(third.offset + 1)}, 7)
    assert unguarded == records[3:]


async def test_a_reader_at_the_end_sees_what_comes(
    log: LogUnderTest, writer: LogWriter, reader: LogReader
) -> None:
    await writer.publish(log.topic, b"k", b"before")
    (before,) = await take(reader, log.topic, await from_start(reader, log.topic), 1)
    waiting = asyncio.create_task(take(reader, log.topic, {before.partition: position_after(before)}, 2))
    await writer.publish(log.topic, b"k", b"one")
    await writer.publish(log.topic, b"k", b"two")
    assert [record.value for record in await waiting] == [b"one", b"two"]


async def test_only_named_partitions_are_read(log: LogUnderTest, writer: LogWriter, reader: LogReader) -> None:
    positions = await from_start(reader, log.topic)
    for number in range(30):
        await writer.publish(log.topic, b"worker-%d" % number, b"v")
    by_partition = {record.partition for record in await take(reader, log.topic, positions, 30)}
    assert len(by_partition) > 1
    chosen = min(by_partition)
    count = sum(partition_of(b"worker-%d" % number, len(positions)) == chosen for number in range(30))
    records = await take(reader, log.topic, {chosen: LogPosition(0)}, count)
    assert {record.partition for record in records} == {chosen}


async def test_another_record_before_the_position_is_another_log(
    log: LogUnderTest, writer: LogWriter, reader: LogReader
) -> None:
    await writer.publish(log.topic, b"k", b"one")
    await writer.publish(log.topic, b"k", b"two")
    first, _ = await take(reader, log.topic, await from_start(reader, log.topic), 2)
    other = replace(first, value=b"another")
    with pytest.raises(LogReplaced) as raised:
        await take(reader, log.topic, {first.partition: position_after(other)}, 1)
    assert (raised.value.partition, raised.value.offset) == (first.partition, first.offset + 1)


async def test_a_position_beyond_the_end_is_another_log(
    log: LogUnderTest, writer: LogWriter, reader: LogReader
) -> None:
    await writer.publish(log.topic, b"k", b"one")
    (first,) = await take(reader, log.topic, await from_start(reader, log.topic), 1)
    with pytest.raises(LogReplaced):
        await take(reader, log.topic, {first.partition: LogPosition(1_000, first.digest())}, 1)


async def test_a_position_in_an_empty_partition_is_another_log(log: LogUnderTest, reader: LogReader) -> None:
    await reader.partition_count(log.topic)
    with pytest.raises(LogReplaced):
        await take(reader, log.topic, {0: LogPosition(3, b"d" * 32)}, 1)


async def test_silence_is_told_every_200_ms(log: LogUnderTest, reader: LogReader) -> None:
    positions = await from_start(reader, log.topic)
    loop = asyncio.get_running_loop()
    waits: list[float] = []
    last = loop.time()
    async for batch in reader.read(log.topic, positions):
        assert not batch
        waits.append(loop.time() - last)
        last = loop.time()
        if len(waits) == 8:
            break
    assert sorted(waits)[len(waits) // 2] <= 0.2


async def test_a_reader_is_attached_once_silence_means_that_nothing_came(
    log: LogUnderTest, writer: LogWriter, reader: LogReader
) -> None:
    positions = await from_start(reader, log.topic)
    for number in range(5):
        await writer.publish(log.topic, b"k", b"%d" % number)
    second = (await take(reader, log.topic, positions, 5))[1]
    late = log.new_reader()
    assert not attached(late)
    seen: list[LogRecord] = []
    batches = late.read(log.topic, {second.partition: position_after(second)})
    async with asyncio.timeout(PATIENCE_SECONDS), aclosing(batches):  # type: ignore[type-var]
        async for batch in batches:
            seen += batch
            if not batch and attached(late):
                break
    assert len(seen) == 3
    assert not attached(late)
    await late.close()


async def test_two_readers_do_not_disturb_each_other(
    log: LogUnderTest, writer: LogWriter, reader: LogReader
) -> None:
    positions = await from_start(reader, log.topic)
    for number in range(5):
        await writer.publish(log.topic, b"k", b"%d" % number)
    other = log.new_reader()
    first, second = await asyncio.gather(
        take(reader, log.topic, positions, 5), take(other, log.topic, positions, 5)
    )
    await other.close()
    assert first == second


async def test_the_largest_snapshot_part_passes(log: LogUnderTest, writer: LogWriter, reader: LogReader) -> None:
    value = pack_keys(range(65_536)) + b"x" * 1_000
    await writer.publish(log.topic, b"k", value)
    await writer.publish(log.topic, b"k", b"small")
    records = await take(reader, log.topic, await from_start(reader, log.topic), 2)
    assert [record.value for record in records] == [value, b"small"]


async def test_closing_a_reader_ends_its_reads(log: LogUnderTest, reader: LogReader) -> None:
    positions = await from_start(reader, log.topic)
    async with asyncio.timeout(PATIENCE_SECONDS):
        async for _ in reader.read(log.topic, positions):
            await reader.close()
    await reader.close()


async def test_writers_may_be_closed_twice_and_unused(log: LogUnderTest) -> None:
    writer = log.new_writer()
    await writer.close()
    await writer.close()
