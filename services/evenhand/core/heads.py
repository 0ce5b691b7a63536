"""What is known of the first H requests of each user's queue: cached tokens by worker, and the best for a worker.

Cached tokens of a waiting request are looked up when it becomes one of the first H, again at most every
``matches_refresh_ms`` while the map changes, and always for the chosen pair before it is final. Per user and
worker the best head is remembered until a head or its look-up changes, so a decision costs one comparison a user
and worker with room. Workers that hold no part of any head are alike to it and share one answer; for the others
only the heads are compared that have a part there.

This module writes only the look-ups cached on requests and users.
"""

from collections.abc import Iterable, Sequence
from itertools import islice

from evenhand.core.estimator import NS_PER_MS
from evenhand.core.facts import SchedulerConfig
from evenhand.core.fair_tree import FairTree
from evenhand.core.fitting import Fitting
from evenhand.core.ids import WorkerId
from evenhand.core.presence import Presence
from evenhand.core.queued import BestHead, Queued
from evenhand.core.rooms import Rooms
from evenhand.core.tenant import Tenant, User
from evenhand.core.worker import Worker, worker_mark

REFRESHES_MAX = 16
"""Heads that are looked up again at one look at their users, so that no single decision pays for all; the next
goes on. Without bound where ``matches_refresh_ms`` is 0."""

FOLLOWED_USERS_MAX = 64
"""Users of a tenant, those most behind, that see at once what a dispatch puts on a worker; it must cost the same
with a thousand. The others see it when their look-ups are next refreshed."""

NOWHERE_BLOCKS = 1 << 62
"""More than any worker has: the need of a user all of whose heads are excluded at a worker."""

NO_WORKER = WorkerId("")
"""Stands for any worker that holds no part of any head."""


class Heads:
    """Look-ups of what waits first."""

    def __init__(
        self, config: SchedulerConfig, presence: Presence, fair: FairTree, rooms: Rooms, fitting: Fitting
    ) -> None:
        self._config = config
        self._presence = presence
        self._fair = fair
        self._rooms = rooms
        self._fitting = fitting
        self._refresh_ns = config.matches_refresh_ms * NS_PER_MS
        self.map_version = 0
        """Grows whenever presence may answer differently."""

    def of(self, user: User) -> tuple[Queued, ...]:
        """The user's requests that may be chosen, each looked up at least once."""
        heads = user.heads(self._config.requests_considered_max)
        if heads and heads[0].overtaken >= self._config.overtakes_max:
            heads = heads[:1]
        for queued in heads:
            if queued.map_version < 0:
                self.look_up(queued)
        return heads

    def at(self, user: User, worker: Worker) -> BestHead:
        """The user's head with the largest cached share at a worker."""
        return user.best.get(worker.spec.worker_id) or self.know(user, worker)

    def know(self, user: User, worker: Worker) -> BestHead:
        """Work out the user's head with the largest cached share at a worker, and remember it.

        A worker that holds no part of any head is like the others that hold none: ``User.cold`` is for all of
        them.
        """
        worker_id = worker.spec.worker_id
        if user.cold is None:
            heads = self.of(user)
            warm_workers: dict[WorkerId, list[Queued]] = {}
            user.warm_workers = warm_workers
            for queued in heads:
                for warm_id in queued.cached:
                    known = warm_workers.get(warm_id)
                    if known is None:
                        warm_workers[warm_id] = [queued]
                    else:
                        known.append(queued)
            mask, workers = 0, self._rooms.workers
            for warm_id in warm_workers:
                warm_worker = workers.get(warm_id)
                mask |= warm_worker.mark if warm_worker is not None else worker_mark(warm_id)
            user.warm_mask = mask
            capacity_min_tokens = self._fair.capacity_min_tokens
            user.cold = self._best_head(heads, NO_WORKER, worker, capacity_min_tokens)
            user.cold.uniform = all(
                not queued.excluded and queued.tokens_total <= capacity_min_tokens for queued in heads
            )
        cold = user.cold
        if cold.uniform:
            warm = user.warm_workers.get(worker_id)
            if warm is None:
                return cold
            # Whoever has a part there beats all that have none, and needs less there than anywhere cold.
            best = self._best_head(warm, worker_id, worker, worker.capacity_tokens)
            best.blocks_min = min(best.blocks_min, cold.blocks_min)
            best.blocks_max = max(best.blocks_max, cold.blocks_max)
            user.best[worker_id] = best
            return best
        user.best[worker_id] = best = self._best_head(self.of(user), worker_id, worker, worker.capacity_tokens)
        return best

    def _best_head(
        self, heads: Sequence[Queued], worker_id: WorkerId, worker: Worker, capacity_tokens: int
    ) -> BestHead:
        size, decline_tokens = worker.spec.block_size_tokens, self._config.cold_decline_tokens
        best: BestHead | None = None
        blocks_min = blocks_max = 0
        for queued in heads:
            if queued.excluded and worker_id != NO_WORKER and self._fitting.is_excluded(queued, worker):
                continue
            tokens, prompt_tokens = queued.cached.get(worker_id, 0), queued.prompt_tokens
            blocks = -(-(prompt_tokens - tokens + queued.output_tokens_estimated) // size)
            if best is None or tokens / prompt_tokens > best.share:
                plain = queued.tokens_total <= capacity_tokens and queued.cached_best - tokens < decline_tokens
                best = BestHead(queued, tokens, tokens / prompt_tokens, blocks, plain)
            if blocks < blocks_min or not blocks_min:
                blocks_min = blocks
            if blocks > blocks_max:
                blocks_max = blocks
        if best is None:
            return BestHead(heads[0], 0, 0.0, NOWHERE_BLOCKS, False)
        best.blocks_min, best.blocks_max = blocks_min, blocks_max
        return best

    def due_before_ns(self, now_ns: int) -> int:
        """What was looked up by then, and not since, is older than it should be, if the map has changed."""
        return now_ns - self._refresh_ns

    def refresh_due(self, users: Iterable[User], now_ns: int, left: int = REFRESHES_MAX) -> int:
        """Look up again the heads of those whose look-ups are older than they should be, a few at a time.

        At most ``left``; returns how many may be looked up still.
        """
        map_version, due_before_ns = self.map_version, self.due_before_ns(now_ns)
        if not self._refresh_ns:
            left = -1
        for user in users:
            if user.matched_at_ns <= due_before_ns and user.matched_version != map_version:
                left = self._refresh(user, now_ns, due_before_ns, left)
                if not left:
                    break
        return left

    def _refresh(self, user: User, now_ns: int, due_before_ns: int, left: int) -> int:
        """Look up what is due of one user, at most ``left`` of it (below 0: all); returns how many are left."""
        changed = False
        for queued in user.heads(self._config.requests_considered_max):
            if queued.map_version == self.map_version or queued.matched_at_ns > due_before_ns:
                continue
            if not left:
                break
            left -= 1
            queued.matched_at_ns = now_ns
            changed |= self.look_up(queued)
        else:
            user.matched_version, user.matched_at_ns = self.map_version, now_ns
        if changed:
            user.forget_best()
        return left

    def look_up(self, queued: Queued) -> bool:
        """Usable cached tokens by worker (the last block of a whole-cached prompt is computed again); changed?"""
        request, workers = queued.request, self._rooms.workers
        cached: dict[WorkerId, int] = {}
        for match in self._presence.match(request.block_keys):
            worker = workers.get(match.worker_id)
            if worker is None:
                continue
            size = worker.spec.block_size_tokens
            tokens = min(match.blocks, (request.prompt_tokens - 1) // size) * size
            if tokens > 0:
                cached[match.worker_id] = tokens
        queued.map_version = self.map_version
        if cached == queued.cached:
            return False
        queued.cached = cached
        queued.cached_best = max(cached.values(), default=0)
        return True

    def presumed(self, tenant: Tenant, granted: Queued, worker: Worker) -> None:
        """Followers of a dispatched prompt, of its user and of those next in turn, see its keys at once."""
        own = granted.user
        if own is not None:
            self._followers(own, granted, worker)
        for _, _, user in islice(tenant.users.in_order(), FOLLOWED_USERS_MAX):
            if user is not own:
                self._followers(user, granted, worker)

    def _followers(self, user: User, granted: Queued, worker: Worker) -> None:
        first_key, size = granted.first_key, worker.spec.block_size_tokens
        if first_key is None:
            return
        keys, worker_id = granted.request.block_keys, worker.spec.worker_id
        heads = user.heads(self._config.requests_considered_max)
        for queued in [each for each in heads if each.first_key == first_key]:
            own, block = queued.request.block_keys, queued.cached.get(worker_id, 0) // size
            if block < len(keys) and block < len(own) and own[block] == keys[block] and self.look_up(queued):
                user.forget_best()
