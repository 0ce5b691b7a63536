"""The worker kept for a user that was the most behind and fits nowhere, and what that costs others.

Where the most-behind user fits nowhere for want of room, the worker predicted free first is kept for it: nobody
else is dispatched there until it has drained far enough; the others go on elsewhere. It stays kept until something
of that user is dispatched, fits elsewhere or is in turn no more, whoever is the most behind meanwhile: a worker
that changes hands before it has drained drains for nobody. A user that only headroom holds back keeps nothing: the
headroom is there for others than it.

A worker that drains is idle in part. As long as the request is served in the end, that is the price of fairness
to large requests. But who asks for a whole worker, and withdraws before the grant or right after it, again and
again, would halve a small pool at no cost. So while a worker is kept, and another tenant is in A, the request is
noted for what its keeping idles, for as long as nothing else closes the worker: while its engine is full or its
prefill is, nobody could use it::

    idled += R / members · time open · idle share of the worker     idle share = 1 − the fuller of slots and KV

The worker is drained no further than to its end, so ``idled`` is at most R/members times the longest residual
there. It is charged, at all levels, when the request is withdrawn: whole if it still waits (a cancel, a
deadline), and in the part that its leg left undone, ``1 − attained/charge``, if it was granted and broken off
(``legs``).

One writer, the pool's scheduler; ``look`` is called before each choice.
"""

from evenhand.core.estimator import NS_PER_S, CostRate
from evenhand.core.fair_tree import FairTree
from evenhand.core.fitting import Fitting
from evenhand.core.front import Fronts
from evenhand.core.heads import Heads
from evenhand.core.ids import WorkerId
from evenhand.core.queued import Queued
from evenhand.core.rooms import Rooms
from evenhand.core.tenant import User
from evenhand.core.worker import Worker


class Kept:
    """A worker, for whom it is kept, and at what pace that idles it."""

    __slots__ = ("idle_per_s", "is_drained", "open_ns", "queued", "user", "worker")

    def __init__(self, user: User, queued: Queued, worker: Worker, now_ns: int) -> None:
        self.user = user
        self.queued = queued
        self.worker = worker
        self.open_ns = worker.open_ns_at(now_ns)
        """For how long the worker had had room, as of the last look."""
        self.idle_per_s = 0.0
        self.is_drained = False
        """Something of the user fits there, and it lies inside the windows."""

    def accrue(self, now_ns: int) -> None:
        """Note what was idled since the last look; a worker that has room is looked at whenever that changes."""
        open_ns = self.worker.open_ns_at(now_ns)
        self.queued.idled += self.idle_per_s * (open_ns - self.open_ns) / NS_PER_S
        self.open_ns = open_ns


class Keeping:
    """Reads clocks, rooms and heads; writes ``kept`` and what it notes on the request."""

    def __init__(
        self, fair: FairTree, rooms: Rooms, fitting: Fitting, heads: Heads, fronts: Fronts, cost_rate: CostRate
    ) -> None:
        self._fair = fair
        self._fronts = fronts
        self._rooms = rooms
        self._fitting = fitting
        self._heads = heads
        self._cost_rate = cost_rate
        self.kept: Kept | None = None

    def accrue(self, now_ns: int) -> None:
        """Bring what is noted on the request up to now."""
        if self.kept is not None:
            self.kept.accrue(now_ns)

    def look(self, now_ns: int) -> None:
        """What is kept stays kept while it stands; else a worker is, if the most-behind user fits nowhere."""
        self.accrue(now_ns)
        kept = self.kept
        if kept is not None and not self._stands(kept, now_ns):
            kept = None
        user = kept.user if kept is not None else self._fair.first()
        if user is None or (kept is None and self._fits_somewhere(user, now_ns)):
            self.kept = None
            return
        first = self._heads.of(user)[0]
        if kept is None or not self._fitting.could_take(first, kept.worker):
            worker = self._free_first(first, now_ns)
            kept = Kept(user, first, worker, now_ns) if worker is not None else None
        if kept is not None:
            kept.queued = first
            kept.idle_per_s = self._idle_per_s(kept.worker)
        self.kept = kept

    def served(self, user: User) -> None:
        """Something of the user is dispatched, after a look at this very moment: what was kept for it is free."""
        if self.kept is not None and self.kept.user is user:
            self.kept = None

    def _stands(self, kept: Kept, now_ns: int) -> bool:
        """Does it stay kept: something of its user is in turn, and fits nowhere, or fits right there?"""
        user, worker = kept.user, kept.worker
        kept.is_drained = False
        if not (user.in_a and user.tenant.in_a):
            return False
        if not self._fits_somewhere(user, now_ns):
            return True
        # Drained at last: others that score better must not take it, unless they come before it by their clocks.
        kept.is_drained = (
            worker.is_member
            and worker.closed is None
            and self._fits_at(user, worker)
            and self._fronts.is_inside(user, worker)
            and self._fronts.is_user_inside(user, worker)
        )
        return kept.is_drained

    def _fits_at(self, user: User, worker: Worker) -> bool:
        """Does one of its heads fit at the worker, headroom counted?"""
        worker_id, fitting = worker.spec.worker_id, self._fitting
        return any(
            fitting.fits(user.tenant, queued, worker, queued.cached.get(worker_id, 0))
            for queued in self._heads.of(user)
        )

    def _fits_somewhere(self, user: User, now_ns: int) -> bool:
        self._heads.refresh_due((user,), now_ns)
        for worker in self._rooms.open.values():
            worker_id = worker.spec.worker_id
            head = self._heads.at(user, worker)
            if head.blocks_min > worker.spec.kv_blocks - worker.kv_reserved_blocks:
                continue
            for queued in self._heads.of(user):
                if self._fitting.fits_but_headroom(queued, worker, queued.cached.get(worker_id, 0)):
                    return True
        return False

    def _free_first(self, first: Queued, now_ns: int) -> Worker | None:
        soonest: tuple[int, WorkerId] | None = None
        found: Worker | None = None
        for worker in self._fair.members.values():
            if not self._fitting.could_take(first, worker):
                continue
            free = (self._fitting.predicted_free_ns(first, worker, now_ns), worker.spec.worker_id)
            if soonest is None or free < soonest:
                soonest, found = free, worker
        return found

    def _idle_per_s(self, worker: Worker) -> float:
        """Cost a second that others miss while a worker is kept as it is; 0 while there are no others."""
        if len(self._fair) < 2 or not worker.is_member:
            return 0.0
        spec = worker.spec
        full = max(worker.slots_used / spec.slots, worker.kv_reserved_blocks / spec.kv_blocks)
        return self._cost_rate.per_s / len(self._fair.members) * (1.0 - min(1.0, full))
