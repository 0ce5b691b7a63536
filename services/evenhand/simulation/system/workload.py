"""What a run is asked to do: the shape of its fleet, its tenants, and the requests that arrive.

A shape and its arrivals are drawn from the seed, or the arrivals come from a file of JSON lines, each a request::

    {"at_ms": 0, "tenant": "a", "prompt_tokens": 300, "output_tokens": 20, "prefix": "p", "prefix_tokens": 200}

``prefix`` and ``prefix_tokens`` may be left out. A line that is broken is named by its number.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Final

from evenhand.core.errors import InvalidInput
from evenhand.core.facts import OutputEstimatorKind, RateLimits, TenantSpec
from evenhand.core.ids import TenantId
from evenhand.engine.content import FIRST_OUTPUT_TOKEN
from evenhand.engine.limits import EngineLimits, StepTime
from evenhand.simulation.lines import json_object

BLOCK_SIZE: Final = 16
MODEL_TOKENS_MAX: Final = 1_024
REQUESTS_MAX: Final = 1_000_000
TENANTS_MAX: Final = 64
_TOKEN_IDS: Final = range(FIRST_OUTPUT_TOKEN, 30_000)
WORKLOADS: Final = ("mixed", "hot", "cold", "waves")
BANDS: Final = (("default", 1.0), ("batch", 0.5), ("gold", 3.0))
USER_WEIGHTS: Final = (("ann", 3.0),)
LIMITS: Final = RateLimits(240, 10, 60_000, 4_000)
STEP: Final = StepTime(base_ns=18_000_000, prefill_token_ns=120_000, running_sequence_ns=200_000)
SLOTS_TOTAL_MIN: Final = 6
SLOTS_TOTAL_MAX: Final = 20
WAVES_PART: Final = 0.2
"""So many of the mixed workloads are waves: far too many requests, of ever more tenants, one after another."""
OVERLOAD: Final = 3.0
LEG_S: Final = 0.6
"""About what a request takes on an engine; sets how fast they arrive."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request to come."""

    at_s: float
    tenant_id: TenantId
    prefix: str
    prefix_tokens: int
    own_tokens: int
    output_tokens: int
    user: str = ""
    follows: bool = False
    """It goes on where an earlier request of its tenant ended, if one has: a second turn."""

    @property
    def prompt_tokens(self) -> int:
        return self.prefix_tokens + self.own_tokens


@dataclass(frozen=True, slots=True)
class Shape:
    """The fleet of one run."""

    engines: int
    schedulers: int
    partitions: int
    slots: int
    limits: EngineLimits
    load_interval_ms: int
    window_delay_ms: float
    kept_frames_max: int
    """Frames an engine can replay."""
    bands: tuple[tuple[str, float], ...]
    estimator: OutputEstimatorKind
    tenants: tuple[TenantSpec, ...]
    arrivals: tuple[Arrival, ...]

    @property
    def load_s(self) -> float:
        """When the last request arrives."""
        return self.arrivals[-1].at_s if self.arrivals else 0.0


def draw_shape(random: Random, requests: int, workload: str) -> Shape:
    """A shape and its arrivals; raises ``InvalidInput`` for a workload that does not exist or cannot be."""
    if not 1 <= requests <= REQUESTS_MAX:
        raise InvalidInput(f"A run has 1 to {REQUESTS_MAX} requests, not {requests}.")
    engines = random.randint(1, 4)
    slots = max(2, random.randint(SLOTS_TOTAL_MIN, SLOTS_TOTAL_MAX) // engines)
    blocks = random.choice((96, 160, 384, 1_024))
    limits = EngineLimits(BLOCK_SIZE, blocks, slots, random.choice((256, 512)), MODEL_TOKENS_MAX)
    bands = BANDS if random.random() < 0.3 else BANDS[:1]
    tenants = _draw_tenants(random, bands)
    if workload in WORKLOADS:
        arrivals = tuple(_draw_arrivals(random, requests, workload, tenants, engines * slots))
    else:
        arrivals = read_arrivals(Path(workload))
        known = {spec.tenant_id: spec for spec in tenants}
        names = sorted({arrival.tenant_id for arrival in arrivals})
        tenants = tuple(known.get(name, TenantSpec(name)) for name in names)
    return Shape(
        engines=engines,
        schedulers=random.choice((1, 1, 2)),
        partitions=random.choice((1, 2, 4)),
        slots=slots,
        limits=limits,
        window_delay_ms=random.choice((750.0, 250.0, 50.0)),
        load_interval_ms=random.choice((250, 500, 500)),
        kept_frames_max=random.choice((10_000, 10_000, 64)),
        bands=bands,
        estimator=random.choice(tuple(OutputEstimatorKind)),
        tenants=tenants,
        arrivals=arrivals,
    )


def _draw_tenants(random: Random, bands: tuple[tuple[str, float], ...]) -> tuple[TenantSpec, ...]:
    count = random.randint(2, 6)
    shared, promised, limited = random.random() < 0.3, random.random() < 0.25, random.random() < 0.25
    return tuple(
        TenantSpec(
            TenantId(f"tenant-{number}"),
            weight=random.choice((1.0, 1.0, 1.0, 2.0, 4.0, 0.5)),
            concurrency_max=random.choice((0, 0, 0, 0, 2)),
            cache_domain="shared" if shared and random.random() < 0.5 else "",
            band=random.choice(bands)[0],
            user_weights=USER_WEIGHTS if random.random() < 0.3 else (),
            guaranteed_share=random.choice((0.1, 0.3)) if promised and not number else 0.0,
            rate_limits=LIMITS if limited and number == 1 else RateLimits(),
        )
        for number in range(count)
    )


def _draw_arrivals(
    random: Random, requests: int, workload: str, tenants: Sequence[TenantSpec], slots: int
) -> Iterator[Arrival]:
    rate = slots / LEG_S * random.uniform(0.6, 1.6)
    appetite = [random.choice((1, 1, 1, 3)) for _ in tenants]
    if workload == "hot":
        appetite = [8] + [1] * (len(tenants) - 1)
    prefixes = [random.randint(1, 3) for _ in tenants]
    lengths = [random.randint(2, 20) * BLOCK_SIZE for _ in tenants]
    on_until = [random.uniform(0.5, 8.0) for _ in tenants]
    in_waves = workload == "waves" or (workload == "mixed" and random.random() < WAVES_PART)
    if in_waves:
        rate, appetite = slots / LEG_S * OVERLOAD, [1] * len(tenants)
    at_s = 0.0
    for index in range(requests):
        at_s += random.expovariate(rate)
        if in_waves:
            awake = list(range(1 + index * len(tenants) // requests))
        else:
            awake = [n for n, end_s in enumerate(on_until) if at_s % (end_s + 2.0) < end_s]
        awake = awake or list(range(len(tenants)))
        number = random.choices(awake, [appetite[n] for n in awake])[0]
        warm = workload != "cold" and ((workload == "hot" and number == 0) or random.random() < 0.7)
        yield Arrival(
            at_s=at_s,
            tenant_id=tenants[number].tenant_id,
            prefix=f"{number}.{random.randrange(prefixes[number])}" if warm else "",
            prefix_tokens=lengths[number] if warm else 0,
            own_tokens=random.randint(1, 120),
            output_tokens=random.choice((1, 4, 16, 24, 48)),
            user=random.choice(("", "ann", "ben")),
            follows=workload == "mixed" and random.random() < 0.25,
        )


def tokens(prefix: str, count: int) -> list[int]:
    """Token ids that this prefix always begins with."""
    return Random(f"tokens {prefix}").choices(_TOKEN_IDS, k=count)  # noqa: S311 - a seeded stream, not a secret


def read_arrivals(path: Path) -> tuple[Arrival, ...]:
    """Arrivals from a file; raises ``InvalidInput`` that names the file, and the line where one is broken."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        names = ", ".join(WORKLOADS)
        sentence = f"There is no workload {str(path)!r}: it is none of {names}, and no file that can be read."
        raise InvalidInput(sentence) from error
    arrivals = [_read_arrival(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not arrivals:
        raise InvalidInput(f"The workload {path} has no request in it.")
    tenants = {arrival.tenant_id for arrival in arrivals}
    if len(tenants) > TENANTS_MAX:
        raise InvalidInput(f"The workload {path} names {len(tenants)} tenants; {TENANTS_MAX} are the most.")
    return tuple(sorted(arrivals, key=lambda arrival: arrival.at_s))


def _read_arrival(path: Path, number: int, line: str) -> Arrival:
    where = f"Line {number} of {path}"
    entry = json_object(where, line)
    unknown = sorted(
        entry.keys() - {"at_ms", "tenant", "prompt_tokens", "output_tokens", "prefix", "prefix_tokens"}
    )
    if unknown:
        raise InvalidInput(f"{where} has a field {unknown[0]!r} that no request has.")
    tenant = entry.get("tenant")
    if not isinstance(tenant, str) or not 1 <= len(tenant) <= 200 or not tenant.isprintable():
        raise InvalidInput(f"{where} names no tenant.")
    prefix = entry.get("prefix", "")
    if not isinstance(prefix, str) or not prefix.isprintable():
        raise InvalidInput(f"{where} has a prefix that is no text.")
    at_ms, prompt_tokens, output_tokens = (_number(where, entry, name) for name in _NUMBERS)
    prefix_tokens = _number(where, entry, "prefix_tokens") if "prefix_tokens" in entry else 0
    if prompt_tokens < 1 or output_tokens < 1 or prefix_tokens >= prompt_tokens or (prefix_tokens and not prefix):
        raise InvalidInput(
            f"{where} is impossible: a prompt has at least one token beyond its prefix, an output one."
        )
    if prompt_tokens + output_tokens > MODEL_TOKENS_MAX:
        total = prompt_tokens + output_tokens
        raise InvalidInput(f"{where} is impossible: {total} tokens, and an engine takes {MODEL_TOKENS_MAX}.")
    return Arrival(
        at_ms / 1000, TenantId(tenant), prefix, prefix_tokens, prompt_tokens - prefix_tokens, output_tokens
    )


_NUMBERS: Final = ("at_ms", "prompt_tokens", "output_tokens")


def _number(where: str, entry: dict[str, Any], name: str) -> int:
    value = entry.get(name)
    if type(value) is not int or not 0 <= value < 2**31:
        raise InvalidInput(f"{where} has no whole number from 0 as its {name}.")
    return value
