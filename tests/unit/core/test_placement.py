"""docs/invariants.md, "Choosing a worker", by kind."""

from collections import Counter

import pytest
from tests.unit.core.scheduler_world import BLOCK, MS, World, chain, config, ended, ticket, tickets

from evenhand.core.facts import ChoiceReason, Decision, SchedulerConfig, TenantState, Usage, WorkerLoad
from evenhand.core.ids import WorkerId
from evenhand.core.steps import Effect, Granted, Settle, WakeAt, WorkerDrained, WorkerHeard

FOUR = ("w1", "w2", "w3", "w4")


def steady(**changes: object) -> SchedulerConfig:
    """Workers are heard of for ever, and a wait for a warm one does not ask what else waits."""
    changes = {"cold_wait_backlog_factor": 0.0, **changes}
    return config(worker_stale_after_ms=10**9, worker_lost_after_ms=10**9, **changes)


@pytest.fixture
def world() -> World:
    world = World(steady())
    world.tenants("a", "b")
    world.workers(*FOUR)
    return world


def decision(effects: tuple[Effect, ...]) -> Decision:
    (granted,) = [e for e in effects if isinstance(e, Granted)]
    return granted.decision


def test_the_worker_that_holds_the_prefix_is_chosen_and_the_record_says_so(world: World) -> None:
    keys = chain(1, 8)
    world.store("w3", keys)
    world.store("w2", keys[:3])
    made = decision(world.submit("a", keys))
    assert made.reason is ChoiceReason.AFFINITY
    assert [(c.worker_id, c.cached_tokens) for c in made.candidates[:2]] == [("w3", 8 * BLOCK), ("w2", 3 * BLOCK)]
    assert not made.fairness_overrode_affinity
    assert (made.virtual_time_before, made.lo, made.tenants_considered) == (0.0, 0.0, 1)
    assert made.virtual_time_after == world.v("a")


def test_without_affinity_the_least_loaded_is_chosen(world: World) -> None:
    assert decision(world.submit("a", chain(1, 4))).reason is ChoiceReason.LOAD
    chosen = Counter(ticket(world.submit("a", chain(n, 4))).worker_id for n in range(2, 9))
    assert sorted(chosen.values()) == [1, 2, 2, 2]


def test_a_burst_of_equal_requests_does_not_land_on_one_worker(world: World) -> None:
    keys = chain(1, 60)
    landed = Counter(t.worker_id for _ in range(32) for t in tickets(world.submit("a", keys)))
    # The others go elsewhere once waiting for a place on the first would cost more than computing it there.
    for _ in range(3):
        landed += Counter(t.worker_id for t in tickets(world.tick(500)))
    assert len(landed) == 4
    assert max(landed.values()) <= 8


def test_followers_that_come_before_any_event_go_to_its_worker(world: World) -> None:
    first = ticket(world.submit("a", chain(1, 10)))
    second = ticket(world.submit("a", chain(1, 20)))
    assert second.worker_id == first.worker_id
    assert second.predicted_cached_tokens == 10 * BLOCK


def test_followers_already_in_the_queue_see_the_prefix_too() -> None:
    world = World(steady())
    world.tenants("a")
    world.workers("w1", slots=1)
    running = ticket(world.submit("a", chain(9, 2)))
    world.submit("a", chain(1, 10))
    world.submit("a", (*chain(1, 10), 7))
    running = ticket(world.settle(running))
    assert ticket(world.settle(running, Usage(running.prompt_tokens, 0, 3))).predicted_cached_tokens == 10 * BLOCK


def test_a_prompt_cancelled_before_prefill_is_not_presumed(world: World) -> None:
    world.submit("a", chain(1, 10), request_id="r")
    world.cancel("a", "r", Usage())
    assert ticket(world.submit("a", chain(1, 10))).predicted_cached_tokens == 0


def test_one_system_prompt_does_not_send_all_to_one_worker(world: World) -> None:
    system = chain(1, 40)
    world.store("w1", system)
    landed: Counter[str] = Counter()
    for n in range(24):
        for granted in tickets(world.submit("a", (*system, *chain(100 + n, 20)))):
            landed[granted.worker_id] += 1
    # The holder takes what its prefill room allows; every other worker takes its part.
    assert landed["w1"] == 7
    assert min(landed.values()) >= 4


def test_under_imbalance_affinity_is_weighed_not_thrown_away(world: World) -> None:
    keys = chain(1, 8)
    world.store("w1", keys)
    for n in range(6):
        world.store("w1", chain(50 + n, 2))
        world.submit("b", chain(50 + n, 2))
    assert ticket(world.submit("a", keys)).worker_id == "w1"


def test_equal_affinity_is_split_by_load(world: World) -> None:
    keys = chain(1, 8)
    for worker in ("w1", "w2"):
        world.store(worker, keys)
    landed = [ticket(world.submit("a", keys)).worker_id for _ in range(6)]
    assert Counter(landed) == {"w1": 3, "w2": 3}


def test_long_and_short_requests_load_a_worker_by_tokens() -> None:
    world = World(steady())
    world.tenants("a")
    world.workers("w1", "w2", slots=64)
    long = ticket(world.submit("a", prompt=2_000))
    short = [ticket(world.submit("a", prompt=50, output=1)).worker_id for _ in range(5)]
    assert long.worker_id not in short
    # Once prefilled it still holds its KV: the other worker has more requests and yet more room.
    world.workers("w1", "w2", slots=64, kv_blocks=400)
    world.tick(1_000)
    assert ticket(world.submit("a", prompt=50, output=1)).worker_id == short[0]


def test_prefill_room_admits_the_request_that_crosses_it_and_no_more() -> None:
    world = World(steady(prefill_pending_max_tokens=2_048, prefill_rate_default_tokens_per_s=8_000.0))
    world.tenants("a")
    world.workers("w1", slots=64)
    world.settle(ticket(world.submit("a", prompt=1)))  # no first token was told: prefill is modelled
    assert tickets(world.submit("a", prompt=2_000))
    assert tickets(world.submit("a", prompt=9_000))
    assert not tickets(world.submit("a", prompt=10))
    assert not tickets(world.tick(1_100))
    assert len(tickets(world.tick(200))) == 1


def test_kv_room_is_reserved_at_the_decision_and_given_back() -> None:
    world = World(steady(prefill_pending_max_tokens=10**9))
    world.tenants("a")
    world.workers("w1", slots=64, kv_blocks=100)
    running = [t for _ in range(5) for t in tickets(world.submit("a", prompt=400, output=80))]
    assert len(running) == 3
    (status,) = world.scheduler.status(0).workers
    assert status.kv_blocks_reserved == 90
    assert len(tickets(world.settle(running[0]))) == 1


def test_an_idle_worker_that_joins_gets_work_without_a_herd(world: World) -> None:
    world.workers(*FOUR, slots=2)
    for n in range(40):
        world.submit("a", chain(n, 3))
    took = tickets(world.workers("w5", slots=2))
    assert [t.worker_id for t in took] == ["w5", "w5"]
    assert world.scheduler.status(0).queued_total == 40 - 8 - 2


def test_a_cold_place_is_declined_while_a_warm_worker_is_only_full_and_others_can_use_it() -> None:
    world = World(steady(window_fixed=10_000.0))
    world.tenants("a", "b")
    world.workers("w1", slots=1)
    world.workers("w2", slots=2)
    warm = chain(1, 64)
    world.store("w1", warm)
    assert ticket(world.submit("a", warm)).worker_id == "w1"
    cold = [ticket(world.submit("b", chain(5 + n, 64))) for n in range(2)]
    world.submit("a", warm, request_id="warm")
    world.submit("b", chain(9, 64), request_id="cold")
    assert ticket(world.settle(cold[0])).request_id == "cold"
    # With nobody else waiting, the worker does not stay idle for it beyond the wait that may pay.
    wait_ms = 4 * 1_024 / 8_000 * 1_000
    wakes = [effect for effect in world.settle(cold[1]) if isinstance(effect, WakeAt)]
    assert wakes == [WakeAt(world.now_ns + round(wait_ms * MS))]
    assert not tickets(world.tick(wait_ms - 1))
    made = decision(world.tick(1))
    assert (made.request_id, made.reason) == ("warm", ChoiceReason.FAIRNESS)
    assert made.fairness_overrode_affinity


def test_who_waits_for_a_warm_worker_takes_it_when_it_has_room_and_delays_nobody() -> None:
    world = World(steady(window_fixed=10_000.0))
    world.tenants("a", "b")
    world.workers("w1", slots=1)
    world.workers("w2", slots=8)
    warm = chain(1, 64)
    world.store("w1", warm)
    first = ticket(world.submit("a", warm))
    assert not tickets(world.submit("a", warm, request_id="waits"))
    assert ticket(world.submit("b", chain(2, 64))).worker_id == "w2"
    taken = ticket(world.settle(first, after_ms=100))
    assert (taken.request_id, taken.worker_id) == ("waits", "w1")


def test_the_wait_for_a_warm_worker_is_bounded_whatever_the_prompt() -> None:
    world = World(steady(cold_wait_ms_max=700, prefill_pending_max_tokens=10**9))
    world.tenants("a")
    world.workers("w1", "w2", slots=1)
    warm = chain(1, 4_000)
    world.store("w1", warm)
    ticket(world.submit("a", warm))
    assert not tickets(world.submit("a", warm))
    assert not tickets(world.tick(699))
    assert ticket(world.tick(1)).worker_id == "w2"


def test_nobody_waits_for_a_warm_worker_longer_than_the_pool_works_on_its_backlog() -> None:
    world = World(steady(cold_wait_backlog_factor=1.0, prefill_pending_max_tokens=10**9))
    world.tenants("a")
    world.workers("w1", "w2", slots=2)
    legs = tickets([*world.submit("a", chain(7, 64)), *world.submit("a", chain(8, 64))])
    for leg in legs:
        world.settle(leg, Usage(1_025, 0, 10), after_ms=50)
    warm = chain(1, 1_000)
    world.store("w1", warm)
    full = [ticket(world.submit("a", warm)) for _ in range(2)]
    assert {leg.worker_id for leg in full} == {"w1"}
    assert not tickets(world.submit("a", warm))
    status = world.scheduler.status(world.now_ns)
    backlog_ms = 1_045 / status.cost_rate_per_s * 1_000
    assert not tickets(world.tick(backlog_ms - 2))
    assert ticket(world.tick(4)).worker_id == "w2"


def test_what_waits_by_its_tenants_own_limits_is_no_backlog() -> None:
    world = World(steady(cold_wait_backlog_factor=1.0, ticket_ttl_ms=10**9, prefill_pending_max_tokens=10**9))
    world.tenants("a", "b")
    world.workers("w1", "w2", slots=1)
    warm = chain(1, 600)
    world.store("w1", warm)
    assert ticket(world.submit("a", warm)).worker_id == "w1"
    other = ticket(world.submit("b", chain(2, 4)))
    for number in range(100):
        world.submit("b", chain(3 + number, 4))
    world.tenants("b", state=TenantState.SUSPENDED)
    world.settle(other)
    assert not tickets(world.submit("a", warm)), "it waits for its worker"
    assert ticket(world.tick(200)).worker_id == "w2", "for as long as the pool works on what may run"


def test_what_waits_is_a_backlog_before_any_leg_has_ended() -> None:
    world = World(steady(cold_wait_backlog_factor=1.0, prefill_pending_max_tokens=1_000))
    world.tenants("a")
    world.workers("w1", "w2")
    prefix = chain(1, 64)
    first = ticket(world.submit("a", prefix))
    assert not tickets(world.submit("a", prefix)), "its prefix is being computed at the other worker"
    backlog_ms = first.charge / world.scheduler.status(world.now_ns).cost_rate_per_s * 1_000
    assert not tickets(world.tick(backlog_ms - 2))
    assert ticket(world.tick(4)).worker_id != first.worker_id


def test_a_tenant_whose_requests_come_to_their_warm_worker_in_time_has_another_one_warmed() -> None:
    world = World(steady(ticket_ttl_ms=10**7))
    world.tenants("a")
    world.workers("w1", "w2", slots=1)
    warm = chain(1, 64)
    world.store("w1", warm)
    running = ticket(world.submit("a", warm))
    for _ in range(30):
        world.submit("a", warm)
    # Each of the first H would be its turn on w1 before its own wait is over, and w2 would idle for ever.
    workers = []
    for _ in range(20):
        granted = tickets(world.settle(running, after_ms=50))
        workers += [each.worker_id for each in granted]
        running = granted[0]
    assert "w2" in workers


def test_a_worker_that_goes_is_waited_for_no_longer() -> None:
    world = World(steady(ticket_ttl_ms=10**7))
    world.tenants("a")
    world.workers("w1", "w2", slots=1)
    warm = chain(1, 64)
    world.store("w1", warm)
    ticket(world.submit("a", warm))
    assert not tickets(world.submit("a", warm))
    assert ticket(world.step(WorkerDrained(WorkerId("w1"), True))).worker_id == "w2"


def test_excluded_workers_are_avoided_while_there_is_another(world: World) -> None:
    keys = chain(1, 8)
    world.store("w1", keys)
    assert ticket(world.submit("a", keys, excluded_workers=(WorkerId("w1"),))).worker_id != "w1"
    everywhere = tuple(WorkerId(name) for name in FOUR)
    assert ticket(world.submit("a", keys, excluded_workers=everywhere)).worker_id == "w1"


def test_an_incomplete_worker_is_still_a_candidate(world: World) -> None:
    keys = chain(1, 8)
    world.store("w1", keys)
    load = WorkerLoad(0, 0, 0.0, 0)
    world.step(WorkerHeard(WorkerId("w1"), load, map_complete=False))
    assert ticket(world.submit("a", keys)).worker_id == "w1"


def engine_says(world: World, worker: str, waiting: int, kv_used_fraction: float) -> None:
    world.step(WorkerHeard(WorkerId(worker), WorkerLoad(1, waiting, kv_used_fraction, world.now_ns)))


def test_an_engine_that_says_it_is_full_gets_nothing_until_it_says_otherwise(world: World) -> None:
    keys = chain(1, 8)
    world.store("w1", keys)
    engine_says(world, "w1", 0, 0.97)
    assert ticket(world.submit("a", keys)).worker_id != "w1"
    assert [each.closed for each in world.scheduler.status(world.now_ns).workers].count("engine_full") == 1
    engine_says(world, "w1", 0, 0.96)
    assert ticket(world.submit("a", (*keys, 99))).worker_id == "w1"


def test_what_an_engine_said_ends_with_its_epoch(world: World) -> None:
    keys = chain(1, 8)
    engine_says(world, "w1", 0, 1.0)
    world.workers("w1", epoch=2)
    world.store("w1", keys, epoch=2)
    assert ticket(world.submit("a", keys)).worker_id == "w1"


def test_an_engine_whose_own_queue_waits_for_memory_gets_nothing(world: World) -> None:
    keys = chain(1, 8)
    world.store("w1", keys)
    engine_says(world, "w1", 3, 0.5)
    assert ticket(world.submit("a", keys)).worker_id == "w1"
    engine_says(world, "w1", 3, 0.9)
    assert ticket(world.submit("a", (*keys, 99))).worker_id != "w1"


def test_what_waits_is_dispatched_when_the_last_full_engine_says_it_has_room(world: World) -> None:
    for name in FOUR:
        engine_says(world, name, 0, 1.0)
    assert not tickets(world.submit("a", chain(1, 8)))
    effects = world.step(WorkerHeard(WorkerId("w3"), WorkerLoad(1, 0, 0.2, world.now_ns)))
    assert [each.worker_id for each in tickets(effects)] == ["w3"]


def test_a_worker_that_returns_inherits_nothing(world: World) -> None:
    first = ticket(world.submit("a", chain(1, 10)))
    world.settle(first)
    world.workers(first.worker_id, epoch=2)
    assert ticket(world.submit("a", chain(1, 10))).predicted_cached_tokens == 0


def test_a_whole_cached_prompt_recomputes_its_last_block(world: World) -> None:
    keys = chain(1, 4)
    world.store("w1", keys)
    assert ticket(world.submit("a", keys, prompt=64)).predicted_cached_tokens == 48
    assert ticket(world.submit("b", keys, prompt=65)).predicted_cached_tokens == 64


def test_the_most_behind_that_fits_nowhere_has_a_worker_kept_for_it() -> None:
    world = World(steady(prefill_pending_max_tokens=10**9, window_fixed=10_000.0, headroom_divisor=1_000_000))
    world.tenants("large", "small")
    world.workers("w1", slots=64, kv_blocks=100)
    running = [t for _ in range(8) for t in tickets(world.submit("small", prompt=150, output=10))]
    world.submit("large", prompt=1_400, output=100, request_id="large")
    for _ in range(30):
        world.submit("small", prompt=150, output=10)
    assert world.scheduler.kept == ("large", "w1")
    waited = 0
    while running:
        granted = tickets(world.settle(running.pop(0)))
        if any(t.request_id == "large" for t in granted):
            break
        waited += 1
        running += granted
    assert waited <= 8


def test_headroom_is_left_to_tenants_below_their_share() -> None:
    world = World(steady(prefill_pending_max_tokens=10**9))
    world.tenants("flood", "newcomer")
    world.workers("w1", slots=16)
    ticket(world.submit("newcomer", request_id="holds one"))
    granted = [t for _ in range(40) for t in tickets(world.submit("flood"))]
    assert len(granted) == 13  # 16 − ⌊16/8⌋ − 1
    assert ticket(world.submit("newcomer")).tenant_id == "newcomer"


def test_alone_a_tenant_has_every_slot() -> None:
    world = World(steady(prefill_pending_max_tokens=10**9))
    world.tenants("a", "b")
    world.workers("w1", slots=16)
    assert len([t for _ in range(40) for t in tickets(world.submit("a"))]) == 16


def test_a_head_is_overtaken_only_so_often() -> None:
    world = World(steady(overtakes_max=3, requests_considered_max=8))
    world.tenants("a")
    world.workers("w1", slots=1)
    hot = chain(1, 30)
    world.store("w1", hot)
    running = ticket(world.submit("a", hot))
    world.submit("a", chain(2, 30), request_id="cold head")
    order = []
    for n in range(8):
        world.submit("a", hot, request_id=f"hot{n}")
    for _ in range(4):
        effects = world.settle(running)
        running = ticket(effects)
        order.append((running.request_id, decision(effects).reason))
    assert [request_id for request_id, _ in order] == ["hot0", "hot1", "hot2", "cold head"]
    assert order[-1][1] is ChoiceReason.OVERTAKE_CAP


def test_excluded_workers_are_counted_by_reason(world: World) -> None:
    world.workers("w1", "w2", slots=1)
    for _ in range(2):
        world.submit("a")
    full = [w.worker_id for w in world.scheduler.status(0).workers if w.closed == "no_slot"]
    assert dict(decision(world.submit("a")).excluded).get("no_slot", 0) == len(full)


def test_a_workers_rates_are_learned_from_what_clients_saw(world: World) -> None:
    before = decision(world.submit("a", prompt=1_000)).candidates[0].predicted_ttft_ms
    for _ in range(60):
        for granted in tickets(world.submit("b", prompt=1_000)):
            world.step(Settle(granted.ticket_id, Usage(1_000, 0, 16), ttft_ms=1_000.0), after_ms=2_000)
    rates = [w.prefill_rate_tokens_per_s for w in world.scheduler.status(0).workers]
    assert min(rates) < 2_500
    assert before < 200
    assert ended(world.effects)


def test_at_most_eight_candidates_are_named_and_the_chosen_one_is_among_them() -> None:
    world = World(steady())
    world.tenants("a")
    world.workers(*(f"w{n:02}" for n in range(20)))
    keys = chain(1, 40)
    for n in range(12):
        world.store(f"w{n:02}", keys[: 20 + n])
    effects = world.submit("a", keys)
    made = decision(effects)
    assert len(made.candidates) == 8
    assert made.candidates[0].worker_id == ticket(effects).worker_id == "w11"
    assert [c.score for c in made.candidates] == sorted((c.score for c in made.candidates), reverse=True)


def test_cold_prompts_go_where_they_evict_least(world: World) -> None:
    """One after the other, so that load never decides: the caches of equal workers fill evenly."""
    landed: Counter[WorkerId] = Counter()
    for number in range(20):
        keys = chain(number, 8)
        granted = ticket(world.submit("a", keys))
        landed[granted.worker_id] += 1
        world.store(granted.worker_id, keys)
        world.settle(granted)
    assert sorted(landed.values()) == [5, 5, 5, 5]
