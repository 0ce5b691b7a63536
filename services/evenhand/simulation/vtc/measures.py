"""VTC's published measures of fairness, as its plots compute them.

Service is 1 per input token and 2 per output token. A request's whole service, input included, is taken to flow
evenly from its first token to its last. The first 30 s are left out, and a run is looked at until 600 s, at 19
evenly spaced moments (28.5 s apart), whatever its length.

- accumulated difference: over those moments, the most that any client has had above any other;
- windowed difference: in the 60 s around each moment, each client is short of the best served one, or of what
  it asked for in that window, whichever is less; summed over clients, and the largest sum of all moments;
- P99 of the time to first token: linear between ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from evenhand.core.ids import TenantId
from evenhand.simulation.vtc.server import Served
from evenhand.simulation.vtc.workloads import NS_PER_S, clients_of

WARMUP_S = 30.0
UNTIL_S = 600.0
MOMENTS = 20
WINDOW_S = 60.0
_SHORTEST_S = 1e-5
"""A request that is over in less has no flow."""


@dataclass(frozen=True, slots=True)
class _Flow:
    """One client's service between two moments, in cost tokens a second."""

    from_s: float
    until_s: float
    rate: float


def service(prompt_tokens: int, output_tokens: int) -> int:
    """Cost tokens of a request."""
    return prompt_tokens + 2 * output_tokens


def moments_s() -> list[float]:
    """When a run is looked at, counted from the end of the warm-up."""
    return [(UNTIL_S - WARMUP_S) / MOMENTS * number for number in range(1, MOMENTS)]


def accumulated_differences(served: Sequence[Served]) -> list[float]:
    """At each moment: most minus least service any client has had since the warm-up, in cost tokens."""
    flows = _flows(served)
    differences: list[float] = []
    for moment_s in moments_s():
        got = [_between(flow, WARMUP_S, WARMUP_S + moment_s) for flow in flows.values()]
        differences.append(max(got) - min(got))
    return differences


def windowed_differences(served: Sequence[Served]) -> list[float]:
    """At each moment: what all clients together are short of, in cost tokens a second."""
    flows = _flows(served)
    differences: list[float] = []
    for moment_s in moments_s():
        left_s = WARMUP_S + moment_s - WINDOW_S / 2
        right_s = left_s + WINDOW_S
        asked = dict.fromkeys(flows, 0.0)
        for one in served:
            if left_s <= one.ask.at_ns / NS_PER_S <= right_s:
                asked[one.ask.client] += service(one.ask.prompt_tokens, one.ask.output_tokens) / WINDOW_S
        got = {client: _between(flow, left_s, right_s) / WINDOW_S for client, flow in flows.items()}
        best = max(got.values())
        differences.append(sum(min(best - got[client], abs(asked[client] - got[client])) for client in got))
    return differences


def first_token_p99_s(served: Sequence[Served], client: TenantId) -> float:
    """99th percentile of one client's times to first token, in seconds."""
    waits = sorted((one.first_token_ns - one.ask.at_ns) / NS_PER_S for one in served if one.ask.client == client)
    rank = 0.99 * (len(waits) - 1)
    below = int(rank)
    above = min(below + 1, len(waits) - 1)
    return waits[below] + (waits[above] - waits[below]) * (rank - below)


def tokens_per_s(served: Sequence[Served]) -> float:
    """Prompt and output tokens of the run ÷ its length, the drain included."""
    tokens = sum(one.ask.prompt_tokens + one.ask.output_tokens for one in served)
    return tokens / (max(one.end_ns for one in served) / NS_PER_S)


def _flows(served: Sequence[Served]) -> dict[TenantId, list[_Flow]]:
    flows: dict[TenantId, list[_Flow]] = {client: [] for client in clients_of(one.ask for one in served)}
    for one in served:
        from_s, until_s = one.first_token_ns / NS_PER_S, one.end_ns / NS_PER_S
        if until_s - from_s >= _SHORTEST_S:
            rate = service(one.ask.prompt_tokens, one.ask.output_tokens) / (until_s - from_s)
            flows[one.ask.client].append(_Flow(from_s, until_s, rate))
    return flows


def _between(flows: Sequence[_Flow], left_s: float, right_s: float) -> float:
    return sum(
        flow.rate * (min(right_s, flow.until_s) - max(left_s, flow.from_s))
        for flow in flows
        if flow.from_s < right_s and flow.until_s > left_s
    )
