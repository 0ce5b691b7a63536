"""One worker's edge at work: the tasks around ``EdgeState``.

::

    source ──▶ ┌───────┐      ┌────────────┐           ┌─────────┐
    poller ──▶ │ queue │ ──▶  │ owner task │ ──▶ state │publisher│ ──▶ evenhand.kv.v1
    control ─▶ └───────┘      └────────────┘           └─────────┘
              bounded          the only writer        one message at a time

The publisher keeps one message on its way and tries it again until the broker has it; meanwhile operations merge
in the outbox, bounded. The broker may be away for any time: what overflows is told by a snapshot later.

Several edges may run in one process, one for each worker or rank: nothing here is global. Time is the caller's
clock, in milliseconds since 1970, since epochs are made of it.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

from evenhand.core.errors import EvenhandError, MalformedMessage, Unavailable
from evenhand.core.kv import (
    ControlMessage,
    EpochFloor,
    KeysRefuted,
    KvMessage,
    SnapshotRequested,
    WorkerAnnounced,
)
from evenhand.logs import get_logger
from evenhand.ports import CONTROL_TOPIC, KV_TOPIC, LogPosition, LogReader, LogReplaced, LogWriter
from evenhand.wire.kv_codec import decode_control_message, encode_kv_message
from evenhand.wire.partition import partition_of
from evenhand.worker.checkpoint import EdgeCheckpoint, encode_checkpoint, read_checkpoint, write_checkpoint
from evenhand.worker.config import EdgeConfig
from evenhand.worker.continuity import AskReplay
from evenhand.worker.edge_state import EdgeState, EngineFacts, facts_of
from evenhand.worker.load import EnginePolled, EnginePoller
from evenhand.worker.source import FrameSource, SourceEvent

QUEUE_EVENTS_MAX = 4_096
EVENTS_IN_A_ROW_MAX = 256
"""Queued events handled before other tasks get their turn."""
PUBLISH_PAUSE_S_MIN = 0.05
PUBLISH_PAUSE_S_MAX = 1.0
CONTROL_PAUSE_S = 0.5
DISCOVERY_PAUSE_S = 0.5
FAREWELL_S_MAX = 5.0

_log = get_logger("worker-edge")


def wall_clock_ms() -> int:
    return time.time_ns() // 1_000_000


class WorkerEdge:
    """Runs until told to stop. One run for each object."""

    def __init__(
        self,
        config: EdgeConfig,
        source: FrameSource | None,
        writer: LogWriter,
        reader: LogReader,
        poller: EnginePoller,
        now_ms: Callable[[], int] = wall_clock_ms,
    ) -> None:
        """``source`` is None for an engine that sends no events. Writer, reader and poller stay the caller's."""
        self.config = config
        self.state: EdgeState | None = None
        """None until the engine's model and block size are known."""
        self.announced = asyncio.Event()
        """Set once the broker has the first announcement."""
        self.publishing = True
        """False while the broker does not take messages."""
        self._source = source
        self._writer = writer
        self._reader = reader
        self._poller = poller
        self._now_ms = now_ms
        self._queue: asyncio.Queue[SourceEvent | EnginePolled | ControlMessage] = asyncio.Queue(QUEUE_EVENTS_MAX)
        self._wake = asyncio.Event()

    async def run(self, stop: asyncio.Event, leave: bool = False) -> None:
        """Run until ``stop``. With ``leave`` the worker then says that it is gone for good.

        Raises the fault with a name that ended one of its tasks; one without, as a group with all that failed.
        """
        working = asyncio.create_task(self._work(), name=f"edge {self.config.worker_id}")
        stopping = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                await working
        except BaseExceptionGroup as several:
            named, others = several.split(EvenhandError)
            if named is None or others is not None:
                raise
            raise _first_of(named) from several
        finally:
            for task in (working, stopping):
                task.cancel()
            await asyncio.gather(working, stopping, return_exceptions=True)
        await self._end(leave)

    async def _work(self) -> None:
        state = await self._begin()
        async with asyncio.TaskGroup() as tasks:

            def go(work: Coroutine[Any, Any, None]) -> None:
                tasks.create_task(work)

            if self._source is not None:
                go(self._source.run(self._queue.put))
            go(self._own(state))
            go(self._publish(state))
            go(self._poll())
            go(self._read_control())
            if self.config.checkpoint is not None:
                go(self._keep_checkpoint(state))

    async def _begin(self) -> EdgeState:
        """Wait for the engine to say what it is, and pick up where a checkpoint ends."""
        facts = await self._discover()
        checkpoint = None
        path = self.config.checkpoint
        if path is not None:
            checkpoint = await asyncio.to_thread(read_checkpoint, path, self.config.worker_id, facts.model)
        replays = self._source is not None and self._source.replays
        self.state = EdgeState(self.config, facts, self._now_ms(), replays, checkpoint)
        # Numbers above the old reserve are about to be used: the next start must know, or it would use them again.
        if not await self._save(self.state.checkpoint()) and checkpoint is not None:
            self.state.begin_epoch_anew(self._now_ms())
        _log.info(
            "edge started",
            worker_id=self.config.worker_id,
            model=facts.model,
            epoch=self.state.outbox.epoch,
            from_checkpoint=checkpoint is not None,
        )
        return self.state

    async def _discover(self) -> EngineFacts:
        warned = False
        while True:
            facts = facts_of(self.config, await self._poller.poll())
            if facts is not None:
                return facts
            if not warned:
                _log.warning("the engine does not yet say its model and block size", address=self.config.address)
                warned = True
            await asyncio.sleep(DISCOVERY_PAUSE_S)

    # -- tasks

    async def _own(self, state: EdgeState) -> None:
        """The only task that feeds the state."""
        self._ask(state, state.start(self._now_ms()))
        while True:
            event = await self._queue.get()
            for _ in range(EVENTS_IN_A_ROW_MAX):
                self._handle(state, event)
                if self._queue.empty():
                    break
                event = self._queue.get_nowait()
            else:
                self._handle(state, event)
            self._wake.set()
            await asyncio.sleep(0)

    def _handle(self, state: EdgeState, event: SourceEvent | EnginePolled | ControlMessage) -> None:
        epoch, alarmed, now_ms = state.outbox.epoch, state.alarmed, self._now_ms()
        match event:
            case EnginePolled():
                self._ask(state, state.polled(event, now_ms))
            case SnapshotRequested() | EpochFloor() | KeysRefuted():
                state.control(event, now_ms)
            case _:
                self._ask(state, state.source_event(event, now_ms))
        if state.outbox.epoch != epoch:
            _log.info("a new epoch began", worker_id=self.config.worker_id, epoch=state.outbox.epoch)
        if state.alarmed and not alarmed:
            _log.warning("the engine has traffic and tells of no cache event", worker_id=self.config.worker_id)

    def _ask(self, state: EdgeState, asks: list[AskReplay]) -> None:
        if asks and self._source is not None:
            self._source.ask_replay(state.last_replay_ask, asks[-1].from_seq)

    async def _publish(self, state: EdgeState) -> None:
        key = self.config.worker_id.encode()
        while True:
            message = state.next_message(self._now_ms())
            if message is None:
                self._wake.clear()
                try:
                    async with asyncio.timeout(self.config.load_interval_ms / 1000):
                        await self._wake.wait()
                except TimeoutError:
                    pass
                continue
            await self._publish_one(state, key, message)

    async def _publish_one(self, state: EdgeState, key: bytes, message: KvMessage) -> None:
        value = encode_kv_message(message)
        pause_s = PUBLISH_PAUSE_S_MIN
        while True:
            try:
                await self._writer.publish(KV_TOPIC, key, value)
            except Unavailable as error:
                if self.publishing:
                    _log.warning(
                        "the broker does not take messages", worker_id=message.worker_id, reason=str(error)
                    )
                    self.publishing = False
                if isinstance(message, WorkerAnnounced):
                    state.announce_soon(self._now_ms())
                await asyncio.sleep(pause_s)
                pause_s = min(PUBLISH_PAUSE_S_MAX, pause_s * 2)
                if state.is_void(message):
                    return
                continue
            if not self.publishing:
                _log.info("the broker takes messages again", worker_id=message.worker_id)
                self.publishing = True
            if isinstance(message, WorkerAnnounced):
                self.announced.set()
            return

    async def _poll(self) -> None:
        interval_s = self.config.load_interval_ms / 1000
        while True:
            began = time.monotonic()
            await self._queue.put(await self._poller.poll())
            await asyncio.sleep(max(0.0, interval_s - (time.monotonic() - began)))

    async def _read_control(self) -> None:
        """Wishes from the topic's beginning on: they are idempotent, and positions need no keeping."""
        key = self.config.worker_id.encode()
        while True:
            try:
                partition = partition_of(key, await self._reader.partition_count(CONTROL_TOPIC))
                async for records in self._reader.read(CONTROL_TOPIC, {partition: LogPosition(0)}):
                    for record in records:
                        if record.key == key:
                            await self._take_control(record.key, record.value)
            except (Unavailable, LogReplaced):
                await asyncio.sleep(CONTROL_PAUSE_S)

    async def _take_control(self, key: bytes, value: bytes) -> None:
        try:
            message = decode_control_message(key, value)
        except MalformedMessage as error:
            _log.warning("a control message is malformed", worker_id=self.config.worker_id, reason=str(error))
            return
        await self._queue.put(message)

    async def _keep_checkpoint(self, state: EdgeState) -> None:
        pause_s = self.config.checkpoint_interval_ms / 1000
        due = time.monotonic() + pause_s
        while True:
            await asyncio.sleep(min(pause_s, 0.1))
            if state.checkpoint_urgent or time.monotonic() >= due:
                due = time.monotonic() + pause_s
                await self._save(state.checkpoint())

    async def _save(self, checkpoint: EdgeCheckpoint | None) -> bool:
        """Write a checkpoint, if there is anything to write and a place for it; False: it could not be done."""
        path = self.config.checkpoint
        if checkpoint is None or path is None:
            return True
        try:
            await asyncio.to_thread(write_checkpoint, path, encode_checkpoint(checkpoint))
        except OSError as error:
            _log.error("the checkpoint cannot be written", path=str(path), reason=str(error))
            return False
        return True

    async def _end(self, leave: bool) -> None:
        """A last checkpoint, or none at all for a worker that leaves and says so."""
        state, path = self.state, self.config.checkpoint
        if state is None:
            return
        if not leave:
            await self._save(state.checkpoint())
            return
        try:
            async with asyncio.timeout(FAREWELL_S_MAX):
                await self._writer.publish(
                    KV_TOPIC, self.config.worker_id.encode(), encode_kv_message(state.farewell())
                )
        except (Unavailable, TimeoutError):
            _log.warning("the broker was not told that the worker left", worker_id=self.config.worker_id)
            return
        if path is not None:
            await asyncio.to_thread(path.unlink, missing_ok=True)


def _first_of(group: BaseExceptionGroup[EvenhandError]) -> EvenhandError:
    first = group.exceptions[0]
    return _first_of(first) if isinstance(first, BaseExceptionGroup) else first
