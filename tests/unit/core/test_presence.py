"""What is assumed beside the map: presumed keys, approximate keys, and their ends."""

from collections.abc import Sequence

import pytest

from evenhand.core.cache_map import CacheMap, PrefixMatch
from evenhand.core.facts import WorkerSpec
from evenhand.core.fold import fold
from evenhand.core.ids import Epoch, PoolId, Seq, TicketId, WorkerId
from evenhand.core.kv import KvBatch, KvOperation, Removed, Stored
from evenhand.core.presence import PrefillOutcome, Presence

A, B = WorkerId("a"), WorkerId("b")
T1, T2, T3 = TicketId("t1"), TicketId("t2"), TicketId("t3")
GRACE_NS, LIFETIME_NS = 1_000, 10_000
PREFILLED, CANCELLED = PrefillOutcome.PREFILLED, PrefillOutcome.CANCELLED_BEFORE_PREFILL


def spec(worker_id: WorkerId, *, epoch: int = 1, kv_blocks: int = 100, sends_events: bool = True) -> WorkerSpec:
    return WorkerSpec(
        worker_id, PoolId("p"), "http://e:1", Epoch(epoch), 8, kv_blocks, 16, sends_events=sends_events
    )


class Bench:
    """A map and a presence beside it, with folding that numbers batches by itself."""

    def __init__(self, *specs: WorkerSpec) -> None:
        self.cache_map = CacheMap()
        self.presence = Presence(self.cache_map, GRACE_NS, LIFETIME_NS)
        for joined in specs:
            self.presence.worker_joined(joined)

    def fold(self, worker_id: WorkerId, *operations: KvOperation, epoch: int = 1) -> None:
        known = self.cache_map.position(worker_id)
        seq = known.seq + 1 if known is not None and known.epoch == epoch else 1
        fold(self.cache_map, KvBatch(worker_id, Epoch(epoch), Seq(seq), operations))
        self.presence.map_changed(worker_id)

    def held(self, keys: Sequence[int]) -> dict[WorkerId, int]:
        return dict(self.presence.match(keys))

    def nothing_is_left(self) -> bool:
        presence = self.presence
        counts = (presence.assumed_count(A), presence.assumed_count(B), presence.ticket_count)
        return counts == (0, 0, 0) and not presence._marks and not presence._tickets


def test_a_dispatched_prompt_is_presumed_at_once() -> None:
    bench = Bench(spec(A), spec(B))
    bench.presence.presume(T1, A, (1, 2, 3), 0)
    assert bench.presence.match((1, 2, 3, 4)) == (PrefixMatch(A, 3),)
    assert bench.presence.match_map_only((1, 2, 3)) == ()
    assert bench.presence.match((9,)) == bench.presence.match(()) == ()


def test_the_union_of_map_and_presumed_has_no_hole() -> None:
    """Some keys by the map, some presumed, in any mixture: one prefix."""
    bench = Bench(spec(A), spec(B))
    bench.fold(A, Stored((1, 3)))
    bench.fold(B, Stored((1, 2)))
    bench.presence.presume(T1, A, (2, 4), 0)
    assert bench.presence.match((1, 2, 3, 4, 5)) == (PrefixMatch(A, 4), PrefixMatch(B, 2))
    assert bench.presence.match_map_only((1, 2, 3, 4, 5)) == (PrefixMatch(B, 2), PrefixMatch(A, 1))


def test_presumed_keys_end_when_the_ticket_has_ended_and_the_map_has_them() -> None:
    bench = Bench(spec(A))
    bench.presence.presume(T1, A, (1, 2, 3), 0)
    bench.fold(A, Stored((1, 2)))
    bench.presence.ticket_ended(T1, PREFILLED, 10)
    assert bench.held((1, 2, 3)) == {A: 3}
    bench.fold(A, Stored((3,)))
    assert bench.nothing_is_left()
    bench.fold(A, Removed((2, 3)))
    assert bench.held((1, 2, 3)) == {A: 1}


def test_presumed_keys_outlive_an_eviction_while_the_ticket_is_open() -> None:
    bench = Bench(spec(A))
    bench.presence.presume(T1, A, (1, 2), 0)
    bench.fold(A, Stored((1, 2)))
    bench.fold(A, Removed((1, 2)))
    assert bench.held((1, 2)) == {A: 2}


def test_a_ticket_that_ends_after_the_map_has_caught_up_ends_its_keys() -> None:
    bench = Bench(spec(A))
    bench.presence.presume(T1, A, (1, 2), 0)
    bench.fold(A, Stored((1, 2)))
    bench.presence.ticket_ended(T1, PREFILLED, 10)
    assert bench.nothing_is_left()


def test_grace_is_bounded() -> None:
    bench = Bench(spec(A))
    bench.presence.presume(T1, A, (1, 2), 0)
    bench.presence.expire(10**9)
    assert bench.held((1, 2)) == {A: 2}, "an open ticket has no end"
    assert bench.presence.next_expiry_ns() is None
    bench.presence.ticket_ended(T1, PREFILLED, 10**9)
    assert bench.presence.next_expiry_ns() == 10**9 + GRACE_NS
    bench.presence.expire(10**9 + GRACE_NS - 1)
    assert bench.held((1, 2)) == {A: 2}
    bench.presence.expire(10**9 + GRACE_NS)
    assert bench.held((1, 2)) == {}
    assert bench.nothing_is_left()


def test_a_prompt_cancelled_before_its_prefill_leaves_nothing() -> None:
    bench = Bench(spec(A), spec(B, sends_events=False))
    for ticket_id, worker_id in ((T1, A), (T2, B)):
        bench.presence.presume(ticket_id, worker_id, (1, 2), 0)
        bench.presence.ticket_ended(ticket_id, CANCELLED, 5)
    assert bench.held((1, 2)) == {}
    assert bench.nothing_is_left()


def test_one_tickets_end_leaves_anothers_keys() -> None:
    bench = Bench(spec(A))
    bench.presence.presume(T1, A, (1, 2), 0)
    bench.presence.presume(T2, A, (1, 2, 3), 1)
    bench.presence.ticket_ended(T2, CANCELLED, 2)
    assert bench.held((1, 2, 3)) == {A: 2}
    bench.presence.ticket_ended(T1, CANCELLED, 3)
    assert bench.nothing_is_left()


def test_unknown_workers_tickets_and_second_ends_change_nothing() -> None:
    bench = Bench(spec(A))
    bench.presence.presume(T1, B, (1,), 0)
    bench.presence.ticket_ended(T2, PREFILLED, 0)
    bench.presence.presume(T3, A, (1,), 0)
    bench.presence.presume(T3, A, (7,), 0)
    bench.presence.ticket_ended(T3, PREFILLED, 0)
    bench.presence.ticket_ended(T3, CANCELLED, 0)
    bench.presence.map_changed(B)
    bench.presence.worker_gone(B)
    assert bench.held((1,)) == {A: 1}
    assert bench.held((7,)) == {}
    assert bench.presence.ticket_count == 1


def test_presumed_keys_are_bounded_by_the_kv_oldest_ticket_first() -> None:
    bench = Bench(spec(A, kv_blocks=5))
    bench.presence.presume(T1, A, (1, 2, 3), 0)
    bench.presence.presume(T2, A, (1, 4), 1)
    bench.presence.presume(T3, A, (5, 6), 2)
    assert bench.held((2,)) == {}
    assert bench.held((1, 4)) == {A: 2}
    assert bench.held((5, 6)) == {A: 2}
    bench.presence.ticket_ended(T1, PREFILLED, 3)
    bench.presence.presume(TicketId("t4"), A, tuple(range(10, 20)), 4)
    assert bench.presence.match(tuple(range(10, 20))) == (PrefixMatch(A, 5),)
    assert bench.presence.assumed_count(A) == 5


def test_a_smaller_spec_shrinks_what_is_assumed() -> None:
    bench = Bench(spec(A, sends_events=False))
    bench.presence.presume(T1, A, (1, 2, 3), 0)
    bench.presence.ticket_ended(T1, PREFILLED, 0)
    bench.presence.worker_joined(spec(A, kv_blocks=2, sends_events=False))
    assert bench.held((1, 2, 3)) == {A: 2}
    bench.presence.worker_joined(spec(A, kv_blocks=2))
    assert bench.nothing_is_left(), "a worker that sends events has no approximate keys"


@pytest.mark.parametrize("by_map", [True, False])
def test_a_later_epoch_drops_what_was_assumed(by_map: bool) -> None:
    bench = Bench(spec(A), spec(B))
    bench.presence.presume(T1, A, (1, 2), 0)
    bench.presence.presume(T2, B, (1, 2), 0)
    bench.presence.ticket_ended(T1, PREFILLED, 0)
    if by_map:
        bench.fold(A, Stored((9,)), epoch=2)
    bench.presence.worker_joined(spec(A, epoch=2))
    assert bench.held((1, 2)) == {B: 2}
    bench.presence.worker_joined(spec(A, epoch=1))
    bench.presence.presume(T3, A, (5,), 0)
    bench.presence.worker_joined(spec(A, epoch=2))
    assert bench.held((5,)) == {A: 1}, "the same epoch again drops nothing"


def test_a_worker_that_is_gone_leaves_nothing_and_its_slot_is_free() -> None:
    bench = Bench(spec(A), spec(B, sends_events=False))
    bench.presence.presume(T1, A, (1,), 0)
    bench.presence.presume(T2, B, (1,), 0)
    bench.presence.ticket_ended(T2, PREFILLED, 0)
    bench.presence.worker_gone(A)
    assert bench.held((1,)) == {B: 1}
    bench.presence.ticket_ended(T1, PREFILLED, 0)
    bench.presence.worker_gone(B)
    bench.presence.expire(10**12)
    assert bench.nothing_is_left()
    assert len(bench.cache_map.slots) == 0


def test_map_and_presence_share_a_worker_and_let_go_apart() -> None:
    bench = Bench(spec(A))
    bench.fold(A, Stored((1,)))
    bench.presence.worker_gone(A)
    assert bench.held((1,)) == {A: 1}
    bench.presence.worker_joined(spec(A))
    bench.presence.presume(T1, A, (2,), 0)
    bench.cache_map.forget(A)
    assert bench.held((2,)) == {A: 1}
    assert bench.held((1,)) == {}


# Approximate


def test_keys_of_a_worker_without_events_live_on_after_the_ticket() -> None:
    bench = Bench(spec(A, sends_events=False))
    bench.presence.presume(T1, A, (1, 2, 3), 0)
    bench.presence.ticket_ended(T1, PREFILLED, 100)
    assert bench.held((1, 2, 3)) == {A: 3}
    assert bench.presence.ticket_count == 0
    assert bench.presence.next_expiry_ns() == 100 + LIFETIME_NS
    bench.presence.expire(100 + LIFETIME_NS - 1)
    assert bench.held((1, 2, 3)) == {A: 3}
    bench.presence.expire(100 + LIFETIME_NS)
    assert bench.nothing_is_left()


def test_use_renews_the_lifetime() -> None:
    bench = Bench(spec(A, sends_events=False))
    for ticket_id, keys, end_ns in ((T1, (1, 2, 3), 100), (T2, (1, 2), 5_000)):
        bench.presence.presume(ticket_id, A, keys, end_ns)
        bench.presence.ticket_ended(ticket_id, PREFILLED, end_ns)
    bench.presence.expire(100 + LIFETIME_NS)
    assert bench.held((1, 2, 3)) == {A: 2}
    assert bench.presence.assumed_count(A) == 2


def test_an_open_ticket_keeps_keys_past_their_lifetime() -> None:
    bench = Bench(spec(A, sends_events=False))
    bench.presence.presume(T1, A, (1, 2), 0)
    bench.presence.ticket_ended(T1, PREFILLED, 0)
    bench.presence.presume(T2, A, (1, 2), 1)
    bench.presence.expire(10 * LIFETIME_NS)
    assert bench.held((1, 2)) == {A: 2}


def test_a_cancelled_repeat_does_not_take_back_what_was_there() -> None:
    bench = Bench(spec(A, sends_events=False))
    bench.presence.presume(T1, A, (1, 2), 0)
    bench.presence.ticket_ended(T1, PREFILLED, 0)
    bench.presence.presume(T2, A, (1, 2, 3), 1)
    bench.presence.ticket_ended(T2, CANCELLED, 2)
    assert bench.held((1, 2, 3)) == {A: 2}


def test_approximate_keys_are_bounded_by_the_kv_least_recent_and_deepest_first() -> None:
    bench = Bench(spec(A, sends_events=False, kv_blocks=5))
    for ticket_id, keys in ((T1, (1, 2, 3)), (T2, (4, 5))):
        bench.presence.presume(ticket_id, A, keys, 0)
        bench.presence.ticket_ended(ticket_id, PREFILLED, 0)
    bench.presence.presume(T3, A, (6, 7), 1)
    assert bench.held((1, 2, 3)) == {A: 1}
    assert bench.held((4, 5)) == bench.held((6, 7)) == {A: 2}
    assert bench.presence.assumed_count(A) == 5
