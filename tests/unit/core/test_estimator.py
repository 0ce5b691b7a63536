"""What is learned from settled legs."""

import pytest

from evenhand.core.estimator import CostRate, OutputEstimator, ServiceRate
from evenhand.core.facts import Request
from evenhand.core.ids import RequestId, TenantId

S = 1_000_000_000
A = TenantId("a")


def request(limit: int, expected: int | None = None) -> Request:
    return Request(RequestId("r"), A, (), 10, limit, expected)


def test_the_clients_own_estimate_wins_within_the_limit() -> None:
    estimator = OutputEstimator(256)
    estimator.learn(A, 100)
    assert estimator.estimate(request(1_000, 30)) == 30
    assert estimator.estimate(request(20, 30)) == 20
    assert estimator.estimate(request(20, 0)) == 1


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


def test_the_retry_time_is_the_gap_between_grants_within_bounds() -> None:
    rate = ServiceRate()
    assert rate.retry_after_ms(700) == 700
    for second in range(5):
        rate.granted(second * S)
    assert rate.retry_after_ms(700) == 1_000
    assert rate.retry_after_ms(700, places=1_000) == 60_000
