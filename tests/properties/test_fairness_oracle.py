"""The oracle is tested too: each fault made by hand, one that simpler schedulers really have, must be caught."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from tests.properties.adversary import Adversary, Unkindness
from tests.properties.clock_book import Broken

from evenhand.core.facts import CostWeights, LegOutcome
from evenhand.core.fair_queue import FairQueue
from evenhand.core.fitting import Fitting
from evenhand.core.legs import Legs
from evenhand.core.placement import Placement
from evenhand.core.steps import LegEnded
from evenhand.core.tenant import Tenant
from evenhand.core.worker import Worker

Patch = pytest.MonkeyPatch

SEEDS = 40
"""Runs in which a fault must be caught at least once."""


def v_may_fall(patch: Patch) -> None:
    """A worker's virtual time follows the least clock, down as well as up."""

    def raise_virtual_times(self: FairQueue[Any]) -> None:
        for worker_id, worker in self._members.workers.items():
            least = self.lo(worker)
            if least is not None:
                self._own[worker_id] = least

    patch.setattr(FairQueue, "_raise_virtual_times", raise_virtual_times)


def no_lift(patch: Patch) -> None:
    """Who comes back finds its clock as it left it, and has saved up what it did not use."""
    patch.setattr(FairQueue, "_virtual_time_reached", lambda self, reach, before: 0.0)


def lift_to_least_of_all(patch: Patch) -> None:
    """Who comes back starts at the least clock of all that wait, whatever the workers have seen."""
    patch.setattr(
        FairQueue, "_virtual_time_reached", lambda self, reach, before: self._order[0][0] if self._order else 0.0
    )


def clock_starts_over(patch: Patch) -> None:
    """Who comes back starts at nothing."""
    place = FairQueue.place

    def place_at_nothing(self: FairQueue, tenant: Tenant, v: float, reach_tokens: int | None) -> None:
        place(self, tenant, v if tenant.in_a or reach_tokens is None else 0.0, reach_tokens)

    patch.setattr(FairQueue, "place", place_at_nothing)
    patch.setattr(FairQueue, "_virtual_time_reached", lambda self, reach, before: 0.0)


def settled_twice(patch: Patch) -> None:
    """The correction of a leg is booked again."""
    end = Legs.end

    def end_twice(self: Legs, held: Any, outcome: Any, usage: Any, now_ns: int, *rest: Any) -> None:
        end(self, held, outcome, usage, now_ns, *rest)
        (told,) = [each for each in rest[1] if isinstance(each, LegEnded) and each.ticket is held.ticket]
        correction = told.correction if outcome is LegOutcome.SETTLED else 0.0
        self.move(held.user, now_ns, correction, held)

    patch.setattr(Legs, "end", end_twice)


def cached_is_free(patch: Patch) -> None:
    """Cached tokens cost nothing: whoever is all cached takes every turn."""
    init = Legs.__init__

    def init_free(self: Legs, **parts: Any) -> None:
        init(self, **(parts | {"config": replace(parts["config"], cost=CostWeights(cached=0.0))}))

    patch.setattr(Legs, "__init__", init_free)


def lost_leg_keeps_its_charge(patch: Patch) -> None:
    attained = Legs._attained

    def keep(self: Legs, held: Any, outcome: LegOutcome, usage: Any) -> float:
        return held.booked if outcome is LegOutcome.WORKER_LOST else attained(self, held, outcome, usage)

    patch.setattr(Legs, "_attained", keep)


def limited_tenant_stays_in_a(patch: Patch) -> None:
    """A tenant at its own limit holds lo down for all."""

    def may_run(self: Tenant) -> bool:
        return bool(self.queue)

    blocks_allowed = Fitting.blocks_allowed

    def blocks_inside_limit(self: Fitting, tenant: Tenant, worker: Worker) -> int:
        limit = tenant.spec.concurrency_max
        return blocks_allowed(self, tenant, worker) if limit == 0 or len(tenant.granted) < limit else 0

    know = Placement._know

    def know_nothing_plain(self: Placement, tenant: Tenant, worker: Worker) -> Any:
        best = know(self, tenant, worker)
        best.plain = False
        return best

    patch.setattr(Tenant, "may_run", property(may_run))
    patch.setattr(Fitting, "blocks_allowed", blocks_inside_limit)
    patch.setattr(Placement, "_know", know_nothing_plain)


def current_weight_instead_of_the_frozen_one(patch: Patch) -> None:
    """A correction is divided by the weight of the day, not by the ticket's."""
    end = Legs.end

    def end_at_current_weight(self: Legs, held: Any, *rest: Any) -> None:
        tenant = self.outstanding.tenants[held.ticket.tenant_id]
        held.ticket = replace(held.ticket, weight=tenant.spec.weight)
        end(self, held, *rest)

    patch.setattr(Legs, "end", end_at_current_weight)


def window_without_end(patch: Patch) -> None:
    """Affinity may reach as far as it likes."""
    first_inside = FairQueue.first_inside

    def first_of_all(self: FairQueue[Any], worker: Worker, window: float, count: int) -> Any:
        return first_inside(self, worker, 1e18, count)

    patch.setattr(FairQueue, "first_inside", first_of_all)


def declined_means_idle(patch: Patch) -> None:
    """Where every pair is declined, the worker stays idle."""
    best = Placement._best

    def best_or_none(self: Placement, now_ns: int, *only: Any) -> Any:
        choice = best(self, now_ns, *only)
        return None if choice is not None and choice.declined else choice

    patch.setattr(Placement, "_best", best_or_none)


def usage_ignored(patch: Patch) -> None:
    """What a running leg reports is not booked until it ends."""
    patch.setattr(Legs, "use", lambda self, held, usage, now_ns: None)


FAULTS: dict[Callable[[Patch], None], tuple[Unkindness, tuple[str, ...]]] = {
    v_may_fall: (Unkindness(one_sided=True), ("P2", "P3")),
    no_lift: (Unkindness(), ("P2", "P3")),
    lift_to_least_of_all: (Unkindness(), ("P2", "P3")),
    clock_starts_over: (Unkindness(), ("P2", "P3", "P5")),
    settled_twice: (Unkindness(), ("P5",)),
    cached_is_free: (Unkindness(), ("P5",)),
    lost_leg_keeps_its_charge: (Unkindness(worker_loss=True), ("P5",)),
    limited_tenant_stays_in_a: (Unkindness(limits=True), ("P6", "A")),
    current_weight_instead_of_the_frozen_one: (Unkindness(weight_changes=True), ("P5", "P2")),
    window_without_end: (Unkindness(), ("P1", "P2", "P3")),
    declined_means_idle: (Unkindness(), ("P6",)),
    usage_ignored: (Unkindness(), ("P5",)),
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_made_by_hand_is_caught(fault: Callable[[Patch], None], monkeypatch: Patch) -> None:
    unkindness, names = FAULTS[fault]
    fault(monkeypatch)
    for seed in range(SEEDS):
        caught = property_broken(seed, unkindness)
        if caught is not None:
            assert caught in names
            return
    pytest.fail(f"{fault.__name__} went unseen in {SEEDS} runs")


def property_broken(seed: int, unkindness: Unkindness) -> str | None:
    """Name of the property that the run of this seed breaks, if any."""
    try:
        Adversary(seed, unkindness, exact=False).run()
    except Broken as broken:
        return str(broken).split(":")[0]
    return None
