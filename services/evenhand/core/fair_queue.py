"""Windowed start-time fair queuing: the clocks of one pool.

One clock ``v`` per tenant: the cost dispatched for it ÷ its weight, corrected as the truth arrives. One clock
``V_w`` per worker, which never falls, so that a tenant that comes back (or reaches a worker for the first time)
starts level with those who stayed: it has saved nothing up and owes nothing.

Words: A is the tenants with a queue inside their own limits; F_i the workers that could ever run one of tenant
i's first H requests; A_w those of A with w in F_i; lo_w the least v over A_w.

F_i needs no set. A worker is known by the most tokens it can hold, a tenant by the smallest of its first H
requests (``reach_tokens``): w is in F_i exactly when the first is at least the second. A tenant whose reach is
within every worker's is *universal*, and as long as all of A is, lo_w is one number for all workers and V_w one
more: ``_floor`` stands for what every member's V_w has at least risen to.

Refresh after a change of one tenant. The general rule has three steps (raise V_w over those in A_w before and
after; lift the changed tenant to V_w for every w newly in F_i; raise V_w to lo_w). With one tenant changing at
a time the first step adds nothing: where the tenant stays in A_w the third step raises at least as far, and
where it enters or leaves, the others have not moved since the last refresh. What must not happen is that a
tenant which leaves A_w raises V_w on its way out, so it is taken out before V_w is raised.

Always: the order is by (v, tenant id), total and free of hashing. V_w never falls. Outside A a tenant's clock
moves only by corrections. This module knows no queue, no request and no ticket.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import islice

from evenhand.core.ids import TenantId, WorkerId
from evenhand.core.tenant import Tenant
from evenhand.core.worker import Worker

Place = tuple[float, TenantId, Tenant]
"""A tenant's place in the order; ids are unique, so two places never compare their tenants."""


class FairQueue:
    """Clocks and order of A. All changes of ``Tenant.v``, ``in_a``, ``reach_tokens`` and of V_w happen here."""

    def __init__(self) -> None:
        self._order: list[Place] = []
        self._partial = 0
        """Members of A that are not universal."""
        self._members: dict[WorkerId, Worker] = {}
        self._capacity_min = 0
        self._floor = 0.0
        self._own_max = 0.0
        """Largest ``Worker.virtual_time`` among members, ``_floor`` aside."""
        self._weight_sum: float | None = 0.0
        self.stirred = False
        """Something changed that may let someone run; whoever has looked sets it back."""

    def __len__(self) -> int:
        """Number of tenants in A."""
        return len(self._order)

    @property
    def weight_sum(self) -> float:
        """Σφ(A)."""
        if self._weight_sum is None:
            self._weight_sum = sum(tenant.spec.weight for _, _, tenant in self._order)
        return self._weight_sum

    @property
    def capacity_min_tokens(self) -> int:
        """What every member can hold."""
        return self._capacity_min

    @property
    def members(self) -> dict[WorkerId, Worker]:
        """The workers that count in F; read only."""
        return self._members

    @property
    def all_universal(self) -> bool:
        """Every tenant of A reaches every member."""
        return self._partial == 0

    def weight_changed(self) -> None:
        """A tenant's weight is another one; its clock stays where it is."""
        self._weight_sum = None
        self.stirred = True

    def virtual_time(self, worker: Worker) -> float:
        """V_w."""
        return max(worker.virtual_time, self._floor) if worker.is_member else worker.virtual_time

    def first(self) -> Tenant | None:
        """The most-behind tenant of A."""
        return self._order[0][2] if self._order else None

    def lo(self, worker: Worker) -> float | None:
        """lo_w, or None while A_w is empty."""
        if self._partial == 0:
            return self._order[0][0] if self._order else None
        for v, _, tenant in self._order:
            if tenant.reach_tokens <= worker.capacity_tokens:
                return v
        return None

    def in_order(self) -> Iterator[Place]:
        """A by (v, id)."""
        return iter(self._order)

    def first_places(self, worker: Worker, count: int) -> list[Place]:
        """The first ``count`` of A_w, in order."""
        if self._partial == 0:
            return self._order[:count]
        reached = (place for place in self._order if place[2].reach_tokens <= worker.capacity_tokens)
        return list(islice(reached, count))

    def between(self, first: tuple[float, TenantId], v_max: float) -> list[Tenant]:
        """Tenants of A from a place on, with clocks up to ``v_max``."""
        order = self._order
        tenants: list[Tenant] = []
        for index in range(bisect_left(order, first), len(order)):
            if order[index][0] > v_max:
                break
            tenants.append(order[index][2])
        return tenants

    def place(self, tenant: Tenant, v: float, reach_tokens: int | None) -> None:
        """Set a tenant's clock and reach (None: it is not in A), lift it where it arrives, and refresh.

        A correction of a tenant outside A is ``place(tenant, v, None)``.
        """
        was_in_a, reach_before = tenant.in_a, tenant.reach_tokens
        if was_in_a:
            self._take_out(tenant)
        if reach_tokens is None:
            tenant.v, tenant.in_a, tenant.reach_tokens = v, False, 0
            if was_in_a:
                self._weight_sum = None
        else:
            if not was_in_a:
                self._weight_sum = None
                v = max(v, self._virtual_time_reached(reach_tokens, None))
            elif reach_tokens < reach_before and reach_before > self._capacity_min:
                v = max(v, self._virtual_time_reached(reach_tokens, reach_before))
            tenant.v, tenant.in_a, tenant.reach_tokens = v, True, reach_tokens
            insort(self._order, (v, tenant.spec.tenant_id, tenant))
            if reach_tokens > self._capacity_min:
                self._partial += 1
        self._raise_virtual_times()

    def join(self, worker: Worker, capacity_before_tokens: int = 0) -> None:
        """Let a worker count in F. Tenants that newly reach it are lifted to the V_w it brings (0: a fresh one).

        ``capacity_before_tokens`` is what it could hold just before, where only its size has changed.
        """
        assert not worker.is_member, f"worker {worker.spec.worker_id} joins twice"
        self._spread_floor()
        worker.is_member = True
        self._members[worker.spec.worker_id] = worker
        if worker.virtual_time > 0.0:
            for v, _, tenant in tuple(self._order):
                is_newly_reached = capacity_before_tokens < tenant.reach_tokens <= worker.capacity_tokens
                if is_newly_reached and v < worker.virtual_time:
                    self._take_out(tenant)
                    tenant.v = worker.virtual_time
                    insort(self._order, (tenant.v, tenant.spec.tenant_id, tenant))
        self._members_changed()

    def leave(self, worker: Worker) -> None:
        """Let a worker count no more; it keeps the V_w it has."""
        if not worker.is_member:
            return
        self._spread_floor()
        worker.is_member = False
        del self._members[worker.spec.worker_id]
        self._members_changed()

    def _take_out(self, tenant: Tenant) -> None:
        index = bisect_left(self._order, (tenant.v, tenant.spec.tenant_id))
        assert self._order[index][2] is tenant, "the order of A is broken"
        del self._order[index]
        if tenant.reach_tokens > self._capacity_min:
            self._partial -= 1

    def _virtual_time_reached(self, reach_tokens: int, reach_before: int | None) -> float:
        """Largest V_w over the workers within reach, or only over those newly within it."""
        if reach_tokens <= self._capacity_min and reach_before is None:
            return max(self._own_max, self._floor) if self._members else 0.0
        reached = 0.0
        for worker in self._members.values():
            if reach_tokens <= worker.capacity_tokens and (
                reach_before is None or worker.capacity_tokens < reach_before
            ):
                reached = max(reached, worker.virtual_time, self._floor)
        return reached

    def _raise_virtual_times(self) -> None:
        """V_w = max(V_w, lo_w) for every member."""
        self.stirred = True
        if not self._order or not self._members:
            return
        if self._partial == 0:
            least = self._order[0][0]
            if least > self._floor:
                self._floor = least
            return
        for worker in self._members.values():
            least_reached = self.lo(worker)
            if least_reached is not None and least_reached > worker.virtual_time:
                worker.virtual_time = least_reached
                self._own_max = max(self._own_max, least_reached)

    def _spread_floor(self) -> None:
        """Write what ``_floor`` stands for into each member, so that the set of members may change."""
        for worker in self._members.values():
            worker.virtual_time = max(worker.virtual_time, self._floor)
        self._floor = 0.0

    def _members_changed(self) -> None:
        members = self._members.values()
        self._capacity_min = min((worker.capacity_tokens for worker in members), default=0)
        self._own_max = max((worker.virtual_time for worker in members), default=0.0)
        self._partial = sum(1 for _, _, tenant in self._order if tenant.reach_tokens > self._capacity_min)
        self._raise_virtual_times()
