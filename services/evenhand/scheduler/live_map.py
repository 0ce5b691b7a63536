"""The live cache map of one pool: loaded from the store, then kept forward from the event log.

::

    MapStore.load()  map + positions, one snapshot ─▶ CacheMap ─▶ LogReader.read from exactly there ─▶ fold ─▶ …

Only workers that announced themselves to this pool are folded; a worker that does not fit the pool (model, block
size, key scheme) is refused with the reason and takes no part. What the scheduler must know is told as inputs of
the core: WorkerJoined, WorkerHeard, WorkerGone, MapChanged. A standby tails as well, so that it takes over warm.

A worker from the store becomes a candidate at its first sign of life in the log, not before: the store does not
know who is alive. Later signs of life are load reports of a healthy engine alone: an edge goes on announcing an
engine that has died. An engine that fails its health check thus goes stale, then is lost.

A silent log is not a dead fleet: if nothing at all arrives from two or more workers, those that were well when the
silence began count as heard for at most ``SILENCE_S_MAX``, so that a broker that is away for a while neither stops
dispatch nor ends anybody's tickets. A pool of one worker cannot tell the two apart and lets it go stale.

If the log is another one than the positions were made on, the map is kept but every worker counts as incomplete,
snapshots are asked for, and reading starts at the log's beginning; folding twice changes nothing.
"""

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import assert_never

from evenhand.core.announcement import check_announcement
from evenhand.core.cache_map import CacheMap
from evenhand.core.errors import MalformedMessage, Unavailable
from evenhand.core.facts import SchedulerConfig, WorkerLoad, WorkerSpec
from evenhand.core.fold import FoldResult, doubt_all, fold
from evenhand.core.ids import WorkerId
from evenhand.core.kv import (
    ControlMessage,
    KvBatch,
    SnapshotPart,
    WorkerAnnounced,
    WorkerLeft,
    WorkerLoadReported,
)
from evenhand.core.steps import Input, MapChanged, WorkerGone, WorkerHeard, WorkerJoined
from evenhand.logs import get_logger
from evenhand.ports import KV_TOPIC, LogPosition, LogReader, LogRecord, LogReplaced, MapStore, PoolSpec
from evenhand.scheduler.directory_watch import DirectoryWatch
from evenhand.scheduler.metrics import SchedulerMetrics
from evenhand.wire.kv_codec import decode_kv_message

RETRY_S = 0.5
"""Pause before reading on after the broker or the directory was away."""
FOLD_S_MAX = 0.002
"""After so long a fold, between two records, other tasks of the loop have their turn."""
CAUGHT_UP_AGE_MS = 1_000
"""A record younger than this, by its time in the log, means that the tail is reached."""
CAUGHT_UP_STEADY_S = 3.0
"""So does an age of the records read that shrinks no more for so long: the clocks of this host and of those who
write may differ by more than that, and a busy log never says that it has nothing more."""
SILENCE_S_MAX = 60.0
"""Longest silence of the whole log that is taken for the broker's."""
SILENCE_WORKERS_MIN = 2
FORGOTTEN_AFTER_S = 600.0
"""A worker that gave no sign for so long, while others did, is forgotten with its map, though it never left."""
FORGET_INTERVAL_S = 10.0
WORKERS_REFUSED_MAX = 1_024
"""Refused workers whose reason is remembered."""

log = get_logger("scheduler.live_map")


class LiveMap:
    """The pool's map, its workers and their load; the only writer of all three."""

    def __init__(
        self,
        store: MapStore,
        reader: LogReader,
        watch: DirectoryWatch,
        config: SchedulerConfig,
        tell: Callable[[Input], object],
        wish: Callable[[ControlMessage], None],
        metrics: SchedulerMetrics,
    ) -> None:
        self._store = store
        self._reader = reader
        self._watch = watch
        self._pool_id = config.pool_id
        self._stale_after_ns = config.worker_stale_after_ms * 1_000_000
        self._heard_last_ns = time.monotonic_ns()
        self._vouched_last_ns = 0
        self._signs: dict[WorkerId, int] = {}
        """When a worker last gave a sign of life, monotonic; for those in ``_announced``."""
        self._forgot_last_ns = 0
        self._age_least_ms = math.inf
        """Least age of a record read since the start, by this host's clock."""
        self._age_shrank_at_ns = 0
        self._lost_after_ns = config.worker_lost_after_ms * 1_000_000
        self._tell = tell
        self._wish = wish
        self._metrics = metrics
        self._announced: dict[WorkerId, WorkerAnnounced] = {}
        self._positions: dict[int, LogPosition] = {}
        self._touched: dict[WorkerId, None] = {}
        self.cache_map = CacheMap()
        self.workers: dict[WorkerId, WorkerSpec] = {}
        """Workers that have shown a sign of life and not left."""
        self.loads: dict[WorkerId, WorkerLoad] = {}
        self.refused: dict[WorkerId, str] = {}
        """Workers that do not fit the pool, with the reason."""
        self.caught_up = asyncio.Event()
        """Set once the log has been read up to its end after the start."""

    async def load(self) -> None:
        """Take the stored map over. Raises ``Unavailable``."""
        stored = await self._store.load()
        for worker in stored.workers:
            announced = worker.announced
            if worker.position.left:
                self.cache_map.restore(worker.worker_id, worker.position, ())
                continue
            if announced is None or announced.pool_id != self._pool_id:
                continue
            if await self._misfit(announced):
                continue
            self.cache_map.restore(worker.worker_id, worker.position, worker.held)
            self._announced[worker.worker_id] = replace(announced, epoch=worker.position.epoch)
            self._signs[worker.worker_id] = time.monotonic_ns()
            await asyncio.sleep(0)
        self._positions = dict(stored.positions)

    async def run(self) -> None:
        """Read the log until cancelled."""
        while True:
            try:
                for partition in range(await self._reader.partition_count(KV_TOPIC)):
                    self._positions.setdefault(partition, LogPosition(0))
                async for records in self._reader.read(KV_TOPIC, dict(self._positions)):
                    await self._take(records)
            except LogReplaced as replaced:
                log.warning("log_replaced", partition=replaced.partition, offset=replaced.offset)
                self._positions = dict.fromkeys(self._positions, LogPosition(0))
                for wish in doubt_all(self.cache_map, str(replaced)):
                    self._wish(wish)
                    self._tell(MapChanged(wish.worker_id))
            except Unavailable as error:
                log.warning("log_away", error=str(error))
            await asyncio.sleep(RETRY_S)

    async def _take(self, records: Sequence[LogRecord]) -> None:
        if records:
            self._heard_last_ns = time.monotonic_ns()
        else:
            self._mind_silence(time.monotonic_ns())
        last: dict[int, LogRecord] = {}
        began = time.perf_counter()
        for record in records:
            try:
                message = decode_kv_message(record.key, record.value)
            except MalformedMessage as error:
                self._metrics.messages.add("malformed")
                log.warning(
                    "malformed_message", error=str(error), partition=record.partition, offset=record.offset
                )
            else:
                match message:
                    case WorkerAnnounced():
                        await self._take_announced(message)
                    case WorkerLoadReported():
                        self._take_load(message)
                    case KvBatch() | SnapshotPart():
                        self._take_events(message)
                    case WorkerLeft():
                        self._take_left(message)
                    case _:
                        assert_never(message)
            last[record.partition] = record
            if time.perf_counter() - began > FOLD_S_MAX:
                self._tell_touched()
                await asyncio.sleep(0)
                began = time.perf_counter()
        self._tell_touched()
        for partition, record in last.items():
            self._positions[partition] = LogPosition(record.offset + 1, record.digest())
        self._forget_the_silent()
        if not self.caught_up.is_set():
            self._look_whether_caught_up(records)

    def _look_whether_caught_up(self, records: Sequence[LogRecord]) -> None:
        if records:
            age_ms = time.time() * 1000 - records[-1].published_at_ms
            at_its_end = age_ms < CAUGHT_UP_AGE_MS or self._is_steady(age_ms)
        else:
            at_its_end = self._reader.attached
        if at_its_end:
            self.caught_up.set()

    def _is_steady(self, age_ms: float) -> bool:
        """Whether records have ceased to become younger: on the way to the tail they do, there they do not."""
        now_ns = time.monotonic_ns()
        if age_ms < self._age_least_ms - CAUGHT_UP_AGE_MS / 2:
            self._age_least_ms, self._age_shrank_at_ns = age_ms, now_ns
        return now_ns - self._age_shrank_at_ns > CAUGHT_UP_STEADY_S * 1e9

    def _tell_touched(self) -> None:
        for worker_id in self._touched:
            self._tell(MapChanged(worker_id))
        self._touched.clear()

    def _folded(self, result: FoldResult, worker_id: WorkerId) -> None:
        self._metrics.messages.add(result.outcome.value)
        for wish in result.control:
            self._wish(wish)
        if result.replaced or result.operations:
            self._touched[worker_id] = None

    # ---- messages -------------------------------------------------------------------------------------------

    def _take_events(self, message: KvBatch | SnapshotPart) -> None:
        worker_id = message.worker_id
        announced = self._announced.get(worker_id)
        if announced is None:
            self._metrics.messages.add("foreign")
            return
        result = fold(self.cache_map, message)
        self._folded(result, worker_id)
        if isinstance(message, KvBatch) and message.emitted_at_ms:
            self._metrics.lag.add(max(0.0, time.time() - message.emitted_at_ms / 1000))
        if result.position is not None and result.position.epoch > announced.epoch:
            self._enter(replace(announced, epoch=result.position.epoch))

    async def _take_announced(self, announced: WorkerAnnounced) -> None:
        worker_id = announced.worker_id
        if announced.pool_id != self._pool_id:
            self._metrics.messages.add("foreign")
            if worker_id in self._announced and announced.epoch >= self._announced[worker_id].epoch:
                self._forget(worker_id, f"Worker {worker_id} has moved to another pool.")
            return
        try:
            misfit = await self._misfit(announced)
        except Unavailable as error:
            log.warning("announcement_postponed", worker=worker_id, error=str(error))
            return  # the next heartbeat brings it again
        if not misfit and announced.kv_blocks < 1 and worker_id not in self._announced:
            misfit = (
                f"Worker {worker_id} does not say how many KV blocks it holds; its edge has --kv-blocks for that."
            )
        if misfit:
            self._refuse(worker_id, misfit)
            return
        self.refused.pop(worker_id, None)
        result = fold(self.cache_map, announced)
        self._folded(result, worker_id)
        if result.changes:
            self._enter(announced)
            if worker_id not in self.loads:
                self._heard(worker_id, None)

    async def _misfit(self, announced: WorkerAnnounced) -> str | None:
        """Why a worker cannot be of this pool; None if it can. The first worker defines an unknown pool."""
        misfit = check_announcement(self._watch.pool, announced)
        if misfit or self._watch.pool is not None:
            return misfit
        pool = await self._watch.define_pool(
            PoolSpec(
                announced.pool_id,
                announced.model,
                announced.block_size_tokens,
                announced.key_scheme,
                announced.salt_generation,
            )
        )
        return check_announcement(pool, announced)

    def _refuse(self, worker_id: WorkerId, sentence: str) -> None:
        if self.refused.get(worker_id) != sentence:
            log.warning("worker_refused", worker=worker_id, reason=sentence)
        self._metrics.workers_refused.inc()
        self.refused.pop(worker_id, None)
        if len(self.refused) >= WORKERS_REFUSED_MAX:
            del self.refused[next(iter(self.refused))]
        self.refused[worker_id] = sentence
        if worker_id in self._announced:
            self._forget(worker_id, sentence)

    def _take_load(self, load: WorkerLoadReported) -> None:
        announced = self._announced.get(load.worker_id)
        if announced is None or load.epoch != announced.epoch:
            self._metrics.messages.add("foreign" if announced is None else "stale_load")
            return
        if not load.healthy:
            self._metrics.messages.add("unhealthy")
            return
        self._enter(announced)
        self._heard(load.worker_id, load)

    def _take_left(self, left: WorkerLeft) -> None:
        announced = self._announced.get(left.worker_id)
        if announced is None:
            return
        result = fold(self.cache_map, left)
        self._folded(result, left.worker_id)
        self._touched.pop(left.worker_id, None)
        if result.position is not None and result.position.left:
            self._drop(left.worker_id, f"Worker {left.worker_id} has left the pool.")

    # ---- workers --------------------------------------------------------------------------------------------

    def _enter(self, announced: WorkerAnnounced) -> None:
        """Note a living worker; told to the scheduler if anything about it differs."""
        self._announced[announced.worker_id] = announced
        self._signs[announced.worker_id] = time.monotonic_ns()
        spec = WorkerSpec(
            worker_id=announced.worker_id,
            pool_id=announced.pool_id,
            address=announced.address,
            epoch=announced.epoch,
            slots=announced.slots,
            kv_blocks=announced.kv_blocks,
            block_size_tokens=announced.block_size_tokens,
            data_parallel_rank=announced.data_parallel_rank,
            model_length_max_tokens=announced.model_length_max_tokens,
            sends_events=announced.sends_events,
        )
        if self.workers.get(announced.worker_id) != spec:
            self.workers[announced.worker_id] = spec
            self._tell(WorkerJoined(spec))

    def _heard(self, worker_id: WorkerId, load: WorkerLoadReported | None) -> None:
        now_ns = time.monotonic_ns()
        before = self.loads.get(worker_id)
        if before is not None and now_ns - before.heard_at_ns >= self._lost_after_ns:
            self._tell(WorkerJoined(self.workers[worker_id]))  # it was given up as lost meanwhile
        if load is not None:
            heard = WorkerLoad(load.running, load.waiting, load.kv_used_fraction, now_ns)
        else:
            heard = replace(before or WorkerLoad(0, 0, 0.0, now_ns), heard_at_ns=now_ns)
        self.loads[worker_id] = heard
        position = self.cache_map.position(worker_id)
        self._tell(WorkerHeard(worker_id, heard, position is not None and position.complete))

    def _mind_silence(self, now_ns: int) -> None:
        """Vouch for the workers that were well when the log fell silent."""
        pause_ns = self._stale_after_ns // 4
        silent_ns = now_ns - self._heard_last_ns
        if not 2 * pause_ns < silent_ns < SILENCE_S_MAX * 1e9 or now_ns - self._vouched_last_ns < pause_ns:
            return
        well_since_ns = self._heard_last_ns - self._stale_after_ns
        well = [worker_id for worker_id, load in self.loads.items() if load.heard_at_ns > well_since_ns]
        if len(well) < SILENCE_WORKERS_MIN:
            return
        self._vouched_last_ns = now_ns
        for worker_id in well:
            position = self.cache_map.position(worker_id)
            complete = position is not None and position.complete
            self._tell(WorkerHeard(worker_id, self.loads[worker_id], complete))

    def _forget_the_silent(self) -> None:
        """Forget workers that have gone without a word, so that a changing fleet does not fill the memory."""
        if self._heard_last_ns - self._forgot_last_ns < FORGET_INTERVAL_S * 1e9:
            return
        self._forgot_last_ns = self._heard_last_ns
        for worker_id, sign_ns in tuple(self._signs.items()):
            if self._heard_last_ns - sign_ns > FORGOTTEN_AFTER_S * 1e9:
                log.info("worker_forgotten", worker=worker_id)
                self._forget(worker_id, f"Worker {worker_id} gave no sign for {FORGOTTEN_AFTER_S:.0f} s.")

    def _forget(self, worker_id: WorkerId, sentence: str) -> None:
        self.cache_map.forget(worker_id)
        self._drop(worker_id, sentence)

    def _drop(self, worker_id: WorkerId, sentence: str) -> None:
        self._announced.pop(worker_id, None)
        self._signs.pop(worker_id, None)
        self.loads.pop(worker_id, None)
        if self.workers.pop(worker_id, None) is not None:
            self._tell(WorkerGone(worker_id, sentence))
