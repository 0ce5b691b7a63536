"""Guaranteed shares: a debt in cost per tenant, beside the clocks.

A tenant may be guaranteed a part of the pool's cost rate R, whatever its weight. The pool has a *work clock*
``G = ∫ R dt``: the cost that it delivers, as far as R is learned. Each tenant has a *tag*, a reading of G up to
which what it got has paid its guarantee; while it is in A and its tag is not after G, it is behind on its
guarantee, and takes its best fitting pair before ordinary selection, in the order of (tag, id)::

    at every dispatch of the tenant    tag = max(tag, G − burst) + charge / share    burst = R · guarantee_burst_ms
    at usage, at the end of the leg    tag += correction / that share
    … of a leg by its turn             tag at most max(tag, G + burst)

A charge is a cost, and so is what G counts: what it comes to in time is for the R of later to say. Were the tag
a time, a charge in an hour in which the pool hardly worked would be held against its tenant for hours of work.

So it gets at most ``share · ∫R dt + share · burst + one charge`` this way over any time; what it did not ask for
is kept for ``guarantee_burst_ms``, no longer. Every dispatch moves the tag, also those by its turn: who gets its
guarantee by weight needs no place of its own. But what it had by its turn, or alone in a pool that nobody else
wanted, voids its guarantee for no longer than the burst. A leg by its turn whose move was cut short by that gives
back, when it costs less, only what it had moved beyond its true cost: it can not undo what a guarantee's leg paid.

Inside the windows of all levels such a dispatch is an ordinary one. Outside, the whole leg (charge, usage, end)
is booked to the guarantee ledger and moves no clock, so that what is guaranteed to one delays no other beyond the
rate.

At each look the first K of those that are due are asked what of theirs fits. Those that found nothing the last
time (``asked``) must not stop whoever is behind them: they do not count among the K, and of them the K longest
unasked are asked beside, each in its place in the order. So all are asked in turn, and a look stays bounded.

A share that changes keeps what is owed, as a cost: ``tag − G`` becomes what that is at the share of now, and so
does what open legs have moved.

Shares that sum to more than ``guaranteed_share_sum_max`` are scaled down to it together, so that the rest of the
pool keeps moving. A worker that is kept goes to no guarantee but that of the user it is kept for.

One writer, the pool's scheduler. This module moves no clock of the fair queue and chooses no worker.
"""

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from itertools import islice

from evenhand.core.estimator import NS_PER_S, CostRate
from evenhand.core.facts import SchedulerConfig
from evenhand.core.fair_queue import WEIGHT_UNITS
from evenhand.core.tenant import Tenant
from evenhand.core.tickets import OpenTicket


class Guarantees:
    """The work clock, tags of the tenants that have a guarantee, and the order of those in A."""

    def __init__(self, config: SchedulerConfig, cost_rate: CostRate) -> None:
        self._burst_s = config.guarantee_burst_ms / 1_000.0
        self._share_sum_max = config.guaranteed_share_sum_max
        self._tenants_max = config.tenants_considered_max
        self._cost_rate = cost_rate
        self._order: list[tuple[float, str, Tenant]] = []
        """Those in A by (tag, id), but for those that found nothing."""
        self._vain: dict[Tenant, None] = {}
        """Those in A that were due and found nothing the last time, the longest unasked first."""
        self._share_units = 0
        """Sum of all guaranteed shares, in ``WEIGHT_UNITS``, so that it never drifts."""
        self.clock = 0.0
        """G as of the step at hand, in cost tokens."""
        self._passed_ns: int | None = None
        """Up to when G is counted; None: nothing has begun."""
        self._rate_per_s = 0.0
        self._rate_clock = 0.0
        self._rate_from_ns = 0
        """R is this since then, when G was that: a sum of many small steps would lose them beside a large G."""

    def pass_time(self, now_ns: int) -> None:
        """Bring G to now. R has been what it is since the last step, and changes with what ends in this one."""
        rate = self._cost_rate.per_s
        if self._passed_ns is None or rate != self._rate_per_s:
            self._rate_per_s, self._rate_clock = rate, self.clock
            self._rate_from_ns = now_ns if self._passed_ns is None else self._passed_ns
        self._passed_ns = now_ns
        self.clock = self._rate_clock + rate * ((now_ns - self._rate_from_ns) / NS_PER_S)

    @property
    def burst(self) -> float:
        """What the pool delivers in ``guarantee_burst_ms``, at the R of now."""
        return self._cost_rate.per_s * self._burst_s

    def clock_at(self, now_ns: int) -> float:
        """G at a time not before the last step."""
        if self._passed_ns is None or now_ns <= self._passed_ns:
            return self.clock
        return self.clock + self._cost_rate.per_s * ((now_ns - self._passed_ns) / NS_PER_S)

    def change(self, tenant: Tenant, share: float) -> None:
        """The tenant's guaranteed share is this from here on; 0: none."""
        units = round(share * WEIGHT_UNITS)
        before = self.share(tenant)
        self._take_out(tenant)
        self._share_units += units - tenant.guaranteed_units
        tenant.guaranteed_units = units
        after = self.share(tenant)
        if before > 0.0 and after > 0.0 and after != before:
            self._rescale(tenant, before / after)
        self.note(tenant)

    def _rescale(self, tenant: Tenant, by: float) -> None:
        """What is owed, and what open legs have moved, is a cost: at another share it is so much more of G."""
        tenant.guarantee_tag = self.clock + (tenant.guarantee_tag - self.clock) * by
        for held in tenant.granted.values():
            held.guarantee_share /= by
            held.guarantee_moved *= by

    def note(self, tenant: Tenant) -> None:
        """The tenant may have entered or left A."""
        if tenant.in_a and tenant.guaranteed_units:
            if not tenant.guarantee_waits:
                tenant.guarantee_waits = True
                insort(self._order, (tenant.guarantee_tag, tenant.node_id, tenant))
        elif tenant.guarantee_waits:
            self._take_out(tenant)

    def due(self) -> list[Tenant]:
        """Tenants in A that are behind on their guarantee and are to be asked, the furthest behind first.

        At most K of them, and K that found nothing the last time.
        """
        tenants: list[Tenant] = []
        for tag, _, tenant in self._order:
            if tag > self.clock or len(tenants) >= self._tenants_max:
                break
            tenants.append(tenant)
        if self._vain:
            tenants += islice(self._vain, self._tenants_max)
            tenants.sort(key=_place)
        return tenants

    def asked(self, due: Sequence[Tenant], found: Tenant | None) -> None:
        """Of those ``due`` all before the one that found a pair were asked in vain; None: all were."""
        for tenant in due:
            if tenant is found:
                return
            self._take_out(tenant)
            tenant.guarantee_waits = True
            self._vain[tenant] = None

    def next_due_ns(self, now_ns: int) -> int | None:
        """When the next tenant in A falls behind on its guarantee, while R stays; None: none will."""
        index = bisect_right(self._order, self.clock, key=_tag)
        if index == len(self._order):
            return None
        wait_ns = (self._order[index][0] - self.clock) / self._cost_rate.per_s * NS_PER_S
        return now_ns + math.ceil(wait_ns) + 1

    def share(self, tenant: Tenant) -> float:
        """Part of R that the tenant is guaranteed, as scaled; 0: it has no guarantee."""
        if not tenant.guaranteed_units:
            return 0.0
        share, share_sum = tenant.guaranteed_units / WEIGHT_UNITS, self._share_units / WEIGHT_UNITS
        return share * self._share_sum_max / share_sum if share_sum > self._share_sum_max else share

    def behind_ms(self, tenant: Tenant, now_ns: int) -> float:
        """For how long its guarantee has been due, at the R of now, as far as that is kept; 0: none.

        Below 0: so long it will not be. Never above 0 outside A: who asks for nothing is not behind.
        """
        if not tenant.guaranteed_units:
            return 0.0
        kept_s = self._burst_s if tenant.in_a else 0.0
        behind_s = (self.clock_at(now_ns) - tenant.guarantee_tag) / self._cost_rate.per_s
        return min(kept_s, behind_s) * 1_000.0

    def charge(self, tenant: Tenant, held: OpenTicket) -> None:
        """A dispatch of the tenant: its leg is held with the share by which its corrections count."""
        share = self.share(tenant)
        if share > 0.0:
            held.guarantee_share = share
            self._move(tenant, max(tenant.guarantee_tag, self.clock - self.burst))
            self._pay(tenant, held, held.booked / share)

    def correct(self, tenant: Tenant, held: OpenTicket, cost: float) -> None:
        """A leg turns out to cost so much more, or less, than is booked for it."""
        share = held.guarantee_share
        if share <= 0.0 or not cost:
            return
        if cost > 0.0 or held.ticket.guaranteed:
            self._pay(tenant, held, cost / share)
            return
        back = max(0.0, held.guarantee_moved - (held.booked + cost) / share)
        held.guarantee_moved -= back
        self._move(tenant, tenant.guarantee_tag - back)

    def restore(self, tenant: Tenant, ahead: float, elapsed_ns: int) -> None:
        """Set a tenant's tag by how far ahead of G it was so long ago; R has been restored before."""
        self._move(tenant, self.clock + ahead - self._cost_rate.per_s * (elapsed_ns / NS_PER_S))

    def _pay(self, tenant: Tenant, held: OpenTicket, by: float) -> None:
        """Move a tag onwards; by a leg that had its turn, not further than the burst ahead."""
        before = tenant.guarantee_tag
        after = before + by
        if not held.ticket.guaranteed:
            after = max(before, min(after, self.clock + self.burst))
        held.guarantee_moved += after - before
        self._move(tenant, after)

    def _move(self, tenant: Tenant, tag: float) -> None:
        self._take_out(tenant)
        tenant.guarantee_tag = tag
        self.note(tenant)

    def _take_out(self, tenant: Tenant) -> None:
        if tenant.guarantee_waits:
            tenant.guarantee_waits = False
            if tenant in self._vain:
                del self._vain[tenant]
                return
            index = bisect_left(self._order, (tenant.guarantee_tag, tenant.node_id))
            assert self._order[index][2] is tenant, "the order of guarantees is broken"
            del self._order[index]


def _place(tenant: Tenant) -> tuple[float, str]:
    return tenant.guarantee_tag, tenant.node_id


def _tag(entry: tuple[float, str, Tenant]) -> float:
    return entry[0]
