"""One fold of workers' messages into the cache map, for the state service and the scheduler alike.

``fold(cache_map, message)`` changes the map and tells what changed. What a message does:

======================  ==================================================================================
message                 effect
======================  ==================================================================================
epoch below the known   nothing (STALE_EPOCH); likewise any epoch up to that of a worker that left
epoch above the known   the worker's map is emptied at once and the epoch entered; then as below
batch, seq = known + 1  folded (APPLIED; NEW_EPOCH for an epoch's first)
batch, seq larger       folded, the worker incomplete, a snapshot asked for (GAP); so is an epoch's first
                        batch whose number is not 1
batch, seq not larger   nothing (DUPLICATE)
snapshot part           kept (SNAPSHOT_PENDING) until all are there; then the map of this worker is the
                        snapshot and what followed it (SNAPSHOT_APPLIED)
snapshot from before    nothing (SNAPSHOT_LATE): batches after it are folded already
announcement            its seq larger than the known one is a gap; also the heartbeat at which an
                        incomplete worker's snapshot is asked for again (ANNOUNCED)
load                    nothing (LOAD); load is never folded
left                    the worker's map is forgotten, its position a tombstone (LEFT)
======================  ==================================================================================

What always holds: folding a message again changes nothing; the map after a complete prefix of messages depends
on those messages alone; control messages are bounded by the messages that cause them: a snapshot is asked for
once between two heartbeats of a worker, and a floor is told after ``REFUSALS_BEFORE_FLOOR`` refusals in a row and
then each time their number has doubled, or grown by ``REFUSALS_BETWEEN_FLOORS_MAX``.

The floor waits for refusals *in a row* because the last words of a replaced edge, mixed with its successor's
accepted messages, must not make the two outbid each other.

Malformed values do not arrive here: ``wire.kv_codec`` refuses them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import assert_never

from evenhand.core.cache_map import TIERS, CacheMap, WorkerCache
from evenhand.core.ids import Epoch, Seq, WorkerId
from evenhand.core.kv import (
    Cleared,
    ControlMessage,
    EpochFloor,
    KvBatch,
    KvMessage,
    KvOperation,
    Removed,
    SnapshotPart,
    SnapshotRequested,
    Stored,
    Tier,
    WorkerAnnounced,
    WorkerLeft,
    WorkerLoadReported,
    WorkerPosition,
)
from evenhand.core.snapshot import SnapshotAssembly

REFUSALS_BEFORE_FLOOR = 3
"""Messages of one worker refused as old in a row before its edge is told the floor."""

REFUSALS_BETWEEN_FLOORS_MAX = 1_024
"""The floor is told again at least this often while everything keeps being refused."""

REFUSED_WORKERS_MAX = 4_096
"""Workers whose refusals are counted; the one that began first is dropped and counts anew."""


class FoldOutcome(Enum):
    """What became of a message; see the table above."""

    APPLIED = "applied"
    NEW_EPOCH = "new_epoch"
    GAP = "gap"
    DUPLICATE = "duplicate"
    STALE_EPOCH = "stale_epoch"
    SNAPSHOT_PENDING = "snapshot_pending"
    SNAPSHOT_APPLIED = "snapshot_applied"
    SNAPSHOT_LATE = "snapshot_late"
    ANNOUNCED = "announced"
    LOAD = "load"
    LEFT = "left"


_WITHOUT_CHANGE = frozenset(
    {FoldOutcome.DUPLICATE, FoldOutcome.STALE_EPOCH, FoldOutcome.SNAPSHOT_LATE, FoldOutcome.LOAD}
)


@dataclass(slots=True)
class FoldResult:
    """What one message changed. Treat as frozen: it is left unfrozen because it is made once a batch."""

    outcome: FoldOutcome
    position: WorkerPosition | None
    """The worker's position after it; None if the worker is not known."""
    replaced: bool = False
    """Forget all that is stored of this worker before applying ``operations``."""
    operations: tuple[KvOperation, ...] = ()
    """Net changes to persist: what is stored and removed within a batch, or was so before, is not among them.
    Never a ``Cleared``: that is ``replaced``. After ``replaced`` there are only ``Stored``."""
    control: tuple[ControlMessage, ...] = ()
    """To publish, by one of those who fold."""

    @property
    def changes(self) -> bool:
        """Whether position, map or announcement may differ from before: something to persist."""
        return self.outcome not in _WITHOUT_CHANGE


def fold(cache_map: CacheMap, message: KvMessage) -> FoldResult:
    """Fold one message into the map; the caller is the map's only writer."""
    worker_id, epoch = message.worker_id, message.epoch
    cache = cache_map.worker(worker_id)
    if cache is None or cache.epoch != epoch:
        known = cache_map.position(worker_id) if cache is None else cache.position
        lowest = cache_map.epoch_floor + 1 if known is None else known.epoch + known.left
        if epoch < lowest and not (isinstance(message, WorkerLeft) and known is not None and epoch == known.epoch):
            return _refused(cache_map, worker_id, epoch, known)
    if cache_map.refusals:
        cache_map.refusals.pop(worker_id, None)
    match message:
        case KvBatch():
            return _batch(cache_map, cache, message)
        case SnapshotPart():
            return _snapshot_part(cache_map, cache, message)
        case WorkerAnnounced():
            return _announced(cache_map, cache, message)
        case WorkerLoadReported():
            return FoldResult(FoldOutcome.LOAD, cache_map.position(worker_id))
        case WorkerLeft():
            return _left(cache_map, cache, message)
        case _:
            assert_never(message)


def doubt_all(cache_map: CacheMap, reason: str) -> tuple[SnapshotRequested, ...]:
    """Mark every worker incomplete and ask for all snapshots: the log is not the one that was folded.

    The callers persist the positions, which are changed. Sorted by worker id.
    """
    asked = []
    for worker_id in cache_map.worker_ids():
        cache = cache_map.worker(worker_id)
        assert cache is not None, worker_id
        cache.missing_before = max(cache.missing_before, cache.seq, 1)
        cache.asked = True
        asked.append(SnapshotRequested(worker_id, reason))
    return tuple(asked)


def _refused(cache_map: CacheMap, worker_id: WorkerId, epoch: Epoch, known: WorkerPosition | None) -> FoldResult:
    refusals = cache_map.refusals
    count = refusals.get(worker_id, 0) + 1
    refusals[worker_id] = count
    if len(refusals) > REFUSED_WORKERS_MAX:
        del refusals[next(iter(refusals))]
    rounds, rest = divmod(count, REFUSALS_BEFORE_FLOOR)
    tell = (rest == 0 and rounds & (rounds - 1) == 0) or count % REFUSALS_BETWEEN_FLOORS_MAX == 0
    floor = cache_map.epoch_floor if known is None else known.epoch
    control = (EpochFloor(worker_id, floor),) if tell else ()
    return FoldResult(FoldOutcome.STALE_EPOCH, known, control=control)


def _entered(cache_map: CacheMap, cache: WorkerCache | None, worker_id: WorkerId, epoch: Epoch) -> WorkerCache:
    """The worker's record in a later epoch, with nothing in it."""
    if cache is None:
        return cache_map.add(worker_id, epoch)
    cache_map.clear(cache)
    cache.enter(epoch)
    return cache


def _ask(cache: WorkerCache, reason: str) -> tuple[ControlMessage, ...]:
    if cache.asked:
        return ()
    cache.asked = True
    return (SnapshotRequested(cache.worker_id, reason),)


def _batch(cache_map: CacheMap, cache: WorkerCache | None, batch: KvBatch) -> FoldResult:
    entered = cache is None or cache.epoch != batch.epoch
    if cache is None or entered:
        cache = _entered(cache_map, cache, batch.worker_id, batch.epoch)
    seq, expected = batch.seq, cache.seq + 1
    if seq < expected:
        return FoldResult(FoldOutcome.DUPLICATE, cache.position)
    cache.seq = seq
    control: tuple[ControlMessage, ...] = ()
    if seq == expected:
        outcome = FoldOutcome.NEW_EPOCH if entered else FoldOutcome.APPLIED
    else:
        outcome = FoldOutcome.GAP
        cache.missing_before = max(cache.missing_before, seq)
        control = _ask(cache, f"Batches {expected} to {seq - 1} of epoch {batch.epoch} are missing.")
    snapshot = cache.snapshot
    if snapshot is not None and seq > snapshot.seq and not snapshot.follow(batch.operations):
        control += _give_up(cache, snapshot)
    cleared, operations = _applied(cache_map, cache, batch.operations)
    return FoldResult(outcome, cache.position, entered or cleared, operations, control)


def _applied(
    cache_map: CacheMap, cache: WorkerCache, operations: Sequence[KvOperation]
) -> tuple[bool, tuple[KvOperation, ...]]:
    """Apply in order; whether a clear was among them, and the net of what changed."""
    cleared = False
    changes: list[Stored | Removed] = []
    kinds = 0
    for operation in operations:
        match operation:
            case Stored():
                changed = cache_map.store(cache, operation.tier, operation.keys)
                if changed:
                    whole = changed is operation.keys
                    changes.append(operation if whole else Stored(tuple(changed), operation.tier))
                    kinds |= 1
            case Removed():
                changed = cache_map.remove(cache, operation.tier, operation.keys)
                if changed:
                    whole = changed is operation.keys
                    changes.append(operation if whole else Removed(tuple(changed), operation.tier))
                    kinds |= 2
            case Cleared():
                cache_map.clear(cache)
                cleared = True
                changes.clear()
                kinds = 0
            case _:
                assert_never(operation)
    if kinds == 3:
        changed_keys = [change.keys for change in changes]
        if len(set().union(*changed_keys)) != sum(map(len, changed_keys)):
            return cleared, _net(changes)
    # Every change is of another key, so the changes are their own net.
    return cleared, tuple(changes)


def _net(changes: Sequence[Stored | Removed]) -> tuple[KvOperation, ...]:
    """Changes without the keys that are in the end as they were: removals first, then by tier."""
    # No key of a tier is in both, so their order does not matter.
    gained: dict[Tier, dict[int, None]] = {tier: {} for tier in TIERS}
    lost: dict[Tier, dict[int, None]] = {tier: {} for tier in TIERS}
    for change in changes:
        onto, off = (gained, lost) if isinstance(change, Stored) else (lost, gained)
        for key in change.keys:
            if key in off[change.tier]:
                del off[change.tier][key]
            else:
                onto[change.tier][key] = None
    net: list[KvOperation] = [Removed(tuple(keys), tier) for tier, keys in lost.items() if keys]
    net += [Stored(tuple(keys), tier) for tier, keys in gained.items() if keys]
    return tuple(net)


def _snapshot_part(cache_map: CacheMap, cache: WorkerCache | None, part: SnapshotPart) -> FoldResult:
    entered = cache is None or cache.epoch != part.epoch
    if cache is None or entered:
        cache = _entered(cache_map, cache, part.worker_id, part.epoch)
    order = (int(part.seq), part.snapshot_id)
    snapshot = cache.snapshot
    if order <= cache.snapshot_applied:
        return FoldResult(FoldOutcome.DUPLICATE, cache.position)
    if snapshot is None or order > snapshot.order:
        if part.seq < cache.seq:
            return FoldResult(FoldOutcome.SNAPSHOT_LATE, cache.position)
        snapshot = cache.snapshot = SnapshotAssembly(part)
    elif order < snapshot.order:
        return FoldResult(FoldOutcome.SNAPSHOT_LATE, cache.position)
    if not snapshot.add(part):
        control = _give_up(cache, snapshot)
        return FoldResult(FoldOutcome.SNAPSHOT_PENDING, cache.position, entered, control=control)
    if not snapshot.finished:
        return FoldResult(FoldOutcome.SNAPSHOT_PENDING, cache.position, entered)
    return _snapshot_applied(cache_map, cache, snapshot)


def _snapshot_applied(cache_map: CacheMap, cache: WorkerCache, snapshot: SnapshotAssembly) -> FoldResult:
    held = snapshot.result()
    cache_map.replace(cache, held)
    cache.snapshot = None
    cache.snapshot_applied = snapshot.order
    cache.seq = max(cache.seq, snapshot.seq)
    control: tuple[ControlMessage, ...] = ()
    if cache.missing_before <= snapshot.seq + 1:
        cache.missing_before = 0
        cache.asked = False
    else:
        control = _ask(cache, f"A batch before {cache.missing_before} was missed after the snapshot.")
    operations = tuple(Stored(tuple(sorted(held[tier])), tier) for tier in TIERS if held[tier])
    return FoldResult(FoldOutcome.SNAPSHOT_APPLIED, cache.position, True, operations, control)


def _give_up(cache: WorkerCache, snapshot: SnapshotAssembly) -> tuple[ControlMessage, ...]:
    """Drop a half snapshot; only one at least as late heals the worker from here on."""
    cache.snapshot = None
    cache.missing_before = max(cache.missing_before, snapshot.seq + 1)
    return _ask(cache, f"The snapshot as of batch {snapshot.seq} outgrew its bound before it was complete.")


def _announced(cache_map: CacheMap, cache: WorkerCache | None, announced: WorkerAnnounced) -> FoldResult:
    entered = cache is None or cache.epoch != announced.epoch
    if cache is None or entered:
        cache = _entered(cache_map, cache, announced.worker_id, announced.epoch)
    # The known seq stays: a batch that its announcement overtook is still folded when it comes.
    if announced.seq > cache.seq:
        cache.missing_before = max(cache.missing_before, announced.seq + 1)
    snapshot = cache.snapshot
    arriving = snapshot is not None and snapshot.moved
    if snapshot is not None:
        snapshot.moved = False
    cache.asked = False
    control: tuple[ControlMessage, ...] = ()
    if not cache.complete and not arriving:
        control = _ask(cache, f"Batch {announced.seq} is published; the map is incomplete up to {cache.seq}.")
    return FoldResult(FoldOutcome.ANNOUNCED, cache.position, entered, control=control)


def _left(cache_map: CacheMap, cache: WorkerCache | None, left: WorkerLeft) -> FoldResult:
    known = cache_map.position(left.worker_id)
    if known is not None and known.left and known.epoch == left.epoch:
        return FoldResult(FoldOutcome.DUPLICATE, known)
    seq = cache.seq if cache is not None and cache.epoch == left.epoch else 0
    position = WorkerPosition(left.epoch, Seq(seq), complete=True, left=True)
    cache_map.leave(left.worker_id, position)
    return FoldResult(FoldOutcome.LEFT, position, replaced=True)
