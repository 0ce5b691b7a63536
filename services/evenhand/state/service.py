"""Events in, fold, map out: the service that keeps the durable cache map, exactly once.

::

    log ──read──▶ decode ──▶ gate ──▶ fold ──▶ pending ──seal──▶ commit (map and positions, one transaction)
                    │          │        └──▶ control messages
                    └ counted  └ counted       (asked for snapshots, told floors)

Two tasks share the map and the pending group on one event loop. The reader folds ahead; the committer seals what
was folded, in one go without a turn in between, and writes it while the reader goes on. So one commit is under way
at a time, each from exactly the positions the last one left, and a transaction holds all or none of what its
records did. After a crash reading resumes where the last commit ended: nothing is lost, nothing is done twice.

- The database is away: the group waits and grows; past its bound reading pauses. An interrupted commit is looked
  up before it is tried again.
- Another writer moved the positions: ``Fenced``, and this service ends.
- The log is another one: every worker is marked incomplete and asked for a snapshot, and reading starts over; both
  are stored in one guarded transaction.
- A record that does not decode is counted, named in the log and passed.

Not here: deleting workers that are silent (only their own word, or an administrator's, ends them).
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import TypeVar

from evenhand.core.cache_map import CacheMap
from evenhand.core.errors import Fenced, MalformedMessage, Unavailable
from evenhand.core.fold import FoldOutcome, doubt_all, fold
from evenhand.core.ids import WorkerId
from evenhand.core.kv import ControlMessage, KvMessage, WorkerAnnounced, WorkerLeft
from evenhand.logs import get_logger
from evenhand.ports import (
    KV_TOPIC,
    Directory,
    LogPosition,
    LogReader,
    LogRecord,
    LogReplaced,
    LogWriter,
    MapCommit,
    MapStore,
)
from evenhand.state.config import StateConfig
from evenhand.state.control import ControlPublisher
from evenhand.state.metrics import StateMetrics
from evenhand.state.pending import Pending
from evenhand.state.pools import PoolGate, Standing
from evenhand.wire.kv_codec import decode_kv_message

STRANGERS_LOGGED_MAX = 1_000
"""Workers that never announced themselves, named in the log once each."""

REREAD_SECONDS = 0.2
"""Pause before the log is read anew after it was replaced or went away."""

_log = get_logger("state")
SWEEPS_PER_SILENCE = 10
"""How often silent workers are looked for while one becomes too silent."""

_Result = TypeVar("_Result")


class StateService:
    """One state service. ``run`` returns after ``stop``, or raises what ends the service."""

    def __init__(
        self,
        config: StateConfig,
        open_store: Callable[[int], MapStore],
        directory: Directory,
        reader: LogReader,
        writer: LogWriter,
        metrics: StateMetrics,
    ) -> None:
        """``open_store`` makes the store for the topic's partition count, which is known once the log is there."""
        self.cache_map = CacheMap()
        self._config = config
        self._open_store = open_store
        self._reader = reader
        self._metrics = metrics
        self._gate = PoolGate(directory)
        self._control = ControlPublisher(writer, self._count_control)
        self._pending = Pending(self.cache_map)
        self._stored: dict[int, LogPosition] = {}
        """Positions as the last commit left them: what the next one expects."""
        self._partitions: range = range(0)
        self._work = asyncio.Event()
        """Something is pending that should not wait."""
        self._full = asyncio.Event()
        """The pending group has reached its size."""
        self._room = asyncio.Event()
        """Reading may go on."""
        self._room.set()
        self._stopping = asyncio.Event()
        self._waiting_for = "The state service is starting."
        """Why nothing goes on; empty: it does."""
        self._outcomes: dict[str, int] = {}
        """What became of records since they were last handed to the metrics."""
        self._applied = 0
        """As ``_outcomes``, for the one outcome of nearly all."""
        self._strangers: dict[str, None] = {}
        self._malformed_logged: list[float] = []
        self._signs: dict[WorkerId, float] = {}
        """When a worker was last read of; for those in the map."""
        self._read_at = self._swept_at = time.monotonic()

    def not_ready(self) -> str:
        """Why the service is not ready, in one sentence; empty: it is."""
        if not self._waiting_for and not self._reader.attached:
            return "The log does not answer."
        return self._waiting_for

    def stop(self) -> None:
        """Commit what is folded, within the bound, and let ``run`` return."""
        self._stopping.set()

    async def run(self) -> None:
        """Load, then read, fold and commit until ``stop``.

        Raises ``Fenced`` if another writer owns the map, ``Unavailable`` if database or log are not there at the
        start in time, ``SchemaMismatch`` if the stored map is not this build's.
        """
        try:
            async with asyncio.timeout(self._config.start_ms_max / 1000):
                await self._load()
        except TimeoutError:
            raise Unavailable(f"The state service cannot start: {self._waiting_for}") from None
        self._waiting_for = ""
        committer = asyncio.create_task(self._commit_forever())
        others = [
            asyncio.create_task(self._read_forever()),
            asyncio.create_task(self._control.run()),
            asyncio.create_task(_until(self._stopping)),
        ]
        try:
            done, _ = await asyncio.wait([committer, *others], return_when=asyncio.FIRST_COMPLETED)
            self._waiting_for = "The state service is stopping."
            await _end(others)
            await self._finish(committer)
        finally:
            await _end([committer, *others])
        for task in (*done, committer):
            if not task.cancelled():
                task.result()

    async def _finish(self, committer: asyncio.Task[None]) -> None:
        """Let the committer end its round and write the rest, within the bound."""
        self.stop()
        self._work.set()
        self._full.set()
        done, _ = await asyncio.wait([committer], timeout=self._config.stop_ms_max / 1000)
        if not done:
            _log.warning("stopped before everything folded was committed; it is read again at the next start")

    # Start

    async def _load(self) -> None:
        self._partitions = range(await self._patiently(lambda: self._reader.partition_count(KV_TOPIC)))
        self._store = self._open_store(len(self._partitions))
        stored = await self._patiently(self._store.load)
        for worker in stored.workers:
            self.cache_map.restore(worker.worker_id, worker.position, worker.held)
            if not worker.position.left:
                self._pending.restored(worker.worker_id, worker.delta_rows)
        living = [worker for worker in stored.workers if worker.announced and not worker.position.left]
        self._gate.restore([worker.announced for worker in living if worker.announced])
        self._stored = dict(stored.positions)
        _log.info(
            "map loaded",
            workers=len(stored.workers),
            blocks=self.cache_map.copy_count,
            positions={partition: at.next_offset for partition, at in stored.positions.items()},
        )

    async def _patiently(self, call: Callable[[], Awaitable[_Result]]) -> _Result:
        """Try until it is there; ``Fenced`` is final."""
        wait_ms = self._config.retry_ms_min
        waited_before = self._waiting_for
        told = False
        while True:
            try:
                result = await call()
                self._waiting_for = waited_before
                return result
            except Fenced:
                raise
            except Unavailable as error:
                self._waiting_for = str(error)
                if not told:
                    _log.warning("waiting", reason=str(error))
                    told = True
            await asyncio.sleep(wait_ms / 1000)
            wait_ms = min(2 * wait_ms, self._config.retry_ms_max)

    # Reading and folding

    async def _read_forever(self) -> None:
        first = {partition: self._stored.get(partition, LogPosition(0)) for partition in self._partitions}
        while True:
            batches = self._reader.read(KV_TOPIC, {**first, **self._pending.positions()})
            try:
                async for records in batches:
                    await self._take(records)
            except LogReplaced as error:
                self._start_over(error)
            except Unavailable as error:
                _log.warning("reading waits for the log", reason=str(error))
            finally:
                if isinstance(batches, AsyncGenerator):
                    await batches.aclose()
            await asyncio.sleep(REREAD_SECONDS)

    async def _take(self, records: Sequence[LogRecord]) -> None:
        size = self._config.slice_records_max
        for start in range(0, len(records), size):
            changes_before = self._pending.key_changes
            self._mind_pauses()
            for record in records[start : start + size]:
                message = self._decoded(record)
                if message is None:
                    self._pending.read(record)
                elif type(message) is WorkerAnnounced:
                    await self._take_announced(record, message)
                else:
                    self._fold(record, message)
            self._forget_the_silent()
            self._count(self._pending.key_changes - changes_before)
            self._wake_committer()
            await asyncio.sleep(0)
            if not self._has_room():
                await self._pause()

    def _decoded(self, record: LogRecord) -> KvMessage | None:
        try:
            return decode_kv_message(record.key, record.value)
        except MalformedMessage as error:
            self._outcomes["malformed"] = self._outcomes.get("malformed", 0) + 1
            now = time.monotonic()
            self._malformed_logged = [at for at in self._malformed_logged if now - at < 60]
            if len(self._malformed_logged) < self._config.malformed_logged_per_minute_max:
                self._malformed_logged.append(now)
                _log.warning(
                    "passed a record", reason=str(error), partition=record.partition, offset=record.offset
                )
            return None

    def _fold(self, record: LogRecord, message: KvMessage) -> None:
        """Fold one message and take its record as read: no turn of the event loop lies between the two."""
        worker_id = message.worker_id
        if not self._gate.is_admitted(worker_id) and self.cache_map.worker(worker_id) is None:
            self._pending.read(record)
            self._pass(message)
            return
        result = fold(self.cache_map, message)
        self._signs[worker_id] = self._read_at
        outcome = result.outcome
        if outcome is FoldOutcome.APPLIED:
            self._applied += 1
        else:
            self._outcomes[outcome.value] = self._outcomes.get(outcome.value, 0) + 1
        if result.changes:
            self._pending.take(worker_id, result, message if isinstance(message, WorkerAnnounced) else None)
        self._pending.read(record)
        for wish in result.control:
            self._control.wish(wish)
        if outcome is FoldOutcome.LEFT:
            self._gate.forget(worker_id)

    def _mind_pauses(self) -> None:
        """Records are about to be folded. While none were, nobody could be heard: that is no worker's silence."""
        now = time.monotonic()
        if now - self._read_at > self._config.worker_forgotten_after_ms / 1000 / SWEEPS_PER_SILENCE:
            self._signs.clear()
        self._read_at = now

    def _forget_the_silent(self) -> None:
        """Take workers that ended without a word for gone: a fleet of changing names would fill the database."""
        silence_max = self._config.worker_forgotten_after_ms / 1000
        if self._read_at - self._swept_at < silence_max / SWEEPS_PER_SILENCE:
            return
        self._swept_at = self._read_at
        living = self.cache_map.worker_ids()
        signs = {worker_id: self._signs.get(worker_id, self._read_at) for worker_id in living}
        for worker_id in living:
            if self._read_at - signs[worker_id] <= silence_max:
                continue
            position = self.cache_map.position(worker_id)
            assert position is not None, worker_id
            self._pending.take(worker_id, fold(self.cache_map, WorkerLeft(worker_id, position.epoch)), None)
            self._gate.forget(worker_id)
            del signs[worker_id]
            _log.info("a worker that fell silent counts as left", worker_id=worker_id)
        self._signs = signs

    async def _take_announced(self, record: LogRecord, announced: WorkerAnnounced) -> None:
        known = self.cache_map.position(announced.worker_id)
        if known is not None and announced.epoch < known.epoch:
            # The last words of a former life decide nothing.
            self._fold(record, announced)
            return
        reason = await self._patiently(lambda: self._gate.decide(announced))
        if reason is None:
            self._fold(record, announced)
            return
        self._metrics.workers_refused.inc()
        self._outcomes["refused"] = self._outcomes.get("refused", 0) + 1
        _log.warning("worker refused", reason=reason)
        if self.cache_map.worker(announced.worker_id) is not None:
            # What it held under its former word is void.
            left = WorkerLeft(announced.worker_id, announced.epoch)
            self._pending.take(announced.worker_id, fold(self.cache_map, left), None)
        self._pending.read(record)

    def _pass(self, message: KvMessage) -> None:
        """Not to be folded: the worker is refused, or has not said who it is."""
        standing = self._gate.standing(message.worker_id)
        if isinstance(message, WorkerLeft):
            self._gate.forget(message.worker_id)
        self._outcomes[standing.value] = self._outcomes.get(standing.value, 0) + 1
        if standing is not Standing.UNANNOUNCED or message.worker_id in self._strangers:
            return
        if len(self._strangers) < STRANGERS_LOGGED_MAX:
            self._strangers[message.worker_id] = None
            _log.warning("events wait for their worker's announcement", worker_id=message.worker_id)

    def _start_over(self, error: LogReplaced) -> None:
        self._metrics.logs_replaced.inc()
        _log.warning("the log is another one: asking every worker for a snapshot", reason=str(error))
        for wish in doubt_all(self.cache_map, "The event log was replaced."):
            self._control.wish(wish)
            position = self.cache_map.position(wish.worker_id)
            assert position is not None, wish.worker_id
            self._pending.touch(wish.worker_id, position)
        self._pending.start_over(self._partitions)
        self._work.set()

    # Committing

    def _wake_committer(self) -> None:
        if self._pending.changed:
            self._work.set()
        if self._pending.key_changes >= self._config.group_key_changes_max:
            self._full.set()

    async def _commit_forever(self) -> None:
        while not (self._stopping.is_set() and self._pending.empty):
            await _wait(self._work, self._config.idle_commit_ms)
            if self._work.is_set():
                await _wait(self._full, self._config.group_ms_max)
            self._work.clear()
            self._full.clear()
            if not self._pending.empty:
                await self._commit_pending()
            if self._stopping.is_set():
                self._work.set()
                self._full.set()

    async def _commit_pending(self) -> None:
        compactions_before = self._pending.compactions_total
        published_at_ms = self._pending.published_at_ms
        commit = self._pending.seal(self._stored)
        started_at = time.monotonic()
        await self._commit(commit)
        self._stored.update(commit.positions)
        self._metrics.commits.inc()
        self._metrics.commit_seconds.observe(time.monotonic() - started_at)
        if published_at_ms:
            self._metrics.lag_seconds.observe(max(0.0, time.time() - published_at_ms / 1000))
        self._metrics.compactions.inc(self._pending.compactions_total - compactions_before)
        self._wake_committer()
        if self._has_room():
            self._room.set()

    async def _commit(self, commit: MapCommit) -> None:
        """Write it once, however often that is tried."""
        wait_ms = self._config.retry_ms_min
        in_doubt = False
        while True:
            try:
                if in_doubt and await self._is_stored(commit):
                    break
                await self._store.commit(commit)
                break
            except Fenced:
                raise
            except Unavailable as error:
                if not in_doubt:
                    _log.warning("commits wait for the database", reason=str(error))
                in_doubt = True
            await asyncio.sleep(wait_ms / 1000)
            wait_ms = min(2 * wait_ms, self._config.retry_ms_max)
        if in_doubt:
            _log.info("the database takes commits again")

    async def _is_stored(self, commit: MapCommit) -> bool:
        """Whether a commit whose end was not heard was made: no other step leads to its positions from ours.

        One that moves nothing (the log was replaced twice in a row) cannot be told; making it twice is harmless.
        """
        if commit.positions == commit.expected:
            return False
        stored = await self._store.positions()
        return all(stored.get(partition) == at for partition, at in commit.positions.items())

    def _has_room(self) -> bool:
        return (
            self._pending.key_changes < self._config.lag_key_changes_max
            and self._pending.records < self._config.lag_records_max
        )

    async def _pause(self) -> None:
        self._metrics.paused.set(1)
        self._waiting_for = "Reading waits for commits: the database is away or slow."
        _log.warning("reading pauses until the database has caught up")
        self._room.clear()
        await self._room.wait()
        self._metrics.paused.set(0)
        self._waiting_for = ""

    # Counting

    def _count(self, key_changes: int) -> None:
        if self._applied:
            self._outcomes[FoldOutcome.APPLIED.value] = self._applied
        self._metrics.count_records(self._outcomes)
        self._outcomes.clear()
        self._applied = 0
        if key_changes > 0:
            self._metrics.key_changes.inc(key_changes)

    def _count_control(self, message: ControlMessage) -> None:
        self._metrics.control.labels(type(message).__name__).inc()

    def metrics_page(self) -> bytes:
        """The metrics page, with gauges as they stand."""
        self._metrics.pending.set(self._pending.key_changes)
        self._metrics.workers.set(len(self.cache_map.worker_ids()))
        self._metrics.blocks.set(self.cache_map.copy_count)
        return self._metrics.page()


async def _until(event: asyncio.Event) -> None:
    await event.wait()


async def _wait(event: asyncio.Event, ms_max: int) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(ms_max / 1000):
            await event.wait()


async def _end(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Cancel what still runs and wait for it; results are looked at by who wants them."""
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
