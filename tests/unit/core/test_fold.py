"""The fold's rules, one by one."""

import pytest

from evenhand.core.cache_map import CacheMap, PrefixMatch
from evenhand.core.fold import FoldOutcome, FoldResult, doubt_all, fold
from evenhand.core.ids import Epoch, PoolId, Seq, WorkerId
from evenhand.core.kv import (
    Cleared,
    EpochFloor,
    KvBatch,
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

W = WorkerId("w1")


def batch(seq: int, *operations: KvOperation, epoch: int = 1, worker_id: WorkerId = W) -> KvBatch:
    return KvBatch(worker_id, Epoch(epoch), Seq(seq), operations)


def part(seq: int, index: int, parts: int, *keys: int, epoch: int = 1, snapshot_id: int = 1) -> SnapshotPart:
    return SnapshotPart(W, Epoch(epoch), Seq(seq), snapshot_id, index, parts, Tier.DEVICE, keys)


def announced(seq: int, epoch: int = 1) -> WorkerAnnounced:
    return WorkerAnnounced(
        W, PoolId("p"), Epoch(epoch), "http://e:1", "m", 16, "evenhand.block.v1", 100, 8, seq=Seq(seq)
    )


def load(epoch: int) -> WorkerLoadReported:
    return WorkerLoadReported(W, Epoch(epoch), 1, 0, 0.5, 10, 5, 2, 1)


def held(cache_map: CacheMap, worker_id: WorkerId = W) -> dict[Tier, tuple[int, ...]]:
    from evenhand.core.block_key import unpack_keys

    return {tier: unpack_keys(keys) for tier, keys in cache_map.packed(worker_id)}


def fold_all(cache_map: CacheMap, *messages: KvBatch | SnapshotPart) -> list[FoldResult]:
    return [fold(cache_map, message) for message in messages]


def test_batches_in_order_are_applied() -> None:
    cache_map = CacheMap()
    first = fold(cache_map, batch(1, Stored((1, 2, 3))))
    second = fold(cache_map, batch(2, Removed((2,))))
    assert (first.outcome, second.outcome) == (FoldOutcome.NEW_EPOCH, FoldOutcome.APPLIED)
    assert second.position == WorkerPosition(Epoch(1), Seq(2), complete=True)
    assert first.replaced
    assert not second.replaced
    assert cache_map.match((1, 2, 3)) == (PrefixMatch(W, 1),)
    assert held(cache_map) == {Tier.DEVICE: (1, 3)}
