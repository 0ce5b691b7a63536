"""The tree of clocks of one pool: bands, tenants, users; the same rule at each node.

::

    pool ── bands, T = delay · R / Σφ(bands in A)
      └─ band ── tenants, T = delay · R·(share of the band) / Σφ(its tenants in A)
           └─ tenant ── users, T = delay · R·(share of band and tenant) / Σφ(its users in A)

A node is in its parent's A while it may send something, and reaches what any of its children in A reaches. What a
leg costs moves the clocks of all three levels at once, each by cost ÷ its own φ. A request may run where its
user, its tenant and its band all lie inside the windows of their siblings; so every bound holds among siblings,
and a band is delayed by other bands exactly as a tenant is by other tenants: no band comes first.

Where there is one band, or a tenant has one user, its node is a list of one.

This module changes clocks, order and membership; it knows no worker's room and no ticket.
"""

from collections.abc import Iterable, Iterator

from evenhand.core.errors import InvalidInput
from evenhand.core.facts import WEIGHT_MAX, WEIGHT_MIN, SchedulerConfig, TenantSpec
from evenhand.core.fair_queue import FairQueue
from evenhand.core.ids import WorkerId
from evenhand.core.members import Members
from evenhand.core.tenant import Band, Tenant, User
from evenhand.core.worker import Worker

Node = FairQueue[Band] | FairQueue[Tenant] | FairQueue[User]

BANDS_MAX = 64
"""Bands of a pool: the chosen one is found by looking at each."""


class FairTree:
    """All clocks of a pool."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._members = Members()
        self.pool: FairQueue[Band] = FairQueue(self._members)
        self.bands: dict[str, Band] = {}
        self.change_bands(config.bands)

    # Look

    @property
    def members(self) -> dict[WorkerId, Worker]:
        """The workers that count in F; read only."""
        return self._members.workers

    @property
    def members_version(self) -> int:
        """Grows with each change of who is a member, and of what a member can hold."""
        return self._members.version

    @property
    def capacity_min_tokens(self) -> int:
        """What every member can hold."""
        return self._members.capacity_min_tokens

    @property
    def all_universal(self) -> bool:
        """Every child in A of every node reaches every member."""
        return self._members.partial == 0

    @property
    def stirred(self) -> bool:
        """Something changed that may let someone run; whoever has looked sets it back."""
        return self._members.stirred

    @stirred.setter
    def stirred(self, stirred: bool) -> None:
        self._members.stirred = stirred

    def __len__(self) -> int:
        """Tenants in A."""
        return sum(len(band.tenants) for _, _, band in self.pool.in_order())

    def first(self) -> User | None:
        """The most-behind user of the most-behind tenant of the most-behind band."""
        band = self.pool.first()
        tenant = band.tenants.first() if band is not None else None
        return tenant.users.first() if tenant is not None else None

    def share_of_band(self, band: Band) -> float:
        """Its part of the pool by the weights of the bands in A; its own counts even while it is out."""
        weight_sum = self.pool.weight_sum if band.in_a else self.pool.weight_sum + band.weight
        return band.weight / weight_sum

    def window_of_bands(self, cost_rate_per_s: float) -> float:
        """T among bands, in virtual time."""
        return self._window(cost_rate_per_s, self.pool)

    def window_of_tenants(self, band: Band, cost_rate_per_s: float) -> float:
        """T among the tenants of a band."""
        return self._window(cost_rate_per_s * self.share_of_band(band), band.tenants)

    def window_of_users(self, tenant: Tenant, cost_rate_per_s: float) -> float:
        """T among the users of a tenant."""
        band = tenant.band
        weight_sum = band.tenants.weight_sum if tenant.in_a else band.tenants.weight_sum + tenant.weight
        rate = cost_rate_per_s * self.share_of_band(band) * tenant.weight / weight_sum
        return self._window(rate, tenant.users)

    def _window(self, cost_rate_per_s: float, node: Node) -> float:
        if self._config.window_fixed is not None:
            return self._config.window_fixed
        weight_sum = node.weight_sum
        if weight_sum <= 0.0:
            return 0.0
        return self._config.window_delay_ms / 1000.0 * cost_rate_per_s / weight_sum

    # Move

    def book(
        self,
        user: User,
        reach_tokens: int | None,
        user_v: float = 0.0,
        tenant_v: float = 0.0,
        band_v: float = 0.0,
    ) -> None:
        """Add to the clocks of a user, its tenant and its band, and put each where it now belongs.

        ``reach_tokens`` is the user's own, None while nothing of it waits. Whether the tenant is in A is its own
        limits' to say.
        """
        tenant = user.tenant
        band = tenant.band
        tenant.users.place(user, user.v + user_v, reach_tokens)
        tenant_reach = tenant.users.reach_min_tokens if tenant.may_run else None
        band.tenants.place(tenant, tenant.v + tenant_v, tenant_reach)
        self.pool.place(band, band.v + band_v, band.tenants.reach_min_tokens)

    def lift_passed(self, user: User, worker: Worker, cost_rate_per_s: float) -> None:
        """A user is about to pass those that are held up: at each level nobody stays more than T behind it.

        So the window moves on, a claim to what was passed by is never more than T, and whoever enters A later
        starts level with those that were passed.
        """
        tenant = user.tenant
        band = tenant.band
        self.pool.lift_behind(worker, band.v - self.window_of_bands(cost_rate_per_s))
        band.tenants.lift_behind(worker, tenant.v - self.window_of_tenants(band, cost_rate_per_s))
        tenant.users.lift_behind(worker, user.v - self.window_of_users(tenant, cost_rate_per_s))

    def refresh(self, tenant: Tenant) -> None:
        """A tenant's limits or state changed: put it, and its band, where they now belong."""
        band = tenant.band
        band.tenants.place(tenant, tenant.v, tenant.users.reach_min_tokens if tenant.may_run else None)
        self.pool.place(band, band.v, band.tenants.reach_min_tokens)

    def correct_band(self, band: Band | None, band_v: float) -> None:
        """Correct the clock of a band whose leg is of a tenant that has left it; the band may be gone."""
        if band is not None and self.bands.get(band.node_id) is band:
            self.pool.place(band, band.v + band_v, band.tenants.reach_min_tokens)

    # Tenants and bands

    def band_of(self, spec: TenantSpec) -> Band:
        """The band of a tenant; raises ``InvalidInput`` if there is none of that name."""
        band = self.bands.get(spec.band)
        if band is None:
            raise InvalidInput(f"Tenant {spec.tenant_id} is in band {spec.band}, which the pool does not have.")
        return band

    def add(self, spec: TenantSpec) -> Tenant:
        """Know a tenant; raises ``InvalidInput`` if its band is unknown."""
        band = self.band_of(spec)
        tenant = Tenant(spec, band, self._members)
        band.tenants_known[spec.tenant_id] = tenant
        return tenant

    def drop(self, tenant: Tenant) -> None:
        """Know a tenant no more; nothing of it waits."""
        assert not tenant.in_a, "a tenant that is dropped is not in A"
        del tenant.band.tenants_known[tenant.spec.tenant_id]

    def change(self, tenant: Tenant, spec: TenantSpec) -> None:
        """Take another spec: weights, and the band, which it enters as a newcomer. The caller refreshes it."""
        before, after = tenant.band, self.band_of(spec)
        if after is not before:
            before.tenants.place(tenant, tenant.v, None)
            self.pool.place(before, before.v, before.tenants.reach_min_tokens)
            del before.tenants_known[tenant.spec.tenant_id]
            after.tenants_known[spec.tenant_id] = tenant
            tenant.band = after
            for held in tenant.granted.values():
                held.has_left_band = True
            # Clocks of two bands have nothing in common: whatever it had there, here it has had nothing.
            after.tenants.place(tenant, 0.0, None)
        after.tenants.reweigh(tenant, spec.weight)
        tenant.spec = spec
        tenant.change_users(spec)

    def check_bands(self, bands: Iterable[tuple[str, float]]) -> dict[str, float]:
        """Weights of these bands, by name; raises ``InvalidInput`` where the pool cannot have exactly them."""
        wanted: dict[str, float] = {}
        for name, weight in bands:
            if name in wanted:
                raise InvalidInput(f"Band {name} is named twice.")
            if not WEIGHT_MIN <= weight <= WEIGHT_MAX:
                raise InvalidInput(
                    f"Band {name} has weight {weight}; it must be {WEIGHT_MIN:g} to {WEIGHT_MAX:g}."
                )
            wanted[name] = weight
        if not 1 <= len(wanted) <= BANDS_MAX:
            raise InvalidInput(f"A pool has 1 to {BANDS_MAX} bands, not {len(wanted)}.")
        for name, band in self.bands.items():
            if name not in wanted and band.tenants_known:
                raise InvalidInput(f"Band {name} cannot go while {len(band.tenants_known)} tenants stand in it.")
        return wanted

    def change_bands(self, bands: Iterable[tuple[str, float]]) -> None:
        """Have exactly these bands; raises ``InvalidInput``, changing nothing, where that cannot be."""
        wanted = self.check_bands(bands)
        self.bands = {name: band for name, band in self.bands.items() if name in wanted}
        for name, weight in wanted.items():
            known = self.bands.get(name)
            if known is None:
                self.bands[name] = Band(name, weight, self._members)
            elif known.weight != weight:
                self.pool.reweigh(known, weight)

    # Workers

    def join(self, worker: Worker, capacity_before_tokens: int = 0) -> None:
        """Let a worker count in F, at every node; O(tenants and users)."""
        self._members.add(worker)
        for node in self._nodes():
            node.member_joined(worker, capacity_before_tokens)
        self._members.inherited.pop(worker.spec.worker_id, None)

    def leave(self, worker: Worker) -> None:
        """Let a worker count no more; it keeps the V_w it has."""
        if not worker.is_member:
            return
        self._members.remove(worker)
        for node in self._nodes():
            node.member_left(worker.spec.worker_id)

    def forget(self, worker_id: WorkerId) -> None:
        """A worker is gone for good."""
        self._members.inherited.pop(worker_id, None)
        for node in self._nodes():
            node.forget(worker_id)

    def inherit(self, worker_ids: Iterable[WorkerId]) -> None:
        """These were members when the restored clocks were written."""
        self._members.inherited.update(dict.fromkeys(worker_ids))

    @property
    def worker_ids(self) -> tuple[WorkerId, ...]:
        """Members, then those of an earlier term that have not come back."""
        return (*self._members.workers, *self._members.inherited)

    def _nodes(self) -> Iterator[Node]:
        yield self.pool
        for band in self.bands.values():
            yield band.tenants
            for tenant in band.tenants_known.values():
                yield tenant.users


def path_v(user: User) -> tuple[float, float, float]:
    """The clocks on the way from the pool to a user: ties go to the most behind, level by level."""
    return (user.tenant.band.v, user.tenant.v, user.v)
