"""What was folded and is not committed yet: net changes by worker, and how far each partition was read.

The fold tells effective changes only, so a key that changes back within a group drops out: what is stored and
removed before a commit is never written. A worker whose deltas have become many, or name more keys than it
holds, is written as a whole instead (compaction); a few workers a commit, so that no commit is long.

Pure: no clock, no I/O. One writer, the state service.
"""

from collections.abc import Iterable, Mapping
from typing import assert_never

from evenhand.core.cache_map import CacheMap
from evenhand.core.fold import FoldResult
from evenhand.core.ids import WorkerId
from evenhand.core.kv import Cleared, KvOperation, Removed, Stored, Tier, WorkerAnnounced, WorkerPosition
from evenhand.ports import LogPosition, LogRecord, MapCommit, WorkerDelta

DELTA_ROWS_MAX = 512
"""A worker with more delta rows than this is compacted."""

DELTA_KEYS_MIN = 16_384
"""Fewer keys in deltas than this are no reason to compact, however little the worker holds."""

COMPACTIONS_PER_COMMIT_MAX = 4


class _WorkerPending:
    """One worker's net changes since the last seal."""

    __slots__ = ("announced", "gained", "lost", "position", "replaced")

    def __init__(self, position: WorkerPosition) -> None:
        self.position = position
        self.announced: WorkerAnnounced | None = None
        self.replaced = False
        # No key is in both of a tier. After ``replaced`` nothing is lost.
        self.gained: tuple[dict[int, None], ...] = tuple({} for _ in Tier)
        self.lost: tuple[dict[int, None], ...] = tuple({} for _ in Tier)

    def take(self, replaced: bool, operations: Iterable[KvOperation]) -> int:
        """Add the fold's net changes; returns how many keys they name."""
        if replaced:
            self.replaced = True
            for changed in (*self.gained, *self.lost):
                changed.clear()
        count = 0
        for operation in operations:
            match operation:
                case Stored(keys, tier):
                    _toggle(keys, self.gained[tier], self.lost[tier])
                    count += len(keys)
                case Removed(keys, tier):
                    _toggle(keys, self.lost[tier], self.gained[tier])
                    count += len(keys)
                case Cleared():
                    raise AssertionError("the fold tells a clear as replaced")
                case _:
                    assert_never(operation)
        return count

    def operations(self) -> tuple[KvOperation, ...]:
        operations: list[KvOperation] = [Removed(tuple(keys), Tier(n)) for n, keys in enumerate(self.lost) if keys]
        operations += [Stored(tuple(keys), Tier(n)) for n, keys in enumerate(self.gained) if keys]
        return tuple(operations)


def _toggle(keys: Iterable[int], onto: dict[int, None], off: dict[int, None]) -> None:
    if off and not off.keys().isdisjoint(keys):
        for key in keys:
            if key in off:
                del off[key]
            else:
                onto[key] = None
    else:
        onto.update(dict.fromkeys(keys))


class _DeltaSize:
    """What is stored of a worker behind its snapshot."""

    __slots__ = ("keys", "rows")

    def __init__(self, rows: int, keys: int) -> None:
        self.rows = rows
        self.keys = keys


class Pending:
    """The group that the next commit will write."""

    def __init__(self, cache_map: CacheMap) -> None:
        self._cache_map = cache_map
        self._workers: dict[WorkerId, _WorkerPending] = {}
        self._last: dict[int, LogRecord | None] = {}
        """By partition: the last record read; None: start over from the log's beginning."""
        self._sealed: dict[int, LogPosition] = {}
        self._sizes: dict[WorkerId, _DeltaSize] = {}
        self.published_at_ms = 0
        """When the last record taken since the last seal was published; 0: none was."""
        self.key_changes = 0
        """Keys named by what was taken since the last seal, before anything cancelled out."""
        self.records = 0
        self.changed = False
        """Whether there is more than heartbeats and load to commit."""
        self.compactions_total = 0

    @property
    def empty(self) -> bool:
        return not self._last and not self._workers

    def restored(self, worker_id: WorkerId, delta_rows: int) -> None:
        """A worker was loaded from the store, with so many delta rows behind its snapshot."""
        self._sizes[worker_id] = _DeltaSize(delta_rows, 0)

    def read(self, record: LogRecord) -> None:
        """A record was read, whatever came of it."""
        self._last[record.partition] = record
        self.published_at_ms = record.published_at_ms
        self.records += 1

    def positions(self) -> Mapping[int, LogPosition]:
        """Where to read on, for each partition of which anything was taken, sealed or not."""
        return {**self._sealed, **self._current()}

    def _current(self) -> dict[int, LogPosition]:
        return {
            partition: LogPosition(0) if record is None else LogPosition(record.offset + 1, record.digest())
            for partition, record in sorted(self._last.items())
        }

    def take(self, worker_id: WorkerId, result: FoldResult, announced: WorkerAnnounced | None) -> None:
        """Add what one message changed."""
        position = result.position
        assert position is not None, worker_id
        pending = self._workers.get(worker_id)
        if pending is None:
            pending = self._workers[worker_id] = _WorkerPending(position)
        else:
            pending.position = position
        if announced is not None:
            pending.announced = announced
        if result.replaced or result.operations:
            self.key_changes += pending.take(result.replaced, result.operations)
        if announced is None or result.replaced:
            self.changed = True

    def touch(self, worker_id: WorkerId, position: WorkerPosition) -> None:
        """Only the worker's position changed."""
        pending = self._workers.setdefault(worker_id, _WorkerPending(position))
        pending.position = position
        self.changed = True

    def start_over(self, partitions: Iterable[int]) -> None:
        """The log was replaced: the next commit sets these partitions back to its beginning."""
        self._last = dict.fromkeys(partitions)
        self.changed = True

    def seal(self, stored: Mapping[int, LogPosition]) -> MapCommit:
        """Everything taken so far as one commit, expecting the ``stored`` positions; begins the next group."""
        positions = self._current()
        self._sealed.update(positions)
        expected = {partition: stored[partition] for partition in positions if partition in stored}
        deltas = [self._delta(worker_id, pending) for worker_id, pending in self._workers.items()]
        self._compact(deltas)
        self._workers, self._last = {}, {}
        self.key_changes = self.records = self.published_at_ms = 0
        self.changed = False
        return MapCommit(expected, positions, tuple(deltas))

    def _delta(self, worker_id: WorkerId, pending: _WorkerPending) -> WorkerDelta:
        operations = pending.operations()
        size = self._sizes.setdefault(worker_id, _DeltaSize(0, 0))
        if pending.replaced:
            size.rows = size.keys = 0
        else:
            size.rows += len(operations)
            size.keys += sum(len(operation.keys) for operation in operations if not isinstance(operation, Cleared))
        if pending.position.left:
            del self._sizes[worker_id]
        return WorkerDelta(worker_id, pending.position, pending.announced, pending.replaced, operations)

    def _compact(self, deltas: list[WorkerDelta]) -> None:
        """Write a few of the workers that are due as a whole, in place of their deltas."""
        left = COMPACTIONS_PER_COMMIT_MAX
        for place, delta in enumerate(deltas):
            size = self._sizes.get(delta.worker_id)
            if size is None or not self._due(delta.worker_id, size):
                continue
            cache = self._cache_map.worker(delta.worker_id)
            if cache is None:
                continue
            whole = tuple(Stored(tuple(keys), tier) for tier, keys in zip(Tier, cache.held, strict=True) if keys)
            deltas[place] = WorkerDelta(delta.worker_id, delta.position, delta.announced, True, whole)
            size.rows = size.keys = 0
            self.compactions_total += 1
            left -= 1
            if not left:
                return

    def _due(self, worker_id: WorkerId, size: _DeltaSize) -> bool:
        if size.rows > DELTA_ROWS_MAX:
            return True
        return size.keys > DELTA_KEYS_MIN and size.keys > self._cache_map.block_count(worker_id)
