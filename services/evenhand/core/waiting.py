"""Who of a front is known to wait for a warmer worker, so that a pass need not look at it at every other one.

A worker that holds no part of any of a user's heads is to it like any other that holds none. Where all its heads
were declined at one of those, for workers that still have no room, and none may be taken yet, they are declined at
all of them. Only where it does hold a part is there anything to find.

One is made for one pass over the workers with room, which neither open nor close meanwhile. It changes nothing
but its own counts.
"""

from collections.abc import Iterator

from evenhand.core.front import Front, Fronts
from evenhand.core.queued import BestHead
from evenhand.core.tenant import User
from evenhand.core.worker import Worker


class Waiting:
    """Users of one front, and of those served last at a worker, that wait; and at how many workers."""

    __slots__ = (
        "_below",
        "_cold_unknown",
        "_common_count",
        "_front",
        "_hot_mask",
        "_met",
        "_now_ns",
        "_others",
        "_others_below",
        "_pass",
        "_tight_count",
        "_waits",
        "_warm_counts",
        "warm_mask",
    )

    def __init__(self, front: Front, this_pass: int, now_ns: int) -> None:
        self._front = front
        self._pass = this_pass
        self._now_ns = now_ns
        self._waits: dict[User, BestHead] = {}
        self._others: list[User] = []
        """Those of the front that do not wait …"""
        self._others_below: list[User] | None = None
        """… and may use headroom."""
        self._below: dict[User, None] = {}
        """Those of the front that may use headroom, once that was asked for."""
        self.warm_mask = 0
        """Workers that hold a part for some of the front that wait."""
        self._warm_counts: dict[User, int] = {}
        """At how many of them each was met."""
        self._common_count = 0
        self._tight_count = 0
        """Workers met where only headroom is left, and the others."""
        self._met: dict[User, int] = {}
        """Those served last at a worker that wait beside it, and until when."""
        self._hot_mask = 0
        """Workers that hold a part for some of the front that do not wait."""
        self._cold_unknown: list[User] = []
        """Those that do not wait, and may hold a part anywhere."""
        for user in front.users:
            head = user.cold
            if head is None or not self._is_waiting(head):
                self._others.append(user)
                if head is None or not head.uniform:
                    self._cold_unknown.append(user)
                else:
                    self._hot_mask |= user.warm_mask
                continue
            self._waits[user] = head
            self.warm_mask |= user.warm_mask

    def common(self) -> tuple[list[User], list[User]]:
        """Meet a worker with more than headroom left: its front, and those of it that do not wait."""
        self._common_count += 1
        return self._front.users, self._others

    def tight(self, fronts: Fronts) -> tuple[list[User], list[User]]:
        """As ``common``, of those that may use headroom, where nothing else is left."""
        self._tight_count += 1
        below = self._front.below_share
        if self._others_below is None or below is None:
            below, waits = fronts.below_share(self._front), self._waits
            self._below = dict.fromkeys(below)
            self._others_below = [user for user in below if user not in waits]
        return below, self._others_below

    def with_warm(self, others: list[User], worker: Worker, tight: bool) -> list[User]:
        """Add those of the front that wait, but for whom a worker that was met holds a part."""
        worker_id = worker.spec.worker_id
        warm = [user for user in self._waits if worker_id in user.warm_workers]
        if tight:
            warm = [user for user in warm if user in self._below]
        for user in warm:
            self._warm_counts[user] = self._warm_counts.get(user, 0) + 1
        return others + warm if warm else others

    def with_sticky(self, others: list[User], sticky: list[User], worker: Worker) -> list[User]:
        """Add those served last at a worker that do not wait, or for whom it holds a part."""
        looked: list[User] = []
        worker_id = worker.spec.worker_id
        for user in sticky:
            head = user.cold
            if head is None or worker_id in user.warm_workers or not self._is_waiting(head):
                looked.append(user)
            else:
                self._met[user] = head.waits_until_ns
        return others + looked if looked else others

    def is_cold_only(self, worker: Worker, tight: bool) -> bool:
        """Is it known of all of the front that do not wait that a worker holds no part for them?"""
        return self._is_known(tight) and not self._hot_mask & worker.mark

    def found(self) -> Iterator[tuple[User, int]]:
        """Those that wait beside a worker that was met and holds no part for them, and until when."""
        for user, head in self._waits.items():
            count = self._common_count - self._warm_counts.get(user, 0)
            if user in self._below:
                count += self._tight_count
            if count > 0:
                yield user, head.waits_until_ns
        yield from self._met.items()

    def _is_known(self, tight: bool) -> bool:
        """Is it known of all that do not wait, and may be served there, where they hold a part?"""
        if not self._cold_unknown:
            return True
        unknown: list[User] = []
        for user in self._cold_unknown:
            if user.cold is not None and user.cold.uniform:
                self._hot_mask |= user.warm_mask
            else:
                unknown.append(user)
        self._cold_unknown = unknown
        return all(tight and user not in self._below for user in unknown)

    def _is_waiting(self, head: BestHead) -> bool:
        """Are all its heads declined wherever none holds a part, and none to be taken there yet?"""
        if not head.uniform or head.waits_until_ns <= self._now_ns:
            return False
        if head.declined_pass != self._pass:
            if not head.is_declined():
                return False
            head.declined_pass = self._pass
        return True
