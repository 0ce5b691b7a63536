"""Limits per minute: requests and tokens, of each tenant as a whole and of each of its users.

A request is admitted if every limit has what it needs, and is then charged to all of them; what is refused takes
nothing. Tokens are taken as estimated (prompt and estimated output) and settled when the request ends::

    granted, ended with usage          truth − taken, either way; a debt is possible
    granted, ended without usage       keeps what is taken, and what a renewal told beyond it
    left its queue ungranted           all tokens come back; the request itself stays counted
    ended for want of a worker         tokens and the request come back
    worker lost, another leg follows   nothing: one request, one charge

So over any time t at most ``burst + rate·t`` requests are admitted and not given back; and as many tokens, but for
what single requests take beyond a bucket's burst and what the truth adds to estimates.

This module knows no queue; who tells it of ends tells each once. What a request took stands in a book until then.
"""

import heapq
from collections.abc import Container
from dataclasses import dataclass

from evenhand.core.errors import InvalidInput
from evenhand.core.facts import RateLimits, Refusal, RefusalReason, Request, TenantSpec, Ticket
from evenhand.core.ids import RequestId, TenantId
from evenhand.core.rate_limit import (
    TENANT_REQUESTS,
    TENANT_TOKENS,
    UNITS,
    USER_REQUESTS,
    USER_TOKENS,
    USERS_MAX,
    WHOLE,
    RateLimit,
)

NS_PER_MS = 1_000_000

RATE_MAX = 10**12
"""Largest rate and burst that a limit may have."""

USERS_SAVED_MAX = 20_000
"""Buckets of users in a checkpoint, the emptiest first; one that is left out is full again after a restart."""


def burst_of(per_minute: int, burst: int) -> int:
    """What a bucket holds, in requests or tokens: as told, else one second's worth, at least 1."""
    return burst or max(1, per_minute // 60)


@dataclass(slots=True)
class Charge:
    """What one open request took, and of which limits; limits set later do not know it."""

    user: str
    tokens: int
    limits: tuple[RateLimit, ...]


@dataclass(frozen=True, slots=True)
class BucketLevel:
    """A level as whole requests or tokens (floor) and what is left of it in units, so that each fits 64 bits."""

    key: str
    whole: int
    units: int


@dataclass(frozen=True, slots=True)
class LimitLevels:
    """One limit's buckets at the moment of a checkpoint."""

    tenant_id: TenantId
    name: str
    rest: BucketLevel
    buckets: tuple[BucketLevel, ...]


@dataclass(frozen=True, slots=True)
class TokensTaken:
    """What the request of an open ticket took, for a checkpoint."""

    tokens: int
    limits: tuple[str, ...]


class Limits:
    """The limits of all tenants of a pool, and the book of what open requests took of them."""

    def __init__(self) -> None:
        self._limits: dict[TenantId, tuple[RateLimit, ...]] = {}
        """Of each tenant that has any, tenant's first, requests first."""
        self._charges: dict[tuple[TenantId, RequestId], Charge] = {}
        self._now_ns = 0

    @property
    def open_count(self) -> int:
        """Requests that took something and have not ended."""
        return len(self._charges)

    def of(self, tenant_id: TenantId) -> tuple[RateLimit, ...]:
        """Limits of a tenant, the tenant's own first; empty: it has none."""
        return self._limits.get(tenant_id, ())

    def change(self, spec: TenantSpec, now_ns: int) -> None:
        """Set a tenant's limits; what goes on under another rate or burst keeps its level.

        Raises ``InvalidInput`` for rates and bursts that cannot be, before anything is changed.
        """
        check_rates(spec)
        self._now_ns = max(self._now_ns, now_ns)
        of_tenant, of_user = spec.rate_limits, spec.user_rate_limits
        wanted = (
            (TENANT_REQUESTS, of_tenant.requests_per_minute, of_tenant.requests_burst),
            (TENANT_TOKENS, of_tenant.tokens_per_minute, of_tenant.tokens_burst),
            (USER_REQUESTS, of_user.requests_per_minute, of_user.requests_burst),
            (USER_TOKENS, of_user.tokens_per_minute, of_user.tokens_burst),
        )
        known = {limit.name: limit for limit in self.of(spec.tenant_id)}
        limits: list[RateLimit] = []
        for name, per_minute, told_burst in wanted:
            if not per_minute:
                continue
            burst, limit = burst_of(per_minute, told_burst), known.get(name)
            if limit is None:
                limit = RateLimit(name, per_minute, burst, now_ns)
            elif (limit.per_minute, limit.burst) != (per_minute, burst):
                limit.change(per_minute, burst, now_ns)
            limits.append(limit)
        if limits:
            self._limits[spec.tenant_id] = tuple(limits)
        else:
            self._limits.pop(spec.tenant_id, None)

    def forget(self, tenant_id: TenantId) -> None:
        """Drop a tenant of which nothing is open."""
        self._limits.pop(tenant_id, None)

    def refusal(self, request: Request, output_tokens_estimated: int, now_ns: int) -> Refusal | None:
        """Why a request may not be admitted now, by the limit that takes longest; takes nothing."""
        longest: RateLimit | None = None
        longest_ns = 0
        tokens = request.prompt_tokens + output_tokens_estimated
        for limit in self.of(request.tenant_id):
            key = request.user if limit.per_user else WHOLE
            wait_ns = limit.wait_ns(key, tokens if limit.counts_tokens else 1, now_ns)
            if wait_ns > longest_ns:
                longest, longest_ns = limit, wait_ns
        if longest is None:
            return None
        retry_after_ms = -(-longest_ns // NS_PER_MS)
        return _refusal(request, longest, tokens, retry_after_ms, now_ns)

    def take(self, request: Request, output_tokens_estimated: int, now_ns: int) -> None:
        """Charge an admitted request to every limit of its tenant and its user."""
        tokens = request.prompt_tokens + output_tokens_estimated
        self._take(request.tenant_id, request.request_id, request.user, tokens, now_ns)

    def adopt(self, ticket: Ticket, now_ns: int) -> None:
        """Charge the request of a ticket of an earlier term that no checkpoint told of, whatever is left."""
        tokens = ticket.prompt_tokens + ticket.output_tokens_estimated
        self._take(ticket.tenant_id, ticket.request_id, ticket.user, tokens, now_ns)

    def use(self, tenant_id: TenantId, request_id: RequestId, tokens: int, now_ns: int) -> None:
        """A running leg has used so many tokens by now: what that is beyond the charge is taken at once."""
        charge = self._charges.get((tenant_id, request_id))
        if charge is not None and tokens > charge.tokens:
            self._settle(charge, tokens, now_ns)

    def end(self, tenant_id: TenantId, request_id: RequestId, tokens: int | None, now_ns: int) -> None:
        """A request is over and used so many tokens; None: unknown, what is taken is kept."""
        charge = self._charges.pop((tenant_id, request_id), None)
        if charge is not None and tokens is not None:
            self._settle(charge, tokens, now_ns)

    def give_back(self, tenant_id: TenantId, request_id: RequestId, now_ns: int) -> None:
        """A request ends unserved and not by its client's doing: as if it had never been admitted."""
        charge = self._charges.pop((tenant_id, request_id), None)
        if charge is None:
            return
        self._settle(charge, 0, now_ns)
        for limit in charge.limits:
            if not limit.counts_tokens:
                limit.move(charge.user if limit.per_user else WHOLE, 1, now_ns)

    # Checkpoint

    def taken(self, tenant_id: TenantId, request_id: RequestId) -> TokensTaken | None:
        """What the request of an open ticket took; None: nothing, its tenant had no limits."""
        charge = self._charges.get((tenant_id, request_id))
        if charge is None:
            return None
        in_force = self.of(tenant_id)
        return TokensTaken(charge.tokens, tuple(limit.name for limit in charge.limits if limit in in_force))

    def levels(self, now_ns: int, granted: Container[tuple[TenantId, RequestId]]) -> tuple[LimitLevels, ...]:
        """All levels at a time. What waits ungranted counts as given back: its client will ask anew."""
        now_ns = max(now_ns, self._now_ns)
        waiting: dict[int, dict[str, int]] = {}
        for request_key, charge in self._charges.items():
            if request_key in granted:
                continue
            for limit in charge.limits:
                key, amount = charge.user if limit.per_user else WHOLE, charge.tokens if limit.counts_tokens else 1
                given = waiting.setdefault(id(limit), {})
                given[key] = given.get(key, 0) + amount * UNITS
        saved: list[LimitLevels] = []
        users_left = USERS_SAVED_MAX
        for tenant_id, limits in self._limits.items():
            for limit in limits:
                full, rest_level, levels = limit.burst * UNITS, limit.rest_level(now_ns), limit.levels(now_ns)
                for key, units in waiting.get(id(limit), {}).items():
                    levels[key] = levels.get(key, rest_level) + units
                kept = [(min(full, level), key) for key, level in levels.items() if min(level, rest_level) < full]
                if limit.per_user:
                    if len(kept) > users_left:
                        kept = heapq.nsmallest(users_left, kept)
                    users_left -= len(kept)
                rest = _bucket_level(WHOLE, rest_level)
                buckets = tuple(_bucket_level(key, level) for level, key in kept)
                saved.append(LimitLevels(tenant_id, limit.name, rest, buckets))
        return tuple(saved)

    def restore(self, saved: tuple[LimitLevels, ...], at_ns: int) -> None:
        """Take up levels of limits that ``change`` has set; ``at_ns``: when they were so, on this clock."""
        for levels in saved:
            for limit in self.of(levels.tenant_id):
                if limit.name == levels.name:
                    buckets = {each.key: each.whole * UNITS + each.units for each in levels.buckets}
                    limit.restore(levels.rest.whole * UNITS + levels.rest.units, buckets, at_ns)

    def restore_taken(self, ticket: Ticket, taken: TokensTaken) -> None:
        """Take up what the request of an open ticket took."""
        limits = tuple(limit for limit in self.of(ticket.tenant_id) if limit.name in taken.limits)
        self._charges[ticket.tenant_id, ticket.request_id] = Charge(ticket.user, taken.tokens, limits)

    # Within

    def _take(self, tenant_id: TenantId, request_id: RequestId, user: str, tokens: int, now_ns: int) -> None:
        limits = self.of(tenant_id)
        if not limits:
            return
        self._now_ns = max(self._now_ns, now_ns)
        assert (tenant_id, request_id) not in self._charges, f"request {request_id} charged twice"
        self._charges[tenant_id, request_id] = Charge(user, tokens, limits)
        for limit in limits:
            limit.move(user if limit.per_user else WHOLE, -tokens if limit.counts_tokens else -1, now_ns)

    def _settle(self, charge: Charge, tokens: int, now_ns: int) -> None:
        self._now_ns = max(self._now_ns, now_ns)
        for limit in charge.limits:
            if limit.counts_tokens:
                limit.move(charge.user if limit.per_user else WHOLE, charge.tokens - tokens, now_ns)
        charge.tokens = tokens


def check_rates(spec: TenantSpec) -> None:
    """Raise ``InvalidInput`` for a rate or burst that is negative or beyond ``RATE_MAX``."""
    for scope, limits in (("rate_limits", spec.rate_limits), ("user_rate_limits", spec.user_rate_limits)):
        for name in RateLimits.__slots__:
            value: int = getattr(limits, name)
            if not 0 <= value <= RATE_MAX:
                raise InvalidInput(
                    f"Tenant {spec.tenant_id} has {scope}.{name} {value}; it must be from 0 to {RATE_MAX}."
                )


def _bucket_level(key: str, level: int) -> BucketLevel:
    return BucketLevel(key, level // UNITS, level % UNITS)


def _refusal(request: Request, limit: RateLimit, tokens: int, retry_after_ms: int, now_ns: int) -> Refusal:
    key = request.user if limit.per_user else WHOLE
    remaining = limit.remaining(key, now_ns)
    if limit.lacks_room(key, now_ns):
        sentence = (
            f"Tenant {request.tenant_id} has {USERS_MAX} users at once below their limits per minute; there is "
            f"room for another in {retry_after_ms} ms."
        )
        return Refusal(RefusalReason.RATE_LIMITED, sentence, retry_after_ms, limit.name, 0)
    who = f"Each user of tenant {request.tenant_id}" if limit.per_user else f"Tenant {request.tenant_id}"
    left = f"{remaining} are left" if remaining >= 0 else f"{-remaining} are owed"
    if limit.counts_tokens:
        sentence = (
            f"{who} may use {limit.per_minute} tokens a minute, up to {limit.burst} at once: {left}, the request "
            f"needs {tokens} and is admitted in {retry_after_ms} ms."
        )
    else:
        sentence = (
            f"{who} may send {limit.per_minute} requests a minute, up to {limit.burst} at once: {left}, the next "
            f"is admitted in {retry_after_ms} ms."
        )
    return Refusal(RefusalReason.RATE_LIMITED, sentence, retry_after_ms, limit.name, remaining)
