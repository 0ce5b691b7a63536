"""The tenants of a pool, what each has outstanding on workers, and what each was due and got.

Active tenants are those in A or holding tickets; while there are two or more, the headroom of each worker goes
only to those whose outstanding cost is below φ/Σφ of the total. Whoever has nothing outstanding is below.

Share due: while a tenant is in A, it is due φ/Σφ(A) of whatever the pool dispatches. One accumulator grows by
``cost/Σφ(A)``; a tenant's due is φ times its growth while the tenant was in A.

Sums return to exactly zero with the last ticket, whatever floats did on the way.
"""

import math
from collections.abc import Sequence

from evenhand.core.ids import TenantId
from evenhand.core.tenant import Tenant


class Outstanding:
    """One writer: the pool's scheduler."""

    def __init__(self) -> None:
        self.tenants: dict[TenantId, Tenant] = {}
        self.total = 0.0
        self._active: dict[TenantId, Tenant] = {}
        self._active_weight: float | None = 0.0
        self._due_per_weight = 0.0
        self.cost_dispatched = 0.0

    @property
    def active_count(self) -> int:
        """Tenants in A or holding tickets."""
        return len(self._active)

    def book(self, tenant: Tenant, cost: float) -> None:
        """Add to (or take from) what the tenant has outstanding."""
        tenant.outstanding += cost
        self.total += cost

    def release(self, tenant: Tenant, cost: float, tickets_open: int) -> None:
        """Take a closed ticket's cost out; ``tickets_open`` of the pool are left."""
        tenant.outstanding = tenant.outstanding - cost if tenant.granted else 0.0
        self.total = self.total - cost if tickets_open else 0.0

    def note(self, tenant: Tenant) -> None:
        """The tenant may have become active, or ceased to be."""
        tenant_id = tenant.spec.tenant_id
        if tenant.in_a or tenant.granted:
            if tenant_id not in self._active:
                self._active[tenant_id] = tenant
                self._active_weight = None
        elif tenant_id in self._active:
            del self._active[tenant_id]
            self._active_weight = None

    def weight_changed(self) -> None:
        self._active_weight = None

    @property
    def per_weight(self) -> float:
        """Outstanding cost per weight at which a tenant has its share; infinite while less than two are active."""
        if len(self._active) < 2:
            return math.inf
        if self._active_weight is None:
            self._active_weight = sum(active.spec.weight for active in self._active.values())
        return self.total / self._active_weight

    def below_share(self, tenant: Tenant) -> bool:
        """May the tenant use headroom: alone, or with less outstanding than its share of the total."""
        return not tenant.granted or tenant.outstanding < tenant.spec.weight * self.per_weight

    def those_below_share(self, tenants: Sequence[Tenant]) -> list[Tenant]:
        """As ``below_share``, for many."""
        per_weight = self.per_weight
        return [t for t in tenants if not t.granted or t.outstanding < t.spec.weight * per_weight]

    def dispatched(self, tenant: Tenant, cost: float, weight_sum: float) -> None:
        """The pool gave ``cost`` to one tenant while Σφ(A) was ``weight_sum``; corrections count alike."""
        tenant.cost_got += cost
        self.cost_dispatched += cost
        if weight_sum > 0.0:
            self._due_per_weight += cost / weight_sum

    def entered(self, tenant: Tenant, now_ns: int) -> None:
        """The tenant came into A."""
        tenant.cost_due_mark, tenant.backlogged_from_ns = self._due_per_weight, now_ns

    def left(self, tenant: Tenant, now_ns: int) -> None:
        """The tenant went out of A, or its weight is about to change."""
        tenant.cost_due += tenant.spec.weight * (self._due_per_weight - tenant.cost_due_mark)
        tenant.backlogged_ns += now_ns - tenant.backlogged_from_ns
        self.entered(tenant, now_ns)

    def due(self, tenant: Tenant) -> float:
        """Cost the tenant was due so far."""
        if not tenant.in_a:
            return tenant.cost_due
        return tenant.cost_due + tenant.spec.weight * (self._due_per_weight - tenant.cost_due_mark)
