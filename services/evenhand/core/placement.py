"""Which of the waiting requests goes where next: one (request, worker) pair, or none.

For each worker with room, C_w is looked at: of the tenants that reach it and lie inside the window
``v ≤ lo_w + T``, the first K by (v, id) and the last S served there. Of each tenant the first H requests count.
The best score over all of them wins; the score is the cached share of the prompt − load_penalty · used/slots.
Ties go to the lower v, then the older request, then the lower predicted time to first token, then the lower id.
(Least time to first token *across requests* would be shortest-first; it only chooses among workers.)

A pair is declined while a worker without room holds ``cold_decline_tokens`` more of the prompt; if nothing else
is left, the most-behind tenant takes its best declined pair, so declining never leaves a worker idle.

If the most-behind tenant fits nowhere for want of room, the worker predicted free first is kept for it. A tenant
that only headroom holds back keeps nothing: the headroom is there for others than it.

Cached tokens of a waiting request are looked up when it becomes one of the first H, again at most every
``matches_refresh_ms`` while the map changes, and always for the chosen pair before it is final.

What this does not do: it changes no clock, reserves nothing, and never looks at a request beyond the first H.
"""

from dataclasses import dataclass

from evenhand.core.estimator import NS_PER_MS, CostRate
from evenhand.core.facts import Candidate, ChoiceReason, Decision, SchedulerConfig, Ticket
from evenhand.core.fair_queue import FairQueue
from evenhand.core.ids import WorkerId
from evenhand.core.outstanding import Outstanding
from evenhand.core.presence import Presence
from evenhand.core.rooms import Rooms
from evenhand.core.tenant import Queued, Tenant
from evenhand.core.worker import Worker

CANDIDATES_MAX = 8
"""Workers named in a decision."""


@dataclass(slots=True)
class Choice:
    """A pair that may be dispatched now, and what it was weighed against."""

    tenant: Tenant
    queued: Queued
    worker: Worker
    cached_tokens: int
    score: float
    lo: float
    window: float
    declined: bool
    tenants_considered: int


def adopted_decision(ticket: Ticket) -> Decision:
    """What can be said of a ticket granted by an earlier term: its reasons stayed in that term's records."""
    return Decision(
        request_id=ticket.request_id,
        tenant_id=ticket.tenant_id,
        reason=ChoiceReason.ADOPTED,
        candidates=(),
        excluded=(),
        tenants_considered=0,
        virtual_time_before=0.0,
        virtual_time_after=0.0,
        lo=0.0,
        window=0.0,
        wait_ms=0.0,
        fairness_overrode_affinity=False,
    )


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

    def choose(self, now_ns: int) -> Choice | None:
        """The next pair to dispatch, with cached tokens as they are now; None if nothing fits anywhere."""
        if not len(self._fair) or not self._rooms.open:
            return None
        window = self.window()
        # Each pass looks one more request up afresh, so the passes end.
        while True:
            self._keep(now_ns)
            choice = self._best(window, now_ns)
            if choice is None or choice.queued.map_version == self.map_version:
                return choice
            self._look_up(choice.queued)
            choice.tenant.best.clear()

    def decision(self, choice: Choice, v_before: float, v_after: float, now_ns: int) -> Decision:
        """What was considered, in the words of the record. Called before the choice is reserved."""
        queued, worker, request = choice.queued, choice.worker, choice.queued.request
        workers = dict(self._rooms.open)
        for worker_id in queued.cached:
            other = self._fair.members.get(worker_id)
            if other is not None:
                workers[worker_id] = other
        workers[worker.spec.worker_id] = worker
        candidates = [self._candidate(queued, other, now_ns) for other in workers.values()]
        candidates.sort(key=lambda c: (-c.score, c.predicted_ttft_ms, c.worker_id))
        best = candidates[:CANDIDATES_MAX]
        if all(c.worker_id != worker.spec.worker_id for c in best):
            best[-1] = next(c for c in candidates if c.worker_id == worker.spec.worker_id)
        colder = self._warmer_without_room(choice.tenant, queued, worker, choice.cached_tokens, 1)
        overrode = choice.declined or colder or self._warmer_tenant_outside(choice)
        return Decision(
            request_id=request.request_id,
            tenant_id=request.tenant_id,
            reason=self._reason(choice, colder),
            candidates=tuple(best),
            excluded=self._rooms.closed_counts(),
            tenants_considered=choice.tenants_considered,
            virtual_time_before=v_before,
            virtual_time_after=v_after,
            lo=choice.lo,
            window=choice.window,
            wait_ms=(now_ns - queued.enqueued_at_ns) / NS_PER_MS,
            fairness_overrode_affinity=overrode,
        )

    def heads(self, tenant: Tenant, now_ns: int) -> tuple[Queued, ...]:
        """The tenant's first H requests, each looked up at least once."""
        heads = tenant.heads(self._config.requests_considered_max)
        if tenant.matched_version != self.map_version and now_ns - tenant.matched_at_ns >= self._refresh_ns:
            for queued in heads:
                if queued.map_version != self.map_version:
                    self._look_up(queued)
            tenant.best.clear()
            tenant.matched_version, tenant.matched_at_ns = self.map_version, now_ns
        for queued in heads:
            if queued.map_version < 0:
                self._look_up(queued)
        if heads and heads[0].overtaken >= self._config.overtakes_max:
            return heads[:1]
        return heads

    def presumed(self, tenant: Tenant, granted: Queued, worker: Worker) -> None:
        """Followers of a dispatched prompt see its keys on its worker at once."""
        keys, worker_id = granted.request.block_keys, worker.spec.worker_id
        for queued in tenant.heads(self._config.requests_considered_max):
            block = queued.cached.get(worker_id, 0) // worker.spec.block_size_tokens
            own = queued.request.block_keys
            if block < len(keys) and block < len(own) and own[block] == keys[block]:
                self._look_up(queued)
                tenant.best.clear()

    # Within

    def _look_up(self, queued: Queued) -> None:
        """Usable cached tokens by worker: the last block of a whole-cached prompt is computed again."""
        request = queued.request
        cached: dict[WorkerId, int] = {}
        best = 0
        for match in self._presence.match(request.block_keys):
            worker = self._rooms.workers.get(match.worker_id)
            if worker is None:
                continue
            size = worker.spec.block_size_tokens
            tokens = min(match.blocks, (request.prompt_tokens - 1) // size) * size
            if tokens > 0:
                cached[match.worker_id] = tokens
                best = max(best, tokens)
        queued.cached, queued.cached_best, queued.map_version = cached, best, self.map_version

    def _best(self, window: float, now_ns: int) -> Choice | None:
        best: Choice | None = None
        best_key: tuple[float, int, float, WorkerId] | None = None
        fallback: Choice | None = None
        fallback_key: tuple[float, str] | None = None
        for worker in self._rooms.open.values():
            lo = self._fair.lo(worker)
            if lo is None:
                continue
            tenants = self._considered(worker, lo + window)
            load = self._config.load_penalty * worker.slots_used / worker.spec.slots
            for tenant in tenants:
                free = self._tenant_best(tenant, worker, now_ns)
                if free is None:
                    continue
                queued, cached_tokens, declined = free
                score = cached_tokens / queued.request.prompt_tokens - load
                if declined:
                    key_of_tenant = (tenant.v, tenant.spec.tenant_id)
                    if (
                        fallback is None
                        or fallback_key is None
                        or key_of_tenant < fallback_key
                        or (key_of_tenant == fallback_key and score > fallback.score)
                    ):
                        fallback_key = key_of_tenant
                        fallback = Choice(
                            tenant, queued, worker, cached_tokens, score, lo, window, True, len(tenants)
                        )
                    continue
                if best is not None and score < best.score:
                    continue
                uncached = queued.request.prompt_tokens - cached_tokens
                key = (tenant.v, queued.age, worker.ttft_ms(uncached, now_ns), worker.spec.worker_id)
                if best is None or best_key is None or score > best.score or key < best_key:
                    best_key = key
                    best = Choice(tenant, queued, worker, cached_tokens, score, lo, window, False, len(tenants))
        return best or fallback

    def _considered(self, worker: Worker, v_max: float) -> list[Tenant]:
        """C_w, less the tenants for whom another worker is kept and those barred from a kept one."""
        if self.kept is not None and self.kept[1] is worker:
            tenant = self.kept[0]
            return [tenant] if tenant.v <= v_max else []
        considered: list[Tenant] = []
        count_max = self._config.tenants_considered_max
        capacity = worker.capacity_tokens
        last: tuple[float, str] | None = None
        for v, tenant_id, tenant in self._fair.in_order():
            if v > v_max:
                break
            if len(considered) >= count_max:
                last = (v, tenant_id)
                break
            if tenant.reach_tokens <= capacity:
                considered.append(tenant)
        if last is None:
            return considered
        for tenant_id in worker.served:
            served = self._outstanding.tenants.get(tenant_id)
            if served is None or not served.in_a or served.reach_tokens > capacity:
                continue
            if last <= (served.v, tenant_id) and served.v <= v_max:
                considered.append(served)
        return considered

    def _tenant_best(self, tenant: Tenant, worker: Worker, now_ns: int) -> tuple[Queued, int, bool] | None:
        """The tenant's best fitting pair at a worker: one not declined if there is any."""
        heads = self.heads(tenant, now_ns)
        worker_id = worker.spec.worker_id
        known = tenant.best.get(worker_id)
        if known is None:
            best_queued, best_share, best_tokens = heads[0], -1.0, 0
            for queued in heads:
                tokens = queued.cached.get(worker_id, 0)
                share = tokens / queued.request.prompt_tokens
                if share > best_share:
                    best_queued, best_share, best_tokens = queued, share, tokens
            known = tenant.best[worker_id] = (best_tokens, best_queued)
        tokens, queued = known
        if queued.cached_best - tokens < self._config.cold_decline_tokens and self.fits(
            tenant, queued, worker, tokens
        ):
            return queued, tokens, False
        return self._tenant_best_in_full(tenant, heads, worker)

    def _tenant_best_in_full(
        self, tenant: Tenant, heads: tuple[Queued, ...], worker: Worker
    ) -> tuple[Queued, int, bool] | None:
        free: tuple[Queued, int, bool] | None = None
        free_share = -1.0
        declined: tuple[Queued, int, bool] | None = None
        declined_share = -1.0
        for queued in heads:
            tokens = queued.cached.get(worker.spec.worker_id, 0)
            if not self.fits(tenant, queued, worker, tokens):
                continue
            share = tokens / queued.request.prompt_tokens
            if self._warmer_without_room(tenant, queued, worker, tokens, self._config.cold_decline_tokens):
                if share > declined_share:
                    declined, declined_share = (queued, tokens, True), share
            elif share > free_share:
                free, free_share = (queued, tokens, False), share
        return free or declined

    def fits(self, tenant: Tenant, queued: Queued, worker: Worker, cached_tokens: int) -> bool:
        """Room for this very request at a worker that has room: KV, headroom, exclusion."""
        return self._fits_but_headroom(queued, worker, cached_tokens) and self._headroom_allows(
            tenant, queued, worker, cached_tokens
        )

    def _fits_but_headroom(self, queued: Queued, worker: Worker, cached_tokens: int) -> bool:
        if queued.tokens_total > worker.capacity_tokens:
            return False
        blocks = self.kv_blocks(queued, worker, cached_tokens)
        if worker.kv_reserved_blocks + blocks > worker.spec.kv_blocks:
            return False
        return not (queued.excluded and self._is_excluded(queued, worker))

    def _headroom_allows(self, tenant: Tenant, queued: Queued, worker: Worker, cached_tokens: int) -> bool:
        divisor = self._config.headroom_divisor
        slots, kv_blocks = worker.spec.slots, worker.spec.kv_blocks
        blocks = self.kv_blocks(queued, worker, cached_tokens)
        in_headroom = (
            worker.slots_used >= slots - slots // divisor
            or worker.kv_reserved_blocks + blocks > kv_blocks - kv_blocks // divisor
        )
        return not in_headroom or self._outstanding.below_share(tenant)

    def kv_blocks(self, queued: Queued, worker: Worker, cached_tokens: int) -> int:
        """KV blocks reserved for a request at a worker: its uncached prompt and its estimated output."""
        return worker.blocks_for(queued.request.prompt_tokens - cached_tokens + queued.output_tokens_estimated)

    def _is_excluded(self, queued: Queued, worker: Worker) -> bool:
        """Excluded by name, while another worker could take it some day."""
        if worker.spec.worker_id not in queued.excluded:
            return False
        return any(
            other.spec.worker_id not in queued.excluded
            and not other.stale
            and queued.tokens_total <= other.capacity_tokens
            for other in self._fair.members.values()
        )

    def _warmer_without_room(
        self, tenant: Tenant, queued: Queued, worker: Worker, cached_tokens: int, tokens_min: int
    ) -> bool:
        """A worker that may run this, but has no room for it now, holds at least so many more of its tokens."""
        if queued.cached_best - cached_tokens < tokens_min:
            return False
        for worker_id, tokens in queued.cached.items():
            if tokens - cached_tokens < tokens_min:
                continue
            other = self._fair.members.get(worker_id)
            if other is None or other is worker or other.stale or queued.tokens_total > other.capacity_tokens:
                continue
            if queued.excluded and self._is_excluded(queued, other):
                continue
            if other.closed is not None or not self.fits(tenant, queued, other, tokens):
                return True
        return False

    def _keep(self, now_ns: int) -> None:
        """Keep the worker predicted free first for the most-behind tenant, while it fits nowhere."""
        tenant = self._fair.first()
        if tenant is None:
            self.kept = None
            return
        heads = self.heads(tenant, now_ns)
        for worker in self._rooms.open.values():
            worker_id = worker.spec.worker_id
            for queued in heads:
                if self._fits_but_headroom(queued, worker, queued.cached.get(worker_id, 0)):
                    self.kept = None
                    return
        kept = self.kept
        if kept is not None and kept[0] is tenant:
            worker = kept[1]
            if worker.is_member and not worker.stale and heads[0].tokens_total <= worker.capacity_tokens:
                return
        self.kept = None
        soonest: tuple[int, WorkerId] | None = None
        for worker in self._fair.members.values():
            if worker.stale or heads[0].tokens_total > worker.capacity_tokens:
                continue
            if heads[0].excluded and self._is_excluded(heads[0], worker):
                continue
            free = (self._predicted_free_ns(heads[0], worker, now_ns), worker.spec.worker_id)
            if soonest is None or free < soonest:
                soonest = free
                self.kept = (tenant, worker)

    def _predicted_free_ns(self, queued: Queued, worker: Worker, now_ns: int) -> int:
        """When enough of a worker's tickets have ended, as predicted, for this request."""
        blocks = self.kv_blocks(queued, worker, queued.cached.get(worker.spec.worker_id, 0))
        blocks_free = worker.spec.kv_blocks - worker.kv_reserved_blocks
        slots_free = worker.spec.slots - worker.slots_used
        free_ns = now_ns
        for end_ns, ticket in sorted(
            ((worker.predicted_end_ns(t), t) for t in worker.tickets.values()), key=lambda pair: pair[0]
        ):
            if blocks_free >= blocks and slots_free >= 1:
                break
            blocks_free += ticket.kv_blocks
            slots_free += 1
            free_ns = max(now_ns, end_ns)
        return free_ns

    def _candidate(self, queued: Queued, worker: Worker, now_ns: int) -> Candidate:
        tokens = queued.cached.get(worker.spec.worker_id, 0)
        prompt_tokens = queued.request.prompt_tokens
        load = self._config.load_penalty * worker.slots_used / worker.spec.slots
        return Candidate(
            worker_id=worker.spec.worker_id,
            cached_tokens=tokens,
            score=tokens / prompt_tokens - load,
            predicted_ttft_ms=worker.ttft_ms(prompt_tokens - tokens, now_ns),
            slots_used=worker.slots_used,
            slots=worker.spec.slots,
            pending_prefill_tokens=round(worker.prefill_pending_tokens(now_ns)),
        )

    def _reason(self, choice: Choice, warmer_full: bool) -> ChoiceReason:
        heads = choice.tenant.heads(self._config.requests_considered_max)
        if heads[0].overtaken >= self._config.overtakes_max:
            return ChoiceReason.OVERTAKE_CAP
        if choice.declined or warmer_full:
            return ChoiceReason.FAIRNESS
        if len(self._fair.members) == 1:
            return ChoiceReason.ONLY_CANDIDATE
        if choice.cached_tokens > 0:
            return ChoiceReason.AFFINITY
        return ChoiceReason.LOAD

    def _warmer_tenant_outside(self, choice: Choice) -> bool:
        """A tenant lately served there waits with a better cached share, but lies outside the window."""
        worker_id = choice.worker.spec.worker_id
        share = choice.cached_tokens / choice.queued.request.prompt_tokens
        limit = choice.lo + choice.window
        for tenant_id in choice.worker.served:
            tenant = self._outstanding.tenants.get(tenant_id)
            if tenant is None or not tenant.in_a or tenant.v <= limit:
                continue
            known = tenant.best.get(worker_id)
            if known is not None and known[0] / known[1].request.prompt_tokens > share:
                return True
        return False
