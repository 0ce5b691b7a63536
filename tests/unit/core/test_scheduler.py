"""The life of a request, and every way it can end. docs/invariants.md, "Tickets and lifecycles", "Answers"."""

import heapq
from types import SimpleNamespace

import pytest
from tests.unit.core.scheduler_world import MS, World, chain, config, ended, refusal, ticket, tickets

from evenhand.core import requests
from evenhand.core.errors import InvalidInput
from evenhand.core.facts import LegOutcome, RateLimits, RefusalReason, TenantSpec, TenantState, Usage
from evenhand.core.ids import TenantId
from evenhand.core.steps import (
    BandsChanged,
    LegEnded,
    Refused,
    Renew,
    Settle,
    ShutDown,
    TenantChanged,
    Tick,
    TicketUnknown,
)


@pytest.fixture
def world() -> World:
    world = World()
    world.tenants("a", "b")
    world.workers("w1")
    return world


def test_submit_grant_settle(world: World) -> None:
    granted = ticket(world.submit("a", chain(1, 4), prompt=100, output=20))
    assert (granted.worker_id, granted.leg, granted.predicted_cached_tokens) == ("w1", 1, 0)
    assert granted.charge == 100 + 2 * 20
    assert world.v("a") == 140
    (end,) = ended(world.settle(granted, Usage(100, 0, 5)))
    assert (end.outcome, end.attained, end.correction) == (LegOutcome.SETTLED, 110, -30)
    assert not end.request_continues
    assert world.v("a") == 110
    status = world.scheduler.status(world.now_ns)
    assert (status.tickets_open, status.cost_outstanding, status.queued_total) == (0, 0.0, 0)


def test_settling_twice_is_answered_with_the_first_outcome_and_changes_nothing(world: World) -> None:
    granted = ticket(world.submit("a"))
    world.settle(granted, Usage(1, 0, 3))
    v = world.v("a")
    assert TicketUnknown(granted.ticket_id, LegOutcome.SETTLED) in world.settle(granted, Usage(1, 0, 9))
    assert world.v("a") == v


def test_a_ticket_never_granted_is_unknown(world: World) -> None:
    granted = ticket(world.submit("a"))
    other = World()
    assert TicketUnknown(granted.ticket_id, None) in other.step(Renew(granted.ticket_id))
    assert TicketUnknown(granted.ticket_id, None) in other.step(Settle(granted.ticket_id, None))


def test_an_empty_pool_is_unavailable() -> None:
    world = World(config(retry_after_default_ms=700))
    world.tenants("a")
    answer = refusal(world.submit("a"))
    assert (answer.reason, answer.retry_after_ms) == (RefusalReason.NO_WORKER, 700)


def test_shutting_down_refuses_what_waits_and_leaves_what_runs(world: World) -> None:
    world.workers("w1", slots=1)
    running = ticket(world.submit("a"))
    world.submit("a", request_id="waits")
    assert refusal(world.step(ShutDown())).reason is RefusalReason.SHUTTING_DOWN
    assert refusal(world.submit("b")).reason is RefusalReason.SHUTTING_DOWN
    assert isinstance(world.settle(running)[0], LegEnded)


def test_a_suspended_tenant_is_not_admitted_and_its_queue_stands_still(world: World) -> None:
    world.workers("w1", slots=1)
    running = ticket(world.submit("a"))
    world.submit("a", request_id="waits")
    world.tenants("a", state=TenantState.SUSPENDED)
    assert refusal(world.submit("a")).reason is RefusalReason.TENANT_SUSPENDED
    assert not tickets(world.settle(running))
    world.tenants("a", state=TenantState.ACTIVE)
    assert [t.request_id for t in tickets(world.effects)][-1] == "waits"


@pytest.mark.parametrize("weight", [0.0, -1.0, float("inf"), float("nan")])
def test_an_impossible_weight_is_refused_and_changes_nothing(world: World, weight: float) -> None:
    with pytest.raises(InvalidInput, match="Tenant a has weight"):
        world.tenants("a", weight=weight)
    assert ticket(world.submit("a")).weight == 1.0


@pytest.mark.parametrize(
    "change",
    [
        TenantChanged(TenantSpec(TenantId("a"), weight=-1.0)),
        TenantChanged(TenantSpec(TenantId("a"), band="unknown")),
        TenantChanged(TenantSpec(TenantId("a"), concurrency_max=-1)),
        TenantChanged(TenantSpec(TenantId("a"), queue_length_max=-1)),
        TenantChanged(TenantSpec(TenantId("a"), queue_bytes_max=-1)),
        TenantChanged(TenantSpec(TenantId("a"), rate_limits=RateLimits(requests_per_minute=-1))),
        BandsChanged((("default", 0.0),)),
        BandsChanged((("another", 1.0),)),
    ],
)
def test_what_time_brings_about_is_told_though_an_impossible_change_comes_with_it(
    world: World, change: TenantChanged | BandsChanged
) -> None:
    held = ticket(world.submit("a"))
    with pytest.raises(InvalidInput):
        world.step(change, after_ms=60_000)
    ended = [effect for effect in world.step(Tick()) if isinstance(effect, LegEnded)]
    assert [(each.ticket, each.outcome) for each in ended] == [(held, LegOutcome.EXPIRED)]


def test_a_changed_weight_counts_from_the_next_leg_on(world: World) -> None:
    running = ticket(world.submit("a", prompt=100, output=50))
    world.tenants("a", weight=2.0)
    assert world.v("a") == 200
    later = ticket(world.submit("a", prompt=100, output=50))
    assert (later.weight, world.v("a")) == (2.0, 300)
    world.settle(running, Usage(100, 0, 0))
    assert world.v("a") == 200


def test_deadlines_of_requests_long_granted_are_swept_out(world: World) -> None:
    for _ in range(5_000):
        world.settle(ticket(world.submit("a", deadline_ns=10**15)))
    assert len(world.scheduler._requests._deadlines) <= 1_030


def test_many_legs_of_one_request_do_not_sweep_deadlines_at_every_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(config(legs_max=10_000))
    world.tenants("a")
    world.workers("w1")
    sweeps: list[int] = []

    def counted(heap: list[requests.Deadline]) -> None:
        sweeps.append(len(heap))
        heapq.heapify(heap)

    counting = SimpleNamespace(heappush=heapq.heappush, heappop=heapq.heappop, heapify=counted)
    monkeypatch.setattr(requests, "heapq", counting)
    held = ticket(world.submit("a", deadline_ns=10**15))
    for _ in range(3_000):
        held = ticket(world.lose(held))
    assert len(sweeps) <= 3, len(sweeps)
    assert held.leg == 3_001


def test_a_request_that_lost_its_worker_still_has_its_deadline(world: World) -> None:
    world.workers("w1", slots=1)
    held = ticket(world.submit("a", request_id="late", deadline_ns=1_000 * MS))
    world.tenants("a", state=TenantState.SUSPENDED)
    assert not tickets(world.lose(held))
    assert not [e for e in world.tick(999) if isinstance(e, Refused)]
    assert refusal(world.tick(1)).reason is RefusalReason.DEADLINE
