"""The worker kept for a user that was the most behind and fits nowhere, and what that costs others.

Where the most-behind user fits nowhere for want of room, the worker predicted free first is kept for it: nobody
else is dispatched there until it has drained far enough; the others go on elsewhere. It stays kept until something
of that user is dispatched, fits elsewhere or is in turn no more, whoever is the most behind meanwhile: a worker
that changes hands before it has drained drains for nobody. A user that only headroom holds back keeps nothing: the
headroom is there for others than it.

Another worker is kept for it where the one that is takes longer than predicted, and another is free in less than
half the time that is left of it: legs that are renewed for ever hold one worker, not the user. Or where its engine
is full: it takes nothing however far it drains. A worker whose engine is full is kept only if all are.

A worker that drains is idle in part. As long as the request is served in the end, that is the price of fairness
to large requests. But who asks for a whole worker, and withdraws before the grant or right after it, again and
again, would halve a small pool at no cost. So while a worker is kept, and another tenant is in A, the request is
noted for what its keeping idles, for as long as nothing else closes the worker: while its engine is full or its
prefill is, nobody could use it::

    idled += R / members · time open · idle share of the worker     idle share = 1 − the fuller of slots and KV

A worker is drained no further than to its end, so ``idled`` is at most R/members times the longest residual
there, of each that was kept for it. It is charged, at all levels, when the request is withdrawn: whole if it still
waits (a cancel, a deadline), and in the part that its leg left undone, ``1 − attained/charge``, if it was granted
and broken off (``legs``).

One writer, the pool's scheduler; ``look`` is called before each choice.
"""

from evenhand.core.estimator import NS_PER_MS, NS_PER_S, CostRate
from evenhand.core.fair_tree import FairTree
from evenhand.core.fitting import Fitting
from evenhand.core.front import Fronts
from evenhand.core.heads import Heads
from evenhand.core.ids import WorkerId
from evenhand.core.queued import Queued
from evenhand.core.rooms import Rooms
from evenhand.core.tenant import User
from evenhand.core.worker import Worker

SOONER_FACTOR = 2
"""So many times sooner than the kept worker another must be free to be kept instead: both are guesses, and what
has drained so far is lost."""

COMPARE_NS_MIN = 50 * NS_PER_MS
"""Between two comparisons of a kept worker that is late with the others."""


class Kept:
    """A worker, for whom it is kept, and at what pace that idles it."""

    __slots__ = ("compare_at_ns", "idle_per_s", "is_drained", "open_ns", "queued", "user", "worker")

    def __init__(self, user: User, queued: Queued, worker: Worker, now_ns: int, free_ns: int) -> None:
        self.user = user
        self.queued = queued
        self.worker = worker
        self.compare_at_ns = free_ns
        """When it is compared with the others again: as predicted, enough would be free by then."""
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
            found = self._free_first(first, now_ns)
            kept = Kept(user, first, found[1], now_ns, found[0]) if found is not None else None
        elif not kept.is_drained:
            kept = self._sooner(kept, first, now_ns)
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

    def _sooner(self, kept: Kept, first: Queued, now_ns: int) -> Kept:
        """Another worker for the same user, if the kept one is late by far or its engine full; else as it is."""
        fitting, worker = self._fitting, kept.worker
        is_full = self._rooms.is_engine_full(worker)
        if not is_full and now_ns < kept.compare_at_ns:
            return kept
        if is_full and not any(
            not self._rooms.is_engine_full(other) and fitting.could_take(first, other)
            for other in self._fair.members.values()
        ):
            return kept
        found = self._free_first(first, now_ns)
        left_ns = fitting.predicted_free_ns(first, worker, now_ns) - now_ns
        if found is not None and (is_full or (found[0] - now_ns) * SOONER_FACTOR < left_ns):
            return Kept(kept.user, first, found[1], now_ns, found[0])
        kept.compare_at_ns = now_ns + max(left_ns // SOONER_FACTOR, COMPARE_NS_MIN)
        return kept

    def _free_first(self, first: Queued, now_ns: int) -> tuple[int, Worker] | None:
        """The worker predicted free first for a request, and when; one whose engine is full only if all are."""
        soonest: tuple[bool, int, WorkerId] | None = None
        found: Worker | None = None
        for worker in self._fair.members.values():
            if not self._fitting.could_take(first, worker):
                continue
            is_full = self._rooms.is_engine_full(worker)
            if soonest is not None and is_full and not soonest[0]:
                continue
            free = (is_full, self._fitting.predicted_free_ns(first, worker, now_ns), worker.spec.worker_id)
            if soonest is None or free < soonest:
                soonest, found = free, worker
        return (soonest[1], found) if soonest is not None and found is not None else None

    def _idle_per_s(self, worker: Worker) -> float:
        """Cost a second that others miss while a worker is kept as it is; 0 while there are no others."""
        if len(self._fair) < 2 or not worker.is_member:
            return 0.0
        spec = worker.spec
        full = max(worker.slots_used / spec.slots, worker.kv_reserved_blocks / spec.kv_blocks)
        return self._cost_rate.per_s / len(self._fair.members) * (1.0 - min(1.0, full))
