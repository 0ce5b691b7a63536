"""How a trial is run, whatever the policy and the workload: workers, faults, interventions, samples."""

from collections.abc import Callable
from dataclasses import dataclass, field

from evenhand.core.errors import InvalidInput
from evenhand.policies.policy import Policy

FOREVER_NS = 1 << 62


@dataclass(frozen=True, slots=True)
class MapFaults:
    """How the policy's map lags behind the engines. Defaults: not at all."""

    lag_ns: int = 0
    lost: float = 0.0
    """Share of batches that never arrive."""
    doubled: float = 0.0
    """Share of batches that arrive twice, the second time a lag later."""
    snapshot_after_ns: int = 1_000_000_000
    """A lost batch is healed by a snapshot so long after; 0: never."""


@dataclass(frozen=True, slots=True)
class WorkerFailure:
    """A worker dies with all it had, and may come back with an empty cache."""

    at_ns: int
    worker: int
    """Its number, from 0."""
    back_after_ns: int = 0
    """0: it stays away."""


@dataclass(frozen=True, slots=True)
class Intervention:
    """Something done to the policy from outside: an administrator's change, a failover."""

    at_ns: int
    act: Callable[[Policy, int], None]


@dataclass(frozen=True, slots=True)
class TrialSettings:
    """How a trial is run; the workload says on what."""

    workers: int = 4
    seed: int = 0
    """Of what is random about the faults."""
    map_faults: MapFaults = field(default_factory=MapFaults)
    failures: tuple[WorkerFailure, ...] = ()
    interventions: tuple[Intervention, ...] = ()
    sample_ns: int = 1_000_000_000
    """How often each tenant's service is written down; 0: never."""
    until_ns: int = FOREVER_NS
    """Stop here at the latest; by default when everything has ended."""


def check_settings(settings: TrialSettings) -> None:
    """``InvalidInput`` for what makes no sense, in one sentence that names it."""
    if settings.workers < 1:
        raise InvalidInput(f"A trial has {settings.workers} workers, but must have at least 1.")
    faults = settings.map_faults
    for name, share in (("lost", faults.lost), ("doubled", faults.doubled)):
        if not 0.0 <= share <= 1.0:
            raise InvalidInput(f"The share of map batches {name} is {share}, but must lie between 0 and 1.")
    if faults.lag_ns < 0:
        raise InvalidInput(f"The map's lag is {faults.lag_ns} ns, but cannot be negative.")
    for failure in settings.failures:
        if not 0 <= failure.worker < settings.workers:
            last = settings.workers - 1
            raise InvalidInput(f"Worker {failure.worker} is to fail, but the workers are 0 … {last}.")
