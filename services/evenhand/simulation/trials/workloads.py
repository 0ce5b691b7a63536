"""The workloads of the policy experiments, each from a seed and a few parameters; ``WORKLOADS`` names them.

A fresh seed gives a fresh workload of the same kind. Block names are counted up, so no two prompts share a name
unless they share a prefix; tenants share none, as tenants with a cache domain each do.

=====================  ======================================================================================
``hot-tenant``         one tenant whose applications have a 6,000-token prefix each asks for several times its
                       share, beside others under theirs
``dlpm-mix``           the four kinds of DLPM's evaluation, two tenants each, with its published means of prefix
                       and output tokens; one tree-of-thought tenant asks for several times its share
``servegen-mooncake``  arrivals by client from ServeGen, conversations from Mooncake (see ``crossed``)
``servegen-agents``    arrivals by client from ServeGen, agent sessions (see ``crossed``)
=====================  ======================================================================================
"""

import dataclasses
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from evenhand.core.errors import InvalidInput
from evenhand.engine.limits import EngineLimits, StepTime
from evenhand.policies.policy import Arrival
from evenhand.simulation.trials.crossed import AGENTS, MOONCAKE, Crossed, agent_sessions, mooncake
from evenhand.simulation.trials.workload import TenantPlan, Workload, check_arrivals, in_order

__all__ = [
    "KINDS",
    "NS_PER_S",
    "WORKLOADS",
    "DlpmMix",
    "HotTenant",
    "Kind",
    "Names",
    "WorkloadEntry",
    "around",
    "dlpm_mix",
    "hot_tenant",
    "in_order",
    "make_workload",
    "poisson_ns",
]

NS_PER_S = 1_000_000_000
NAMES_MAX = 20_000_000
"""Block names of one workload."""
NUMBER_MAX = 1_000_000
"""Largest number that a parameter takes: tokens, seconds, tenants."""


class Names:
    """Fresh block names; ``InvalidInput`` when ``NAMES_MAX`` are taken."""

    __slots__ = ("_next",)

    def __init__(self) -> None:
        self._next = 1

    def take(self, count: int) -> tuple[int, ...]:
        """``count`` names that nobody has."""
        first = self._next
        self._next += count
        if self._next > NAMES_MAX:
            raise InvalidInput(f"A workload's prompts have at most {NAMES_MAX:,} different blocks.")
        return tuple(range(first, first + count))


def poisson_ns(chance: random.Random, per_second: float, duration_s: float) -> Iterator[int]:
    """Times of Poisson arrivals; ``InvalidInput`` if they are far too many."""
    check_arrivals(per_second * duration_s)
    at_s = 0.0
    while per_second > 0:
        at_s += chance.expovariate(per_second)
        if at_s >= duration_s:
            return
        yield int(at_s * NS_PER_S)


def check_counts(plan: object, *names: str) -> None:
    """``InvalidInput`` that names the first of these parameters that is below 1."""
    for name in names:
        value = getattr(plan, name)
        if value < 1:
            raise InvalidInput(f"{name} is {value}, but must be at least 1.")


def around(chance: random.Random, mean: float) -> int:
    """A length, even from half the mean to one and a half; at least 1."""
    return max(1, round(mean * chance.uniform(0.5, 1.5)))


@dataclass(frozen=True, slots=True)
class HotTenant:
    """Parameters of ``hot-tenant``."""

    duration_s: float = 60.0
    others: int = 5
    hot_per_second: float = 50.0
    other_per_second: float = 1.2
    prefix_tokens: int = 6_000
    hot_prefixes: int = 16
    """Applications of the hot tenant, each with its own prefix; 1: one prefix for all it asks."""
    hot_suffix_tokens: int = 200
    other_prefixes: int = 4
    other_prefix_tokens: int = 1_000
    other_suffix_tokens: int = 600
    output_tokens: int = 300
    block_size: int = 64
    kv_blocks: int = 1_024
    slots: int = 16

    def __post_init__(self) -> None:
        check_counts(self, "block_size", "hot_prefixes", "other_prefixes")


def hot_tenant(plan: HotTenant, seed: int) -> Workload:
    """See ``HotTenant``."""
    chance = random.Random(f"hot-tenant/{seed}")  # noqa: S311 - no secret
    names = Names()
    arrivals: list[Arrival] = []

    def ask(tenant: str, per_second: float, prefixes: int, prefix: int, suffix: int, well_behaved: bool) -> None:
        own = [names.take(prefix // plan.block_size) for _ in range(prefixes)]
        for at_ns in poisson_ns(chance, per_second, plan.duration_s):
            application = chance.randrange(prefixes)
            prompt = prefix + around(chance, suffix)
            shared = own[application]
            blocks = shared + names.take(prompt // plan.block_size - len(shared))
            output = around(chance, plan.output_tokens)
            arrivals.append(
                Arrival(
                    len(arrivals),
                    at_ns,
                    tenant,
                    blocks,
                    prompt,
                    2 * plan.output_tokens,
                    output,
                    session=f"{tenant}/{application}",
                    well_behaved=well_behaved,
                )
            )

    check_arrivals((plan.hot_per_second + plan.others * plan.other_per_second) * plan.duration_s)
    ask("hot", plan.hot_per_second, plan.hot_prefixes, plan.prefix_tokens, plan.hot_suffix_tokens, False)
    for other in range(plan.others):
        rate, prefix, suffix = plan.other_per_second, plan.other_prefix_tokens, plan.other_suffix_tokens
        ask(f"calm-{other}", rate, plan.other_prefixes, prefix, suffix, True)
    tenants = (TenantPlan("hot", well_behaved=False), *(TenantPlan(f"calm-{i}") for i in range(plan.others)))
    limits = EngineLimits(plan.block_size, plan.kv_blocks + 1, plan.slots)
    return Workload("hot-tenant", tenants, in_order(arrivals), limits, StepTime())


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of use: means in tokens."""

    name: str
    prefix_tokens: int
    output_tokens: int
    suffix_tokens: int
    """What follows the prefix and is no other request's."""
    uses: int
    """Requests that share one prefix, in the mean."""
    per_second: float
    """Of a tenant that behaves."""


KINDS = (
    Kind("tree", 21_449, 15, 100, 24, 0.5),
    Kind("document", 546, 256, 60, 6, 1.0),
    Kind("judge", 2_701, 256, 120, 8, 0.7),
    Kind("chat", 56, 142, 300, 40, 1.5),
)
"""Prefix and output are the published means of arXiv 2501.14312; the rest is chosen here."""


@dataclass(frozen=True, slots=True)
class DlpmMix:
    """Parameters of ``dlpm-mix``."""

    duration_s: float = 60.0
    tenants_per_kind: int = 2
    hot_factor: float = 80.0
    """How many times as often as the other one the first tree-of-thought tenant asks."""
    rate_factor: float = 1.0
    """On all rates."""
    open_prefixes: int = 4
    """Prefixes that a tenant uses at a time, in turn by chance."""
    block_size: int = 64
    kv_blocks: int = 2_048
    slots: int = 32

    def __post_init__(self) -> None:
        check_counts(self, "block_size", "open_prefixes")


def dlpm_mix(plan: DlpmMix, seed: int) -> Workload:
    """See ``DlpmMix``."""
    chance = random.Random(f"dlpm-mix/{seed}")  # noqa: S311 - no secret
    names = Names()
    arrivals: list[Arrival] = []
    tenants = []
    per_second = sum(kind.per_second for kind in KINDS) * plan.tenants_per_kind * plan.rate_factor
    check_arrivals(per_second * plan.duration_s)
    for kind in KINDS:
        for number in range(plan.tenants_per_kind):
            hot = kind is KINDS[0] and number == 0
            tenant = f"{kind.name}-{'hot' if hot else number}"
            tenants.append(TenantPlan(tenant, well_behaved=not hot))
            rate = kind.per_second * plan.rate_factor * (plan.hot_factor if hot else 1.0)
            uses = _uses(chance, names, kind, plan)
            for at_ns in poisson_ns(chance, rate, plan.duration_s):
                session, prefix_tokens, shared = next(uses)
                prompt = prefix_tokens + around(chance, kind.suffix_tokens)
                blocks = shared + names.take(prompt // plan.block_size - len(shared))
                output = around(chance, kind.output_tokens)
                output_max = 2 * kind.output_tokens
                arrivals.append(
                    Arrival(
                        len(arrivals),
                        at_ns,
                        tenant,
                        blocks,
                        prompt,
                        output_max,
                        output,
                        session=f"{tenant}/{session}",
                        well_behaved=not hot,
                    )
                )
    limits = EngineLimits(plan.block_size, plan.kv_blocks + 1, plan.slots, model_tokens_max=40_960)
    return Workload("dlpm-mix", tuple(tenants), in_order(arrivals), limits, StepTime())


def _uses(
    chance: random.Random, names: Names, kind: Kind, plan: DlpmMix
) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """Endless (prefix number, its tokens, its blocks): a few open at a time, each used for a while."""
    made = 0
    open_ones: list[tuple[int, int, tuple[int, ...]]] = []
    while True:
        while len(open_ones) < plan.open_prefixes:
            tokens = around(chance, kind.prefix_tokens)
            open_ones.append((made, tokens, names.take(tokens // plan.block_size)))
            made += 1
        at = chance.randrange(len(open_ones))
        yield open_ones[at]
        if chance.random() < 1.0 / kind.uses:
            del open_ones[at]


@dataclass(frozen=True, slots=True)
class WorkloadEntry:
    """One row of the table."""

    name: str
    settings: type[Any]
    given: Mapping[str, object]
    """Parameters that differ from the class's defaults."""
    make: Callable[[Any, int], Workload]
    """From parameters and a seed."""
    summary: str


WORKLOADS: Mapping[str, WorkloadEntry] = {
    row.name: row
    for row in (
        WorkloadEntry("hot-tenant", HotTenant, {}, hot_tenant, "one tenant at several times its share"),
        WorkloadEntry("dlpm-mix", DlpmMix, {}, dlpm_mix, "tree-of-thought, documents, judges and chat"),
        WorkloadEntry("servegen-mooncake", Crossed, MOONCAKE, mooncake, "ServeGen arrivals × Mooncake prefixes"),
        WorkloadEntry("servegen-agents", Crossed, AGENTS, agent_sessions, "ServeGen arrivals × agent sessions"),
    )
}


def make_workload(name: str, seed: int, parameters: Mapping[str, object] | None = None) -> Workload:
    """A workload by name; ``InvalidInput`` names a workload or a parameter that does not exist.

    Values may be numbers, or their text as from a command line.
    """
    entry = WORKLOADS.get(name)
    if entry is None:
        known = ", ".join(sorted(WORKLOADS))
        raise InvalidInput(f"There is no workload {name!r}, and no file of that name; there are {known}.")
    fields = {field.name: field.type for field in dataclasses.fields(entry.settings)}
    values: dict[str, object] = dict(entry.given)
    for key, value in (parameters or {}).items():
        if key not in fields:
            raise InvalidInput(
                f"The workload {name!r} has no parameter {key!r}; it has {', '.join(sorted(fields))}."
            )
        try:
            values[key] = int(str(value)) if fields[key] is int else float(str(value))
        except ValueError as error:
            kind = "a whole number" if fields[key] is int else "a number"
            raise InvalidInput(
                f"The parameter {key!r} of the workload {name!r} is {value!r}, but must be {kind}."
            ) from error
        if not 0 <= values[key] <= NUMBER_MAX:  # type: ignore[operator]
            raise InvalidInput(
                f"The parameter {key!r} of the workload {name!r} is {value!r}, "
                f"but must lie between 0 and {NUMBER_MAX:,}."
            )
    workload = _made(entry, values, seed)
    if not workload.arrivals:
        raise InvalidInput(f"The workload {name!r} with these parameters has no arrival at all.")
    return workload


def _made(entry: WorkloadEntry, values: dict[str, object], seed: int) -> Workload:
    try:
        return entry.make(entry.settings(**values), seed)
    except InvalidInput as error:
        raise InvalidInput(f"The workload {entry.name!r} is impossible: {error}") from error
