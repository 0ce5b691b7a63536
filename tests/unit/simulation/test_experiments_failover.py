"""A scheduler that fails over in a trial: what the successor knows, and what a trial shows of levels."""

import dataclasses

import pytest

from evenhand.policies.evenhand import Evenhand
from evenhand.policies.policy import Policy
from evenhand.simulation.experiments import stale
from evenhand.simulation.experiments.cases import TrialCase, run_case
from evenhand.simulation.experiments.levels import LEVELS, measure_levels
from evenhand.simulation.experiments.scenes import Crowd, Stream, scene
from evenhand.simulation.experiments.stale import Failover
from evenhand.simulation.trials.settings import Intervention

S = 1_000_000_000
BUSY = scene("busy", Crowd((Stream("a", 12.0), Stream("b", 40.0), Stream("c", 40.0)), duration_s=6.0))


def test_a_successor_knows_tickets_clocks_and_what_waits() -> None:
    failover = Failover()
    seen: list[tuple[dict[str, float], int, int]] = []

    def look(policy: Policy, now_ns: int) -> None:
        assert isinstance(policy, Evenhand)
        status = policy.scheduler.status(now_ns)
        clocks = {str(tenant.tenant_id): tenant.cost_got for tenant in status.tenants}
        open_tickets = sum(tenant.tickets_open for tenant in status.tenants)
        seen.append((clocks, open_tickets, sum(tenant.queue_length for tenant in status.tenants)))

    acts = [
        Intervention(2 * S, failover.take),
        Intervention(3 * S, look),
        Intervention(3 * S, failover.fail_over),
        Intervention(3 * S, look),
    ]
    result = run_case(TrialCase("evenhand", BUSY, workers=2), 5, acts)
    assert all(outcome.served for outcome in result.outcomes), "nobody is forgotten"
    (before, held, waiting), (after, still_held, still_waiting) = seen
    assert waiting > 0
    assert still_held >= held - 1, "tickets granted after the checkpoint are adopted"
    assert still_held + still_waiting >= held + waiting
    for tenant, cost in before.items():
        assert after[tenant] == pytest.approx(cost, rel=0.5), "clocks go on from the checkpoint"


def test_a_failover_case_is_a_failover() -> None:
    by_label = {cell.label: cell.case for cell in stale.cells()}
    assert by_label["no failover"].fails_at_s == ()
    assert len(by_label["three failovers"].fails_at_s) == 3
    lagging = by_label[stale.lag_label("evenhand", 5.0)]
    assert lagging.trial.map_faults.lag_ns == 5 * S


def test_weights_show_in_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evenhand.simulation.experiments.levels.UNTIL_S", 30.0)
    case = LEVELS[0]
    seen = measure_levels(case, 3)
    for tenant, due in case.due_early:
        assert seen[f"early {tenant}"] == pytest.approx(due, abs=0.06)
    even = dataclasses.replace(case, early=tuple(dataclasses.replace(spec, weight=1.0) for spec in case.early))
    assert measure_levels(even, 3)["early four"] == pytest.approx(1 / 3, abs=0.06)
