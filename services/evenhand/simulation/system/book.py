"""An independent book of what the scheduler does: its inputs and effects alone, never its own sums.

One page a term of office. At every step it is checked:

- a ticket is granted once and ends once; its charge is the cost of the split it states; its end pays for what its
  outcome says it pays for (P5, P7);
- a worker never holds more tickets than slots, but for those that an earlier term left to it;
- a request is answered only while it waits, and once (P7);
- a dispatch that is neither guaranteed nor backfilled is inside the window (P1), one that is backfilled is not,
  the window is no wider than what the pool has delivered allows, and two tenants that are both backlogged all the
  while drift apart in service by no more than their bounds together (P4, which P2 of both ends implies; judged
  when the run is over).

Only ordinary dispatches count for the last: what is booked to a guarantee is not on the clock.
"""

import math
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import assert_never

from evenhand.core.estimator import COST_RATE_MEMORY_S
from evenhand.core.facts import (
    Decision,
    LegOutcome,
    RefusalReason,
    SchedulerConfig,
    Ticket,
    Usage,
    WorkerSpec,
)
from evenhand.core.ids import RequestId, TenantId, TicketId, WorkerId
from evenhand.core.scheduler import PoolScheduler
from evenhand.core.steps import (
    BandsChanged,
    Cancel,
    Effect,
    Granted,
    IdleCharged,
    Input,
    LegEnded,
    MapChanged,
    Refused,
    Refute,
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
from evenhand.scheduler.actor import Stepper
from evenhand.simulation.system.drift import Drift
from evenhand.simulation.system.trace import Trace

CENT = 1e-6
"""Relative tolerance for sums of floats."""

WINDOW_SLACK = 1 + 1e-6

Key = tuple[TenantId, RequestId]


@dataclass(slots=True)
class TicketEnd:
    """How a ticket ended."""

    ticket: Ticket
    outcome: LegOutcome
    attained: float
    usage: Usage | None
    term: int


@dataclass(slots=True)
class Totals:
    """What a run came to."""

    grants: int = 0
    refusals: dict[str, int] = field(default_factory=dict)
    ends: dict[str, int] = field(default_factory=dict)
    adopted: int = 0
    taken_over: int = 0
    refuted: int = 0
    terms: int = 0
    steps: int = 0
    charged: float = 0.0
    corrected: float = 0.0
    attained: float = 0.0
    drift_share_max: float = 0.0
    """Largest drift seen, as a share of its bound."""


class Book:
    """All terms of one run's schedulers."""

    def __init__(self, config: SchedulerConfig, trace: Trace, violated: Callable[[str], None]) -> None:
        self.config = config
        self.cost = config.cost
        self.trace = trace
        self.violated = violated
        self.totals = Totals()
        self.ends: dict[TicketId, list[TicketEnd]] = {}
        """By ticket; more than one only where a successor took it over from a checkpoint."""
        self.tickets: dict[TicketId, Ticket] = {}
        """Every ticket that was ever granted."""
        self.granted_at_ns: dict[TicketId, int] = {}
        """When, by the run's own time."""
        self.page: Page | None = None
        """Of the latest term."""
        self.drifts: list[Drift] = []
        """Of every term."""

    def watch(self, scheduler: Stepper, term: int) -> Stepper:
        """Begin a page: steps go through it from here on."""
        assert isinstance(scheduler, PoolScheduler), "a term has a scheduler of the core"
        self.totals.terms += 1
        if self.page is not None and term <= self.page.term:
            self.violated(f"Term {term} began after term {self.page.term}.")
        self.page = Page(self, scheduler, term)
        return self.page

    def judge(self) -> None:
        """The run is over: what each leg came to is known, so the drifts of all terms can be judged."""
        for drift in self.drifts:
            for sentence in drift.judge():
                self.violated(sentence)
            self.totals.drift_share_max = max(self.totals.drift_share_max, drift.share_max)


class Rate:
    """R, reckoned anew: what legs attained over the time in which any ticket was open, as of the last leg's end.

    Both fade with that time.
    """

    def __init__(self, cost: float, busy_s: float) -> None:
        self._cost = cost
        self._busy_s = busy_s
        self._at_ns: int | None = None
        """Up to when busy time is counted; None: nothing is open."""
        self.most_per_s = 0.0
        """The largest that R was within this step."""

    def step(self) -> None:
        """A step begins."""
        self.most_per_s = self._cost / self._busy_s

    def opened(self, now_ns: int) -> None:
        """A ticket is open."""
        if self._at_ns is None:
            self._at_ns = now_ns

    def ended(self, cost: float, now_ns: int, left: int, lost: bool) -> None:
        """A leg attained so much; ``left`` tickets are open. A leg lost with its worker tells nothing of R."""
        if lost and left:
            return
        if self._at_ns is not None and now_ns > self._at_ns:
            elapsed_s = (now_ns - self._at_ns) / 1e9
            kept = math.exp(-elapsed_s / COST_RATE_MEMORY_S)
            self._cost *= kept
            self._busy_s = self._busy_s * kept + COST_RATE_MEMORY_S * (1.0 - kept)
        self._at_ns = now_ns if left else None
        self._cost += cost
        self.most_per_s = max(self.most_per_s, self._cost / self._busy_s)


class Page:
    """One term of office: what is open and what waits, by its steps."""

    def __init__(self, book: Book, scheduler: PoolScheduler, term: int) -> None:
        self.term = term
        self.open: dict[TicketId, Ticket] = {}
        self.inherited: dict[TicketId, None] = {}
        """Open tickets that an earlier term granted."""
        self.waiting: dict[Key, None] = {}
        self.waiting_counts: dict[TenantId, int] = {}
        """Requests that wait, by tenant; no zeros."""
        self._book = book
        self._scheduler = scheduler
        self.began_ns = book.trace.now_ns()
        self.last_step_ns = self.began_ns
        """By the run's own time, as ``began_ns``."""
        self.ended: dict[TicketId, tuple[int, LegOutcome]] = {}
        """When each ticket ended here, by the run's own time, and how."""
        self._workers: dict[WorkerId, WorkerSpec] = {}
        self._heard_ns: dict[WorkerId, int] = {}
        self._held: dict[WorkerId, int] = {}
        before = book.drifts[-1] if book.drifts else None
        most = (before.window_max, before.charge_max) if before else ()
        self._drift = Drift(book.cost, *most)
        book.drifts.append(self._drift)
        restored = scheduler.checkpoint()
        self._now_ns = 0
        """Of the step, by the scheduler's own clock."""
        self._rate = Rate(restored.cost_rate_cost, restored.cost_rate_busy_s)
        for held in restored.tickets:
            self._take_over(held.ticket)

    def step(self, step_input: Input, now_ns: int) -> tuple[Effect, ...]:
        """Take one step and book it."""
        scheduler, book = self._scheduler, self._book
        if book.page is not self:
            book.violated(f"Term {self.term} goes on after a later one has begun.")
        try:
            effects = scheduler.step(step_input, now_ns)
        except Exception as error:  # the scheduler's shell records it and goes on; a run does not
            last = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{PurePath(last.filename).name}:{last.lineno}"
            book.violated(f"The core failed at {where}: {type(error).__name__}: {error}")
            raise
        book.totals.steps += 1
        submitted = self._before(step_input, now_ns)
        self._rate.step()
        self._now_ns, self.last_step_ns = now_ns, book.trace.now_ns()
        for effect in effects:
            match effect:
                case Granted():
                    self._granted(effect, submitted)
                    submitted = None if submitted == _key(effect.ticket) else submitted
                case LegEnded():
                    if effect.ticket.ticket_id not in self.open:
                        self._adopted(effect.ticket.ticket_id, step_input)
                    self._ended(effect)
                case Refused():
                    submitted = self._refused(effect, submitted)
                case Renewed(ticket_id):
                    self._renewed(ticket_id, step_input)
                case Refute():
                    book.totals.refuted += 1
                case IdleCharged():
                    self._drift.charged(effect.tenant_id, effect.cost / effect.weight)
                case TicketUnknown() | WakeAt():
                    pass
                case _:
                    assert_never(effect)
        if submitted is not None and submitted not in self._open_keys(submitted):
            self._wait(submitted)
        self._drift.settle_down(self.waiting_counts, book.trace.now_ns() // 1_000_000)
        return effects

    # ---- within

    def _wait(self, key: Key) -> None:
        if key not in self.waiting:
            self.waiting[key] = None
            self.waiting_counts[key[0]] = self.waiting_counts.get(key[0], 0) + 1

    def _unwait(self, key: Key) -> None:
        if key in self.waiting:
            del self.waiting[key]
            self.waiting_counts[key[0]] -= 1
            if not self.waiting_counts[key[0]]:
                del self.waiting_counts[key[0]]

    def _before(self, step_input: Input, now_ns: int) -> Key | None:
        """Note what the input says; the request that it submits."""
        match step_input:
            case Submit(request):
                return request.tenant_id, request.request_id
            case WorkerJoined(spec):
                if self._workers.get(spec.worker_id) != spec:
                    self._drift.begin_anew()
                self._workers[spec.worker_id] = spec
                self._heard(spec.worker_id, now_ns)
            case WorkerHeard(worker_id):
                self._heard(worker_id, now_ns)
            case WorkerGone(worker_id):
                self._workers.pop(worker_id, None)
                self._drift.begin_anew()
            case WorkerDrained() | BandsChanged() | ShutDown():
                self._drift.begin_anew()
            case TenantForgotten(tenant_id):
                self._drift.forget(tenant_id)
            case TenantChanged(spec):
                self._drift.tenant(spec)
            case TicketAdopted(ticket):
                self._drift.begin_anew()
                self._book.trace.add("book", f"adopting {ticket.ticket_id}")
            case Cancel() | Renew() | Settle() | MapChanged() | Tick():
                pass
            case _:
                assert_never(step_input)
        return None

    def _heard(self, worker_id: WorkerId, now_ns: int) -> None:
        """A worker unheard of for too long was no member meanwhile: the tenants reach it anew."""
        before_ns = self._heard_ns.get(worker_id)
        self._heard_ns[worker_id] = now_ns
        if before_ns is None or now_ns - before_ns >= self._book.config.worker_stale_after_ms * 900_000:
            self._drift.begin_anew()

    def _take_over(self, ticket: Ticket) -> None:
        self.open[ticket.ticket_id] = ticket
        self.inherited[ticket.ticket_id] = None
        self._held[ticket.worker_id] = self._held.get(ticket.worker_id, 0) + 1
        self._drift.hold(ticket)
        self._book.totals.taken_over += 1

    def _granted(self, granted: Granted, submitted: Key | None) -> None:
        ticket, decision, book = granted.ticket, granted.decision, self._book
        known = self.open.get(ticket.ticket_id)
        if known is not None:
            if (known.worker_id, known.charge) != (ticket.worker_id, ticket.charge):
                book.violated(f"Ticket {ticket.ticket_id} was granted again as another.")
            return
        key = _key(ticket)
        book.trace.add("book", f"granted {ticket.ticket_id} {key} {ticket.worker_id} {ticket.charge:.3f}")
        book.totals.grants += 1
        book.totals.charged += ticket.charge
        if ticket.ticket_id in book.tickets:
            book.violated(f"Ticket {ticket.ticket_id} was granted twice.")
        book.tickets[ticket.ticket_id] = ticket
        book.granted_at_ns[ticket.ticket_id] = book.trace.now_ns()
        if key not in self.waiting and key != submitted:
            book.violated(f"Ticket {ticket.ticket_id} was granted to {key}, which did not wait.")
        self._unwait(key)
        self._check_charge(ticket)
        self._rate.opened(self._now_ns)
        self.open[ticket.ticket_id] = ticket
        held = self._held[ticket.worker_id] = self._held.get(ticket.worker_id, 0) + 1
        inherited = sum(self.open[known].worker_id == ticket.worker_id for known in self.inherited)
        spec = self._workers.get(ticket.worker_id)
        slots = spec.slots if spec is not None else 0
        if held > slots + inherited:
            book.violated(f"{ticket.worker_id} has {held} tickets and {slots} slots.")
        if ticket.guaranteed:
            self._drift.hold(ticket)
        else:
            self._check_window(key, decision)
            if decision.backfilled:
                self._passed(ticket, decision)
            self._drift.granted(ticket, decision.window)

    def _passed(self, ticket: Ticket, decision: Decision) -> None:
        """At some level somebody was more than T behind, and is lifted that far."""
        outside = [level.virtual_time > level.lo + level.window for level in decision.levels]
        if not any(outside):
            self._book.violated(f"Ticket {ticket.ticket_id} had its turn at every level: it is not backfilled.")
        if outside[1]:
            self._drift.lifted(ticket.band)

    def _check_window(self, key: Key, decision: Decision) -> None:
        """P1 at each level: bands, tenants, users; T = delay · R / Σφ(A), with Σφ(A) no less than the chosen φ."""
        reach = self._book.config.window_delay_ms / 1000 * self._rate.most_per_s * WINDOW_SLACK
        for level in decision.levels:
            if level.window > reach / level.weight:
                self._book.violated(f"P1: the window of {key} is {level.window}; R allows {reach / level.weight}.")
            behind = level.lo + level.window
            if not decision.backfilled and level.virtual_time > behind + CENT * max(1.0, abs(behind)):
                self._book.violated(f"P1: {key} was dispatched at v {level.virtual_time}, past lo + T = {behind}.")

    def _check_charge(self, ticket: Ticket) -> None:
        cached = ticket.predicted_cached_tokens
        cost = self._book.cost.cost(ticket.prompt_tokens - cached, cached, ticket.output_tokens_estimated)
        if not _same(ticket.charge, cost):
            self._book.violated(f"Ticket {ticket.ticket_id} is charged {ticket.charge}, its split costs {cost}.")

    def _ended(self, ended: LegEnded) -> None:
        ticket, book = ended.ticket, self._book
        key = _key(ticket)
        what = f"ended {ticket.ticket_id} {ended.outcome.value} {ended.attained:.3f} {ended.request_continues}"
        book.trace.add("book", what)
        if self.open.pop(ticket.ticket_id, None) is None:
            book.violated(f"Ticket {ticket.ticket_id} ended ({ended.outcome.value}) and was not open.")
            return
        self.inherited.pop(ticket.ticket_id, None)
        self.ended[ticket.ticket_id] = book.trace.now_ns(), ended.outcome
        lost = ended.outcome is LegOutcome.WORKER_LOST
        self._rate.ended(ended.attained, self._now_ns, len(self.open), lost)
        self._held[ticket.worker_id] -= 1
        book.totals.ends[ended.outcome.value] = book.totals.ends.get(ended.outcome.value, 0) + 1
        book.totals.corrected += ended.correction
        book.totals.attained += ended.attained
        end = TicketEnd(ticket, ended.outcome, ended.attained, ended.usage, self.term)
        book.ends.setdefault(ticket.ticket_id, []).append(end)
        if not _same(ended.correction, ended.attained - ticket.charge):
            book.violated(f"Ticket {ticket.ticket_id}: charge and correction are not what it attained.")
        self._check_attained(ended)
        if ended.request_continues:
            if ended.outcome is not LegOutcome.WORKER_LOST:
                book.violated(f"Ticket {ticket.ticket_id} ended {ended.outcome.value}, yet its request goes on.")
            self._wait(key)
        if ended.outcome is LegOutcome.WORKER_LOST:
            self._drift.begin_anew()
        self._drift.ended(ticket, ended.attained)

    def _check_attained(self, ended: LegEnded) -> None:
        ticket, usage, cost = ended.ticket, ended.usage, self._book.cost
        match ended.outcome:
            case LegOutcome.WORKER_LOST:
                fine = ended.attained == 0.0
            case LegOutcome.EXPIRED:
                fine = ended.attained >= ticket.charge * (1 - CENT)
            case LegOutcome.SETTLED | LegOutcome.CANCELLED:
                if usage is None:
                    fine = ended.attained >= ticket.charge * (1 - CENT)
                else:
                    told = cost.cost(usage.uncached_tokens, usage.cached_tokens, usage.output_tokens)
                    fine = _same(ended.attained, told)
            case _:
                assert_never(ended.outcome)
        if not fine:
            self._book.violated(
                f"P5: ticket {ticket.ticket_id} ended {ended.outcome.value}, charged {ticket.charge}, "
                f"told {usage}, attained {ended.attained}."
            )

    def _refused(self, refused: Refused, submitted: Key | None) -> Key | None:
        key, reason, book = (refused.tenant_id, refused.request_id), refused.refusal.reason, self._book
        book.trace.add("book", f"refused {key} {reason.value}")
        book.totals.refusals[reason.value] = book.totals.refusals.get(reason.value, 0) + 1
        if reason is RefusalReason.REQUEST_ID_REUSED:
            return None
        if key in self.waiting:
            self._unwait(key)
        elif key == submitted:
            return None
        elif not any(key == _key(end.ticket) for ends in book.ends.values() for end in ends):
            book.violated(f"{key} was refused ({reason.value}) and did not wait.")
        return submitted

    def _renewed(self, ticket_id: TicketId, step_input: Input) -> None:
        if ticket_id not in self.open and not self._adopted(ticket_id, step_input):
            self._book.violated(f"Ticket {ticket_id} was renewed and is not open.")

    def _adopted(self, ticket_id: TicketId, step_input: Input) -> bool:
        """Book the ticket that this step adopts; False if it adopts none of this id."""
        if not isinstance(step_input, TicketAdopted) or step_input.ticket.ticket_id != ticket_id:
            return False
        if ticket_id in self.ended:
            self._book.violated(f"Ticket {ticket_id} was taken up again after its end in this term.")
        self._take_over(step_input.ticket)
        self._book.totals.adopted += 1
        self._unwait(_key(step_input.ticket))
        return True

    def _open_keys(self, key: Key) -> tuple[Key, ...]:
        """The key again if one of its tickets is open."""
        return (key,) if any(_key(ticket) == key for ticket in self.open.values()) else ()


def _key(ticket: Ticket) -> Key:
    return ticket.tenant_id, ticket.request_id


def _same(one: float, other: float) -> bool:
    return abs(one - other) <= CENT * max(1.0, abs(one), abs(other))
