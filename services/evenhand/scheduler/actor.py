"""The single writer of a pool: everything that changes its queues, clocks and tickets goes through here.

All methods are plain calls on the event loop's thread; none of them awaits, so one step is never interrupted by
another, and that is what makes the actor single-writer. An input is stepped through ``core.scheduler``, and its
effects are obeyed in order before the call returns: waiting calls get their answers, ended tickets are told to
whoever holds them, refutations go to the control topic, and the next wake-up is set.

::

    waiting    (tenant, request id) → calls that wait for the answer          bounded by calls_pending_max
    open       ticket id → what was granted, and how many calls hold it       bounded by the core's tickets

A call that goes away withdraws its waiter. The request is cancelled when nobody else waits for it or holds what it
was granted, so a client that disconnects at any point leaves nothing behind, and a retry under the same request id
is not cancelled by the end of the call before it.

Granting is bound to a term of office: without one, or past ``lease_until_ns``, nothing is stepped and every call
is answered NOT_THE_OWNER. A lease that lapsed ends the term even if it could be renewed late, because inputs were
dropped meanwhile. The actor does no I/O and knows no gRPC.

What a call's answer or a listener does wrong is recorded and stops there: the step's other effects are obeyed. The
call is answered INTERNAL_FAULT, and what it was granted is given back once the step is over.
"""

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Protocol, assert_never

from evenhand.core.facts import Decision, RefusalReason, Request, Ticket, Usage
from evenhand.core.ids import RequestId, TenantId, TicketId
from evenhand.core.kv import KeysRefuted
from evenhand.core.steps import (
    Cancel,
    Effect,
    Granted,
    IdleCharged,
    Input,
    LegEnded,
    Refused,
    Refute,
    Renew,
    Renewed,
    Settle,
    ShutDown,
    Submit,
    Tick,
    TicketAdopted,
    TicketUnknown,
    WakeAt,
    WorkerGone,
)
from evenhand.logs import get_logger
from evenhand.scheduler.adoption import Adoption
from evenhand.scheduler.lease_clock import lease_now_ns
from evenhand.scheduler.metrics import SchedulerMetrics
from evenhand.scheduler.tickets import SignedTicket, TicketSigner
from evenhand.wire.status import INTERNAL_FAULT, NOT_THE_OWNER, WireError, wire_error

TICK_INTERVAL_MAX_NS = 250_000_000
"""The core is ticked at least this often, whatever it asked for."""
NEVER_NS = 1 << 62
OWNER_RETRY_MS = 500
BUSY_RETRY_MS = 250

log = get_logger("scheduler.actor")

Key = tuple[TenantId, RequestId]


class Stepper(Protocol):
    """What the actor needs of ``core.scheduler.PoolScheduler``."""

    def step(self, step_input: Input, now_ns: int, /) -> tuple[Effect, ...]: ...


@dataclass(slots=True)
class OpenTicket:
    """One granted place, as the shell knows it."""

    ticket: Ticket
    token: str
    decision: Decision | None
    """None for a ticket of an earlier term, known from its token alone."""
    holders: int = 0
    """Calls that were given this ticket and have not withdrawn."""
    listener: "TicketListener | None" = None
    decision_id: str = ""
    """Given when the decision is first told."""


class TicketListener(Protocol):
    """A session that wants to know when a ticket of its ends by itself."""

    def ticket_ended(self, entry: OpenTicket, ended: LegEnded) -> None: ...


class Waiter:
    """One call's wait for the answer to a request.

    ``deliver`` is called once at most, and once more with INTERNAL_FAULT if it raised; it must not call back.
    """

    __slots__ = ("_deliver", "answered", "key", "placed")

    def __init__(self, key: Key, deliver: "Callable[[Waiter, OpenTicket | WireError], None]") -> None:
        self._deliver = deliver
        self.key = key
        self.answered = False
        self.placed: OpenTicket | None = None
        """What it was given, until it withdraws."""

    def answer(self, result: OpenTicket | WireError) -> None:
        """Tell the call; by the actor alone."""
        self.answered = True
        self._deliver(self, result)


class PoolActor:
    """Owns a pool's scheduler during a term of office."""

    def __init__(
        self,
        signer: TicketSigner,
        metrics: SchedulerMetrics,
        refute: Callable[[KeysRefuted], None],
        ticket_ttl_ms: int,
        calls_pending_max: int,
        lease_clock_ns: Callable[[], int] = lease_now_ns,
    ) -> None:
        self._signer = signer
        self._metrics = metrics
        self._refute = refute
        self._ttl_ms = ticket_ttl_ms
        self._calls_pending_max = calls_pending_max
        self._scheduler: Stepper | None = None
        self._lease_clock_ns = lease_clock_ns
        self._lease_until_ns = 0
        """On the lease's clock, which is read for nothing else."""
        self._waiting: dict[Key, list[Waiter]] = {}
        self._waiting_count = 0
        self._submitting: Waiter | None = None
        self._stepping = False
        self._unheard: list[Waiter] = []
        """Calls whose answer failed within the present step."""
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at_ns = 0
        self._wanted_ns = NEVER_NS
        self.adoption = Adoption()
        """What this term knows of those before it."""
        self._emptied = asyncio.Event()
        self.open: dict[TicketId, OpenTicket] = {}
        self.by_token: dict[str, OpenTicket] = {}
        self.term = 0
        self.shutting_down = False

    # ---- term of office -------------------------------------------------------------------------------------

    @property
    def granting(self) -> bool:
        """Whether this process may decide now."""
        return self._scheduler is not None and self._lease_clock_ns() < self._lease_until_ns

    def begin_term(self, scheduler: Stepper, term: int, lease_until_ns: int, adoption: Adoption) -> None:
        """Take office with a scheduler that is ready to step; the caller tells it tenants and workers.

        ``adoption`` says which tickets of earlier terms may be open though the restored checkpoint lacks them.
        """
        assert self._scheduler is None, "the term before has not ended"
        assert term > self.term, "terms only grow"
        self._scheduler, self.term, self._lease_until_ns = scheduler, term, lease_until_ns
        self.adoption = adoption
        self._metrics.owner.set(1)
        self._metrics.term.set(term)

    def extend_lease(self, lease_until_ns: int) -> None:
        self._lease_until_ns = lease_until_ns

    def end_term(self, sentence: str) -> None:
        """Leave office: every waiting call is told, and what was granted stays with the checkpoint."""
        if self._scheduler is None:
            return
        self._scheduler, self._lease_until_ns = None, 0
        self._metrics.owner.set(0)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._wanted_ns = NEVER_NS
        error = wire_error(NOT_THE_OWNER, sentence, OWNER_RETRY_MS)
        waiting, self._waiting, self._waiting_count = self._waiting, {}, 0
        for waiters in waiting.values():
            for waiter in waiters:
                self._answer(waiter, error)
        self._unheard.clear()  # nobody holds anything any more
        self.open.clear()
        self.by_token.clear()
        self._emptied.set()

    def shut_down(self) -> None:
        """Refuse what is queued and admit nothing more."""
        self.shutting_down = True
        self.tell(ShutDown())

    async def nothing_open(self) -> None:
        """Return once every open ticket has ended, or the term has."""
        while self.open:
            self._emptied.clear()
            await self._emptied.wait()

    def not_the_owner(self) -> WireError:
        """The answer of a process that may not decide."""
        if self.shutting_down:
            return wire_error(RefusalReason.SHUTTING_DOWN.value, "The scheduler is shutting down.", OWNER_RETRY_MS)
        return wire_error(NOT_THE_OWNER, "This scheduler does not own the pool now.", OWNER_RETRY_MS)

    # ---- calls ----------------------------------------------------------------------------------------------

    def tell(self, step_input: Input) -> None:
        """Step an input nobody waits for; dropped while out of office (a term begins with what is known then)."""
        if isinstance(step_input, WorkerGone):
            self._metrics.predictions.forget(step_input.worker_id)
        if self.granting:
            self._step(step_input)

    def submit(self, request: Request, waiter: Waiter) -> None:
        """Admit a request; the waiter hears of the grant or refusal, perhaps before this returns."""
        if not self.granting:
            waiter.answer(self.not_the_owner())
            return
        if self._waiting_count >= self._calls_pending_max:
            sentence = f"{self._calls_pending_max} calls are waiting already."
            waiter.answer(wire_error(RefusalReason.QUEUE_FULL.value, sentence, BUSY_RETRY_MS, "scheduler"))
            return
        self._waiting.setdefault(waiter.key, []).append(waiter)
        self._waiting_count += 1
        self._submitting = waiter
        started = time.perf_counter()
        try:
            self._step(Submit(request))
        except BaseException:
            self._forget(waiter)
            raise
        finally:
            self._submitting = None
        self._metrics.step.add(time.perf_counter() - started)

    def withdraw(self, waiter: Waiter) -> None:
        """The waiter's call is gone. What it asked for is cancelled unless another call waits for or holds it."""
        tenant_id, request_id = waiter.key
        entry = waiter.placed
        if entry is not None:
            waiter.placed = None
            entry.holders -= 1
            if entry.holders == 0 and entry.ticket.ticket_id in self.open and waiter.key not in self._waiting:
                self.tell(Cancel(tenant_id, request_id, Usage()))  # the client never learned of the worker
            return
        if self._forget(waiter) and waiter.key not in self._waiting:
            self.tell(Cancel(tenant_id, request_id))

    def renew(self, ticket_id: TicketId, usage: Usage | None) -> Renewed | TicketUnknown | None:
        """Keep a ticket alive; None while out of office."""
        if not self.granting:
            return None
        for effect in self._step(Renew(ticket_id, usage)):
            if isinstance(effect, (Renewed, TicketUnknown)) and effect.ticket_id == ticket_id:
                return effect
        return TicketUnknown(ticket_id, None)

    def settle(self, settle: Settle) -> LegEnded | TicketUnknown | None:
        """End a ticket; None while out of office."""
        ticket_id = settle.ticket_id
        if not self.granting:
            return None
        entry = self.open.get(ticket_id)
        if entry is not None:
            entry.listener = None
        for effect in self._step(settle):
            if isinstance(effect, LegEnded) and effect.ticket.ticket_id == ticket_id:
                return effect
            if isinstance(effect, TicketUnknown) and effect.ticket_id == ticket_id:
                return effect
        return TicketUnknown(ticket_id, None)

    def cancel(self, key: Key, usage: Usage | None) -> bool | None:
        """Give a request up, queued or granted: whether it was open; None while out of office."""
        if not self.granting:
            return None
        was_open = False
        for effect in self._step(Cancel(*key, usage)):
            match effect:
                case Refused(tenant_id=tenant_id, request_id=request_id):
                    was_open = was_open or (tenant_id, request_id) == key
                case LegEnded(ticket=ticket):
                    was_open = was_open or (ticket.tenant_id, ticket.request_id) == key
                case _:
                    pass
        return was_open

    def listen(self, ticket: Ticket, token: str, listener: "TicketListener") -> OpenTicket:
        """Tell this listener, and no other from here on, when the open ticket ends by itself."""
        entry = self.open.get(ticket.ticket_id)
        if entry is None:
            entry = OpenTicket(ticket, token, None)
            self.open[ticket.ticket_id] = self.by_token[token] = entry
        elif entry.token != token:  # signed once by an earlier term, once by this one; the listener knows this one
            del self.by_token[entry.token]
            entry.token = token
            self.by_token[token] = entry
        entry.listener = listener
        return entry

    def adopt(self, signed: SignedTicket) -> bool:
        """Take over a valid ticket of an earlier term that the restored checkpoint does not know.

        False if it cannot be open any more: it is of this term (and so was closed), older than its time to live,
        from before its term's last checkpoint, or ended since.
        """
        ticket, wall_ms = signed.ticket, time.time() * 1000
        if not self.granting or ticket.term >= self.term:
            return False
        age_ms = max(0.0, wall_ms - signed.granted_wall_ms)
        if age_ms > self._ttl_ms or not self.adoption.may(ticket, signed.granted_wall_ms):
            return False
        granted_at_ns = time.monotonic_ns() - int(age_ms * 1e6)
        effects = self._step(TicketAdopted(replace(ticket, granted_at_ns=granted_at_ns)))
        if any(isinstance(effect, Renewed) for effect in effects):
            self._metrics.adopted.inc()
        return True

    def _forget(self, waiter: Waiter) -> bool:
        """Take a waiter out of those that wait; False if it does not."""
        waiters = self._waiting.get(waiter.key)
        if waiters is None or waiter not in waiters:
            return False
        waiters.remove(waiter)
        self._waiting_count -= 1
        if not waiters:
            del self._waiting[waiter.key]
        return True

    # ---- steps and effects ----------------------------------------------------------------------------------

    def _step(self, step_input: Input) -> tuple[Effect, ...]:
        assert not self._stepping, "a step must not cause another before it ends"
        assert self._scheduler is not None
        now_ns = time.monotonic_ns()
        self._stepping = True
        try:
            effects = self._scheduler.step(step_input, now_ns)
            for effect in effects:
                self._obey(effect, now_ns)
        finally:
            self._stepping = False
            if self._unheard:
                unheard, self._unheard = self._unheard, []
                for waiter in unheard:
                    self.withdraw(waiter)
        return effects

    def _obey(self, effect: Effect, now_ns: int) -> None:
        match effect:
            case Granted():
                self._grant(effect, now_ns)
            case LegEnded():
                self._end_leg(effect)
            case WakeAt(at_ns=at_ns):
                self._wake_at(at_ns, now_ns)
            case Refused():
                self._refuse(effect)
            case Refute(refuted=refuted):
                self._refute(refuted)
            case Renewed() | TicketUnknown() | IdleCharged():
                pass  # the caller of the step reads these
            case _:
                assert_never(effect)

    def _grant(self, granted: Granted, now_ns: int) -> None:
        ticket = granted.ticket
        entry = self.open.get(ticket.ticket_id)
        if entry is not None and entry.decision is None:
            entry.decision = granted.decision
        elif entry is None:
            age_ns = max(0, now_ns - ticket.granted_at_ns)
            token = self._signer.sign(ticket, time.time_ns() // 1_000_000 - age_ns // 1_000_000)
            entry = OpenTicket(ticket, token, granted.decision)
            self.open[ticket.ticket_id] = self.by_token[token] = entry
            self._metrics.granted(ticket.tenant_id, granted.decision.wait_ms)
        waiters = self._waiting.pop((ticket.tenant_id, ticket.request_id), None)
        if waiters is None:
            return
        self._waiting_count -= len(waiters)
        entry.holders += len(waiters)
        for waiter in waiters:
            waiter.placed = entry
            self._answer(waiter, entry)

    def _refuse(self, refused: Refused) -> None:
        refusal, key = refused.refusal, (refused.tenant_id, refused.request_id)
        self._metrics.refusals.add(refusal.reason.value)
        subject = f"tenant:{refused.tenant_id}" if refusal.reason in _OF_QUOTA else ""
        facts: dict[str, str] = {}
        if refusal.limit:
            facts = {"limit": refusal.limit, "remaining": str(refusal.remaining)}
        error = wire_error(refusal.reason.value, refusal.sentence, refusal.retry_after_ms, subject, facts)
        for waiter in self._refused_waiters(key, refusal.reason):
            self._waiting_count -= 1
            self._answer(waiter, error)

    def _refused_waiters(self, key: Key, reason: RefusalReason) -> Iterable[Waiter]:
        """Who a refusal concerns: a bad second request under an id concerns only the call that brought it."""
        newcomer = self._submitting
        if newcomer is not None and newcomer.key == key and reason in _REFUSES_NEWCOMER:
            waiters = self._waiting[key]
            if len(waiters) > 1:
                waiters.remove(newcomer)
                return (newcomer,)
        return self._waiting.pop(key, ())

    def _end_leg(self, ended: LegEnded) -> None:
        self._metrics.legs_ended.add(ended.outcome.value)
        self._metrics.predictions.ended(ended)
        if ended.ticket.term < self.term:
            self.adoption.ended(ended.ticket.ticket_id, time.time_ns() // 1_000_000)
        entry = self.open.pop(ended.ticket.ticket_id, None)
        if entry is None:
            return
        del self.by_token[entry.token]
        if not self.open:
            self._emptied.set()
        if entry.listener is not None:
            try:
                entry.listener.ticket_ended(entry, ended)
            except Exception as fault:
                self._record("ticket_ended", fault)

    def _answer(self, waiter: Waiter, result: OpenTicket | WireError) -> None:
        """Tell a call its answer. A fault in doing so is that call's alone, and is told it if that can be."""
        try:
            waiter.answer(result)
        except Exception as fault:
            self._record("answer", fault)
            self._unheard.append(waiter)
            try:
                waiter.answer(wire_error(INTERNAL_FAULT, "The scheduler made a mistake; it has been recorded."))
            except Exception as second:
                self._record("answer", second)

    def _record(self, task: str, fault: Exception) -> None:
        self._metrics.faults.add(task)
        log.error("call_fault", call=task, exc_info=fault)

    # ---- time -----------------------------------------------------------------------------------------------

    def _wake_at(self, at_ns: int, now_ns: int) -> None:
        """Set the wake-up that the core asks for, within the interval; the core says it once."""
        self._wanted_ns = at_ns
        at_ns = min(at_ns, now_ns + TICK_INTERVAL_MAX_NS)
        if self._timer is not None:
            if self._timer_at_ns <= at_ns:
                return
            self._timer.cancel()
        self._timer_at_ns = at_ns
        delay_s = max(0.0, (at_ns - now_ns) / 1e9)
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._wake)

    def _wake(self) -> None:
        self._timer = None
        if not self.granting:
            return
        if time.monotonic_ns() >= self._wanted_ns:
            self._wanted_ns = NEVER_NS
        try:
            self._step(Tick())
        finally:
            if self._timer is None:
                self._wake_at(self._wanted_ns, time.monotonic_ns())


_OF_QUOTA = frozenset({RefusalReason.QUEUE_FULL, RefusalReason.RATE_LIMITED})
_REFUSES_NEWCOMER = frozenset({RefusalReason.REQUEST_ID_REUSED, RefusalReason.INVALID})
