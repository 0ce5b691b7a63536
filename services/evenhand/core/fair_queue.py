"""Windowed start-time fair queuing: the clocks of one node, and the order of its children.

A pool is a tree: bands, their tenants, their users. Each inner node has one ``FairQueue`` over its children, and
the rule is the same at every node. Below, a *child* is a band in its pool, a tenant in its band, a user in its
tenant.

One clock ``v`` per child: the cost dispatched for it ÷ its weight, corrected as the truth arrives. One clock
``V_w`` per worker, which never falls, so that a child that comes back (or reaches a worker for the first time)
starts level with those who stayed: it has saved nothing up and owes nothing.

Words: A is the children with a queue inside their own limits; F_i the workers that could ever run one of child i's
first requests; A_w those of A with w in F_i; lo_w the least v over A_w.

F_i needs no set. A worker is known by the most tokens it can hold, a child by the smallest of the requests it may
send (``reach_tokens``): w is in F_i exactly when the first is at least the second. A child whose reach is within
every worker's is *universal*, and as long as all of A is, lo_w is one number for all workers and V_w one more:
``_floor`` is the V_w of every member that has none of its own in ``_own``, and what has fallen behind the floor,
or level with it, is dropped from there. So a node costs nothing per worker while all its children are universal.

Refresh after a change of one child. The general rule has three steps (raise V_w over those in A_w before and
after; lift the changed child to V_w for every w newly in F_i; raise V_w to lo_w). With one child changing at a
time the first step adds nothing: where the child stays in A_w the third step raises at least as far, and where it
enters or leaves, the others have not moved since the last refresh. What must not happen is that a child which
leaves A_w raises V_w on its way out, so it is taken out before V_w is raised. Levels do not mix: a lift at one
node moves no clock of another.

Always: the order is by (v, id), total and free of hashing. V_w never falls. Outside A a child's clock moves only
by corrections. This module knows no queue, no request and no ticket.
"""

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import islice
from typing import Generic, TypeVar

from evenhand.core.ids import WorkerId
from evenhand.core.members import Members
from evenhand.core.worker import Worker

WEIGHT_UNITS = 1 << 40
"""Units of one weight: sums of weights are kept in whole units, so that adding and taking away never drifts."""


class FairChild:
    """A child as its node knows it; ``v``, ``in_a`` and ``reach_tokens`` are written by its node alone."""

    __slots__ = ("in_a", "node_id", "reach_tokens", "v", "weight", "weight_units")

    def __init__(self, node_id: str, weight: float) -> None:
        self.node_id = node_id
        self.v = 0.0
        self.in_a = False
        self.reach_tokens = 0
        """The smallest request it may send: workers that hold as much are its F. 0 outside A."""
        self.weigh(weight)

    def weigh(self, weight: float) -> None:
        """Set φ; a child in A is reweighed by its node."""
        self.weight = weight
        self.weight_units = max(1, round(weight * WEIGHT_UNITS))


Child = TypeVar("Child", bound=FairChild)


class FairQueue(Generic[Child]):
    """Clocks and order of one node's A."""

    __slots__ = ("_away", "_floor", "_inherited", "_members", "_order", "_own", "_partial", "_reach_counts",
                 "_reaches", "_weight_units", "order")  # fmt: skip

    def __init__(self, members: Members) -> None:
        self._members = members
        self._order: list[tuple[float, str, Child]] = []
        """Ids are unique among siblings, so two places never compare their children."""
        self.order = self._order
        """A by (v, id), for others to read."""
        self._partial = 0
        """Children in A that are not universal."""
        self._floor = 0.0
        self._own: dict[WorkerId, float] = {}
        """V_w of members that are not at the floor, above it or below."""
        self._away: dict[WorkerId, float] = {}
        """V_w of workers that are no members and may come back."""
        self._inherited = 0.0
        """V_w of the members of an earlier term that have not come back and are not in ``_away``."""
        self._weight_units = 0
        self._reach_counts: dict[int, int] = {}
        self._reaches: list[int] = []
        """Heap of the reaches in A, and perhaps of some that are there no more."""

    def __len__(self) -> int:
        """Number of children in A."""
        return len(self._order)

    @property
    def weight_sum(self) -> float:
        """Σφ(A)."""
        return self._weight_units / WEIGHT_UNITS

    @property
    def all_universal(self) -> bool:
        """Every child in A reaches every member."""
        return self._partial == 0

    @property
    def reach_min_tokens(self) -> int | None:
        """The least reach in A: what the node itself reaches; None while A is empty."""
        if len(self._order) <= 1:
            return self._order[0][2].reach_tokens if self._order else None
        while self._reaches[0] not in self._reach_counts:
            heapq.heappop(self._reaches)
        return self._reaches[0]

    def virtual_time(self, worker_id: WorkerId) -> float:
        """V_w, of a member or of a worker that may come back."""
        if worker_id in self._members.workers:
            return self._own.get(worker_id, self._floor)
        return self._away.get(worker_id, self._inherited if worker_id in self._members.inherited else 0.0)

    @property
    def virtual_time_min(self) -> float:
        """The least V_w of members and of those that may come back: who enters A is lifted at least to it."""
        members = self._members
        least = [*self._own.values(), *self._away.values()]
        if len(self._own) < len(members.workers):
            least.append(self._floor)
        if any(worker_id not in self._away for worker_id in members.inherited):
            least.append(self._inherited)
        return min(least, default=0.0)

    def first(self) -> Child | None:
        """The most-behind child of A."""
        return self._order[0][2] if self._order else None

    def lo(self, worker: Worker) -> float | None:
        """lo_w, or None while A_w is empty."""
        if self._partial == 0:
            return self._order[0][0] if self._order else None
        for v, _, child in self._order:
            if child.reach_tokens <= worker.capacity_tokens:
                return v
        return None

    def in_order(self) -> Iterator[tuple[float, str, Child]]:
        """A by (v, id)."""
        return iter(self._order)

    def ordinal(self, child: Child) -> int:
        """Place of a child of A in the order, 0 the most behind."""
        return bisect_left(self._order, (child.v, child.node_id))

    def first_inside(self, worker: Worker, window: float, count: int) -> list[tuple[float, str, Child]]:
        """The first ``count`` of A_w with v ≤ lo_w + window, in order."""
        if self._partial == 0:
            places = self._order[:count]
        else:
            capacity_tokens = worker.capacity_tokens
            reached = (place for place in self._order if place[2].reach_tokens <= capacity_tokens)
            places = list(islice(reached, count))
        if len(places) > 1:
            v_max = places[0][0] + window
            while places[-1][0] > v_max:
                places.pop()
        return places

    def reweigh(self, child: Child, weight: float) -> None:
        """A child's weight is another one; its clock stays where it is."""
        if child.in_a:
            self._weight_units -= child.weight_units
        child.weigh(weight)
        if child.in_a:
            self._weight_units += child.weight_units
        self._members.stirred = True

    def place(self, child: Child, v: float, reach_tokens: int | None) -> None:
        """Set a child's clock and reach (None: it is not in A), lift it where it arrives, and refresh.

        A correction of a child outside A is ``place(child, v, None)``.
        """
        was_in_a, reach_before = child.in_a, child.reach_tokens
        self._members.stirred = True
        if was_in_a:
            if reach_tokens == reach_before:
                if v != child.v:
                    order = self._order
                    if len(order) == 1 and not self._own and self._partial == 0:
                        # An only child of a node whose members all stand at the floor.
                        order[0] = (v, child.node_id, child)
                        child.v = v
                        if v > self._floor and self._members.workers:
                            self._floor = v
                        return
                    self._shift(child, v)
                    self._raise_virtual_times()
                return
            self._take_out(child)
        if reach_tokens is None:
            child.v, child.in_a, child.reach_tokens = v, False, 0
            if was_in_a:
                self._weight_units -= child.weight_units
        else:
            if not was_in_a:
                self._weight_units += child.weight_units
                v = max(v, self._virtual_time_reached(reach_tokens, None))
            elif reach_tokens < reach_before and reach_before > self._members.capacity_min_tokens:
                v = max(v, self._virtual_time_reached(reach_tokens, reach_before))
            self._put_in(child, v, reach_tokens)
        self._raise_virtual_times()

    def lift_behind(self, worker: Worker, v_least: float) -> None:
        """Lift to ``v_least`` whoever of A_w is behind it: one that has a use for a room there passes them.

        They stay in order, each the least step of a float ahead of the one before it. Were they level, their ids
        would say who is next, and whoever has just had its turn would be first again.
        """
        capacity_tokens = worker.capacity_tokens
        behind: list[Child] = []
        for v, _, child in self._order:
            if v >= v_least:
                break
            if child.reach_tokens <= capacity_tokens:
                behind.append(child)
        v = v_least
        for child in behind:
            self._shift(child, v)
            v = math.nextafter(v, math.inf)
        if behind:
            self._members.stirred = True
            self._raise_virtual_times()

    def member_joined(self, worker: Worker, capacity_before_tokens: int = 0) -> None:
        """A worker counts in F. Children that newly reach it are lifted to the V_w it brings (0: a fresh one).

        ``capacity_before_tokens`` is what it could hold just before, where only its size has changed.
        """
        worker_id = worker.spec.worker_id
        inherited = self._inherited if worker_id in self._members.inherited else 0.0
        virtual_time = self._away.pop(worker_id, inherited)
        if virtual_time != self._floor:
            self._own[worker_id] = virtual_time
        if virtual_time > 0.0:
            for v, _, child in tuple(self._order):
                reach_tokens = child.reach_tokens
                is_newly_reached = capacity_before_tokens < reach_tokens <= worker.capacity_tokens
                if is_newly_reached and v < virtual_time:
                    self._take_out(child)
                    self._put_in(child, virtual_time, reach_tokens)
        self._members_changed()

    def member_left(self, worker_id: WorkerId) -> None:
        """A worker counts no more; should it come back, it has the V_w it had."""
        virtual_time = self._own.pop(worker_id, self._floor)
        if virtual_time > 0.0 or self._floor > 0.0:
            self._away[worker_id] = virtual_time
        self._members_changed()

    def forget(self, worker_id: WorkerId) -> None:
        """A worker that is no member is gone for good; its name may come back, and then is another's."""
        self._away.pop(worker_id, None)

    def clocks(self) -> tuple[float, tuple[tuple[WorkerId, float], ...]]:
        """For a checkpoint: V_w of most members, and of each worker that has another."""
        floor = self._floor if self._members.workers else self._inherited
        others = {**self._own, **self._away}
        if self._members.workers and self._inherited != floor:
            others = {**dict.fromkeys(self._members.inherited, self._inherited), **others}
        return floor, tuple(sorted(others.items()))

    def restore(self, floor: float, others: tuple[tuple[WorkerId, float], ...]) -> None:
        """Take over the V_w of an earlier term, before any worker has joined."""
        self._inherited, self._away = floor, dict(others)

    # Within

    def _put_in(self, child: Child, v: float, reach_tokens: int) -> None:
        child.v, child.in_a, child.reach_tokens = v, True, reach_tokens
        if self._order:
            insort(self._order, (v, child.node_id, child))
        else:
            self._order.append((v, child.node_id, child))
        count = self._reach_counts.get(reach_tokens, 0)
        self._reach_counts[reach_tokens] = count + 1
        if not count:
            heapq.heappush(self._reaches, reach_tokens)
            if len(self._reaches) > 64 and len(self._reaches) > 4 * len(self._reach_counts):
                self._reaches = sorted(self._reach_counts)
        if reach_tokens > self._members.capacity_min_tokens:
            self._partial += 1
            self._members.partial += 1

    def _shift(self, child: Child, v: float) -> None:
        """Another v, the same reach."""
        order = self._order
        if len(order) > 1:
            index = bisect_left(order, (child.v, child.node_id))
            assert order[index][2] is child, "the order of A is broken"
            del order[index]
            insort(order, (v, child.node_id, child))
        else:
            order[0] = (v, child.node_id, child)
        child.v = v

    def _take_out(self, child: Child) -> None:
        order, reach_tokens = self._order, child.reach_tokens
        index = bisect_left(order, (child.v, child.node_id)) if len(order) > 1 else 0
        assert order[index][2] is child, "the order of A is broken"
        del order[index]
        count = self._reach_counts[reach_tokens] - 1
        if count:
            self._reach_counts[reach_tokens] = count
        else:
            del self._reach_counts[reach_tokens]
        if reach_tokens > self._members.capacity_min_tokens:
            self._partial -= 1
            self._members.partial -= 1

    def _virtual_time_reached(self, reach_tokens: int, reach_before: int | None) -> float:
        """Largest V_w over the workers within reach, or only over those newly within it."""
        members, own, floor = self._members, self._own, self._floor
        if not own and reach_before is None and reach_tokens <= members.capacity_min_tokens:
            return floor if members.workers else 0.0
        reached = 0.0
        for worker_id, worker in members.workers.items():
            if reach_tokens <= worker.capacity_tokens and (
                reach_before is None or worker.capacity_tokens < reach_before
            ):
                reached = max(reached, own.get(worker_id, floor))
        return reached

    def _raise_virtual_times(self) -> None:
        """V_w = max(V_w, lo_w) for every member."""
        workers, own = self._members.workers, self._own
        if not self._order or not workers:
            return
        if self._partial == 0:
            least = self._order[0][0]
            if least > self._floor:
                self._floor = least
            if own:
                raised = {worker_id: max(virtual_time, least) for worker_id, virtual_time in own.items()}
                self._own = {worker_id: v for worker_id, v in raised.items() if v != self._floor}
            return
        for worker_id, worker in workers.items():
            least_reached = self.lo(worker)
            if least_reached is not None and least_reached > own.get(worker_id, self._floor):
                own[worker_id] = least_reached

    def _members_changed(self) -> None:
        self._members.partial -= self._partial
        capacity_min_tokens = self._members.capacity_min_tokens
        self._partial = sum(1 for _, _, child in self._order if child.reach_tokens > capacity_min_tokens)
        self._members.partial += self._partial
        self._raise_virtual_times()
