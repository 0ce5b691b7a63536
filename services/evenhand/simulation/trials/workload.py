"""A workload: what is asked for, by whom, and of which fleet. The same for every policy that is tried on it.

Open loop: an arrival does not wait for an earlier answer, so a slow policy cannot make its own load lighter.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from evenhand.core.errors import InvalidInput
from evenhand.engine.limits import EngineLimits, StepTime
from evenhand.policies.policy import Arrival


@dataclass(frozen=True, slots=True)
class TenantPlan:
    """A tenant of a workload."""

    name: str
    weight: float = 1.0
    well_behaved: bool = True
    """It asks for no more than its share."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Arrivals in order of time and id, and the engines they are meant for."""

    name: str
    tenants: tuple[TenantPlan, ...]
    arrivals: Sequence[Arrival]
    limits: EngineLimits = field(default_factory=EngineLimits)
    step_time: StepTime = field(default_factory=StepTime)

    def __post_init__(self) -> None:
        known = {tenant.name for tenant in self.tenants}
        last = (-1, -1)
        for arrival in self.arrivals:
            if arrival.tenant not in known:
                raise InvalidInput(
                    f"Arrival {arrival.arrival_id} of {self.name} has no tenant {arrival.tenant!r}."
                )
            if (arrival.at_ns, arrival.arrival_id) <= last:
                raise InvalidInput(f"Arrival {arrival.arrival_id} of {self.name} is out of order.")
            last = (arrival.at_ns, arrival.arrival_id)
            total = arrival.prompt_tokens + arrival.output_tokens_max
            if not 1 <= arrival.output_tokens <= arrival.output_tokens_max or arrival.prompt_tokens < 1:
                raise InvalidInput(f"Arrival {arrival.arrival_id} of {self.name} has impossible token counts.")
            if total > self.limits.model_tokens_max:
                raise InvalidInput(
                    f"Arrival {arrival.arrival_id} of {self.name} may have {total} tokens, more than the engines' "
                    f"{self.limits.model_tokens_max}."
                )


def in_order(arrivals: list[Arrival]) -> tuple[Arrival, ...]:
    """By time, then tenant, then number; numbered anew in that order."""
    arrivals.sort(key=lambda arrival: (arrival.at_ns, arrival.tenant, arrival.arrival_id))
    return tuple(replace(arrival, arrival_id=number) for number, arrival in enumerate(arrivals))
