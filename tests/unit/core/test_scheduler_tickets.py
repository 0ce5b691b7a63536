"""Tickets (docs/invariants.md): nothing leaks, nothing counts twice, saying nothing is no way out."""

from dataclasses import replace

import pytest
from tests.unit.core.scheduler_world import BLOCK, MS, World, chain, config, ended, refusal, ticket, tickets

from evenhand.core.facts import LegOutcome, RefusalReason, Usage, WorkerLoad
from evenhand.core.ids import Epoch, TenantId, TicketId, WorkerId
from evenhand.core.kv import KeysRefuted
from evenhand.core.steps import (
    Granted,
    Refused,
    Refute,
    Renew,
    Renewed,
    Settle,
    TenantForgotten,
    TicketAdopted,
    TicketUnknown,
    WakeAt,
    WorkerDrained,
    WorkerGone,
    WorkerHeard,
)


@pytest.fixture
def world() -> World:
    world = World(config(worker_stale_after_ms=10**9, worker_lost_after_ms=10**9))
    world.tenants("a", "b")
    world.workers("w1", "w2")
    return world


def is_clean(world: World) -> bool:
    status = world.scheduler.status(world.now_ns)
    return (
        status.tickets_open == status.queued_total == 0
        and status.cost_outstanding == 0.0
        and all(w.slots_used == w.kv_blocks_reserved == 0 for w in status.workers)
        and all(w.prefill_pending_tokens == 0.0 for w in status.workers)
    )


def test_the_same_open_id_gets_the_same_ticket(world: World) -> None:
    first = world.submit("a", chain(1, 3), request_id="r")
    again = world.submit("a", chain(1, 3), request_id="r")
    assert [e for e in again if isinstance(e, Granted)] == [e for e in first if isinstance(e, Granted)]
    assert world.scheduler.status(world.now_ns).tickets_open == 1


def test_an_open_id_with_another_prompt_is_refused_and_the_open_request_goes_on(world: World) -> None:
    granted = ticket(world.submit("a", chain(1, 3), request_id="r"))
    assert refusal(world.submit("a", chain(2, 3), request_id="r")).reason is RefusalReason.REQUEST_ID_REUSED
    assert refusal(world.submit("a", chain(1, 3), request_id="r", output=17)).reason is (
        RefusalReason.REQUEST_ID_REUSED
    )
    assert ended(world.settle(granted))
    assert ticket(world.submit("a", chain(2, 3), request_id="r")).ticket_id != granted.ticket_id


def test_ids_are_the_tenants_own(world: World) -> None:
    one, other = ticket(world.submit("a", request_id="r")), ticket(world.submit("b", request_id="r"))
    assert one.ticket_id != other.ticket_id


def test_submitting_a_queued_id_again_keeps_one_place(world: World) -> None:
    world.workers("w1", "w2", slots=1)
    running = tickets(world.submit("a") + world.submit("a"))
    world.submit("a", request_id="r")
    assert not tickets(world.submit("a", request_id="r"))
    assert len(tickets(world.settle(running[0]))) == 1
    assert not tickets(world.settle(running[1]))


def test_cancelled_while_queued_leaves_nothing(world: World) -> None:
    world.workers("w1", "w2", slots=1)
    running = tickets(world.submit("a") + world.submit("a"))
    v = world.v("a")
    world.submit("a", request_id="r")
    assert refusal(world.cancel("a", "r")).reason is RefusalReason.CANCELLED
    assert world.v("a") == v
    for granted in running:
        assert not tickets(world.settle(granted))
    assert is_clean(world)


def test_a_cancelled_head_does_not_block_those_behind(world: World) -> None:
    world.workers("w1", "w2", slots=1)
    running = tickets(world.submit("a") + world.submit("a"))
    world.submit("a", request_id="head")
    world.submit("a", request_id="behind")
    world.cancel("a", "head")
    assert ticket(world.settle(running[0])).request_id == "behind"


def test_cancelled_while_granted_pays_for_what_was_produced(world: World) -> None:
    world.submit("a", request_id="r", prompt=100, output=50)
    (end,) = ended(world.cancel("a", "r", Usage(100, 0, 7)))
    assert (end.outcome, end.attained) == (LegOutcome.CANCELLED, 100 + 2 * 7)
    assert is_clean(world)


def test_a_cancel_that_tells_no_usage_is_not_refunded(world: World) -> None:
    granted = ticket(world.submit("a", request_id="r", prompt=100, output=50))
    (end,) = ended(world.cancel("a", "r"))
    assert (end.attained, end.correction) == (granted.charge, 0.0)


def test_a_cancel_before_prefill_costs_the_floor(world: World) -> None:
    world.submit("a", request_id="r", prompt=100, output=50)
    (end,) = ended(world.cancel("a", "r", Usage()))
    assert end.attained == 1.0


def test_cancelling_twice_or_the_unknown_does_nothing(world: World) -> None:
    world.submit("a", request_id="r")
    world.cancel("a", "r")
    assert not ended(world.cancel("a", "r"))
    assert not ended(world.cancel("nobody", "r"))
    assert is_clean(world)


def test_usage_is_capped_to_what_was_granted_and_never_negative(world: World) -> None:
    granted = ticket(world.submit("a", prompt=100, output=50))
    (end,) = ended(world.settle(granted, Usage(1_000, 5_000, 1_000)))
    assert end.usage == Usage(100, 100, 50)
    granted = ticket(world.submit("a", prompt=100, output=50))
    (end,) = ended(world.settle(granted, Usage(-5, -7, -1)))
    assert end.usage == Usage(0, 0, 0)
    assert end.attained == 1.0


def test_output_without_a_prompt_is_taken_as_the_prompt_granted(world: World) -> None:
    granted = ticket(world.submit("a", prompt=100, output=50))
    (end,) = ended(world.settle(granted, Usage(0, 0, 10)))
    assert end.attained == 100 + 20


def test_a_lost_client_keeps_its_charge_and_loses_its_place(world: World) -> None:
    granted = ticket(world.submit("a", prompt=100, output=50))
    assert not ended(world.tick(29_999))
    (end,) = ended(world.tick(1))
    assert (end.outcome, end.attained) == (LegOutcome.EXPIRED, granted.charge)
    assert is_clean(world)
    assert TicketUnknown(granted.ticket_id, LegOutcome.EXPIRED) in world.step(Renew(granted.ticket_id))


def test_a_long_request_lives_as_long_as_its_owner_renews() -> None:
    world = World(config(worker_stale_after_ms=10**9, worker_lost_after_ms=10**9))
    world.tenants("a")
    world.workers("w1")
    granted = ticket(world.submit("a"))
    for _ in range(350):
        assert Renewed(granted.ticket_id, world.now_ns + 40_000 * MS, 30_000) in world.step(
            Renew(granted.ticket_id), after_ms=10_000
        )
    assert ended(world.settle(granted))[0].outcome is LegOutcome.SETTLED


def test_no_leg_lives_longer_than_it_may_however_often_it_is_renewed() -> None:
    world = World(config(worker_stale_after_ms=10**9, worker_lost_after_ms=10**9, leg_ms_max=60_000))
    world.tenants("a")
    world.workers("w1")
    granted = ticket(world.submit("a", prompt=100, output=50))
    told = [world.step(Renew(granted.ticket_id), after_ms=20_000)[0] for _ in range(2)]
    assert told == [
        Renewed(granted.ticket_id, 50_000 * MS, 30_000),
        Renewed(granted.ticket_id, 60_000 * MS, 20_000),
    ]
    assert world.step(Renew(granted.ticket_id, Usage(100, 0, 50)), after_ms=19_999)[0] == Renewed(
        granted.ticket_id, 60_000 * MS, 1
    )
    (end,) = ended(world.tick(1))
    assert (end.outcome, end.attained) == (LegOutcome.EXPIRED, 200.0)
    assert is_clean(world)


def test_a_ticket_taken_over_may_live_as_long_again(world: World) -> None:
    world.now_ns = 50_000 * MS
    granted = ticket(world.submit("a"))
    heir = World(config(worker_stale_after_ms=10**9, worker_lost_after_ms=10**9, leg_ms_max=60_000), term=2)
    heir.scheduler.restore(world.scheduler.checkpoint(world.now_ns), 0)
    for after_ms, ttl_ms in ((0, 30_000), (29_000, 30_000), (29_000, 2_000)):
        (renewed,) = [e for e in heir.step(Renew(granted.ticket_id), after_ms) if isinstance(e, Renewed)]
        assert renewed == Renewed(granted.ticket_id, heir.now_ns + ttl_ms * MS, ttl_ms)


@pytest.mark.parametrize("is_renewed", [False, True])
def test_a_leg_that_may_live_less_than_its_ticket_ends_when_it_must(is_renewed: bool) -> None:
    world = World(config(worker_stale_after_ms=10**9, worker_lost_after_ms=10**9, leg_ms_max=10_000))
    world.tenants("a")
    world.workers("w1")
    granted = ticket(world.submit("a"))
    if is_renewed:
        assert world.step(Renew(granted.ticket_id))[0] == Renewed(granted.ticket_id, 10_000 * MS, 10_000)
    world.tick(9_999)
    (end,) = ended(world.tick(1))
    assert end.outcome is LegOutcome.EXPIRED


@pytest.mark.parametrize("is_silent", [False, True])
def test_a_leg_lost_past_its_deadline_has_no_other(is_silent: bool) -> None:
    """Whoever waits is refused at its deadline; so is whoever would have to wait again past it."""
    world = World()
    world.tenants("a")
    world.workers("w1", "w2")
    lost = ticket(world.submit("a", deadline_ns=14_500 * MS))
    heard = {"w1": "w2", "w2": "w1"}[lost.worker_id]
    for _ in range(15):
        world.step(WorkerHeard(WorkerId(heard), WorkerLoad(0, 0, 0.0, 0)), after_ms=1_000 if is_silent else 990)
    if not is_silent:
        world.step(WorkerGone(lost.worker_id, "gone"))
    (end,) = ended(world.effects)
    assert (end.outcome, end.request_continues) == (LegOutcome.WORKER_LOST, False)
    assert refusal(world.effects).reason is RefusalReason.DEADLINE
    assert is_clean(world)


def test_no_wake_is_asked_for_in_the_past_where_a_leg_is_lost_past_its_deadline() -> None:
    """Nobody else can take it up: it would wait, past its deadline."""
    world = World()
    world.tenants("a")
    world.workers("w1", "w2", slots=1)
    held = {each.worker_id: each for each in (ticket(world.submit("a", deadline_ns=100 * MS)) for _ in range(2))}
    world.effects.clear()
    world.step(WorkerGone(WorkerId("w1"), "gone"), after_ms=200)
    assert [end.ticket for end in ended(world.effects)] == [held[WorkerId("w1")]]
    assert all(effect.at_ns > world.now_ns for effect in world.effects if isinstance(effect, WakeAt))


def test_usage_on_the_way_is_booked_upwards_only(world: World) -> None:
    granted = ticket(world.submit("a", prompt=100, output=50, output_tokens_expected=5))
    assert world.v("a") == 110
    world.step(Renew(granted.ticket_id, Usage(100, 0, 1)))
    assert world.v("a") == 110
    world.step(Renew(granted.ticket_id, Usage(100, 0, 20)))
    assert world.v("a") == 140
    (end,) = ended(world.settle(granted, Usage(100, 0, 30)))
    assert (end.attained, end.correction) == (160, 50)
    assert world.v("a") == 160


def test_an_expired_ticket_pays_what_it_was_known_to_use(world: World) -> None:
    granted = ticket(world.submit("a", prompt=100, output=50, output_tokens_expected=5))
    world.step(Renew(granted.ticket_id, Usage(100, 0, 20)))
    (end,) = ended(world.tick(31_000))
    assert end.attained == 140


def test_a_worker_lost_gives_a_leg_elsewhere_at_once(world: World) -> None:
    world.workers("w3", slots=1)
    first = ticket(world.submit("a", request_id="r", prompt=100, output=50))
    effects = world.lose(first)
    (end,) = ended(effects)
    assert (end.outcome, end.attained, end.request_continues) == (LegOutcome.WORKER_LOST, 0.0, True)
    second = ticket(effects)
    assert (second.leg, second.request_id) == (2, "r")
    assert second.worker_id != first.worker_id
    assert world.v("a") == 200  # one charge
    world.settle(second)
    assert is_clean(world)


def test_the_worker_that_was_lost_is_taken_again_if_there_is_no_other() -> None:
    world = World()
    world.tenants("a")
    world.workers("w1")
    first = ticket(world.submit("a"))
    assert ticket(world.lose(first)).worker_id == "w1"


def test_a_request_that_lost_its_worker_keeps_its_age(world: World) -> None:
    world.workers("w1", "w2", slots=1)
    one, two = tickets(world.submit("a", request_id="one") + world.submit("a", request_id="two"))
    world.submit("a", request_id="three")
    assert [t.request_id for t in tickets(world.step(WorkerGone(one.worker_id, "killed")))] == []
    assert [t.request_id for t in tickets(world.settle(two))] == ["one"]


def test_lost_often_enough_it_is_refused() -> None:
    world = World(config(legs_max=3))
    world.tenants("a")
    world.workers("w1")
    granted = ticket(world.submit("a", request_id="r"))
    granted = ticket(world.lose(granted))
    granted = ticket(world.lose(granted))
    effects = world.lose(granted)
    assert not ended(effects)[0].request_continues
    assert refusal(effects).reason is RefusalReason.NO_WORKER
    assert is_clean(world)


def test_a_late_settle_of_a_lost_leg_ends_the_request_that_waits_again(world: World) -> None:
    world.workers("w1", "w2", slots=1)
    one, two = tickets(world.submit("a", request_id="one") + world.submit("a", request_id="two"))
    world.step(WorkerGone(one.worker_id, "no heartbeat"))
    v = world.v("a")
    effects = world.settle(one, Usage(1, 0, 5))
    assert refusal(effects).reason is RefusalReason.CANCELLED
    assert TicketUnknown(one.ticket_id, LegOutcome.WORKER_LOST) in effects
    assert world.v("a") == v
    assert not [e for e in world.settle(one, Usage(1, 0, 5)) if isinstance(e, Refused)]
    world.settle(two)
    assert is_clean(world)


def test_a_late_settle_leaves_the_next_leg_alone(world: World) -> None:
    first = ticket(world.submit("a", request_id="r"))
    second = ticket(world.step(WorkerGone(first.worker_id, "no heartbeat")))
    assert not ended(world.settle(first, Usage(1, 0, 5)))
    assert ended(world.settle(second))
    assert is_clean(world)


def test_a_silent_worker_is_stale_then_lost() -> None:
    world = World()
    world.tenants("a")
    world.workers("w1", "w2")
    granted = ticket(world.submit("a"))
    world.workers("w2") if granted.worker_id == "w1" else world.workers("w1")
    other = "w2" if granted.worker_id == "w1" else "w1"
    world.now_ns += 4_000 * 10**6
    world.workers(other)
    assert not ended(world.tick(1_500))
    closed = {w.worker_id: w.closed for w in world.scheduler.status(world.now_ns).workers}
    assert closed == {granted.worker_id: "stale", other: None}
    world.tick(4_000)
    world.workers(other)
    effects = world.tick(6_000)
    assert ended(effects)[0].outcome is LegOutcome.WORKER_LOST
    assert ended(effects)[0].request_continues


def test_a_stale_worker_that_is_heard_again_takes_requests_again() -> None:
    world = World()
    world.tenants("a")
    world.workers("w1")
    world.tick(6_000)
    assert not tickets(world.submit("a"))
    assert len(tickets(world.workers("w1"))) == 1


def test_a_later_epoch_ends_the_old_legs(world: World) -> None:
    granted = ticket(world.submit("a", request_id="r"))
    effects = world.workers(granted.worker_id, epoch=2)
    assert ended(effects)[0].outcome is LegOutcome.WORKER_LOST
    assert ticket(effects).leg == 2
    assert not ended(world.workers(granted.worker_id, epoch=1))


def test_a_draining_worker_takes_nothing_and_its_tickets_go_on(world: World) -> None:
    granted = ticket(world.submit("a"))
    world.step(WorkerDrained(granted.worker_id, True))
    for _ in range(4):
        assert ticket(world.submit("a")).worker_id != granted.worker_id
    assert ended(world.settle(granted))[0].outcome is LegOutcome.SETTLED


def test_a_heartbeat_or_a_changed_tenant_touches_no_counter(world: World) -> None:
    world.submit("a")
    before = world.scheduler.status(world.now_ns)
    world.workers("w1", "w2")
    world.tenants("a", "b")
    assert world.scheduler.status(world.now_ns) == before


def test_a_forgotten_tenant_is_refused_and_gone_when_its_last_ticket_ends(world: World) -> None:
    world.workers("w1", "w2", slots=1)
    running = tickets(world.submit("a") + world.submit("a"))
    world.submit("a")
    assert refusal(world.step(TenantForgotten(running[0].tenant_id))).reason is RefusalReason.UNKNOWN_TENANT
    assert refusal(world.submit("a")).reason is RefusalReason.UNKNOWN_TENANT
    for granted in running:
        assert len(ended(world.settle(granted))) == 1
    assert [t.tenant_id for t in world.scheduler.status(world.now_ns).tenants] == ["b"]


def test_what_the_map_promised_and_the_engine_did_not_find_is_refuted(world: World) -> None:
    keys = chain(1, 6)
    world.store("w1", keys)
    granted = ticket(world.submit("a", keys))
    assert (granted.worker_id, granted.predicted_cached_tokens) == ("w1", 6 * BLOCK)
    effects = world.settle(granted, Usage(granted.prompt_tokens, 2 * BLOCK, 4))
    refuted = [e.refuted for e in effects if isinstance(e, Refute)]
    assert refuted == [KeysRefuted(WorkerId("w1"), Epoch(1), world.position("w1"), keys[2:6])]


def test_what_was_only_presumed_is_not_refuted(world: World) -> None:
    keys = chain(1, 6)
    first = ticket(world.submit("a", keys))
    second = ticket(world.submit("a", keys))
    assert second.worker_id == first.worker_id
    assert second.predicted_cached_tokens > 0
    effects = world.settle(second, Usage(second.prompt_tokens, 0, 4))
    assert not [e for e in effects if isinstance(e, Refute)]


def test_a_leg_without_output_refutes_nothing(world: World) -> None:
    keys = chain(1, 6)
    world.store("w1", keys)
    granted = ticket(world.submit("a", keys))
    assert not [e for e in world.step(Settle(granted.ticket_id, Usage())) if isinstance(e, Refute)]


def test_a_successor_adopts_a_valid_ticket_once(world: World) -> None:
    granted = ticket(world.submit("a", prompt=100, output=50))
    successor = World(term=2)
    successor.tenants("a")
    successor.workers("w1", "w2")
    assert next(type(e) for e in successor.step(TicketAdopted(granted))) is Renewed
    assert successor.v("a") == granted.charge
    successor.step(TicketAdopted(granted))
    assert successor.v("a") == granted.charge
    (end,) = ended(successor.settle(granted, Usage(100, 0, 10)))
    assert end.attained == 120
    assert is_clean(successor)
    assert TicketUnknown(granted.ticket_id, LegOutcome.SETTLED) in successor.step(TicketAdopted(granted))


def test_a_ticket_of_this_very_term_is_never_adopted(world: World) -> None:
    granted = ticket(world.submit("a"))
    world.settle(granted)
    other = World()
    other.tenants("a")
    assert TicketUnknown(granted.ticket_id, None) in other.step(TicketAdopted(granted))
    assert other.v("a") == 0


def test_an_adopted_ticket_of_a_worker_not_yet_heard_of_waits_for_it(world: World) -> None:
    granted = ticket(world.submit("a", request_id="r", prompt=100, output=50))
    successor = World(term=2)
    successor.tenants("a")
    successor.step(TicketAdopted(granted))
    successor.workers("w1", "w2")
    status = {w.worker_id: w.slots_used for w in successor.scheduler.status(0).workers}
    assert status[granted.worker_id] == 1
    resubmitted = successor.submit("a", request_id="r", prompt=100, output=50)
    assert ticket(resubmitted).ticket_id == granted.ticket_id


def test_an_adopted_ticket_of_a_dead_epoch_gets_another_leg(world: World) -> None:
    granted = ticket(world.submit("a", prompt=100, output=50))
    successor = World(term=2)
    successor.tenants("a")
    successor.step(TicketAdopted(granted))
    effects = successor.workers("w1", "w2", epoch=2)
    assert ended(effects)[0].outcome is LegOutcome.WORKER_LOST
    second = ticket(effects)
    assert (second.leg, second.ticket_id) == (2, TicketId("2.1.2"))


def test_a_leg_that_nobody_asked_for_makes_way_for_the_clients_own(world: World) -> None:
    first = ticket(world.submit("a", request_id="r", prompt=100, output=50))
    checkpoint = world.scheduler.checkpoint()
    own = ticket(world.workers(first.worker_id, epoch=2))
    assert own.leg == 2

    successor = World(term=2)
    successor.scheduler.restore(checkpoint, 0)
    successor.workers(own.worker_id)
    stray = ticket(successor.workers(first.worker_id, epoch=2))
    assert (stray.leg, stray.term) == (2, 2)
    effects = successor.step(TicketAdopted(own))
    (made_way,) = ended(effects)
    assert (made_way.ticket.ticket_id, made_way.attained) == (stray.ticket_id, 0)
    assert successor.v("a") == own.charge
    assert [type(effect) for effect in effects if isinstance(effect, Renewed)] == [Renewed]
    (end,) = ended(successor.settle(own, Usage(100, 0, 10)))
    assert end.attained == successor.v("a") == 120
    assert is_clean(successor)


def test_a_ticket_of_an_earlier_leg_ends_no_later_one(world: World) -> None:
    first = ticket(world.submit("a", request_id="r", prompt=100, output=50))
    checkpoint = world.scheduler.checkpoint()
    successor = World(term=2)
    successor.scheduler.restore(checkpoint, 0)
    later = ticket(successor.workers("w1", "w2", epoch=2))
    assert later.leg == 2
    effects = successor.step(TicketAdopted(replace(first, ticket_id=TicketId("1.7.1"))))
    assert TicketUnknown(TicketId("1.7.1"), None) in effects
    assert not ended(effects)


def test_memory_is_where_it_was_after_churn_of_tenants_workers_and_tickets() -> None:
    world = World(config(outcomes_remembered_max=100, worker_stale_after_ms=10**9, worker_lost_after_ms=10**9))
    world.tenants("stays")
    world.workers("stays", slots=2)
    for n in range(150):
        name = f"passes{n}"
        world.tenants(name, concurrency_max=1)
        world.workers(name, slots=1)
        granted = [t for _ in range(3) for t in tickets(world.submit(name, chain(n, 3), deadline_ns=10**18))]
        world.step(WorkerGone(WorkerId(name), "done"))
        for each in tickets(world.effects)[-len(granted) :]:
            world.settle(each)
        world.step(TenantForgotten(TenantId(name)))
        for each in tickets(world.effects)[-3:]:
            world.settle(each)
    assert is_clean(world)
    legs = world.scheduler._legs
    assert list(legs.outstanding.tenants) == ["stays"]
    assert list(legs.rooms.workers) == ["stays"]
    assert legs.outstanding.active_count == legs.fair.bands["default"].active_units == 0
    assert not legs.detached
    assert not len(legs.estimator)
    assert not legs.limits.open_count
    assert not legs.limits._limits
    assert len(legs.book._closed) <= 100
    assert len(legs.book._expiry) <= 64
    assert len(legs.rooms._reopen) <= 1
    assert world.presence.ticket_count <= 600  # those that ended keep their keys until the grace is over
    world.tick(6_000)
    assert world.presence.ticket_count == 0


def test_an_engine_that_does_not_tell_what_was_cached_refutes_nothing_and_pays_as_predicted(world: World) -> None:
    keys = chain(1, 6)
    world.store("w1", keys)
    granted = ticket(world.submit("a", keys))
    assert granted.predicted_cached_tokens == 6 * BLOCK
    effects = world.step(Settle(granted.ticket_id, Usage(granted.prompt_tokens, 0, 4, cached_known=False)))
    assert not [e for e in effects if isinstance(e, Refute)]
    assert ended(effects)[0].attained == pytest.approx(1 + 0.1 * 6 * BLOCK + 2 * 4)


@pytest.mark.parametrize("end", ["cancelled", "cancelled silently", "expired", "lost", "runs"])
def test_a_word_far_too_low_is_not_believed_of_who_never_settles(end: str) -> None:
    world = World(config(worker_stale_after_ms=10**9, worker_lost_after_ms=10**9))
    world.tenants("a")
    world.workers("w1", slots=64, kv_blocks=100_000)
    estimated: list[int] = []
    for number in range(20):
        leg = ticket(world.submit("a", prompt=10, output=1_000, output_tokens_expected=1, request_id=f"r{number}"))
        estimated.append(leg.output_tokens_estimated)
        told = Usage(10, 0, 1_000)
        if end != "cancelled":
            world.step(Renew(leg.ticket_id, told))
        if end.startswith("cancelled"):
            world.cancel("a", leg.request_id, told if end == "cancelled" else None)
        elif end == "expired":
            world.tick(60_000)
        elif end == "lost":
            world.lose(leg)
            world.cancel("a", leg.request_id, Usage())
        world.effects.clear()
    assert estimated[0] == 1
    assert estimated[-1] >= 400
