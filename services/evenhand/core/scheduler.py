"""The scheduler of one pool: admit → queue → choose → ticket → settle, as one pure state machine.

``step(input, now) -> effects``. One writer calls it, for every input in turn, with a monotonic clock; it does no
I/O and knows no other time. Whatever time alone brings about (tickets and deadlines run out, workers fall
silent, prefill drains) is done first at every step, so ``Tick`` is only needed where nothing else comes, and
``WakeAt`` says when that is.

A request::

    Submit ─▶ refused                                 (one Refused)
       └────▶ queued ──▶ granted ──▶ ended            (one LegEnded that does not continue)
                 ▲          │ worker lost
                 └──────────┘                         (one LegEnded that continues, then the next leg)
              queued ──▶ refused                      (deadline, cancel, no worker left, shut down, forgotten)

What always holds is stated in ``docs/fairness.md`` and checked under ``tests/properties``. The parts each own
their state: clocks in ``fair_queue``, room in ``rooms`` and ``worker``, tickets in ``legs`` and ``tickets``,
queues in ``tenant``; the choice is ``placement``'s.
"""

import heapq
import math
from typing import assert_never

from evenhand.core import admission
from evenhand.core.checkpoint import SchedulerCheckpoint, restore_checkpoint, take_checkpoint
from evenhand.core.errors import InvalidInput
from evenhand.core.estimator import NS_PER_MS, NS_PER_S, CostRate, OutputEstimator
from evenhand.core.explain import Explainer, adopted_decision
from evenhand.core.facts import (
    LegOutcome,
    Refusal,
    RefusalReason,
    SchedulerConfig,
    Usage,
    WorkerRole,
    WorkerSpec,
)
from evenhand.core.fair_queue import FairQueue
from evenhand.core.ids import RequestId, TenantId, WorkerId
from evenhand.core.legs import Legs
from evenhand.core.outstanding import Outstanding
from evenhand.core.placement import Placement
from evenhand.core.presence import Presence
from evenhand.core.rooms import Rooms
from evenhand.core.status import PoolStatus, pool_status
from evenhand.core.steps import (
    Cancel,
    Effect,
    Granted,
    Input,
    MapChanged,
    Refused,
    Renew,
    Renewed,
    Settle,
    ShutDown,
    Submit,
    TenantChanged,
    TenantForgotten,
    Tick,
    TicketAdopted,
    TicketUnknown,
    WakeAt,
    WorkerDrained,
    WorkerGone,
    WorkerHeard,
    WorkerJoined,
)
from evenhand.core.tenant import Queued, Tenant
from evenhand.core.tickets import OpenTicket, TicketBook
from evenhand.core.worker import Worker, capacity_tokens

RETRIED = frozenset({RefusalReason.NO_WORKER, RefusalReason.SHUTTING_DOWN})
"""Refusals that come with a time after which to try again."""

SHUTTING_DOWN = "The scheduler is shutting down."

DEADLINES_KEPT_MIN = 1_024
DEADLINES_PER_QUEUED_MAX = 4
"""Deadlines kept, for each request that waits, before those of requests that wait no more are swept out."""

PRESENCE_EXPIRY_NS = NS_PER_S
"""How often assumed keys whose time is over are dropped."""


class PoolScheduler:
    """Decides for one pool. Not safe for two writers; give every call a ``now_ns`` not before the last."""

    def __init__(self, config: SchedulerConfig, presence: Presence, term: int = 1) -> None:
        self.config = config
        self._presence = presence
        self._fair = FairQueue()
        self._rooms = Rooms(config)
        self._outstanding = Outstanding()
        cost_rate = CostRate(config.cost_rate_default_per_s)
        self._placement = Placement(config, presence, self._fair, self._rooms, self._outstanding, cost_rate)
        self._estimator = OutputEstimator(config.output_estimate_default_tokens)
        self._legs = Legs(
            config,
            term,
            presence,
            self._fair,
            self._rooms,
            self._outstanding,
            self._placement,
            Explainer(config, self._fair, self._rooms, self._placement),
            cost_rate,
            self._estimator,
            TicketBook(config.outcomes_remembered_max),
        )
        self._deadlines: list[tuple[int, int, TenantId, RequestId]] = []
        self._queued_total = 0
        self._age = 0
        self._shut_down = False
        self._presence_expiry_at_ns = 0
        self._wake_at_ns = 0

    def step(self, input: Input, now_ns: int) -> tuple[Effect, ...]:
        """Take one input in; return what the shell must do, in that order."""
        effects: list[Effect] = []
        self._pass_time(now_ns, effects)
        match input:
            case Submit():
                self._submit(input, now_ns, effects)
            case Settle():
                self._settle(input, now_ns, effects)
            case Renew():
                self._renew(input, now_ns, effects)
            case Cancel():
                self._cancel(input, now_ns, effects)
            case MapChanged(worker_id):
                self._presence.map_changed(worker_id)
                self._placement.map_version += 1
            case WorkerHeard():
                self._worker_heard(input, now_ns)
            case WorkerJoined(spec):
                self._worker_joined(spec, now_ns, effects)
            case WorkerDrained(worker_id, draining):
                self._worker_drained(worker_id, draining, now_ns, effects)
            case WorkerGone(worker_id):
                worker = self._rooms.workers.get(worker_id)
                if worker is not None:
                    self._lose_worker(worker, now_ns, effects)
            case TenantChanged():
                self._tenant_changed(input, now_ns)
            case TenantForgotten(tenant_id):
                self._tenant_forgotten(tenant_id, now_ns, effects)
            case TicketAdopted():
                self._adopt(input, now_ns, effects)
            case ShutDown():
                self._shut_down = True
                self._refuse_queued(RefusalReason.SHUTTING_DOWN, SHUTTING_DOWN, now_ns, effects)
            case Tick():
                self._rooms.stirred = True
            case _:
                assert_never(input)
        self._dispatch(now_ns, effects)
        self._wake(now_ns, effects)
        return tuple(effects)

    def checkpoint(self) -> SchedulerCheckpoint:
        """Clocks, open tickets and what was learned, as plain data; queues are not in it (clients ask again)."""
        return take_checkpoint(self._legs)

    def restore(self, checkpoint: SchedulerCheckpoint, now_ns: int) -> None:
        """Take over from an earlier term. Call before the first step; workers and tenants may be told later."""
        restore_checkpoint(self._legs, checkpoint, now_ns)

    def status(self, now_ns: int) -> PoolStatus:
        """Everything the metrics and the live table show; O(tenants + workers)."""
        return pool_status(self._legs, self._queued_total, now_ns)

    @property
    def kept(self) -> tuple[TenantId, WorkerId] | None:
        """The worker kept for the most-behind tenant, as of the last decision."""
        kept = self._placement.kept
        return (kept[0].spec.tenant_id, kept[1].spec.worker_id) if kept is not None else None

    def estimate_of(self, tenant_id: TenantId, request_id: RequestId) -> int:
        """Estimated output tokens of a request that waits."""
        return self._outstanding.tenants[tenant_id].queue[request_id].output_tokens_estimated

    # Requests

    def _submit(self, submit: Submit, now_ns: int, effects: list[Effect]) -> None:
        request = submit.request
        tenant = self._outstanding.tenants.get(request.tenant_id)
        if tenant is None or tenant.forgotten:
            sentence = f"Tenant {request.tenant_id} is not known in pool {self.config.pool_id}."
            self._refuse(request.tenant_id, request.request_id, RefusalReason.UNKNOWN_TENANT, sentence, effects)
            return
        held = tenant.granted.get(request.request_id)
        waiting = tenant.queue.get(request.request_id)
        known = held.queued if held is not None else waiting
        if known is not None:
            if not admission.same_prompt(known.request, request):
                sentence = f"Request id {request.request_id} is open with another prompt or output limit."
                self._refuse(
                    request.tenant_id, request.request_id, RefusalReason.REQUEST_ID_REUSED, sentence, effects
                )
            elif held is not None:
                effects.append(Granted(held.ticket, held.decision or adopted_decision(held.ticket)))
            return
        refusal = self._refusal(submit, tenant, now_ns)
        if refusal is not None:
            effects.append(Refused(request.tenant_id, request.request_id, refusal))
            return
        self._age += 1
        queued = Queued(request, self._age, now_ns, self._estimator.estimate(request))
        tenant.enqueue(queued)
        self._queued_total += 1
        if request.deadline_ns is not None:
            entry = (request.deadline_ns, self._age, request.tenant_id, request.request_id)
            self._push_deadline(entry)
        if not tenant.in_a or len(tenant.queue) <= self.config.requests_considered_max:
            self._legs.move(tenant, tenant.v, now_ns)

    def _refusal(self, submit: Submit, tenant: Tenant, now_ns: int) -> Refusal | None:
        request = submit.request
        if self._shut_down:
            return Refusal(RefusalReason.SHUTTING_DOWN, SHUTTING_DOWN, self.config.retry_after_default_ms)
        worker = next(iter(self._rooms.workers.values()), None)
        block_size_tokens = worker.spec.block_size_tokens if worker is not None else None
        refusal = admission.refusal_of_shape(request, block_size_tokens)
        if refusal is None and request.deadline_ns is not None and request.deadline_ns <= now_ns:
            refusal = Refusal(RefusalReason.DEADLINE, "The deadline had passed before the request arrived.")
        if refusal is None:
            refusal = admission.refusal_of_pool(request, self._fair, self.config)
        if refusal is None:
            refusal = admission.refusal_of_tenant(request, tenant, self._queued_total, self.config)
        return refusal

    def _cancel(self, cancel: Cancel, now_ns: int, effects: list[Effect]) -> None:
        tenant = self._outstanding.tenants.get(cancel.tenant_id)
        if tenant is None:
            return
        held = tenant.granted.get(cancel.request_id)
        if held is not None:
            self._end(held, LegOutcome.CANCELLED, cancel.usage, now_ns, effects)
        elif cancel.request_id in tenant.queue:
            self._unqueue(tenant, cancel.request_id, now_ns)
            self._refuse(
                cancel.tenant_id, cancel.request_id, RefusalReason.CANCELLED, "The client cancelled.", effects
            )

    def _renew(self, renew: Renew, now_ns: int, effects: list[Effect]) -> None:
        held = self._legs.book.get(renew.ticket_id)
        if held is None:
            effects.append(TicketUnknown(renew.ticket_id, self._legs.book.outcome(renew.ticket_id)))
            return
        held.expires_at_ns = now_ns + self.config.ticket_ttl_ms * NS_PER_MS
        if renew.usage is not None:
            self._legs.use(held, renew.usage, now_ns)
        effects.append(Renewed(renew.ticket_id, held.expires_at_ns))

    def _settle(self, settle: Settle, now_ns: int, effects: list[Effect]) -> None:
        held = self._legs.book.get(settle.ticket_id)
        if held is None:
            self._settle_late(settle, now_ns, effects)
            return
        if settle.outcome is LegOutcome.WORKER_LOST:
            self._lose_leg(held, now_ns, effects)
            return
        worker = self._rooms.workers.get(held.ticket.worker_id)
        if settle.ttft_ms is not None and worker is not None:
            worker.learn_ttft(held.prefill_pending_tokens, settle.ttft_ms)
        outcome = LegOutcome.CANCELLED if settle.outcome is LegOutcome.CANCELLED else LegOutcome.SETTLED
        self._end(held, outcome, settle.usage, now_ns, effects)

    def _settle_late(self, settle: Settle, now_ns: int, effects: list[Effect]) -> None:
        """A settle of a closed ticket changes no clock.

        If its worker was only thought lost and its client has had its answer, or enough of it, the request need
        not run again: it leaves the queue, where it still waits there.
        """
        closed = self._legs.book.closed(settle.ticket_id)
        is_over = settle.outcome is not LegOutcome.WORKER_LOST
        if closed is not None and closed.outcome is LegOutcome.WORKER_LOST and is_over:
            tenant = self._outstanding.tenants.get(closed.tenant_id)
            waiting = tenant.queue.get(closed.request_id) if tenant is not None else None
            if tenant is not None and waiting is not None and waiting.leg > 1:
                self._unqueue(tenant, closed.request_id, now_ns)
                sentence = f"Request {closed.request_id} ended on a worker that was taken for lost."
                self._refuse(closed.tenant_id, closed.request_id, RefusalReason.CANCELLED, sentence, effects)
        effects.append(TicketUnknown(settle.ticket_id, closed.outcome if closed is not None else None))

    def _adopt(self, adopted: TicketAdopted, now_ns: int, effects: list[Effect]) -> None:
        ticket = adopted.ticket
        held = self._legs.book.get(ticket.ticket_id)
        if held is not None:
            held.expires_at_ns = now_ns + self.config.ticket_ttl_ms * NS_PER_MS
        else:
            outcome = self._legs.book.outcome(ticket.ticket_id)
            tenant = self._outstanding.tenants.get(ticket.tenant_id)
            if outcome is not None or tenant is None or ticket.request_id in tenant.granted:
                effects.append(TicketUnknown(ticket.ticket_id, outcome))
                return
            if ticket.request_id in tenant.queue:
                self._unqueue(tenant, ticket.request_id, now_ns)
                sentence = f"The earlier ticket of request {ticket.request_id} was taken up again."
                self._refuse(ticket.tenant_id, ticket.request_id, RefusalReason.CANCELLED, sentence, effects)
            held = self._legs.adopt(ticket, adopted.block_keys, now_ns)
            worker = self._rooms.workers.get(ticket.worker_id)
            if worker is not None and worker.spec.epoch > ticket.epoch:
                self._lose_leg(held, now_ns, effects)
                return
        effects.append(Renewed(ticket.ticket_id, held.expires_at_ns))

    def _lose_leg(self, held: OpenTicket, now_ns: int, effects: list[Effect]) -> None:
        """A leg's worker is lost: the request goes on with another leg while it may."""
        ticket = held.ticket
        tenant = self._outstanding.tenants[ticket.tenant_id]
        reason: RefusalReason | None = None
        sentence = ""
        if tenant.forgotten:
            reason, sentence = RefusalReason.UNKNOWN_TENANT, f"Tenant {ticket.tenant_id} was deleted."
        elif self._shut_down:
            reason, sentence = RefusalReason.SHUTTING_DOWN, SHUTTING_DOWN
        elif ticket.leg >= self.config.legs_max:
            reason, sentence = RefusalReason.NO_WORKER, f"The request lost its worker {ticket.leg} times."
        self._legs.end(held, LegOutcome.WORKER_LOST, None, now_ns, reason is None, effects)
        if reason is not None:
            self._refuse(ticket.tenant_id, ticket.request_id, reason, sentence, effects)
            self._drop_if_done(tenant)
            return
        self._queued_total += 1
        deadline_ns = held.queued.request.deadline_ns
        if deadline_ns is not None:
            entry = (deadline_ns, held.queued.age, ticket.tenant_id, ticket.request_id)
            self._push_deadline(entry)

    def _end(
        self, held: OpenTicket, outcome: LegOutcome, usage: Usage | None, now_ns: int, effects: list[Effect]
    ) -> None:
        """End a leg and its request."""
        self._legs.end(held, outcome, usage, now_ns, False, effects)
        self._drop_if_done(self._outstanding.tenants[held.ticket.tenant_id])

    def _push_deadline(self, entry: tuple[int, int, TenantId, RequestId]) -> None:
        """Note a deadline. Those of requests that wait no more are dropped when they are the most by far."""
        heapq.heappush(self._deadlines, entry)
        if len(self._deadlines) > DEADLINES_KEPT_MIN + DEADLINES_PER_QUEUED_MAX * self._queued_total:
            tenants = self._outstanding.tenants
            self._deadlines = [
                (at_ns, age, tenant_id, request_id)
                for at_ns, age, tenant_id, request_id in self._deadlines
                if tenant_id in tenants and request_id in tenants[tenant_id].queue
            ]
            heapq.heapify(self._deadlines)

    def _unqueue(self, tenant: Tenant, request_id: RequestId, now_ns: int) -> None:
        tenant.remove(request_id)
        self._queued_total -= 1
        self._legs.move(tenant, tenant.v, now_ns)

    def _refuse(
        self,
        tenant_id: TenantId,
        request_id: RequestId,
        reason: RefusalReason,
        sentence: str,
        effects: list[Effect],
    ) -> None:
        retry_after_ms = self.config.retry_after_default_ms if reason in RETRIED else None
        effects.append(Refused(tenant_id, request_id, Refusal(reason, sentence, retry_after_ms)))

    def _refuse_queued(self, reason: RefusalReason, sentence: str, now_ns: int, effects: list[Effect]) -> None:
        for tenant in self._outstanding.tenants.values():
            for request_id in tuple(tenant.queue):
                tenant.remove(request_id)
                self._queued_total -= 1
                self._refuse(tenant.spec.tenant_id, request_id, reason, sentence, effects)
            if tenant.in_a:
                self._legs.move(tenant, tenant.v, now_ns)

    # Workers

    def _worker_heard(self, heard: WorkerHeard, now_ns: int) -> None:
        worker = self._rooms.workers.get(heard.worker_id)
        if worker is not None:
            worker.load = heard.load
            worker.complete = heard.map_complete
            self._rooms.heard(worker, now_ns)

    def _worker_joined(self, spec: WorkerSpec, now_ns: int, effects: list[Effect]) -> None:
        worker = self._rooms.workers.get(spec.worker_id)
        if worker is None:
            if not self._acceptable(spec):
                return
            worker = Worker(
                spec, now_ns, self.config.prefill_rate_default_tokens_per_s, self.config.output_token_default_ms
            )
            worker.virtual_time = self._legs.virtual_times.pop(spec.worker_id, 0.0)
            self._presence.worker_joined(spec)
            self._rooms.add(worker, now_ns)
            if spec.role is WorkerRole.BOTH:
                self._fair.join(worker)
            self._workers_changed()
        elif spec == worker.spec or spec.epoch < worker.spec.epoch:
            self._rooms.heard(worker, now_ns)
            return
        else:
            if not self._acceptable(spec):
                return
            self._rooms.heard(worker, now_ns)
            lost = tuple(worker.tickets.values()) if spec.epoch > worker.spec.epoch else ()
            self._change_spec(worker, spec)
            for held in reversed(lost):
                self._lose_leg(held, now_ns, effects)
            self._refuse_stranded(now_ns, effects)
        for held in self._legs.worker_attached(worker, now_ns):
            self._lose_leg(held, now_ns, effects)

    def _change_spec(self, worker: Worker, spec: WorkerSpec) -> None:
        """Another size or role is another place in F; another epoch alone is not."""
        capacity_before = worker.capacity_tokens if worker.is_member else 0
        takes_requests = spec.role is WorkerRole.BOTH and not worker.draining
        if worker.is_member != takes_requests or capacity_tokens(spec) != capacity_before:
            self._fair.leave(worker)
            worker.change_spec(spec)
            if takes_requests:
                self._fair.join(worker, capacity_before)
        else:
            worker.change_spec(spec)
        self._presence.worker_joined(spec)
        self._workers_changed()

    def _workers_changed(self) -> None:
        """What was worked out per worker no longer holds."""
        self._placement.map_version += 1
        for tenant in self._outstanding.tenants.values():
            tenant.forget_best()

    def _acceptable(self, spec: WorkerSpec) -> bool:
        """A worker that can hold nothing, or with another block size than the pool's, is not taken in."""
        if spec.slots < 1 or spec.kv_blocks < 1 or spec.block_size_tokens < 1:
            return False
        return all(
            other.spec.block_size_tokens == spec.block_size_tokens
            for other in self._rooms.workers.values()
            if other.spec.worker_id != spec.worker_id
        )

    def _worker_drained(self, worker_id: WorkerId, draining: bool, now_ns: int, effects: list[Effect]) -> None:
        worker = self._rooms.workers.get(worker_id)
        if worker is None or worker.draining == draining:
            return
        worker.draining = draining
        self._rooms.judge(worker, now_ns)
        if draining:
            self._fair.leave(worker)
            self._refuse_stranded(now_ns, effects)
        elif worker.spec.role is WorkerRole.BOTH:
            self._fair.join(worker)
        self._workers_changed()

    def _lose_worker(self, worker: Worker, now_ns: int, effects: list[Effect]) -> None:
        self._fair.leave(worker)
        worker_id = worker.spec.worker_id
        for held in reversed(tuple(worker.tickets.values())):
            self._lose_leg(held, now_ns, effects)
        self._rooms.drop(worker)
        self._presence.worker_gone(worker_id)
        self._workers_changed()
        self._refuse_stranded(now_ns, effects)

    def _refuse_stranded(self, now_ns: int, effects: list[Effect]) -> None:
        """Refuse what waits and can run on none of the workers that are left."""
        members = self._fair.members.values()
        if not members:
            sentence = f"Pool {self.config.pool_id} has no worker left that takes requests."
            self._refuse_queued(RefusalReason.NO_WORKER, sentence, now_ns, effects)
            return
        capacity_tokens = max(worker.capacity_tokens for worker in members)
        sentence = f"No worker that could hold the request is left in pool {self.config.pool_id}."
        for tenant in self._outstanding.tenants.values():
            stranded = [q for q in tenant.queue.values() if q.tokens_total > capacity_tokens]
            for queued in stranded:
                self._unqueue(tenant, queued.request.request_id, now_ns)
                self._refuse(
                    tenant.spec.tenant_id, queued.request.request_id, RefusalReason.NO_WORKER, sentence, effects
                )

    # Tenants

    def _tenant_changed(self, changed: TenantChanged, now_ns: int) -> None:
        spec = changed.spec
        if not 0.0 < spec.weight < math.inf:
            raise InvalidInput(f"Tenant {spec.tenant_id} has weight {spec.weight}; it must be above 0 and finite.")
        tenant = self._outstanding.tenants.get(spec.tenant_id)
        if tenant is None:
            self._outstanding.tenants[spec.tenant_id] = Tenant(spec)
            return
        if tenant.in_a:
            self._outstanding.left(tenant, now_ns)
        tenant.spec = spec
        tenant.forgotten = False
        self._fair.weight_changed()
        self._outstanding.weight_changed()
        self._legs.move(tenant, tenant.v, now_ns)

    def _tenant_forgotten(self, tenant_id: TenantId, now_ns: int, effects: list[Effect]) -> None:
        tenant = self._outstanding.tenants.get(tenant_id)
        if tenant is None:
            return
        tenant.forgotten = True
        for request_id in tuple(tenant.queue):
            self._unqueue(tenant, request_id, now_ns)
            self._refuse(
                tenant_id, request_id, RefusalReason.UNKNOWN_TENANT, f"Tenant {tenant_id} was deleted.", effects
            )
        self._drop_if_done(tenant)

    def _drop_if_done(self, tenant: Tenant) -> None:
        if tenant.forgotten and not tenant.granted and not tenant.queue:
            del self._outstanding.tenants[tenant.spec.tenant_id]
            self._estimator.forget(tenant.spec.tenant_id)

    # Time

    def _pass_time(self, now_ns: int, effects: list[Effect]) -> None:
        expiry_ns = self._legs.book.next_expiry_ns()
        if expiry_ns is not None and expiry_ns <= now_ns:
            for ticket_id in self._legs.book.expired(now_ns):
                held = self._legs.book.get(ticket_id)
                assert held is not None
                self._end(held, LegOutcome.EXPIRED, None, now_ns, effects)
        while self._deadlines and self._deadlines[0][0] <= now_ns:
            _, age, tenant_id, request_id = heapq.heappop(self._deadlines)
            tenant = self._outstanding.tenants.get(tenant_id)
            queued = tenant.queue.get(request_id) if tenant is not None else None
            if tenant is not None and queued is not None and queued.age == age:
                self._unqueue(tenant, request_id, now_ns)
                waited_ms = (now_ns - queued.enqueued_at_ns) // NS_PER_MS
                sentence = f"The deadline passed after {waited_ms} ms in the queue."
                self._refuse(tenant_id, request_id, RefusalReason.DEADLINE, sentence, effects)
        for worker in self._rooms.pass_time(now_ns):
            self._lose_worker(worker, now_ns, effects)
        if now_ns >= self._presence_expiry_at_ns:
            self._presence_expiry_at_ns = now_ns + PRESENCE_EXPIRY_NS
            self._presence.expire(now_ns)
            self._placement.map_version += 1

    def _dispatch(self, now_ns: int, effects: list[Effect]) -> None:
        """Dispatch while a worker has room and someone may run; each pass grants one request.

        Where neither clocks, queues nor rooms have changed since the last look, there is nothing to find. What a
        changed map alone makes fit is found at the next change or ``Tick``.
        """
        if not (self._fair.stirred or self._rooms.stirred):
            return
        while self._queued_total and self._rooms.open:
            window = self._placement.window()
            choice = self._placement.choose(window, now_ns)
            if choice is None:
                break
            effects.append(self._legs.open(choice, window, now_ns))
            self._queued_total -= 1
        self._fair.stirred = self._rooms.stirred = False

    def _wake(self, now_ns: int, effects: list[Effect]) -> None:
        """Say when time alone next brings something about, where that is sooner than was said before."""
        at_ns = self._rooms.next_change_ns(self._queued_total > 0)
        expiry_ns = self._legs.book.next_expiry_ns()
        if expiry_ns is not None and (at_ns is None or expiry_ns < at_ns):
            at_ns = expiry_ns
        if self._deadlines and (at_ns is None or self._deadlines[0][0] < at_ns):
            at_ns = self._deadlines[0][0]
        if at_ns is not None and (at_ns < self._wake_at_ns or self._wake_at_ns <= now_ns):
            self._wake_at_ns = at_ns
            effects.append(WakeAt(at_ns))
