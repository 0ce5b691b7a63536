"""The outbox: late numbers, merging, bounds, snapshots."""

import pytest

from evenhand.core.cache_map import CacheMap
from evenhand.core.fold import FoldOutcome, fold
from evenhand.core.ids import Epoch, Seq, WorkerId
from evenhand.core.kv import SNAPSHOT_PART_KEYS_MAX, Cleared, Removed, Stored, Tier
from evenhand.worker import outbox as module
from evenhand.worker.outbox import BATCH_KEYS_MAX, Outbox

WORKER = WorkerId("w")


def test_operations_merge_until_they_are_taken_and_numbers_have_no_holes() -> None:
    box = Outbox(WORKER, Epoch(7))
    assert box.next_seq == 1
    box.add([Stored((1,))], 100)
    box.add([Removed((1,)), Cleared()], 200)
    assert box.next_seq == 1
    batch = box.take_batch()
    assert batch is not None
    assert (batch.epoch, batch.seq, batch.emitted_at_ms) == (7, 1, 100)
    assert batch.operations == (Stored((1,)), Removed((1,)), Cleared())
    assert box.take_batch() is None
    assert box.empty
    box.add([Stored((2,))], 300)
    assert box.next_seq == 2
    assert box.take_batch() is not None


def test_batches_are_bounded_in_keys_and_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    box = Outbox(WORKER, Epoch(7))
    box.add([Stored(tuple(range(2 * BATCH_KEYS_MAX + 5)), Tier.HOST)], 0)
    assert box.next_seq == 3
    sizes = []
    while (batch := box.take_batch()) is not None:
        sizes.append(
            sum(len(operation.keys) for operation in batch.operations if not isinstance(operation, Cleared))
        )
        assert all(operation.tier is Tier.HOST for operation in batch.operations if isinstance(operation, Stored))
    assert sizes == [BATCH_KEYS_MAX, BATCH_KEYS_MAX, 5]
    monkeypatch.setattr(module, "BATCH_OPERATIONS_MAX", 10)
    box.add([Cleared()] * 25, 0)
    assert [len(batch.operations) for batch in iter(box.take_batch, None)] == [10, 10, 5]


def test_what_overflows_is_dropped_and_a_snapshot_is_owed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BUFFER_BATCHES_MAX", 2)
    monkeypatch.setattr(module, "BATCH_KEYS_MAX", 10)
    box = Outbox(WORKER, Epoch(7), Seq(4))
    for key in range(100):
        box.add([Stored((key,))], 0)
    assert box.snapshot_owed
    assert box.overflows == 1
    assert box.take_batch() is None
    (part,) = box.take_snapshot([(Tier.DEVICE, tuple(range(100)))])
    assert (part.seq, part.parts, len(part.keys)) == (5, 1, 100)
    box.add([Removed((3,))], 0)
    batch = box.take_batch()
    assert batch is not None
    assert batch.seq == 6


def test_a_snapshot_goes_out_in_parts_and_an_empty_cache_is_one_part_too() -> None:
    box = Outbox(WORKER, Epoch(7))
    box.add([Stored((1,))], 0)
    parts = box.take_snapshot(
        [(Tier.DEVICE, range(SNAPSHOT_PART_KEYS_MAX + 1)), (Tier.HOST, (5,)), (Tier.DISK, ())]
    )
    assert [(part.tier, len(part.keys), part.part, part.parts) for part in parts] == [
        (Tier.DEVICE, SNAPSHOT_PART_KEYS_MAX, 0, 3),
        (Tier.DEVICE, 1, 1, 3),
        (Tier.HOST, 1, 2, 3),
    ]
    assert box.take_batch() is None, "what waited is in it"
    (empty,) = box.take_snapshot([(Tier.DEVICE, ())])
    assert (empty.parts, empty.keys, empty.seq) == (1, (), 2)


def test_a_reader_that_misses_the_snapshot_sees_a_hole() -> None:
    box, cache_map = Outbox(WORKER, Epoch(7)), CacheMap()
    box.add([Stored((1,))], 0)
    first = box.take_batch()
    assert first is not None
    fold(cache_map, first)
    box.take_snapshot([(Tier.DEVICE, (1, 2))])
    box.add([Stored((3,))], 0)
    second = box.take_batch()
    assert second is not None
    assert fold(cache_map, second).outcome is FoldOutcome.GAP


def test_epochs_only_grow_and_begin_at_number_one() -> None:
    box = Outbox(WORKER, Epoch(7), Seq(99))
    box.add([Stored((1,))], 0)
    box.begin_epoch(Epoch(8))
    assert box.take_batch() is None
    box.add([Stored((1,))], 0)
    batch = box.take_batch()
    assert batch is not None
    assert (batch.epoch, batch.seq) == (8, 1)
    with pytest.raises(AssertionError):
        box.begin_epoch(Epoch(8))
