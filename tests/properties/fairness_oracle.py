"""An independent book of what a scheduler does, and the properties it must keep at every step.

The oracle sees inputs and effects, and of the scheduler's inside only each tenant's clock, each worker's
reservations and the kept worker. It works out for itself who is in A, F_i as a set of workers, lo_w, who may run
where, what each leg costs and what each tenant has outstanding. The properties are those of ``docs/fairness.md``.

P2 and P3 speak of the largest outstanding under- and overcharges, and those are known only when legs have ended;
so what they need is recorded at each step and judged by ``judge_bounds`` once all legs are over.
"""

from dataclasses import dataclass, field

from evenhand.core.facts import (
    CostWeights,
    Decision,
    LegOutcome,
    Request,
    SchedulerConfig,
    TenantSpec,
    TenantState,
    Ticket,
    WorkerRole,
    WorkerSpec,
)
from evenhand.core.ids import RequestId, TenantId, TicketId, WorkerId
from evenhand.core.presence import Presence
from evenhand.core.scheduler import PoolScheduler
from evenhand.core.status import WorkerStatus
from evenhand.core.steps import (
    Effect,
    Granted,
    Input,
    LegEnded,
    MapChanged,
    Refused,
    Renew,
    Renewed,
    Submit,
    TenantChanged,
    WorkerDrained,
    WorkerGone,
    WorkerHeard,
    WorkerJoined,
)

SLACK = 1e-6
"""For the rounding of sums of floats, relative to their size."""


class Broken(AssertionError):
    """A property does not hold; the message begins with its name."""


def demand(holds: bool, name: str, what: object) -> None:
    if not holds:
        raise Broken(f"{name}: {what}")


def at_most(small: float, large: float) -> bool:
    return small <= large + SLACK * (1.0 + abs(small) + abs(large))


@dataclass
class Leg:
    ticket: Ticket
    began: int
    worker_in_reach_of: frozenset[TenantId]
    booked: float
    """Cost on the clock now."""
    ended: int | None = None
    correction: float = 0.0


@dataclass
class Book:
    """One tenant, as the oracle knows it."""

    spec: TenantSpec
    queue: list[Request] = field(default_factory=list)
    ages: dict[RequestId, int] = field(default_factory=dict)
    passed: dict[RequestId, int] = field(default_factory=dict)
    """Times a waiting request was overtaken by its own tenant's."""
    legs: list[Leg] = field(default_factory=list)
    v: float = 0.0
    reach: frozenset[WorkerId] = frozenset()
    """F_i, empty outside A."""
    in_a_since: int = -1
    """Moment since which it is in A without a break; −1: it is not."""
    last_worker: WorkerId | None = None
    """Worker of its last dispatch; None: it was lifted since."""
    open_ids: dict[RequestId, Leg] = field(default_factory=dict)
    true_cost: float = 0.0
    undispatched: "Undispatched | None" = None


@dataclass
class Undispatched:
    """A stretch in which a tenant stays in A without a dispatch, and what the others get meanwhile (P3)."""

    began: int
    v_max: float
    v_start: dict[TenantId, float]
    weight_max: dict[TenantId, float]
    legs: dict[TenantId, list[Leg]]


@dataclass(frozen=True)
class Gap:
    """v_i − v_j at one moment, to be judged once corrections are known (P2)."""

    i: TenantId
    j: TenantId
    at: int
    gap: float
    window: float


class Oracle:
    def __init__(
        self, scheduler: PoolScheduler, config: SchedulerConfig, cost: CostWeights, presence: Presence
    ) -> None:
        self.scheduler = scheduler
        self.presence = presence
        self.requests: dict[tuple[TenantId, RequestId], Request] = {}
        self.excluded: dict[tuple[TenantId, RequestId], tuple[WorkerId, ...]] = {}
        self.config = config
        self.cost = cost
        self.moment = 0
        self.books: dict[TenantId, Book] = {}
        self.workers: dict[WorkerId, WorkerSpec] = {}
        self.draining: dict[WorkerId, bool] = {}
        self.legs: dict[TicketId, Leg] = {}
        self.outcomes: dict[tuple[TenantId, RequestId, int], int] = {}
        self.admitted = 0
        self.finished = 0
        self.window_max = 0.0
        self.gaps: list[Gap] = []
        self.stretches: list[tuple[TenantId, TenantId, Undispatched, float, float, int, float]] = []
        self.served: dict[WorkerId, list[TenantId]] = {}
        """Distinct tenants served by each worker, the latest last."""
        self.age = 0
        self.grants = 0

    # Feeding

    def observe(self, input: Input, effects: tuple[Effect, ...], now_ns: int) -> None:
        """Take one step in and check all that can be checked at once."""
        self.moment += 1
        booked = dict.fromkeys(self.books, 0.0)
        steady = {tenant_id: book.reach for tenant_id, book in self.books.items() if book.in_a_since >= 0}
        self._input(input, effects, booked)
        steady = self._still_steady(steady)
        for effect in effects:
            match effect:
                case Granted(ticket, decision):
                    if ticket.ticket_id not in self.legs:
                        self._granted(ticket, decision, booked)
                        steady = self._still_steady(steady)
                case LegEnded():
                    self._ended(effect, booked)
                    steady = self._still_steady(steady)
                case Refused():
                    self._refused(effect)
                    steady = self._still_steady(steady)
                case _:
                    pass
        self._clocks(booked, steady)
        self._still_steady(steady)
        self._record_gaps()
        self._counters()
        if not isinstance(input, MapChanged | Renew | WorkerHeard):
            self._idle(now_ns)

    def _input(self, input: Input, effects: tuple[Effect, ...], booked: dict[TenantId, float]) -> None:
        match input:
            case TenantChanged(spec):
                self.books.setdefault(spec.tenant_id, Book(spec)).spec = spec
            case Renew(ticket_id, usage):
                leg = self.legs.get(ticket_id)
                is_renewed = any(isinstance(effect, Renewed) for effect in effects)
                if usage is not None and leg is not None and is_renewed:
                    used = self.cost.cost(
                        usage.prompt_tokens - usage.cached_tokens, usage.cached_tokens, usage.output_tokens
                    )
                    booked[leg.ticket.tenant_id] += max(0.0, used - leg.booked) / leg.ticket.weight
                    leg.booked = max(leg.booked, used)
            case WorkerJoined(spec):
                self.workers[spec.worker_id] = spec
                self.draining.setdefault(spec.worker_id, False)
            case WorkerGone(worker_id):
                self.workers.pop(worker_id, None)
                self.served.pop(worker_id, None)
                self.draining.pop(worker_id, None)
            case WorkerDrained(worker_id, draining):
                if worker_id in self.workers:
                    self.draining[worker_id] = draining
            case Submit(request):
                refused = any(isinstance(e, Refused) and e.request_id == request.request_id for e in effects)
                book = self.books[request.tenant_id]
                is_open = request.request_id in book.open_ids or request.request_id in book.ages
                if not refused and not is_open:
                    self.age += 1
                    self.admitted += 1
                    book.queue.append(request)
                    self.requests[request.tenant_id, request.request_id] = request
                    self.excluded[request.tenant_id, request.request_id] = request.excluded_workers
                    book.ages[request.request_id] = self.age
                    book.passed[request.request_id] = 0
            case _:
                pass
        self._reach()

    def _granted(self, ticket: Ticket, decision: Decision, booked: dict[TenantId, float]) -> None:
        self.grants += 1
        book = self.books[ticket.tenant_id]
        request = next((r for r in book.queue if r.request_id == ticket.request_id), None)
        demand(request is not None, "P7", f"{ticket.request_id} was granted, but it does not wait")
        assert request is not None
        cached = ticket.predicted_cached_tokens
        charge = self.cost.cost(request.prompt_tokens - cached, cached, ticket.output_tokens_estimated)
        demand(at_most(abs(charge - ticket.charge), 0.0), "P5", f"charged {ticket.charge}, the cost is {charge}")
        demand(ticket.weight == book.spec.weight, "P5", "the ticket's weight is not the tenant's")
        demand(ticket.worker_id in book.reach, "A", f"{ticket.tenant_id} ran on {ticket.worker_id} outside F")
        limit = book.spec.concurrency_max
        demand(limit == 0 or len(book.open_ids) < limit, "A", f"{ticket.tenant_id} is beyond its own limit")
        heads = book.queue[: self.config.requests_considered_max]
        demand(request in heads, "H", f"{ticket.request_id} is not among the first H")
        if book.passed[heads[0].request_id] >= self.config.overtakes_max:
            demand(request is heads[0], "H", "a head that was overtaken often enough was overtaken again")
        # P1, by the decision's own figures and by the clocks as they stood.
        demand(
            at_most(decision.virtual_time_before, decision.lo + decision.window),
            "P1",
            f"v {decision.virtual_time_before} > lo {decision.lo} + T {decision.window}",
        )
        self.window_max = max(self.window_max, decision.window)
        if ticket.leg == 1:
            for before in heads[: heads.index(request)]:
                self.books[ticket.tenant_id].passed[before.request_id] += 1
        reached_by = frozenset(t for t, b in self.books.items() if ticket.worker_id in b.reach)
        leg = Leg(ticket, self.moment, reached_by, ticket.charge)
        self.legs[ticket.ticket_id] = leg
        book.legs.append(leg)
        book.open_ids[ticket.request_id] = leg
        book.queue.remove(request)
        booked[ticket.tenant_id] += ticket.charge / ticket.weight
        book.last_worker = ticket.worker_id
        served = self.served.setdefault(ticket.worker_id, [])
        if ticket.tenant_id in served:
            served.remove(ticket.tenant_id)
        served.append(ticket.tenant_id)
        self._close_stretch(ticket.tenant_id)
        for i, other in self.books.items():
            if i != ticket.tenant_id and other.undispatched is not None and i in reached_by:
                other.undispatched.legs.setdefault(ticket.tenant_id, []).append(leg)
        self._reach()

    def _ended(self, end: LegEnded, booked: dict[TenantId, float]) -> None:
        ticket = end.ticket
        leg = self.legs.get(ticket.ticket_id)
        demand(leg is not None and leg.ended is None, "P7", f"{ticket.ticket_id} ended twice, or never began")
        assert leg is not None
        book = self.books[ticket.tenant_id]
        if end.outcome is LegOutcome.WORKER_LOST:
            true_cost = 0.0
        elif end.usage is None:
            true_cost = leg.booked
        else:
            used = end.usage
            true_cost = self.cost.cost(
                used.prompt_tokens - used.cached_tokens, used.cached_tokens, used.output_tokens
            )
            if end.outcome is LegOutcome.EXPIRED:
                true_cost = max(true_cost, leg.booked)
        demand(at_most(abs(true_cost - end.attained), 0.0), "P5", f"attained {end.attained}, true {true_cost}")
        demand(at_most(abs(end.correction - (true_cost - ticket.charge)), 0.0), "P5", "the correction is wrong")
        booked[ticket.tenant_id] += (true_cost - leg.booked) / ticket.weight
        leg.correction, leg.booked, leg.ended = true_cost - ticket.charge, true_cost, self.moment
        book.true_cost += true_cost
        del book.open_ids[ticket.request_id]
        if end.request_continues:
            key = ticket.tenant_id, ticket.request_id
            self.excluded[key] = (*self.excluded[key], ticket.worker_id)
            self._put_back(book, self.requests[key])
        else:
            self._finish(ticket.tenant_id, ticket.request_id)
        self._reach()

    def _put_back(self, book: Book, request: Request) -> None:
        age = book.ages[request.request_id]
        place = sum(1 for waiting in book.queue if book.ages[waiting.request_id] < age)
        book.queue.insert(place, request)

    def _refused(self, refused: Refused) -> None:
        book = self.books.get(refused.tenant_id)
        if book is None or refused.request_id not in book.ages:
            return  # it was never admitted
        waiting = [r for r in book.queue if r.request_id == refused.request_id]
        if waiting:
            book.queue.remove(waiting[0])
        demand(refused.request_id not in book.open_ids, "P7", f"{refused.request_id} was refused while it ran")
        self._finish(refused.tenant_id, refused.request_id)
        self._reach()

    def _finish(self, tenant_id: TenantId, request_id: RequestId) -> None:
        book = self.books[tenant_id]
        demand(request_id in book.ages, "P7", f"{request_id} has two outcomes")
        del book.ages[request_id], book.passed[request_id]
        self.finished += 1

    # A and F, by sets

    def _reach(self) -> None:
        takers = {
            worker_id: spec
            for worker_id, spec in self.workers.items()
            if not self.draining[worker_id] and spec.role is WorkerRole.BOTH
        }
        for tenant_id, book in self.books.items():
            limit = book.spec.concurrency_max
            in_a = (
                bool(book.queue)
                and (limit == 0 or len(book.open_ids) < limit)
                and book.spec.state is not TenantState.SUSPENDED
            )
            reach: frozenset[WorkerId] = frozenset()
            if in_a:
                heads = book.queue[: self.config.requests_considered_max]
                reach = frozenset(w for w, spec in takers.items() if any(could_run(r, spec) for r in heads))
            if reach - book.reach:
                book.last_worker = None
            book.reach = reach
            if not in_a:
                book.in_a_since = -1
                self._close_stretch(tenant_id)
            elif book.in_a_since < 0:
                book.in_a_since = self.moment

    def _still_steady(self, steady: dict[TenantId, frozenset[WorkerId]]) -> dict[TenantId, frozenset[WorkerId]]:
        """Those that have been in A all along, and reach no worker that they did not reach before."""
        return {
            tenant_id: self.books[tenant_id].reach
            for tenant_id, reach in steady.items()
            if self.books[tenant_id].in_a_since >= 0 and self.books[tenant_id].reach <= reach
        }

    def restarted(self, scheduler: PoolScheduler, presence: Presence) -> None:
        """A successor took over from a checkpoint: clocks and legs go on, queues and workers are told anew."""
        self.scheduler, self.presence = scheduler, presence
        for tenant_id, book in self.books.items():
            for request in tuple(book.queue):
                book.queue.remove(request)
                self._finish(tenant_id, request.request_id)
        self.workers.clear()
        self.draining.clear()
        self.served.clear()
        self._reach()

    # Checks at each step

    def _clocks(self, booked: dict[TenantId, float], steady: dict[TenantId, frozenset[WorkerId]]) -> None:
        """P5: a clock moves by what is booked, and beyond that only upwards, and only on arrival."""
        steady = self._still_steady(steady)
        status = self.scheduler.status(0)
        for tenant in status.tenants:
            book = self.books[tenant.tenant_id]
            expected = book.v + booked.get(tenant.tenant_id, 0.0)
            demand(
                at_most(expected, tenant.virtual_time),
                "P5",
                f"v of {tenant.tenant_id} fell to {tenant.virtual_time}, booked {expected}",
            )
            if tenant.tenant_id in steady:
                demand(
                    at_most(tenant.virtual_time, expected),
                    "P5",
                    f"v of {tenant.tenant_id} is {tenant.virtual_time}, booked {expected}",
                )
            book.v = tenant.virtual_time
            demand(tenant.in_a == (book.in_a_since >= 0), "A", f"{tenant.tenant_id} in A: {tenant.in_a}")

    def _record_gaps(self) -> None:
        in_a = [(tenant_id, book) for tenant_id, book in self.books.items() if book.in_a_since >= 0]
        for i, book in in_a:
            if book.undispatched is None:
                book.undispatched = Undispatched(
                    self.moment,
                    book.v,
                    {j: other.v for j, other in self.books.items()},
                    {j: other.spec.weight for j, other in self.books.items()},
                    {},
                )
            stretch = book.undispatched
            stretch.v_max = max(stretch.v_max, book.v)
            for j, other in self.books.items():
                stretch.v_start.setdefault(j, other.v)
                stretch.weight_max[j] = max(stretch.weight_max.get(j, 0.0), other.spec.weight)
            for j, legs in stretch.legs.items():
                booked = sum(leg.booked for leg in legs)
                self.stretches.append((i, j, stretch, booked, stretch.v_max, self.moment, self.window_max))
            for j, other in in_a:
                if i == j:
                    continue
                last = book.last_worker
                if last in other.reach or (last is None and book.reach <= other.reach):
                    self.gaps.append(Gap(i, j, self.moment, book.v - other.v, self.window_max))

    def _close_stretch(self, tenant_id: TenantId) -> None:
        self.books[tenant_id].undispatched = None

    def _counters(self) -> None:
        status = self.scheduler.status(0)
        open_legs = sum(len(book.open_ids) for book in self.books.values())
        queued = sum(len(book.queue) for book in self.books.values())
        demand(
            status.tickets_open == open_legs, "counters", f"{status.tickets_open} tickets, {open_legs} open legs"
        )
        demand(status.queued_total == queued, "counters", f"{status.queued_total} queued, {queued} wait")
        for worker in status.workers:
            here = sum(
                1
                for book in self.books.values()
                for leg in book.open_ids.values()
                if leg.ticket.worker_id == worker.worker_id
            )
            demand(
                worker.slots_used == here,
                "counters",
                f"{worker.worker_id}: {worker.slots_used} slots, {here} legs",
            )
            demand(0 <= worker.slots_used <= worker.slots, "counters", f"{worker.worker_id} slots")
            demand(worker.kv_blocks_reserved >= 0, "counters", f"{worker.worker_id} KV below zero")
            demand(here > 0 or worker.kv_blocks_reserved == 0, "counters", f"{worker.worker_id} KV not zero")
        demand(open_legs > 0 or status.cost_outstanding == 0.0, "counters", "outstanding cost is not zero")

    def _idle(self, now_ns: int) -> None:
        """P6: a worker with room is idle only if nobody of C_w fits there, or it is kept for the most-behind."""
        status = self.scheduler.status(now_ns)
        window = status.window
        kept = self.scheduler.kept
        for worker in status.workers:
            if self.draining[worker.worker_id] or worker.slots_used >= worker.slots:
                continue
            if worker.prefill_pending_tokens >= self.config.prefill_pending_max_tokens:
                continue
            eligible = sorted(
                (book.v, tenant_id) for tenant_id, book in self.books.items() if worker.worker_id in book.reach
            )
            inside = [tenant_id for v, tenant_id in eligible if v <= eligible[0][0] + window]
            served = self.served.get(worker.worker_id, [])[-self.config.sticky_tenants_max :]
            considered = inside[: self.config.tenants_considered_max]
            considered += [tenant_id for tenant_id in served if tenant_id in inside[len(considered) :]]
            for tenant_id in considered:
                book = self.books[tenant_id]
                heads = book.queue[: self.config.requests_considered_max]
                if book.passed[heads[0].request_id] >= self.config.overtakes_max:
                    heads = heads[:1]
                for request in heads:
                    if not self._fits(book, request, worker):
                        continue
                    demand(
                        kept is not None and kept[1] == worker.worker_id and kept[0] != tenant_id,
                        "P6",
                        f"{worker.worker_id} is idle, but {request.request_id} of {tenant_id} fits",
                    )
        if kept is not None and status.queued_total and any(w.closed is None for w in status.workers):
            first = min((book.v, tenant_id) for tenant_id, book in self.books.items() if book.in_a_since >= 0)
            demand(kept[0] == first[1], "P6", f"{kept[1]} is kept for {kept[0]}, the most-behind is {first[1]}")

    def _fits(self, book: Book, request: Request, worker: WorkerStatus) -> bool:
        spec = self.workers[worker.worker_id]
        if not could_run(request, spec):
            return False
        excluded = self.excluded[request.tenant_id, request.request_id]
        if worker.worker_id in excluded and any(
            other not in excluded and not self.draining[other] and could_run(request, other_spec)
            for other, other_spec in self.workers.items()
        ):
            return False
        matches = {match.worker_id: match.blocks for match in self.presence.match(request.block_keys)}
        usable = min(matches.get(worker.worker_id, 0), (request.prompt_tokens - 1) // spec.block_size_tokens)
        estimate = self.scheduler.estimate_of(request.tenant_id, request.request_id)
        tokens = request.prompt_tokens - usable * spec.block_size_tokens + estimate
        blocks = -(-tokens // spec.block_size_tokens)
        if worker.kv_blocks_reserved + blocks > spec.kv_blocks:
            return False
        part = self.config.headroom_divisor
        in_headroom = (
            worker.slots_used >= spec.slots - spec.slots // part
            or worker.kv_blocks_reserved + blocks > spec.kv_blocks - spec.kv_blocks // part
        )
        if not in_headroom:
            return True
        active = [b for b in self.books.values() if b.in_a_since >= 0 or b.open_ids]
        if len(active) < 2 or not book.open_ids:
            return True
        outstanding = {b.spec.tenant_id: sum(leg.booked for leg in b.open_ids.values()) for b in active}
        share = book.spec.weight / sum(b.spec.weight for b in active) * sum(outstanding.values())
        # At equality floats decide; a P6 check may look away there.
        return outstanding[book.spec.tenant_id] < share * (1 - SLACK)

    # Checks at the end

    def drained(self) -> None:
        """P5 and P7 once everything has ended."""
        demand(self.admitted == self.finished, "P7", f"{self.admitted} admitted, {self.finished} outcomes")
        for tenant in self.scheduler.status(0).tenants:
            book = self.books[tenant.tenant_id]
            demand(not book.queue and not book.open_ids, "P7", f"{tenant.tenant_id} is not drained")
            demand(
                at_most(abs(tenant.cost_got - book.true_cost), 0.0), "P5", f"{tenant.cost_got} {book.true_cost}"
            )

    def judge_bounds(self) -> None:
        """P2 and P3, with the largest charge and the largest sums of outstanding corrections until then."""
        extremes = {tenant_id: Extremes(book.legs, self.moment) for tenant_id, book in self.books.items()}
        for gap in self.gaps:
            mine, theirs = extremes[gap.i], extremes[gap.j]
            bound = gap.window + mine.charge[gap.at] + mine.under[gap.at] + theirs.over[gap.at]
            demand(at_most(gap.gap, bound), "P2", f"moment {gap.at}: v_{gap.i} − v_{gap.j} = {gap.gap} > {bound}")
        for i, j, stretch, booked, v_max, at, window in self.stretches:
            other = extremes[j]
            reach = window + v_max - stretch.v_start[j]
            bound = max(0.0, stretch.weight_max[j] * (reach + other.charge[at] + other.over[at] + other.under[at]))
            demand(at_most(booked, bound), "P3", f"moment {at}: {j} got {booked} > {bound} while {i} waited")


class Extremes:
    """Per moment: the largest charge so far, and the largest sums of outstanding under- and overcharges, ÷ φ."""

    def __init__(self, legs: list[Leg], moments: int) -> None:
        self.charge = [0.0] * (moments + 1)
        under_change = [0.0] * (moments + 2)
        over_change = [0.0] * (moments + 2)
        for leg in legs:
            weight = leg.ticket.weight
            self.charge[leg.began] = max(self.charge[leg.began], leg.ticket.charge / weight)
            end = leg.ended if leg.ended is not None else moments
            changes, amount = (
                (under_change, leg.correction) if leg.correction > 0 else (over_change, -leg.correction)
            )
            changes[leg.began] += amount / weight
            changes[end + 1] -= amount / weight
        self.under, self.over = [0.0] * (moments + 1), [0.0] * (moments + 1)
        under = over = 0.0
        for moment in range(moments + 1):
            under, over = under + under_change[moment], over + over_change[moment]
            before = max(0, moment - 1)
            self.charge[moment] = max(self.charge[moment], self.charge[before])
            self.under[moment] = max(under, self.under[before])
            self.over[moment] = max(over, self.over[before])


def could_run(request: Request, worker: WorkerSpec) -> bool:
    """Could the worker ever run it, empty as it may be?"""
    tokens = request.prompt_tokens + request.output_tokens_max
    longest = worker.model_length_max_tokens or tokens
    return tokens <= min(longest, worker.kv_blocks * worker.block_size_tokens)
