"""Who is held up at this moment: has no use for any of the rooms that are open, whatever its clock.

A user is held up if at every open worker none of its heads can be dispatched for a reason other than headroom: it
does not fit, is excluded there, the worker is kept for somebody else, or it waits there for a warmer one. One that
only headroom holds back is not held up. A tenant is held up if all its users in A are, a band if all its tenants
in A are.

One is made for one look over the open workers, and remembers its answers for it. It asks of at most
``HELD_UP_MAX`` users; beyond them it is ``spent``, and whoever it would have to ask of counts as held up, so that
nobody behind can be judged by one that was not asked. Of one tenant the first ``HELD_UP_USERS_MAX`` in order stand
for all: a tenant that invents users does not use the look up.

This changes nothing but its own answers.
"""

from collections.abc import Callable

from evenhand.core.fair_queue import FairQueue
from evenhand.core.heads import REFRESHES_MAX, Heads
from evenhand.core.rooms import Rooms
from evenhand.core.tenant import Band, Tenant, User
from evenhand.core.worker import Worker

HELD_UP_MAX = 512
"""Users that are asked of at one look."""

HELD_UP_USERS_MAX = 16
"""Users of one tenant that stand for all of it."""


class HeldUp:
    """``runs_at``: may something of a user be dispatched to an open worker now, headroom aside?

    Nobody runs at the ``kept`` worker: it is kept for one that fits nowhere.
    """

    __slots__ = ("_heads", "_left", "_now_ns", "_open", "_refreshes_left", "_runs_at", "_tenants", "_users",
                 "is_spent")  # fmt: skip

    def __init__(
        self, rooms: Rooms, heads: Heads, runs_at: Callable[[User, Worker], bool], kept: Worker | None, now_ns: int
    ) -> None:
        self._heads = heads
        self._runs_at = runs_at
        self._now_ns = now_ns
        self._left = HELD_UP_MAX
        self._refreshes_left = REFRESHES_MAX
        open_workers = [worker for worker in rooms.open.values() if worker is not kept]
        open_workers.sort(key=lambda worker: worker.kv_reserved_blocks - worker.spec.kv_blocks)
        self._open = {worker.spec.worker_id: worker for worker in open_workers}
        """The one with the most free KV first."""
        self._users: dict[User, bool] = {}
        self._tenants: dict[Tenant, bool] = {}
        self.is_spent = False
        """Somebody was not asked of: what is known from here on is not enough to go on."""

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

    def tenant(self, tenant: Tenant) -> bool:
        """Are all its users in A held up?"""
        known = self._tenants.get(tenant)
        if known is None:
            order = tenant.users.order
            if len(order) == 1:
                return self.user(order[0][2])
            known = all(self.user(user) for _, _, user in order[:HELD_UP_USERS_MAX])
            if not self.is_spent:
                self._tenants[tenant] = known
        return known

    def band(self, band: Band) -> bool:
        """Are all its tenants in A held up?"""
        return all(self.tenant(tenant) for _, _, tenant in band.tenants.in_order())

    def is_first_held_up(self, pool: FairQueue[Band]) -> bool:
        """Is the most-behind user of any band held up? Without one nobody stands in the way of others."""
        return any(self.user(band.tenants.order[0][2].users.order[0][2]) for _, _, band in pool.in_order())

    def _runs_somewhere(self, user: User) -> bool:
        runs_at, open_workers = self._runs_at, self._open
        if self._refreshes_left:
            self._refreshes_left = self._heads.refresh_due((user,), self._now_ns, self._refreshes_left)
        if user.cold is None:
            for worker in open_workers.values():
                self._heads.know(user, worker)
                break
        if user.cold is None or not user.cold.uniform:
            return any(runs_at(user, worker) for worker in open_workers.values())
        # All that hold no part of any head are alike to it but for their room: the roomiest stands for them.
        warm = user.warm_workers
        for worker_id in warm:
            held = open_workers.get(worker_id)
            if held is not None and runs_at(user, held):
                return True
        for worker_id, worker in open_workers.items():
            if worker_id not in warm:
                return runs_at(user, worker)
        return False
