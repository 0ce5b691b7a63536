"""Faults that schedulers of this kind have had, each made by hand here and put into the core, to see it caught.

A fault is a function that patches the core; ``FAULTS`` says what the fault is, in which worlds it must be
caught, and by which properties. ``docs/invariants.md`` lists the same faults with the tests that kill them. Some
faults break no bound of a single step but a promise of another kind, and have a check of their own: those name
none here.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from tests.properties.adversary import Unkindness

from evenhand.core import placement
from evenhand.core.facts import CostWeights, LegOutcome
from evenhand.core.fair_queue import FairChild, FairQueue
from evenhand.core.fair_tree import FairTree
from evenhand.core.fitting import Fitting
from evenhand.core.front import Fronts
from evenhand.core.guarantees import Guarantees
from evenhand.core.heads import Heads
from evenhand.core.held_up import HeldUp
from evenhand.core.keeping import Keeping
from evenhand.core.legs import Legs
from evenhand.core.outstanding import Outstanding
from evenhand.core.pairs import Pairs
from evenhand.core.placement import Placement
from evenhand.core.presence import Presence
from evenhand.core.rooms import Rooms
from evenhand.core.tenant import Tenant
from evenhand.core.tickets import OpenTicket
from evenhand.core.worker import Worker

Patch = pytest.MonkeyPatch
Queue = FairQueue[Any]


# Clocks and lifts


def v_may_fall(patch: Patch) -> None:
    def follow_the_least(self: Queue) -> None:
        for worker_id, worker in self._members.workers.items():
            least = self.lo(worker)
            if least is not None:
                self._own[worker_id] = least

    patch.setattr(FairQueue, "_raise_virtual_times", follow_the_least)


def lift_to_the_least_of_all(patch: Patch) -> None:
    patch.setattr(
        FairQueue, "_virtual_time_reached", lambda self, reach, before: self._order[0][0] if self._order else 0.0
    )


def lift_to_0(patch: Patch) -> None:
    place = FairQueue.place

    def place_at_nothing(self: Queue, child: FairChild, v: float, reach_tokens: int | None) -> None:
        place(self, child, v if child.in_a or reach_tokens is None else 0.0, reach_tokens)

    patch.setattr(FairQueue, "place", place_at_nothing)
    patch.setattr(FairQueue, "_virtual_time_reached", lambda self, reach, before: 0.0)


def no_lift(patch: Patch) -> None:
    patch.setattr(FairQueue, "_virtual_time_reached", lambda self, reach, before: 0.0)


def one_lo_for_all_workers(patch: Patch) -> None:
    inside = FairQueue.first_inside

    def inside_of_all(self: Queue, worker: Worker, window: float, count: int) -> Any:
        return [p for p in inside(self, worker, 1e300, count) if p[0] <= self._order[0][0] + window]

    of = Fronts.of

    def front_or_none(self: Fronts, worker: Worker) -> Any:
        try:
            return of(self, worker)
        except IndexError:  # nobody of a band lies inside that window
            return None

    patch.setattr(FairQueue, "first_inside", inside_of_all)
    patch.setattr(FairQueue, "lo", lambda self, worker: self._order[0][0] if self._order else None)
    patch.setattr(Fronts, "of", front_or_none)


def phi_of_now(patch: Patch) -> None:
    end = Legs.end

    def end_at_the_weight_of_now(self: Legs, held: Any, *rest: Any) -> None:
        tenant = self.outstanding.tenants[held.ticket.tenant_id]
        told, held.ticket = held.ticket, replace(held.ticket, weight=tenant.weight)
        end(self, held, *rest)
        effects = rest[-1]
        effects[:] = [replace(e, ticket=told) if getattr(e, "ticket", None) == held.ticket else e for e in effects]

    patch.setattr(Legs, "end", end_at_the_weight_of_now)


def window_in_raw_v(patch: Patch) -> None:
    """The window is taken as cost, not as cost ÷ φ: who weighs little reaches far."""

    def inside(self: Queue, worker: Worker, window: float, count: int) -> Any:
        reached = [p for p in self._order if p[2].reach_tokens <= worker.capacity_tokens][:count]
        return [p for p in reached if (p[0] - reached[0][0]) * p[2].weight <= window]

    patch.setattr(FairQueue, "first_inside", inside)


def window_without_end(patch: Patch) -> None:
    inside = FairQueue.first_inside
    patch.setattr(FairQueue, "first_inside", lambda self, worker, window, count: inside(self, worker, 1e18, count))


# What a leg pays


def a_lost_leg_keeps_its_charge(patch: Patch) -> None:
    attained = Legs._attained

    def keep(self: Legs, held: Any, outcome: LegOutcome, usage: Any) -> float:
        return float(held.booked) if outcome is LegOutcome.WORKER_LOST else attained(self, held, outcome, usage)

    patch.setattr(Legs, "_attained", keep)


def settle_twice(patch: Patch) -> None:
    end = Legs.end

    def end_twice(self: Legs, held: Any, outcome: LegOutcome, *rest: Any) -> None:
        end(self, held, outcome, *rest)
        correction = next(e.correction for e in reversed(rest[-1]) if hasattr(e, "correction"))
        if outcome is LegOutcome.SETTLED:
            self.move(held.user, rest[1], correction, held)

    patch.setattr(Legs, "end", end_twice)


def settle_never(patch: Patch) -> None:
    """The effects tell of corrections; no clock is corrected."""
    end, move = Legs.end, Legs.move

    def end_without_moving(self: Legs, held: Any, *rest: Any) -> None:
        held.booked, booked = held.booked, held.booked
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(Legs, "move", lambda self, user, now_ns, *_: move(self, user, now_ns))
            end(self, held, *rest)
        held.booked = booked

    patch.setattr(Legs, "end", end_without_moving)


def refund_on_cancel_in_full(patch: Patch) -> None:
    attained = Legs._attained

    def refund(self: Legs, held: Any, outcome: LegOutcome, usage: Any) -> float:
        return 0.0 if outcome is LegOutcome.CANCELLED else attained(self, held, outcome, usage)

    patch.setattr(Legs, "_attained", refund)


def corrections_clipped(patch: Patch) -> None:
    """Nothing is ever given back: an overcharge stays."""
    move = Legs.move

    def move_up(self: Legs, user: Any, now_ns: int, cost: float = 0.0, held: Any = None) -> None:
        move(self, user, now_ns, max(0.0, cost), held)

    patch.setattr(Legs, "move", move_up)


def cached_tokens_free(patch: Patch) -> None:
    init = Legs.__init__

    def init_free(self: Legs, **parts: Any) -> None:
        init(self, **(parts | {"config": replace(parts["config"], cost=CostWeights(cached=0.0))}))

    patch.setattr(Legs, "__init__", init_free)


def usage_ignored(patch: Patch) -> None:
    patch.setattr(Legs, "use", lambda self, held, usage, now_ns: None)


# Guarantees


def guarantee_charged_to_v(patch: Patch) -> None:
    """Whoever a guarantee gave a place outside the window pays for it with its clock."""
    chosen = Placement.choose_guaranteed

    def choose_as_ordinary(self: Placement, *given: Any) -> Any:
        choice = chosen(self, *given)
        if choice is not None:
            choice.guaranteed = False
        return choice

    patch.setattr(Placement, "choose_guaranteed", choose_as_ordinary)


def guarantee_without_end(patch: Patch) -> None:
    """What it gets is not counted against its guarantee."""
    patch.setattr(Guarantees, "charge", lambda self, tenant, held: None)


def a_full_engine_gets_more(patch: Patch) -> None:
    """What an engine says of its KV closes no worker."""
    patch.setattr(Rooms, "is_engine_full", lambda _self, _worker: False)


def a_full_engine_stays_closed(patch: Patch) -> None:
    """Once an engine has said that it is full, nothing that it says is heard."""
    told = Rooms.told_load

    def told_once(self: Rooms, worker: Worker, load: Any, now_ns: int) -> None:
        if not self.is_engine_full(worker):
            told(self, worker, load, now_ns)

    patch.setattr(Rooms, "told_load", told_once)


def guarantee_lost_by_its_turn(patch: Patch) -> None:
    """What a tenant has by its turn is held against its guarantee, however much it is."""

    def pay(self: Guarantees, tenant: Tenant, held: OpenTicket, by: float) -> None:
        held.guarantee_moved += by
        self._move(tenant, tenant.guarantee_tag + by)

    patch.setattr(Guarantees, "_pay", pay)


def guarantee_undone(patch: Patch) -> None:
    """A leg that had its turn gives back all that it did not cost, whatever it has moved the tag."""

    def correct(self: Guarantees, tenant: Tenant, held: OpenTicket, cost: float) -> None:
        if held.guarantee_share > 0.0 and cost:
            self._move(tenant, tenant.guarantee_tag + cost / held.guarantee_share)

    patch.setattr(Guarantees, "correct", correct)


# Who may be looked at


def a_limited_tenant_stays_in_a(patch: Patch) -> None:
    patch.setattr(Tenant, "may_run", property(lambda self: bool(self.queue)))
    allowed = Fitting.blocks_allowed

    def blocks_inside_limit(self: Fitting, tenant: Tenant, worker: Worker) -> int:
        limit = tenant.spec.concurrency_max
        return allowed(self, tenant, worker) if limit == 0 or len(tenant.granted) < limit else 0

    know = Heads.know

    def know_nothing_plain(self: Heads, *given: Any) -> Any:
        best = know(self, *given)
        best.plain = False
        return best

    patch.setattr(Fitting, "blocks_allowed", blocks_inside_limit)
    patch.setattr(Heads, "know", know_nothing_plain)


def first_k_only(patch: Patch) -> None:
    patch.setattr(Fronts, "sticky", lambda self, front, worker, tight: [])


def headroom_for_all(patch: Patch) -> None:
    patch.setattr(Outstanding, "per_weight", lambda self, band: math.inf)


def overtake_cap_off(patch: Patch) -> None:
    patch.setattr(Legs, "_overtake", lambda self, user, queued: None)


def declined_means_idle(patch: Patch) -> None:
    best = Placement._best

    def best_or_none(self: Placement, *given: Any) -> Any:
        choice = best(self, *given)
        return None if choice is not None and choice.declined else choice

    patch.setattr(Placement, "_best", best_or_none)


def tie_by_set_order(patch: Patch) -> None:
    """Among equal clocks whose id happens to hash lower comes first."""
    inside = FairQueue.first_inside

    def by_hash(self: Queue, worker: Worker, window: float, count: int) -> Any:
        return sorted(inside(self, worker, window, 1_000), key=lambda place: (place[0], hash(place[1])))[:count]

    patch.setattr(FairQueue, "first_inside", by_hash)


# Who is held up


def backfill_although_the_most_behind_fits(patch: Patch) -> None:
    asked, beside, best = HeldUp.user, Placement._best_beside, Placement._best
    first: list[Any] = []

    def beside_the_first(self: Placement, now_ns: int) -> Any:
        first[:] = [self._fair.first()]
        return beside(self, now_ns)

    def best_beside(self: Placement, now_ns: int, only: Any = None, held_up: Any = None, *given: Any) -> Any:
        choice = best(self, now_ns, only, held_up, *given)
        if choice is None or only is not None or held_up is not None:
            return choice
        self._seen = None
        return self._best_beside(now_ns) or choice

    patch.setattr(HeldUp, "user", lambda self, user: user in first or asked(self, user))
    patch.setattr(Placement, "_best_beside", beside_the_first)
    patch.setattr(Placement, "_best", best_beside)


def headroom_counts_at_once(patch: Patch) -> None:
    """Whoever lacks headroom alone is passed without delay."""

    def runs_at(self: Pairs, user: Any, worker: Worker, waiting_too: bool, now_ns: int) -> bool:
        head, blocks_max = self._heads.at(user, worker), self._fitting.blocks_allowed(user.tenant, worker)
        return self._runs_within(head, user, worker, blocks_max, waiting_too, now_ns)

    patch.setattr(Pairs, "runs_at", runs_at)


def waiting_counts_at_any_worker(patch: Patch) -> None:
    """Who waits for a warmer worker is looked past, however much the others have to do."""
    patch.setattr(placement, "IDLE_LOAD_MAX", 1.0)


def backfill_to_the_kept_worker(patch: Patch) -> None:
    beside = Placement._best_beside

    def beside_with_all(self: Placement, now_ns: int) -> Any:
        kept, self.keeping.kept = self.keeping.kept, None
        choice = beside(self, now_ns)
        self.keeping.kept = kept
        return choice

    patch.setattr(Placement, "_best_beside", beside_with_all)


def who_is_passed_keeps_its_claim(patch: Patch) -> None:
    patch.setattr(FairTree, "lift_passed", lambda self, user, worker, cost_rate_per_s: None)


def who_is_passed_is_lifted_level(patch: Patch) -> None:
    """To the clock of whoever passes it, and not to T behind it."""

    def lift_level(self: FairTree, user: Any, worker: Worker, cost_rate_per_s: float) -> None:
        self.pool.lift_behind(worker, user.tenant.band.v)
        user.tenant.band.tenants.lift_behind(worker, user.tenant.v)
        user.tenant.users.lift_behind(worker, user.v)

    patch.setattr(FairTree, "lift_passed", lift_level)


def who_is_not_passed_is_lifted(patch: Patch) -> None:
    """Also whoever does not reach the worker, and may have a use for others."""

    def lift_all(self: Queue, worker: Worker, v_least: float) -> None:
        for v, _, child in tuple(self.in_order()):
            if v < v_least:
                self.place(child, v_least, child.reach_tokens)

    patch.setattr(FairQueue, "lift_behind", lift_all)


def kept_for_whoever_is_first(patch: Patch) -> None:
    """The kept worker is given up when somebody else becomes the most behind."""
    look = Keeping.look

    def look_at_the_first(self: Keeping, now_ns: int) -> None:
        if self.kept is not None and self.kept.user is not self._fair.first():
            self.kept = None
        look(self, now_ns)

    patch.setattr(Keeping, "look", look_at_the_first)


def backfilled_is_not_told(patch: Patch) -> None:
    beside = Placement._best_beside

    def beside_as_ordinary(self: Placement, now_ns: int) -> Any:
        choice = beside(self, now_ns)
        if choice is not None:
            choice.backfilled = False
        return choice

    patch.setattr(Placement, "_best_beside", beside_as_ordinary)


def nobody_looks_past_the_held_up(patch: Patch) -> None:
    patch.setattr(Placement, "_best_beside", lambda self, now_ns: None)


# What is left behind


def presumed_keys_never_dropped(patch: Patch) -> None:
    patch.setattr(Presence, "ticket_ended", lambda self, ticket_id, outcome, now_ns: None)


@dataclass(frozen=True)
class Fault:
    """``unkindness``: worlds in which it shows; ``names``: the properties one of which it must break."""

    install: Callable[[Patch], None]
    sentence: str
    unkindness: Unkindness
    names: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.install.__name__


P = ("P1", "P2", "P3", "P4")
PLAIN = Unkindness()
HELD_UP = Unkindness(held_up=True)
LOADED = Unkindness(engine_loads=True)
PROMISED = Unkindness(guarantees=True, weight_changes=True)
FAULTS: tuple[Fault, ...] = (
    Fault(v_may_fall, "V may fall", PLAIN, P),
    Fault(lift_to_the_least_of_all, "lift to the minimum of all queued", PLAIN, P),
    Fault(lift_to_0, "lift to 0", PLAIN, (*P, "P5")),
    Fault(no_lift, "no lift", PLAIN, P),
    Fault(one_lo_for_all_workers, "one lo for all workers", Unkindness(worker_sizes=True), (*P, "P6")),
    Fault(a_lost_leg_keeps_its_charge, "a lost leg keeps its charge", Unkindness(worker_loss=True), ("P5",)),
    Fault(settle_twice, "settle twice", PLAIN, ("P5", *P)),
    Fault(settle_never, "settle never", PLAIN, ("P5", *P)),
    Fault(refund_on_cancel_in_full, "refund on cancel in full", Unkindness(cancels=True), ("P5",)),
    Fault(
        guarantee_charged_to_v,
        "a guarantee charged to v",
        PROMISED,
        ("P1",),
    ),
    Fault(phi_of_now, "φ of now instead of the ticket's", Unkindness(weight_changes=True), ("P5", *P)),
    Fault(window_in_raw_v, "window in raw v for unequal weights", Unkindness(weight_changes=True), (*P, "P6")),
    Fault(first_k_only, "first K only, no sticky set", PLAIN, ()),
    Fault(tie_by_set_order, "ties by the order of a set", PLAIN, ()),
    Fault(a_limited_tenant_stays_in_a, "a limited tenant stays in A", Unkindness(limits=True), ("P6", "A", "P5")),
    Fault(corrections_clipped, "corrections clipped", PLAIN, ("P5", *P)),
    Fault(presumed_keys_never_dropped, "presumed keys never dropped", PLAIN, ("presence",)),
    Fault(headroom_for_all, "headroom for all", PLAIN, ("headroom",)),
    Fault(overtake_cap_off, "overtake cap off", PLAIN, ("overtaken",)),
    Fault(cached_tokens_free, "cached tokens free", PLAIN, ("P5",)),
    Fault(window_without_end, "a window without end", PLAIN, P),
    Fault(usage_ignored, "usage ignored until the end", PLAIN, ("P5", *P)),
    Fault(declined_means_idle, "declining leaves a worker idle", PLAIN, ("P6",)),
    Fault(
        backfill_although_the_most_behind_fits,
        "backfill although the most behind fits",
        HELD_UP,
        ("held up",),
    ),
    Fault(headroom_counts_at_once, "who lacks headroom alone is passed at once", HELD_UP, ("held up",)),
    Fault(waiting_counts_at_any_worker, "who waits is looked past at any worker", PLAIN, ("held up",)),
    Fault(backfill_to_the_kept_worker, "backfill to the kept worker", HELD_UP, ("held up",)),
    Fault(who_is_passed_keeps_its_claim, "who is passed keeps its claim", HELD_UP, ("P5", *P)),
    Fault(who_is_passed_is_lifted_level, "who is passed is lifted level", HELD_UP, ("P5",)),
    Fault(
        who_is_not_passed_is_lifted,
        "who does not reach the worker is lifted, too",
        Unkindness(held_up=True, worker_sizes=True),
        ("P5",),
    ),
    Fault(kept_for_whoever_is_first, "the kept worker is given up when the first changes", HELD_UP, ("kept",)),
    Fault(backfilled_is_not_told, "what is backfilled is not told", HELD_UP, ("P1",)),
    Fault(nobody_looks_past_the_held_up, "nobody looks past those held up", HELD_UP, ("P6",)),
    Fault(
        guarantee_without_end,
        "a guarantee beyond its rate",
        PROMISED,
        ("guarantee", "headroom"),
    ),
    Fault(a_full_engine_gets_more, "a full engine gets more", LOADED, ("engine", "P6")),
    Fault(a_full_engine_stays_closed, "a full engine stays closed", LOADED, ("P6",)),
    Fault(guarantee_lost_by_its_turn, "a guarantee lost by having had one's turn", PROMISED, ("guarantee",)),
    Fault(guarantee_undone, "a guarantee's leg undone by another's refund", PROMISED, ("guarantee", "headroom")),
)
BY_NAME = {fault.name: fault for fault in FAULTS}
