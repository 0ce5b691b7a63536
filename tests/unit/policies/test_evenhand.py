"""Evenhand's adapter: the core decides, nothing is rewritten, and what happens is told to it."""

from tests.unit.policies.fleet import arrival, holds, join, send, worker_id

from evenhand.core.facts import RateLimits, TenantSpec, Usage
from evenhand.core.ids import TenantId
from evenhand.policies.evenhand import Evenhand
from evenhand.policies.table import make_policy
from evenhand.simulation.trials.settings import Intervention, MapFaults, TrialSettings
from evenhand.simulation.trials.trial import run_trial
from evenhand.simulation.trials.workloads import HotTenant, hot_tenant

SHORT = HotTenant(duration_s=4.0, output_tokens=60)


def evenhand(**settings: object) -> Evenhand:
    policy = make_policy("evenhand", settings)
    assert isinstance(policy, Evenhand)
    return policy


def test_it_follows_the_map_and_balances_its_ledger() -> None:
    policy = evenhand()
    join(policy, 2)
    holds(policy, 1, (1, 2, 3))
    one = arrival(1, blocks=(1, 2, 3, 4), output_max=50)
    assert send(policy, one) == worker_id(1)
    assert policy.ticket_of(one) is not None
    policy.first_token(one, worker_id(1), 48, 10_000_000)
    policy.finished(one, worker_id(1), Usage(64, 48, 10), 20_000_000)
    assert policy.ticket_of(one) is None
    (tenant,) = policy.scheduler.status(20_000_000).tenants
    assert tenant.tickets_open == 0
    assert tenant.cost_outstanding == 0


def test_what_a_lost_worker_left_undone_is_placed_again() -> None:
    policy = evenhand()
    join(policy, 2)
    holds(policy, 1, (1, 2, 3))
    one = arrival(1, blocks=(1, 2, 3, 4))
    assert send(policy, one) == worker_id(1)
    policy.worker_lost(worker_id(1), [one], 5)
    assert [placed.worker_id for placed in policy.place(5)] == [worker_id(0)]


def test_refusals_come_out() -> None:
    policy = evenhand()
    join(policy, 1)
    policy.tenant_changed(TenantSpec(TenantId("a"), rate_limits=RateLimits(requests_per_minute=60)), 0)
    for number in range(5):
        policy.submit(arrival(number), 0)
    assert [placed.arrival.arrival_id for placed in policy.place(0)] == [0]
    assert [refused.arrival_id for refused in policy.take_refused()] == [1, 2, 3, 4]


def test_refused_arrivals_end_in_a_trial() -> None:
    def limit(policy: object, now_ns: int) -> None:
        assert isinstance(policy, Evenhand)
        policy.tenant_changed(TenantSpec(TenantId("hot"), rate_limits=RateLimits(requests_per_minute=60)), now_ns)

    settings = TrialSettings(interventions=(Intervention(0, limit),))
    result = run_trial(evenhand(), hot_tenant(SHORT, 1), settings)
    refused = [outcome for outcome in result.outcomes if outcome.refused]
    assert refused
    assert {outcome.arrival.tenant for outcome in refused} == {"hot"}
    assert all(outcome.finished_ns >= 0 for outcome in result.outcomes)


def test_it_runs_without_events_and_with_lagging_lost_and_doubled_ones() -> None:
    workload = hot_tenant(SHORT, 2)
    exact = run_trial(evenhand(), workload)
    for policy, faults in (
        (evenhand(sends_events=False), MapFaults()),
        (evenhand(), MapFaults(lag_ns=500_000_000, lost=0.2, doubled=0.2)),
    ):
        result = run_trial(policy, workload, TrialSettings(map_faults=faults))
        assert all(outcome.served for outcome in result.outcomes)
        assert result.ended_ns < 3 * exact.ended_ns


def test_usage_so_far_can_be_told() -> None:
    policy = evenhand(renewed_after_ms=200)
    assert policy.wants_progress
    result = run_trial(policy, hot_tenant(SHORT, 3))
    assert all(outcome.served for outcome in result.outcomes)
