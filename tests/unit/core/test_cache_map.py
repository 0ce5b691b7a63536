"""The cache map by itself: look-up, tiers, copies, slots, memory."""

import gc
import random
import tracemalloc

import pytest

from evenhand.core import cache_map as cache_map_module
from evenhand.core import slots as slots_module
from evenhand.core.block_key import pack_keys
from evenhand.core.cache_map import CacheMap, PrefixMatch
from evenhand.core.ids import Epoch, Seq, WorkerId
from evenhand.core.kv import Tier, WorkerPosition
from evenhand.core.slots import WorkerSlots

A, B, C = WorkerId("a"), WorkerId("b"), WorkerId("c")
FIRST = WorkerPosition(Epoch(1), Seq(0), complete=True)


def position(epoch: int, seq: int = 0, *, complete: bool = True, left: bool = False) -> WorkerPosition:
    return WorkerPosition(Epoch(epoch), Seq(seq), complete, left)


def with_workers(**held: tuple[int, ...]) -> CacheMap:
    cache_map = CacheMap()
    for name, keys in held.items():
        cache_map.store(cache_map.add(WorkerId(name), Epoch(1)), Tier.DEVICE, keys)
    return cache_map


def test_look_up_gives_each_holder_its_depth_deepest_first_then_by_worker() -> None:
    cache_map = with_workers(c=(1, 2, 3, 4), a=(1, 2), b=(2, 3, 4), d=(1, 3, 4), B=(1, 2))
    found = (PrefixMatch(C, 4), PrefixMatch(WorkerId("B"), 2), PrefixMatch(A, 2), PrefixMatch(WorkerId("d"), 1))
    assert cache_map.match((1, 2, 3, 4)) == found
    assert cache_map.match((1, 2, 3, 4, 5, 6)) == cache_map.match([1, 2, 3, 4]) == found
    assert cache_map.match((1,)) == tuple(sorted(PrefixMatch(match.worker_id, 1) for match in found))
    assert (
        cache_map.match(()) == cache_map.match((9,)) == cache_map.match((9, 1)) == cache_map.match((9, 8, 7)) == ()
    )


@pytest.mark.parametrize("missing", range(1, 8))
def test_a_key_that_nobody_holds_ends_every_match(missing: int) -> None:
    """Wherever the hole lies, and whatever lies beyond it."""
    keys = tuple(range(1, 8))
    for beyond in range(8):
        held = [key for key in keys if key != missing and key <= beyond]
        cache_map = with_workers(a=tuple(held), b=(1,))
        depth = next((index for index, key in enumerate(keys) if key not in held), 7)
        assert dict(cache_map.match(keys)) == {B: 1} | ({A: depth} if depth else {})


def test_a_hole_ends_the_match() -> None:
    cache_map = with_workers(a=(1, 2, 4), b=(1, 2, 3, 4))
    cache = cache_map.worker(B)
    assert cache is not None
    cache_map.remove(cache, Tier.DEVICE, (2,))
    assert cache_map.match((1, 2, 3, 4)) == (PrefixMatch(A, 2), PrefixMatch(B, 1))


def test_one_workers_removal_leaves_anothers_copy() -> None:
    cache_map = with_workers(a=(1, 2), b=(1, 2))
    cache = cache_map.worker(A)
    assert cache is not None
    assert cache_map.remove(cache, Tier.DEVICE, (1, 2)) == (1, 2)
    assert cache_map.match((1, 2)) == (PrefixMatch(B, 2),)


def test_what_did_not_change_is_not_told() -> None:
    cache_map = CacheMap()
    cache = cache_map.add(A, Epoch(1))
    keys = (3, 1, 2)
    assert cache_map.store(cache, Tier.DEVICE, keys) is keys
    assert list(cache_map.store(cache, Tier.DEVICE, (2, 5, 4, 5))) == [5, 4]
    assert list(cache_map.store(cache, Tier.DEVICE, (7, 7))) == [7]
    assert list(cache_map.remove(cache, Tier.DEVICE, (9, 3, 3))) == [3]
    assert list(cache_map.remove(cache, Tier.HOST, (1,))) == []
    assert cache_map.block_count(A) == 5


def test_a_key_on_two_tiers_is_held_until_both_are_gone() -> None:
    cache_map = CacheMap()
    cache = cache_map.add(A, Epoch(1))
    cache_map.store(cache, Tier.DEVICE, (1, 2))
    cache_map.store(cache, Tier.HOST, (1,))
    assert (cache_map.block_count(A), cache_map.copy_count, cache_map.key_count) == (3, 3, 2)
    cache_map.remove(cache, Tier.DEVICE, (1, 2))
    assert cache_map.match((1, 2)) == (PrefixMatch(A, 1),)
    assert cache_map.holds_all(A, (1,))
    assert not cache_map.holds_all(A, (1, 2))
    cache_map.remove(cache, Tier.HOST, (1,))
    assert cache_map.match((1,)) == ()
    assert cache_map.key_count == 0


def test_a_prefix_over_several_tiers_matches_whole() -> None:
    cache_map = CacheMap()
    cache = cache_map.add(A, Epoch(1))
    for key, tier in zip((1, 2, 3), Tier, strict=True):
        cache_map.store(cache, tier, (key,))
    assert cache_map.match((1, 2, 3)) == (PrefixMatch(A, 3),)
    assert cache_map.holds_all(A, (1, 2, 3))


def test_a_clear_takes_every_tier_of_its_owner_alone() -> None:
    cache_map = with_workers(a=(1, 2), b=(1,))
    cache = cache_map.worker(A)
    assert cache is not None
    cache_map.store(cache, Tier.HOST, (2, 3))
    cache_map.clear(cache)
    assert cache_map.block_count(A) == 0
    assert cache_map.match((1, 2)) == (PrefixMatch(B, 1),)
    assert cache_map.key_count == 1


def test_packed_is_the_same_for_the_same_contents() -> None:
    one, other = with_workers(a=(3, 1, 2**64 - 1)), with_workers(a=(1, 2**64 - 1, 7, 3))
    cache = other.worker(A)
    assert cache is not None
    other.remove(cache, Tier.DEVICE, (7,))
    assert one.packed(A) == other.packed(A) == ((Tier.DEVICE, pack_keys((1, 3, 2**64 - 1))),)
    assert one.packed(B) == ()


def test_restore_is_the_inverse_of_packed() -> None:
    cache_map = with_workers(a=(1, 2, 3), b=(1,))
    cache = cache_map.worker(A)
    assert cache is not None
    cache_map.store(cache, Tier.DISK, (9,))
    cache.seq = Seq(7)
    copy = CacheMap()
    for worker_id in cache_map.worker_ids():
        stored = cache_map.position(worker_id)
        assert stored is not None
        copy.restore(worker_id, stored, cache_map.packed(worker_id))
        assert copy.position(worker_id) == stored
        assert copy.packed(worker_id) == cache_map.packed(worker_id)
    assert copy.match((1, 2, 3)) == cache_map.match((1, 2, 3))
    copy.restore(A, position(2, 5, complete=False), ((Tier.HOST, pack_keys((4,))),))
    assert copy.position(A) == position(2, 5, complete=False)
    assert copy.packed(A) == ((Tier.HOST, pack_keys((4,))),)
    with pytest.raises(ValueError, match="multiple of 8"):
        copy.restore(A, FIRST, ((Tier.DEVICE, b"1234"),))
    assert copy.block_count(A) == 1, "a broken record replaces nothing"


def test_a_worker_that_left_is_a_tombstone() -> None:
    cache_map = with_workers(a=(1,))
    cache_map.leave(A, position(1, 3, left=True))
    assert cache_map.match((1,)) == ()
    assert cache_map.position(A) == position(1, 3, left=True)
    assert cache_map.worker_ids() == ()
    assert cache_map.tombstones() == ((A, position(1, 3, left=True)),)
    restored = CacheMap()
    restored.restore(A, position(1, 3, left=True), ())
    assert restored.tombstones() == cache_map.tombstones()
    cache_map.forget(A)
    assert cache_map.position(A) is None


def test_dropped_tombstones_raise_the_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_map_module, "TOMBSTONES_MAX", 2)
    cache_map = CacheMap()
    for name, epoch in (("a", 5), ("b", 3), ("c", 9), ("d", 4)):
        cache_map.leave(WorkerId(name), position(epoch, left=True))
    assert [worker_id for worker_id, _ in cache_map.tombstones()] == ["a", "c"]
    assert cache_map.epoch_floor == 4


def test_forgetting_a_worker_that_was_never_there_changes_nothing() -> None:
    cache_map = with_workers(a=(1,))
    cache_map.forget(B)
    assert cache_map.worker_ids() == (A,)


def test_slots_are_given_again_only_when_all_let_go() -> None:
    slots = WorkerSlots()
    assert [slots.acquire(A), slots.acquire(B), slots.acquire(A)] == [1, 2, 1]
    slots.release(A)
    assert slots.acquire(C) == 4
    slots.release(A)
    assert (len(slots), slots.width) == (2, 3)
    assert slots.acquire(WorkerId("d")) == 1
    assert (len(slots), slots.width) == (3, 3)
    matches = (PrefixMatch(C, 2), PrefixMatch(WorkerId("d"), 2), PrefixMatch(B, 1))
    assert slots.matches((0b111, 0b101)) == matches == slots.matches((0b111, 0b101))
    slots.release(C)
    assert slots.acquire(WorkerId("a")) == 4
    assert slots.matches((0b111, 0b101))[0] == PrefixMatch(A, 2), "answers do not outlive the meaning of a slot"


def test_remembered_look_ups_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots_module, "ANSWERED_MASKS_MAX", 100)
    cache_map = with_workers(**{f"w{number}": tuple(range(number)) for number in range(1, 20)})
    for _ in range(3):
        for depth in range(19):
            keys = tuple(range(depth))
            assert [match.blocks for match in cache_map.match(keys)] == sorted(
                (min(depth, number) for number in range(1, 20) if depth), reverse=True
            )
            assert sum(len(masks) + 1 for masks in cache_map.slots._answers) <= 100


def test_shared_masks_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_map_module, "INTERNED_MAX", 3)
    cache_map = with_workers(**{f"w{number}": tuple(range(number)) for number in range(1, 20)})
    assert len(cache_map._interned) <= 3
    assert [match.blocks for match in cache_map.match(tuple(range(19)))] == list(range(19, 0, -1))
    for worker_id in cache_map.worker_ids():
        cache_map.forget(worker_id)
        assert len(cache_map._interned) <= 3


def test_a_match_deeper_than_those_made_beforehand() -> None:
    keys = tuple(range(1_000))
    cache_map = with_workers(a=keys, b=keys[: slots_module.MATCHES_MADE], c=keys[: slots_module.MATCHES_MADE - 1])
    assert dict(cache_map.match(keys)) == {
        A: 1_000,
        B: slots_module.MATCHES_MADE,
        C: slots_module.MATCHES_MADE - 1,
    }


def test_a_worker_in_anothers_old_slot_inherits_nothing() -> None:
    cache_map = with_workers(a=(1, 2), b=(2,))
    cache_map.forget(A)
    cache_map.add(C, Epoch(1))
    assert cache_map.slots.width == 2
    assert cache_map.match((1, 2)) == ()
    assert cache_map.match((2,)) == (PrefixMatch(B, 1),)


def test_hundreds_of_workers_have_their_own_bits() -> None:
    cache_map = with_workers(**{f"w{number:03d}": tuple(range(number % 5 + 1)) for number in range(300)})
    matches = cache_map.match(tuple(range(5)))
    expected = [(-(number % 5 + 1), f"w{number:03d}") for number in range(300)]
    assert [(-match.blocks, match.worker_id) for match in matches] == sorted(expected)


def test_memory_returns_after_churn_of_blocks_and_workers() -> None:
    """Many times the standing contents pass through; entries and bytes end where they began."""
    chance = random.Random(4)
    cache_map = CacheMap()

    def churn(generations: int) -> None:
        for generation in range(generations):
            worker_id = WorkerId(f"w{generation}")
            cache = cache_map.add(worker_id, Epoch(1))
            for _ in range(10):
                keys = tuple(chance.getrandbits(64) for _ in range(200))
                cache_map.store(cache, Tier.DEVICE, keys)
                cache_map.store(cache, Tier.HOST, keys[:50])
                cache_map.remove(cache, Tier.DEVICE, keys[100:])
            cache_map.forget(worker_id)

    tracemalloc.start()
    try:
        churn(5)
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        churn(60)
        gc.collect()
        after = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert cache_map.key_count == cache_map.copy_count == len(cache_map.slots) == 0
    assert cache_map.slots.width == 1
    assert cache_map.worker_ids() == ()
    assert after - before < 64 * 1024, f"{after - before} bytes stayed"
