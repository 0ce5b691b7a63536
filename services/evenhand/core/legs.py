"""Legs: one try of a request on one worker, from the moment of decision to its one end.

A leg is booked in four places at once, and given back in all four at once: the worker's room, the tenant's
clock, the tenant's outstanding cost, and presumed presence. Nothing else reserves or releases.

::

    open:    v += charge/φ                  charge = cost of the real split at the worker + estimated output
    usage:   v += (attained − booked)/φ     only upwards, while the leg runs
    end:     v += (attained − booked)/φ     once; attained is 0 where the worker was lost
    adopt:   v += charge/φ                  a valid ticket that the clocks restored here do not know

A leg that a guarantee gave a place outside the window is booked to the guarantee ledger instead, whole.

Each moves three clocks at once: the user's, the tenant's and the band's, each by its own φ, the weight at
dispatch, frozen in the ticket. The move of the clocks and the new places in A are one change (``FairTree.book``).
A tenant that has changed its band since left the clock behind on which the leg was charged: corrections still
move the old band's clock and the user's, and not the tenant's in its new band.
"""

from dataclasses import dataclass, field

from evenhand.core.block_key import usable_blocks
from evenhand.core.choice import Choice
from evenhand.core.estimator import NS_PER_MS, NS_PER_S, CostRate, OutputEstimator
from evenhand.core.explain import Explainer
from evenhand.core.facts import LegOutcome, Request, SchedulerConfig, Ticket, Usage
from evenhand.core.fair_tree import FairTree
from evenhand.core.guarantees import Guarantees
from evenhand.core.ids import TicketId, WorkerId
from evenhand.core.kv import KeysRefuted
from evenhand.core.limits import Limits
from evenhand.core.outstanding import Outstanding
from evenhand.core.placement import Placement
from evenhand.core.presence import PrefillOutcome, Presence
from evenhand.core.queued import Queued
from evenhand.core.rooms import Rooms
from evenhand.core.steps import Effect, Granted, IdleCharged, LegEnded, Refute
from evenhand.core.tenant import Tenant, User
from evenhand.core.tickets import OpenTicket, TicketBook, believed_usage
from evenhand.core.worker import Worker

OLDEST = -(1 << 60)
"""Requests of earlier terms are older than all of this one, and keep the order in which they were taken over."""


@dataclass(slots=True)
class Legs:
    """The only writer of tickets and of what they reserve."""

    config: SchedulerConfig
    term: int
    presence: Presence
    fair: FairTree
    rooms: Rooms
    outstanding: Outstanding
    placement: Placement
    explainer: Explainer
    cost_rate: CostRate
    estimator: OutputEstimator
    book: TicketBook
    guarantees: Guarantees
    limits: Limits = field(default_factory=Limits)
    granted_count: int = 0
    """Grants of this term; part of every ticket id."""
    taken_over_count: int = 0
    detached: dict[WorkerId, dict[TicketId, OpenTicket]] = field(default_factory=dict)
    """Tickets of earlier terms whose worker has not joined yet: nothing is reserved for them."""

    def open(self, choice: Choice, now_ns: int) -> Granted:
        """Dispatch a choice: reserve, charge, and say why."""
        user, queued, worker, request = choice.user, choice.queued, choice.worker, choice.queued.request
        tenant = user.tenant
        cached_tokens = choice.cached_tokens
        uncached_tokens = request.prompt_tokens - cached_tokens
        charge = self.config.cost.cost(uncached_tokens, cached_tokens, queued.output_tokens_estimated)
        decision = self.explainer.decision(choice, charge, now_ns)
        if choice.backfilled:
            self.fair.lift_passed(user, worker, self.cost_rate.per_s)
        self.granted_count += 1
        ticket = Ticket(
            ticket_id=TicketId(f"{self.term}.{self.granted_count}.{queued.leg}"),
            request_id=request.request_id,
            tenant_id=request.tenant_id,
            worker_id=worker.spec.worker_id,
            epoch=worker.spec.epoch,
            leg=queued.leg,
            term=self.term,
            charge=charge,
            weight=tenant.weight,
            prompt_tokens=request.prompt_tokens,
            predicted_cached_tokens=cached_tokens,
            output_tokens_estimated=queued.output_tokens_estimated,
            output_tokens_max=request.output_tokens_max,
            granted_at_ns=now_ns,
            band=tenant.band.node_id,
            band_weight=tenant.band.weight,
            user=user.node_id,
            user_weight=user.weight,
            guaranteed=choice.guaranteed,
            backfilled=choice.backfilled,
        )
        kv_blocks = self.placement.fitting.kv_blocks(queued, worker, cached_tokens)
        ttl_ns, leg_ns_max = self.config.ticket_ttl_ms * NS_PER_MS, self.config.leg_ms_max * NS_PER_MS
        held = OpenTicket(ticket, queued, kv_blocks, now_ns + ttl_ns, now_ns + leg_ns_max)
        held.decision = decision
        tenant.charge_max = max(tenant.charge_max, charge / tenant.weight)
        self.guarantees.charge(tenant, held)
        self._note_map(held, worker)
        self._overtake(user, queued)
        self.placement.keeping.served(user)
        tenant.remove(request.request_id)
        if choice.declined:
            self.placement.cold_waits.taken_cold(user)
        self.outstanding.dispatched(tenant, charge)
        tenant.service.granted(now_ns)
        self._hold(user, held, worker, uncached_tokens, now_ns)
        worker.note_served(tenant, self.config.sticky_tenants_max)
        # What the map holds there already needs no presumption.
        unheld_keys = request.block_keys[held.map_cached_blocks :]
        self.presence.presume(ticket.ticket_id, ticket.worker_id, unheld_keys, now_ns)
        worker.fill(self.presence.filled_blocks(ticket.worker_id))
        self.placement.heads.map_version += 1
        self.placement.heads.presumed(tenant, queued, worker)
        self.move(user, now_ns, charge, held)
        return Granted(ticket, decision)

    def use(self, held: OpenTicket, usage: Usage, now_ns: int) -> None:
        """Usage of a running leg: an undercharge is booked at once, an overcharge waits for the end.

        The first output that is told of means that its prefill is done.
        """
        believed, ticket = believed_usage(usage, held.ticket), held.ticket
        if believed.output_tokens > 0 and held.first_token_at_ns is None:
            self._first_token(held, now_ns)
        held.output_told_tokens = max(held.output_told_tokens, believed.output_tokens)
        own_word = held.queued.request.output_tokens_expected
        if own_word is not None and held.output_told_tokens >= 2 * held.output_learned_tokens:
            # That was far too low: the next ones are believed less, while this leg still runs.
            held.output_learned_tokens = held.output_told_tokens
            self.estimator.learn_at_least(ticket.tenant_id, held.output_told_tokens)
        self.limits.use(ticket.tenant_id, ticket.request_id, believed.tokens, now_ns)
        over = held.cost_of(believed, self.config.cost) - held.booked
        if over > 0.0:
            tenant = self.outstanding.tenants[held.ticket.tenant_id]
            self.guarantees.correct(tenant, held, over)
            held.booked += over
            self.outstanding.book(tenant, over)
            self.outstanding.dispatched(tenant, over)
            self.move(held.user, now_ns, over, held)

    def end(
        self,
        held: OpenTicket,
        outcome: LegOutcome,
        usage: Usage | None,
        now_ns: int,
        continues: bool,
        effects: list[Effect],
    ) -> None:
        """End a leg, once; with ``continues`` its request goes back to its queue."""
        ticket = held.ticket
        tenant = self.outstanding.tenants[ticket.tenant_id]
        believed = believed_usage(usage, ticket) if usage is not None else None
        attained = self._attained(held, outcome, believed)
        self.book.close(ticket.ticket_id, outcome)
        del tenant.granted[ticket.request_id]
        held.user.tickets_open -= 1
        self._let_go(held, outcome, believed, now_ns, effects)
        self.outstanding.release(tenant, held.booked, len(self.book))
        self.outstanding.dispatched(tenant, attained - held.booked)
        self.guarantees.correct(tenant, held, attained - held.booked)
        if outcome is not LegOutcome.WORKER_LOST:
            self.cost_rate.add(attained, now_ns)
        if not len(self.book):
            self.cost_rate.idle_from(now_ns)
        if continues:
            queued = held.queued
            queued.leg += 1
            queued.map_version = -1
            queued.declined_since_ns = None
            queued.exclude(ticket.worker_id)
            tenant.put_back(queued)
        elif outcome is LegOutcome.WORKER_LOST:
            self.limits.give_back(ticket.tenant_id, ticket.request_id, now_ns)
        else:
            used_tokens = believed.tokens if believed is not None else None
            self.limits.end(ticket.tenant_id, ticket.request_id, used_tokens, now_ns)
        self.move(held.user, now_ns, attained - held.booked, held)
        worker = self.rooms.workers.get(ticket.worker_id)
        keys = held.queued.request.block_keys
        effects.append(
            LegEnded(
                ticket,
                outcome,
                attained,
                attained - ticket.charge,
                believed,
                request_continues=continues,
                keyed_tokens=len(keys) * worker.spec.block_size_tokens if worker is not None else 0,
            )
        )
        idled = self._idled(held, outcome, believed, attained, now_ns)
        self.charge_idled(held.queued, idled, now_ns, effects)

    def adopt(self, ticket: Ticket, block_keys: tuple[int, ...], now_ns: int) -> OpenTicket:
        """Take over a valid ticket of an earlier term that no checkpoint told of: charge it here."""
        held = self.take_over(ticket, block_keys, ticket.charge, self.config.ticket_ttl_ms * NS_PER_MS, now_ns)
        tenant = self.outstanding.tenants[ticket.tenant_id]
        self.limits.adopt(ticket, now_ns)
        self.outstanding.dispatched(tenant, ticket.charge)
        self.guarantees.charge(tenant, held)
        self.move(held.user, now_ns, ticket.charge, held)
        return held

    def take_over(
        self, ticket: Ticket, block_keys: tuple[int, ...], booked: float, ttl_ns: int, now_ns: int
    ) -> OpenTicket:
        """Hold a ticket of an earlier term whose charge is on the clock already; its worker may join later.

        The request's deadline went with the earlier term; ``Requests.lose_leg`` bounds its wait. So did the time
        of its grant: ``leg_ms_max`` counts from here.
        """
        request = Request(
            request_id=ticket.request_id,
            tenant_id=ticket.tenant_id,
            block_keys=block_keys,
            prompt_tokens=ticket.prompt_tokens,
            output_tokens_max=ticket.output_tokens_max,
            output_tokens_expected=ticket.output_tokens_estimated,
            user=ticket.user,
        )
        self.taken_over_count += 1
        queued = Queued(request, OLDEST + self.taken_over_count, now_ns, ticket.output_tokens_estimated)
        queued.leg = ticket.leg
        tenant = self.outstanding.tenants[ticket.tenant_id]
        queued.user = tenant.user(ticket.user)
        held = OpenTicket(ticket, queued, 0, now_ns + ttl_ns, now_ns + self.config.leg_ms_max * NS_PER_MS)
        held.booked = booked
        if ticket.band != tenant.band.node_id:
            held.has_left_band, held.band = True, self.fair.bands.get(ticket.band)
        worker = self.rooms.workers.get(ticket.worker_id)
        if worker is not None and worker.spec.epoch == ticket.epoch:
            self.attach(held, worker)
            self._hold(held.user, held, worker, 0, now_ns)
            self.presence.presume(ticket.ticket_id, ticket.worker_id, block_keys, now_ns)
            self.placement.heads.map_version += 1
        else:
            self._hold(held.user, held, None, 0, now_ns)
            self.detached.setdefault(ticket.worker_id, {})[ticket.ticket_id] = held
        self.outstanding.note(tenant)
        return held

    def attach(self, held: OpenTicket, worker: Worker) -> None:
        """Work out what a ticket of an earlier term takes at its worker."""
        held.kv_blocks = self.placement.fitting.kv_blocks(held.queued, worker, held.ticket.predicted_cached_tokens)

    def map_changed(self, worker_id: WorkerId) -> None:
        """The map was folded forward for a worker: look-ups and its filling are to be taken anew."""
        self.presence.map_changed(worker_id)
        self.placement.heads.map_version += 1
        worker = self.rooms.workers.get(worker_id)
        if worker is not None:
            worker.fill(self.presence.filled_blocks(worker_id))

    def worker_attached(self, worker: Worker, now_ns: int) -> tuple[OpenTicket, ...]:
        """A worker joined: reserve for its tickets of earlier terms; return those of an epoch that is over."""
        waiting = self.detached.pop(worker.spec.worker_id, {})
        over: list[OpenTicket] = []
        for ticket_id, held in waiting.items():
            if held.ticket.epoch != worker.spec.epoch:
                over.append(held)
                continue
            self.attach(held, worker)
            worker.reserve(held, 0, now_ns)
            self.presence.presume(ticket_id, worker.spec.worker_id, held.queued.request.block_keys, now_ns)
        worker.fill(self.presence.filled_blocks(worker.spec.worker_id))
        self.placement.heads.map_version += 1
        self.rooms.judge(worker, now_ns)
        return tuple(over)

    def move(self, user: User, now_ns: int, cost: float = 0.0, held: OpenTicket | None = None) -> None:
        """Book a cost of a leg on its clocks, and put user, tenant and band where queue and limits now belong."""
        tenant = user.tenant
        reach_tokens = user.reach_wanted(self.config.requests_considered_max)
        was_in_a = tenant.in_a
        if held is None or not cost:
            self.fair.book(user, reach_tokens)
        elif held.ticket.guaranteed:
            tenant.cost_guaranteed += cost
            self.fair.book(user, reach_tokens)
        else:
            ticket = held.ticket
            if ticket.backfilled:
                tenant.cost_backfilled += cost
            band_v, user_v = cost / ticket.band_weight, cost / ticket.user_weight
            if not held.has_left_band:
                self.fair.book(user, reach_tokens, user_v, cost / ticket.weight, band_v)
            else:
                # Before the tenant may bring its band into A again, and a lift there takes its place.
                self.fair.correct_band(held.band, band_v)
                self.fair.book(user, reach_tokens, user_v)
        self.noted(tenant, was_in_a, now_ns)

    def charge_idled(self, queued: Queued, cost: float, now_ns: int, effects: list[Effect]) -> None:
        """A request is withdrawn that a worker was kept for, or that held room: its tenant pays for that."""
        user = queued.user
        if cost <= 0.0 or user is None:
            return
        queued.idled = 0.0
        tenant = user.tenant
        band, was_in_a = tenant.band, tenant.in_a
        tenant.cost_idled += cost
        reach_tokens = user.reach_tokens if user.in_a else None
        self.fair.book(user, reach_tokens, cost / user.weight, cost / tenant.weight, cost / band.weight)
        self.noted(tenant, was_in_a, now_ns)
        effects.append(
            IdleCharged(
                tenant.spec.tenant_id,
                queued.request.request_id,
                cost,
                band.node_id,
                band.weight,
                tenant.weight,
                user.node_id,
                user.weight,
            )
        )

    def _idled(
        self, held: OpenTicket, outcome: LegOutcome, usage: Usage | None, attained: float, now_ns: int
    ) -> float:
        """What a leg that ends idled beyond what it attained: by the worker kept for it, and by its hold on room.

        A leg that was broken off (cancelled, or without any output) has held its room for nothing: it pays for the
        time at the room's share of R, up to its charge, so that room cannot be had for a floor of 1 by cancelling.
        Where no other tenant is in A nobody missed it.
        """
        if outcome is LegOutcome.WORKER_LOST or usage is None:
            return 0.0
        ticket = held.ticket
        cost = held.queued.idled * max(0.0, 1.0 - attained / ticket.charge)
        worker = self.rooms.workers.get(ticket.worker_id)
        is_broken_off = outcome is LegOutcome.CANCELLED or usage.output_tokens == 0
        others_in_a = len(self.fair) - held.user.tenant.in_a
        if is_broken_off and others_in_a and worker is not None and ticket.term == self.term and self.fair.members:
            part = max(1.0 / worker.spec.slots, held.kv_blocks / worker.spec.kv_blocks)
            held_s = (now_ns - ticket.granted_at_ns) / NS_PER_S
            room = self.cost_rate.per_s / len(self.fair.members) * part * held_s
            cost += max(0.0, min(room, held.booked) - attained)
        return cost

    def noted(self, tenant: Tenant, was_in_a: bool, now_ns: int) -> None:
        """A tenant may have entered or left A."""
        if was_in_a is not tenant.in_a:
            if was_in_a:
                self.outstanding.left(tenant, now_ns)
            else:
                self.outstanding.entered(tenant, now_ns)
            self.guarantees.note(tenant)
        self.outstanding.note(tenant)

    # Within

    def _first_token(self, held: OpenTicket, now_ns: int) -> None:
        """A leg's prefill is done: its worker has prefill room again."""
        held.first_token_at_ns = now_ns
        held.user.tenant.tells_first_token = True
        worker = self.rooms.workers.get(held.ticket.worker_id)
        if worker is not None and held.ticket.ticket_id in worker.tickets:
            worker.prefilled(held, now_ns)
            self.rooms.judge(worker, now_ns)

    def _hold(
        self, user: User, held: OpenTicket, worker: Worker | None, uncached_tokens: int, now_ns: int
    ) -> None:
        if not len(self.book):
            self.cost_rate.busy_from(now_ns)
        self.book.open(held)
        tenant = user.tenant
        user.tickets_open += 1
        if not held.has_left_band:
            held.band = tenant.band
        tenant.granted[held.ticket.request_id] = held
        self.outstanding.book(tenant, held.booked)
        if worker is not None:
            held.prefill_pending_tokens = worker.prefill_pending_tokens(now_ns) + uncached_tokens
            worker.reserve(held, uncached_tokens, now_ns)
            self.rooms.judge(worker, now_ns)

    def _let_go(
        self, held: OpenTicket, outcome: LegOutcome, usage: Usage | None, now_ns: int, effects: list[Effect]
    ) -> None:
        """Give back room and presumption; learn, and blame the map where it predicted what was not there."""
        ticket = held.ticket
        worker = self.rooms.workers.get(ticket.worker_id)
        if worker is not None and ticket.ticket_id in worker.tickets:
            worker.release(held, now_ns)
            self.rooms.judge(worker, now_ns)
        waiting = self.detached.get(ticket.worker_id)
        if waiting is not None and waiting.pop(ticket.ticket_id, None) is not None and not waiting:
            del self.detached[ticket.worker_id]
        prefilled = usage is None or usage.prompt_tokens > 0
        if outcome is LegOutcome.WORKER_LOST:
            prefilled = False
        self.presence.ticket_ended(
            ticket.ticket_id,
            PrefillOutcome.PREFILLED if prefilled else PrefillOutcome.CANCELLED_BEFORE_PREFILL,
            now_ns,
        )
        self.placement.heads.map_version += 1
        if usage is None or outcome is not LegOutcome.SETTLED:
            produced_tokens = max(held.output_told_tokens, usage.output_tokens if usage is not None else 0)
            self.estimator.learn_at_least(ticket.tenant_id, produced_tokens)
        if usage is None or outcome is LegOutcome.WORKER_LOST:
            return
        if outcome is LegOutcome.SETTLED:
            self.estimator.learn(ticket.tenant_id, usage.output_tokens)
            if usage.output_tokens > 0 and held.first_token_at_ns is None:
                held.user.tenant.tells_first_token = False
            if worker is not None:
                self._learn_output(held, usage.output_tokens, worker, now_ns)
        if usage.output_tokens > 0:
            self._refute(held, usage, worker, effects)

    def _learn_output(self, held: OpenTicket, output_tokens: int, worker: Worker, now_ns: int) -> None:
        """The pace of a worker: of the tokens after the first where that was told of, else of the whole leg."""
        if held.first_token_at_ns is not None:
            worker.learn_output(output_tokens - 1, (now_ns - held.first_token_at_ns) / NS_PER_MS)
        elif held.ticket.term == self.term:  # the grant's time of an earlier term is on another clock
            worker.learn_output(output_tokens, (now_ns - held.ticket.granted_at_ns) / NS_PER_MS)

    def _note_map(self, held: OpenTicket, worker: Worker) -> None:
        """Remember what the map alone promises, and as of which batch."""
        request = held.queued.request
        if not held.ticket.predicted_cached_tokens or not worker.spec.sends_events:
            return
        position = self.presence.map_position(worker.spec.worker_id)
        if position is None or position.epoch != worker.spec.epoch:
            return
        usable = usable_blocks(request.prompt_tokens, worker.spec.block_size_tokens)
        blocks = self.presence.depth_map_only(worker.spec.worker_id, request.block_keys)
        if blocks:
            held.map_cached_blocks = min(blocks, usable)
            held.map_position = (position.epoch, position.seq)

    def _refute(self, held: OpenTicket, usage: Usage, worker: Worker | None, effects: list[Effect]) -> None:
        if held.map_position is None or worker is None or not usage.cached_known:
            return
        found_blocks = usage.cached_tokens // worker.spec.block_size_tokens
        if found_blocks < held.map_cached_blocks and usage.prompt_tokens == held.ticket.prompt_tokens:
            epoch, seq = held.map_position
            keys = tuple(held.queued.request.block_keys[found_blocks : held.map_cached_blocks])
            effects.append(Refute(KeysRefuted(worker.spec.worker_id, epoch, seq, keys)))

    def _overtake(self, user: User, queued: Queued) -> None:
        """Count those of its own user that a request passes; what returns after a loss passes nobody."""
        if queued.leg > 1:
            return
        for other in user.heads(self.config.requests_considered_max):
            if other is queued:
                return
            other.overtaken += 1

    def _attained(self, held: OpenTicket, outcome: LegOutcome, usage: Usage | None) -> float:
        """What a leg pays for; unknown usage keeps what is booked, which is never less than what was told of."""
        if outcome is LegOutcome.WORKER_LOST:
            return 0.0
        return held.booked if usage is None else held.cost_of(usage, self.config.cost)
