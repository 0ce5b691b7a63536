"""Workloads made of streams: each stream is one kind of client, honest or not, with arrivals of its own.

A stream's chance depends on the seed and on its own name alone. So a scene with an adversary and the same scene
without it ask exactly the same of everybody else, and a comparison of the two shows the adversary and nothing
else.

Arrivals are Poisson, in bursts where a stream says so, and open loop: nobody waits for an answer before asking
again.
"""

import dataclasses
import random
from dataclasses import dataclass, field

from evenhand.engine.limits import EngineLimits, StepTime
from evenhand.policies.policy import Arrival
from evenhand.simulation.experiments.cases import NS_PER_S, Scene
from evenhand.simulation.trials.workload import TenantPlan, Workload
from evenhand.simulation.trials.workloads import Names, in_order, poisson_ns


@dataclass(frozen=True, slots=True)
class Stream:
    """One tenant, or several equal ones, and what it asks for."""

    tenant: str
    per_second: float
    """Of the whole stream; while it is on."""
    prompt_tokens: int = 1_000
    """Without the shared prefix; each request has half to one and a half of it, evenly."""
    prefix_tokens: int = 0
    """Shared by all its requests."""
    output_tokens: int = 100
    """Each request has half to one and a half of it, evenly."""
    output_tokens_max: int = 0
    """What it asks for at most; 0: twice the output."""
    output_tokens_expected: int | None = None
    """What it says it expects; None: nothing."""
    spread: bool = True
    """False: every request has exactly these lengths."""
    well_behaved: bool = True
    weight: float = 1.0
    identities: int = 1
    """Tenants among which the stream is dealt by chance; their names end in a number if there are several."""
    users: int = 0
    """Users among which each tenant's requests are dealt by chance; 0: none is named."""
    on_s: float = 0.0
    """With ``off_s``: it asks for so long, and is silent for so long, in turn; 0: always."""
    off_s: float = 0.0
    from_s: float = 0.0
    until_s: float = 0.0
    """0: until the scene ends."""
    at_once: int = 0
    """So many requests together at ``from_s``, instead of Poisson arrivals."""
    cancel_share: float = 0.0
    """Share of requests whose client gives up ``cancel_after_s`` after it asked."""
    cancel_after_s: float = 1.0


@dataclass(frozen=True, slots=True)
class Crowd:
    """All streams of a scene, and the engines that they are meant for."""

    streams: tuple[Stream, ...]
    duration_s: float = 60.0
    block_size: int = 64
    kv_blocks: int = 1_024
    slots: int = 32
    step_time: StepTime = field(default_factory=StepTime)


def scene(name: str, plan: Crowd) -> Scene:
    """As experiments run it."""
    return Scene(name, crowd, plan)


def with_stream(plan: Crowd, *streams: Stream) -> Crowd:
    """The same scene with more in it."""
    return dataclasses.replace(plan, streams=(*plan.streams, *streams))


def crowd(plan: Crowd, seed: int) -> Workload:
    """Build a scene."""
    names = Names()
    arrivals: list[Arrival] = []
    tenants: list[TenantPlan] = []
    for stream in plan.streams:
        arrivals += _arrivals(stream, plan, seed, names)
        tenants += [TenantPlan(name, stream.weight, stream.well_behaved) for name in tenants_of(stream)]
    limits = EngineLimits(plan.block_size, plan.kv_blocks + 1, plan.slots)
    return Workload("crowd", tuple(tenants), in_order(arrivals), limits, plan.step_time)


def tenants_of(stream: Stream) -> list[str]:
    """Names of a stream's tenants."""
    if stream.identities == 1:
        return [stream.tenant]
    return [f"{stream.tenant}-{number}" for number in range(stream.identities)]


def _arrivals(stream: Stream, plan: Crowd, seed: int, names: Names) -> list[Arrival]:
    chance = random.Random(f"{stream.tenant}/{seed}")  # noqa: S311 - no secret
    tenants = tenants_of(stream)
    prefix_blocks = stream.prefix_tokens // plan.block_size
    prefixes = {tenant: names.take(prefix_blocks) for tenant in tenants}
    made = []
    for number, at_ns in enumerate(_times_ns(stream, plan, chance)):
        tenant = chance.choice(tenants)
        prompt = stream.prefix_tokens + _length(stream, stream.prompt_tokens, chance)
        output = _length(stream, stream.output_tokens, chance)
        output_max = max(output, stream.output_tokens_max or 2 * stream.output_tokens)
        own = names.take(prompt // plan.block_size - prefix_blocks)
        gives_up = stream.cancel_share > 0 and chance.random() < stream.cancel_share
        made.append(
            Arrival(
                number,
                at_ns,
                tenant,
                prefixes[tenant] + own,
                prompt,
                output_max,
                output,
                user=f"user-{chance.randrange(stream.users)}" if stream.users else "",
                weight=stream.weight,
                well_behaved=stream.well_behaved,
                cancel_after_ns=int(stream.cancel_after_s * NS_PER_S) if gives_up else None,
                output_tokens_expected=stream.output_tokens_expected,
            )
        )
    return made


def _times_ns(stream: Stream, plan: Crowd, chance: random.Random) -> list[int]:
    from_ns = int(stream.from_s * NS_PER_S)
    if stream.at_once:
        return [from_ns] * stream.at_once
    length_s = (stream.until_s or plan.duration_s) - stream.from_s
    times = [from_ns + at_ns for at_ns in poisson_ns(chance, stream.per_second, length_s)]
    if not stream.off_s:
        return times
    cycle_ns, on_ns = int((stream.on_s + stream.off_s) * NS_PER_S), int(stream.on_s * NS_PER_S)
    return [at_ns for at_ns in times if (at_ns - from_ns) % cycle_ns < on_ns]


def _length(stream: Stream, mean: int, chance: random.Random) -> int:
    if not stream.spread:
        return max(1, mean)
    return max(1, round(mean * chance.uniform(0.5, 1.5)))
