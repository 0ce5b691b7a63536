"""The tenants of a pool, what each has outstanding on workers, and what each was due and got.

Active tenants are those in A or holding tickets; while there are two or more, the headroom of each worker goes
only to those whose outstanding cost is below their share of the total: the band's weight among bands with active
tenants, times the tenant's among the active of its band. Whoever has nothing outstanding is below.

Share due: while a tenant is in A, it is due its share of whatever the pool dispatches: its band's weight among
the bands in A, times its own among the band's tenants in A. Each band has one accumulator that grows by the
band's part of a cost ÷ Σφ(its tenants in A); a tenant's due is φ times its growth while the tenant was in A.

Sums return to exactly zero with the last ticket, whatever floats did on the way.
"""

import math

from evenhand.core.fair_queue import WEIGHT_UNITS
from evenhand.core.fair_tree import FairTree
from evenhand.core.ids import TenantId
from evenhand.core.tenant import Band, Tenant


class Outstanding:
    """One writer: the pool's scheduler."""

    def __init__(self, fair: FairTree) -> None:
        self._fair = fair
        self.tenants: dict[TenantId, Tenant] = {}
        self.total = 0.0
        self.active_count = 0
        """Tenants in A or holding tickets."""
        self.queued_in_a = 0
        """Waiting requests of the tenants in A: what waits by its own tenant's limits keeps no worker busy."""
        self._bands_units = 0
        """Weight of the bands that have active tenants."""
        self.cost_dispatched = 0.0

    def book(self, tenant: Tenant, cost: float) -> None:
        """Add to (or take from) what the tenant has outstanding."""
        tenant.outstanding += cost
        self.total += cost

    def release(self, tenant: Tenant, cost: float, tickets_open: int) -> None:
        """Take a closed ticket's cost out; ``tickets_open`` of the pool are left."""
        tenant.outstanding = tenant.outstanding - cost if tenant.granted else 0.0
        self.total = self.total - cost if tickets_open else 0.0

    def note(self, tenant: Tenant) -> None:
        """The tenant may have become active, or ceased to be; or its queue has changed."""
        queued = len(tenant.queue) if tenant.in_a else 0
        if queued != tenant.queued_in_a:
            self.queued_in_a += queued - tenant.queued_in_a
            tenant.queued_in_a = queued
        is_active = tenant.in_a or bool(tenant.granted)
        if is_active is not tenant.is_active:
            self._set_active(tenant, is_active)

    def before_change(self, tenant: Tenant) -> None:
        """The tenant's weight or band is about to change; ``note`` it afterwards."""
        if tenant.is_active:
            self._set_active(tenant, False)

    def _set_active(self, tenant: Tenant, is_active: bool) -> None:
        band, sign = tenant.band, 1 if is_active else -1
        tenant.is_active = is_active
        self.active_count += sign
        band.active_units += sign * tenant.weight_units
        if band.active_units == (tenant.weight_units if is_active else 0):
            self._bands_units += sign * band.weight_units

    def bands_changed(self) -> None:
        """Bands came, went, or weigh otherwise."""
        self._bands_units = sum(band.weight_units for band in self._fair.bands.values() if band.active_units)

    def per_weight(self, band: Band) -> float:
        """Outstanding cost per weight at which a tenant of the band has its share; infinite where one is alone."""
        if self.active_count < 2:
            return math.inf
        units = max(1, band.active_units)
        return self.total * (band.weight_units / max(1, self._bands_units)) * WEIGHT_UNITS / units

    def below_share(self, tenant: Tenant) -> bool:
        """May the tenant use headroom: alone, or with less outstanding than its share of the total.

        While its guarantee is due it is below what it was promised, whatever its weight makes of its share.
        """
        if tenant.guarantee_takes or not tenant.granted:
            return True
        return tenant.outstanding < tenant.weight * self.per_weight(tenant.band)

    def dispatched(self, tenant: Tenant, cost: float) -> None:
        """The pool gave ``cost`` to one tenant, as A stands; corrections count alike."""
        tenant.cost_got += cost
        self.cost_dispatched += cost
        pool = self._fair.pool
        bands_weight = pool.weight_sum
        for _, _, band in pool.in_order():
            band.due_per_weight += cost * (band.weight / bands_weight) / band.tenants.weight_sum

    def entered(self, tenant: Tenant, now_ns: int) -> None:
        """The tenant came into A."""
        tenant.cost_due_mark, tenant.backlogged_from_ns = tenant.band.due_per_weight, now_ns

    def left(self, tenant: Tenant, now_ns: int) -> None:
        """The tenant went out of A, or its weight or band is about to change."""
        tenant.cost_due += tenant.weight * (tenant.band.due_per_weight - tenant.cost_due_mark)
        tenant.backlogged_ns += now_ns - tenant.backlogged_from_ns
        self.entered(tenant, now_ns)

    def due(self, tenant: Tenant) -> float:
        """Cost the tenant was due so far."""
        if not tenant.in_a:
            return tenant.cost_due
        return tenant.cost_due + tenant.weight * (tenant.band.due_per_weight - tenant.cost_due_mark)
