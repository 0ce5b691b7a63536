"""Limits per minute hold over any interval, exactly; and an independent book of them balances at every step."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.properties.limits_run import LimitsRun

from evenhand.core import limits as limits_module
from evenhand.core.facts import RateLimits, RefusalReason, Request, TenantSpec
from evenhand.core.ids import RequestId, TenantId
from evenhand.core.legs import Legs
from evenhand.core.limits import Limits
from evenhand.core.rate_limit import UNITS, RateLimit

A = TenantId("a")
MS = 10**6
SEEDS = 30
unhurried = settings(max_examples=150, deadline=None, print_blob=True)

rates = st.integers(1, 100) | st.integers(1, 10**6)
bursts = st.integers(0, 20) | st.integers(0, 10**5)
gaps_ns = st.just(0) | st.integers(0, 10**9) | st.integers(0, 10**11)
amounts = st.integers(1, 30) | st.integers(1, 10**5)


@dataclass(frozen=True)
class Arrival:
    gap_ns: int
    user: str
    prompt: int
    output: int
    unused: int
    """Of the estimated output, what the truth falls short by."""
    lasts: int
    """Ends after so many further arrivals."""


arrivals = st.lists(
    st.builds(Arrival, gaps_ns, st.sampled_from("uv"), amounts, amounts, st.integers(0, 50), st.integers(0, 6)),
    max_size=40,
)
limits_of_any = st.builds(RateLimits, rates, bursts, rates, bursts)


@dataclass(frozen=True)
class Taken:
    at_ns: int
    user: str
    requests: int
    tokens: int


def admit_all(spec: TenantSpec, arriving: list[Arrival]) -> tuple[Limits, list[Taken], int]:
    """Send arrivals through limits, settle what is admitted; what was taken or came back, and the last time."""
    limits, taken, now_ns = Limits(), [], 0
    limits.change(spec, now_ns)
    running: list[tuple[int, Arrival, Request]] = []
    for number, arrival in enumerate(arriving):
        now_ns += arrival.gap_ns
        for entry in [each for each in running if each[0] <= number]:
            running.remove(entry)
            _, of, request = entry
            unused = min(of.unused, of.output)
            limits.end(A, request.request_id, of.prompt + of.output - unused, now_ns)
            taken.append(Taken(now_ns, of.user, 0, -unused))
        request = Request(RequestId(f"r{number}"), A, (), arrival.prompt, 1, user=arrival.user)
        refusal = limits.refusal(request, arrival.output, now_ns)
        if refusal is None:
            limits.take(request, arrival.output, now_ns)
            taken.append(Taken(now_ns, arrival.user, 1, arrival.prompt + arrival.output))
            running.append((number + 1 + arrival.lasts, arrival, request))
        else:
            assert_true_wait(limits, request, arrival.output, refusal.retry_after_ms or 0, now_ns)
    for _, _, request in running:
        limits.end(A, request.request_id, None, now_ns)
    return limits, taken, now_ns


def assert_true_wait(limits: Limits, request: Request, output: int, wait_ms: int, now_ns: int) -> None:
    """Waiting as told admits; a millisecond less does not; and no refusal on the way takes anything."""
    assert wait_ms >= 1
    waiting = deepcopy(limits)
    for at_ns in (now_ns, now_ns + (wait_ms - 1) // 2 * MS, now_ns + (wait_ms - 1) * MS):
        refusal = waiting.refusal(request, output, at_ns)
        assert refusal is not None
        assert refusal.reason is RefusalReason.RATE_LIMITED
        assert at_ns + (refusal.retry_after_ms or 0) * MS >= now_ns + (wait_ms - 1) * MS
    assert waiting.refusal(request, output, now_ns + wait_ms * MS) is None


def assert_bounded(taken: list[tuple[int, int]], per_minute: int, burst: int, largest: int) -> None:
    """What is taken over any interval is at most burst + rate · time + one request's debt, in whole numbers."""
    debt = max(0, largest - burst)
    for first in range(len(taken)):
        total = 0
        for at_ns, amount in taken[first:]:
            total += amount
            assert total * UNITS <= (burst + debt) * UNITS + per_minute * (at_ns - taken[first][0])


@unhurried
@given(limits_of_any, limits_of_any, arrivals)
def test_over_any_interval_no_more_is_admitted_than_burst_and_rate_allow(
    of_tenant: RateLimits, of_user: RateLimits, arriving: list[Arrival]
) -> None:
    _, taken, _ = admit_all(TenantSpec(A, rate_limits=of_tenant, user_rate_limits=of_user), arriving)
    for scope, users in ((of_tenant, "uv"), (of_user, "u"), (of_user, "v")):
        mine = [each for each in taken if each.user in users]
        tokens_largest = max([each.tokens for each in mine], default=0)
        requests_burst = limits_module.burst_of(scope.requests_per_minute, scope.requests_burst)
        tokens_burst = limits_module.burst_of(scope.tokens_per_minute, scope.tokens_burst)
        requests = [(each.at_ns, each.requests) for each in mine]
        assert_bounded(requests, scope.requests_per_minute, requests_burst, 1)
        tokens = [(each.at_ns, each.tokens) for each in mine]
        assert_bounded(tokens, scope.tokens_per_minute, tokens_burst, tokens_largest)


@unhurried
@given(arrivals)
def test_what_is_taken_in_the_end_is_the_truth(arriving: list[Arrival]) -> None:
    """With a bucket that never fills up, what is missing is exactly what was used."""
    burst = 10**12
    spec = TenantSpec(A, rate_limits=RateLimits(0, 0, 1, burst), user_rate_limits=RateLimits(0, 0, 1, burst))
    standing = [replace(each, gap_ns=0) for each in arriving]
    limits, taken, now_ns = admit_all(spec, standing)
    for limit in limits.of(A):
        for user in "uv":
            used = sum(each.tokens for each in taken if each.user == user or not limit.per_user)
            assert limit.remaining(user if limit.per_user else "", now_ns) == burst - used
    assert limits.open_count == 0


@unhurried
@given(limits_of_any, limits_of_any, arrivals)
def test_a_refusal_takes_nothing(of_tenant: RateLimits, of_user: RateLimits, arriving: list[Arrival]) -> None:
    limits, _, now_ns = admit_all(TenantSpec(A, rate_limits=of_tenant, user_rate_limits=of_user), arriving)
    before = [(limit.name, limit.levels(now_ns), limit.rest_level(now_ns)) for limit in limits.of(A)]
    for user in "uvw":
        limits.refusal(Request(RequestId("more"), A, (), 10**6, 1, user=user), 5, now_ns)
    assert before == [(limit.name, limit.levels(now_ns), limit.rest_level(now_ns)) for limit in limits.of(A)]


@unhurried
@given(limits_of_any, arrivals, st.lists(st.tuples(rates, bursts), max_size=4))
def test_a_change_never_adds_to_what_is_left(of_user: RateLimits, arriving: list[Arrival], changes: Any) -> None:
    limits, _, now_ns = admit_all(TenantSpec(A, user_rate_limits=of_user), arriving)
    for per_minute, burst in changes:
        before = {
            (limit.name, user): limit.remaining(user, now_ns)
            for limit in limits.of(A)
            for user in ("u", "v", "new")
        }
        limits.change(TenantSpec(A, user_rate_limits=RateLimits(per_minute, burst, per_minute, burst)), now_ns)
        for limit in limits.of(A):
            for user in ("u", "v", "new"):
                assert limit.remaining(user, now_ns) == min(before[limit.name, user], limit.burst)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_the_book_balances_at_every_step(seed: int) -> None:
    run = LimitsRun(seed)
    run.run()
    assert run.admitted > 5


def test_the_runs_see_both_answers() -> None:
    runs = [LimitsRun(seed) for seed in range(10)]
    for run in runs:
        run.run()
    assert sum(run.admitted for run in runs) > 150
    assert sum(run.limited for run in runs) > 150


def run_all() -> None:
    for seed in range(SEEDS):
        LimitsRun(seed).run()


# The book is tested too: each of these faults, put in by hand, must be caught.

Fault = Callable[[pytest.MonkeyPatch], None]


def refusal_takes(patch: pytest.MonkeyPatch) -> None:
    right = Limits.refusal

    def wrong(self: Limits, request: Request, output: int, now_ns: int) -> Any:
        refusal = right(self, request, output, now_ns)
        if refusal is not None:
            for limit in self.of(A)[:1]:
                limit.move(request.user if limit.per_user else "", -1, now_ns)
        return refusal

    patch.setattr(Limits, "refusal", wrong)


def takes_of_one_limit_only(patch: pytest.MonkeyPatch) -> None:
    right = Limits.of
    right_take = Limits._take

    def wrong(self: Limits, *arguments: Any) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(Limits, "of", lambda self, tenant_id: right(self, tenant_id)[:1])
            right_take(self, *arguments)

    patch.setattr(Limits, "_take", wrong)


def settles_twice(patch: pytest.MonkeyPatch) -> None:
    right = Limits.end

    def wrong(self: Limits, tenant_id: TenantId, request_id: RequestId, tokens: int | None, now_ns: int) -> None:
        charge = self._charges.get((tenant_id, request_id))
        if charge is not None and tokens is not None:
            kept = charge.tokens
            self._settle(charge, tokens, now_ns)
            charge.tokens = kept
        right(self, tenant_id, request_id, tokens, now_ns)

    patch.setattr(Limits, "end", wrong)


def never_settles(patch: pytest.MonkeyPatch) -> None:
    right = Limits.end
    patch.setattr(
        Limits, "end", lambda self, tenant, request, tokens, now: right(self, tenant, request, None, now)
    )


def silence_refunds(patch: pytest.MonkeyPatch) -> None:
    right = Limits.end
    patch.setattr(
        Limits, "end", lambda self, tenant, request, tokens, now: right(self, tenant, request, tokens or 0, now)
    )


def usage_waits_for_the_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Limits, "use", lambda *_: None)


def lost_worker_keeps_the_charge(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Limits, "give_back", lambda self, tenant, request, now: self.end(tenant, request, None, now))


def a_new_leg_is_given_back(patch: pytest.MonkeyPatch) -> None:
    right = Legs.end

    def wrong(self: Legs, held: Any, outcome: Any, usage: Any, now_ns: int, continues: bool, effects: Any) -> None:
        if continues:
            self.limits.give_back(held.ticket.tenant_id, held.ticket.request_id, now_ns)
        right(self, held, outcome, usage, now_ns, continues, effects)

    patch.setattr(Legs, "end", wrong)


def levels_above_the_burst(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        RateLimit, "_level", lambda self, bucket, now: bucket.level + self.per_minute * (now - bucket.at_ns)
    )


def debts_forgiven(patch: pytest.MonkeyPatch) -> None:
    right = RateLimit._level
    patch.setattr(RateLimit, "_level", lambda self, bucket, now: max(0, right(self, bucket, now)))


def refill_by_the_second(patch: pytest.MonkeyPatch) -> None:
    right = RateLimit._level
    patch.setattr(RateLimit, "_level", lambda self, bucket, now: right(self, bucket, now // 10**9 * 10**9))


def one_bucket_for_all_users(patch: pytest.MonkeyPatch) -> None:
    right = RateLimit.move
    patch.setattr(RateLimit, "move", lambda self, key, amount, now: right(self, "", amount, now))


def a_change_fills_up(patch: pytest.MonkeyPatch) -> None:
    right = RateLimit.change

    def wrong(self: RateLimit, per_minute: int, burst: int, now_ns: int) -> None:
        right(self, per_minute, burst, now_ns)
        self.restore(burst * UNITS, {}, now_ns)

    patch.setattr(RateLimit, "change", wrong)


def a_restart_fills_up(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Limits, "restore", lambda *_: None)


def a_restart_forgets_what_is_open(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Limits, "restore_taken", lambda *_: None)


def a_restart_gives_to_limits_that_never_took(patch: pytest.MonkeyPatch) -> None:
    right = Limits.taken

    def wrong(self: Limits, tenant_id: TenantId, request_id: RequestId) -> Any:
        taken = right(self, tenant_id, request_id)
        names = tuple(limit.name for limit in self.of(tenant_id))
        return taken and replace(taken, limits=names)

    patch.setattr(Limits, "taken", wrong)


def waits_a_nanosecond_short(patch: pytest.MonkeyPatch) -> None:
    right = RateLimit.wait_ns
    patch.setattr(RateLimit, "wait_ns", lambda self, *arguments: max(0, right(self, *arguments) - 1))


def the_large_wait_for_ever(patch: pytest.MonkeyPatch) -> None:
    right = RateLimit.wait_ns

    def wrong(self: RateLimit, key: str, amount: int, now_ns: int) -> int:
        return right(self, key, amount, now_ns) or (10**15 if amount > self.burst else 0)

    patch.setattr(RateLimit, "wait_ns", wrong)


FAULTS: list[Fault] = [
    refusal_takes,
    takes_of_one_limit_only,
    settles_twice,
    never_settles,
    silence_refunds,
    usage_waits_for_the_end,
    lost_worker_keeps_the_charge,
    a_new_leg_is_given_back,
    levels_above_the_burst,
    debts_forgiven,
    refill_by_the_second,
    one_bucket_for_all_users,
    a_change_fills_up,
    a_restart_fills_up,
    a_restart_forgets_what_is_open,
    a_restart_gives_to_limits_that_never_took,
    waits_a_nanosecond_short,
    the_large_wait_for_ever,
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_made_by_hand_is_caught(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    with pytest.raises(AssertionError, match="seed"):
        run_all()
