"""The usual case: one policy with its settings on one workload, and the figures of one trial.

``Scene`` is a workload's plan, a frozen dataclass, with the function that builds it from a seed. Figures of a
tenant are there for those that a case asks for by name. A request that never got its first token counts as an
endless wait in ``well_behaved_p99_s``, so that refusing requests is no way to look fast.
"""

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from evenhand.core.errors import InvalidInput
from evenhand.policies.table import make_policy
from evenhand.simulation.experiments.experiment import Cell, Measured
from evenhand.simulation.trials.measures import COST, measure, percentile
from evenhand.simulation.trials.record import Outcome, TrialResult
from evenhand.simulation.trials.settings import (
    FOREVER_NS,
    Intervention,
    MapFaults,
    TrialSettings,
    WorkerFailure,
)
from evenhand.simulation.trials.trial import run_trial
from evenhand.simulation.trials.workload import Workload

NS_PER_S = 1_000_000_000
Settings = tuple[tuple[str, object], ...]


@dataclass(frozen=True, slots=True)
class Scene:
    """A workload, to be built from a seed."""

    name: str
    build: Callable[[Any, int], Workload]
    plan: Any
    """A frozen dataclass."""

    def __repr__(self) -> str:
        return f"{self.name}: {self.build.__name__}({self.plan!r})"


@dataclass(frozen=True, slots=True)
class TrialCase:
    """One policy on one scene."""

    policy: str
    scene: Scene
    settings: Settings = ()
    workers: int = 4
    map_faults: MapFaults = field(default_factory=MapFaults)
    failures: tuple[WorkerFailure, ...] = ()
    until_s: float = 0.0
    """Stop here; what has no first token by then waits without end. 0: when everything has ended."""
    tenants: tuple[str, ...] = ()
    """Tenants whose own figures are wanted."""


def trial_cell(case: TrialCase, label: str = "") -> Cell:
    """A cell with its usual label: scene, policy, settings."""
    return Cell(label or label_of(case.scene.name, case.policy, case.settings), case, (case.policy,))


def label_of(scene: str, policy: str, settings: Settings = ()) -> str:
    """``scene/policy key=value …``."""
    return f"{scene}/{row_name(policy, settings)}"


def row_name(policy: str, settings: Settings = ()) -> str:
    """How a policy and its settings stand in a table."""
    return " ".join([policy, *(f"{key}={value}" for key, value in settings)])


@functools.lru_cache(maxsize=3)
def built(scene: Scene, seed: int) -> Workload:
    """The workload of a seed; the last few are kept, as several policies run on each."""
    workload: Workload = scene.build(scene.plan, seed)
    return workload


def run_case(case: TrialCase, seed: int, interventions: Iterable[Intervention] = ()) -> TrialResult:
    """Run it. Seeds of the policy and of the faults follow the workload's."""
    workload = built(case.scene, seed)
    until_ns = int(case.until_s * NS_PER_S) or FOREVER_NS
    settings = TrialSettings(
        case.workers, seed, case.map_faults, case.failures, tuple(interventions), NS_PER_S, until_ns
    )
    return run_trial(make_policy(case.policy, dict(case.settings), seed), workload, settings)


def measure_case(case: TrialCase, seed: int) -> Measured:
    """Run it, and its figures."""
    return figures(run_case(case, seed), case.tenants)


def figures(result: TrialResult, tenants: Iterable[str] = ()) -> dict[str, float]:
    """What every experiment shows of a trial, and each named tenant's own figures."""
    seen = measure(result)
    told = {
        "requests_per_s": seen.requests_per_s,
        "tokens_per_s": seen.tokens_per_s,
        "output_tokens_per_s": seen.output_tokens_per_s,
        "cost_per_s": seen.cost_per_s,
        "hit_rate": seen.hit_rate,
        "well_behaved_p50_s": wait_s(_of(result, _good(result)), 0.5),
        "well_behaved_p99_s": wait_s(_of(result, _good(result)), 0.99),
        "everyone_p99_s": wait_s(_of(result, set(result.series)), 0.99),
        "tokens_difference": seen.tokens_difference.whole,
        "tokens_difference_60s": seen.tokens_difference.window,
        "cost_difference": seen.cost_difference.whole,
        "cost_difference_60s": seen.cost_difference.window,
        "jain": seen.jain,
        "served": seen.served,
        "cancelled": seen.cancelled,
        "refused": seen.refused,
        "duration_s": seen.duration_s,
        "preemptions": seen.preemptions,
    }
    for tenant in tenants:
        told |= {f"{tenant}_{name}": value for name, value in tenant_figures(result, tenant).items()}
    return told


def tenant_figures(result: TrialResult, tenant: str) -> Mapping[str, float]:
    """One tenant's waits, what it was served, and the cost of that while anybody still arrived."""
    if tenant not in result.series:
        raise InvalidInput(f"The workload {result.workload} has no tenant {tenant!r}.")
    mine = _of(result, {tenant})
    return {
        "p50_s": wait_s(mine, 0.5),
        "p99_s": wait_s(mine, 0.99),
        "served": sum(outcome.served for outcome in mine),
        "cost_in_time": cost_until(result, tenant, result.arrivals_ended_ns),
    }


def cost_until(result: TrialResult, tenant: str, until_ns: int) -> float:
    """Cost tokens of service that a tenant had until a moment, as of the last sample before it."""
    series = result.series[tenant]
    at = min(len(series.prompt), until_ns // result.sample_ns) - 1
    if at < 0:
        return 0.0
    prompt, cached, output = series.prompt[at], series.cached[at], series.output[at]
    return COST.uncached * (prompt - cached) + COST.cached * cached + COST.output * output


def wait_s(outcomes: Iterable[Outcome], share: float) -> float:
    """Percentile of times to first token in seconds; without one by fault of the policy, an endless wait.

    A client that gave up before its first token waited at least so long, and counts with that.
    """
    waits = []
    for outcome in outcomes:
        if outcome.ttft_ns is not None:
            waits.append(outcome.ttft_ns / NS_PER_S)
        elif outcome.cancelled:
            waits.append((outcome.finished_ns - outcome.arrival.at_ns) / NS_PER_S)
        else:
            waits.append(math.inf)
    return percentile(sorted(waits), share)


def _good(result: TrialResult) -> set[str]:
    return {name for name, series in result.series.items() if series.plan.well_behaved}


def _of(result: TrialResult, tenants: set[str]) -> list[Outcome]:
    return [outcome for outcome in result.outcomes if outcome.arrival.tenant in tenants]
