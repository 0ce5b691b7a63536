"""The life of each request: admitted, waiting, running, ended. Every end is told exactly once.

::

    Submit ─▶ refused                                 (one Refused)
       └────▶ queued ──▶ granted ──▶ ended            (one LegEnded that does not continue)
                 ▲          │ worker lost
                 └──────────┘                         (one LegEnded that continues, then the next leg)
              queued ──▶ refused                      (deadline, cancel, no worker left, shut down, forgotten)

A request's id is its tenant's own. While it is open, submitting it again attaches to it; once it has ended, the id
is free. This module decides nothing about order or place.
"""

import heapq

from evenhand.core import admission
from evenhand.core.estimator import NS_PER_MS
from evenhand.core.explain import adopted_decision
from evenhand.core.facts import (
    LegOutcome,
    Refusal,
    RefusalReason,
    Usage,
)
from evenhand.core.ids import RequestId, TenantId
from evenhand.core.legs import Legs
from evenhand.core.queued import Queued
from evenhand.core.steps import (
    Cancel,
    Effect,
    Granted,
    Refused,
    Renew,
    Renewed,
    Settle,
    Submit,
    TicketAdopted,
    TicketUnknown,
)
from evenhand.core.tenant import Tenant
from evenhand.core.tickets import OpenTicket

TTFT_SLACK_MS = 100.0
"""By so much a time to first token may exceed its leg, as clocks of client and scheduler tell it."""

RETRIED = frozenset({RefusalReason.NO_WORKER, RefusalReason.SHUTTING_DOWN})
"""Refusals that come with a time after which to try again."""

SHUTTING_DOWN = "The scheduler is shutting down."

DEADLINES_KEPT_MIN = 1_024
DEADLINES_PER_QUEUED_MAX = 4
"""Deadlines kept, for each request that waits, before those of requests that wait no more are swept out."""

Deadline = tuple[int, int, int, TenantId, RequestId]
"""When, and for which wait of which request: its age and its leg. A request's next wait has a deadline of its own,
so at most one for each request that waits survives a sweep, and the next sweep is many deadlines away."""


class Requests:
    """All open requests of a pool. Queues are written here; legs are opened by the scheduler and ended here."""

    def __init__(self, legs: Legs) -> None:
        self._legs = legs
        self.queued_total = 0
        self.shut_down = False
        self._deadlines: list[Deadline] = []
        self._age = 0

    @property
    def next_deadline_ns(self) -> int | None:
        """A time by which ``pass_deadlines`` should be asked again."""
        return self._deadlines[0][0] if self._deadlines else None

    def submit(self, submit: Submit, now_ns: int, effects: list[Effect]) -> None:
        """Admit a request, attach to an open one, or refuse."""
        request = submit.request
        tenant = self._legs.outstanding.tenants.get(request.tenant_id)
        if tenant is None or tenant.forgotten:
            sentence = f"Tenant {request.tenant_id} is not known in pool {self._legs.config.pool_id}."
            self.refuse(request.tenant_id, request.request_id, RefusalReason.UNKNOWN_TENANT, sentence, effects)
            return
        held = tenant.granted.get(request.request_id)
        waiting = tenant.queue.get(request.request_id)
        known = held.queued if held is not None else waiting
        if known is not None:
            if not admission.same_prompt(known.request, request, known.is_taken_over):
                sentence = f"Request id {request.request_id} is open with another prompt or output limit."
                self.refuse(
                    request.tenant_id, request.request_id, RefusalReason.REQUEST_ID_REUSED, sentence, effects
                )
            elif held is not None:
                effects.append(Granted(held.ticket, held.decision or adopted_decision(held.ticket)))
            return
        output_tokens = self._legs.estimator.estimate(request)
        refusal = self._refusal(submit, tenant, now_ns)
        if refusal is None:
            refusal = self._legs.limits.refusal(request, output_tokens, now_ns)
        if refusal is not None:
            effects.append(Refused(request.tenant_id, request.request_id, refusal))
            return
        self._legs.limits.take(request, output_tokens, now_ns)
        self._age += 1
        queued = Queued(request, self._age, now_ns, output_tokens)
        user = tenant.enqueue(queued)
        self.queued_total += 1
        if request.deadline_ns is not None:
            self._push_deadline(request.deadline_ns, queued)
        if not tenant.in_a or len(user.queue) <= self._legs.config.requests_considered_max:
            self._legs.move(user, now_ns)
        else:
            self._legs.outstanding.note(tenant)

    def _refusal(self, submit: Submit, tenant: Tenant, now_ns: int) -> Refusal | None:
        request = submit.request
        if self.shut_down:
            return Refusal(RefusalReason.SHUTTING_DOWN, SHUTTING_DOWN, self._legs.config.retry_after_default_ms)
        worker = next(iter(self._legs.rooms.workers.values()), None)
        block_size_tokens = worker.spec.block_size_tokens if worker is not None else None
        refusal = admission.refusal_of_shape(request, block_size_tokens)
        if refusal is None and request.deadline_ns is not None and request.deadline_ns <= now_ns:
            refusal = Refusal(RefusalReason.DEADLINE, "The deadline had passed before the request arrived.")
        if refusal is None:
            refusal = admission.refusal_of_pool(request, self._legs.fair, self._legs.config)
        if refusal is None:
            refusal = admission.refusal_of_tenant(request, tenant, self.queued_total, self._legs.config)
        return refusal

    def cancel(self, cancel: Cancel, now_ns: int, effects: list[Effect]) -> None:
        """End a request, wherever it stands; an unknown one changes nothing."""
        tenant = self._legs.outstanding.tenants.get(cancel.tenant_id)
        if tenant is None:
            return
        held = tenant.granted.get(cancel.request_id)
        if held is not None:
            self.end(held, LegOutcome.CANCELLED, cancel.usage, now_ns, effects)
        elif cancel.request_id in tenant.queue:
            queued = tenant.queue[cancel.request_id]
            self._legs.placement.keeping.accrue(now_ns)
            self.unqueue(tenant, cancel.request_id, now_ns)
            self.refuse(
                cancel.tenant_id, cancel.request_id, RefusalReason.CANCELLED, "The client cancelled.", effects
            )
            self._legs.charge_idled(queued, queued.idled, now_ns, effects)

    def renew(self, renew: Renew, now_ns: int, effects: list[Effect]) -> None:
        """Keep a ticket alive, within ``leg_ms_max``, and book what its leg has used beyond the charge."""
        held = self._legs.book.get(renew.ticket_id)
        if held is None:
            effects.append(TicketUnknown(renew.ticket_id, self._legs.book.outcome(renew.ticket_id)))
            return
        held.renew(now_ns + self._legs.config.ticket_ttl_ms * NS_PER_MS)
        if renew.usage is not None:
            self._legs.use(held, renew.usage, now_ns)
        effects.append(Renewed(renew.ticket_id, held.expires_at_ns, (held.expires_at_ns - now_ns) // NS_PER_MS))

    def settle(self, settle: Settle, now_ns: int, effects: list[Effect]) -> None:
        """End a ticket with the truth, or give its request another leg."""
        held = self._legs.book.get(settle.ticket_id)
        if held is None:
            self._settle_late(settle, now_ns, effects)
            return
        if settle.outcome is LegOutcome.WORKER_LOST:
            self.lose_leg(held, now_ns, effects)
            return
        worker = self._legs.rooms.workers.get(held.ticket.worker_id)
        # The grant's time of an earlier term is on another clock; no first token comes after its leg's end.
        if settle.ttft_ms is not None and worker is not None and held.ticket.term == self._legs.term:
            leg_ms = (now_ns - held.ticket.granted_at_ns) / NS_PER_MS
            if settle.ttft_ms <= leg_ms + TTFT_SLACK_MS:
                worker.learn_ttft(held.prefill_pending_tokens, settle.ttft_ms)
        outcome = LegOutcome.CANCELLED if settle.outcome is LegOutcome.CANCELLED else LegOutcome.SETTLED
        self.end(held, outcome, settle.usage, now_ns, effects)

    def _settle_late(self, settle: Settle, now_ns: int, effects: list[Effect]) -> None:
        """A settle of a closed ticket changes no clock.

        If its worker was only thought lost and its client has had its answer, or enough of it, the request need
        not run again: it leaves the queue, where it still waits there.
        """
        closed = self._legs.book.closed(settle.ticket_id)
        is_over = settle.outcome is not LegOutcome.WORKER_LOST
        if closed is not None and closed.outcome is LegOutcome.WORKER_LOST and is_over:
            tenant = self._legs.outstanding.tenants.get(closed.tenant_id)
            waiting = tenant.queue.get(closed.request_id) if tenant is not None else None
            if tenant is not None and waiting is not None and waiting.leg > 1:
                # It was served: what it took of the limits per minute stays taken.
                self._legs.limits.end(closed.tenant_id, closed.request_id, None, now_ns)
                self.unqueue(tenant, closed.request_id, now_ns)
                sentence = f"Request {closed.request_id} ended on a worker that was taken for lost."
                self.refuse(closed.tenant_id, closed.request_id, RefusalReason.CANCELLED, sentence, effects)
        effects.append(TicketUnknown(settle.ticket_id, closed.outcome if closed is not None else None))

    def adopt(self, adopted: TicketAdopted, now_ns: int, effects: list[Effect]) -> None:
        """Take over a valid ticket of an earlier term, once."""
        ticket = adopted.ticket
        held = self._legs.book.get(ticket.ticket_id)
        if held is not None:
            held.renew(now_ns + self._legs.config.ticket_ttl_ms * NS_PER_MS)
        else:
            outcome = self._legs.book.outcome(ticket.ticket_id)
            tenant = self._legs.outstanding.tenants.get(ticket.tenant_id)
            open_leg = tenant.granted.get(ticket.request_id) if tenant is not None else None
            is_over = ticket.term >= self._legs.term or (open_leg is not None and open_leg.ticket.leg > ticket.leg)
            if outcome is not None or tenant is None or is_over:
                effects.append(TicketUnknown(ticket.ticket_id, outcome))
                return
            if open_leg is not None:
                self._supersede(tenant, open_leg, now_ns, effects)
            elif ticket.request_id in tenant.queue:
                self._legs.limits.give_back(ticket.tenant_id, ticket.request_id, now_ns)
                self.unqueue(tenant, ticket.request_id, now_ns)
                sentence = f"The earlier ticket of request {ticket.request_id} was taken up again."
                self.refuse(ticket.tenant_id, ticket.request_id, RefusalReason.CANCELLED, sentence, effects)
            held = self._legs.adopt(ticket, adopted.block_keys, now_ns)
            worker = self._legs.rooms.workers.get(ticket.worker_id)
            if worker is not None and worker.spec.epoch > ticket.epoch:
                self.lose_leg(held, now_ns, effects)
                return
        effects.append(Renewed(ticket.ticket_id, held.expires_at_ns, (held.expires_at_ns - now_ns) // NS_PER_MS))

    def _supersede(self, tenant: Tenant, held: OpenTicket, now_ns: int, effects: list[Effect]) -> None:
        """End a leg that nobody holds: the client has come back with a ticket of this leg or a later one.

        The checkpoint knew an earlier leg only. What took its place here was granted for a client that was served
        elsewhere all along: it costs nothing, and the request goes on under the client's own ticket.
        """
        request_id = held.ticket.request_id
        self._legs.end(held, LegOutcome.WORKER_LOST, None, now_ns, True, effects)
        self.queued_total += 1
        self._legs.limits.give_back(held.ticket.tenant_id, request_id, now_ns)
        self.unqueue(tenant, request_id, now_ns)

    def lose_leg(self, held: OpenTicket, now_ns: int, effects: list[Effect]) -> None:
        """A leg's worker is lost: the request goes on with another leg while it may."""
        ticket, deadline_ns = held.ticket, held.queued.request.deadline_ns
        tenant = self._legs.outstanding.tenants[ticket.tenant_id]
        reason: RefusalReason | None = None
        sentence = ""
        if tenant.forgotten:
            reason, sentence = RefusalReason.UNKNOWN_TENANT, f"Tenant {ticket.tenant_id} was deleted."
        elif self.shut_down:
            reason, sentence = RefusalReason.SHUTTING_DOWN, SHUTTING_DOWN
        elif ticket.leg >= self._legs.config.legs_max:
            reason, sentence = RefusalReason.NO_WORKER, f"The request lost its worker {ticket.leg} times."
        elif deadline_ns is not None and deadline_ns <= now_ns:
            reason, sentence = RefusalReason.DEADLINE, "The deadline had passed when the request lost its worker."
        self._legs.end(held, LegOutcome.WORKER_LOST, None, now_ns, reason is None, effects)
        if reason is not None:
            self.refuse(ticket.tenant_id, ticket.request_id, reason, sentence, effects)
            self.drop_if_done(tenant)
            return
        self.queued_total += 1
        if deadline_ns is None and held.queued.is_taken_over:
            deadline_ns = now_ns + self._legs.config.taken_over_wait_max_ms * NS_PER_MS
        if deadline_ns is not None:
            self._push_deadline(deadline_ns, held.queued)

    def end(
        self, held: OpenTicket, outcome: LegOutcome, usage: Usage | None, now_ns: int, effects: list[Effect]
    ) -> None:
        """End a leg and its request."""
        self._legs.end(held, outcome, usage, now_ns, False, effects)
        self.drop_if_done(self._legs.outstanding.tenants[held.ticket.tenant_id])

    def _push_deadline(self, deadline_ns: int, queued: Queued) -> None:
        """Note the end of a wait. Those of waits that are over are dropped when they are the most by far."""
        request = queued.request
        entry = (deadline_ns, queued.age, queued.leg, request.tenant_id, request.request_id)
        heapq.heappush(self._deadlines, entry)
        if len(self._deadlines) > DEADLINES_KEPT_MIN + DEADLINES_PER_QUEUED_MAX * self.queued_total:
            self._deadlines = [entry for entry in self._deadlines if self._waits(entry) is not None]
            heapq.heapify(self._deadlines)

    def _waits(self, entry: Deadline) -> tuple[Tenant, Queued] | None:
        """The request that a deadline is of, while that wait lasts."""
        _, age, leg, tenant_id, request_id = entry
        tenant = self._legs.outstanding.tenants.get(tenant_id)
        queued = tenant.queue.get(request_id) if tenant is not None else None
        if tenant is None or queued is None or (queued.age, queued.leg) != (age, leg):
            return None
        return tenant, queued

    def unqueue(self, tenant: Tenant, request_id: RequestId, now_ns: int) -> None:
        """Take a waiting request out; the caller tells its end. Its tokens come back to the limits per minute."""
        queued = tenant.remove(request_id)
        self._legs.limits.end(tenant.spec.tenant_id, request_id, 0, now_ns)
        self.queued_total -= 1
        assert queued.user is not None, "what waits, waits in a user's queue"
        self._legs.move(queued.user, now_ns)

    def refuse(
        self,
        tenant_id: TenantId,
        request_id: RequestId,
        reason: RefusalReason,
        sentence: str,
        effects: list[Effect],
    ) -> None:
        """Tell that a request ends without a grant; what it left behind is the caller's to clear."""
        retry_after_ms = self._legs.config.retry_after_default_ms if reason in RETRIED else None
        effects.append(Refused(tenant_id, request_id, Refusal(reason, sentence, retry_after_ms)))

    def refuse_queued(self, reason: RefusalReason, sentence: str, now_ns: int, effects: list[Effect]) -> None:
        """Refuse everything that waits."""
        for tenant in self._legs.outstanding.tenants.values():
            for request_id in tenant.waiting_ids():
                self._legs.limits.give_back(tenant.spec.tenant_id, request_id, now_ns)
                self.unqueue(tenant, request_id, now_ns)
                self.refuse(tenant.spec.tenant_id, request_id, reason, sentence, effects)

    def refuse_stranded(self, now_ns: int, effects: list[Effect]) -> None:
        """Refuse what waits and can run on none of the workers that are left."""
        members = self._legs.fair.members.values()
        if not members:
            sentence = f"Pool {self._legs.config.pool_id} has no worker left that takes requests."
            self.refuse_queued(RefusalReason.NO_WORKER, sentence, now_ns, effects)
            return
        capacity_tokens = max(worker.capacity_tokens for worker in members)
        sentence = f"No worker that could hold the request is left in pool {self._legs.config.pool_id}."
        for tenant in self._legs.outstanding.tenants.values():
            for request_id in tenant.waiting_ids(capacity_tokens):
                self._legs.limits.give_back(tenant.spec.tenant_id, request_id, now_ns)
                self.unqueue(tenant, request_id, now_ns)
                self.refuse(tenant.spec.tenant_id, request_id, RefusalReason.NO_WORKER, sentence, effects)

    def drop_if_done(self, tenant: Tenant) -> None:
        """Forget a deleted tenant once nothing of it is open."""
        if tenant.forgotten and not tenant.granted and not tenant.queue:
            del self._legs.outstanding.tenants[tenant.spec.tenant_id]
            self._legs.fair.drop(tenant)
            self._legs.guarantees.change(tenant, 0.0)
            self._legs.estimator.forget(tenant.spec.tenant_id)
            self._legs.limits.forget(tenant.spec.tenant_id)

    def pass_deadlines(self, now_ns: int, effects: list[Effect]) -> None:
        """Refuse what has waited past its deadline."""
        while self._deadlines and self._deadlines[0][0] <= now_ns:
            waits = self._waits(heapq.heappop(self._deadlines))
            if waits is None:
                continue
            tenant, queued = waits
            request = queued.request
            self._legs.placement.keeping.accrue(now_ns)
            self.unqueue(tenant, request.request_id, now_ns)
            waited_ms = (now_ns - queued.enqueued_at_ns) // NS_PER_MS
            sentence = f"The deadline passed after {waited_ms} ms in the queue."
            self.refuse(request.tenant_id, request.request_id, RefusalReason.DEADLINE, sentence, effects)
            self._legs.charge_idled(queued, queued.idled, now_ns, effects)
