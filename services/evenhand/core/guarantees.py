"""Guaranteed shares: a reservation tag per tenant, beside the clocks.

A tenant may be guaranteed a part of the pool's cost rate R, whatever its weight. Its *tag* is the time up to
which what it got has paid its guarantee; while it is in A and its tag is not after now, it is behind on its
guarantee, and takes its best fitting pair before ordinary selection, in the order of (tag, id)::

    at every dispatch of the tenant     tag = max(tag, now − burst) + charge / rate      rate = share · R
    at usage, at the end of the leg     tag += correction / that rate

So it gets at most ``rate · time + rate · burst + one charge`` this way over any time; what it did not ask for is
kept for ``guarantee_burst_ms``, no longer. Every dispatch moves the tag, also those by its turn: who gets its
guarantee by weight needs no place of its own.

Inside the windows of all levels such a dispatch is an ordinary one. Outside, the whole leg (charge, usage, end)
is booked to the guarantee ledger and moves no clock, so that what is guaranteed to one delays no other beyond the
rate.

Shares that sum to more than ``guaranteed_share_sum_max`` are scaled down to it together, so that the rest of the
pool keeps moving. A worker that is kept for the most-behind user is not given to a guarantee.

One writer, the pool's scheduler. This module moves no clock and chooses no worker.
"""

from bisect import bisect_left, insort

from evenhand.core.estimator import NS_PER_MS, NS_PER_S, CostRate
from evenhand.core.facts import SchedulerConfig
from evenhand.core.fair_queue import WEIGHT_UNITS
from evenhand.core.tenant import Tenant


class Guarantees:
    """Tags of the tenants that have a guarantee, and the order of those in A."""

    def __init__(self, config: SchedulerConfig, cost_rate: CostRate) -> None:
        self._burst_ns = config.guarantee_burst_ms * NS_PER_MS
        self._share_sum_max = config.guaranteed_share_sum_max
        self._tenants_max = config.tenants_considered_max
        self._cost_rate = cost_rate
        self._order: list[tuple[float, str, Tenant]] = []
        """Those in A by (tag, id)."""
        self._share_units = 0
        """Sum of all guaranteed shares, in ``WEIGHT_UNITS``, so that it never drifts."""

    def change(self, tenant: Tenant, share: float) -> None:
        """The tenant's guaranteed share is this from here on; 0: none."""
        units = round(share * WEIGHT_UNITS)
        self._take_out(tenant)
        self._share_units += units - tenant.guaranteed_units
        tenant.guaranteed_units = units
        self.note(tenant)

    def note(self, tenant: Tenant) -> None:
        """The tenant may have entered or left A."""
        if tenant.in_a and tenant.guaranteed_units:
            if not tenant.guarantee_waits:
                tenant.guarantee_waits = True
                insort(self._order, (tenant.guarantee_tag_ns, tenant.node_id, tenant))
        elif tenant.guarantee_waits:
            self._take_out(tenant)

    def due(self, now_ns: int) -> list[Tenant]:
        """Tenants in A that are behind on their guarantee, the furthest behind first; at most K of them."""
        tenants: list[Tenant] = []
        for tag_ns, _, tenant in self._order:
            if tag_ns > now_ns or len(tenants) >= self._tenants_max:
                break
            tenants.append(tenant)
        return tenants

    def next_due_ns(self, now_ns: int) -> int | None:
        """When the next tenant in A falls behind on its guarantee; None if none will unless something changes."""
        index = bisect_left(self._order, (now_ns + 1, ""))
        return round(self._order[index][0]) + 1 if index < len(self._order) else None

    def rate_per_s(self, tenant: Tenant) -> float:
        """Cost a second that the tenant is guaranteed; 0: it has no guarantee."""
        if not tenant.guaranteed_units:
            return 0.0
        share, share_sum = tenant.guaranteed_units / WEIGHT_UNITS, self._share_units / WEIGHT_UNITS
        if share_sum > self._share_sum_max:
            share *= self._share_sum_max / share_sum
        return share * self._cost_rate.per_s

    def charge(self, tenant: Tenant, cost: float, now_ns: int) -> float:
        """A dispatch of the tenant; returns the rate by which its corrections count, 0 without a guarantee."""
        rate = self.rate_per_s(tenant)
        if rate > 0.0:
            self._move(tenant, max(tenant.guarantee_tag_ns, now_ns - self._burst_ns) + cost / rate * NS_PER_S)
        return rate

    def correct(self, tenant: Tenant, cost: float, rate_per_s: float) -> None:
        """A leg turned out to cost so much more, or less, than it was charged at this rate."""
        if rate_per_s > 0.0 and cost:
            self._move(tenant, tenant.guarantee_tag_ns + cost / rate_per_s * NS_PER_S)

    def restore(self, tenant: Tenant, ahead_ns: float, now_ns: int) -> None:
        """Set a tenant's tag by how far ahead of now it was."""
        self._move(tenant, now_ns + ahead_ns)

    def _move(self, tenant: Tenant, tag_ns: float) -> None:
        self._take_out(tenant)
        tenant.guarantee_tag_ns = tag_ns
        self.note(tenant)

    def _take_out(self, tenant: Tenant) -> None:
        if tenant.guarantee_waits:
            index = bisect_left(self._order, (tenant.guarantee_tag_ns, tenant.node_id))
            assert self._order[index][2] is tenant, "the order of guarantees is broken"
            del self._order[index]
            tenant.guarantee_waits = False
