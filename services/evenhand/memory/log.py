"""A partitioned log in memory, with a reader and a writer for it.

``MemoryLog`` is the broker. Its plain methods (``append``, ``fetch``) need no event loop, so that a simulation on
a virtual clock can drive it; ``MemoryLogReader`` and ``MemoryLogWriter`` are the ports over it.

Always: offsets of a partition grow by one and are never reused within one life of the log; a reader sees each
record once and in order, or ``LogReplaced``. Not here: consumer groups, transactions, compaction.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from evenhand.core.errors import Unavailable
from evenhand.ports import LogPosition, LogReader, LogRecord, LogReplaced, LogWriter
from evenhand.wire.partition import partition_of

READ_RECORDS_MAX = 1_000
"""Records in one batch of a reader."""

IDLE_WAIT_SECONDS_MAX = 0.1
"""A reader yields an empty batch at least this often, on the running loop's clock."""


@dataclass(slots=True)
class _Partition:
    first_offset: int = 0
    records: list[LogRecord] = field(default_factory=list)

    @property
    def end_offset(self) -> int:
        return self.first_offset + len(self.records)


class MemoryLog:
    """The broker: topics of partitions of records, and switches for its faults."""

    def __init__(self, partitions: int = 8, now_ms: Callable[[], int] = lambda: 0) -> None:
        """``now_ms`` stamps records; ``partitions`` is the count of every topic, made at its first use."""
        self.partitions = partitions
        self.available = True
        """False: writers raise ``Unavailable``, readers see nothing; what is there stays."""
        self.duplicates_next = 0
        """So many appends from here on are written twice, as a retry without idempotence does."""
        self.unacknowledged_next = 0
        """So many publishes from here on are written, and the writer is told ``Unavailable`` all the same."""
        self._now_ms = now_ms
        self._topics: dict[str, list[_Partition]] = {}
        self._waiting: list[asyncio.Future[None]] = []

    def append(self, topic: str, key: bytes, value: bytes) -> LogRecord:
        """Add one record at the end of its key's partition; raises ``Unavailable`` while the log is away."""
        if not self.available:
            raise Unavailable("The log is away.")
        number = partition_of(key, self.partitions)
        partition = self._partition(topic, number)
        times = 1
        if self.duplicates_next:
            self.duplicates_next -= 1
            times = 2
        for _ in range(times):
            record = LogRecord(topic, number, partition.end_offset, key, value, self._now_ms())
            partition.records.append(record)
        self._wake()
        return record

    def fetch(self, topic: str, partition: int, offset: int, records_max: int) -> Sequence[LogRecord]:
        """Records from ``offset`` on; none at the end, beyond it, before the first or while the log is away."""
        stored = self._partition(topic, partition)
        index = offset - stored.first_offset
        if not self.available or index < 0:
            return ()
        return stored.records[index : index + records_max]

    def first_offset(self, topic: str, partition: int) -> int:
        return self._partition(topic, partition).first_offset

    def end_offset(self, topic: str, partition: int) -> int:
        """One more than the last record's offset."""
        return self._partition(topic, partition).end_offset

    def records(self, topic: str) -> tuple[LogRecord, ...]:
        """All that is kept of a topic, by partition and offset."""
        return tuple(
            record for number in range(self.partitions) for record in self._partition(topic, number).records
        )

    def replace(self) -> None:
        """Become another, empty log: offsets begin at 0, as after the restart of a broker that keeps nothing."""
        self._topics.clear()
        self._wake()

    def trim(self, topic: str, partition: int, first_offset: int) -> None:
        """Forget what stands before ``first_offset``, as retention does."""
        stored = self._partition(topic, partition)
        forgotten = min(max(0, first_offset - stored.first_offset), len(stored.records))
        del stored.records[:forgotten]
        stored.first_offset += forgotten
        self._wake()

    async def changed(self, seconds_max: float) -> None:
        """Return at the next append, replacement or trim, or after ``seconds_max`` of the loop's clock."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        self._waiting.append(waiter)
        timer = loop.call_later(seconds_max, _finish, waiter)
        try:
            await waiter
        finally:
            timer.cancel()
            if waiter in self._waiting:
                self._waiting.remove(waiter)

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            _finish(waiter)

    def _partition(self, topic: str, partition: int) -> _Partition:
        if topic not in self._topics:
            self._topics[topic] = [_Partition() for _ in range(self.partitions)]
        return self._topics[topic][partition]


def _finish(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


@dataclass(slots=True)
class _Cursor:
    """Where one partition is read on, and the record that must stand just before."""

    partition: int
    next_offset: int
    digest_before: bytes

    def check(self, log: MemoryLog, topic: str) -> None:
        """Raise ``LogReplaced`` if the record before is another one, or gone."""
        if not self.next_offset:
            return
        before = log.fetch(topic, self.partition, self.next_offset - 1, 1)
        if not before or (self.digest_before and before[0].digest() != self.digest_before):
            raise LogReplaced(topic, self.partition, self.next_offset)


class MemoryLogReader(LogReader):
    """``LogReader`` over a ``MemoryLog``."""

    def __init__(self, log: MemoryLog) -> None:
        self._log = log
        self._closed = False
        self._reads = 0

    @property
    def attached(self) -> bool:
        return self._reads > 0 and self._log.available

    async def partition_count(self, topic: str) -> int:
        if not self._log.available:
            raise Unavailable("The log is away.")
        return self._log.partitions

    async def read(self, topic: str, positions: Mapping[int, LogPosition]) -> AsyncIterator[Sequence[LogRecord]]:
        log = self._log
        cursors = [_Cursor(p, at.next_offset, at.digest_before) for p, at in sorted(positions.items())]
        self._reads += 1
        try:
            while not self._closed:
                found = False
                if log.available:
                    for cursor in cursors:
                        cursor.check(log, topic)
                        if not cursor.next_offset:
                            cursor.next_offset = log.first_offset(topic, cursor.partition)
                        records = log.fetch(topic, cursor.partition, cursor.next_offset, READ_RECORDS_MAX)
                        if records:
                            cursor.next_offset = records[-1].offset + 1
                            cursor.digest_before = records[-1].digest()
                            found = True
                            yield records
                if not found:
                    await log.changed(IDLE_WAIT_SECONDS_MAX)
                    if not self._closed:
                        yield ()
        finally:
            self._reads -= 1

    async def close(self) -> None:
        self._closed = True


class MemoryLogWriter(LogWriter):
    """``LogWriter`` over a ``MemoryLog``."""

    def __init__(self, log: MemoryLog) -> None:
        self._log = log

    async def publish(self, topic: str, key: bytes, value: bytes) -> None:
        self._log.append(topic, key, value)
        if self._log.unacknowledged_next:
            self._log.unacknowledged_next -= 1
            raise Unavailable("The log did not acknowledge a record.")

    async def close(self) -> None:
        return
