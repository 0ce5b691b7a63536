"""Who of a front is known to wait for a warmer worker, so that a pass need not look at it at every other one.

A worker that holds no part of any of a user's heads is to it like any other that holds none. Where all its heads
were declined at one of those, for workers that still have no room, and none may be taken yet, they are declined at
all of them. Only where it does hold a part is there anything to find.

One is made for one pass over the workers with room, which neither open nor close meanwhile. It changes nothing
but its own counts.
"""

from collections.abc import Iterator

from evenhand.core.front import Front
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
        "_warm_mask",
        "is_cold_only",
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
        self._warm_mask = 0
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
        self.is_cold_only = False
        """The worker met last holds no part for any of those returned, as far as is known."""
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
            self._warm_mask |= user.warm_mask

    def others(self, users: list[User], worker: Worker, tight: bool) -> list[User]:
        """Meet one worker; those of its C_w (``users``) that do not wait, or for whom it holds a part."""
        worker_id = worker.spec.worker_id
        base, others = self._front.users, self._others
        if tight:
            self._tight_count += 1
            base, others = self._of_below_share()
        else:
            self._common_count += 1
        self.is_cold_only = users is base and self._is_known(tight) and not self._hot_mask & worker.mark
        if self._warm_mask & worker.mark:
            warm = [user for user in self._waits if worker_id in user.warm_workers]
            if tight:
                warm = [user for user in warm if user in self._below]
            for user in warm:
                self._warm_counts[user] = self._warm_counts.get(user, 0) + 1
                self.is_cold_only = False
            if warm:
                others = others + warm
        if users is base:
            return others
        looked: list[User] = []
        for user in users[len(base) :]:
            head = user.cold
            if head is None or worker_id in user.warm_workers or not self._is_waiting(head):
                looked.append(user)
            else:
                self._met[user] = head.waits_until_ns
        return others + looked if looked else others

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

    def _of_below_share(self) -> tuple[list[User], list[User]]:
        below = self._front.below_share
        assert below is not None, "whether headroom may be used was asked for"
        if self._others_below is None:
            self._below = dict.fromkeys(below)
            self._others_below = [user for user in below if user not in self._waits]
        return below, self._others_below

    def _is_waiting(self, head: BestHead) -> bool:
        """Are all its heads declined wherever none holds a part, and none to be taken there yet?"""
        if not head.uniform or head.waits_until_ns <= self._now_ns:
            return False
        if head.declined_pass != self._pass:
            if not head.is_declined():
                return False
            head.declined_pass = self._pass
        return True
