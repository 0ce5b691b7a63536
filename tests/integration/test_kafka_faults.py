"""Reader and writer while the broker under them dies, comes back empty, stops answering, or is not there yet.

The broker is the embedded one, which loses everything when it dies: the hardest case for a position.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

import pytest

from evenhand.core.errors import InvalidInput, Unavailable
from evenhand.kafka import EMBEDDED_PARTITIONS, KafkaConfig, KafkaLogReader, KafkaLogWriter
from evenhand.kafka.writer import MESSAGE_BYTES_MAX
from evenhand.local.broker import EmbeddedBroker
from evenhand.ports import KV_TOPIC, LogPosition, LogRecord, LogReplaced

RECOVERY_SECONDS_MAX = 10.0
KEYS = tuple(b"worker-%d" % number for number in range(8))


@dataclass
class Tail:
    """A reader that goes on for ever, starting over when the log is another one; what it saw in each life."""

    reader: KafkaLogReader
    lives: list[list[LogRecord]] = field(default_factory=lambda: [[]])
    empty_batches: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        while True:
            try:
                async for batch in self.reader.read(
                    KV_TOPIC, {number: LogPosition(0) for number in range(EMBEDDED_PARTITIONS)}
                ):
                    self.lives[-1].extend(batch)
                    self.empty_batches += not batch
                    self.changed.set()
            except LogReplaced:
                self.lives.append([])
                self.changed.set()

    async def until(self, satisfied: Callable[[], bool], seconds_max: float = RECOVERY_SECONDS_MAX) -> None:
        async with asyncio.timeout(seconds_max):
            while not satisfied():
                self.changed.clear()
                await self.changed.wait()

    def values(self) -> list[bytes]:
        return [record.value for record in self.lives[-1]]


@pytest.fixture
async def writer(embedded_broker: EmbeddedBroker) -> AsyncIterator[KafkaLogWriter]:
    writer = KafkaLogWriter(KafkaConfig.embedded(embedded_broker.bootstrap, publish_timeout_ms=1_500))
    yield writer
    await writer.close()


@pytest.fixture
async def tail(embedded_broker: EmbeddedBroker) -> AsyncIterator[Tail]:
    tail = Tail(KafkaLogReader(KafkaConfig.embedded(embedded_broker.bootstrap, request_timeout_ms=2_000)))
    task = asyncio.create_task(tail.run())
    yield tail
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await tail.reader.close()


async def retried(publish: Callable[[], Awaitable[None]]) -> int:
    """Publish until it is taken; return how often it was not."""
    failures = 0
    async with asyncio.timeout(RECOVERY_SECONDS_MAX):
        while True:
            try:
                await publish()
            except Unavailable:
                failures += 1
            else:
                return failures


async def test_a_killed_broker_comes_back_as_another_log(
    embedded_broker: EmbeddedBroker, writer: KafkaLogWriter, tail: Tail
) -> None:
    for number, key in enumerate(KEYS):
        await writer.publish(KV_TOPIC, key, b"old-%d" % number)
    await tail.until(lambda: len(tail.lives[-1]) == len(KEYS))

    await embedded_broker.kill()
    with pytest.raises(Unavailable, match=KV_TOPIC):
        await writer.publish(KV_TOPIC, KEYS[0], b"into the void")
    await embedded_broker.restart()

    for key in KEYS:
        await retried(lambda key=key: writer.publish(KV_TOPIC, key, b"new-" + key))  # type: ignore[misc]
    await tail.until(lambda: len(tail.lives) >= 2 and {b"new-" + key for key in KEYS} <= set(tail.values()))
    assert not any(value.startswith(b"old-") for life in tail.lives[1:] for value in (r.value for r in life))


async def test_a_log_that_outgrew_the_position_at_once_is_still_another_log(
    embedded_broker: EmbeddedBroker, writer: KafkaLogWriter, tail: Tail
) -> None:
    await writer.publish(KV_TOPIC, KEYS[0], b"old")
    await tail.until(lambda: tail.values() == [b"old"])
    await embedded_broker.kill()
    await embedded_broker.restart()
    records = [(KEYS[0], b"new-%d" % number) for number in range(300)]
    await retried(lambda: writer.publish_many(KV_TOPIC, records))
    # A reader that went on from offset 1 would show new-1 … new-299 in its first life.
    await tail.until(lambda: tail.values()[-300:] == [value for _, value in records])
    assert [record.value for record in tail.lives[0]] == [b"old"]


async def test_what_is_acknowledged_by_a_restarted_broker_is_there(
    embedded_broker: EmbeddedBroker, tail: Tail
) -> None:
    """Producers reconnect with what they knew of topics; none may write before the topic is made."""
    config = KafkaConfig.embedded(embedded_broker.bootstrap, publish_timeout_ms=3_000)
    writers = [KafkaLogWriter(config) for _ in KEYS]
    for writer, key in zip(writers, KEYS, strict=True):
        await writer.publish(KV_TOPIC, key, b"old")
    for round_number in range(3):
        await embedded_broker.kill()
        await embedded_broker.restart()
        expected = {b"%d-" % round_number + key for key in KEYS}
        await asyncio.gather(
            *(
                retried(lambda w=w, k=k: w.publish(KV_TOPIC, k, b"%d-" % round_number + k))  # type: ignore[misc] # noqa: B023
                for w, k in zip(writers, KEYS, strict=True)
            )
        )
        await tail.until(lambda expected=expected: expected <= set(tail.values()))  # type: ignore[misc]
    for writer in writers:
        await writer.close()


async def test_a_broker_that_stops_answering_is_waited_for(
    embedded_broker: EmbeddedBroker, writer: KafkaLogWriter, tail: Tail
) -> None:
    await writer.publish(KV_TOPIC, KEYS[0], b"before")
    await tail.until(lambda: tail.values() == [b"before"])
    await embedded_broker.pause()
    # The writer's own time ends it, not the client's, which is longer.
    with pytest.raises(Unavailable, match="within 1500 ms"):
        await writer.publish(KV_TOPIC, KEYS[0], b"during")
    seen = tail.empty_batches
    # A reader that hung in its requests, of two seconds each, would show a handful in that time.
    await tail.until(lambda: tail.empty_batches >= seen + 20)
    embedded_broker.resume()
    await retried(lambda: writer.publish(KV_TOPIC, KEYS[0], b"after"))
    await tail.until(lambda: b"after" in tail.values())
    assert len(tail.lives) == 1, "the same log was taken for another one"
    assert tail.values()[0] == b"before"


async def test_a_silent_log_is_the_same_log(embedded_broker: EmbeddedBroker, writer: KafkaLogWriter) -> None:
    config = KafkaConfig.embedded(embedded_broker.bootstrap, probe_idle_ms=150, verify_silence_ms=150)
    tail = Tail(KafkaLogReader(config))
    task = asyncio.create_task(tail.run())
    await writer.publish(KV_TOPIC, KEYS[0], b"only")
    await tail.until(lambda: tail.empty_batches >= 15)  # several probes of an idle partition
    await writer.publish(KV_TOPIC, KEYS[0], b"late")
    await tail.until(lambda: tail.values() == [b"only", b"late"])
    assert len(tail.lives) == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_reader_may_start_before_the_broker() -> None:
    broker = EmbeddedBroker()
    await broker.start()
    await broker.kill()
    reader = KafkaLogReader(KafkaConfig.embedded(broker.bootstrap))
    with pytest.raises(Unavailable):
        await reader.partition_count(KV_TOPIC)
    tail = Tail(reader)
    task = asyncio.create_task(tail.run())
    await tail.until(lambda: tail.empty_batches >= 3)
    await broker.restart()
    writer = KafkaLogWriter(KafkaConfig.embedded(broker.bootstrap))
    await writer.publish(KV_TOPIC, KEYS[0], b"first")
    await tail.until(lambda: tail.values() == [b"first"])
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await writer.close()
    await broker.stop()


async def test_a_writer_waits_for_a_broker_that_comes_in_time_and_no_longer() -> None:
    broker = EmbeddedBroker()
    await broker.start()
    await broker.kill()
    writer = KafkaLogWriter(KafkaConfig.embedded(broker.bootstrap, publish_timeout_ms=400))
    with pytest.raises(Unavailable, match="within 400 ms"):
        await writer.publish(KV_TOPIC, KEYS[0], b"nobody there")
    patient = KafkaLogWriter(KafkaConfig.embedded(broker.bootstrap, publish_timeout_ms=8_000))
    publishing = asyncio.create_task(patient.publish(KV_TOPIC, KEYS[0], b"taken"))
    await asyncio.sleep(0)
    await broker.restart()
    await publishing
    await writer.close()
    await patient.close()
    await broker.stop()


async def test_duplicates_are_handed_on_as_they_stand(writer: KafkaLogWriter, tail: Tail) -> None:
    await writer.publish_many(KV_TOPIC, [(KEYS[0], b"same"), (KEYS[0], b"same")])
    await tail.until(lambda: tail.values() == [b"same", b"same"])


async def test_a_record_too_large_is_refused_before_it_is_sent(writer: KafkaLogWriter) -> None:
    with pytest.raises(InvalidInput, match="larger than Kafka takes"):
        await writer.publish(KV_TOPIC, KEYS[0], bytes(MESSAGE_BYTES_MAX))
    await writer.publish(KV_TOPIC, KEYS[0], b"small")
