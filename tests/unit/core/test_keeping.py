"""What it costs to have a worker kept, or to hold room, and then not to use it."""

import heapq

import pytest
from tests.unit.core.scheduler_world import MS, World, config, ended, ticket, tickets

from evenhand.core.facts import LegOutcome, Ticket, Usage, WorkerLoad
from evenhand.core.ids import WorkerId
from evenhand.core.legs import Legs
from evenhand.core.steps import Granted, IdleCharged, Refused, Renew, Settle, Tick, WorkerGone, WorkerHeard

LONG_MS = 10**9
LEG_NS = 100 * MS
WHOLE = 12_700
"""Tokens of a prompt that takes all of a worker's 800 blocks."""


def pool(workers: tuple[str, ...] = ("w1",), **changes: object) -> World:
    settings: dict[str, object] = {
        "worker_stale_after_ms": LONG_MS,
        "worker_lost_after_ms": LONG_MS,
        "prefill_pending_max_tokens": 10**9,
        **changes,
    }
    world = World(config(**settings))
    world.workers(*workers, slots=8, kv_blocks=800)
    return world


def charges(world: World) -> list[IdleCharged]:
    return [effect for effect in world.effects if isinstance(effect, IdleCharged)]


def kept_for_large(world: World) -> list[Ticket]:
    """One worker full of short legs, and kept for the large request that is most behind."""
    world.tenants("large", "small", "other")
    running = [t for _ in range(8) for t in tickets(world.submit("small", prompt=1_500, output=10))]
    world.submit("large", prompt=WHOLE, output=10, request_id="large")
    for _ in range(4):
        world.submit("other", prompt=1_500, output=10)
    world.settle(running.pop(0), after_ms=10)
    assert world.scheduler.kept == ("large", "w1")
    return running


def test_what_has_drained_is_its_own_though_it_is_beyond_the_first_k() -> None:
    world = pool(tenants_considered_max=1)
    running = kept_for_large(world)
    world.tenants("first")
    world.submit("first", prompt=1_500, output=10, request_id="first")
    assert world.scheduler.kept == ("large", "w1")
    assert world.v("first") == world.v("large")
    world.effects.clear()
    for leg in running:
        world.settle(leg, after_ms=10)
    assert [leg.request_id for leg in tickets(world.effects)] == ["large"]


def test_who_is_served_hands_the_kept_worker_over() -> None:
    """A second request of it that fits nowhere keeps nothing while others are more behind."""
    world = pool()
    world.tenants("large", "small", "other")
    running = [t for _ in range(8) for t in tickets(world.submit("small", prompt=1_500, output=10))]
    world.submit("large", prompt=11_000, output=10, request_id="one")
    world.submit("large", prompt=11_000, output=10, request_id="two")
    world.settle(running.pop(0), after_ms=10)
    world.submit("other", prompt=1_500, output=10, request_id="other")
    assert world.scheduler.kept == ("large", "w1")
    world.effects.clear()
    for leg in running:
        world.settle(leg, after_ms=10)
    assert [leg.request_id for leg in tickets(world.effects)] == ["one", "other"]


def an_eighth_of(world: World, worker: str, tenant: str, output: int = 10) -> Ticket:
    excluded = WorkerId("w2" if worker == "w1" else "w1")
    return ticket(world.submit(tenant, prompt=1_500, output=output, excluded_workers=(excluded,)))


def two_full_workers() -> tuple[World, list[Ticket], list[Ticket]]:
    """Eight legs on each, those of w1 predicted to end first; w1 is kept, and others wait for any room."""
    world = pool(("w1", "w2"), ticket_ttl_ms=10**8)
    world.tenants("holds", "small", "large", "other")
    at_w1 = [an_eighth_of(world, "w1", "holds") for _ in range(8)]
    at_w2 = [an_eighth_of(world, "w2", "small", output=60) for _ in range(8)]
    world.submit("large", prompt=WHOLE, output=10, request_id="large")
    for _ in range(40):
        world.submit("other", prompt=1_500, output=10)
    world.settle(at_w1.pop())
    assert world.scheduler.kept == ("large", "w1")
    world.effects.clear()
    return world, at_w1, at_w2


def heard(world: World, worker: str, kv_used: float) -> None:
    world.step(WorkerHeard(WorkerId(worker), WorkerLoad(8, 0, kv_used, world.now_ns)))


def test_a_worker_whose_engine_gets_full_is_left_for_one_whose_engine_is_not() -> None:
    """But kept on where all are full: what has drained so far would be lost for nothing."""
    world, at_w1, at_w2 = two_full_workers()
    heard(world, "w1", 1.0)
    world.settle(at_w2.pop())
    assert world.scheduler.kept == ("large", "w2")
    heard(world, "w2", 1.0)
    world.settle(at_w2.pop())
    assert world.scheduler.kept == ("large", "w2")
    heard(world, "w1", 0.5)
    world.settle(at_w1.pop())
    assert world.scheduler.kept == ("large", "w1")


def test_a_worker_whose_engine_is_full_is_not_chosen() -> None:
    world = pool(("w1", "w2"))
    world.tenants("holds", "large", "other")
    running = [
        an_eighth_of(world, name, "holds", output) for name, output in (("w1", 10), ("w2", 60)) for _ in range(8)
    ]
    heard(world, "w1", 1.0)
    world.submit("large", prompt=WHOLE, output=10)
    world.submit("other", prompt=1_500, output=10)
    world.settle(running.pop())
    assert world.scheduler.kept == ("large", "w2")


def test_legs_that_are_overdue_are_predicted_by_their_age() -> None:
    world = pool(("w1", "w2"), ticket_ttl_ms=10**8)
    world.tenants("holds", "small", "large", "other")
    for _ in range(8):
        an_eighth_of(world, "w1", "holds")
    world.tick(60_000)
    running = [an_eighth_of(world, "w2", "small") for _ in range(8)]
    world.submit("large", prompt=WHOLE, output=10)
    world.submit("other", prompt=1_500, output=10)
    world.settle(running.pop())
    assert world.scheduler.kept == ("large", "w2")


def test_what_is_late_is_left_for_what_is_free_in_less_than_half_its_time() -> None:
    world, _, at_w2 = two_full_workers()
    world.tick(20_000)
    world.settle(at_w2.pop())
    assert world.scheduler.kept == ("large", "w1"), "both are as late, and w1 has drained in part"
    for leg in at_w2:
        world.settle(leg)
    young = tickets(world.effects)
    assert {leg.worker_id for leg in young} == {"w2"}
    world.settle(young[0], after_ms=20_000)
    assert world.scheduler.kept == ("large", "w1"), "half as old, no less"
    for leg in young[1:]:
        world.settle(leg)
    world.settle(tickets(world.effects)[-1], after_ms=20_000)
    assert world.scheduler.kept == ("large", "w2"), "a third as old"


def test_a_worker_that_is_gone_is_no_drained_one() -> None:
    """What it ran comes back and fits elsewhere: no other worker is kept for any of that."""
    world = pool(("w1", "w2"), window_fixed=1e6)
    world.tenants("large", "small", "holds")
    only_w1, only_w2 = (WorkerId("w2"),), (WorkerId("w1"),)
    assert tickets(world.submit("holds", prompt=10_000, output=2_000, excluded_workers=only_w2))
    for name in ("small", "large"):
        assert tickets(world.submit(name, prompt=100, request_id=name, excluded_workers=only_w1))
    paid = ticket(
        world.submit("large", prompt=100, output=900, output_tokens_expected=10, excluded_workers=only_w2)
    )
    world.submit("large", prompt=WHOLE, output=10)
    world.submit("small", prompt=WHOLE, output=10)
    assert world.scheduler.kept == ("large", "w1")
    world.step(Renew(paid.ticket_id, Usage(100, 0, 900)))
    world.effects.clear()
    got = tickets(world.step(WorkerGone(WorkerId("w1"), "It is gone.")))
    assert got[0].request_id == "small", "it is the most behind, and both fit"


def test_a_request_that_is_withdrawn_pays_what_its_keeping_idled() -> None:
    world = pool(cost_rate_default_per_s=8_000.0)
    running = kept_for_large(world)
    world.settle(running.pop(0), after_ms=100)
    rate = world.scheduler.status(world.now_ns).cost_rate_per_s
    before = world.v("large")
    world.step(Tick(), after_ms=100)
    effects = world.cancel("large", "large")
    (charge,) = charges(world)
    assert [type(e) for e in effects[:2]] == [Refused, IdleCharged]
    assert (charge.tenant_id, charge.request_id) == ("large", "large")
    # An eighth of the worker idled for the first tenth of a second, a quarter for the second.
    assert charge.cost == pytest.approx(rate * 0.1 * (1 / 8 + 2 / 8), rel=0.2)
    assert world.v("large") == pytest.approx(before + charge.cost)
    status = next(t for t in world.scheduler.status(0).tenants if t.tenant_id == "large")
    assert (status.cost_idled, status.cost_got) == (charge.cost, 0.0)


@pytest.mark.parametrize("others_have_room", [True, False])
def test_a_kept_worker_that_nobody_could_use_idles_nothing(others_have_room: bool) -> None:
    """Its engine is full for an hour: it would have got nothing, kept or not, and with no room nobody looks."""
    world = pool(ticket_ttl_ms=10**8)
    running = kept_for_large(world)
    world.step(WorkerHeard(WorkerId("w1"), WorkerLoad(8, 0, 1.0, world.now_ns)))
    if others_have_room:
        world.workers("w2", slots=8, kv_blocks=100)
    world.settle(running.pop(0), after_ms=10)
    world.tick(1_800_000)
    world.tick(1_800_000)
    assert world.scheduler.kept == ("large", "w1")
    world.cancel("large", "large")
    assert sum(charge.cost for charge in charges(world)) < 100.0


def test_who_is_served_in_the_end_pays_for_no_keeping() -> None:
    world = pool()
    running = kept_for_large(world)
    held = None
    while held is None:
        effects = world.settle(running.pop(0), after_ms=50)
        held = next((t for t in tickets(effects) if t.request_id == "large"), None)
    (end,) = ended(world.settle(held, after_ms=500))
    assert end.attained == held.charge
    assert not charges(world)


@pytest.mark.parametrize("outcome", [LegOutcome.SETTLED, LegOutcome.CANCELLED])
def test_a_leg_that_is_broken_off_pays_for_the_keeping_in_the_part_left_undone(outcome: LegOutcome) -> None:
    world = pool()
    running = kept_for_large(world)
    held = None
    while held is None:
        effects = world.settle(running.pop(0), after_ms=50)
        held = next((t for t in tickets(effects) if t.request_id == "large"), None)
    (_, charge, *_) = world.step(Settle(held.ticket_id, Usage(1, 0, 0), outcome))
    assert isinstance(charge, IdleCharged)
    assert charge.cost > 0.0


def test_nobody_pays_for_what_nobody_else_wanted() -> None:
    world = pool()
    world.tenants("only", "other")
    for _ in range(8):
        world.submit("only", prompt=1_500, output=10)
    world.submit("only", prompt=WHOLE, output=10, request_id="large")
    world.tick(500)
    world.cancel("only", "large")
    assert not charges(world)


def test_deadlines_that_pass_while_a_worker_is_kept_pay_too() -> None:
    world = pool()
    world.tenants("large", "small", "other")
    running = [t for _ in range(8) for t in tickets(world.submit("small", prompt=1_500, output=10))]
    world.submit("large", prompt=WHOLE, output=10, request_id="large", deadline_ns=300 * MS)
    world.submit("other", prompt=1_500, output=10)
    world.settle(running.pop(0), after_ms=10)
    world.tick(400)
    (charge,) = charges(world)
    assert charge.request_id == "large"


def test_room_is_not_had_for_the_floor_by_cancelling() -> None:
    world = pool(cost_rate_default_per_s=8_000.0)
    world.tenants("holds", "waits")
    held = ticket(world.submit("holds", prompt=6_000, output=10, request_id="held"))
    for _ in range(12):
        world.submit("waits", prompt=1_500, output=10)
    world.tick(200)
    world.cancel("holds", "held", Usage())
    rate = world.scheduler.status(0).cost_rate_per_s
    (charge,) = charges(world)
    (end,) = [e for e in ended(world.effects) if e.ticket == held]
    assert end.attained == 1.0
    part = 376 / 800  # 6,010 tokens in blocks of 16
    assert charge.cost + end.attained == pytest.approx(rate * 0.2 * part, rel=0.1)
    assert charge.cost + end.attained <= held.charge


def test_a_cancel_never_costs_more_than_the_charge() -> None:
    world = pool(cost_rate_default_per_s=1e6)
    world.tenants("holds", "waits")
    held = ticket(world.submit("holds", prompt=600, output=10, request_id="held"))
    for _ in range(12):
        world.submit("waits", prompt=1_500, output=10)
    world.tick(20_000)
    world.cancel("holds", "held", Usage())
    assert sum(c.cost for c in charges(world)) + 1.0 == pytest.approx(held.charge)


def test_what_was_produced_before_the_cancel_counts() -> None:
    world = pool()
    world.tenants("holds", "waits")
    held = ticket(world.submit("holds", prompt=600, output=400, request_id="held"))
    for _ in range(12):
        world.submit("waits", prompt=1_500, output=10)
    world.tick(50)
    world.cancel("holds", "held", Usage(600, 0, held.output_tokens_estimated))
    assert not charges(world)


def goodput(griefer: bool, duration_ms: int = 8_000) -> int:
    """Legs of 24 honest tenants in a while, beside one that has a worker drained and withdraws in time."""
    world = pool(("w1", "w2"))
    honest = [f"h{n}" for n in range(24)]
    world.tenants(*honest, "grief")
    done, asked = 0, 0
    ends: list[tuple[int, int, Ticket]] = []
    granted_count = 0

    def take(effects: tuple[object, ...]) -> None:
        nonlocal asked, granted_count
        for effect in effects:
            if not isinstance(effect, Granted):
                continue
            granted = effect.ticket
            if granted.tenant_id == "grief":
                take(world.cancel("grief", granted.request_id, Usage()))
                asked += 1
                take(world.submit("grief", prompt=WHOLE, output=10, request_id=f"grief{asked}"))
                continue
            granted_count += 1
            leg_ns = LEG_NS // 2 + LEG_NS * (granted_count * 37 % 100) // 100
            heapq.heappush(ends, (world.now_ns + leg_ns, granted_count, granted))

    for name in honest:
        for _ in range(2):
            take(world.submit(name, prompt=1_500, output=10))
    if griefer:
        take(world.submit("grief", prompt=WHOLE, output=10, request_id="grief0"))
    while world.now_ns < duration_ms * MS:
        at_ns, _, over = heapq.heappop(ends)
        world.now_ns = at_ns
        done += 1
        take(world.submit(over.tenant_id, prompt=1_500, output=10))
        take(world.settle(over))
        kept = world.scheduler.kept
        running = sum(w.slots_used for w in world.scheduler.status(0).workers if kept and w.worker_id == kept[1])
        if kept is not None and kept[0] == "grief" and running == 1:
            take(world.cancel("grief", f"grief{asked}"))
            asked += 1
            take(world.submit("grief", prompt=WHOLE, output=10, request_id=f"grief{asked}"))
    return done


def test_griefing_through_the_kept_worker_costs_the_griefer_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    undisturbed, mended = goodput(griefer=False), goodput(griefer=True)
    monkeypatch.setattr(Legs, "charge_idled", lambda self, queued, cost, now_ns, effects: None)
    unmended = goodput(griefer=True)
    print(undisturbed, mended, unmended)
    # One of 25 equal tenants may cost the others its 25th, and what a draining worker adds.
    assert mended >= undisturbed * 24 / 25 * 0.97
    assert unmended < undisturbed * 0.85
