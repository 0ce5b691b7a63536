"""The fold's rules, one by one."""

import pytest

from evenhand.core import cache_map as cache_map_module
from evenhand.core import fold as fold_module
from evenhand.core import snapshot as snapshot_module
from evenhand.core.block_key import unpack_keys
from evenhand.core.cache_map import CacheMap, PrefixMatch
from evenhand.core.fold import FoldOutcome, FoldResult, doubt_all, fold
from evenhand.core.ids import Epoch, PoolId, Seq, WorkerId
from evenhand.core.kv import (
    Cleared,
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

W, X = WorkerId("w"), WorkerId("x")


def batch(seq: int, *operations: KvOperation, epoch: int = 1, worker_id: WorkerId = W) -> KvBatch:
    return KvBatch(worker_id, Epoch(epoch), Seq(seq), operations)


def part(
    seq: int, index: int, parts: int, *keys: int, epoch: int = 1, snapshot_id: int = 1, tier: Tier = Tier.DEVICE
) -> SnapshotPart:
    return SnapshotPart(W, Epoch(epoch), Seq(seq), snapshot_id, index, parts, tier, keys)


def announced(seq: int, epoch: int = 1) -> WorkerAnnounced:
    return WorkerAnnounced(
        W, PoolId("p"), Epoch(epoch), "http://e:1", "m", 16, "evenhand.block.v1", 100, 8, seq=Seq(seq)
    )


def load(epoch: int) -> WorkerLoadReported:
    return WorkerLoadReported(W, Epoch(epoch), 1, 0, 0.5, 10, 5, 2, 1)


def left(epoch: int) -> WorkerLeft:
    return WorkerLeft(W, Epoch(epoch))


def at(epoch: int, seq: int, *, complete: bool = True, left: bool = False) -> WorkerPosition:
    return WorkerPosition(Epoch(epoch), Seq(seq), complete, left)


def held(cache_map: CacheMap, worker_id: WorkerId = W) -> dict[Tier, tuple[int, ...]]:
    return {tier: unpack_keys(keys) for tier, keys in cache_map.packed(worker_id)}


def device(cache_map: CacheMap, worker_id: WorkerId = W) -> tuple[int, ...]:
    return held(cache_map, worker_id).get(Tier.DEVICE, ())


def fold_all(cache_map: CacheMap, *messages: KvMessage) -> list[FoldResult]:
    return [fold(cache_map, message) for message in messages]


def outcomes(cache_map: CacheMap, *messages: KvMessage) -> list[FoldOutcome]:
    return [result.outcome for result in fold_all(cache_map, *messages)]


def floors(results: list[FoldResult]) -> list[int]:
    """Positions, from 1, of the results that tell a floor."""
    return [number for number, result in enumerate(results, 1) if result.control]


# Order


def test_batches_in_order_are_applied() -> None:
    cache_map = CacheMap()
    first, second = fold_all(cache_map, batch(1, Stored((1, 2, 3))), batch(2, Removed((2,))))
    assert (first.outcome, second.outcome) == (FoldOutcome.NEW_EPOCH, FoldOutcome.APPLIED)
    assert (first.position, second.position) == (at(1, 1), at(1, 2))
    assert (first.replaced, second.replaced) == (True, False)
    assert not first.control
    assert not second.control
    assert cache_map.match((1, 2, 3)) == (PrefixMatch(W, 1),)
    assert device(cache_map) == (1, 3)


def test_a_batch_again_changes_nothing() -> None:
    cache_map = CacheMap()
    fold_all(cache_map, batch(1, Stored((1, 2))), batch(2, Removed((1,))))
    again = fold(cache_map, batch(1, Stored((1, 2))))
    assert (again.outcome, again.position, again.operations, again.changes) == (
        FoldOutcome.DUPLICATE,
        at(1, 2),
        (),
        False,
    )
    assert device(cache_map) == (2,)


def test_a_gap_is_folded_marked_and_asked_about_once() -> None:
    cache_map = CacheMap()
    _, gap, behind, other = fold_all(
        cache_map, batch(1, Stored((1,))), batch(4, Stored((4,))), batch(3, Stored((3,))), batch(9, Stored((9,)))
    )
    assert gap.outcome is FoldOutcome.GAP
    assert gap.position == at(1, 4, complete=False)
    assert gap.operations == (Stored((4,)),)
    assert gap.control == (SnapshotRequested(W, "Batches 2 to 3 of epoch 1 are missing."),)
    assert behind.outcome is FoldOutcome.DUPLICATE
    assert (other.outcome, other.control) == (FoldOutcome.GAP, ())
    assert device(cache_map) == (1, 4, 9)


@pytest.mark.parametrize("known", [True, False])
def test_a_first_number_above_one_is_a_gap(known: bool) -> None:
    cache_map = CacheMap()
    if known:
        fold(cache_map, batch(1, Stored((1,))))
    result = fold(cache_map, batch(2, Stored((5,)), epoch=2))
    assert (result.outcome, result.position) == (FoldOutcome.GAP, at(2, 2, complete=False))
    assert result.replaced
    assert len(result.control) == 1
    assert device(cache_map) == (5,)


# Epochs


def test_a_later_epoch_empties_the_map_and_counts_at_once() -> None:
    cache_map = CacheMap()
    fold_all(
        cache_map, batch(1, Stored((1, 2))), batch(2, Stored((3,), Tier.HOST)), batch(1, Stored((1,)), worker_id=X)
    )
    result = fold(cache_map, batch(1, Stored((7,)), epoch=2))
    assert (result.outcome, result.replaced) == (FoldOutcome.NEW_EPOCH, True)
    assert result.operations == (Stored((7,)),)
    assert held(cache_map) == {Tier.DEVICE: (7,)}
    assert device(cache_map, X) == (1,)


@pytest.mark.parametrize("message", [batch(5, Stored((9,))), part(9, 0, 1, 9), announced(9), load(1), left(1)])
def test_an_older_epoch_changes_nothing(message: KvMessage) -> None:
    cache_map = CacheMap()
    fold(cache_map, batch(1, Stored((7,)), epoch=2))
    result = fold(cache_map, message)
    assert (result.outcome, result.position) == (FoldOutcome.STALE_EPOCH, at(2, 1))
    assert not result.changes
    assert not result.control
    assert device(cache_map) == (7,)


def test_the_floor_is_told_after_refusals_in_a_row_and_ever_more_rarely() -> None:
    cache_map = CacheMap()
    fold(cache_map, batch(1, epoch=5))
    results = fold_all(cache_map, *(batch(n) for n in range(1, 4_000)))
    assert results[2].control == (EpochFloor(W, Epoch(5)),)
    assert floors(results) == [3, 6, 12, 24, 48, 96, 192, 384, 768, 1024, 1536, 2048, 3072]


def test_the_last_words_of_a_replaced_edge_raise_no_floor() -> None:
    cache_map = CacheMap()
    results = fold_all(
        cache_map,
        *(message for n in range(1, 50) for message in (batch(n, epoch=2), batch(90 + n), batch(150 + n))),
    )
    assert not any(result.control for result in results)


def test_counted_refusals_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fold_module, "REFUSED_WORKERS_MAX", 3)
    cache_map = CacheMap()
    for name in "abcdef":
        fold(cache_map, batch(1, epoch=5, worker_id=WorkerId(name)))
    for name in "abcdef":
        fold(cache_map, batch(1, epoch=4, worker_id=WorkerId(name)))
    assert list(cache_map.refusals) == ["d", "e", "f"]
    fold(cache_map, batch(2, epoch=5, worker_id=WorkerId("e")))
    assert list(cache_map.refusals) == ["d", "f"]


# Leaving


def test_a_worker_that_left_stays_gone_until_a_later_epoch() -> None:
    cache_map = CacheMap()
    fold_all(cache_map, batch(1, Stored((1,)), epoch=3))
    gone = fold(cache_map, left(3))
    assert (gone.outcome, gone.position, gone.replaced) == (FoldOutcome.LEFT, at(3, 1, left=True), True)
    late = outcomes(cache_map, batch(2, Stored((2,)), epoch=3), announced(2, epoch=3), load(3), batch(1, epoch=2))
    assert late == [FoldOutcome.STALE_EPOCH] * 4
    assert cache_map.worker_ids() == ()
    assert fold(cache_map, left(3)).outcome is FoldOutcome.DUPLICATE
    assert fold(cache_map, left(2)).outcome is FoldOutcome.STALE_EPOCH
    back = fold(cache_map, batch(1, Stored((8,)), epoch=4))
    assert (back.outcome, back.replaced) == (FoldOutcome.NEW_EPOCH, True)
    assert device(cache_map) == (8,)
    assert fold(cache_map, left(3)).outcome is FoldOutcome.STALE_EPOCH
    assert cache_map.tombstones() == ()


def test_leaving_of_a_stranger_or_in_a_later_epoch_is_kept() -> None:
    cache_map = CacheMap()
    assert fold(cache_map, left(2)).position == at(2, 0, left=True)
    fold(cache_map, batch(1, Stored((1,)), epoch=3))
    assert fold(cache_map, left(4)).position == at(4, 0, left=True)
    assert fold(cache_map, batch(2, epoch=3)).outcome is FoldOutcome.STALE_EPOCH
    assert fold(cache_map, left(5)).position == at(5, 0, left=True)


def test_beyond_the_remembered_tombstones_the_floor_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_map_module, "TOMBSTONES_MAX", 1)
    cache_map = CacheMap()
    for name, epoch in (("a", 10), ("b", 20)):
        fold(cache_map, WorkerLeft(WorkerId(name), Epoch(epoch)))
    late = fold_all(cache_map, *(batch(n, Stored((1,)), epoch=10, worker_id=WorkerId("a")) for n in (5, 6, 7)))
    assert {result.outcome for result in late} == {FoldOutcome.STALE_EPOCH}
    assert late[0].position is None
    assert late[2].control == (EpochFloor(WorkerId("a"), Epoch(10)),)
    assert cache_map.worker_ids() == ()
    assert fold(cache_map, batch(1, epoch=11, worker_id=WorkerId("a"))).outcome is FoldOutcome.NEW_EPOCH


# Operations within a batch


def test_only_the_net_of_a_batch_is_told() -> None:
    cache_map = CacheMap()
    fold(cache_map, batch(1, Stored((1, 2, 3))))
    result = fold(
        cache_map,
        batch(
            2,
            Stored((4, 5)),
            Removed((4, 1, 9)),
            Stored((1, 6)),
            Removed((2,)),
            Stored((3,)),
            Stored((7,), Tier.HOST),
            Removed((8,), Tier.DISK),
        ),
    )
    assert result.operations == (Removed((2,)), Stored((5, 6)), Stored((7,), Tier.HOST))
    assert held(cache_map) == {Tier.DEVICE: (1, 3, 5, 6), Tier.HOST: (7,)}


def test_stored_and_removed_within_a_batch_leaves_nothing_to_persist() -> None:
    cache_map = CacheMap()
    result = fold(cache_map, batch(1, Stored((1, 2)), Removed((2, 1))))
    assert result.operations == ()
    assert cache_map.key_count == 0


def test_a_clear_is_a_barrier_over_every_tier() -> None:
    cache_map = CacheMap()
    fold_all(cache_map, batch(1, Stored((1,)), Stored((2,), Tier.HOST)), batch(1, Stored((1,)), worker_id=X))
    result = fold(cache_map, batch(2, Stored((3,)), Removed((1,)), Cleared(), Stored((4, 2)), Removed((2,))))
    assert result.replaced
    assert result.operations == (Stored((4,)),)
    assert held(cache_map) == {Tier.DEVICE: (4,)}
    assert device(cache_map, X) == (1,)
    alone = fold(cache_map, batch(3, Cleared()))
    assert (alone.outcome, alone.replaced, alone.operations) == (FoldOutcome.APPLIED, True, ())
    # Events from before the clear, in a replay, are numbered below it.
    assert fold(cache_map, batch(2, Stored((4,)))).outcome is FoldOutcome.DUPLICATE
    assert held(cache_map) == {}


def test_removing_an_unknown_block_changes_nothing_and_stops_nothing() -> None:
    cache_map = CacheMap()
    first, second = fold_all(cache_map, batch(1, Removed((1, 2))), batch(2, Removed((3,)), Stored((4,))))
    assert first.operations == ()
    assert second.operations == (Stored((4,)),)


def test_keys_named_twice_are_told_once() -> None:
    cache_map = CacheMap()
    results = fold_all(
        cache_map, batch(1, Stored((1, 1, 2))), batch(2, Stored((2, 3, 3))), batch(3, Removed((1, 1)))
    )
    assert [result.operations for result in results] == [(Stored((1, 2)),), (Stored((3,)),), (Removed((1,)),)]


# Announcements and load


def test_an_announcement_begins_an_epoch() -> None:
    cache_map = CacheMap()
    fold(cache_map, batch(1, Stored((1,))))
    result = fold(cache_map, announced(0, epoch=2))
    assert (result.outcome, result.position, result.replaced) == (FoldOutcome.ANNOUNCED, at(2, 0), True)
    assert held(cache_map) == {}
    assert fold(cache_map, batch(1, epoch=2)).outcome is FoldOutcome.APPLIED


def test_an_announced_number_above_the_folded_one_is_a_gap() -> None:
    cache_map = CacheMap()
    fold(cache_map, batch(1))
    assert not fold(cache_map, announced(1)).control
    result = fold(cache_map, announced(3))
    assert result.position == at(1, 1, complete=False)
    assert [type(message) for message in result.control] == [SnapshotRequested]
    # Batches that their announcement overtook still count; only a snapshot as late as them makes it whole.
    assert outcomes(cache_map, batch(2, Stored((2,))), batch(3, Stored((3,)))) == [FoldOutcome.APPLIED] * 2
    assert cache_map.position(W) == at(1, 3, complete=False)
    assert fold(cache_map, part(3, 0, 1, 2, 3)).position == at(1, 3)


def test_a_heartbeat_asks_again_while_incomplete() -> None:
    cache_map = CacheMap()
    fold(cache_map, batch(3))
    results = fold_all(
        cache_map, announced(3), batch(7), announced(7), part(7, 0, 2, 1), announced(7), announced(7)
    )
    assert [len(result.control) for result in results] == [1, 0, 1, 0, 0, 1], "not while parts arrive"
    assert fold(cache_map, part(7, 1, 2, 2)).position == at(1, 7)
    assert not fold(cache_map, announced(7)).control


def test_load_is_not_folded() -> None:
    cache_map = CacheMap()
    result = fold(cache_map, load(4))
    assert (result.outcome, result.position, result.changes) == (FoldOutcome.LOAD, None, False)
    fold(cache_map, batch(1, Stored((1,))))
    assert fold(cache_map, load(4)).position == at(1, 1)
    assert device(cache_map) == (1,)


# Snapshots


def test_a_snapshot_in_one_part_replaces_the_map() -> None:
    cache_map = CacheMap()
    fold_all(cache_map, batch(1, Stored((1,)), Stored((2,), Tier.HOST)), batch(3, Stored((3,))))
    result = fold(cache_map, part(3, 0, 1, 5, 3))
    assert (result.outcome, result.position, result.replaced) == (FoldOutcome.SNAPSHOT_APPLIED, at(1, 3), True)
    assert result.operations == (Stored((3, 5)),)
    assert not result.control
    assert held(cache_map) == {Tier.DEVICE: (3, 5)}
    assert fold(cache_map, batch(4)).position == at(1, 4)


def test_an_empty_snapshot_empties() -> None:
    cache_map = CacheMap()
    fold(cache_map, batch(1, Stored((1,))))
    result = fold(cache_map, part(1, 0, 1))
    assert (result.replaced, result.operations) == (True, ())
    assert cache_map.key_count == 0


def test_parts_in_any_order_and_twice_count_when_all_are_there() -> None:
    cache_map = CacheMap()
    fold(cache_map, batch(2, Stored((1,))))
    pending = fold_all(
        cache_map, part(2, 2, 3, 30, tier=Tier.HOST), part(2, 0, 3, 10), part(2, 2, 3, 30, tier=Tier.HOST)
    )
    assert {result.outcome for result in pending} == {FoldOutcome.SNAPSHOT_PENDING}
    assert not any(result.operations for result in pending)
    assert device(cache_map) == (1,)
    last = fold(cache_map, part(2, 1, 3, 20))
    assert last.operations == (Stored((10, 20)), Stored((30,), Tier.HOST))
    assert last.position == at(1, 2)
    assert fold(cache_map, part(2, 0, 3, 10)).outcome is FoldOutcome.DUPLICATE


def test_a_snapshot_that_is_half_there_makes_the_worker_incomplete() -> None:
    """Parts are kept in memory only: after a crash between them, the next heartbeat must ask again."""
    cache_map = CacheMap()
    fold(cache_map, batch(1, Stored((1,))))
    assert fold(cache_map, part(1, 0, 2, 1)).position == at(1, 1, complete=False)
    restored = CacheMap()
    restored.restore(W, at(1, 1, complete=False), cache_map.packed(W))
    assert fold(restored, part(1, 1, 2, 2)).outcome is FoldOutcome.SNAPSHOT_PENDING
    fold(restored, announced(1))
    assert len(fold(restored, announced(1)).control) == 1


def test_batches_between_parts_are_not_lost() -> None:
    cache_map = CacheMap()
    fold_all(cache_map, batch(1, Stored((1, 2))), part(1, 0, 2, 1, 2))
    fold_all(cache_map, batch(2, Stored((3,)), Removed((1,))), batch(3, Removed((10,)), Stored((2,), Tier.HOST)))
    result = fold(cache_map, part(1, 1, 2, 10, 11))
    assert result.position == at(1, 3)
    assert held(cache_map) == {Tier.DEVICE: (2, 3, 11), Tier.HOST: (2,)}


def test_a_clear_between_parts_is_a_barrier_for_the_snapshot_too() -> None:
    cache_map = CacheMap()
    fold_all(
        cache_map, batch(1, Stored((1,))), part(1, 0, 2, 1), batch(2, Cleared(), Stored((9,))), part(1, 1, 2, 8)
    )
    assert held(cache_map) == {Tier.DEVICE: (9,)}


def test_a_snapshot_may_be_ahead_of_the_batches() -> None:
    """Batches up to its number are in it; those that still come are duplicates."""
    cache_map = CacheMap()
    fold_all(cache_map, batch(1, Stored((1,))), part(5, 0, 2, 5), batch(2, Stored((2,))), part(5, 1, 2, 6))
    assert cache_map.position(W) == at(1, 5)
    assert device(cache_map) == (5, 6)
    assert outcomes(cache_map, batch(3, Stored((3,))), batch(6)) == [FoldOutcome.DUPLICATE, FoldOutcome.APPLIED]


def test_a_snapshot_may_take_a_number_of_its_own() -> None:
    """The edge counts a snapshot as one batch; one of its parts lost is a gap like any other."""
    cache_map = CacheMap()
    fold_all(cache_map, batch(1, Stored((1,))), part(2, 0, 2, 5, snapshot_id=2), part(2, 1, 2, 6, snapshot_id=2))
    assert fold(cache_map, batch(3, Stored((7,)))).position == at(1, 3)
    assert device(cache_map) == (5, 6, 7)
    fold(cache_map, part(4, 0, 2, 8, snapshot_id=4))
    lost = fold(cache_map, batch(5, Stored((9,))))
    assert (lost.outcome, lost.position) == (FoldOutcome.GAP, at(1, 5, complete=False))
    assert len(lost.control) == 1
    assert fold(cache_map, part(6, 0, 1, 1, snapshot_id=6)).position == at(1, 6)
    assert device(cache_map) == (1,)


def test_a_late_snapshot_is_refused() -> None:
    cache_map = CacheMap()
    fold_all(cache_map, batch(1), batch(2, Stored((2,))))
    result = fold(cache_map, part(1, 0, 1, 1))
    assert (result.outcome, result.changes) == (FoldOutcome.SNAPSHOT_LATE, False)
    assert device(cache_map) == (2,)


def test_a_later_snapshot_supersedes_one_that_is_half_there() -> None:
    cache_map = CacheMap()
    fold_all(cache_map, batch(1), part(1, 0, 2, 1), batch(2, Stored((2,))), part(2, 0, 1, 7, snapshot_id=2))
    assert device(cache_map) == (7,)
    assert fold(cache_map, part(1, 1, 2, 2)).outcome is FoldOutcome.DUPLICATE
    assert cache_map.position(W) == at(1, 2)
    fold(cache_map, part(2, 0, 2, 8, snapshot_id=4))
    assert fold(cache_map, part(2, 0, 1, 9, snapshot_id=3)).outcome is FoldOutcome.SNAPSHOT_LATE


def test_a_gap_after_the_snapshot_is_not_healed_by_it() -> None:
    cache_map = CacheMap()
    fold_all(cache_map, batch(1), part(1, 0, 2, 1), batch(4, Stored((4,))))
    fold(cache_map, announced(4))
    result = fold(cache_map, part(1, 1, 2, 2))
    assert result.position == at(1, 4, complete=False)
    assert len(result.control) == 1
    assert device(cache_map) == (1, 2, 4)
    assert fold(cache_map, part(4, 0, 1, 9, snapshot_id=2)).position == at(1, 4)


def test_a_later_epoch_drops_a_half_snapshot() -> None:
    cache_map = CacheMap()
    fold_all(cache_map, batch(1), part(1, 0, 2, 1), batch(1, epoch=2))
    assert fold(cache_map, part(1, 1, 2, 2)).outcome is FoldOutcome.STALE_EPOCH
    assert cache_map.position(W) == at(2, 1)


def test_a_part_may_begin_an_epoch() -> None:
    cache_map = CacheMap()
    fold(cache_map, batch(1, Stored((1,))))
    first, last = fold_all(cache_map, part(4, 0, 2, 5, epoch=2), part(4, 1, 2, 6, epoch=2))
    assert (first.replaced, first.position) == (True, at(2, 0, complete=False))
    assert last.position == at(2, 4)
    assert device(cache_map) == (5, 6)


def test_what_is_kept_between_parts_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_module, "SNAPSHOT_TAIL_KEYS_MAX", 4)
    cache_map = CacheMap()
    fold_all(cache_map, batch(1), part(1, 0, 2, 1), batch(2, Stored((2, 3))))
    result = fold(cache_map, batch(3, Stored((4,))))
    assert result.position == at(1, 3, complete=False)
    assert len(result.control) == 1
    assert fold(cache_map, part(1, 1, 2, 9)).outcome is FoldOutcome.SNAPSHOT_LATE
    assert device(cache_map) == (2, 3, 4)
    assert fold(cache_map, part(3, 0, 1, 5, snapshot_id=2)).position == at(1, 3)


def test_a_snapshot_without_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_module, "SNAPSHOT_KEYS_MAX", 5)
    cache_map = CacheMap()
    fold_all(
        cache_map, batch(1, Stored((1,))), part(1, 0, 9, 1, 2), part(1, 0, 9, 1, 2), part(1, 1, 9), part(1, 2, 9)
    )
    result = fold(cache_map, part(1, 3, 9))
    assert result.position == at(1, 1, complete=False)
    assert len(result.control) == 1
    assert device(cache_map) == (1,)


# Everything at once


def test_doubt_marks_and_asks_all() -> None:
    cache_map = CacheMap()
    fold_all(cache_map, batch(1, Stored((1,)), worker_id=X), batch(1, Stored((1,))))
    assert doubt_all(cache_map, "Another log.") == (
        SnapshotRequested(W, "Another log."),
        SnapshotRequested(X, "Another log."),
    )
    assert cache_map.position(W) == at(1, 1, complete=False)
    assert cache_map.match((1,)) == (PrefixMatch(W, 1), PrefixMatch(X, 1))
    assert fold(cache_map, part(1, 0, 1, 2)).position == at(1, 1)


def test_a_restored_map_goes_on_as_the_first_would() -> None:
    cache_map = CacheMap()
    fold_all(cache_map, batch(1, Stored((1, 2))), batch(3, Stored((3,))))
    restored = CacheMap()
    position = cache_map.position(W)
    assert position is not None
    restored.restore(W, position, cache_map.packed(W))
    for message in (
        batch(3, Stored((3,))),
        batch(4, Removed((1,))),
        part(4, 0, 1, 2, 3, 5),
        batch(5, Stored((6,))),
    ):
        one, other = fold(cache_map, message), fold(restored, message)
        assert (one.outcome, one.position, one.operations) == (other.outcome, other.position, other.operations)
    assert restored.packed(W) == cache_map.packed(W)
