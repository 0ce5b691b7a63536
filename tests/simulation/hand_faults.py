"""One fault put into the product by hand: what brings it out, and what the violation says."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from evenhand.simulation.system.faults import parse_faults
from evenhand.simulation.system.system import Options, Result, simulate

Break = Callable[[pytest.MonkeyPatch], None]
REQUESTS = 120


@dataclass(frozen=True)
class Case:
    """A fault, the seeds that bring it out, and words of the violation."""

    name: str
    put_in: Break
    says: str
    faults: str = "none"
    seeds: tuple[int, ...] = (1,)
    workload: str = "mixed"
    requests: int = REQUESTS


def run_until_violated(case: Case) -> Result | None:
    """The first of its seeds that is violated; None where all hold."""
    for seed in case.seeds:
        result = simulate(Options(seed, case.requests, parse_faults(case.faults), case.workload))
        if result.violations:
            return result
    return None


def check_noticed(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault is noticed for what it is."""
    case.put_in(monkeypatch)
    result = run_until_violated(case)
    assert result is not None, f"{case.name}: no seed of {case.seeds} noticed"
    assert any(case.says in sentence for sentence in result.violations), result.violations
