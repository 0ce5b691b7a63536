"""What is learned from settled legs."""

import random

import pytest

from evenhand.core.estimator import (
    COST_RATE_MIN_PER_S,
    LATEST_KEPT_MAX,
    CostRate,
    OutputEstimator,
    ServiceRate,
)
from evenhand.core.facts import OutputEstimatorKind, Request
from evenhand.core.ids import RequestId, TenantId

S = 1_000_000_000
A, B = TenantId("a"), TenantId("b")


def request(limit: int, expected: int | None = None) -> Request:
    return Request(RequestId("r"), A, (), 10, limit, expected)


def test_the_clients_own_estimate_wins_within_the_limit() -> None:
    estimator = OutputEstimator(256)
    assert estimator.estimate(request(1_000, 30)) == 30
    assert estimator.estimate(request(20, 30)) == 20
    assert estimator.estimate(request(20, 0)) == 1
    estimator.learn(A, 100)
    assert estimator.estimate(request(1_000, 60)) == 60
    assert estimator.estimate(request(1_000, 200)) == 200


@pytest.mark.parametrize(
    ("kind", "at_least"),
    [
        (OutputEstimatorKind.MEAN, 250),
        (OutputEstimatorKind.P75, 250),
        (OutputEstimatorKind.DECAYED_MAX, 250),
        (OutputEstimatorKind.ZERO, 1),
    ],
)
def test_the_clients_own_estimate_is_not_believed_far_below_what_its_tenant_produces(
    kind: OutputEstimatorKind, at_least: int
) -> None:
    estimator = OutputEstimator(256, kind)
    assert estimator.estimate(request(1_000, 1)) == 1, "nothing is known of its past"
    estimator.learn(A, 500)
    assert estimator.estimate(request(1_000, 1)) == at_least
    assert estimator.estimate(request(1_000, 300)) == 300
    assert estimator.estimate(request(100, 1)) == min(at_least, 100), "its limit holds all the same"


def test_an_unknown_tenant_gets_the_default_within_the_limit() -> None:
    assert OutputEstimator(256).estimate(request(1_000)) == 256
    assert OutputEstimator(256).estimate(request(64)) == 64


def test_the_mean_follows_what_was_produced_and_forgets() -> None:
    estimator = OutputEstimator(256)
    for _ in range(100):
        estimator.learn(A, 10)
    assert estimator.estimate(request(1_000)) == 10
    for _ in range(100):
        estimator.learn(A, 500)
    assert 490 <= estimator.estimate(request(1_000)) <= 500
    estimator.forget(A)
    assert estimator.estimate(request(1_000)) == 256


KINDS = list(OutputEstimatorKind)


def learned(kind: OutputEstimatorKind, *lengths: int) -> OutputEstimator:
    estimator = OutputEstimator(256, kind)
    for tokens in lengths:
        estimator.learn(A, tokens)
    return estimator


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_asks_the_client_first_and_stays_within_one_and_the_limit(kind: OutputEstimatorKind) -> None:
    estimator = learned(kind, 20, 40)
    assert estimator.estimate(request(1_000, 30)) == 30
    assert estimator.estimate(request(20, 30)) == 20
    assert OutputEstimator(256, kind).estimate(request(1_000, 0)) == 1
    assert 1 <= estimator.estimate(request(7)) <= 7
    assert learned(kind, 0).estimate(request(7)) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_learns_of_each_tenant_apart_and_forgets_it(kind: OutputEstimatorKind) -> None:
    estimator = OutputEstimator(256, kind)
    before = estimator.estimate(request(1_000))
    for tokens in range(50):
        estimator.learn(B, tokens)
    assert estimator.estimate(request(1_000)) == before == (1 if kind is OutputEstimatorKind.ZERO else 256)
    estimator.forget(B)
    assert not len(estimator)
    assert not estimator._latest


def test_zero_books_the_one_token_of_any_answer_whatever_came_before() -> None:
    estimator = learned(OutputEstimatorKind.ZERO, *[900] * 50)
    assert estimator.estimate(request(1_000)) == 1
    assert estimator.learned() == ()


def test_the_decayed_maximum_is_reached_at_once_and_forgotten_slowly() -> None:
    estimator = learned(OutputEstimatorKind.DECAYED_MAX, 10, 640, 10)
    assert estimator.estimate(request(1_000)) == 600
    for _ in range(10):
        estimator.learn(A, 10)
    assert 300 < estimator.estimate(request(1_000)) < 330
    for _ in range(100):
        estimator.learn(A, 10)
    assert estimator.estimate(request(1_000)) == 10


@pytest.mark.parametrize(
    ("lengths", "p75"),
    [((7,), 7), ((1, 2), 2), ((4, 3, 2, 1), 3), ((1, 2, 3, 4, 5), 4), ((9, 9, 1, 9, 9, 9, 9, 9), 9)],
)
def test_the_p75_is_the_nearest_rank(lengths: tuple[int, ...], p75: int) -> None:
    assert learned(OutputEstimatorKind.P75, *lengths).estimate(request(1_000)) == p75


def test_the_p75_is_of_the_latest_lengths_alone_and_keeps_no_more() -> None:
    seed = 11
    rng = random.Random(seed)
    estimator, lengths = OutputEstimator(256, OutputEstimatorKind.P75), []
    for _ in range(500):
        lengths.append(rng.choice([1, 5, 5, rng.randrange(1, 2_000)]))
        estimator.learn(A, lengths[-1])
        latest = sorted(lengths[-LATEST_KEPT_MAX:])
        at_most = [each for each in latest if 4 * sum(one <= each for one in latest) >= 3 * len(latest)]
        assert estimator.estimate(request(10_000)) == at_most[0], f"seed {seed}, after {len(lengths)}"
    assert len(estimator._latest[A].by_time) == len(estimator._latest[A].by_size) == LATEST_KEPT_MAX


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_learned_comes_back_and_goes_on_as_before(kind: OutputEstimatorKind) -> None:
    estimator = learned(kind, *range(1, 60))
    heir = OutputEstimator(256, kind)
    heir.restore(estimator.learned())
    assert heir.learned() == estimator.learned()
    for tokens in (500, 3, 3, 40):
        estimator.learn(A, tokens)
        heir.learn(A, tokens)
        assert heir.estimate(request(1_000)) == estimator.estimate(request(1_000))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind is not OutputEstimatorKind.ZERO])
@pytest.mark.parametrize("before", [kind for kind in KINDS if kind is not OutputEstimatorKind.ZERO])
def test_another_kind_begins_with_the_estimate_of_the_kind_before(
    kind: OutputEstimatorKind, before: OutputEstimatorKind
) -> None:
    estimator = learned(before, 40, 40, 40)
    heir = OutputEstimator(256, kind)
    heir.restore(estimator.learned())
    assert heir.estimate(request(1_000)) == 40


def test_idle_time_does_not_lower_the_cost_rate() -> None:
    rate = CostRate(1_000.0)
    rate.busy_from(0)
    for second in range(1, 61):
        rate.add(5_000.0, second * S)
    assert rate.per_s == pytest.approx(5_000.0, rel=0.06)
    rate.idle_from(60 * S)
    rate.busy_from(3_600 * S)
    rate.add(5_000.0, 3_601 * S)
    assert rate.per_s == pytest.approx(5_000.0, rel=0.06)


def test_busy_time_decays_while_it_passes_in_one_step_or_in_many() -> None:
    once, often = CostRate(1_000.0), CostRate(1_000.0)
    for rate in (once, often):
        rate.busy_from(0)
    for second in range(1, 600):
        often.add(0.0, second * S)
    for rate in (once, often):
        rate.add(5_000.0, 600 * S)
    assert once.per_s == pytest.approx(often.per_s)
    for rate in (once, often):
        for second in range(601, 631):
            rate.add(5_000.0, second * S)
    assert once.per_s == pytest.approx(5_000.0, rel=0.1), "a long leg is forgotten as soon as many short ones"


def test_the_retry_time_is_the_gap_between_grants_within_bounds() -> None:
    rate = ServiceRate()
    assert rate.retry_after_ms(700) == 700
    for second in range(5):
        rate.granted(second * S)
    assert rate.retry_after_ms(700) == 1_000
    assert rate.retry_after_ms(700, places=1_000) == 60_000


def test_before_any_leg_has_ended_a_backlog_is_reckoned_by_the_first_charge() -> None:
    rate = CostRate(10_000.0)
    assert rate.backlog_ns(4) == 0
    rate.dispatched(500.0)
    rate.dispatched(9_000.0)
    assert rate.backlog_ns(4) == 200_000_000


def test_the_cost_rate_stays_above_zero_however_long_nothing_ends() -> None:
    rate = CostRate(10_000.0)
    rate.busy_from(0)
    rate.idle_from(7_150 * 10**9)
    assert rate.per_s == COST_RATE_MIN_PER_S
    assert rate.backlog_ns(3) == 0


LEARNING = [kind for kind in KINDS if kind is not OutputEstimatorKind.ZERO]


@pytest.mark.parametrize("kind", LEARNING)
def test_what_was_broken_off_raises_what_is_known_and_never_lowers_it(kind: OutputEstimatorKind) -> None:
    estimator, draw = learned(kind, 100, 100, 100), random.Random(7)
    for _ in range(300):
        before = estimator.estimate(request(10_000))
        estimator.learn_at_least(A, draw.randrange(400))
        assert estimator.estimate(request(10_000)) >= before
    assert estimator.estimate(request(10_000, 1)) >= 100, "what is produced at least is believed"
    estimator.learn_at_least(B, 0)
    assert len(estimator) == 1, "nothing was produced"


@pytest.mark.parametrize("kind", LEARNING)
def test_who_has_finished_nothing_is_estimated_by_the_default_or_what_it_produced_at_least(
    kind: OutputEstimatorKind,
) -> None:
    estimator = OutputEstimator(256, kind)
    estimator.learn_at_least(A, 100)
    assert estimator.estimate(request(1_000)) == 256, "a lower bound lowers nothing"
    assert estimator.estimate(request(1_000, 1)) == 50, "and yet a word far below it is not believed"
    heir = OutputEstimator(256, kind)
    heir.restore(estimator.learned())
    assert heir.learned() == estimator.learned()
    assert heir.estimate(request(1_000)) == 256
    for _ in range(10):
        estimator.learn_at_least(A, 600)
    assert estimator.estimate(request(1_000)) > 256
    heir.learn(A, 60)
    assert heir.estimate(request(1_000)) < 256, "it has finished something"
    estimator.forget(A)
    assert estimator.estimate(request(1_000)) == 256
    assert not len(estimator)
    assert not estimator._unfinished


def test_with_zero_nothing_is_learned_of_what_was_broken_off() -> None:
    estimator = OutputEstimator(256, OutputEstimatorKind.ZERO)
    estimator.learn_at_least(A, 900)
    assert estimator.estimate(request(1_000, 1)) == 1
    assert estimator.learned() == ()
