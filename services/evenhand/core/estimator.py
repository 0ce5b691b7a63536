"""What is learned from settled legs: output lengths, the pool's cost rate, a tenant's service rate.

Estimates steer charges, room and waits; no invariant rests on their being right. Each forgets the past at a
fixed pace, so that none needs more than a short history, and each is plain data that a checkpoint can carry.
"""

import math
from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass
from typing import assert_never

from evenhand.core.facts import OutputEstimatorKind, Request
from evenhand.core.ids import TenantId

NS_PER_S = 1_000_000_000
NS_PER_MS = 1_000_000

OUTPUT_STEP = 1 / 16
"""Weight of the latest output length in a tenant's mean."""

MAX_KEPT = 15 / 16
"""What a tenant's largest output length counts after each shorter one: half of it after 11 of them."""

LATEST_KEPT_MAX = 32
"""Latest output lengths of a tenant of which the 75th percentile is taken."""

OWN_WORD_LEAST = 1 / 2
"""Of a tenant's learned estimate: a client's own estimate counts as at least that."""

COST_RATE_MEMORY_S = 10.0
"""Busy seconds after which the pool's cost rate has forgotten two thirds of the past."""

COST_RATE_MIN_PER_S = 1.0
"""A pool that delivers less is one whose only leg has not ended yet; what is divided by R must stay finite."""

LEG_COST_STEP = 1 / 16
"""Weight of the latest leg in the mean cost of a leg."""

SERVICE_STEP = 1 / 8
"""Weight of the latest gap between two grants in a tenant's mean gap."""


@dataclass(frozen=True, slots=True)
class OutputLearned:
    """What was learned of one tenant's output lengths, for a checkpoint."""

    tenant_id: TenantId
    tokens: float
    """What is estimated for it, before any request's own limit."""
    latest_tokens: tuple[int, ...] = ()
    """Where the kind needs them: its latest lengths, oldest first."""
    has_finished: bool = True
    """False: it has finished nothing, and ``tokens`` is only what its requests produced at least."""


class Latest:
    """The latest lengths of a tenant, in order of time and of size."""

    __slots__ = ("by_size", "by_time")

    def __init__(self) -> None:
        self.by_time: deque[int] = deque()
        self.by_size: list[int] = []

    def add(self, tokens: int) -> None:
        """Take in the latest length, in tokens; of more than ``LATEST_KEPT_MAX`` the oldest goes."""
        if len(self.by_time) == LATEST_KEPT_MAX:
            oldest = self.by_time.popleft()
            del self.by_size[bisect_left(self.by_size, oldest)]
        self.by_time.append(tokens)
        insort(self.by_size, tokens)

    @property
    def p75(self) -> int:
        """The smallest length that at least three quarters do not exceed; 0 while there is none."""
        rank = -(-3 * len(self.by_size) // 4)
        return self.by_size[rank - 1] if rank else 0


class OutputEstimator:
    """Expected output tokens of a request: the client's own word, else what the kind says of its tenant's past.

    The client's word is not believed below ``OWN_WORD_LEAST`` of what the kind would say, once its tenant has
    produced something. Room is reserved and a charge is made by it, so a word far too low would be room and a turn
    that were not paid for until the truth is told. What a leg produced that was broken off is less than the truth:
    it only ever raises what is known (``learn_at_least``); else a cancel at the end would keep it all unknown.

    Never above the request's own limit and never below one token, whatever the kind: an answer has at least one,
    and room is reserved for it. With ZERO that token is all that is booked ahead; the rest follows as usage tells
    it. With any other kind, a tenant that has finished nothing is estimated by the default.
    """

    def __init__(self, default_tokens: int, kind: OutputEstimatorKind = OutputEstimatorKind.MEAN) -> None:
        self._default_tokens = default_tokens
        self._kind = kind
        self._tokens: dict[TenantId, float] = {}
        """The estimate of each tenant that has produced something."""
        self._latest: dict[TenantId, Latest] = {}
        self._unfinished: dict[TenantId, None] = {}
        """Tenants that have finished nothing: what is known of them is what they produced at least."""

    def __len__(self) -> int:
        return len(self._tokens)

    def estimate(self, request: Request) -> int:
        """Tokens, between 1 and ``output_tokens_max``."""
        own_word, learned = request.output_tokens_expected, self._tokens.get(request.tenant_id)
        expected: float
        if own_word is not None:
            expected = max(own_word, OWN_WORD_LEAST * (learned or 0.0))
        elif self._kind is OutputEstimatorKind.ZERO:
            expected = 0.0
        elif learned is None:
            expected = self._default_tokens
        elif request.tenant_id in self._unfinished:
            expected = max(learned, self._default_tokens)
        else:
            expected = learned
        return max(1, min(math.ceil(expected), request.output_tokens_max))

    def learn(self, tenant_id: TenantId, output_tokens: int) -> None:
        """Take in the output of a leg that ran to its end."""
        self._unfinished.pop(tenant_id, None)
        self._take(tenant_id, output_tokens)

    def learn_at_least(self, tenant_id: TenantId, output_tokens: int) -> None:
        """Take in what a leg produced that was broken off, or still runs; what is known never falls by it."""
        known = self._tokens.get(tenant_id)
        if self._kind is OutputEstimatorKind.ZERO or output_tokens <= (known or 0.0):
            return
        if known is None:
            self._unfinished[tenant_id] = None
        self._take(tenant_id, output_tokens)

    def _take(self, tenant_id: TenantId, output_tokens: int) -> None:
        known = self._tokens.get(tenant_id)
        match self._kind:
            case OutputEstimatorKind.ZERO:
                return
            case OutputEstimatorKind.MEAN:
                tokens = output_tokens if known is None else known + (output_tokens - known) * OUTPUT_STEP
            case OutputEstimatorKind.DECAYED_MAX:
                tokens = output_tokens if known is None else max(output_tokens, known * MAX_KEPT)
            case OutputEstimatorKind.P75:
                latest = self._latest.setdefault(tenant_id, Latest())
                latest.add(output_tokens)
                tokens = latest.p75
            case _:
                assert_never(self._kind)
        self._tokens[tenant_id] = float(tokens)

    def forget(self, tenant_id: TenantId) -> None:
        """Drop what was learned of a tenant."""
        self._tokens.pop(tenant_id, None)
        self._latest.pop(tenant_id, None)
        self._unfinished.pop(tenant_id, None)

    def learned(self) -> tuple[OutputLearned, ...]:
        """State for a checkpoint."""
        return tuple(
            OutputLearned(
                tenant_id,
                tokens,
                tuple(self._latest[tenant_id].by_time) if tenant_id in self._latest else (),
                tenant_id not in self._unfinished,
            )
            for tenant_id, tokens in self._tokens.items()
        )

    def restore(self, learned: tuple[OutputLearned, ...]) -> None:
        """Go on from a checkpoint; from one of another kind, each tenant's estimate there is its first length."""
        for each in learned:
            if self._kind is OutputEstimatorKind.P75:
                for tokens in each.latest_tokens or (math.ceil(each.tokens),):
                    self.learn(each.tenant_id, tokens)
            elif self._kind is not OutputEstimatorKind.ZERO:
                self._tokens[each.tenant_id] = each.tokens
            if not each.has_finished and each.tenant_id in self._tokens:
                self._unfinished[each.tenant_id] = None


@dataclass(slots=True)
class CostRate:
    """R: cost tokens the pool delivers a second, over the time in which it had any open ticket.

    Both sums decay together with busy time, so idle time changes nothing; busy time decays while it passes, so it
    is the same whether an hour passes in one step or in many.
    """

    cost: float
    busy_s: float = 1.0
    leg_cost: float = 0.0
    """Mean cost of a leg, the latest weighing most; until one has ended, the charge of the first dispatch."""
    settled_at_ns: int | None = None
    """Up to when busy time is counted; None while the pool is idle."""

    def busy_from(self, now_ns: int) -> None:
        """The first ticket opened."""
        self.settled_at_ns = now_ns

    def idle_from(self, now_ns: int) -> None:
        """The last ticket closed."""
        self._advance(now_ns)
        self.settled_at_ns = None

    def dispatched(self, charge: float) -> None:
        """A leg was dispatched: until the first has ended, its charge is all that is known of what legs cost."""
        if self.leg_cost == 0.0:
            self.leg_cost = charge

    def add(self, cost: float, now_ns: int) -> None:
        """Count what a leg attained."""
        self._advance(now_ns)
        self.cost += cost
        self.leg_cost = cost if self.leg_cost == 0.0 else self.leg_cost + (cost - self.leg_cost) * LEG_COST_STEP

    def backlog_ns(self, requests: int) -> int:
        """How long the pool works on so many waiting requests."""
        return round(requests * self.leg_cost / self.per_s * NS_PER_S) if self.cost > 0.0 else 0

    @property
    def per_s(self) -> float:
        """Never below ``COST_RATE_MIN_PER_S``."""
        return max(COST_RATE_MIN_PER_S, self.cost / self.busy_s)

    def _advance(self, now_ns: int) -> None:
        if self.settled_at_ns is None or now_ns <= self.settled_at_ns:
            return
        elapsed_s = (now_ns - self.settled_at_ns) / NS_PER_S
        kept = math.exp(-elapsed_s / COST_RATE_MEMORY_S)
        self.cost *= kept
        self.busy_s = self.busy_s * kept + COST_RATE_MEMORY_S * (1.0 - kept)
        self.settled_at_ns = now_ns


@dataclass(slots=True)
class ServiceRate:
    """How fast a tenant's queue moves, from the gaps between its grants."""

    gap_ns: float = 0.0
    granted_at_ns: int | None = None

    def granted(self, now_ns: int) -> None:
        """One of the tenant's requests was granted."""
        if self.granted_at_ns is not None:
            gap_ns = now_ns - self.granted_at_ns
            self.gap_ns = gap_ns if self.gap_ns == 0.0 else self.gap_ns + (gap_ns - self.gap_ns) * SERVICE_STEP
        self.granted_at_ns = now_ns

    def retry_after_ms(self, default_ms: int, places: int = 1) -> int:
        """When about ``places`` places will have become free in the tenant's queue; 10 ms to 60 s."""
        if self.gap_ns == 0.0:
            return default_ms
        return max(10, min(60_000, round(self.gap_ns * places / NS_PER_MS)))
