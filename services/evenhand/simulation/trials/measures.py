"""What a trial shows: throughput, hits, times to first token, and how even the service was.

Everything is over the whole run, drain included: from the first moment to the last request's end.

**Service difference.** Accumulated service W of a tenant, ÷ its weight. For two tenants it is looked at only while
both are backlogged without a break (requests of both waited throughout each sample interval); over such a stretch
the difference W_i − W_j moves within some range, and the width of the widest range over all pairs and stretches
is the measure: no interval within a stretch shows more. It is the quantity that VTC bounds by
2·max(w_in·L, w_out·M) (Sheng et al., OSDI 2024). ``tokens`` weighs as VTC does, 1·input + 2·output whether cached
or not; ``cost`` as this project does, with cached input at 0.1. The windowed form is the largest difference over
any window of 60 s.

**Jain index.** Of share got ÷ share due over the tenants that were ever backlogged: in each interval, what the
others did not need is due to the backlogged ones by weight. 1 is even; 1/n is one tenant with everything.

Percentiles are nearest-rank. A request that got no first token (cancelled, refused) counts in none of them.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from evenhand.core.facts import CostWeights
from evenhand.simulation.trials.record import Outcome, TenantSeries, TrialResult

NS_PER_S = 1_000_000_000
WINDOW_S = 60.0
PAIR_TENANTS_MAX = 64
"""Tenants that are compared in pairs: those longest backlogged, then by name."""

COST = CostWeights()
VTC_COST = CostWeights(uncached=1.0, cached=1.0, output=2.0, floor=0.0)


@dataclass(frozen=True, slots=True)
class Ttft:
    """Times to first token from arrival, in seconds; NaN where there is none."""

    requests: int
    p50_s: float
    p99_s: float


@dataclass(frozen=True, slots=True)
class Difference:
    """Widest service difference between two backlogged tenants, and over any 60 s; cost tokens ÷ weight."""

    whole: float
    window: float


@dataclass(frozen=True, slots=True)
class Measures:
    """One trial in figures."""

    policy: str
    workload: str
    requests: int
    served: int
    cancelled: int
    refused: int
    duration_s: float
    requests_per_s: float
    tokens_per_s: float
    """Input and output of served requests."""
    output_tokens_per_s: float
    cost_per_s: float
    """Cost tokens, cached input at 0.1."""
    hit_rate: float
    """Cached part of all prompt tokens served."""
    well_behaved: Ttft
    everyone: Ttft
    by_tenant: dict[str, Ttft]
    tokens_difference: Difference
    cost_difference: Difference
    jain: float
    preemptions: int


def measure(result: TrialResult, cost: CostWeights = COST) -> Measures:
    """All figures of a trial."""
    served = [outcome for outcome in result.outcomes if outcome.served]
    duration_s = max(result.ended_ns / NS_PER_S, 1e-9)
    prompt = sum(outcome.arrival.prompt_tokens for outcome in served)
    cached = sum(outcome.cached_tokens for outcome in served)
    output = sum(outcome.output_tokens for outcome in served)
    well_behaved = {name for name, series in result.series.items() if series.plan.well_behaved}
    return Measures(
        policy=result.policy,
        workload=result.workload,
        requests=len(result.outcomes),
        served=len(served),
        cancelled=sum(outcome.cancelled for outcome in result.outcomes),
        refused=sum(outcome.refused for outcome in result.outcomes),
        duration_s=duration_s,
        requests_per_s=len(served) / duration_s,
        tokens_per_s=(prompt + output) / duration_s,
        output_tokens_per_s=output / duration_s,
        cost_per_s=cost.cost(prompt - cached, cached, output) / duration_s,
        hit_rate=cached / prompt if prompt else 0.0,
        well_behaved=_ttft(outcome for outcome in result.outcomes if outcome.arrival.tenant in well_behaved),
        everyone=_ttft(result.outcomes),
        by_tenant={
            name: _ttft(outcome for outcome in result.outcomes if outcome.arrival.tenant == name)
            for name in result.series
        },
        tokens_difference=service_difference(result, VTC_COST),
        cost_difference=service_difference(result, cost),
        jain=jain_index(result, cost),
        preemptions=result.preemptions,
    )


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest-rank percentile of sorted values; NaN of none."""
    if not values:
        return math.nan
    return values[max(0, math.ceil(share * len(values)) - 1)]


def _ttft(outcomes: Iterable[Outcome]) -> Ttft:
    waits = sorted(outcome.ttft_ns / NS_PER_S for outcome in outcomes if outcome.ttft_ns is not None)
    return Ttft(len(waits), percentile(waits, 0.5), percentile(waits, 0.99))


def _service(series: TenantSeries, cost: CostWeights) -> list[float]:
    """Accumulated service ÷ weight: 0 at the start, then at each sample."""
    uncached, cached, output = (
        cost.uncached / series.plan.weight,
        cost.cached / series.plan.weight,
        cost.output / series.plan.weight,
    )
    sums = zip(series.prompt, series.cached, series.output, strict=True)
    return [0.0, *(uncached * (p - c) + cached * c + output * o for p, c, o in sums)]


def service_difference(result: TrialResult, cost: CostWeights, window_s: float = WINDOW_S) -> Difference:
    """See the module; 0 where no two tenants were ever backlogged together."""
    compared = sorted(
        ((-sum(series.backlogged), name) for name, series in result.series.items() if any(series.backlogged))
    )[:PAIR_TENANTS_MAX]
    tenants = [result.series[name] for _, name in compared]
    services = [_service(series, cost) for series in tenants]
    samples = max(1, round(window_s * NS_PER_S / result.sample_ns)) if result.sample_ns else 1
    whole = window = 0.0
    for first in range(len(tenants)):
        for second in range(first):
            both = [a and b for a, b in zip(tenants[first].backlogged, tenants[second].backlogged, strict=True)]
            gap = [a - b for a, b in zip(services[first], services[second], strict=True)]
            for begin, end in _stretches(both):
                stretch = gap[begin : end + 1]
                whole = max(whole, max(stretch) - min(stretch))
                for at in range(len(stretch) - samples):
                    window = max(window, abs(stretch[at + samples] - stretch[at]))
    return Difference(whole, window)


def _stretches(flags: Sequence[int]) -> list[tuple[int, int]]:
    """(begin, end) of each run of set flags; flag k is of the interval from instant k to k + 1."""
    runs = []
    begin = -1
    for at, flag in enumerate((*flags, 0)):
        if flag and begin < 0:
            begin = at
        elif not flag and begin >= 0:
            runs.append((begin, at))
            begin = -1
    return runs


def jain_index(result: TrialResult, cost: CostWeights) -> float:
    """See the module; 1 where nobody was ever backlogged."""
    tenants = [series for series in result.series.values() if any(series.backlogged)]
    got = [0.0] * len(tenants)
    due = [0.0] * len(tenants)
    services = [[value * series.plan.weight for value in _service(series, cost)] for series in tenants]
    for at in range(len(tenants[0].backlogged) if tenants else 0):
        backlogged = [k for k, series in enumerate(tenants) if series.backlogged[at]]
        gains = [services[k][at + 1] - services[k][at] for k in backlogged]
        weights = sum(tenants[k].plan.weight for k in backlogged)
        for k, gain in zip(backlogged, gains, strict=True):
            got[k] += gain
            due[k] += sum(gains) * tenants[k].plan.weight / weights
    shares = [g / d for g, d in zip(got, due, strict=True) if d > 0]
    squares = sum(share * share for share in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares else 1.0
