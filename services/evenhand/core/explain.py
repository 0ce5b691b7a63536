"""Why a choice was made, in the words of its record. Reads what placement weighed; decides nothing."""

import math
from collections.abc import Sequence

from evenhand.core.choice import Choice
from evenhand.core.estimator import NS_PER_MS, CostRate
from evenhand.core.facts import (
    AffinityWish,
    Candidate,
    ChoiceReason,
    Decision,
    LevelChoice,
    SchedulerConfig,
    Ticket,
)
from evenhand.core.fair_queue import FairChild
from evenhand.core.fair_tree import FairTree
from evenhand.core.front import tenants_counted
from evenhand.core.ids import WorkerId
from evenhand.core.placement import Placement
from evenhand.core.queued import Queued
from evenhand.core.rooms import Rooms
from evenhand.core.tenant import Tenant
from evenhand.core.worker import Worker

CANDIDATES_MAX = 8
"""Workers named in a decision."""

WISHES_MAX = 4
"""Tenants outside the window that are asked what they would have had there, the latest served first."""


class Explainer:
    """Makes the decision record's core part for a choice that is about to be dispatched."""

    def __init__(
        self,
        config: SchedulerConfig,
        fair: FairTree,
        rooms: Rooms,
        placement: Placement,
        cost_rate: CostRate,
    ) -> None:
        self._config = config
        self._fair = fair
        self._rooms = rooms
        self._placement = placement
        self._cost_rate = cost_rate

    def decision(self, choice: Choice, charge: float, now_ns: int) -> Decision:
        """What was considered. Called before the choice is reserved, so that loads are as they were weighed."""
        queued, request, tenant = choice.queued, choice.queued.request, choice.tenant
        warmer_full = queued.cached_best > choice.cached_tokens and self._placement.fitting.warmer_without_room(
            tenant, queued, choice.worker, choice.cached_tokens, 1
        )
        levels = self._levels(choice)
        wish = self._wish(choice, now_ns)
        if wish is None and warmer_full:
            wish = self._wish_for_full(choice, now_ns)
        return Decision(
            request_id=request.request_id,
            tenant_id=request.tenant_id,
            reason=self._reason(choice, warmer_full),
            candidates=self._candidates(choice, now_ns),
            excluded=self._rooms.closed_counts(),
            tenants_considered=levels[1].considered,
            virtual_time_before=tenant.v,
            virtual_time_after=tenant.v + charge / tenant.weight,
            lo=levels[1].lo,
            window=levels[1].window,
            wait_ms=(now_ns - queued.enqueued_at_ns) / NS_PER_MS,
            fairness_overrode_affinity=choice.declined or warmer_full or wish is not None,
            levels=levels,
            affinity=wish,
            guaranteed=choice.guaranteed,
            backfilled=choice.backfilled,
        )

    def _levels(self, choice: Choice) -> tuple[LevelChoice, LevelChoice, LevelChoice]:
        """Bands, tenants, users: who was looked at, and where the chosen one stood."""
        user, tenant, worker, rate = choice.user, choice.tenant, choice.worker, self._cost_rate.per_s
        band, fair = tenant.band, self._fair
        users = 1 if len(tenant.users) == 1 else sum(1 for other in choice.candidates if other.tenant is tenant)
        front = choice.front
        bands = len(front.bands) if front is not None else 0
        if front is not None and choice.candidates is front.users:
            tenants = front.tenants_count
        else:
            tenants = tenants_counted(choice.candidates)
        return (
            _level(fair.pool.lo(worker), bands, band, fair.window_of_bands(rate)),
            _level(
                band.tenants.lo(worker),
                tenants,
                tenant,
                fair.window_of_tenants(band, rate),
            ),
            _level(tenant.users.lo(worker), users, user, fair.window_of_users(tenant, rate)),
        )

    def _wish(self, choice: Choice, now_ns: int) -> AffinityWish | None:
        """One of the tenants served there last waits with a better cached share, but lies outside a window.

        Only the first few of those outside are asked, and what has never been looked up is not looked up for this.
        """
        worker = choice.worker
        worker_id, share = worker.spec.worker_id, choice.cached_tokens / choice.queued.prompt_tokens
        bands = choice.front.bands if choice.front is not None else {}
        chosen, tokens_wanted = choice.tenant, 0
        whose: Tenant | None = None
        # Outside the narrowest window there is: most of those served there are not, and need no closer look.
        v_least = -math.inf
        if len(bands) == len(self._fair.pool):
            v_least = min([each.v_max for each in bands.values()], default=v_least)
        outside = [each for each in reversed(worker.served.values()) if each.v > v_least and each.in_a]
        left = WISHES_MAX
        for tenant in outside:
            if tenant is chosen:
                continue
            band_front = bands.get(tenant.band.node_id)
            if band_front is not None and tenant.v <= band_front.v_max:
                continue
            if not left:
                break
            left -= 1
            first = tenant.users.order[0][2]
            if first.cold is not None:
                heads: Sequence[Queued] = first.warm_workers.get(worker_id, ())
            else:
                heads = first.heads(self._config.requests_considered_max)
            for queued in heads:
                tokens = queued.cached.get(worker_id, 0)
                if tokens > share * queued.prompt_tokens:
                    tokens_wanted, whose, share = tokens, tenant, tokens / queued.prompt_tokens
        if whose is None:
            return None
        score = share - worker.score_penalty(self._config, now_ns)
        return AffinityWish(worker_id, whose.band.tenants.ordinal(whose), tokens_wanted, score)

    def _wish_for_full(self, choice: Choice, now_ns: int) -> AffinityWish | None:
        """The chosen request's own warmest worker, which has no room for it."""
        warmest: tuple[int, WorkerId] | None = None
        for worker_id, tokens in choice.queued.cached.items():
            if worker_id in self._fair.members and (warmest is None or (-tokens, worker_id) < warmest):
                warmest = (-tokens, worker_id)
        if warmest is None:
            return None
        tokens, worker = -warmest[0], self._fair.members[warmest[1]]
        score = tokens / choice.queued.prompt_tokens - worker.score_penalty(self._config, now_ns)
        return AffinityWish(warmest[1], -1, tokens, score)

    def _candidates(self, choice: Choice, now_ns: int) -> tuple[Candidate, ...]:
        """Workers with room or with a part of the prompt, best first; the chosen one is always among them."""
        queued, chosen, config, cached = choice.queued, choice.worker, self._config, choice.queued.cached
        prompt_tokens, open_workers = queued.prompt_tokens, self._rooms.open
        # Ids are unique, so two places never compare their workers.
        ranked: list[tuple[float, WorkerId, Worker]] = [
            (worker.score_penalty(config, now_ns), worker_id, worker) for worker_id, worker in open_workers.items()
        ]
        if cached:
            members = self._fair.members
            ranked = [place for place in ranked if place[1] not in cached]
            for worker_id, tokens in cached.items():
                held = open_workers.get(worker_id)
                if held is None and (other := members.get(worker_id)) is not None and other.closed is not None:
                    held = other
                if held is not None:
                    score = tokens / prompt_tokens - held.score_penalty(config, now_ns)
                    ranked.append((-score, worker_id, held))
        ranked.sort()
        best = ranked[:CANDIDATES_MAX]
        if len(ranked) > CANDIDATES_MAX and chosen not in [worker for _, _, worker in best]:
            best[-1] = (-choice.score, chosen.spec.worker_id, chosen)
        return tuple([_candidate(queued, worker, 0.0 - score, now_ns) for score, _, worker in best])

    def _reason(self, choice: Choice, warmer_full: bool) -> ChoiceReason:
        if choice.guaranteed:
            return ChoiceReason.GUARANTEE
        heads = choice.user.heads(self._config.requests_considered_max)
        if heads[0].overtaken >= self._config.overtakes_max:
            return ChoiceReason.OVERTAKE_CAP
        if choice.declined or warmer_full:
            return ChoiceReason.FAIRNESS
        if len(self._fair.members) == 1:
            return ChoiceReason.ONLY_CANDIDATE
        return ChoiceReason.AFFINITY if choice.cached_tokens > 0 else ChoiceReason.LOAD


def _level(lo: float | None, considered: int, child: FairChild, window: float) -> LevelChoice:
    return LevelChoice(considered, child.v, lo if lo is not None else child.v, window, child.weight)


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


def _candidate(queued: Queued, worker: Worker, score: float, now_ns: int) -> Candidate:
    spec = worker.spec
    tokens, pending_tokens = queued.cached.get(spec.worker_id, 0), worker.prefill_pending_tokens(now_ns)
    ahead_tokens = pending_tokens + (queued.prompt_tokens - tokens)
    return Candidate(
        spec.worker_id,
        tokens,
        score,
        ahead_tokens / worker.prefill_rate_tokens_per_s * 1000.0 + worker.output_token_ms,
        len(worker.tickets),
        spec.slots,
        round(pending_tokens),
    )
