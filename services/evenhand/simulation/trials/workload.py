"""A workload: what is asked for, by whom, and of which fleet. The same for every policy that is tried on it.

Open loop: an arrival does not wait for an earlier answer, so a slow policy cannot make its own load lighter.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from evenhand.core.errors import InvalidInput
from evenhand.engine.limits import EngineLimits, StepTime
from evenhand.policies.policy import Arrival

ARRIVALS_MAX = 2_000_000
"""Requests of one workload."""
AT_NS_MAX = 1_000_000 * 1_000_000_000
"""Latest arrival, and the longest patience of one: some eleven days. What happens meanwhile is sampled."""


@dataclass(frozen=True, slots=True)
class TenantPlan:
    """A tenant of a workload."""

    name: str
    weight: float = 1.0
    well_behaved: bool = True
    """It asks for no more than its share."""

    def __post_init__(self) -> None:
        if not 0.0 < self.weight < math.inf:
            raise InvalidInput(f"Tenant {self.name} has weight {self.weight}; it must be above 0 and finite.")


@dataclass(frozen=True, slots=True)
class Workload:
    """Arrivals in order of time and id, and the engines they are meant for."""

    name: str
    tenants: tuple[TenantPlan, ...]
    arrivals: Sequence[Arrival]
    limits: EngineLimits = field(default_factory=EngineLimits)
    step_time: StepTime = field(default_factory=StepTime)

    def __post_init__(self) -> None:
        check_arrivals(len(self.arrivals))
        known = {tenant.name for tenant in self.tenants}
        if len(known) < len(self.tenants):
            raise InvalidInput(f"A tenant of {self.name} is named twice.")
        ids: set[int] = set()
        last = (-math.inf, 0)
        for arrival in self.arrivals:
            if arrival.tenant not in known:
                raise InvalidInput(
                    f"Arrival {arrival.arrival_id} of {self.name} has no tenant {arrival.tenant!r}."
                )
            if (arrival.at_ns, arrival.arrival_id) <= last:
                raise InvalidInput(f"Arrival {arrival.arrival_id} of {self.name} is out of order.")
            if arrival.arrival_id in ids:
                raise InvalidInput(f"Arrival {arrival.arrival_id} of {self.name} comes twice.")
            ids.add(arrival.arrival_id)
            last = (arrival.at_ns, arrival.arrival_id)
            self._check(arrival)

    def _check(self, arrival: Arrival) -> None:
        which = f"Arrival {arrival.arrival_id} of {self.name}"
        if not 0 <= arrival.at_ns <= AT_NS_MAX or not 0 <= (arrival.cancel_after_ns or 0) <= AT_NS_MAX:
            raise InvalidInput(f"{which} has an impossible time.")
        if not 0.0 < arrival.weight < math.inf:
            raise InvalidInput(f"{which} has weight {arrival.weight}; it must be above 0 and finite.")
        if not 1 <= arrival.output_tokens <= arrival.output_tokens_max or arrival.prompt_tokens < 1:
            raise InvalidInput(f"{which} has impossible token counts.")
        if (arrival.output_tokens_expected or 0) < 0:
            raise InvalidInput(f"{which} expects {arrival.output_tokens_expected} output tokens.")
        if len(arrival.block_names) * self.limits.block_size > arrival.prompt_tokens:
            raise InvalidInput(f"{which} names more blocks than its prompt fills.")
        total = arrival.prompt_tokens + arrival.output_tokens_max
        if total > self.limits.model_tokens_max:
            raise InvalidInput(
                f"{which} may have {total} tokens, more than the engines' {self.limits.model_tokens_max}."
            )


def check_arrivals(count: float) -> None:
    """``InvalidInput`` if a workload of so many arrivals, there or expected, is too large to hold."""
    if count > ARRIVALS_MAX:
        raise InvalidInput(f"A workload has at most {ARRIVALS_MAX:,} arrivals, not about {count:,.0f}.")


def in_order(arrivals: list[Arrival]) -> tuple[Arrival, ...]:
    """By time, then tenant, then number; numbered anew in that order."""
    arrivals.sort(key=lambda arrival: (arrival.at_ns, arrival.tenant, arrival.arrival_id))
    return tuple(replace(arrival, arrival_id=number) for number, arrival in enumerate(arrivals))
