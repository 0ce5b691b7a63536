"""Which of the waiting requests goes where next: one (request, worker) pair, or none.

For each worker with room, C_w is looked at: of the tenants that reach it and lie inside the window
``v ≤ lo_w + T``, the first K by (v, id) and the last S served there. Of each tenant the first H requests count.
The best score over all of them wins; the score is the cached share of the prompt − load_penalty · load −
fill_penalty · filling. The load is the fullest of the worker's slots, KV and prefill room: requests load it by
tokens, not only by their number. The filling is how much of its cache holds something that would be evicted.
Ties go to the lower v, then the older request, then the lower predicted time to first token, then the lower id.
(Least time to first token *across requests* would be shortest-first; it only chooses among workers.)

A pair is declined while a worker without room holds ``cold_decline_tokens`` more of the prompt; if nothing else
is left, the most-behind tenant takes its best declined pair, so declining never leaves a worker idle.

If the most-behind tenant fits nowhere for want of room, the worker predicted free first is kept for it. A tenant
that only headroom holds back keeps nothing: the headroom is there for others than it.

Cached tokens of a waiting request are looked up when it becomes one of the first H, again at most every
``matches_refresh_ms`` while the map changes, and always for the chosen pair before it is final. Per tenant and
worker the best head is remembered until a head or its look-up changes, so a decision costs one comparison a
tenant and worker with room.

What this does not do: it changes no clock, reserves nothing, and never looks at a request beyond the first H.
"""

from dataclasses import dataclass

from evenhand.core.estimator import NS_PER_MS, CostRate
from evenhand.core.facts import SchedulerConfig
from evenhand.core.fair_queue import FairQueue
from evenhand.core.fitting import Fitting
from evenhand.core.ids import TenantId, WorkerId
from evenhand.core.outstanding import Outstanding
from evenhand.core.presence import Presence
from evenhand.core.rooms import Rooms
from evenhand.core.tenant import BestHead, Queued, Tenant
from evenhand.core.worker import Worker

NO_WORKER = WorkerId("")
"""Stands for any worker that holds no part of any head."""


class Choice:
    """A pair that may be dispatched now, and what it was weighed against."""

    __slots__ = ("cached_tokens", "declined", "lo", "queued", "score", "tenant", "tenants_considered", "worker")

    def __init__(self, tenant: Tenant, queued: Queued, worker: Worker, cached_tokens: int, score: float) -> None:
        self.tenant = tenant
        self.queued = queued
        self.worker = worker
        self.cached_tokens = cached_tokens
        self.score = score
        self.declined = False
        """Only chosen because every pair was declined."""
        self.lo = 0.0
        self.tenants_considered = 0


@dataclass(slots=True)
class Front:
    """The first K tenants inside the window of a worker, and how far they reach into the order."""

    lo: float
    v_max: float
    tenants: list[Tenant]
    last: tuple[float, TenantId] | None
    """Place of the first tenant inside the window that is not among the K; None: all are."""
    below_share: list[Tenant] | None = None
    """Those of ``tenants`` that may use headroom; None: not asked yet."""


class Placement:
    """Reads queues, clocks, rooms and presence; writes only the look-ups cached on requests and tenants."""

    def __init__(
        self,
        config: SchedulerConfig,
        presence: Presence,
        fair: FairQueue,
        rooms: Rooms,
        outstanding: Outstanding,
        cost_rate: CostRate,
    ) -> None:
        self._config = config
        self._presence = presence
        self._fair = fair
        self._rooms = rooms
        self._outstanding = outstanding
        self._cost_rate = cost_rate
        self.fitting = Fitting(fair, outstanding, config.headroom_divisor)
        self._refresh_ns = config.matches_refresh_ms * NS_PER_MS
        self.map_version = 0
        """Grows whenever presence may answer differently."""
        self.kept: tuple[Tenant, Worker] | None = None
        """The worker kept for the most-behind tenant."""

    def window(self) -> float:
        """T in virtual time: fixed, or ``delay · R / Σφ(A)``."""
        if self._config.window_fixed is not None:
            return self._config.window_fixed
        weight_sum = self._fair.weight_sum
        if weight_sum <= 0.0:
            return 0.0
        return self._config.window_delay_ms / 1000.0 * self._cost_rate.per_s / weight_sum

    def choose(self, window: float, now_ns: int) -> Choice | None:
        """The next pair to dispatch, with cached tokens as they are now; None if nothing fits anywhere."""
        # Each further pass has looked one more request up afresh, so the passes end.
        while True:
            self._keep(now_ns)
            choice = self._best(window, now_ns)
            if choice is None or choice.queued.map_version == self.map_version:
                return choice
            if not self._look_up(choice.queued):
                return choice
            choice.tenant.forget_best()

    def presumed(self, tenant: Tenant, granted: Queued, worker: Worker) -> None:
        """Followers of a dispatched prompt see its keys on its worker at once."""
        keys, worker_id = granted.request.block_keys, worker.spec.worker_id
        first_key = keys[0] if keys else None
        for queued in tenant.heads(self._config.requests_considered_max):
            own = queued.request.block_keys
            if not own or own[0] != first_key:
                continue
            block = queued.cached.get(worker_id, 0) // worker.spec.block_size_tokens
            if block < len(keys) and block < len(own) and own[block] == keys[block] and self._look_up(queued):
                tenant.forget_best()

    # What is considered

    def _front(self, worker: Worker, window: float, now_ns: int) -> Front | None:
        """The first K of A_w inside the window, their look-ups not older than allowed; None: A_w is empty."""
        places = self._fair.first_places(worker, self._config.tenants_considered_max + 1)
        if not places:
            return None
        lo = places[0][0]
        v_max = lo + window
        while places[-1][0] > v_max:
            places.pop()
        last: tuple[float, TenantId] | None = None
        if len(places) > self._config.tenants_considered_max:
            last = places.pop()[:2]
        tenants = [tenant for _, _, tenant in places]
        map_version, due_before_ns = self.map_version, now_ns - self._refresh_ns
        for tenant in tenants:
            if tenant.matched_at_ns <= due_before_ns and tenant.matched_version != map_version:
                self._refresh(tenant, now_ns)
        return Front(lo, v_max, tenants, last)

    def _candidates(self, worker: Worker, front: Front, tight: bool, now_ns: int) -> list[Tenant]:
        """C_w; where only headroom is left, those of C_w that may use it."""
        if self.kept is not None and self.kept[1] is worker:
            return [tenant for tenant in front.tenants if tenant is self.kept[0]]
        tenants = front.tenants
        if tight:
            if front.below_share is None:
                front.below_share = self._outstanding.those_below_share(tenants)
            tenants = front.below_share
        if front.last is None:
            return tenants
        last_v, v_max = front.last[0], front.v_max
        sticky = [tenant for tenant in worker.served.values() if last_v <= tenant.v <= v_max and tenant.in_a]
        if sticky:
            sticky = [
                tenant
                for tenant in sticky
                if front.last <= (tenant.v, tenant.spec.tenant_id)
                and tenant.reach_tokens <= worker.capacity_tokens
            ]
            if tight:
                sticky = self._outstanding.those_below_share(sticky)
        if not sticky:
            return tenants
        for tenant in sticky:
            if tenant.matched_at_ns <= now_ns - self._refresh_ns and tenant.matched_version != self.map_version:
                self._refresh(tenant, now_ns)
        return tenants + sticky

    def _heads(self, tenant: Tenant) -> tuple[Queued, ...]:
        """The tenant's requests that may be chosen, each looked up at least once."""
        heads = tenant.heads(self._config.requests_considered_max)
        if heads and heads[0].overtaken >= self._config.overtakes_max:
            heads = heads[:1]
        for queued in heads:
            if queued.map_version < 0:
                self._look_up(queued)
        return heads

    # What is best

    def _best(self, window: float, now_ns: int) -> Choice | None:
        best: Choice | None = None
        fallback: Choice | None = None
        cold: dict[TenantId, Choice | None] = {}
        divisor = self._config.headroom_divisor
        shared = None
        for worker in self._rooms.open.values():
            if shared is None or not self._fair.all_universal:
                shared = self._front(worker, window, now_ns)
                if shared is None:
                    continue
            spec, worker_id, used = worker.spec, worker.spec.worker_id, len(worker.tickets)
            free_blocks = spec.kv_blocks - worker.kv_reserved_blocks
            common_blocks = free_blocks - spec.kv_blocks // divisor
            tight = used >= spec.slots - spec.slots // divisor or common_blocks <= 0
            plain_blocks = free_blocks if tight else common_blocks
            penalty = worker.score_penalty(self._config, now_ns)
            tenants = self._candidates(worker, shared, tight, now_ns)
            for tenant in tenants:
                head = tenant.best.get(worker_id) or self._know(tenant, worker)
                if head.plain and head.blocks <= plain_blocks:
                    score = head.share - penalty
                    if best is not None and (
                        score < best.score or (score == best.score and tenant.v > best.tenant.v)
                    ):
                        continue
                    choice = Choice(tenant, head.queued, worker, head.tokens, score)
                elif head.blocks_min > free_blocks:
                    continue
                else:
                    alike = head is tenant.cold and head.uniform and head.blocks_max <= plain_blocks
                    found = self._in_full_once(tenant, worker, penalty, cold if alike else None)
                    if found is None:
                        continue
                    choice = found
                choice.lo, choice.tenants_considered = shared.lo, len(tenants)
                if choice.declined:
                    if fallback is None or self._is_better_declined(choice, fallback, now_ns):
                        fallback = choice
                elif best is None or choice.score > best.score or self._wins_tie(choice, best, now_ns):
                    best = choice
        return best or fallback

    def _wins_tie(self, choice: Choice, best: Choice, now_ns: int) -> bool:
        if choice.score < best.score:
            return False
        if choice.tenant.v != best.tenant.v:
            return choice.tenant.v < best.tenant.v
        if choice.queued.age != best.queued.age:
            return choice.queued.age < best.queued.age
        prompt_tokens = choice.queued.prompt_tokens
        mine = (choice.worker.ttft_ms(prompt_tokens - choice.cached_tokens, now_ns), choice.worker.spec.worker_id)
        its = (best.worker.ttft_ms(prompt_tokens - best.cached_tokens, now_ns), best.worker.spec.worker_id)
        return mine < its

    def _is_better_declined(self, choice: Choice, fallback: Choice, now_ns: int) -> bool:
        """The most-behind tenant comes first, then what is best for it."""
        mine = (choice.tenant.v, choice.tenant.spec.tenant_id)
        its = (fallback.tenant.v, fallback.tenant.spec.tenant_id)
        if mine != its:
            return mine < its
        return choice.score > fallback.score or self._wins_tie(choice, fallback, now_ns)

    def _know(self, tenant: Tenant, worker: Worker) -> BestHead:
        """Work out, and remember, the tenant's head with the largest cached share at a worker."""
        worker_id = worker.spec.worker_id
        if tenant.warm_workers is None:
            heads = self._heads(tenant)
            tenant.warm_workers = set().union(*[queued.cached for queued in heads])
            capacity_min_tokens = self._fair.capacity_min_tokens
            tenant.cold = self._best_head(heads, NO_WORKER, worker, capacity_min_tokens)
            tenant.cold.uniform = all(
                not queued.excluded and queued.tokens_total <= capacity_min_tokens for queued in heads
            )
        cold = tenant.cold
        if cold is not None and cold.uniform and worker_id not in tenant.warm_workers:
            best = cold
        else:
            best = self._best_head(self._heads(tenant), worker_id, worker, worker.capacity_tokens)
        tenant.best[worker_id] = best
        return best

    def _best_head(
        self, heads: tuple[Queued, ...], worker_id: WorkerId, worker: Worker, capacity_tokens: int
    ) -> BestHead:
        size, decline_tokens = worker.spec.block_size_tokens, self._config.cold_decline_tokens
        best: BestHead | None = None
        blocks_min = blocks_max = 0
        for queued in heads:
            tokens, prompt_tokens = queued.cached.get(worker_id, 0), queued.prompt_tokens
            blocks = -(-(prompt_tokens - tokens + queued.output_tokens_estimated) // size)
            if best is None or tokens / prompt_tokens > best.share:
                plain = (
                    not queued.excluded
                    and queued.tokens_total <= capacity_tokens
                    and queued.cached_best - tokens < decline_tokens
                )
                best = BestHead(queued, tokens, tokens / prompt_tokens, blocks, plain)
            if blocks < blocks_min or not blocks_min:
                blocks_min = blocks
            if blocks > blocks_max:
                blocks_max = blocks
        assert best is not None, "a tenant in A has a head"
        best.blocks_min, best.blocks_max = blocks_min, blocks_max
        return best

    def _in_full_once(
        self, tenant: Tenant, worker: Worker, penalty: float, known: dict[TenantId, Choice | None] | None
    ) -> Choice | None:
        """As ``_in_full``; among workers that are alike for the tenant, worked out for the first one only."""
        if known is None:
            return self._in_full(tenant, worker, penalty)
        tenant_id = tenant.spec.tenant_id
        if tenant_id not in known:
            known[tenant_id] = found = self._in_full(tenant, worker, penalty)
            return found
        found = known[tenant_id]
        if found is None:
            return None
        choice = Choice(tenant, found.queued, worker, 0, -penalty)
        choice.declined = found.declined
        return choice

    def _in_full(self, tenant: Tenant, worker: Worker, penalty: float) -> Choice | None:
        """The tenant's best fitting pair at a worker, head by head: one not declined if there is any."""
        worker_id, size, decline_tokens = (
            worker.spec.worker_id,
            worker.spec.block_size_tokens,
            self._config.cold_decline_tokens,
        )
        blocks_max, capacity_tokens = self.fitting.blocks_allowed(tenant, worker), worker.capacity_tokens
        free: Choice | None = None
        declined: Choice | None = None
        for queued in self._heads(tenant):
            tokens, prompt_tokens = queued.cached.get(worker_id, 0), queued.prompt_tokens
            score = tokens / prompt_tokens - penalty
            if free is not None and score <= free.score:
                continue
            blocks = -(-(prompt_tokens - tokens + queued.output_tokens_estimated) // size)
            if blocks > blocks_max or queued.tokens_total > capacity_tokens:
                continue
            if queued.excluded and self.fitting.is_excluded(queued, worker):
                continue
            is_declined = queued.cached_best - tokens >= decline_tokens and self.fitting.warmer_without_room(
                tenant, queued, worker, tokens, decline_tokens
            )
            if not is_declined:
                free = Choice(tenant, queued, worker, tokens, score)
            elif declined is None or score > declined.score:
                declined = Choice(tenant, queued, worker, tokens, score)
                declined.declined = True
        return free or declined

    # Look-ups

    def _refresh(self, tenant: Tenant, now_ns: int) -> None:
        changed = False
        for queued in tenant.heads(self._config.requests_considered_max):
            if queued.map_version != self.map_version and self._look_up(queued):
                changed = True
        if changed:
            tenant.forget_best()
        tenant.matched_version, tenant.matched_at_ns = self.map_version, now_ns

    def _look_up(self, queued: Queued) -> bool:
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

    # What is kept

    def _keep(self, now_ns: int) -> None:
        """Keep the worker predicted free first for the most-behind tenant, while it fits nowhere."""
        tenant = self._fair.first()
        if tenant is None:
            self.kept = None
            return
        for worker in self._rooms.open.values():
            head = tenant.best.get(worker.spec.worker_id) or self._know(tenant, worker)
            if head.blocks_min > worker.spec.kv_blocks - worker.kv_reserved_blocks:
                continue
            for queued in self._heads(tenant):
                if self.fitting.fits_but_headroom(queued, worker, queued.cached.get(worker.spec.worker_id, 0)):
                    self.kept = None
                    return
        first = self._heads(tenant)[0]
        if self.kept is not None and self.kept[0] is tenant and self.fitting.could_take(first, self.kept[1]):
            return
        self.kept = None
        soonest: tuple[int, WorkerId] | None = None
        for worker in self._fair.members.values():
            if not self.fitting.could_take(first, worker):
                continue
            free = (self.fitting.predicted_free_ns(first, worker, now_ns), worker.spec.worker_id)
            if soonest is None or free < soonest:
                soonest = free
                self.kept = (tenant, worker)
