"""Bands, tenants and users of one pool: their queues, their clocks, and the requests that wait.

::

    pool ─▶ Band ─▶ Tenant ─▶ User ─▶ its queue        each arrow one ``FairQueue``

Requests wait in the queue of their user (the user ``""`` where a request names none). Limits, open tickets, what
is outstanding and what was due belong to the tenant. A queue is always in order of age: a request that lost its
worker goes back to where its age puts it, which is the front but for older ones that it had overtaken. Only the
first H requests of a user (``heads``) are ever looked at.

A user is remembered while something of it waits or runs, and after that while its clock is above what it would be
lifted to: until then forgetting it would forgive it. Of users at rest at most ``USERS_AT_REST_MAX`` are
remembered for each tenant, those furthest ahead; a tenant that invents users beyond that blurs shares among its
own users alone.

This module keeps state and orders it; it decides nothing.
"""

from collections import OrderedDict
from itertools import islice
from typing import TYPE_CHECKING

from evenhand.core.estimator import ServiceRate
from evenhand.core.facts import TenantSpec, TenantState
from evenhand.core.fair_queue import FairChild, FairQueue
from evenhand.core.ids import RequestId, TenantId, WorkerId
from evenhand.core.members import Members
from evenhand.core.queued import BestHead, Queued

if TYPE_CHECKING:
    from evenhand.core.tickets import OpenTicket

NO_HEADS: dict[WorkerId, list[Queued]] = {}

USERS_AT_REST_MAX = 256
"""Users of a tenant that are remembered for their clock alone."""

USERS_SWEPT_MIN = 16
"""Below so many users none is looked at for forgetting."""


class User(FairChild):
    """One user of a tenant: a queue in order of age, and what placement worked out for its first requests."""

    __slots__ = (
        "_heads",
        "_reach_tokens_wanted",
        "best",
        "cold",
        "matched_at_ns",
        "matched_version",
        "queue",
        "tenant",
        "tickets_open",
        "waits_since_ns",
        "warm_mask",
        "warm_workers",
    )

    def __init__(self, name: str, weight: float, tenant: "Tenant") -> None:
        super().__init__(name, weight)
        self.tenant = tenant
        self.queue: OrderedDict[RequestId, Queued] = OrderedDict()
        self.tickets_open = 0
        self.waits_since_ns: int | None = None
        """Since when without a break something of it waits for a warmer worker beside an idle one; None: it does
        not."""
        self._heads: tuple[Queued, ...] | None = None
        self._reach_tokens_wanted = 0
        """The smallest of the heads; 0: not worked out."""
        self.best: dict[WorkerId, BestHead] = {}
        """What placement worked out per worker, until a head, its look-up or a worker's size changes."""
        self.cold: BestHead | None = None
        """The same for any worker that holds no part of any head; None: not worked out."""
        self.warm_workers: dict[WorkerId, list[Queued]] = NO_HEADS
        """Workers that hold a part of a head, each with those heads, oldest first; as of ``cold``."""
        self.warm_mask = 0
        """Their ``Worker.mark`` together: who is not in it is none of them."""
        self.matched_at_ns = 0
        self.matched_version = -1

    @property
    def path(self) -> tuple[float, str, float, str, float, str]:
        """Its place in the order of the whole pool: the most behind first, at each level in turn."""
        tenant = self.tenant
        band = tenant.band
        return (band.v, band.node_id, tenant.v, tenant.node_id, self.v, self.node_id)

    def enqueue(self, queued: Queued) -> None:
        """Add the youngest request."""
        queued.user = self
        self.queue[queued.request.request_id] = queued
        if self._heads is None or len(self.queue) <= len(self._heads) + 1:
            self.heads_changed()

    def put_back(self, queued: Queued) -> None:
        """Return a request to the place of its age; O(requests older than it that still wait)."""
        older: list[Queued] = []
        for before in self.queue.values():
            if before.age > queued.age:
                break
            older.append(before)
        queued.user = self
        self.queue[queued.request.request_id] = queued
        self.queue.move_to_end(queued.request.request_id, last=False)
        for before in reversed(older):
            self.queue.move_to_end(before.request.request_id, last=False)
        self.heads_changed()

    def heads(self, count: int) -> tuple[Queued, ...]:
        """The first ``count`` waiting requests, oldest first; ``count`` is the same at every call."""
        if self._heads is None:
            self._heads = tuple(islice(self.queue.values(), count))
        return self._heads

    def reach_wanted(self, count: int) -> int | None:
        """What a worker must be able to hold to run one of the first ``count`` requests; None: nothing waits."""
        if not self.queue:
            return None
        if not self._reach_tokens_wanted:
            self._reach_tokens_wanted = min([queued.tokens_total for queued in self.heads(count)])
        return self._reach_tokens_wanted

    def heads_changed(self) -> None:
        """Forget what was derived from the first H requests."""
        self._heads = None
        self._reach_tokens_wanted = 0
        self.forget_best()

    def forget_best(self) -> None:
        """Forget what placement worked out per worker."""
        if self.best:
            self.best.clear()
        self.cold = None


class Tenant(FairChild):
    """Mutable state of a tenant; ``users`` holds the clocks of its users."""

    __slots__ = (
        "backlogged_from_ns",
        "backlogged_ns",
        "band",
        "charge_max",
        "cost_backfilled",
        "cost_due",
        "cost_due_mark",
        "cost_got",
        "cost_guaranteed",
        "cost_idled",
        "forgotten",
        "granted",
        "guarantee_tag",
        "guarantee_takes",
        "guarantee_waits",
        "guaranteed_units",
        "is_active",
        "outstanding",
        "queue",
        "queue_bytes",
        "queued_in_a",
        "service",
        "spec",
        "tells_first_token",
        "user_weights",
        "users",
        "users_known",
        "users_sweep_at",
    )

    def __init__(self, spec: TenantSpec, band: "Band", members: Members) -> None:
        super().__init__(spec.tenant_id, spec.weight)
        self.spec = spec
        self.band = band
        self.users: FairQueue[User] = FairQueue(members)
        self.users_known: dict[str, User] = {}
        self.user_weights = dict(spec.user_weights)
        self.users_sweep_at = USERS_SWEPT_MIN
        self.queue: dict[RequestId, Queued] = {}
        """Everything of it that waits, of all users, in no order that means anything."""
        self.queue_bytes = 0
        self.queued_in_a = 0
        """How much of it counts as the pool's backlog; written by ``Outstanding`` alone."""
        self.granted: dict[RequestId, OpenTicket] = {}
        """Its open tickets, by request."""
        self.outstanding = 0.0
        """Cost booked for its open tickets."""
        self.is_active = False
        """Counted among the active of its band: in A, or holding tickets."""
        self.service = ServiceRate()
        self.forgotten = False
        self.cost_got = 0.0
        self.cost_guaranteed = 0.0
        """The part of ``cost_got`` that is booked to the guarantee ledger."""
        self.cost_backfilled = 0.0
        """The part of ``cost_got`` that was dispatched outside the window while others were held up."""
        self.cost_idled = 0.0
        """Charged for workers and room that it left idle; on the clock, and in neither ``cost_got`` nor due."""
        self.guaranteed_units = 0
        self.guarantee_tag = 0.0
        """Reading of the pool's work clock up to which what it got has paid its guarantee."""
        self.guarantee_waits = False
        """Stands in the order of guarantees: it has one, and is in A. Written by ``Guarantees`` alone."""
        self.tells_first_token: bool | None = None
        """Its clients tell when a leg's first token is there, as far as the last leg showed; None: none has yet.
        Then it is taken for granted: an unlearned rate is the worse guess, and what is awaited in vain counts for
        a bounded time."""
        self.guarantee_takes = False
        """Its guarantee is due, and a place is looked for outside the order. Set by ``Placement`` meanwhile."""
        self.charge_max = 0.0
        """ĉ: its largest charge so far ÷ its weight then; how far one dispatch moves its clock."""
        self.cost_due = 0.0
        self.cost_due_mark = 0.0
        self.backlogged_ns = 0
        self.backlogged_from_ns = 0

    @property
    def may_run(self) -> bool:
        """Has a queue and is inside its own limits."""
        limit = self.spec.concurrency_max
        return (
            bool(self.queue)
            and (limit == 0 or len(self.granted) < limit)
            and self.spec.state is not TenantState.SUSPENDED
        )

    def user(self, name: str) -> User:
        """The user of this name; one that is not known begins at nothing, and is lifted when it enters A."""
        user = self.users_known.get(name)
        if user is None:
            if len(self.users_known) >= self.users_sweep_at:
                self._forget_users()
            user = User(name, self.user_weights.get(name, 1.0), self)
            self.users_known[name] = user
        return user

    def waiting_ids(self, tokens_above: int = 0) -> tuple[RequestId, ...]:
        """What waits, of all users, oldest first: all of it, or what needs more than so many tokens."""
        waiting = [queued for queued in self.queue.values() if queued.tokens_total > tokens_above]
        waiting.sort(key=lambda queued: queued.age)
        return tuple(queued.request.request_id for queued in waiting)

    def change_users(self, spec: TenantSpec) -> None:
        """Take the users' weights from another spec; their clocks stay."""
        self.user_weights = dict(spec.user_weights)
        for name, user in self.users_known.items():
            weight = self.user_weights.get(name, 1.0)
            if weight != user.weight:
                self.users.reweigh(user, weight)

    def enqueue(self, queued: Queued) -> User:
        """Add the youngest request to its user's queue."""
        self.queue[queued.request.request_id] = queued
        self.queue_bytes += queued.request.size_bytes
        user = self.user(queued.request.user)
        user.enqueue(queued)
        return user

    def put_back(self, queued: Queued) -> None:
        """Return a request to the place of its age in its user's queue."""
        self.queue[queued.request.request_id] = queued
        self.queue_bytes += queued.request.size_bytes
        self.user(queued.request.user).put_back(queued)

    def remove(self, request_id: RequestId) -> Queued:
        """Take a waiting request out, wherever it stands."""
        queued = self.queue.pop(request_id)
        self.queue_bytes -= queued.request.size_bytes
        user = queued.user
        assert user is not None, "what waits, waits in a user's queue"
        del user.queue[request_id]
        user.heads_changed()
        return queued

    def forget_best(self) -> None:
        """Forget what placement worked out per worker, for all users."""
        for user in self.users_known.values():
            user.forget_best()

    def _forget_users(self) -> None:
        """Forget users at rest: those that lose nothing by it, and the least ahead of too many others."""
        least = self.users.virtual_time_min
        kept: dict[str, User] = {}
        at_rest: list[tuple[float, str]] = []
        for name, user in self.users_known.items():
            if user.queue or user.tickets_open:
                kept[name] = user
            elif user.v > least:
                at_rest.append((user.v, name))
        at_rest.sort(reverse=True)
        for _, name in at_rest[: USERS_AT_REST_MAX // 2]:
            kept[name] = self.users_known[name]
        self.users_known = kept
        self.users_sweep_at = max(USERS_SWEPT_MIN, len(kept) + USERS_AT_REST_MAX // 2)


class Band(FairChild):
    """A band of the pool: its tenants share what it gets, as bands share the pool."""

    __slots__ = ("active_units", "due_per_weight", "tenants", "tenants_known")

    def __init__(self, name: str, weight: float, members: Members) -> None:
        super().__init__(name, weight)
        self.tenants: FairQueue[Tenant] = FairQueue(members)
        self.tenants_known: dict[TenantId, Tenant] = {}
        """All that stand in it, in A or not."""
        self.active_units = 0
        """Weight of those that are in A or hold tickets, in ``WEIGHT_UNITS``."""
        self.due_per_weight = 0.0
        """Cost due so far to each weight of tenants that were in A all along."""
