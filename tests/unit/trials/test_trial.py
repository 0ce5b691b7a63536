"""The driver of policy experiments: every arrival ends once, books agree, faults do what they say."""

import pytest

from evenhand.engine.batching import Engine
from evenhand.engine.limits import EngineLimits
from evenhand.policies.policy import Arrival
from evenhand.policies.table import POLICIES, make_policy
from evenhand.simulation.trials.record import TrialResult
from evenhand.simulation.trials.settings import MapFaults, TrialSettings, WorkerFailure
from evenhand.simulation.trials.trial import run_trial
from evenhand.simulation.trials.workload import TenantPlan, Workload
from evenhand.simulation.trials.workloads import HotTenant, hot_tenant

SMALL = HotTenant(duration_s=4.0)
TIGHT = HotTenant(duration_s=4.0, kv_blocks=280, hot_per_second=12.0, other_per_second=4.0, output_tokens=900)
"""So little memory that engines preempt."""


def books_agree(result: TrialResult) -> None:
    """What was booked to tenants as it happened is what the requests got."""
    for name, series in result.series.items():
        mine = [outcome for outcome in result.outcomes if outcome.arrival.tenant == name]
        assert series.output_tokens == sum(outcome.output_tokens for outcome in mine)
        assert series.cached_tokens == sum(outcome.cached_tokens for outcome in mine)
        assert series.waiting == 0


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_every_arrival_is_served_once_and_in_full(name: str) -> None:
    workload = hot_tenant(SMALL, 3)
    result = run_trial(make_policy(name), workload)
    assert len(result.outcomes) == len(workload.arrivals)
    assert all(outcome.served and outcome.legs == 1 for outcome in result.outcomes)
    assert all(outcome.output_tokens == outcome.arrival.output_tokens for outcome in result.outcomes)
    assert all((outcome.ttft_ns or 0) > 0 for outcome in result.outcomes)
    books_agree(result)


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_books_agree_through_preemption_loss_and_cancels(name: str) -> None:
    workload = hot_tenant(TIGHT, 4)
    impatient = tuple(
        Arrival(
            a.arrival_id,
            a.at_ns,
            a.tenant,
            a.block_names,
            a.prompt_tokens,
            a.output_tokens_max,
            a.output_tokens,
            well_behaved=a.well_behaved,
            cancel_after_ns=(a.arrival_id % 11) * 300_000_000 if a.arrival_id % 3 == 0 else None,
        )
        for a in workload.arrivals
    )
    workload = Workload("impatient", workload.tenants, impatient, workload.limits, workload.step_time)
    failures = (WorkerFailure(1_500_000_000, 0, 1_000_000_000), WorkerFailure(2_000_000_000, 3, 1_000_000_000))
    settings = TrialSettings(failures=failures)
    result = run_trial(make_policy(name), workload, settings)
    assert all(outcome.finished_ns >= outcome.arrival.at_ns for outcome in result.outcomes)
    assert any(outcome.cancelled for outcome in result.outcomes)
    assert any(outcome.legs == 2 for outcome in result.outcomes)
    books_agree(result)


def test_engines_preempt_and_books_agree() -> None:
    result = run_trial(make_policy("fcfs-round-robin"), hot_tenant(TIGHT, 4))
    assert result.preemptions > 0
    books_agree(result)


def test_one_request_takes_what_its_steps_take() -> None:
    limits = EngineLimits()
    arrival = Arrival(0, 5_000, "t", (), prompt_tokens=100, output_tokens_max=10, output_tokens=10)
    workload = Workload("one", (TenantPlan("t"),), (arrival,), limits)
    (outcome,) = run_trial(make_policy("fcfs-least-load"), workload, TrialSettings(workers=1)).outcomes
    first, later = workload.step_time.duration_ns(100, 1), workload.step_time.duration_ns(0, 1)
    assert outcome.ttft_ns == first
    assert outcome.finished_ns == 5_000 + first + 9 * later


def test_least_load_evens_what_round_robin_does_not() -> None:
    """Long and short in turn: round robin over two workers sends all the long ones to one."""
    arrivals = tuple(Arrival(i, i * 50_000_000, "t", (), 100, 400, 400 if i % 2 else 4) for i in range(200))
    workload = Workload("alternating", (TenantPlan("t"),), arrivals, EngineLimits(sequences_max=8))
    ended = {
        name: run_trial(make_policy(name), workload, TrialSettings(workers=2)).ended_ns
        for name in ("fcfs-round-robin", "fcfs-least-load")
    }
    assert ended["fcfs-least-load"] < 0.8 * ended["fcfs-round-robin"]


def test_impossible_settings_are_named() -> None:
    workload = hot_tenant(SMALL, 1)
    for settings, words in (
        (TrialSettings(workers=0), "0 workers"),
        (TrialSettings(failures=(WorkerFailure(1, 9),)), "Worker 9"),
        (TrialSettings(map_faults=MapFaults(lost=2.0)), "lost is 2.0"),
    ):
        with pytest.raises(Exception, match=words):
            run_trial(make_policy("fcfs-round-robin"), workload, settings)


@pytest.mark.parametrize("name", ["fcfs-least-load", "longest-prefix", "vtc-affine", "d2lpm", "evenhand"])
def test_skipping_ahead_changes_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many decode steps in one go, or one by one: the same fate for every request, to the nanosecond."""

    def fates() -> list[tuple[int, int, int, int, int]]:
        outcomes = run_trial(make_policy(name), hot_tenant(SMALL, 6)).outcomes
        return [(o.worker, o.placed_ns, o.first_token_ns, o.finished_ns, o.cached_tokens) for o in outcomes]

    skipping = fates()
    monkeypatch.setattr(Engine, "advance", lambda engine, duration_ns_max: engine.step())
    assert fates() == skipping


def test_skipping_ahead_changes_nothing_for_engines_in_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two engines begin together; the short answers of one make room for what the other could have had."""
    outputs = [40, 400, 40, 400, 400, 40, 400, 40, *[100] * 12]
    arrivals = [Arrival(n, 0, "t", (), 64, 400, output) for n, output in enumerate(outputs)]
    limits = EngineLimits(sequences_max=4, model_tokens_max=4_096)
    workload = Workload("burst", (TenantPlan("t"),), tuple(arrivals), limits)

    def fates() -> list[tuple[int, int, int]]:
        outcomes = run_trial(make_policy("vtc"), workload, TrialSettings(workers=2)).outcomes
        return [(o.worker, o.placed_ns, o.finished_ns) for o in outcomes]

    skipping = fates()
    monkeypatch.setattr(Engine, "advance", lambda engine, duration_ns_max: engine.step())
    assert fates() == skipping
