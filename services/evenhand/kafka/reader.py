"""``LogReader`` over Kafka: partitions by hand, positions from the caller, no offsets committed anywhere.

One task per ``read`` follows the log and fills a small buffer; the generator empties it and yields an empty batch
when nothing comes. The task never gives up on a broker that is away, waiting a little longer each time, and ends
only with ``LogReplaced``. What is in the buffer was proven to follow what came before it (see ``cursor``).

Not here: consumer groups. One state service owns all partitions; a second one is fenced by the positions it
expects in the database, which is also what decides between two that both believe they own a partition.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.client import ConnectionGroup
from aiokafka.errors import KafkaError, OffsetOutOfRangeError

from evenhand.core.errors import Unavailable
from evenhand.kafka.config import KafkaConfig
from evenhand.kafka.cursor import Cursor
from evenhand.kafka.topics import ensure_topic
from evenhand.logs import get_logger
from evenhand.ports import LogPosition, LogReader, LogRecord

BUFFERED_BATCHES_MAX = 4
"""Batches read ahead of the caller."""

IDLE_YIELD_SECONDS = 0.1
"""An empty batch is yielded after so long without a record."""

POLL_MS = 100
"""One wait for records; lost connections and doubts are looked at in between."""

ANSWER_SECONDS_MAX = 1.0
"""A broker that takes longer for a simple question counts as away."""

_log = get_logger("kafka")


class KafkaLogReader(LogReader):
    """Reads topics of one cluster. Any number of ``read`` calls may run side by side."""

    def __init__(self, config: KafkaConfig) -> None:
        self._config = config
        self._followers: dict[asyncio.Task[None], _Follower] = {}
        self._closed = False

    @property
    def attached(self) -> bool:
        followers = self._followers.values()
        return bool(followers) and all(follower.attached for follower in followers)

    async def partition_count(self, topic: str) -> int:
        return await ensure_topic(self._config, topic)

    async def read(self, topic: str, positions: Mapping[int, LogPosition]) -> AsyncIterator[Sequence[LogRecord]]:
        cursors = {number: Cursor.at(topic, number, at) for number, at in sorted(positions.items())}
        buffer: asyncio.Queue[Sequence[LogRecord]] = asyncio.Queue(BUFFERED_BATCHES_MAX)
        following = _Follower(self._config, topic, cursors, buffer)
        follower = asyncio.create_task(following.run())
        self._followers[follower] = following
        try:
            while not self._closed:
                batch: Sequence[LogRecord] = ()
                try:
                    async with asyncio.timeout(IDLE_YIELD_SECONDS):
                        batch = await buffer.get()
                except TimeoutError:
                    if follower.done() and not self._closed:
                        follower.result()  # raises what ended it: it never ends by itself
                yield batch
        finally:
            del self._followers[follower]
            await _end(follower)

    async def close(self) -> None:
        self._closed = True
        for follower in list(self._followers):
            await _end(follower)


async def _end(task: asyncio.Task[None]) -> None:
    """Cancel and wait; what it ended with has been told, or nobody asks any more."""
    task.cancel()
    await asyncio.wait([task])
    if not task.cancelled():
        task.exception()


class _Follower:
    """The task behind one ``read``: connect, follow, reconnect."""

    def __init__(
        self,
        config: KafkaConfig,
        topic: str,
        cursors: Mapping[int, Cursor],
        buffer: asyncio.Queue[Sequence[LogRecord]],
    ) -> None:
        self._config, self._topic, self._cursors, self._buffer = config, topic, cursors, buffer
        self._partitions = {TopicPartition(topic, number): cursor for number, cursor in cursors.items()}
        self._connections: dict[Any, Any] = {}
        self.attached = False
        """The broker answers, and every position was proven to be of its log since it was last lost."""
        self._away = False
        self._wait_ms = config.reconnect_wait_ms_min

    async def run(self) -> None:
        """Follow the log for ever; raises ``LogReplaced``."""
        while True:
            try:
                await self._connect_and_follow()
            except (KafkaError, OSError, Unavailable) as error:
                self.attached = False
                self._tell_away(True, str(error) or type(error).__name__)
            await asyncio.sleep(self._wait_ms / 1_000)
            self._wait_ms = min(2 * self._wait_ms, self._config.reconnect_wait_ms_max)

    async def _connect_and_follow(self) -> None:
        await ensure_topic(self._config, self._topic)
        consumer = AIOKafkaConsumer(
            **self._config.client_arguments(),
            group_id=None,
            enable_auto_commit=False,
            auto_offset_reset="none",
            fetch_max_wait_ms=self._config.fetch_wait_ms_max,
            max_partition_fetch_bytes=self._config.fetch_partition_bytes_max,
        )
        try:
            await consumer.start()
            consumer.assign(list(self._partitions))
            await self._begin(consumer)
            self._wait_ms = self._config.reconnect_wait_ms_min
            while True:
                await self._poll(consumer)
        finally:
            await consumer.stop()

    async def _begin(self, consumer: AIOKafkaConsumer) -> None:
        """Seek every partition: to the log's beginning where nothing was read, in doubt elsewhere."""
        untouched = [partition for partition, cursor in self._partitions.items() if not cursor.started]
        if untouched:
            async with asyncio.timeout(self._config.request_timeout_ms / 1_000):
                first_offsets = await consumer.beginning_offsets(untouched)
            for partition in untouched:
                self._partitions[partition].trimmed_to(first_offsets[partition])
        self._doubt(consumer)
        self._connection_lost(consumer)

    async def _poll(self, consumer: AIOKafkaConsumer) -> None:
        """One wait for records, and what follows from what came or did not come."""
        loop = asyncio.get_running_loop()
        asked_at = loop.time()
        try:
            fetched = await consumer.getmany(timeout_ms=POLL_MS, max_records=self._config.read_records_max)
        except OffsetOutOfRangeError as error:
            await self._out_of_range(consumer, list(error.args[0]))
            return
        if self._connection_lost(consumer):
            # What just came may be of another broker's log: drop it, and ask for the record before again.
            self.attached = False
            self._doubt(consumer)
            return
        batch: list[LogRecord] = []
        for partition in sorted(fetched):
            batch.extend(self._partitions[partition].accept([_record(message) for message in fetched[partition]]))
        if fetched:
            self._tell_away(False)
        poll_ms = 1_000 * (loop.time() - asked_at)
        if batch:
            # First of all: the cursors are past it, and what follows may end this connection.
            await self._buffer.put(batch)
        await self._mind_silence(consumer, fetched, poll_ms)
        if not self.attached:
            self.attached = not any(cursor.doubted for cursor in self._cursors.values())

    def _doubt(self, consumer: AIOKafkaConsumer) -> None:
        for partition, cursor in self._partitions.items():
            cursor.doubt()
            consumer.seek(partition, cursor.fetch_offset)

    async def _out_of_range(self, consumer: AIOKafkaConsumer, partitions: Sequence[TopicPartition]) -> None:
        async with asyncio.timeout(self._config.request_timeout_ms / 1_000):
            first_offsets = await consumer.beginning_offsets(partitions)
        for partition in partitions:
            cursor = self._partitions[partition]
            cursor.trimmed_to(first_offsets[partition])
            consumer.seek(partition, cursor.fetch_offset)

    async def _mind_silence(
        self, consumer: AIOKafkaConsumer, fetched: Mapping[TopicPartition, object], poll_ms: float
    ) -> None:
        """Count the poll for those that showed nothing; doubt the idle; decide about the doubted.

        A poll counts for its own length at most: what this process slept through is not the broker's silence.
        """
        overdue: list[TopicPartition] = []
        for partition, cursor in self._partitions.items():
            if partition in fetched or not cursor.started:
                continue
            cursor.silent_ms += min(poll_ms, POLL_MS)
            if cursor.doubted and cursor.silent_ms >= self._config.verify_silence_ms:
                overdue.append(partition)
            elif not cursor.doubted and cursor.silent_ms >= self._config.probe_idle_ms:
                cursor.doubt()
                consumer.seek(partition, cursor.fetch_offset)
        if not overdue:
            return
        answers = await self._answers(consumer, overdue[0])
        self._tell_away(not answers, "it does not answer")
        if not answers or self._connection_lost(consumer):
            self.attached = False
            self._doubt(consumer)
            return
        for partition in overdue:
            cursor = self._partitions[partition]
            cursor.broker_answered_in_silence()
            consumer.seek(partition, cursor.fetch_offset)

    async def _answers(self, consumer: AIOKafkaConsumer, partition: TopicPartition) -> bool:
        """Whether the partition's broker answers a simple question right now."""
        try:
            async with asyncio.timeout(ANSWER_SECONDS_MAX):
                await consumer.beginning_offsets([partition])
        except (KafkaError, TimeoutError):
            return False
        return True

    def _connection_lost(self, consumer: AIOKafkaConsumer) -> bool:
        """Whether a connection known at the last call is gone; what is connected now is remembered.

        aiokafka reconnects without telling, so its table of connections is compared by identity.
        """
        table: dict[Any, Any] = dict(consumer._client._conns)
        table.pop(("bootstrap", ConnectionGroup.DEFAULT), None)  # closed on purpose once the brokers are known
        lost = any(
            not known.connected() or table.get(name) is not known for name, known in self._connections.items()
        )
        self._connections = {name: connection for name, connection in table.items() if connection.connected()}
        return lost

    def _tell_away(self, away: bool, reason: str = "") -> None:
        if away and not self._away:
            _log.warning("kafka_away", topic=self._topic, bootstrap=self._config.bootstrap, reason=reason)
        elif self._away and not away:
            _log.info("kafka_back", topic=self._topic, bootstrap=self._config.bootstrap)
        self._away = away


def _record(message: Any) -> LogRecord:
    return LogRecord(
        message.topic,
        message.partition,
        message.offset,
        message.key or b"",
        message.value or b"",
        message.timestamp,
    )
