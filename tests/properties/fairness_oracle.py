"""An independent book of what a scheduler does, and the properties it must keep at every step.

The oracle sees inputs and effects, and of the scheduler's inside only clocks, reservations, estimates of what waits
and the kept worker. It works out for itself who is in A, F_i as a set of workers, every clock, lo_w, the window, who
may run where, what room is taken, what each leg costs and what each tenant has outstanding. The properties are those
of ``docs/fairness.md``; clocks and the bounds among siblings are ``clock_book``'s.

The shell around it must send ``Tick`` whenever the scheduler has asked to be woken, before any other input: then
what an input brings about and what time brings about are never in one step.
"""

from dataclasses import dataclass, field

from tests.properties.clock_book import SLACK, Moment, Node, Siblings, Span, at_most, demand
from tests.properties.idleness import Idleness, could_run

from evenhand.core.facts import (
    CostWeights,
    Decision,
    LegOutcome,
    Request,
    SchedulerConfig,
    TenantSpec,
    TenantState,
    Ticket,
    Usage,
    WorkerRole,
    WorkerSpec,
)
from evenhand.core.ids import RequestId, TenantId, TicketId, WorkerId
from evenhand.core.presence import Presence
from evenhand.core.scheduler import PoolScheduler
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


class Waiting:
    """An admitted request, from its admission to its one outcome."""

    __slots__ = ("age", "estimate", "excluded", "is_open", "passed", "request", "tokens_total")

    def __init__(self, request: Request, age: int, estimate: int) -> None:
        self.request = request
        self.age = age
        self.estimate = estimate
        self.passed = 0
        """Times it was overtaken by its own tenant's."""
        self.excluded: tuple[WorkerId, ...] = request.excluded_workers
        self.tokens_total = request.prompt_tokens + request.output_tokens_max
        self.is_open = False


class Place:
    """A worker, and what the oracle knows to be reserved there."""

    __slots__ = ("bit", "draining", "kv_blocks", "legs", "served", "spec")

    def __init__(self, spec: WorkerSpec, bit: int) -> None:
        self.spec = spec
        self.bit = bit
        self.draining = False
        self.legs: dict[TicketId, Leg] = {}
        self.kv_blocks = 0
        self.served: list[TenantId] = []
        """Distinct tenants served there, the latest last."""


@dataclass(slots=True)
class Leg:
    ticket: Ticket
    waiting: Waiting
    booked: float
    """Cost on the clocks now."""
    kv_blocks: int
    spans: list[tuple[Node, Span]]
    ended: bool = False


@dataclass(slots=True)
class Book:
    """One tenant, as the oracle knows it."""

    spec: TenantSpec
    node: Node
    queue: list[Waiting] = field(default_factory=list)
    admitted: dict[RequestId, Waiting] = field(default_factory=dict)
    """Without an outcome yet."""
    legs: dict[RequestId, Leg] = field(default_factory=dict)
    """Open ones."""
    outstanding: float = 0.0
    true_cost: float = 0.0


class Oracle:
    """``exact``: the scheduler's clocks must be those of the book; else (broken schedulers) they are taken over."""

    def __init__(
        self, scheduler: PoolScheduler, config: SchedulerConfig, presence: Presence, exact: bool = True
    ) -> None:
        self.config = config
        self.cost: CostWeights = CostWeights()
        self.exact = exact
        self.moment = Moment()
        self.tenants = Siblings(self.moment, exact)
        self.books: dict[TenantId, Book] = {}
        self.places: dict[WorkerId, Place] = {}
        self.legs: dict[TicketId, Leg] = {}
        self.age = 0
        self.stirred = False
        """The step changed a clock, the first H of a queue or room: what fits has been looked for."""
        self.admitted = self.finished = self.grants = 0
        self._reaches: dict[int, int] = {}
        self._bit_next = 1
        self._bits_known: dict[WorkerId, int] = {}
        self.attach(scheduler, presence)

    def attach(self, scheduler: PoolScheduler, presence: Presence) -> None:
        self.scheduler, self.presence = scheduler, presence
        self.core = scheduler._legs
        self.idleness = Idleness(self)

    # Feeding

    def observe(self, input: Input, effects: tuple[Effect, ...], now_ns: int) -> None:
        """Take one step in and check all that can be checked at once."""
        self.stirred = not isinstance(input, MapChanged | Renew | WorkerHeard | Submit)
        self._input(input, effects)
        for effect in effects:
            match effect:
                case Granted(ticket, decision):
                    known = self.legs.get(ticket.ticket_id)
                    if known is None:
                        self._granted(ticket, decision)
                    else:
                        demand(not known.ended, "P7", f"{ticket.ticket_id} was granted again after its end")
                case LegEnded():
                    self._ended(effect)
                case Refused():
                    self._refused(effect)
                case _:
                    pass
        self._clocks()
        self._counters()
        if self.stirred:
            self.idleness.check(now_ns)

    def _input(self, input: Input, effects: tuple[Effect, ...]) -> None:
        match input:
            case Submit(request):
                self._submitted(request, effects)
            case Renew(ticket_id, usage):
                leg = self.legs.get(ticket_id)
                if usage is not None and leg is not None and any(isinstance(e, Renewed) for e in effects):
                    over = self._cost_of(usage) - leg.booked
                    if over > 0.0:
                        self.moment.now += 1
                        self._book(leg, over, False)
            case TenantChanged(spec):
                self.moment.now += 1
                book = self.books.get(spec.tenant_id)
                if book is None:
                    self.books[spec.tenant_id] = Book(spec, Node(spec.tenant_id, spec.weight, self.tenants))
                else:
                    book.spec = spec
                    book.node.weight = spec.weight
                    self._place(book, 0.0)
            case WorkerJoined(spec):
                self._joined(spec)
            case WorkerGone(worker_id):
                if self.places.pop(worker_id, None) is not None:
                    self._bits_known.pop(worker_id)
                    self._members_changed()
            case WorkerDrained(worker_id, draining):
                place = self.places.get(worker_id)
                if place is not None and place.draining != draining:
                    place.draining = draining
                    self._members_changed()
            case _:
                pass

    def _submitted(self, request: Request, effects: tuple[Effect, ...]) -> None:
        book = self.books[request.tenant_id]
        mine = [e for e in effects if isinstance(e, Refused) and e.request_id == request.request_id]
        if request.request_id in book.admitted:
            again = book.legs.get(request.request_id)
            answered = [e.ticket for e in effects if isinstance(e, Granted)]
            demand(not mine, "P7", f"{request.request_id} is open and was refused when it was asked for again")
            if again is not None:
                demand(again.ticket in answered, "P7", f"{request.request_id} was not told its ticket again")
            return
        if mine:
            return
        self.age += 1
        self.admitted += 1
        waiting = Waiting(request, self.age, self._estimate(request, effects))
        demand(1 <= waiting.estimate <= request.output_tokens_max, "estimate", f"{waiting.estimate} tokens")
        book.admitted[request.request_id] = waiting
        book.queue.append(waiting)
        if len(book.queue) <= self.config.requests_considered_max:
            self.stirred = True
            self.moment.now += 1
            self._place(book, 0.0)

    def _estimate(self, request: Request, effects: tuple[Effect, ...]) -> int:
        for effect in effects:
            if isinstance(effect, Granted) and effect.ticket.request_id == request.request_id:
                return effect.ticket.output_tokens_estimated
        return self.scheduler.estimate_of(request.tenant_id, request.request_id)

    def _granted(self, ticket: Ticket, decision: Decision) -> None:
        self.moment.now += 1
        self.grants += 1
        book, place = self.books[ticket.tenant_id], self.places[ticket.worker_id]
        waiting = book.admitted.get(ticket.request_id)
        demand(
            waiting is not None and waiting in book.queue,
            "P7",
            f"{ticket.request_id} was granted, but it does not wait",
        )
        assert waiting is not None
        request, cached = waiting.request, ticket.predicted_cached_tokens
        charge = self.cost.cost(request.prompt_tokens - cached, cached, ticket.output_tokens_estimated)
        demand(at_most(abs(charge - ticket.charge), 0.0), "P5", f"charged {ticket.charge}, the cost is {charge}")
        demand(ticket.weight == book.spec.weight, "P5", "the ticket's weight is not the tenant's")
        demand(ticket.output_tokens_estimated == waiting.estimate, "estimate", "another one than at admission")
        demand(bool(book.node.reach & place.bit), "A", f"{ticket.tenant_id} ran on {ticket.worker_id} outside F")
        limit = book.spec.concurrency_max
        demand(limit == 0 or len(book.legs) < limit, "A", f"{ticket.tenant_id} is beyond its own limit")
        self._order(book, waiting, ticket)
        kv_blocks = -(-(request.prompt_tokens - cached + waiting.estimate) // place.spec.block_size_tokens)
        self._room(book, place, kv_blocks)
        window = self.window()
        demand(at_most(abs(window - decision.window), 0.0), "P1", f"the window is {decision.window}, not {window}")
        self._height(book, decision)
        leg = Leg(ticket, waiting, 0.0, kv_blocks, [])
        node = book.node
        span = self.tenants.dispatched(node, place.bit, window, charge, ticket.weight, decision.lo)
        leg.spans.append((node, span))
        self.legs[ticket.ticket_id] = book.legs[ticket.request_id] = leg
        place.legs[ticket.ticket_id] = leg
        place.kv_blocks += kv_blocks
        book.queue.remove(waiting)
        if ticket.tenant_id in place.served:
            place.served.remove(ticket.tenant_id)
        place.served.append(ticket.tenant_id)
        leg.booked = charge
        book.outstanding += charge
        self._place(book, charge / ticket.weight)

    def _height(self, book: Book, decision: Decision) -> None:
        """The clock that the decision tells is the book's."""
        told, node = decision.virtual_time_before, book.node
        if self.exact:
            demand(at_most(abs(told - node.v), 0.0), "clock", f"v of {node.key} was {told}, by the book {node.v}")
        elif node.newly:
            self.tenants.follow(node, told)
            node.base, node.newly = told, 0

    def _order(self, book: Book, waiting: Waiting, ticket: Ticket) -> None:
        """Among the first H, and not past one that was overtaken often enough."""
        heads = book.queue[: self.config.requests_considered_max]
        demand(waiting in heads, "H", f"{ticket.request_id} is not among the first H")
        if heads[0].passed >= self.config.overtakes_max:
            demand(waiting is heads[0], "overtaken", "a head that was overtaken often enough was overtaken again")
        if ticket.leg == 1:
            for before in heads[: heads.index(waiting)]:
                before.passed += 1

    def _room(self, book: Book, place: Place, kv_blocks: int) -> None:
        """A slot and KV are free, and the last eighth goes to tenants below their share."""
        spec = place.spec
        demand(len(place.legs) < spec.slots, "room", f"{spec.worker_id} has no slot left")
        demand(place.kv_blocks + kv_blocks <= spec.kv_blocks, "room", f"{spec.worker_id} has no KV left")
        if self.in_headroom(place, kv_blocks):
            demand(
                self.below_share(book, 1.0 + SLACK),
                "headroom",
                f"{book.spec.tenant_id} took headroom of {spec.worker_id} above its share",
            )

    def in_headroom(self, place: Place, kv_blocks: int) -> bool:
        spec, part = place.spec, self.config.headroom_divisor
        return (
            len(place.legs) >= spec.slots - spec.slots // part
            or place.kv_blocks + kv_blocks > spec.kv_blocks - spec.kv_blocks // part
        )

    def below_share(self, book: Book, slack: float) -> bool:
        """At equality floats decide; ``slack`` says to which side a check looks away."""
        if not book.legs:
            return True
        active = [other for other in self.books.values() if other.node.in_a or other.legs]
        if len(active) < 2:
            return True
        total, weights = 0.0, 0.0
        for other in active:
            total += other.outstanding
            weights += other.spec.weight
        return book.outstanding < book.spec.weight / weights * total * slack

    def _ended(self, end: LegEnded) -> None:
        self.moment.now += 1
        ticket = end.ticket
        leg = self.legs.get(ticket.ticket_id)
        demand(leg is not None and not leg.ended, "P7", f"{ticket.ticket_id} ended twice, or never began")
        assert leg is not None
        book = self.books[ticket.tenant_id]
        if end.outcome is LegOutcome.WORKER_LOST:
            true_cost = 0.0
        elif end.usage is None:
            true_cost = leg.booked
        else:
            true_cost = self._cost_of(end.usage)
            if end.outcome is LegOutcome.EXPIRED:
                true_cost = max(true_cost, leg.booked)
        demand(at_most(abs(true_cost - end.attained), 0.0), "P5", f"attained {end.attained}, true {true_cost}")
        demand(at_most(abs(end.correction - (true_cost - ticket.charge)), 0.0), "P5", "the correction is wrong")
        del book.legs[ticket.request_id]
        place = self.places.get(ticket.worker_id)
        if place is not None and place.legs.pop(ticket.ticket_id, None) is not None:
            place.kv_blocks -= leg.kv_blocks
        book.true_cost += true_cost
        waiting = leg.waiting
        if end.request_continues:
            waiting.excluded = (*waiting.excluded, ticket.worker_id)
            index = 0
            while index < len(book.queue) and book.queue[index].age < waiting.age:
                index += 1
            book.queue.insert(index, waiting)
        else:
            self._finish(book, ticket.request_id)
        leg.ended = True
        self._book(leg, true_cost - leg.booked, True)
        if not book.legs:
            book.outstanding = 0.0

    def _book(self, leg: Leg, by: float, ended: bool) -> None:
        """What a leg is booked changes, for the last time where it has ended."""
        book = self.books[leg.ticket.tenant_id]
        book.outstanding += -leg.booked if ended else by
        leg.booked += by
        for node, span in leg.spans:
            node.siblings.moved(node, span, by / leg.ticket.weight, ended)
        self._place(book, by / leg.ticket.weight)

    def _refused(self, refused: Refused) -> None:
        book = self.books.get(refused.tenant_id)
        waiting = book.admitted.get(refused.request_id) if book is not None else None
        if book is None or waiting is None:
            return  # it was never admitted
        demand(refused.request_id not in book.legs, "P7", f"{refused.request_id} was refused while it ran")
        self.moment.now += 1
        if waiting in book.queue:
            book.queue.remove(waiting)
        self._finish(book, refused.request_id)
        self._place(book, 0.0)

    def _finish(self, book: Book, request_id: RequestId) -> None:
        demand(request_id in book.admitted, "P7", f"{request_id} has two outcomes")
        del book.admitted[request_id]
        self.finished += 1

    def _cost_of(self, used: Usage) -> float:
        return self.cost.cost(used.prompt_tokens - used.cached_tokens, used.cached_tokens, used.output_tokens)

    # A, F and the window

    def window(self) -> float:
        """T: fixed, or a time's worth of the pool's rate, by the weights of those in A."""
        if self.config.window_fixed is not None:
            return self.config.window_fixed
        weights = sum([book.spec.weight for book in self.books.values() if book.node.in_a])
        return self.config.window_delay_ms / 1000.0 * self.core.cost_rate.per_s / weights if weights > 0.0 else 0.0

    def _in_a(self, book: Book) -> bool:
        limit = book.spec.concurrency_max
        if not book.queue or book.spec.state is TenantState.SUSPENDED:
            return False
        return limit == 0 or len(book.legs) < limit

    def _reach(self, book: Book) -> int:
        reach = 0
        for waiting in book.queue[: self.config.requests_considered_max]:
            tokens = waiting.tokens_total
            known = self._reaches.get(tokens)
            if known is None:
                known = 0
                for place in self.places.values():
                    if place.bit & self.tenants.members and could_run(waiting, place.spec):
                        known |= place.bit
                self._reaches[tokens] = known
            reach |= known
        return reach

    def _place(self, book: Book, by: float) -> None:
        in_a = self._in_a(book)
        self.tenants.placed(book.node, by, in_a, self._reach(book) if in_a else 0)

    def _joined(self, spec: WorkerSpec) -> None:
        place = self.places.get(spec.worker_id)
        if place is None:
            bit = self._bits_known.get(spec.worker_id, 0)
            if not bit:
                bit = self._bits_known[spec.worker_id] = self._bit_next
                self._bit_next <<= 1
            self.places[spec.worker_id] = place = Place(spec, bit)
            for ticket_id, leg in self.legs.items():
                ticket = leg.ticket
                if not leg.ended and (ticket.worker_id, ticket.epoch) == (spec.worker_id, spec.epoch):
                    place.legs[ticket_id] = leg
                    place.kv_blocks += leg.kv_blocks
        elif spec.epoch < place.spec.epoch:
            return
        place.spec = spec
        self._members_changed()

    def _members_changed(self) -> None:
        self.moment.now += 1
        self._reaches.clear()
        members = 0
        for place in self.places.values():
            if not place.draining and place.spec.role is WorkerRole.BOTH:
                members |= place.bit
        self.tenants.members = members
        self._places_again()

    def _places_again(self) -> None:
        changes = []
        for book in self.books.values():
            in_a = self._in_a(book)
            changes.append((book.node, in_a, self._reach(book) if in_a else 0))
        self.tenants.refresh(changes)

    def restarted(self, scheduler: PoolScheduler, presence: Presence) -> None:
        """A successor took over from a checkpoint: clocks and legs go on, queues and workers are told anew."""
        self.attach(scheduler, presence)
        for book in self.books.values():
            for waiting in book.queue:
                self._finish(book, waiting.request.request_id)
            book.queue.clear()
            for waiting in book.admitted.values():
                # Of a request whose leg runs on, the successor knows what the ticket says.
                waiting.passed, waiting.excluded = 0, ()
        self.places.clear()
        self._members_changed()

    # Checks at each step

    def _clocks(self) -> None:
        """P5: a clock moves by what is booked, and beyond that only upwards, and only on arrival."""
        core = self.core.outstanding.tenants
        for tenant_id, book in self.books.items():
            known = core[tenant_id]
            node = book.node
            if known.v != node.v or node.v != node.base or node.newly:
                self.tenants.told(node, known.v)
            if known.in_a != node.in_a:
                demand(False, "A", f"{tenant_id} in A: {known.in_a}")

    def _counters(self) -> None:
        core, open_legs = self.core, 0
        for worker_id, place in self.places.items():
            worker = core.rooms.workers[worker_id]
            here = len(place.legs)
            if len(worker.tickets) != here or worker.kv_reserved_blocks != place.kv_blocks:
                demand(False, "counters", f"{worker_id}: {len(worker.tickets)} slots, {here} legs; KV too")
        queued = 0
        for book in self.books.values():
            queued += len(book.queue)
            open_legs += len(book.legs)
        if self.scheduler._requests.queued_total != queued:
            demand(False, "counters", f"{self.scheduler._requests.queued_total} queued, {queued} wait")
        if len(core.book) != open_legs:
            demand(False, "counters", f"{len(core.book)} tickets, {open_legs} open legs")
        if not open_legs:
            demand(core.outstanding.total == 0.0, "counters", "outstanding cost is not zero")

    # Checks at the end

    def drained(self) -> None:
        """P5 and P7 once everything has ended, and memory is where it was."""
        demand(self.admitted == self.finished, "P7", f"{self.admitted} admitted, {self.finished} outcomes")
        for tenant in self.scheduler.status(0).tenants:
            book = self.books[tenant.tenant_id]
            demand(not book.queue and not book.legs, "P7", f"{tenant.tenant_id} is not drained")
            demand(
                at_most(abs(tenant.cost_got - book.true_cost), 0.0), "P5", f"{tenant.cost_got} {book.true_cost}"
            )
            demand(tenant.cost_outstanding == 0.0, "counters", f"{tenant.cost_outstanding} outstanding")
        demand(self.presence.ticket_count == 0, "presence", f"{self.presence.ticket_count} tickets still presumed")
        for worker_id in self.places:
            assumed = self.presence.assumed_count(worker_id)
            demand(assumed == 0, "presence", f"{assumed} keys of {worker_id} still presumed")

    def judge_bounds(self) -> None:
        self.tenants.judge()

    def in_order(self, worker_bit: int) -> list[Book]:
        """A_w by (v, id)."""
        reached = [book for book in self.books.values() if book.node.reach & worker_bit]
        return sorted(reached, key=lambda book: (book.node.v, book.spec.tenant_id))
