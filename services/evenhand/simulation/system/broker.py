"""The simulated broker: ``memory.MemoryLog`` behind a network, as each process's reader and writer see it.

Records are real bytes on real partitions. A writer waits for the way there and back, a reader fetches what has
come since its last fetch; either finds the broker away for a while, or replaced by an empty one.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence

from evenhand.core.errors import Unavailable
from evenhand.memory import MemoryLog
from evenhand.ports import LogPosition, LogReader, LogRecord, LogReplaced, LogWriter
from evenhand.simulation.system.faults import Fault, Weather
from evenhand.simulation.system.process import Process
from evenhand.simulation.system.trace import Trace

PUBLISH_S = 0.002
FETCH_S = 0.002
AWAY_S = 0.05
"""How long it takes to find the broker away."""
IDLE_S_MAX = 0.5
FETCH_RECORDS_MAX = 1_000


class Broker:
    """The log and who waits for it."""

    def __init__(self, log: MemoryLog, weather: Weather, trace: Trace) -> None:
        self.log = log
        self.weather = weather
        self.trace = trace
        self.lives = 1
        self._waiting: dict[str, list[asyncio.Future[None]]] = {}

    def append(self, writer: str, topic: str, key: bytes, value: bytes) -> None:
        """Add a record and wake who reads the topic."""
        if self.weather.strikes(Fault.RECORDS_DOUBLED):
            self.log.duplicates_next = 1
        record = self.log.append(topic, key, value)
        self.trace.add(writer, f"wrote {topic} {record.partition} {record.offset} {record.digest().hex()[:12]}")
        self.wake(topic)

    def wake(self, topic: str) -> None:
        waiting = self._waiting.pop(topic, ())
        for waiter in waiting:
            if not waiter.done():
                waiter.set_result(None)

    def replace(self) -> None:
        """Come back empty."""
        self.log.replace()
        self.lives += 1

    async def changed(self, topic: str) -> None:
        """Return at the next record of the topic, or after a moment."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        self._waiting.setdefault(topic, []).append(waiter)
        timer = loop.call_later(IDLE_S_MAX, _finish, waiter)
        try:
            await waiter
        finally:
            timer.cancel()
            waiting = self._waiting.get(topic)
            if waiting is not None and waiter in waiting:
                waiting.remove(waiter)


def _finish(waiter: "asyncio.Future[None]") -> None:
    if not waiter.done():
        waiter.set_result(None)


class SimulatedWriter(LogWriter):
    """A process's way to write to the broker."""

    def __init__(self, broker: Broker, process: Process) -> None:
        self._broker = broker
        self._process = process

    async def publish(self, topic: str, key: bytes, value: bytes) -> None:
        broker, weather = self._broker, self._broker.weather
        await self._process.pause(weather.delay_s(PUBLISH_S))
        if not broker.log.available:
            await self._process.pause(AWAY_S)
            raise Unavailable("The broker is away.")
        broker.append(self._process.name, topic, key, value)
        if weather.strikes(Fault.RECORDS_UNACKNOWLEDGED):
            raise Unavailable("The broker did not acknowledge a record.")

    async def close(self) -> None:
        return


class SimulatedReader(LogReader):
    """A process's way to read from the broker."""

    def __init__(self, broker: Broker, process: Process) -> None:
        self._broker = broker
        self._process = process
        self._reads = 0

    @property
    def attached(self) -> bool:
        return self._reads > 0 and self._broker.log.available

    async def partition_count(self, topic: str) -> int:
        await self._process.pause(self._broker.weather.delay_s(FETCH_S))
        if not self._broker.log.available:
            raise Unavailable("The broker is away.")
        return self._broker.log.partitions

    async def read(self, topic: str, positions: Mapping[int, LogPosition]) -> AsyncIterator[Sequence[LogRecord]]:
        broker, log = self._broker, self._broker.log
        at = {partition: positions[partition] for partition in sorted(positions)}
        proven_life = 0
        try:
            while True:
                self._process.check()
                if log.available and proven_life != broker.lives:
                    await self._process.pause(broker.weather.delay_s(FETCH_S))
                    self._prove(topic, at)
                    proven_life, self._reads = broker.lives, 1
                if not self._has_news(topic, at):
                    await broker.changed(topic)
                    self._process.check()
                    if not self._has_news(topic, at):
                        yield ()
                    continue
                await self._process.pause(broker.weather.delay_s(FETCH_S))
                for partition, position in at.items():
                    offset = position.next_offset or log.first_offset(topic, partition)
                    records = log.fetch(topic, partition, offset, FETCH_RECORDS_MAX)
                    if records and proven_life == broker.lives:
                        at[partition] = LogPosition(records[-1].offset + 1, records[-1].digest())
                        self._process.check()
                        yield records
        finally:
            self._reads = 0

    async def close(self) -> None:
        return

    def _has_news(self, topic: str, at: Mapping[int, LogPosition]) -> bool:
        log = self._broker.log
        return log.available and any(
            log.end_offset(topic, partition) > position.next_offset for partition, position in at.items()
        )

    def _prove(self, topic: str, at: Mapping[int, LogPosition]) -> None:
        """Raise ``LogReplaced`` if the record before a position is another one, or gone."""
        for partition, position in at.items():
            if not position.next_offset:
                continue
            before = self._broker.log.fetch(topic, partition, position.next_offset - 1, 1)
            if not before or (position.digest_before and before[0].digest() != position.digest_before):
                raise LogReplaced(topic, partition, position.next_offset)
