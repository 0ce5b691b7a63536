"""An independent book of what a scheduler does, and the properties it must keep at every step.

The oracle sees inputs and effects, and of the scheduler's inside only clocks, reservations, estimates of what
waits and the kept worker. It works out for itself who is in A, F_i as a set of workers, every clock, lo_w, the
window, who may run where, what room is taken, what each leg costs and what each tenant has outstanding. The
properties are those of ``docs/fairness.md``; clocks and the bounds among siblings are ``clock_book``'s.

The shell around it must send ``Tick`` whenever the scheduler has asked to be woken, before any other input: then
what an input brings about and what time brings about are never in one step.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from tests.properties.clock_book import SLACK, Moment, Node, Siblings, Span, at_most, bits, demand
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
from evenhand.core.fair_queue import FairChild
from evenhand.core.ids import RequestId, TenantId, TicketId, WorkerId
from evenhand.core.presence import Presence
from evenhand.core.scheduler import PoolScheduler
from evenhand.core.steps import (
    BandsChanged,
    Effect,
    Granted,
    IdleCharged,
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
from evenhand.core.tenant import Tenant, User


class Waiting:
    """An admitted request, from its admission to its one outcome."""

    __slots__ = (
        "age",
        "estimate",
        "excluded",
        "passed",
        "request",
        "tokens_total",
        "waits_ns_max",
        "waits_since_ns",
        "was_kept_for",
    )

    def __init__(self, request: Request, age: int, estimate: int) -> None:
        self.request = request
        self.age = age
        self.estimate = estimate
        self.passed = 0
        """Times it was overtaken by its own tenant's."""
        self.excluded: tuple[WorkerId, ...] = request.excluded_workers
        self.tokens_total = request.prompt_tokens + request.output_tokens_max
        self.waits_since_ns: int | None = None
        """Since when it was seen to wait for a warmer worker beside an idle one; None: it was not."""
        self.waits_ns_max = 0
        """The longest that it was seen to be allowed to."""
        self.was_kept_for = False
        """A worker was kept for it."""


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
    line: "Line"
    booked: float
    """Cost on the clocks, or on the guarantee, now."""
    kv_blocks: int
    spans: tuple[tuple[Node, Span], ...]
    """On the clocks of its band, its tenant and its user; none where a guarantee pays."""
    guarantee_rate: float
    """By which it moves its tenant's tag; 0: it does not."""
    ended: bool = False


class Band:
    """A band, and the tenants side by side in it."""

    __slots__ = ("node", "tenants")

    def __init__(self, name: str, weight: float, bands: Siblings) -> None:
        self.node = Node(name, weight, bands)
        self.tenants = Siblings(bands.moment, bands.exact, members=bands.members)


class Line:
    """One user of a tenant, and what of it waits."""

    __slots__ = ("book", "legs_open", "name", "node", "queue")

    def __init__(self, name: str, weight: float, book: "Book") -> None:
        self.name = name
        self.book = book
        self.node = Node(name, weight, book.users)
        self.queue: list[Waiting] = []
        self.legs_open = 0


class Book:
    """One tenant, as the oracle knows it."""

    __slots__ = (
        "admitted",
        "band",
        "guaranteed_cost",
        "idle_cost",
        "legs",
        "lines",
        "node",
        "outstanding",
        "spec",
        "tag_ns",
        "true_cost",
        "users",
        "waiting_count",
    )

    def __init__(self, spec: TenantSpec, band: Band) -> None:
        self.spec = spec
        self.band = band
        self.node = Node(spec.tenant_id, spec.weight, band.tenants)
        self.users = Siblings(band.tenants.moment, band.tenants.exact, members=band.tenants.members)
        self.lines: dict[str, Line] = {}
        self.waiting_count = 0
        self.admitted: dict[RequestId, Waiting] = {}
        """Without an outcome yet."""
        self.legs: dict[RequestId, Leg] = {}
        """Open ones."""
        self.outstanding = self.true_cost = self.guaranteed_cost = self.idle_cost = 0.0
        self.tag_ns = 0.0
        """Time up to which what it got has paid its guarantee."""

    def line(self, name: str) -> Line:
        line = self.lines.get(name)
        if line is None:
            line = self.lines[name] = Line(name, dict(self.spec.user_weights).get(name, 1.0), self)
        return line

    @property
    def may_run(self) -> bool:
        """Something waits, and the tenant is inside its own limits."""
        limit = self.spec.concurrency_max
        if not self.waiting_count or self.spec.state is TenantState.SUSPENDED:
            return False
        return limit == 0 or len(self.legs) < limit


class Oracle:
    """``exact``: the scheduler's clocks must be the book's; else (broken schedulers) they are taken over."""

    def __init__(
        self, scheduler: PoolScheduler, config: SchedulerConfig, presence: Presence, exact: bool = True
    ) -> None:
        self.config = config
        self.cost: CostWeights = CostWeights()
        self.exact = exact
        self.moment = Moment()
        self.pool = Siblings(self.moment, exact)
        self.members = 0
        self.bands = {name: Band(name, weight, self.pool) for name, weight in config.bands}
        self.books: dict[TenantId, Book] = {}
        self.old_bands: list[Siblings] = []
        self.places: dict[WorkerId, Place] = {}
        self.legs: dict[TicketId, Leg] = {}
        self.age = self.now_ns = 0
        self.stirred = False
        """The step changed a clock, the first H of a queue or room: what fits has been looked for."""
        self.admitted = self.finished = self.grants = 0
        self.over: dict[tuple[TenantId, RequestId], Waiting] = {}
        """Requests that had their outcome in this step."""
        self._reaches: dict[int, int] = {}
        self._bit_next = 1
        self._bits_known: dict[WorkerId, int] = {}
        self._watched: list[tuple[Node, FairChild]] | None = None
        self._users_watched: list[tuple[Tenant, dict[str, User]]] = []
        self.attach(scheduler, presence)

    def attach(self, scheduler: PoolScheduler, presence: Presence) -> None:
        self.scheduler, self.presence = scheduler, presence
        self.core = scheduler._legs
        self._watched = None
        self.idleness = Idleness(self)

    def siblings(self) -> Iterator[Siblings]:
        """All nodes' children."""
        yield self.pool
        for band in self.bands.values():
            yield band.tenants
        for book in self.books.values():
            yield book.users

    # Feeding

    def observe(self, input: Input, effects: tuple[Effect, ...], now_ns: int) -> None:
        """Take one step in and check all that can be checked at once."""
        self.now_ns = now_ns
        self.over.clear()
        self.stirred = not isinstance(input, MapChanged | Renew | WorkerHeard | Submit)
        self._input(input, effects)
        for effect in effects:
            match effect:
                case Granted(ticket, decision):
                    known = self.legs.get(ticket.ticket_id)
                    if known is None:
                        self._granted(ticket, decision)
                    else:
                        demand(not known.ended, "P7", "{} was granted again after its end", ticket.ticket_id)
                case LegEnded():
                    self._ended(effect)
                case Refused():
                    self._refused(effect)
                case IdleCharged():
                    self._idle_charged(effect, effects)
                case _:
                    pass
        self._clocks()
        self._counters()
        if self.stirred:
            self.idleness.check(now_ns)
        kept = self.core.placement.keeping.kept
        if kept is not None:
            waiting = self.books[kept.user.tenant.spec.tenant_id].admitted.get(kept.queued.request.request_id)
            if waiting is not None:
                waiting.was_kept_for = True

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
                self._tenant_changed(spec)
            case BandsChanged(bands):
                self._bands_changed(bands)
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

    def _tenant_changed(self, spec: TenantSpec) -> None:
        self.moment.now += 1
        self._watched = None
        book = self.books.get(spec.tenant_id)
        if book is None:
            self.books[spec.tenant_id] = Book(spec, self.bands[spec.band])
            return
        if spec.band != book.spec.band:
            before = book.band
            before.tenants.placed(book.node, 0.0, False, 0)
            self._place_band(before, 0.0)
            book.band = self.bands[spec.band]
            book.node = Node(spec.tenant_id, spec.weight, book.band.tenants)
        weights = dict(spec.user_weights)
        for line in book.lines.values():
            line.node.weight = weights.get(line.name, 1.0)
        book.spec = spec
        book.node.weight = spec.weight
        self._place_tenant(book, 0.0, 0.0)

    def _bands_changed(self, bands: tuple[tuple[str, float], ...]) -> None:
        self.moment.now += 1
        self._watched = None
        wanted = dict(bands)
        for name in tuple(self.bands):
            if name not in wanted:
                self.old_bands.append(self.bands.pop(name).tenants)
        for name, weight in bands:
            band = self.bands.get(name)
            if band is None:
                self.bands[name] = band = Band(name, weight, self.pool)
            band.node.weight = weight

    def _submitted(self, request: Request, effects: tuple[Effect, ...]) -> None:
        book = self.books[request.tenant_id]
        mine = [e for e in effects if isinstance(e, Refused) and e.request_id == request.request_id]
        if request.request_id in book.admitted:
            again = book.legs.get(request.request_id)
            answered = [e.ticket for e in effects if isinstance(e, Granted)]
            demand(not mine, "P7", "{} is open and was refused when it was asked for again", request.request_id)
            if again is not None:
                demand(again.ticket in answered, "P7", "{} was not told its ticket again", request.request_id)
            return
        if mine:
            return
        self.age += 1
        self.admitted += 1
        waiting = Waiting(request, self.age, self._estimate(request, effects))
        demand(1 <= waiting.estimate <= request.output_tokens_max, "estimate", "{} tokens", waiting.estimate)
        book.admitted[request.request_id] = waiting
        if request.user not in book.lines:
            self._watched = None
        line = book.line(request.user)
        line.queue.append(waiting)
        book.waiting_count += 1
        if len(line.queue) <= self.config.requests_considered_max:
            self.stirred = True
            self.moment.now += 1
            self._place(line)

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
        demand(waiting is not None, "P7", "{} was granted, but it was not admitted", ticket.request_id)
        assert waiting is not None
        line = book.line(waiting.request.user)
        demand(waiting in line.queue, "P7", "{} was granted, but it does not wait", ticket.request_id)
        request, cached = waiting.request, ticket.predicted_cached_tokens
        charge = self.cost.cost(request.prompt_tokens - cached, cached, ticket.output_tokens_estimated)
        demand(
            at_most(abs(charge - ticket.charge), 0.0), "P5", "charged {}, the cost is {}", ticket.charge, charge
        )
        frozen = (ticket.band, ticket.band_weight, ticket.weight, ticket.user, ticket.user_weight)
        path = (book.spec.band, book.band.node.weight, book.spec.weight, line.name, line.node.weight)
        demand(frozen == path, "P5", "the ticket says {}, its path is {}", frozen, path)
        demand(ticket.output_tokens_estimated == waiting.estimate, "estimate", "another one than at admission")
        limit = book.spec.concurrency_max
        demand(limit == 0 or len(book.legs) < limit, "A", "{} is beyond its own limit", ticket.tenant_id)
        self._order(line, waiting, ticket)
        kv_blocks = -(-(request.prompt_tokens - cached + waiting.estimate) // place.spec.block_size_tokens)
        self._room(book, place, kv_blocks)
        spans = self._spans(line, place, ticket, decision)
        rate = self.guaranteed_rate(book)
        if rate > 0.0:
            burst_ns = self.config.guarantee_burst_ms * 1e6
            book.tag_ns = max(book.tag_ns, self.now_ns - burst_ns) + charge / rate * 1e9
        leg = Leg(ticket, waiting, line, charge, kv_blocks, spans, rate)
        self.legs[ticket.ticket_id] = book.legs[ticket.request_id] = leg
        place.legs[ticket.ticket_id] = leg
        place.kv_blocks += kv_blocks
        line.queue.remove(waiting)
        line.legs_open += 1
        book.waiting_count -= 1
        if ticket.tenant_id in place.served:
            place.served.remove(ticket.tenant_id)
        place.served.append(ticket.tenant_id)
        book.outstanding += charge
        if ticket.guaranteed:
            self._place(line)
        else:
            self._place(line, charge / ticket.user_weight, charge / ticket.weight, charge / ticket.band_weight)

    def _spans(
        self, line: Line, place: Place, ticket: Ticket, decision: Decision
    ) -> tuple[tuple[Node, Span], ...]:
        """P1 at each level; the leg's share of each clock, unless a guarantee pays."""
        book = line.book
        nodes = (book.band.node, book.node, line.node)
        for node in nodes:
            demand(bool(node.reach & place.bit), "A", "{} ran on {} outside F", node.key, ticket.worker_id)
        spans = []
        windows = self.windows(book)
        for node, window, weight, level in zip(
            nodes, windows, (ticket.band_weight, ticket.weight, ticket.user_weight), decision.levels, strict=True
        ):
            demand(
                at_most(abs(window - level.window), 0.0), "P1", "T is told as {}, it is {}", level.window, window
            )
            if self.exact:
                right = at_most(abs(level.virtual_time - node.v), 0.0)
                demand(right, "clock", "v of {} was {}, by the book {}", node.key, level.virtual_time, node.v)
            elif node.newly:
                node.siblings.follow(node, level.virtual_time)
                node.base, node.newly = level.virtual_time, 0
            if not ticket.guaranteed:
                span = node.siblings.dispatched(node, place.bit, window, ticket.charge, weight, level.lo)
                spans.append((node, span))
        if ticket.guaranteed:
            self._guaranteed(line, place.bit, windows)
        return tuple(spans)

    def _guaranteed(self, line: Line, worker: int, windows: tuple[float, float, float]) -> None:
        """A guarantee gave the place: it was due, and it was needed."""
        book = line.book
        demand(self.guaranteed_rate(book) > 0.0, "guarantee", "{} has none", book.spec.tenant_id)
        due = at_most(book.tag_ns, self.now_ns)
        demand(due, "guarantee", "{} had got what it was guaranteed, until {}", book.spec.tenant_id, book.tag_ns)
        nodes = (book.band.node, book.node, line.node)
        reach = [node.siblings.lo(worker) + window for node, window in zip(nodes, windows, strict=True)]
        demand(at_most(line.node.v, reach[2]), "P1", "user {} is outside the window of its siblings", line.name)
        if self.exact:
            is_inside = all(
                node.v < far and at_most(node.v, far) for node, far in zip(nodes[:2], reach, strict=False)
            )
            demand(not is_inside, "guarantee", "{} had its turn: its clocks pay", book.spec.tenant_id)

    def guaranteed_rate(self, book: Book) -> float:
        """Cost a second: a part of the pool's rate, scaled down where all parts are more than may be promised."""
        share, most = book.spec.guaranteed_share, self.config.guaranteed_share_sum_max
        if not share:
            return 0.0
        shares = sum([other.spec.guaranteed_share for other in self.books.values()])
        return share * min(1.0, most / shares) * self.core.cost_rate.per_s

    def _order(self, line: Line, waiting: Waiting, ticket: Ticket) -> None:
        """Among the first H, and not past one that was overtaken often enough."""
        heads = line.queue[: self.config.requests_considered_max]
        waiting.waits_since_ns, waiting.waits_ns_max = None, 0
        demand(waiting in heads, "H", "{} is not among the first H", ticket.request_id)
        if heads[0].passed >= self.config.overtakes_max:
            demand(waiting is heads[0], "overtaken", "a head that was overtaken often enough was overtaken again")
        if ticket.leg == 1:
            for before in heads[: heads.index(waiting)]:
                before.passed += 1

    def _room(self, book: Book, place: Place, kv_blocks: int) -> None:
        """A slot and KV are free, and the last eighth goes to tenants below their share."""
        spec = place.spec
        demand(len(place.legs) < spec.slots, "room", "{} has no slot left", spec.worker_id)
        demand(place.kv_blocks + kv_blocks <= spec.kv_blocks, "room", "{} has no KV left", spec.worker_id)
        if self.in_headroom(place, kv_blocks):
            is_due = bool(book.spec.guaranteed_share) and at_most(book.tag_ns, self.now_ns)
            demand(
                is_due or self.below_share(book, 1.0 + SLACK),
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
        total = tenants_weight = bands_weight = 0.0
        bands = []
        for other in active:
            total += other.outstanding
            if other.band is book.band:
                tenants_weight += other.spec.weight
            if other.band not in bands:
                bands.append(other.band)
                bands_weight += other.band.node.weight
        share = book.band.node.weight / bands_weight * book.spec.weight / tenants_weight
        return book.outstanding < share * total * slack

    def _ended(self, end: LegEnded) -> None:
        self.moment.now += 1
        ticket = end.ticket
        leg = self.legs.get(ticket.ticket_id)
        demand(leg is not None and not leg.ended, "P7", "{} ended twice, or never began", ticket.ticket_id)
        assert leg is not None
        line = leg.line
        book = line.book
        if end.outcome is LegOutcome.WORKER_LOST:
            true_cost = 0.0
        elif end.usage is None:
            true_cost = leg.booked
        else:
            true_cost = self._cost_of(end.usage)
            if end.outcome is LegOutcome.EXPIRED:
                true_cost = max(true_cost, leg.booked)
        demand(at_most(abs(true_cost - end.attained), 0.0), "P5", "attained {}, true {}", end.attained, true_cost)
        demand(at_most(abs(end.correction - (true_cost - ticket.charge)), 0.0), "P5", "the correction is wrong")
        del book.legs[ticket.request_id]
        line.legs_open -= 1
        place = self.places.get(ticket.worker_id)
        if place is not None and place.legs.pop(ticket.ticket_id, None) is not None:
            place.kv_blocks -= leg.kv_blocks
        book.true_cost += true_cost
        if ticket.guaranteed:
            book.guaranteed_cost += true_cost
        waiting = leg.waiting
        if end.request_continues:
            waiting.excluded = (*waiting.excluded, ticket.worker_id)
            index = 0
            while index < len(line.queue) and line.queue[index].age < waiting.age:
                index += 1
            line.queue.insert(index, waiting)
            book.waiting_count += 1
        else:
            self._finish(book, ticket.request_id)
        leg.ended = True
        self._book(leg, true_cost - leg.booked, True)
        if not book.legs:
            book.outstanding = 0.0

    def _book(self, leg: Leg, by: float, ended: bool) -> None:
        """What a leg is booked changes, for the last time where it has ended."""
        book, ticket = leg.line.book, leg.ticket
        book.outstanding += -leg.booked if ended else by
        leg.booked += by
        if leg.guarantee_rate:
            book.tag_ns += by / leg.guarantee_rate * 1e9
        if not leg.spans:
            self._place(leg.line)
            return
        by_band, by_tenant, by_user = by / ticket.band_weight, by / ticket.weight, by / ticket.user_weight
        for (node, span), moved in zip(leg.spans, (by_band, by_tenant, by_user), strict=True):
            node.siblings.moved(node, span, moved, ended)
        band, tenant = leg.spans[0][0], leg.spans[1][0]
        if tenant is not book.node:
            # It has left the band since: its clock there is gone, the band's own goes on.
            if ticket.band in self.bands and self.bands[ticket.band].node is band:
                self._place_band(self.bands[ticket.band], by_band)
            self._place(leg.line, by_user)
        else:
            self._place(leg.line, by_user, by_tenant, by_band)

    def _idle_charged(self, charged: IdleCharged, effects: tuple[Effect, ...]) -> None:
        self.moment.now += 1
        book = self.books[charged.tenant_id]
        line = book.line(charged.user)
        weights = charged.band_weight, charged.weight, charged.user_weight
        path = book.band.node.weight, book.spec.weight, line.node.weight
        demand(weights == path and charged.cost > 0.0, "P5", "charged for idleness by {}, not {}", weights, path)
        self._may_be_charged(charged, effects)
        moved = [charged.cost / weight for weight in weights]
        for node, by in zip((book.band.node, book.node, line.node), moved, strict=True):
            node.siblings.charged(node, by)
        book.idle_cost += charged.cost
        self._place(line, moved[2], moved[1], moved[0])

    def _may_be_charged(self, charged: IdleCharged, effects: tuple[Effect, ...]) -> None:
        """Who is served pays for service alone: a leg that ran to its end with output is charged nothing more."""
        for effect in effects:
            if isinstance(effect, Refused) and effect.request_id == charged.request_id:
                waiting = self.over.get((effect.tenant_id, effect.request_id))
                demand(
                    waiting is not None and waiting.was_kept_for, "idle", "nothing was kept for what only waited"
                )
                return
            if isinstance(effect, LegEnded) and effect.ticket.request_id == charged.request_id:
                leg = self.legs[effect.ticket.ticket_id]
                broken_off = effect.outcome is LegOutcome.CANCELLED or not (
                    effect.usage and effect.usage.output_tokens
                )
                fair = broken_off or (leg.waiting.was_kept_for and effect.attained < effect.ticket.charge)
                demand(
                    fair, "idle", f"{charged.request_id} was served, and is charged {charged.cost} for idleness"
                )
                return
        demand(False, "idle", "{} is charged for idleness and did not end", charged.request_id)

    def _refused(self, refused: Refused) -> None:
        book = self.books.get(refused.tenant_id)
        waiting = book.admitted.get(refused.request_id) if book is not None else None
        if book is None or waiting is None:
            return  # it was never admitted
        demand(refused.request_id not in book.legs, "P7", "{} was refused while it ran", refused.request_id)
        self.moment.now += 1
        line = book.line(waiting.request.user)
        if waiting in line.queue:
            line.queue.remove(waiting)
            book.waiting_count -= 1
        self._finish(book, refused.request_id)
        self._place(line)

    def _finish(self, book: Book, request_id: RequestId) -> None:
        demand(request_id in book.admitted, "P7", "{} has two outcomes", request_id)
        self.over[book.spec.tenant_id, request_id] = book.admitted.pop(request_id)
        self.finished += 1

    def _cost_of(self, used: Usage) -> float:
        return self.cost.cost(used.prompt_tokens - used.cached_tokens, used.cached_tokens, used.output_tokens)

    # A, F and the windows

    def windows(self, book: Book) -> tuple[float, float, float]:
        """T among bands, among the tenants of the band, among the users of the tenant.

        Fixed, or a time's worth of what the pool's rate leaves to the parent, by the weights of those in A.
        """
        if self.config.window_fixed is not None:
            return (self.config.window_fixed,) * 3
        rate, band = self.core.cost_rate.per_s * self.config.window_delay_ms / 1000.0, book.band
        bands = weight_in_a(self.pool)
        of_band = rate * band.node.weight / (bands if band.node.in_a else bands + band.node.weight)
        tenants = weight_in_a(band.tenants)
        of_tenant = of_band * book.spec.weight / (tenants if book.node.in_a else tenants + book.spec.weight)
        users = weight_in_a(book.users)
        return (
            rate / bands if bands else 0.0,
            of_band / tenants if tenants else 0.0,
            of_tenant / users if users else 0.0,
        )

    def _reach(self, line: Line) -> int:
        reach = 0
        for waiting in line.queue[: self.config.requests_considered_max]:
            tokens = waiting.tokens_total
            known = self._reaches.get(tokens)
            if known is None:
                known = 0
                for place in self.places.values():
                    if place.bit & self.members and could_run(waiting, place.spec):
                        known |= place.bit
                self._reaches[tokens] = known
            reach |= known
        return reach

    def _place(self, line: Line, by_user: float = 0.0, by_tenant: float = 0.0, by_band: float = 0.0) -> None:
        """Book to a user, its tenant and its band, and put each where it belongs."""
        book = line.book
        book.users.placed(line.node, by_user, bool(line.queue), self._reach(line))
        self._place_tenant(book, by_tenant, by_band)

    def _place_tenant(self, book: Book, by_tenant: float, by_band: float) -> None:
        in_a = book.may_run
        reach = 0
        if in_a:
            for node in book.users.nodes:
                reach |= node.reach
        book.band.tenants.placed(book.node, by_tenant, in_a, reach)
        self._place_band(book.band, by_band)

    def _place_band(self, band: Band, by: float) -> None:
        in_a, reach = False, 0
        for node in band.tenants.nodes:
            if node.in_a:
                in_a = True
                reach |= node.reach
        self.pool.placed(band.node, by, in_a, reach)

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
        self.members = 0
        for place in self.places.values():
            if not place.draining and place.spec.role is WorkerRole.BOTH:
                self.members |= place.bit
        for siblings in (*self.siblings(), *self.old_bands):
            siblings.members = self.members
        for book in self.books.values():
            lines = book.lines.values()
            book.users.refresh([(line.node, bool(line.queue), self._reach(line)) for line in lines])
        for band in self.bands.values():
            changes = []
            for book in self.books.values():
                if book.band is band:
                    reach = 0
                    if book.may_run:
                        for node in book.users.nodes:
                            reach |= node.reach
                    changes.append((book.node, book.may_run, reach))
            band.tenants.refresh(changes)
        changes = []
        for band in self.bands.values():
            nodes = [node for node in band.tenants.nodes if node.in_a]
            reach = 0
            for node in nodes:
                reach |= node.reach
            changes.append((band.node, bool(nodes), reach))
        self.pool.refresh(changes)

    def restarted(self, scheduler: PoolScheduler, presence: Presence) -> None:
        """A successor took over from a checkpoint: clocks and legs go on, queues and workers are told anew."""
        self.attach(scheduler, presence)
        for tenant_id, book in self.books.items():
            known = self.core.outstanding.tenants[tenant_id].users_known
            for line in book.lines.values():
                for waiting in line.queue:
                    self._finish(book, waiting.request.request_id)
                line.queue.clear()
                if line.name not in known and line.node.v:
                    self._forgotten(line)
            book.waiting_count = 0
            for waiting in book.admitted.values():
                # Of a request whose leg runs on, the successor knows what the ticket says.
                waiting.passed, waiting.excluded = 0, ()
            if not book.spec.guaranteed_share:
                book.tag_ns = float(self.now_ns)
            for leg in book.legs.values():
                leg.guarantee_rate = 0.0
                self._on_clocks_of_that_name(leg)
        self.places.clear()
        self._members_changed()

    def _on_clocks_of_that_name(self, leg: Leg) -> None:
        """Nor does a ticket say that its tenant has left the band in between, or that the band was another."""
        if not leg.spans:
            return
        ticket, book, band = leg.ticket, leg.line.book, self.bands.get(leg.ticket.band)
        nodes = [node for node, _ in leg.spans]
        if band is not None:
            nodes[0] = band.node
        if ticket.band == book.spec.band:
            nodes[1] = book.node
        spans = []
        for node, (before, span), weight in zip(
            nodes, leg.spans, (ticket.band_weight, ticket.weight, ticket.user_weight), strict=True
        ):
            if node is not before:
                span = Span(span.began, leg.booked, weight)
                node.spans.append(span)
            spans.append((node, span))
        leg.spans = tuple(spans)

    # Checks at each step

    def _clocks(self) -> None:
        """P5: a clock moves by what is booked, and beyond that only upwards, and only on arrival."""
        if self._watched is None or any(known.users_known is not users for known, users in self._users_watched):
            self._watch()
        assert self._watched is not None
        for node, known in self._watched:
            if known.v != node.v or node.v != node.base or node.newly:
                node.siblings.told(node, known.v)
            if known.in_a is not node.in_a:
                demand(False, "A", "{} in A: {}", node.key, known.in_a)

    def _watch(self) -> None:
        """Find the scheduler's own nodes again."""
        bands = self.core.fair.bands
        self._watched = [(band.node, bands[name]) for name, band in self.bands.items()]
        self._users_watched = []
        for tenant_id, known in self.core.outstanding.tenants.items():
            book = self.books[tenant_id]
            self._watched.append((book.node, known))
            self._users_watched.append((known, known.users_known))
            for name, line in book.lines.items():
                if name in known.users_known:
                    self._watched.append((line.node, known.users_known[name]))
                elif line.node.v:
                    self._forgotten(line)

    def _forgotten(self, line: Line) -> None:
        """A user at rest is forgotten only where that forgives it nothing: whoever enters is lifted that far."""
        demand(not line.queue and not line.legs_open, "P7", "user {} was forgotten with something open", line.name)
        times = [line.node.siblings.virtual_times.get(bit, 0.0) for bit in bits(self.members)]
        if self.exact and times:
            demand(at_most(line.node.v, min(times)), "P5", "user {} was forgiven", line.name)
        line.node.v = line.node.base = 0.0

    def _counters(self) -> None:
        core, open_legs = self.core, 0
        for worker_id, place in self.places.items():
            worker = core.rooms.workers[worker_id]
            here = len(place.legs)
            if len(worker.tickets) != here or worker.kv_reserved_blocks != place.kv_blocks:
                demand(False, "counters", "{}: {} slots, {} legs; KV too", worker_id, len(worker.tickets), here)
        queued = 0
        for book in self.books.values():
            queued += book.waiting_count
            open_legs += len(book.legs)
        if self.scheduler._requests.queued_total != queued:
            demand(False, "counters", "{} queued, {} wait", self.scheduler._requests.queued_total, queued)
        if len(core.book) != open_legs:
            demand(False, "counters", "{} tickets, {} open legs", len(core.book), open_legs)
        if not open_legs:
            demand(core.outstanding.total == 0.0, "counters", "outstanding cost is not zero")

    # Checks at the end

    def drained(self) -> None:
        """P5 and P7 once everything has ended, and memory is where it was."""
        demand(self.admitted == self.finished, "P7", "{} admitted, {} outcomes", self.admitted, self.finished)
        for tenant in self.scheduler.status(0).tenants:
            book = self.books[tenant.tenant_id]
            demand(not book.waiting_count and not book.legs, "P7", "{} is not drained", tenant.tenant_id)
            demand(
                at_most(abs(tenant.cost_got - book.true_cost), 0.0), "P5", f"{tenant.cost_got} {book.true_cost}"
            )
            guaranteed = self.core.outstanding.tenants[tenant.tenant_id].cost_guaranteed
            right = at_most(abs(guaranteed - book.guaranteed_cost), 0.0)
            demand(right, "P5", "{} is booked to the guarantee, {} was got", guaranteed, book.guaranteed_cost)
            idled = self.core.outstanding.tenants[tenant.tenant_id].cost_idled
            demand(
                at_most(abs(idled - book.idle_cost), 0.0), "P5", "{} idled, {} were told", idled, book.idle_cost
            )
            demand(tenant.cost_outstanding == 0.0, "counters", "{} outstanding", tenant.cost_outstanding)
        demand(
            self.presence.ticket_count == 0, "presence", "{} tickets still presumed", self.presence.ticket_count
        )
        for worker_id in self.places:
            assumed = self.presence.assumed_count(worker_id)
            demand(assumed == 0, "presence", "{} keys of {} still presumed", assumed, worker_id)

    def judge_bounds(self) -> None:
        """P2, P3 and P4 among the children of every node."""
        for siblings in (*self.siblings(), *self.old_bands):
            siblings.judge()


def weight_in_a(siblings: Siblings) -> float:
    """Σφ(A)."""
    return sum([node.weight for node in siblings.nodes if node.in_a])
