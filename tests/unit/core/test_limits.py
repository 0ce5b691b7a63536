"""Limits per minute: docs/invariants.md, "Limits", by kind, where the core is concerned."""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import pytest
from tests.unit.core.scheduler_world import World, config, refusal, ticket, tickets

from evenhand.core import rate_limit
from evenhand.core.errors import InvalidInput
from evenhand.core.facts import LegOutcome, RateLimits, Refusal, RefusalReason, Request, TenantSpec, Ticket, Usage
from evenhand.core.ids import RequestId, TenantId, WorkerId
from evenhand.core.limits import RATE_MAX, Limits
from evenhand.core.rate_limit import USER_TOKENS, RateLimit
from evenhand.core.steps import (
    Cancel,
    Effect,
    Refused,
    Renew,
    Settle,
    ShutDown,
    TenantChanged,
    TenantForgotten,
    TicketAdopted,
    WorkerGone,
)

LONG_MS = 10**9
A = TenantId("a")


def pool(slots: int = 8, term: int = 1, **limits: int) -> World:
    """One tenant with limits of its own; ``user_…`` are those of each of its users."""
    world = World(config(worker_stale_after_ms=LONG_MS, worker_lost_after_ms=LONG_MS), term)
    world.step(TenantChanged(limited(**limits)))
    world.workers("w1", slots=slots)
    return world


def limited(**limits: int) -> TenantSpec:
    of_user = {name.removeprefix("user_"): value for name, value in limits.items() if name.startswith("user_")}
    of_tenant = {name: value for name, value in limits.items() if not name.startswith("user_")}
    return TenantSpec(A, rate_limits=RateLimits(**of_tenant), user_rate_limits=RateLimits(**of_user))


def left(world: World, name: str = "tenant_tokens_per_minute", user: str = "") -> int:
    """What a limit has left, in whole requests or tokens."""
    (limit,) = [each for each in world.scheduler._legs.limits.of(A) if each.name == name]
    return limit.remaining(user, world.now_ns)


def is_admitted(effects: Sequence[Effect]) -> bool:
    return not any(
        isinstance(each, Refused) and each.refusal.reason is RefusalReason.RATE_LIMITED for each in effects
    )


def nothing_open(world: World) -> bool:
    return world.scheduler._legs.limits.open_count == 0


# What is admitted


def test_a_limit_of_one_admits_one() -> None:
    world = pool(requests_per_minute=1)
    assert is_admitted(world.submit("a"))
    answer = refusal(world.submit("a"))
    assert (answer.reason, answer.retry_after_ms) == (RefusalReason.RATE_LIMITED, 60_000)
    assert (answer.limit, answer.remaining) == ("tenant_requests_per_minute", 0)
    world.tick(59_999)
    assert refusal(world.submit("a")).retry_after_ms == 1
    world.tick(1)
    assert is_admitted(world.submit("a"))


def test_refill_is_smooth() -> None:
    """120 a minute, four at once: after them one each half second, not 120 at the full minute."""
    world = pool(requests_per_minute=120, requests_burst=4)
    assert [is_admitted(world.submit("a")) for _ in range(6)] == [True] * 4 + [False] * 2
    seen = []
    for _ in range(20):
        world.tick(250)
        seen.append(is_admitted(world.submit("a")))
    assert seen == [False, True] * 10


@pytest.mark.parametrize(("per_minute", "burst"), [(1, 1), (59, 1), (60, 1), (119, 1), (120, 2), (6_000, 100)])
def test_the_burst_is_a_seconds_worth_where_none_is_told(per_minute: int, burst: int) -> None:
    world = pool(slots=200, requests_per_minute=per_minute)
    assert sum(is_admitted(world.submit("a", prompt=1)) for _ in range(burst + 3)) == burst


def test_admission_is_all_or_nothing() -> None:
    """What one limit refuses takes nothing of any other."""
    world = pool(
        requests_per_minute=60,
        requests_burst=5,
        tokens_per_minute=60,
        tokens_burst=200,
        user_tokens_per_minute=600,
    )
    names = ("tenant_requests_per_minute", "tenant_tokens_per_minute", "user_tokens_per_minute")
    world.submit("a", prompt=100, output=50)
    before = [left(world, name) for name in names]
    for _ in range(10):
        answer = refusal(world.submit("a", prompt=100, output=50))
        assert (answer.limit, answer.remaining) == ("tenant_tokens_per_minute", 50)
    assert [left(world, name) for name in names] == before


@pytest.mark.parametrize("changes", [{"prompt": 0}, {"prompt": 10**9}, {"deadline_ns": 0}])
def test_what_is_refused_for_another_reason_takes_nothing(changes: dict[str, Any]) -> None:
    world = pool(requests_per_minute=60, requests_burst=5)
    assert refusal(world.submit("a", **changes)).reason is not RefusalReason.RATE_LIMITED
    assert left(world, "tenant_requests_per_minute") == 5
    assert nothing_open(world)


def test_a_full_queue_takes_nothing() -> None:
    world = pool(slots=1, requests_per_minute=60, requests_burst=5)
    world.step(TenantChanged(replace(limited(requests_per_minute=60, requests_burst=5), queue_length_max=1)))
    world.submit("a")
    world.submit("a")
    assert refusal(world.submit("a")).reason is RefusalReason.QUEUE_FULL
    assert left(world, "tenant_requests_per_minute") == 3


def test_the_limit_that_takes_longest_is_the_one_told() -> None:
    world = pool(requests_per_minute=60, tokens_per_minute=10, tokens_burst=100)
    world.submit("a", prompt=90, output=10)
    answer = refusal(world.submit("a", prompt=30, output=10))
    assert (answer.limit, answer.retry_after_ms) == ("tenant_tokens_per_minute", 40 * 6_000)
    world.tick(240_000)
    assert is_admitted(world.submit("a", prompt=30, output=10))


def test_sentences_name_the_limit_and_what_is_left_and_nobody_else() -> None:
    world = pool(requests_per_minute=60)
    world.tenants("other")
    world.submit("a")
    assert refusal(world.submit("a")).sentence == (
        "Tenant a may send 60 requests a minute, up to 1 at once: 0 are left, the next is admitted in 1000 ms."
    )
    world = pool(user_tokens_per_minute=60, user_tokens_burst=10)
    world.submit("a", prompt=20, output=5, user="u")
    assert refusal(world.submit("a", prompt=2, output=1, user="u")).sentence == (
        "Each user of tenant a may use 60 tokens a minute, up to 10 at once: 15 are owed, the request needs 3 and "
        "is admitted in 18000 ms."
    )


def test_what_is_larger_than_the_burst_waits_for_a_full_bucket_and_leaves_a_debt() -> None:
    world = pool(tokens_per_minute=6_000)
    assert left(world) == 100
    assert is_admitted(world.submit("a", prompt=1_000, output=200))
    assert left(world) == 100 - 1_200
    assert refusal(world.submit("a", prompt=1, output=1)).retry_after_ms == 11_020
    assert refusal(world.submit("a", prompt=1_000, output=200)).retry_after_ms == 12_000
    world.tick(12_000)
    assert is_admitted(world.submit("a", prompt=1_000, output=200))


def test_without_limits_nothing_is_kept() -> None:
    world = pool()
    for _ in range(50):
        assert is_admitted(world.submit("a", user="u"))
    assert nothing_open(world)
    assert world.scheduler.checkpoint().limits == ()


# Users


def test_each_user_has_its_own_and_the_tenants_holds_for_all() -> None:
    world = pool(requests_per_minute=300, requests_burst=5, user_requests_per_minute=60, user_requests_burst=2)
    assert [is_admitted(world.submit("a", user="u")) for _ in range(3)] == [True, True, False]
    assert [is_admitted(world.submit("a", user="v")) for _ in range(3)] == [True, True, False]
    assert [is_admitted(world.submit("a", user="w")) for _ in range(2)] == [True, False]
    assert refusal(world.submit("a", user="w")).limit == "tenant_requests_per_minute"


def test_a_missing_user_is_limited_as_any_other() -> None:
    world = pool(user_requests_per_minute=60)
    assert [is_admitted(world.submit("a")) for _ in range(2)] == [True, False]
    assert refusal(world.submit("a")).limit == "user_requests_per_minute"


def test_users_cost_memory_only_while_they_have_spent_something() -> None:
    world = pool(slots=1_000, user_requests_per_minute=60)
    for number in range(500):
        world.submit("a", user=f"u{number}", prompt=1)
    (limit,) = world.scheduler._legs.limits.of(A)
    assert len(limit) == 500
    world.tick(1_000)
    world.submit("a", user="late", prompt=1)
    assert len(limit) == 1
    assert len(limit._full_times) <= 64 + 4


def test_beyond_the_bound_of_users_another_waits_for_the_first_that_is_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rate_limit, "USERS_MAX", 3)
    monkeypatch.setattr("evenhand.core.limits.USERS_MAX", 3)
    world = pool(slots=100, user_requests_per_minute=60, user_requests_burst=2)
    for user, after_ms in (("u", 0), ("v", 100), ("w", 100), ("u", 100)):
        world.tick(after_ms)
        assert is_admitted(world.submit("a", user=user))
    answer = refusal(world.submit("a", user="x"))
    assert (answer.limit, answer.retry_after_ms) == ("user_requests_per_minute", 800)  # when v is full, not u
    assert "has 3 users at once" in answer.sentence
    world.tick(799)
    assert not is_admitted(world.submit("a", user="x"))
    world.tick(1)
    assert is_admitted(world.submit("a", user="x"))


# Settling


def test_tokens_are_taken_as_estimated_and_settled_to_the_truth() -> None:
    world = pool(tokens_per_minute=60, tokens_burst=1_000)
    granted = ticket(world.submit("a", prompt=100, output=50))
    assert left(world) == 850
    world.settle(granted, Usage(100, 0, 20))
    assert left(world) == 880
    assert nothing_open(world)


def test_a_stream_counts_as_a_plain_request_does_and_what_was_used_beyond_the_estimate_counts_at_once() -> None:
    world = pool(tokens_per_minute=60, tokens_burst=1_000)
    granted = ticket(world.submit("a", prompt=100, output=500, output_tokens_expected=10))
    assert left(world) == 890
    world.step(Renew(granted.ticket_id, Usage(100, 0, 5)))
    assert left(world) == 890
    world.step(Renew(granted.ticket_id, Usage(100, 0, 60)))
    assert left(world) == 840
    world.settle(granted, Usage(100, 0, 300))
    assert left(world) == 600


def test_the_truth_may_leave_a_debt() -> None:
    world = pool(tokens_per_minute=60, tokens_burst=200)
    granted = ticket(world.submit("a", prompt=100, output=1_000, output_tokens_expected=10))
    world.settle(granted, Usage(100, 0, 600))
    assert left(world) == -500
    assert refusal(world.submit("a", prompt=1, output=1)).retry_after_ms == 502_000


@pytest.mark.parametrize(
    ("end", "used"),
    [
        (lambda t: Settle(t.ticket_id, Usage(100, 0, 7)), 107),
        (lambda t: Settle(t.ticket_id, None), 150),
        (lambda t: Settle(t.ticket_id, Usage(100, 90, 7), LegOutcome.CANCELLED), 107),
        (lambda t: Cancel(A, t.request_id, Usage(40, 0, 0)), 40),
        (lambda t: Cancel(A, t.request_id), 150),
        (lambda t: Settle(t.ticket_id, Usage(10**6, 0, 10**6)), 150),
        (lambda t: Settle(t.ticket_id, Usage(0, 0, 0)), 0),
    ],
)
def test_each_end_of_a_granted_request_settles_once(end: Any, used: int) -> None:
    """A cancel pays for what was produced; silence keeps what was taken; nobody is given more than was taken."""
    world = pool(tokens_per_minute=60, tokens_burst=1_000)
    granted = ticket(world.submit("a", prompt=100, output=50))
    for _ in range(2):
        world.step(end(granted))
        assert left(world) == 1_000 - used
    assert nothing_open(world)


def test_an_expired_ticket_keeps_what_it_took_and_what_it_told() -> None:
    world = pool(tokens_per_minute=1, tokens_burst=1_000)
    granted = ticket(world.submit("a", prompt=100, output=200, output_tokens_expected=20))
    world.step(Renew(granted.ticket_id, Usage(100, 0, 80)))
    world.tick(30_001)
    assert nothing_open(world)
    assert left(world) == 820


def test_a_deadline_in_the_queue_returns_the_tokens_and_the_request_stays_counted() -> None:
    world = pool(slots=1, tokens_per_minute=1, tokens_burst=1_000, requests_per_minute=1, requests_burst=10)
    world.submit("a", prompt=100, output=50)
    world.submit("a", prompt=300, output=50, deadline_ns=world.now_ns + 10**9)
    assert left(world) == 500
    world.tick(1_001)
    assert left(world) == 850
    assert left(world, "tenant_requests_per_minute") == 8


def test_a_cancel_in_the_queue_returns_the_tokens_and_the_request_stays_counted() -> None:
    """Else submitting and cancelling in turn would be free of any limit."""
    world = pool(slots=1, tokens_per_minute=1, tokens_burst=1_000, requests_per_minute=1, requests_burst=3)
    world.submit("a", prompt=10, output=10)
    world.submit("a", prompt=10, output=10, request_id="q1")
    world.cancel("a", "q1")
    assert (left(world), left(world, "tenant_requests_per_minute")) == (980, 1)
    world.submit("a", prompt=10, output=10, request_id="q2")
    world.cancel("a", "q2")
    assert not is_admitted(world.submit("a", prompt=10, output=10))


def test_a_retry_of_an_open_request_is_not_charged_twice() -> None:
    world = pool(slots=1, tokens_per_minute=1, tokens_burst=1_000, requests_per_minute=1, requests_burst=3)
    for _ in range(5):
        world.submit("a", prompt=10, output=10, request_id="granted")
        world.submit("a", prompt=10, output=10, request_id="queued")
    assert (left(world), left(world, "tenant_requests_per_minute")) == (960, 1)


def test_a_new_leg_after_a_lost_worker_is_not_charged_twice() -> None:
    world = pool(tokens_per_minute=1, tokens_burst=1_000, requests_per_minute=1, requests_burst=3)
    world.workers("w2")
    first = ticket(world.submit("a", prompt=100, output=50))
    second = ticket(world.lose(first))
    assert (left(world), left(world, "tenant_requests_per_minute")) == (850, 2)
    world.settle(second, Usage(100, 0, 10))
    assert (left(world), left(world, "tenant_requests_per_minute")) == (890, 2)


def test_what_the_pool_cannot_serve_any_more_comes_back_whole() -> None:
    world = pool(slots=1, tokens_per_minute=1, tokens_burst=1_000, requests_per_minute=1, requests_burst=4)
    for _ in range(3):
        world.submit("a", prompt=100, output=50)
    assert left(world, "tenant_requests_per_minute") == 1
    world.step(WorkerGone(WorkerId("w1"), "gone"))
    assert (left(world), left(world, "tenant_requests_per_minute")) == (1_000, 4)
    assert nothing_open(world)


def test_what_shutting_down_refuses_comes_back_whole() -> None:
    world = pool(slots=1, tokens_per_minute=1, tokens_burst=1_000, requests_per_minute=1, requests_burst=4)
    world.submit("a", prompt=100, output=50)
    world.submit("a", prompt=100, output=50)
    world.step(ShutDown())
    assert (left(world), left(world, "tenant_requests_per_minute")) == (850, 3)


def test_what_was_served_by_a_worker_taken_for_lost_stays_taken() -> None:
    world = pool(slots=1, tokens_per_minute=1, tokens_burst=1_000)
    world.workers("w2", slots=1)
    first = ticket(world.submit("a", prompt=100, output=50))
    ticket(world.submit("a", prompt=100, output=50))
    world.lose(first)
    world.settle(first, Usage(100, 0, 40))
    assert left(world) == 700


# Changes while running


def change(world: World, **limits: int) -> None:
    world.step(TenantChanged(limited(**limits)))


def test_a_change_keeps_what_is_left_clipped_to_the_new_burst() -> None:
    world = pool(tokens_per_minute=60, tokens_burst=1_000)
    world.submit("a", prompt=300, output=100)
    change(world, tokens_per_minute=120, tokens_burst=5_000)
    assert left(world) == 600
    world.tick(1_000)
    assert left(world) == 602
    change(world, tokens_per_minute=120, tokens_burst=50)
    assert left(world) == 50
    change(world, tokens_per_minute=120, tokens_burst=5_000)
    assert left(world) == 50


def test_a_change_forgives_no_debt_and_changing_to_and_fro_gives_nothing() -> None:
    world = pool(requests_per_minute=60, requests_burst=3, user_requests_per_minute=60, user_requests_burst=3)
    for _ in range(3):
        world.submit("a", user="u")
    for number in range(20):
        burst = 3 + number % 2
        change(
            world,
            requests_per_minute=60,
            requests_burst=burst,
            user_requests_per_minute=60,
            user_requests_burst=burst,
        )
        assert not is_admitted(world.submit("a", user="u"))
    assert left(world, "user_requests_per_minute", "v") == 3


def test_a_limit_set_later_gives_nothing_back_for_what_it_never_took() -> None:
    world = pool()
    early = ticket(world.submit("a", prompt=100, output=50))
    change(world, tokens_per_minute=60, tokens_burst=500)
    world.submit("a", prompt=200, output=50)
    world.settle(early, Usage(0, 0, 0))
    assert left(world) == 250


def test_a_limit_that_was_off_in_between_starts_full_and_owes_nothing_to_the_time_before() -> None:
    world = pool(tokens_per_minute=60, tokens_burst=500)
    early = ticket(world.submit("a", prompt=300, output=50))
    change(world)
    change(world, tokens_per_minute=60, tokens_burst=500)
    assert left(world) == 500
    world.submit("a", prompt=100, output=50)
    world.settle(early, Usage(0, 0, 0))
    assert left(world) == 350


@pytest.mark.parametrize("field", [field.name for field in fields(RateLimits)])
@pytest.mark.parametrize("scope", ["", "user_"])
@pytest.mark.parametrize("value", [-1, RATE_MAX + 1])
def test_an_impossible_rate_is_refused_in_a_sentence_and_changes_nothing(
    field: str, scope: str, value: int
) -> None:
    world = pool(requests_per_minute=60)
    with pytest.raises(
        InvalidInput, match=rf"Tenant a has {scope}rate_limits\.{field} {value}; it must be from 0 to"
    ):
        change(world, **{scope + field: value})
    assert left(world, "tenant_requests_per_minute") == 1


@pytest.mark.parametrize("field", [field.name for field in fields(RateLimits)])
@pytest.mark.parametrize("scope", ["", "user_"])
def test_each_field_has_an_effect(field: str, scope: str) -> None:
    def admitted(value: int) -> int:
        kind = scope + field.split("_")[0]
        limits = {f"{kind}_per_minute": 60, f"{kind}_burst": 10, scope + field: value}
        world = pool(slots=100, **limits)
        count = 0
        for _ in range(30):
            world.tick(100)
            count += is_admitted(world.submit("a", prompt=4, output=4))
        return count

    assert admitted(10) != admitted(600)


def test_a_deleted_tenant_leaves_nothing() -> None:
    world = pool(slots=1, tokens_per_minute=60, user_tokens_per_minute=60)
    granted = ticket(world.submit("a", prompt=1, output=1, user="u"))
    world.step(TenantForgotten(A))
    world.settle(granted)
    assert nothing_open(world)
    assert not world.scheduler._legs.limits._limits


# Across a restart


def heir_of(world: World, elapsed_ms: int = 0, now_ms: int = 5) -> World:
    heir = World(world.scheduler.config, term=2)
    heir.now_ns = now_ms * 1_000_000
    heir.scheduler.restore(world.scheduler.checkpoint(world.now_ns), heir.now_ns, elapsed_ms * 1_000_000)
    return heir


def test_levels_survive_a_restart_and_refill_meanwhile() -> None:
    world = pool(tokens_per_minute=60, tokens_burst=1_000, user_requests_per_minute=1, user_requests_burst=2)
    world.tick(12_345)
    world.submit("a", prompt=300, output=100, user="u")
    world.submit("a", prompt=1_000, output=100, user="u", output_tokens_expected=0)  # refused
    world.tick(500)
    heir = heir_of(world)
    assert left(heir) == left(world) == 600
    heir.tick(499)
    assert left(heir) == 600
    heir.tick(1)
    assert left(heir) == 601
    assert left(heir, "user_requests_per_minute", "u") == 1
    assert left(heir, "user_requests_per_minute", "v") == 2
    assert left(heir_of(world, elapsed_ms=60_000)) == 660
    assert left(heir_of(world, elapsed_ms=60_000), "user_requests_per_minute", "u") == 2


def test_a_debt_survives_a_restart() -> None:
    world = pool(tokens_per_minute=60)
    world.submit("a", prompt=300, output=100)
    assert left(heir_of(world)) == left(world) == -399


def test_a_restored_ticket_settles_against_what_it_took() -> None:
    world = pool(tokens_per_minute=60, tokens_burst=1_000)
    granted = ticket(world.submit("a", prompt=300, output=100))
    heir = heir_of(world)
    heir.workers("w1")
    heir.submit("a", prompt=300, output=100, request_id=granted.request_id)
    assert left(heir) == 600
    heir.settle(granted, Usage(300, 0, 10))
    assert left(heir) == 690
    assert nothing_open(heir)


def test_a_restored_ticket_gives_nothing_to_a_limit_that_never_took_of_it() -> None:
    world = pool(tokens_per_minute=60, tokens_burst=1_000)
    early = ticket(world.submit("a", prompt=300, output=100))
    change(world)
    change(world, tokens_per_minute=60, tokens_burst=1_000)
    world.submit("a", prompt=500, output=100)
    heir = heir_of(world)
    heir.settle(early, Usage(0, 0, 0))
    assert left(heir) == 400


def test_what_waited_is_charged_anew_when_its_client_asks_again() -> None:
    world = pool(slots=1, tokens_per_minute=60, tokens_burst=1_000, requests_per_minute=60, requests_burst=5)
    world.submit("a", prompt=100, output=100)
    world.submit("a", prompt=200, output=100, request_id="waits")
    heir = heir_of(world)
    heir.workers("w1", slots=1)
    assert (left(heir), left(heir, "tenant_requests_per_minute")) == (800, 4)
    heir.submit("a", prompt=200, output=100, request_id="waits")
    assert (left(heir), left(heir, "tenant_requests_per_minute")) == (500, 3)


def test_an_adopted_ticket_is_charged_once_whatever_is_left() -> None:
    world = pool(tokens_per_minute=60, requests_per_minute=60)
    lost = world.scheduler.checkpoint(0)
    granted = ticket(world.submit("a", prompt=300, output=100))
    heir = World(world.scheduler.config, term=2)
    heir.scheduler.restore(lost, 0)
    heir.workers("w1", slots=1)
    heir.submit("a", prompt=1, output=1, request_id="takes the slot")
    heir.tick(10_000)
    heir.submit("a", prompt=300, output=100, request_id=granted.request_id)
    heir.tick(1_000)
    for _ in range(2):
        heir.step(TicketAdopted(granted))
    assert left(heir, "tenant_requests_per_minute") == 0
    assert left(heir) == 1 - 400
    heir.settle(granted, Usage(300, 0, 10))
    assert left(heir) == 1 - 310


def test_the_emptiest_buckets_are_those_kept_in_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evenhand.core.limits.USERS_SAVED_MAX", 2)
    world = pool(user_tokens_per_minute=60, user_tokens_burst=1_000)
    for user, prompt in (("u", 10), ("v", 900), ("w", 500), ("x", 20)):
        world.submit("a", prompt=prompt, output=1, user=user)
    heir = heir_of(world)
    assert [left(heir, "user_tokens_per_minute", user) for user in "uvwx"] == [1_000, 99, 499, 1_000]


# Exactness of one limit


def request(prompt: int) -> Request:
    return Request(RequestId("r"), A, (), prompt, 1)


def asked(limits: Limits, prompt: int, now_ns: int) -> Refusal | None:
    return limits.refusal(request(prompt), 0, now_ns)


def test_waiting_exactly_as_told_admits_and_a_millisecond_less_does_not() -> None:
    for per_minute in (1, 7, 59, 61, 1_000_003):
        limits = Limits()
        limits.change(limited(tokens_per_minute=per_minute, tokens_burst=10), 3)
        limits.take(request(1_234), 0, 3)
        answer = asked(limits, 5, 1_000)
        assert answer is not None
        assert answer.retry_after_ms is not None
        wait_ns = answer.retry_after_ms * 1_000_000
        assert asked(limits, 5, 1_000 + wait_ns) is None
        assert asked(limits, 5, 1_000 + wait_ns - 1_000_000) is not None


def test_looking_changes_nothing_however_often() -> None:
    limit = RateLimit(USER_TOKENS, 7, 100, 0)
    limit.move("u", -90, 0)
    for now_ns in range(0, 10**6, 1_000):
        limit.wait_ns("u", 50, now_ns)
        limit.remaining("u", now_ns)
    assert limit.wait_ns("u", 50, 0) == -(-40 * rate_limit.UNITS // 7)


def test_counts_of_tickets_and_effects_are_those_of_a_pool_without_limits() -> None:
    """Limits that never bind change no decision."""
    free, wide = pool(slots=2), pool(slots=2, tokens_per_minute=10**9, user_requests_per_minute=10**9)
    seen: list[list[Ticket]] = []
    for world in (free, wide):
        for number in range(20):
            world.submit("a", prompt=10 + number, user=f"u{number % 3}")
            for each in tickets(world.effects)[-1:]:
                world.settle(each, after_ms=10)
        seen.append(tickets(world.effects))
    assert seen[0] == seen[1]
