"""The workloads of the policy experiments, each from a seed and a few parameters; see ``WORKLOADS``.

A fresh seed gives a fresh workload of the same kind. Block names are counted up, so no two prompts share a name
unless they share a prefix.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from evenhand.engine.limits import EngineLimits, StepTime
from evenhand.policies.policy import Arrival
from evenhand.simulation.trials.workload import TenantPlan, Workload

NS_PER_S = 1_000_000_000


class Names:
    """Fresh block names."""

    __slots__ = ("_next",)

    def __init__(self) -> None:
        self._next = 1

    def take(self, count: int) -> tuple[int, ...]:
        """``count`` names that nobody has."""
        first = self._next
        self._next += count
        return tuple(range(first, first + count))


def poisson_ns(chance: random.Random, per_second: float, duration_s: float) -> Iterator[int]:
    """Times of Poisson arrivals."""
    at_s = 0.0
    while per_second > 0:
        at_s += chance.expovariate(per_second)
        if at_s >= duration_s:
            return
        yield int(at_s * NS_PER_S)


def in_order(arrivals: list[Arrival]) -> tuple[Arrival, ...]:
    """By time, numbered anew."""
    arrivals.sort(key=lambda arrival: (arrival.at_ns, arrival.tenant, arrival.arrival_id))
    return tuple(_numbered(arrival, number) for number, arrival in enumerate(arrivals))


def _numbered(a: Arrival, number: int) -> Arrival:
    return Arrival(
        number,
        a.at_ns,
        a.tenant,
        a.block_names,
        a.prompt_tokens,
        a.output_tokens_max,
        a.output_tokens,
        a.user,
        a.session,
        a.weight,
        a.well_behaved,
        a.output_block_names,
        a.cancel_after_ns,
        a.output_tokens_expected,
    )


@dataclass(frozen=True, slots=True)
class HotTenant:
    """One tenant with a shared prefix at several times its share, beside others under theirs."""

    duration_s: float = 120.0
    others: int = 5
    hot_per_second: float = 24.0
    other_per_second: float = 0.6
    prefix_tokens: int = 6_000
    hot_suffix_tokens: int = 200
    other_prompt_tokens: int = 1_500
    output_tokens: int = 200
    block_size: int = 64
    kv_blocks: int = 1_024
    slots: int = 32


def hot_tenant(plan: HotTenant, seed: int) -> Workload:
    """See ``HotTenant``."""
    chance = random.Random(f"hot-tenant/{seed}")  # noqa: S311 - no secret
    names = Names()
    prefix = names.take(plan.prefix_tokens // plan.block_size)
    arrivals: list[Arrival] = []

    def add(at_ns: int, tenant: str, shared: tuple[int, ...], prompt: int, well_behaved: bool) -> None:
        output = max(1, round(plan.output_tokens * chance.uniform(0.5, 1.5)))
        blocks = shared + names.take(prompt // plan.block_size - len(shared))
        number, output_max = len(arrivals), 2 * plan.output_tokens
        arrivals.append(
            Arrival(number, at_ns, tenant, blocks, prompt, output_max, output, well_behaved=well_behaved)
        )

    for at_ns in poisson_ns(chance, plan.hot_per_second, plan.duration_s):
        suffix = max(1, round(plan.hot_suffix_tokens * chance.uniform(0.5, 1.5)))
        add(at_ns, "hot", prefix, plan.prefix_tokens + suffix, False)
    for other in range(plan.others):
        for at_ns in poisson_ns(chance, plan.other_per_second, plan.duration_s):
            prompt = max(1, round(plan.other_prompt_tokens * chance.uniform(0.5, 1.5)))
            add(at_ns, f"calm-{other}", (), prompt, True)
    tenants = (TenantPlan("hot", well_behaved=False), *(TenantPlan(f"calm-{i}") for i in range(plan.others)))
    limits = EngineLimits(plan.block_size, plan.kv_blocks + 1, plan.slots)
    return Workload("hot-tenant", tenants, in_order(arrivals), limits, StepTime())
