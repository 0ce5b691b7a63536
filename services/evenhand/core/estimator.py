"""What is learned from settled legs: output lengths, the pool's cost rate, a tenant's service rate.

Estimates steer charges, room and waits; no invariant rests on their being right. Each forgets the past at a
fixed pace, so that none needs a history, and each is plain data that a checkpoint can carry.
"""

import math
from dataclasses import dataclass

from evenhand.core.facts import Request
from evenhand.core.ids import TenantId

NS_PER_S = 1_000_000_000
NS_PER_MS = 1_000_000

OUTPUT_STEP = 1 / 16
"""Weight of the latest output length in a tenant's mean."""

COST_RATE_MEMORY_S = 10.0
"""Busy seconds after which the pool's cost rate has forgotten two thirds of the past."""

SERVICE_STEP = 1 / 8
"""Weight of the latest gap between two grants in a tenant's mean gap."""


class OutputEstimator:
    """Expected output tokens of a request: the client's own word, else the tenant's decayed mean.

    Never above the request's own limit and never below one token.
    """

    def __init__(self, default_tokens: int) -> None:
        self._default_tokens = default_tokens
        self._means: dict[TenantId, float] = {}

    def estimate(self, request: Request) -> int:
        """Tokens, between 1 and ``output_tokens_max``."""
        expected: float | None = request.output_tokens_expected
        if expected is None:
            expected = self._means.get(request.tenant_id, self._default_tokens)
        return max(1, min(math.ceil(expected), request.output_tokens_max))

    def learn(self, tenant_id: TenantId, output_tokens: int) -> None:
        """Take in the output of a leg that ran to its end."""
        mean = self._means.get(tenant_id)
        if mean is None:
            self._means[tenant_id] = float(output_tokens)
        else:
            self._means[tenant_id] = mean + (output_tokens - mean) * OUTPUT_STEP

    def forget(self, tenant_id: TenantId) -> None:
        self._means.pop(tenant_id, None)

    def means(self) -> tuple[tuple[TenantId, float], ...]:
        """State for a checkpoint."""
        return tuple(self._means.items())

    def restore(self, means: tuple[tuple[TenantId, float], ...]) -> None:
        self._means = dict(means)


@dataclass(slots=True)
class CostRate:
    """R: cost tokens the pool delivers a second, over the time in which it had any open ticket.

    Both sums decay together with busy time, so idle time changes nothing.
    """

    cost: float
    busy_s: float = 1.0
    settled_at_ns: int | None = None
    """Up to when busy time is counted; None while the pool is idle."""

    def busy_from(self, now_ns: int) -> None:
        """The first ticket opened."""
        self.settled_at_ns = now_ns

    def idle_from(self, now_ns: int) -> None:
        """The last ticket closed."""
        self._advance(now_ns)
        self.settled_at_ns = None

    def add(self, cost: float, now_ns: int) -> None:
        """Count what a leg attained."""
        self._advance(now_ns)
        self.cost += cost

    @property
    def per_s(self) -> float:
        return self.cost / self.busy_s

    def _advance(self, now_ns: int) -> None:
        if self.settled_at_ns is None or now_ns <= self.settled_at_ns:
            return
        elapsed_s = (now_ns - self.settled_at_ns) / NS_PER_S
        kept = math.exp(-elapsed_s / COST_RATE_MEMORY_S)
        self.cost *= kept
        self.busy_s = self.busy_s * kept + elapsed_s
        self.settled_at_ns = now_ns


@dataclass(slots=True)
class ServiceRate:
    """How fast a tenant's queue moves, from the gaps between its grants."""

    gap_ns: float = 0.0
    granted_at_ns: int | None = None

    def granted(self, now_ns: int) -> None:
        if self.granted_at_ns is not None:
            gap_ns = now_ns - self.granted_at_ns
            self.gap_ns = gap_ns if self.gap_ns == 0.0 else self.gap_ns + (gap_ns - self.gap_ns) * SERVICE_STEP
        self.granted_at_ns = now_ns

    def retry_after_ms(self, default_ms: int, places: int = 1) -> int:
        """When about ``places`` places will have become free in the tenant's queue; 10 ms to 60 s."""
        if self.gap_ns == 0.0:
            return default_ms
        return max(10, min(60_000, round(self.gap_ns * places / NS_PER_MS)))
