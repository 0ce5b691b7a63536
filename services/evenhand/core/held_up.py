"""Who is held up at this moment: has no use for any of the rooms that are open, whatever its clock.

A user is held up if at no open worker any of its heads can be dispatched: it does not fit there, is excluded, the
worker is kept for somebody else, or, where that counts, it waits there for a warmer one, or has been held back by
headroom alone for long. A tenant is held up at a worker if all its users in A that reach the worker are, a
band if all its tenants in A that reach it are: those that do not reach it have no claim there, though they may
have a use for other rooms.

One is made for one look over the open workers, and remembers its answers for it. It asks of at most
``HELD_UP_MAX`` users; beyond them it is ``spent``, and whoever it would have to ask of counts as held up, so that
nobody behind can be judged by one that was not asked. Of one tenant the first ``HELD_UP_USERS_MAX`` in order stand
for all: a tenant that invents users does not use the look up.

This changes nothing but its own answers.
"""

from collections.abc import Callable

from evenhand.core.fair_queue import FairQueue
from evenhand.core.fitting import Fitting
from evenhand.core.heads import REFRESHES_MAX, Heads
from evenhand.core.ids import WorkerId
from evenhand.core.rooms import Rooms
from evenhand.core.tenant import Band, Tenant, User
from evenhand.core.worker import Worker

HELD_UP_MAX = 32
"""Users that are asked of at one look."""

HELD_UP_USERS_MAX = 16
"""Users of one tenant that stand for all of it."""


class HeldUp:
    """``runs_at``: may something of a user be dispatched to an open worker now? ``waits``: told of users found to
    wait for a warmer worker, and until when; None: those do not count as held up.

    Nobody runs at the ``kept`` worker: it is kept for one that fits nowhere. ``this_pass`` is that of the last
    pass over the open workers, which have not changed since.
    """

    __slots__ = ("_due_before_ns", "_fitting", "_heads", "_left", "_now_ns", "_open", "_open_mask", "_pass",
                 "_refreshes_left", "_roomiest", "_runs_at", "_tenants", "_users", "is_spent",
                 "waits")  # fmt: skip

    def __init__(
        self,
        rooms: Rooms,
        heads: Heads,
        runs_at: Callable[[User, Worker], bool],
        waits: Callable[[User, int], None] | None,
        fitting: Fitting,
        kept: Worker | None,
        this_pass: int,
        now_ns: int,
    ) -> None:
        self._heads = heads
        self._fitting = fitting
        self._runs_at = runs_at
        self.waits = waits
        self._pass = this_pass
        self._now_ns = now_ns
        self._left = HELD_UP_MAX
        self._refreshes_left = REFRESHES_MAX
        self._due_before_ns = heads.due_before_ns(now_ns)
        self._open: dict[WorkerId, Worker] = {}
        self._open_mask = 0
        for worker_id, worker in rooms.open.items():
            if worker is not kept:
                self._open[worker_id] = worker
                self._open_mask |= worker.mark
        self._roomiest: tuple[list[Worker], list[Worker]] | None = None
        self._users: dict[User, bool] = {}
        self._tenants: dict[Tenant, bool] = {}
        self.is_spent = False
        """Somebody was not asked of: what is known from here on is not enough to go on."""

    def know(self, user: User, is_held_up: bool) -> None:
        """It need not be asked of this user."""
        self._users[user] = is_held_up

    def user(self, user: User) -> bool:
        """Has it no use for any open room?"""
        known = self._users.get(user)
        if known is None:
            if not self._left:
                self.is_spent = True
                return True
            self._left -= 1
            known = self._users[user] = not self._runs_somewhere(user)
        return known

    def tenant_at(self, tenant: Tenant, worker: Worker) -> bool:
        """Are all its users in A that reach a worker held up? Where none of the first does, all the first?"""
        if self._tenant(tenant):
            return True
        order, capacity_tokens = tenant.users.order, worker.capacity_tokens
        there = [user for _, _, user in order[:HELD_UP_USERS_MAX] if user.reach_tokens <= capacity_tokens]
        return bool(there) and all(self.user(user) for user in there)

    def _tenant(self, tenant: Tenant) -> bool:
        """Are all its users in A held up?"""
        order = tenant.users.order
        if len(order) == 1:
            return self.user(order[0][2])
        known = self._tenants.get(tenant)
        if known is None:
            known = all(self.user(user) for _, _, user in order[:HELD_UP_USERS_MAX])
            if not self.is_spent:
                self._tenants[tenant] = known
        return known

    def is_first_held_up(self, pool: FairQueue[Band]) -> bool:
        """Is the most-behind user of any band held up? Without one nobody stands in the way of others."""
        return any(self.user(band.tenants.order[0][2].users.order[0][2]) for _, _, band in pool.in_order())

    def _runs_somewhere(self, user: User) -> bool:
        first = next(iter(self._open.values()), None)
        if first is None:
            return False
        heads = self._heads
        if user.matched_at_ns <= self._due_before_ns and self._refreshes_left:
            self._refreshes_left = heads.refresh_due((user,), self._now_ns, self._refreshes_left)
        cold = user.cold
        if cold is None:
            heads.know(user, first)
            cold = user.cold
            assert cold is not None, "a user in A has heads"
        if not cold.uniform:
            reach_tokens = user.reach_tokens
            return any(
                worker.capacity_tokens >= reach_tokens and self._runs_at(user, worker)
                for worker in self._open.values()
            )
        if self.waits is not None and not user.warm_mask & self._open_mask and cold.waits_until_ns > self._now_ns:
            if cold.declined_pass != self._pass and cold.is_declined():
                cold.declined_pass = self._pass
            if cold.declined_pass == self._pass:
                self.waits(user, cold.waits_until_ns)
                return False
        return self._runs_if_uniform(user)

    def _runs_if_uniform(self, user: User) -> bool:
        """All that hold no part of any head are alike to it but for their room: the roomiest stand for them."""
        runs_at, warm = self._runs_at, user.warm_workers
        for worker_id in warm:
            held = self._open.get(worker_id)
            if held is not None and runs_at(user, held):
                return True
        if self._roomiest is None:
            open_workers = self._open.values()
            by_common = sorted(open_workers, key=self._fitting.blocks_common)
            self._roomiest = (by_common, sorted(open_workers, key=self._fitting.blocks_free))
        for workers in self._roomiest:
            roomiest = next((each for each in reversed(workers) if each.spec.worker_id not in warm), None)
            if roomiest is not None and runs_at(user, roomiest):
                return True
        return False
