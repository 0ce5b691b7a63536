"""What each tenant was due, what it got, and how long it waited: the figures of the live table and the summary.

Service is counted in cost tokens (``core.facts.CostWeights``), for every routing policy alike and from what the
engines report in ``usage``. What a tenant is *due* is its max-min fair part of all service given: its weighted
share, unless it asked for less, in which case the rest is shared among the others by weight.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from evenhand.core.facts import CostWeights


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest-rank percentile; NaN of nothing. ``share`` is in (0, 1]."""
    if not values:
        return math.nan
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def fair_shares(asked: Mapping[str, float], weights: Mapping[str, float], total: float) -> dict[str, float]:
    """Max-min fair division of ``total`` among tenants who asked for at most ``asked``, by weight."""
    due = dict.fromkeys(asked, 0.0)
    open_tenants = [tenant for tenant, cost in asked.items() if cost > 0]
    left = total
    while open_tenants and left > 1e-9:
        level = left / sum(weights[tenant] for tenant in open_tenants)
        content = [t for t in open_tenants if asked[t] - due[t] <= level * weights[t]]
        if not content:
            for tenant in open_tenants:
                due[tenant] += level * weights[tenant]
            return due
        for tenant in content:
            left -= asked[tenant] - due[tenant]
            due[tenant] = asked[tenant]
        open_tenants = [tenant for tenant in open_tenants if tenant not in content]
    return due


@dataclass(slots=True)
class TenantAccount:
    """One tenant's figures under one policy. Times in ms from the planned arrival; tokens as the engines say."""

    weight: float = 1.0
    arrived: int = 0
    planned_cost: float = 0.0
    """Cost of what arrived, had nothing been cached."""
    got_cost: float = 0.0
    finished_cost: float = 0.0
    finished: int = 0
    failed: int = 0
    waiting: int = 0
    running: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    first_token_ms: list[float] = field(default_factory=list)

    def asked_cost(self) -> float:
        """What it asked for: what it got, and for each unfinished request the mean of its finished ones.

        A request costs less the more of it is cached, so the demand is known only once some of it was served;
        before that, nothing counts as cached.
        """
        if not self.finished:
            return self.planned_cost
        return self.got_cost + (self.arrived - self.finished) * self.finished_cost / self.finished


class Ledger:
    """All tenants' accounts under one policy."""

    def __init__(self, weights: Mapping[str, float], cost: CostWeights) -> None:
        self.cost = cost
        self.accounts = {tenant: TenantAccount(weight=weight) for tenant, weight in weights.items()}

    def due(self) -> dict[str, float]:
        """Cost tokens due to each tenant out of all that was given."""
        accounts = self.accounts
        return fair_shares(
            {tenant: account.asked_cost() for tenant, account in accounts.items()},
            {tenant: account.weight for tenant, account in accounts.items()},
            self.got_total(),
        )

    def got_total(self) -> float:
        return sum(account.got_cost for account in self.accounts.values())
