"""Why a choice was made, in the words of its record. Reads what placement weighed; decides nothing."""

from operator import itemgetter

from evenhand.core.estimator import NS_PER_MS
from evenhand.core.facts import Candidate, ChoiceReason, Decision, SchedulerConfig, Ticket
from evenhand.core.fair_queue import FairQueue
from evenhand.core.ids import WorkerId
from evenhand.core.placement import Choice, Placement
from evenhand.core.rooms import Rooms
from evenhand.core.tenant import Queued
from evenhand.core.worker import Worker

CANDIDATES_MAX = 8
"""Workers named in a decision."""


class Explainer:
    """Makes the decision record's core part for a choice that is about to be dispatched."""

    def __init__(
        self,
        config: SchedulerConfig,
        fair: FairQueue,
        rooms: Rooms,
        placement: Placement,
    ) -> None:
        self._config = config
        self._fair = fair
        self._rooms = rooms
        self._placement = placement

    def decision(self, choice: Choice, v_after: float, window: float, now_ns: int) -> Decision:
        """What was considered. Called before the choice is reserved, so that loads are as they were weighed."""
        queued, request = choice.queued, choice.queued.request
        warmer_full = queued.cached_best > choice.cached_tokens and self._placement.fitting.warmer_without_room(
            choice.tenant, queued, choice.worker, choice.cached_tokens, 1
        )
        return Decision(
            request_id=request.request_id,
            tenant_id=request.tenant_id,
            reason=self._reason(choice, warmer_full),
            candidates=self._candidates(choice, now_ns),
            excluded=self._rooms.closed_counts(),
            tenants_considered=choice.tenants_considered,
            virtual_time_before=choice.tenant.v,
            virtual_time_after=v_after,
            lo=choice.lo,
            window=window,
            wait_ms=(now_ns - queued.enqueued_at_ns) / NS_PER_MS,
            fairness_overrode_affinity=choice.declined or warmer_full or self._warmer_outside(choice, window),
        )

    def _candidates(self, choice: Choice, now_ns: int) -> tuple[Candidate, ...]:
        """Workers with room or with a part of the prompt, best first; the chosen one is always among them."""
        queued, chosen_id = choice.queued, choice.worker.spec.worker_id
        prompt_tokens = queued.request.prompt_tokens
        ranked: list[tuple[float, WorkerId, Worker]] = []
        for worker_id, worker in self._rooms.open.items():
            tokens = queued.cached.get(worker_id, 0)
            score = tokens / prompt_tokens - worker.score_penalty(self._config, now_ns)
            ranked.append((-score, worker_id, worker))
        for worker_id, tokens in queued.cached.items():
            held = self._fair.members.get(worker_id)
            if held is not None and held.closed is not None:
                score = tokens / prompt_tokens - held.score_penalty(self._config, now_ns)
                ranked.append((-score, worker_id, held))
        ranked.sort(key=itemgetter(0, 1))
        best = ranked[:CANDIDATES_MAX]
        if choice.worker not in [worker for _, _, worker in best]:
            best[-1] = (-choice.score, chosen_id, choice.worker)
        return tuple([_candidate(queued, worker, -score, now_ns) for score, _, worker in best])

    def _reason(self, choice: Choice, warmer_full: bool) -> ChoiceReason:
        heads = choice.tenant.heads(self._config.requests_considered_max)
        if heads[0].overtaken >= self._config.overtakes_max:
            return ChoiceReason.OVERTAKE_CAP
        if choice.declined or warmer_full:
            return ChoiceReason.FAIRNESS
        if len(self._fair.members) == 1:
            return ChoiceReason.ONLY_CANDIDATE
        return ChoiceReason.AFFINITY if choice.cached_tokens > 0 else ChoiceReason.LOAD

    def _warmer_outside(self, choice: Choice, window: float) -> bool:
        """A tenant lately served there waits with a better cached share, but lies outside the window."""
        worker_id, v_max = choice.worker.spec.worker_id, choice.lo + window
        share = choice.cached_tokens / choice.queued.request.prompt_tokens
        for tenant in choice.worker.served.values():
            if tenant.v <= v_max or not tenant.in_a:
                continue
            known = tenant.best.get(worker_id)
            if known is not None and known.share > share:
                return True
        return False


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
    tokens = queued.cached.get(worker.spec.worker_id, 0)
    return Candidate(
        worker_id=worker.spec.worker_id,
        cached_tokens=tokens,
        score=score,
        predicted_ttft_ms=worker.ttft_ms(queued.request.prompt_tokens - tokens, now_ns),
        slots_used=len(worker.tickets),
        slots=worker.spec.slots,
        pending_prefill_tokens=round(worker.prefill_pending_tokens(now_ns)),
    )
