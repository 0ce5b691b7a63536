"""Every setting that is documented has an effect: two values of it, one situation, two outcomes."""

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
from tests.unit.core.scheduler_world import World, chain, config, ended, ticket, tickets

from evenhand.core.facts import (
    CostWeights,
    OutputEstimatorKind,
    RateLimits,
    RefusalReason,
    SchedulerConfig,
    TenantSpec,
    TenantState,
    Usage,
    WorkerLoad,
)
from evenhand.core.ids import PoolId, TenantId, WorkerId
from evenhand.core.steps import Granted, Refused, Renew, Settle, TenantChanged, TicketUnknown, WorkerHeard

LONG_MS = 10**9

Seen = object


def world_of(**changes: Any) -> World:
    settings: dict[str, object] = {"worker_stale_after_ms": LONG_MS, "worker_lost_after_ms": LONG_MS}
    return World(config(**{**settings, **changes}))


def pool(*tenants: str, workers: tuple[str, ...] = ("w1",), slots: int = 1, **changes: Any) -> World:
    world = world_of(**changes)
    world.tenants(*tenants)
    world.workers(*workers, slots=slots)
    return world


def refused(world: World) -> list[RefusalReason]:
    return [effect.refusal.reason for effect in world.effects if isinstance(effect, Refused)]


def pool_id(value: str) -> Seen:
    world = World(SchedulerConfig(PoolId(value)))
    world.tenants("a")
    world.submit("a")
    return [effect.refusal.sentence for effect in world.effects if isinstance(effect, Refused)]


def cost(value: CostWeights) -> Seen:
    world = pool("a", cost=value)
    world.store("w1", chain(1, 4))
    return ticket(world.submit("a", chain(1, 8), output=100)).charge


def window(**changes: Any) -> Seen:
    world = pool("a", **changes)
    world.submit("a")
    world.submit("a")
    return world.scheduler.status(0).window


def considered(**changes: Any) -> Seen:
    """How many tenants are looked at where a served one waits behind three others."""
    world = pool("served", "a", "b", "c", window_fixed=1e9, **changes)
    running = ticket(world.submit("served", prompt=500))
    for name in ("a", "b", "c", "served"):
        world.submit(name)
    (granted,) = [effect for effect in world.settle(running) if isinstance(effect, Granted)]
    return granted.decision.tenants_considered


def users_considered_max(value: int) -> Seen:
    """How many users of a tenant are looked at where three wait."""
    world = pool("a", window_fixed=1e9, users_considered_max=value)
    running = ticket(world.submit("a", user="runs", prompt=500))
    for user in ("one", "two", "three"):
        world.submit("a", user=user)
    (granted,) = [effect for effect in world.settle(running) if isinstance(effect, Granted)]
    return granted.decision.levels[2].considered


def bands(value: tuple[tuple[str, float], ...]) -> Seen:
    return [(band.name, band.weight) for band in pool("a", bands=value).scheduler.status(0).bands]


def guarantee(**changes: Any) -> Seen:
    """How far a tenant is ahead of its guarantee once it has been served much, long after its tag."""
    world = pool(**changes)
    world.tenants("a", guaranteed_share=0.5)
    world.tick(5_000)
    ticket(world.submit("a", prompt=8_000))
    return world.scheduler.status(world.now_ns).tenants[0].guarantee_behind_ms


def order(heads: int = 2, **changes: Any) -> Seen:
    """In which order one tenant's cold head and its hot followers run."""
    world = pool("a", **changes)
    hot = chain(1, 30)
    world.store("w1", hot)
    running = ticket(world.submit("a", hot))
    world.submit("a", chain(2, 30), request_id="cold")
    for number in range(heads):
        world.submit("a", hot, request_id=f"hot{number}")
    ran = []
    for _ in range(heads):
        running = ticket(world.settle(running))
        ran.append(running.request_id)
    return ran


def prefill_pending_max_tokens(value: int) -> Seen:
    world = pool("a", slots=8, prefill_pending_max_tokens=value)
    return len([each for _ in range(6) for each in tickets(world.submit("a", prompt=1_000))])


def cold_decline_tokens(value: int) -> Seen:
    world = pool("a", "b", window_fixed=10_000.0, cold_decline_tokens=value)
    world.workers("w2", slots=2)
    warm = chain(1, 64)
    world.store("w1", warm)
    world.submit("a", warm)
    cold = [ticket(world.submit("b", chain(5 + n, 64))) for n in range(2)]
    world.submit("a", warm, request_id="warm")
    world.submit("b", chain(9, 64), request_id="cold")
    return ticket(world.settle(cold[0])).request_id


def waited_ms(**changes: Any) -> Seen:
    """How long a request waits for the worker that holds all of it, beside an idle one."""
    settings = {"prefill_pending_max_tokens": 10**9, "cold_wait_backlog_factor": 0.0, **changes}
    world = pool("a", workers=("w1", "w2"), **settings)
    warm = chain(1, 1_000)
    world.store("w1", warm)
    world.submit("a", warm)
    granted, waited = tickets(world.submit("a", warm)), 0
    while not granted:
        granted, waited = tickets(world.tick(500)), waited + 500
    return waited


def engine_full_fraction(value: float) -> Seen:
    world = pool("a", engine_full_fraction=value)
    world.step(WorkerHeard(WorkerId("w1"), WorkerLoad(1, 0, 0.97, 0)))
    return len(tickets(world.submit("a")))


def load_penalty(value: float) -> Seen:
    world = pool("a", workers=("w1", "w2"), slots=8, load_penalty=value, prefill_penalty=0.0)
    world.store("w1", chain(1, 4))
    return [ticket(world.submit("a", (*chain(1, 4), *chain(10 + n, 36)))).worker_id for n in range(3)]


def prefill_penalty(value: float) -> Seen:
    world = pool("a", workers=("w1", "w2"), slots=8, prefill_penalty=value, load_penalty=0.0)
    world.store("w1", chain(1, 4))
    return [ticket(world.submit("a", (*chain(1, 4), *chain(10 + n, 36)))).worker_id for n in range(3)]


def fill_penalty(value: float) -> Seen:
    world = pool("a", workers=("w1", "w2"), slots=8, fill_penalty=value)
    world.workers("w1", "w2", slots=8, kv_blocks=100)
    world.store("w1", chain(9, 80))
    return ticket(world.submit("a", chain(1, 4))).worker_id


def headroom_divisor(value: int) -> Seen:
    world = pool("a", "b", slots=16, headroom_divisor=value, prefill_pending_max_tokens=10**9)
    world.submit("b")
    return len([each for _ in range(20) for each in tickets(world.submit("a"))])


def ticket_ttl_ms(value: int) -> Seen:
    world = pool("a", ticket_ttl_ms=value)
    world.submit("a")
    return len(ended(world.tick(500)))


def leg_ms_max(value: int) -> Seen:
    world = pool("a", ticket_ttl_ms=400, leg_ms_max=value)
    world.step(Renew(ticket(world.submit("a")).ticket_id), after_ms=300)
    return len(ended(world.tick(300)))


def ticket_confirm_ms(value: int) -> Seen:
    world = pool("a")
    world.submit("a")
    heir = World(config(ticket_confirm_ms=value), term=2)
    heir.scheduler.restore(world.scheduler.checkpoint(), 0)
    return len(ended(heir.tick(500)))


def taken_over_wait_max_ms(value: int) -> Seen:
    """When a restored request that lost its worker is refused, while its tenant is suspended."""
    world = pool("a")
    held = ticket(world.submit("a"))
    long = {"worker_stale_after_ms": LONG_MS, "worker_lost_after_ms": LONG_MS}
    heir = World(config(taken_over_wait_max_ms=value, **long), term=2)
    heir.scheduler.restore(world.scheduler.checkpoint(), 0)
    heir.tenants("a", state=TenantState.SUSPENDED)
    heir.workers("w1", epoch=2, slots=1)
    assert [end.ticket.ticket_id for end in ended(heir.effects) if end.request_continues] == [held.ticket_id]
    heir.tick(500)
    before = refused(heir)
    heir.tick(10**6)
    assert refused(heir) == [RefusalReason.DEADLINE]
    return before


def worker_stale_after_ms(value: int) -> Seen:
    world = pool("a", worker_stale_after_ms=value)
    world.tick(500)
    return world.scheduler.status(world.now_ns).workers[0].closed


def worker_lost_after_ms(value: int) -> Seen:
    world = pool("a", worker_stale_after_ms=100, worker_lost_after_ms=value)
    world.tick(500)
    return len(world.scheduler.status(world.now_ns).workers)


def output_estimator(value: OutputEstimatorKind) -> Seen:
    world = pool("a", output_estimator=value)
    for tokens in (4, 8, 12, 16, 20, 24, 28, 3):
        running = ticket(world.submit("a", output=1_000))
        world.settle(running, Usage(running.prompt_tokens, 0, tokens))
    return ticket(world.submit("a", output=1_000)).output_tokens_estimated


def output_estimate_default_tokens(value: int) -> Seen:
    world = pool("a", output_estimate_default_tokens=value)
    return ticket(world.submit("a", output=1_000)).output_tokens_estimated


def queued_total_max(value: int) -> Seen:
    world = pool("a", queued_total_max=value)
    for _ in range(4):
        world.submit("a")
    return refused(world)


def legs_max(value: int) -> Seen:
    world = pool("a", legs_max=value)
    granted = ticket(world.submit("a"))
    world.lose(granted)
    return refused(world)


def outcomes_remembered_max(value: int) -> Seen:
    world = pool("a", outcomes_remembered_max=value)
    closed = []
    for _ in range(3):
        closed.append(ticket(world.submit("a")))
        world.settle(closed[-1])
    effects = world.step(Settle(closed[0].ticket_id, Usage(1, 0, 1)))
    return [effect.already for effect in effects if isinstance(effect, TicketUnknown)]


def matches_refresh_ms(value: int) -> Seen:
    world = pool("a", matches_refresh_ms=value)
    running = ticket(world.submit("a", chain(8, 2)))
    for number in (1, 2, 3):
        world.submit("a", chain(number, 30), request_id=f"waits{number}")
    running = ticket(world.settle(running))
    world.store("w1", chain(3, 30))
    return ticket(world.settle(running, after_ms=100)).request_id


def predicted_ttft_ms(**changes: Any) -> Seen:
    world = pool("a", **changes)
    (granted,) = [effect for effect in world.submit("a", prompt=1_000) if isinstance(effect, Granted)]
    return granted.decision.candidates[0].predicted_ttft_ms


def retry_after_default_ms(value: int) -> Seen:
    world = pool("a", retry_after_default_ms=value, queued_total_max=1)
    for _ in range(3):
        world.submit("a")
    return [effect.refusal.retry_after_ms for effect in world.effects if isinstance(effect, Refused)]


SETTINGS: dict[str, tuple[Callable[..., Seen], object, object]] = {
    "pool_id": (pool_id, "one", "other"),
    "cost": (cost, CostWeights(), CostWeights(uncached=3.0)),
    "window_delay_ms": (lambda value: window(window_delay_ms=value), 10.0, 1_000.0),
    "window_fixed": (lambda value: window(window_fixed=value), None, 5.0),
    "tenants_considered_max": (
        lambda value: considered(tenants_considered_max=value, sticky_tenants_max=0),
        1,
        2,
    ),
    "users_considered_max": (users_considered_max, 1, 2),
    "guarantee_burst_ms": (lambda value: guarantee(guarantee_burst_ms=value), 0.0, 1_000.0),
    "guaranteed_share_sum_max": (lambda value: guarantee(guaranteed_share_sum_max=value), 0.1, 0.9),
    "bands": (bands, (("default", 1.0),), (("default", 1.0), ("gold", 9.0))),
    "sticky_tenants_max": (
        lambda value: considered(tenants_considered_max=1, sticky_tenants_max=value),
        0,
        4,
    ),
    "requests_considered_max": (lambda value: order(requests_considered_max=value), 1, 8),
    "overtakes_max": (lambda value: order(overtakes_max=value), 1, 8),
    "prefill_pending_max_tokens": (prefill_pending_max_tokens, 1_500, 3_500),
    "cold_decline_tokens": (cold_decline_tokens, 512, 10**9),
    "cold_wait_factor": (lambda value: waited_ms(cold_wait_factor=value), 0.0, 1.0),
    "cold_wait_ms_max": (lambda value: waited_ms(cold_wait_ms_max=value), 500, 3_000),
    "cold_wait_backlog_factor": (lambda value: waited_ms(cold_wait_backlog_factor=value), 0.0, 0.1),
    "load_penalty": (load_penalty, 0.0, 10.0),
    "prefill_penalty": (prefill_penalty, 0.0, 10.0),
    "fill_penalty": (fill_penalty, 0.0, 1.0),
    "headroom_divisor": (headroom_divisor, 2, 8),
    "engine_full_fraction": (engine_full_fraction, 0.9, 0.0),
    "ticket_ttl_ms": (ticket_ttl_ms, 400, 600),
    "leg_ms_max": (leg_ms_max, 500, 700),
    "ticket_confirm_ms": (ticket_confirm_ms, 400, 600),
    "taken_over_wait_max_ms": (taken_over_wait_max_ms, 400, 600),
    "worker_stale_after_ms": (worker_stale_after_ms, 400, 600),
    "worker_lost_after_ms": (worker_lost_after_ms, 400, 600),
    "output_estimator": (output_estimator, OutputEstimatorKind.MEAN, OutputEstimatorKind.P75),
    "output_estimate_default_tokens": (output_estimate_default_tokens, 10, 20),
    "queued_total_max": (queued_total_max, 1, 100),
    "legs_max": (legs_max, 1, 2),
    "outcomes_remembered_max": (outcomes_remembered_max, 1, 100),
    "matches_refresh_ms": (matches_refresh_ms, 0, 10**6),
    "prefill_rate_default_tokens_per_s": (
        lambda value: predicted_ttft_ms(prefill_rate_default_tokens_per_s=value),
        1_000.0,
        2_000.0,
    ),
    "output_token_default_ms": (lambda value: predicted_ttft_ms(output_token_default_ms=value), 1.0, 50.0),
    "cost_rate_default_per_s": (lambda value: window(cost_rate_default_per_s=value), 100.0, 900.0),
    "retry_after_default_ms": (retry_after_default_ms, 100, 200),
}


@pytest.mark.parametrize("name", [field.name for field in fields(SchedulerConfig)])
def test_every_setting_of_the_scheduler_has_an_effect(name: str) -> None:
    look, one, other = SETTINGS[name]
    assert look(one) == look(one), "the situation itself is steady"
    assert look(one) != look(other)


def test_no_setting_is_tested_that_is_none() -> None:
    assert set(SETTINGS) == {field.name for field in fields(SchedulerConfig)}


@pytest.mark.parametrize("name", [field.name for field in fields(CostWeights)])
def test_every_weight_of_cost_has_an_effect(name: str) -> None:
    changed = replace(CostWeights(), **{name: 1e6 if name == "floor" else 7.0})
    assert cost(changed) != cost(CostWeights())


def tenant_seen(**changes: Any) -> Seen:
    """What becomes of three requests of a tenant, two of them queued, in bytes and number."""
    world = pool("other", workers=("w1", "w2"), slots=1)
    world.step(TenantChanged(replace(TenantSpec(TenantId("a")), **changes)))
    for _ in range(4):
        world.submit("a", size_bytes=100)
    tenant = next(each for each in world.scheduler.status(0).tenants if each.tenant_id == "a")
    return (refused(world), tenant.tickets_open, tenant.queue_length, tenant.virtual_time)


TENANT_LIMITS = [
    ("weight", 3.0),
    ("concurrency_max", 1),
    ("queue_length_max", 1),
    ("queue_bytes_max", 150),
    ("state", TenantState.SUSPENDED),
    ("state", TenantState.DRAINING),
    ("rate_limits", RateLimits(requests_per_minute=60)),
    ("rate_limits", RateLimits(requests_per_minute=60, requests_burst=2)),
    ("rate_limits", RateLimits(tokens_per_minute=60)),
    ("rate_limits", RateLimits(tokens_per_minute=60, tokens_burst=50)),
    ("user_rate_limits", RateLimits(requests_per_minute=60)),
    ("user_rate_limits", RateLimits(tokens_per_minute=60)),
]


@pytest.mark.parametrize(("name", "value"), TENANT_LIMITS)
def test_every_limit_of_a_tenant_has_an_effect(name: str, value: object) -> None:
    assert tenant_seen(**{name: value}) != tenant_seen()
    limits = {field.name for field in fields(TenantSpec)} - {"tenant_id", "cache_domain"}
    limits -= {"band", "user_weights", "guaranteed_share"}  # test_levels, test_guarantees
    assert limits == {name for name, _ in TENANT_LIMITS}
