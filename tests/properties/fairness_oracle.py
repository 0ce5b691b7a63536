"""An independent book of what a scheduler does, and the properties it must keep at every step.

The oracle sees inputs and effects, and of the scheduler's inside only clocks, reservations, estimates of what
waits, who waits for a warmer worker and the kept one. It works out for itself who is in A, F_i as a set of
workers, every clock, lo_w, the window, who may run where, what room is taken, what each leg costs and what each
tenant has outstanding. The properties are those of ``docs/fairness.md``. ``standing`` knows who stands where;
clocks and the bounds among siblings are ``clock_book``'s; what must hold at a grant is ``grant_check``'s, who is
held up ``held_up``'s, for whom a worker is kept ``kept_check``'s, what of the scheduler's inside is compared
``scheduler_check``'s, and who may be idle ``idleness``'s.

The shell around it must send ``Tick`` whenever the scheduler has asked to be woken, before any other input: then
what an input brings about and what time brings about are never in one step.
"""

from tests.properties.broken import at_most, demand
from tests.properties.clock_nodes import Span
from tests.properties.grant_check import GrantCheck
from tests.properties.held_up import HeldUpCheck
from tests.properties.idleness import Idleness
from tests.properties.kept_check import KeptCheck
from tests.properties.scheduler_check import Comparison
from tests.properties.standing import Standing
from tests.properties.tenant_book import Book, Leg, Waiting

from evenhand.core.facts import CostWeights, Decision, LegOutcome, Request, SchedulerConfig, Ticket, Usage
from evenhand.core.ids import RequestId, TenantId
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


class Oracle(Standing):
    """``exact``: the scheduler's clocks must be the book's; else (broken schedulers) they are taken over."""

    def __init__(
        self, scheduler: PoolScheduler, config: SchedulerConfig, presence: Presence, exact: bool = True
    ) -> None:
        self.cost: CostWeights = CostWeights()
        self.age = 0
        self.stirred = False
        """The step changed a clock, the first H of a queue or room: what fits has been looked for."""
        self.admitted = self.finished = self.grants = 0
        self.over: dict[tuple[TenantId, RequestId], Waiting] = {}
        """Requests that had their outcome in this step."""
        super().__init__(scheduler, config, presence, exact)
        self.grant_check = GrantCheck(self, lambda: self.held_up)

    def attach(self, scheduler: PoolScheduler, presence: Presence) -> None:
        super().attach(scheduler, presence)
        self.comparison = Comparison(self)
        self.idleness = Idleness(self)
        self.held_up = HeldUpCheck(self)
        self.kept = KeptCheck(self, self.held_up)

    # Feeding

    def observe(self, input: Input, effects: tuple[Effect, ...], now_ns: int) -> None:
        """Take one step in and check all that can be checked at once."""
        self.work_to(now_ns)
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
        self.work_rate_per_s = self.core.cost_rate.per_s
        self.comparison.clocks()
        self.comparison.counters()
        self.comparison.guarantees()
        if self.stirred:
            self.idleness.check(now_ns)
        self.kept.stepped()
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
                self.comparison.watch_again()
                self.tenant_changed(spec)
            case BandsChanged(bands):
                self.comparison.watch_again()
                self.bands_changed(bands)
            case WorkerJoined(spec):
                self.joined(spec)
            case WorkerHeard(worker_id, load):
                if worker_id in self.places:
                    self.places[worker_id].load = load
            case WorkerGone(worker_id):
                self.gone(worker_id)
            case WorkerDrained(worker_id, draining):
                place = self.places.get(worker_id)
                self.stirred = place is not None and place.draining != draining
                self.drain(worker_id, draining)
            case _:
                pass

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
            self.comparison.watch_again()
        line = book.line(request.user)
        line.queue.append(waiting)
        book.waiting_count += 1
        if len(line.queue) <= self.config.requests_considered_max:
            self.stirred = True
            self.moment.now += 1
            self.place(line)

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
        self.grant_check.order(line, waiting, ticket)
        self.kept.granted(line, self.held_up.kept_at(ticket.request_id))
        kv_blocks = -(-(request.prompt_tokens - cached + waiting.estimate) // place.spec.block_size_tokens)
        self.grant_check.room(book, place, kv_blocks)
        spans = self.grant_check.spans(line, place, ticket, decision)
        share = self.guaranteed_share(book)
        leg = Leg(ticket, waiting, line, charge, kv_blocks, spans, share, 0.0)
        if share > 0.0:
            self.work_rate_most = max(self.work_rate_most, self.core.cost_rate.per_s)
            burst, burst_most = self.burst(self.core.cost_rate.per_s), self.burst(self.work_rate_most)
            book.guarantee.granted(leg, self.work, burst, burst_most)
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
            self.place(line)
        else:
            self.place(line, charge / ticket.user_weight, charge / ticket.weight, charge / ticket.band_weight)

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
        if ticket.backfilled:
            book.backfilled_cost += true_cost
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
        if leg.guarantee_share:
            book.guarantee.corrected(leg, by, self.work, self.burst(self.work_rate_per_s))
        if not leg.spans:
            self.place(leg.line)
            return
        by_band, by_tenant, by_user = by / ticket.band_weight, by / ticket.weight, by / ticket.user_weight
        for (node, span), moved in zip(leg.spans, (by_band, by_tenant, by_user), strict=True):
            node.siblings.moved(node, span, moved, ended)
        band, tenant = leg.spans[0][0], leg.spans[1][0]
        if tenant is not book.node:
            # It has left the band since: its clock there is gone, the band's own goes on.
            if ticket.band in self.bands and self.bands[ticket.band].node is band:
                self.place_band(self.bands[ticket.band], by_band)
            self.place(leg.line, by_user)
        else:
            self.place(leg.line, by_user, by_tenant, by_band)

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
        self.place(line, moved[2], moved[1], moved[0])

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
        self.place(line)

    def _finish(self, book: Book, request_id: RequestId) -> None:
        demand(request_id in book.admitted, "P7", "{} has two outcomes", request_id)
        self.over[book.spec.tenant_id, request_id] = book.admitted.pop(request_id)
        self.finished += 1

    def _cost_of(self, used: Usage) -> float:
        return self.cost.cost(used.prompt_tokens - used.cached_tokens, used.cached_tokens, used.output_tokens)

    def restarted(self, scheduler: PoolScheduler, presence: Presence, now_ns: int) -> None:
        """A successor took over from a checkpoint: clocks and legs go on, queues and workers are told anew."""
        self.work_to(now_ns)
        self.attach(scheduler, presence)
        for place in self.places.values():
            place.load = None
        for tenant_id, book in self.books.items():
            known = self.core.outstanding.tenants[tenant_id].users_known
            for line in book.lines.values():
                for waiting in line.queue:
                    self._finish(book, waiting.request.request_id)
                line.queue.clear()
                if line.name not in known and line.node.v:
                    self.comparison.forgotten(line)
            book.waiting_count = 0
            for waiting in book.admitted.values():
                # Of a request whose leg runs on, the successor knows what the ticket says.
                waiting.passed, waiting.excluded = 0, ()
            book.guarantee.restarted(self.work, bool(book.spec.guaranteed_share))
            for leg in book.legs.values():
                self._on_clocks_of_that_name(leg)
        self.places.clear()
        self.members_changed()

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

    # Checks at the end

    def drained(self) -> None:
        """P5 and P7 once everything has ended, and memory is where it was."""
        demand(self.admitted == self.finished, "P7", "{} admitted, {} outcomes", self.admitted, self.finished)
        self.comparison.drained()

    def judge_bounds(self) -> None:
        """P2, P3 and P4 among the children of every node."""
        for siblings in (*self.siblings(), *self.old_bands):
            siblings.judge()
