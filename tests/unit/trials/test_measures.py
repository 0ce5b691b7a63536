"""Measures of a trial, each on a case worked out by hand."""

import math

import pytest

from evenhand.core.facts import CostWeights
from evenhand.policies.policy import Arrival
from evenhand.simulation.trials.measures import (
    COST,
    VTC_COST,
    jain_index,
    measure,
    percentile,
    service_difference,
)
from evenhand.simulation.trials.record import Outcome, TenantSeries, TrialResult
from evenhand.simulation.trials.workload import TenantPlan

S = 1_000_000_000
UNIT = CostWeights(1.0, 1.0, 0.0, 0.0)


def series(
    plan: TenantPlan, prompt: list[int], backlogged: list[int], cached: list[int] | None = None
) -> TenantSeries:
    """A tenant whose prompt tokens so far were these at each sample."""
    made = TenantSeries(plan)
    for at, tokens in enumerate(prompt):
        made.prompt.append(tokens)
        made.cached.append(cached[at] if cached else 0)
        made.output.append(0)
        made.backlogged.append(backlogged[at])
    return made


def result(*tenants: TenantSeries, outcomes: tuple[Outcome, ...] = (), ended_ns: int = 10 * S) -> TrialResult:
    by_name = {one.plan.name: one for one in tenants}
    return TrialResult("p", "w", 1, outcomes, by_name, S, ended_ns, 0, 0)


def test_difference_is_the_widest_range_while_both_are_backlogged() -> None:
    a = series(TenantPlan("a"), [10, 20, 30, 100, 110], [1, 1, 1, 1, 0])
    b = series(TenantPlan("b"), [0, 30, 40, 40, 500], [1, 1, 1, 0, 1])
    # a − b is 0, 10, −10, −10 over the three seconds that both wait; what comes later is no matter.
    assert service_difference(result(a, b), UNIT).whole == 20


def test_difference_is_by_weight_and_by_what_was_cached() -> None:
    a = series(TenantPlan("a", weight=2.0), [100, 200], [1, 1], cached=[100, 200])
    b = series(TenantPlan("b"), [10, 20], [1, 1])
    assert service_difference(result(a, b), COST).whole == pytest.approx(abs(0.1 * 200 / 2 - 20))
    assert service_difference(result(a, b), VTC_COST).whole == pytest.approx(200 / 2 - 20)


def test_windowed_difference_forgets_what_is_longer_ago() -> None:
    steady = series(TenantPlan("a"), [10 * k for k in range(1, 11)], [1] * 10)
    none = series(TenantPlan("b"), [0] * 10, [1] * 10)
    difference = service_difference(result(steady, none), UNIT, window_s=3.0)
    assert (difference.whole, difference.window) == (100, 30)


def test_who_never_waits_with_another_makes_no_difference() -> None:
    a = series(TenantPlan("a"), [100, 200], [1, 0])
    b = series(TenantPlan("b"), [0, 0], [0, 1])
    assert service_difference(result(a, b), UNIT).whole == 0


def test_jain_index_of_even_and_of_one_sided_service() -> None:
    a, b = (series(TenantPlan(name), [10, 20], [1, 1]) for name in "ab")
    assert jain_index(result(a, b), UNIT) == pytest.approx(1.0)
    everything = series(TenantPlan("a"), [10, 20], [1, 1])
    nothing = series(TenantPlan("b"), [0, 0], [1, 1])
    assert jain_index(result(everything, nothing), UNIT) == pytest.approx(0.5)
    twice = series(TenantPlan("a", weight=2.0), [20, 40], [1, 1])
    assert jain_index(result(twice, b), UNIT) == pytest.approx(1.0)


def test_percentiles_are_nearest_rank() -> None:
    values = [float(k) for k in range(1, 101)]
    assert [percentile(values, share) for share in (0.5, 0.99, 1.0)] == [50.0, 99.0, 100.0]
    assert percentile([7.0], 0.99) == 7.0
    assert math.isnan(percentile([], 0.5))


def test_throughput_is_over_the_drain_and_hits_over_what_was_served() -> None:
    outcomes = []
    for number in range(4):
        arrival = Arrival(number, 0, "a", (), 100, 50, 50, well_behaved=number > 0)
        outcome = Outcome(arrival)
        outcome.first_token_ns, outcome.finished_ns = (number + 1) * S, 10 * S
        outcome.cached_tokens, outcome.output_tokens = 60, 50
        outcomes.append(outcome)
    outcomes[3].cancelled = True
    measures = measure(result(series(TenantPlan("a"), [], []), outcomes=tuple(outcomes)))
    assert (measures.served, measures.cancelled) == (3, 1)
    assert measures.requests_per_s == pytest.approx(0.3)
    assert measures.tokens_per_s == pytest.approx(3 * 150 / 10)
    assert measures.hit_rate == pytest.approx(0.6)
    assert measures.cost_per_s == pytest.approx((3 * 40 + 0.1 * 3 * 60 + 2 * 3 * 50) / 10)
    assert measures.everyone.p99_s == 4.0
