"""Whoever is most behind and has no use for the rooms that are open does not stop those who have."""

import heapq
from collections import Counter

import pytest
from tests.unit.core.scheduler_world import MS, World, chain, config, ticket, tickets

from evenhand.core.facts import Ticket, Usage, WorkerLoad
from evenhand.core.held_up import HELD_UP_USERS_MAX
from evenhand.core.ids import TenantId, WorkerId
from evenhand.core.steps import Granted, Renew, WakeAt, WorkerHeard

WHOLE_TOKENS = 159_980
"""With 16 of output: all 10,000 blocks of a worker."""
OTHERS = ("g0", "g1", "g2")


class Crowd:
    """A pool in which ``OTHERS`` keep small requests waiting; each second all that they run is settled."""

    def __init__(self, workers: int, *names: str, **settings: object) -> None:
        self.world = World(config(**settings))
        self.workers = [f"w{i}" for i in range(workers)]
        self.world.tenants(*names, *OTHERS)
        self.world.workers(*self.workers)
        self.full: set[str] = set()
        self.granted: list[Granted] = []
        for name in (*names, *OTHERS):
            for _ in range(3):
                for held in tickets(self.world.submit(name, prompt=500, output=20)):
                    self.world.settle(held, after_ms=20)
        self.world.effects.clear()

    def round(self, after_ms: int = 1_000, queued: int = 8) -> list[Granted]:
        """What the others are granted in one round."""
        world = self.world
        world.now_ns += after_ms * MS
        for name in self.workers:
            full = 1.0 if name in self.full else 0.0
            world.step(WorkerHeard(WorkerId(name), WorkerLoad(0, 0, full, world.now_ns)))
        for before in self.granted:
            world.settle(before.ticket)
        for name in OTHERS:
            while len(world.scheduler._legs.outstanding.tenants[TenantId(name)].queue) < queued:
                world.submit(name, prompt=500, output=20)
        world.tick(0)
        self.granted = [e for e in world.effects if isinstance(e, Granted) and e.ticket.tenant_id in OTHERS]
        world.effects.clear()
        return self.granted

    def a_leg_on_each(self, tenant: str) -> list[Ticket]:
        legs = [leg for _ in self.workers for leg in tickets(self.world.submit(tenant, prompt=10, output=16))]
        assert len({leg.worker_id for leg in legs}) == len(self.workers)
        return legs


def renewed(crowd: Crowd, legs: list[Ticket]) -> None:
    for leg in legs:
        crowd.world.step(Renew(leg.ticket_id, Usage(10, 0, 1)))


@pytest.mark.parametrize("holder", ["long", "big"])
def test_others_go_on_for_as_long_as_a_worker_is_kept(holder: str) -> None:
    """Also where the most-behind itself holds the legs that it waits for, and renews them for ever."""
    free = Crowd(4)
    alone = len([each for _ in range(40) for each in free.round()])
    crowd = Crowd(4, *sorted({"big", holder}))
    legs = crowd.a_leg_on_each(holder)
    crowd.world.submit("big", prompt=WHOLE_TOKENS, output=16)
    for _ in range(100):
        renewed(crowd, legs)
        crowd.round()
    late = 0
    for _ in range(40):
        renewed(crowd, legs)
        kept = crowd.world.scheduler.kept
        for each in crowd.round():
            late += 1
            assert each.decision.backfilled is each.ticket.backfilled
            assert kept is not None
            assert each.ticket.worker_id != kept[1]
    assert late > alone / 2
    backfilled = {t.tenant_id: t.cost_backfilled for t in crowd.world.scheduler.status(0).tenants}
    assert sum(backfilled[TenantId(name)] for name in OTHERS) > 0.0


def test_a_request_that_excludes_all_workers_but_a_full_one_does_not_stop_the_others() -> None:
    crowd = Crowd(4, "evil")
    crowd.full = {"w0"}
    crowd.round()
    excluded = tuple(WorkerId(name) for name in crowd.workers[1:])
    crowd.world.submit("evil", prompt=10, output=16, excluded_workers=excluded)
    for _ in range(60):
        crowd.round()
    assert len([each for _ in range(20) for each in crowd.round()]) > 100


def test_many_users_of_one_tenant_that_are_held_up_do_not_stop_the_others() -> None:
    crowd = Crowd(4, "evil")
    crowd.full = {"w0"}
    crowd.round()
    excluded = tuple(WorkerId(name) for name in crowd.workers[1:])
    for i in range(4 * HELD_UP_USERS_MAX):
        crowd.world.submit("evil", prompt=10, output=16, user=f"u{i}", excluded_workers=excluded)
    for _ in range(60):
        crowd.round()
    assert len([each for _ in range(20) for each in crowd.round()]) > 100


def test_others_go_on_while_the_most_behind_waits_for_a_warmer_worker() -> None:
    """On every round until its wait is over; past the window, too."""
    world = World(config(cold_wait_backlog_factor=0.0))
    world.tenants("evil", "long", *OTHERS)
    world.workers("w0", slots=1)
    keys = chain(7, 1_800)
    world.store("w0", keys)
    assert tickets(world.submit("long", prompt=10, output=16))
    world.workers("w1", "w2")
    for name in OTHERS:
        for _ in range(20):
            for held in tickets(world.submit(name, prompt=500, output=20)):
                world.settle(held, after_ms=20)
    world.submit("evil", keys, output=16)
    running: list[Ticket] = []
    for count in range(45):
        world.effects.clear()
        for leg in running:
            world.settle(leg)
        for name in OTHERS:
            while len(world.scheduler._legs.outstanding.tenants[TenantId(name)].queue) < 40:
                world.submit(name, prompt=500, output=20)
        world.now_ns += 100 * MS
        for name in ("w0", "w1", "w2"):
            world.step(WorkerHeard(WorkerId(name), WorkerLoad(0, 0, 0.0, world.now_ns)))
        world.tick(0)
        running = tickets(world.effects)
        assert {leg.tenant_id for leg in running} <= set(OTHERS)
        assert running
        if count > 25:
            assert min(Counter(leg.worker_id for leg in running).values()) >= 3
    world.tick(1_000)
    assert "evil" in {leg.tenant_id for leg in tickets(world.effects)}


def test_who_is_passed_stays_first_in_turn_and_is_lifted_to_a_window_behind_who_passes() -> None:
    crowd = Crowd(2, "big", "long")
    legs = crowd.a_leg_on_each("long")
    first = crowd.world.count + 1
    for _ in range(3):
        crowd.world.submit("big", prompt=WHOLE_TOKENS, output=16)
    v = crowd.world.v("big")
    for _ in range(60):
        renewed(crowd, legs)
        for each in crowd.round():
            if each.ticket.backfilled:
                level = each.decision.levels[1]
                assert crowd.world.v("big") >= level.virtual_time - level.window
    assert v < crowd.world.v("big") < min(crowd.world.v(name) for name in OTHERS)
    for leg in legs:
        crowd.world.settle(leg)
    for each in crowd.granted:
        crowd.world.settle(each.ticket)
    got = tickets(crowd.world.effects)
    assert got[0].request_id == f"r{first}"
    assert not got[0].backfilled


def test_whom_only_headroom_holds_back_for_long_is_held_up_where_only_headroom_is_left() -> None:
    """The last slot goes to one below its share, beyond the window too, if nobody inside it may use the slot."""
    world = World(config(window_fixed=0.0))
    delay_ms = round(config().window_delay_ms)
    world.tenants("behind", weight=100.0)
    world.tenants("ahead", "small")
    world.workers("w1", slots=8)
    world.settle(ticket(world.submit("ahead", prompt=1_000, output=16)))
    assert tickets(world.submit("small", prompt=1, output=1))
    for _ in range(8):
        world.submit("behind", prompt=100, output=16)
    assert world.scheduler.status(0).workers[0].slots_used == 7
    assert world.v("behind") < world.v("ahead")
    v = world.v("ahead")
    assert not tickets(world.submit("ahead", prompt=10, output=1)), "in a full pool that is soon over"
    assert not tickets(world.tick(delay_ms - 1))
    last = ticket(world.tick(1))
    assert last.backfilled
    assert world.v("behind") == v, "with no window at all it is level with who passed it"


def test_what_is_inside_the_window_is_not_told_as_backfilled() -> None:
    crowd = Crowd(4, "big", "long", window_fixed=1e9)
    crowd.a_leg_on_each("long")
    crowd.world.submit("big", prompt=WHOLE_TOKENS, output=16)
    assert crowd.round()
    assert not any(each.ticket.backfilled for each in crowd.granted)


@pytest.mark.parametrize("level", ["tenants of a band", "users of a tenant"])
def test_what_does_not_reach_a_worker_has_no_claim_there(level: str) -> None:
    """One of two reaches the small worker and is held up; the other, held back by headroom, never fits there."""
    bands = (("default", 1.0), ("low", 10.0))
    world = World(config(bands=bands, window_fixed=0.0, prefill_pending_max_tokens=1 << 31))
    of_a_band = level == "tenants of a band"
    names = {"whole": "whole", "big": "big"} if of_a_band else {"whole": "mixed", "big": "mixed"}
    world.tenants(*sorted(set(names.values())), band="low" if of_a_band else "default", weight=10.0)
    world.tenants("other")
    world.workers("full", "large")
    world.workers("small", kv_blocks=100)
    not_small, not_large = (WorkerId("full"), WorkerId("large")), (WorkerId("large"),)
    assert ticket(world.submit("other", prompt=300, excluded_workers=not_small)).worker_id == "small"
    world.settle(ticket(world.submit("other", prompt=9_000)))
    world.step(WorkerHeard(WorkerId("full"), WorkerLoad(0, 0, 1.0, world.now_ns)))
    for _ in range(8):
        world.submit(names["big"], prompt=2_000, user="big")
    assert not tickets(world.submit(names["whole"], prompt=1_500, user="whole", excluded_workers=not_large))
    assert [worker.slots_used for worker in world.scheduler.status(0).workers] == [0, 7, 1]
    for _ in range(2):
        found = ticket(world.submit("other", prompt=10))
        assert (found.worker_id, found.backfilled) == ("small", True)


def test_whoever_waits_for_a_large_worker_uses_up_no_look_past_the_held_up_at_a_small_one() -> None:
    """However many they are: they have no claim there."""
    names = [f"large{i:02}" for i in range(70)]
    world = World(config(window_fixed=0.0))
    world.tenants(*names, "held", "other")
    world.workers("full", "small", kv_blocks=100)
    world.workers("large", slots=1)
    world.step(WorkerHeard(WorkerId("full"), WorkerLoad(0, 0, 1.0, world.now_ns)))
    world.settle(ticket(world.submit("other", prompt=9_000)))
    assert ticket(world.submit(names[0], prompt=2_000)).worker_id == "large"
    for name in names:
        assert not tickets(world.submit(name, prompt=2_000))
    not_full = (WorkerId("small"), WorkerId("large"))
    assert not tickets(world.submit("held", prompt=10, excluded_workers=not_full))
    found = ticket(world.submit("other", prompt=10))
    assert (found.worker_id, found.backfilled) == ("small", True)


def test_who_has_waited_for_a_warmer_worker_for_the_delay_is_passed_on_time_though_nothing_else_happens() -> None:
    world = World(config(cold_wait_backlog_factor=0.0, window_fixed=0.0, window_delay_ms=750.0))
    world.tenants("holds", "waits", "other")
    world.workers("w0", "w1", slots=2)
    assert ticket(world.submit("other", prompt=500)).worker_id == "w0"
    keys = chain(7, 1_800)
    world.store("w0", keys)
    assert ticket(world.submit("holds", prompt=10, excluded_workers=(WorkerId("w1"),))).worker_id == "w0"
    assert ticket(world.submit("holds", prompt=10, excluded_workers=(WorkerId("w0"),))).worker_id == "w1"
    assert not tickets(world.submit("waits", keys))
    assert not tickets(world.submit("other", prompt=10))
    assert WakeAt(world.now_ns + 750 * MS) in world.effects
    assert not tickets(world.tick(749))
    passing = ticket(world.tick(1))
    assert (passing.tenant_id, passing.worker_id, passing.backfilled) == ("other", "w1", True)


def test_equals_that_are_held_up_have_as_many_turns_whatever_their_names() -> None:
    """Each asks for most of a worker, again and again, among small legs that drain at their own times."""
    world = World(config(worker_stale_after_ms=10**9, worker_lost_after_ms=10**9, ticket_ttl_ms=10**9))
    world.workers(*[f"w{i:02}" for i in range(12)], kv_blocks=800)
    large, small = ("a", "b", "c", "d"), "small"
    world.tenants(*large, small)
    turns: Counter[str] = Counter()
    ends: list[tuple[int, int, Ticket]] = []
    while world.now_ns < 600_000 * MS:
        for name, queued, prompt, output in [*((each, 2, 9_000, 10) for each in large), (small, 24, 600, 900)]:
            while len(world.scheduler._legs.outstanding.tenants[TenantId(name)].queue) < queued:
                world.submit(name, prompt=prompt, output=output)
        for leg in tickets(world.effects):
            place = len(ends) + world.count
            runs_ms = 20_000 if leg.tenant_id in large else 333 * (1 + place * 7_919 % 101)
            heapq.heappush(ends, (world.now_ns + runs_ms * MS, world.count * 1_000 + len(ends), leg))
            if world.now_ns > 100_000 * MS:
                turns[leg.tenant_id] += 1
        world.effects.clear()
        world.now_ns, _, ended = heapq.heappop(ends)
        world.settle(ended)
    assert max(turns[name] for name in large) <= 1.1 * min(turns[name] for name in large), turns


def beside_a_full_warm_worker(**settings: object) -> tuple[World, tuple[int, ...]]:
    """Whose prompt of 600 blocks this is has it on w0, which is full for long; it is declined elsewhere."""
    world = World(config(cold_wait_backlog_factor=0.0, prefill_pending_max_tokens=1 << 31, **settings))
    world.tenants("holds", "large", "other")
    world.workers("w0", slots=2, kv_blocks=800)
    for _ in range(2):
        assert tickets(world.submit("holds", prompt=10, output=2_000))
    world.workers("w1", "w2", kv_blocks=800)
    keys = chain(7, 600)
    world.store("w0", keys)
    return world, keys


@pytest.mark.parametrize("is_mixed", [False, True])
def test_whom_a_worker_is_kept_for_and_who_waits_there_is_not_passed_in_whatever_pool(is_mixed: bool) -> None:
    """It has a use for the worker that has drained; in a mixed pool one is too small for it, and full."""
    world, keys = beside_a_full_warm_worker(window_fixed=0.0)
    if is_mixed:
        world.workers("tiny", kv_blocks=10)
        world.step(WorkerHeard(WorkerId("tiny"), WorkerLoad(0, 0, 1.0, world.now_ns)))
    running = [ticket(world.submit("other", prompt=8_000, output=10)) for _ in range(2)]
    assert {leg.worker_id for leg in running} == {"w1", "w2"}
    assert not tickets(world.submit("large", keys, output=10))
    kept = world.scheduler.kept
    assert kept is not None
    (drains,) = (leg for leg in running if leg.worker_id == kept[1])
    assert not tickets(world.settle(drains))
    assert not tickets(world.submit("other", prompt=10, output=1))
    assert world.scheduler.kept == kept
    assert not tickets(world.tick(749))
    passing = ticket(world.tick(1))
    assert (passing.tenant_id, passing.backfilled) == ("other", True)
    assert passing.worker_id != kept[1]


def test_who_waits_for_a_warmer_worker_and_fits_nowhere_else_any_more_is_held_up() -> None:
    """It was declined where it fitted; since that room is taken, it is not its wait that stops it."""
    world, keys = beside_a_full_warm_worker(window_fixed=100.0)
    assert ticket(world.submit("holds", prompt=8_000, output=10)).worker_id == "w1"
    assert not tickets(world.submit("large", keys, output=10))
    before = world.scheduler.kept
    assert before is None
    taking = ticket(world.submit("other", prompt=8_000, output=10))
    assert (taking.worker_id, taking.backfilled) == ("w2", False)
    passing = ticket(world.submit("other", prompt=10, output=1))
    assert passing.backfilled
    assert world.scheduler.kept is not None
    assert passing.worker_id != world.scheduler.kept[1]
