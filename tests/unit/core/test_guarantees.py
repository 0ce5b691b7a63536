"""Guaranteed shares: what they give, what they do not take, and how they are booked."""

from collections.abc import Sequence

import pytest
from tests.unit.core.scheduler_world import MS, World, config, ended, ticket, tickets

from evenhand.core.errors import InvalidInput
from evenhand.core.facts import ChoiceReason, LegOutcome, TenantSpec, Ticket, Usage
from evenhand.core.ids import TenantId
from evenhand.core.status import TenantStatus
from evenhand.core.steps import Effect, Granted, Settle, TenantChanged

LONG_MS = 10**9
LEG_MS = 100.0


def pool(slots: int = 4, **changes: object) -> World:
    settings = {"worker_stale_after_ms": LONG_MS, "worker_lost_after_ms": LONG_MS, "window_fixed": 50.0, **changes}
    world = World(config(**settings))
    world.workers("w1", slots=slots, kv_blocks=100_000)
    return world


def status(world: World, tenant: str) -> TenantStatus:
    return next(t for t in world.scheduler.status(world.now_ns).tenants if t.tenant_id == tenant)


class Steady:
    """Backlogged tenants on a pool whose legs all take the same time, so that it delivers a steady rate."""

    def __init__(self, world: World, tenants: Sequence[str], depth: int = 12) -> None:
        self.world = world
        self.running: list[Ticket] = []
        self.granted: list[Granted] = []
        for tenant in tenants:
            for _ in range(depth):
                self.take(world.submit(tenant, prompt=100))

    def take(self, effects: Sequence[Effect]) -> None:
        self.running += tickets(effects)
        self.granted += [effect for effect in effects if isinstance(effect, Granted)]

    def run(self, rounds: int) -> dict[str, float]:
        cost: dict[str, float] = {}
        for _ in range(rounds):
            done = self.running.pop(0)
            cost[done.tenant_id] = cost.get(done.tenant_id, 0.0) + done.charge
            self.take(self.world.settle(done, after_ms=LEG_MS / 4))
            self.take(self.world.submit(done.tenant_id, prompt=100))
        total = sum(cost.values())
        return {name: part / total for name, part in cost.items()}


def test_a_guarantee_holds_whatever_the_weights_are() -> None:
    world = pool()
    world.tenants("sure", weight=0.01, guaranteed_share=0.4)
    world.tenants("a", "b")
    crowd = Steady(world, ["sure", "a", "b"])
    crowd.run(1_500)
    shares = crowd.run(1_000)
    assert shares["sure"] == pytest.approx(0.4, abs=0.03)
    assert shares["a"] == pytest.approx(shares["b"], abs=0.03)
    assert {g.decision.reason for g in crowd.granted if g.ticket.guaranteed} == {ChoiceReason.GUARANTEE}
    assert all(g.decision.guaranteed is g.ticket.guaranteed for g in crowd.granted)


def test_who_gets_its_guarantee_by_weight_needs_no_place_of_its_own() -> None:
    world = pool()
    world.tenants("sure", guaranteed_share=0.2)
    world.tenants("a")
    crowd = Steady(world, ["sure", "a"])
    shares = crowd.run(1_000)
    assert shares["sure"] == pytest.approx(0.5, abs=0.03)
    assert sum(g.ticket.guaranteed for g in crowd.granted) <= 2


def test_the_ledger_moves_no_clock_and_is_corrected_whole() -> None:
    world = pool(slots=1)
    world.tenants("sure", weight=0.01, guaranteed_share=0.5)
    world.tenants("a")
    running = ticket(world.submit("sure"))
    for name in ("a", "sure"):
        world.submit(name)
    running = ticket(world.settle(running, after_ms=5_000))
    assert (running.tenant_id, running.guaranteed) == ("sure", True)
    before, clocks = world.v("sure"), [band.virtual_time for band in world.scheduler.status(0).bands]
    assert status(world, "sure").cost_guaranteed == running.charge
    (end,) = ended(world.settle(running, Usage(running.prompt_tokens, 0, 1)))
    after = status(world, "sure")
    assert after.cost_guaranteed == end.attained == 3.0
    assert world.v("sure") == before
    charged_since = tickets(world.effects)[-1]
    assert charged_since.tenant_id == "a"
    assert [band.virtual_time for band in world.scheduler.status(0).bands] == [clocks[0] + charged_since.charge]


def test_a_lost_leg_gives_the_guarantee_back() -> None:
    world = pool(slots=1)
    world.tenants("sure", weight=0.01, guaranteed_share=0.5)
    world.tenants("a")
    running = ticket(world.submit("sure"))
    for name in ("a", "sure"):
        world.submit(name)
    running = ticket(world.settle(running, after_ms=5_000))
    before = status(world, "sure").guarantee_behind_ms
    world.step(Settle(running.ticket_id, None, LegOutcome.WORKER_LOST))
    again = tickets(world.effects)[-1]
    assert (again.request_id, again.leg, again.guaranteed) == (running.request_id, 2, True)
    assert status(world, "sure").guarantee_behind_ms == pytest.approx(before)
    assert status(world, "sure").cost_guaranteed == again.charge


@pytest.mark.parametrize(("burst_ms", "at_least", "at_most"), [(0.0, 0, 3), (3_000.0, 10, 40)])
def test_what_was_not_asked_for_is_kept_as_long_as_the_burst(burst_ms: float, at_least: int, at_most: int) -> None:
    world = pool(guarantee_burst_ms=burst_ms)
    world.tenants("sure", weight=0.01, guaranteed_share=0.3)
    world.tenants("a")
    crowd = Steady(world, ["a"])
    crowd.run(1_000)
    count = len(crowd.granted)
    for _ in range(50):
        crowd.take(world.submit("sure", prompt=100))
    crowd.run(12)
    given = sum(g.ticket.guaranteed for g in crowd.granted[count:])
    assert min(at_least, 10) <= given <= at_most


def test_guarantees_that_sum_to_more_than_may_be_are_scaled_down() -> None:
    world = pool(guaranteed_share_sum_max=0.6)
    world.tenants("one", "two", weight=0.01, guaranteed_share=0.9)
    world.tenants("a")
    crowd = Steady(world, ["one", "two", "a"])
    crowd.run(1_500)
    shares = crowd.run(1_000)
    assert shares["one"] == pytest.approx(0.3, abs=0.03)
    assert shares["two"] == pytest.approx(0.3, abs=0.03)
    assert shares["a"] == pytest.approx(0.4, abs=0.04)


def test_a_guarantee_comes_and_goes_while_the_pool_runs() -> None:
    world = pool()
    world.tenants("sure", weight=0.01)
    world.tenants("a")
    crowd = Steady(world, ["sure", "a"])
    assert crowd.run(400).get("sure", 0.0) < 0.05
    world.tenants("sure", weight=0.01, guaranteed_share=0.4)
    crowd.run(400)
    assert crowd.run(800)["sure"] == pytest.approx(0.4, abs=0.04)
    world.tenants("sure", weight=0.01)
    crowd.run(100)
    assert crowd.run(800).get("sure", 0.0) < 0.05


def test_a_guarantee_passes_the_windows_of_bands_too() -> None:
    world = pool(bands=(("default", 100.0), ("low", 1.0)))
    world.tenants("sure", guaranteed_share=0.4, band="low")
    world.tenants("a")
    crowd = Steady(world, ["sure", "a"])
    crowd.run(1_500)
    assert crowd.run(1_000)["sure"] == pytest.approx(0.4, abs=0.03)


def test_tags_and_the_ledger_survive_the_process() -> None:
    world = pool()
    world.tenants("sure", weight=0.01, guaranteed_share=0.4)
    world.tenants("a")
    Steady(world, ["sure", "a"]).run(200)
    heir = World(world.scheduler.config, term=2)
    heir.scheduler.restore(world.scheduler.checkpoint(world.now_ns), 7_000 * MS)
    heir.now_ns = 7_000 * MS
    heir.workers("w1", slots=4, kv_blocks=100_000)
    assert status(heir, "sure").cost_guaranteed == status(world, "sure").cost_guaranteed > 0.0
    assert status(heir, "sure").guarantee_behind_ms == pytest.approx(status(world, "sure").guarantee_behind_ms)


def test_an_impossible_share_is_refused() -> None:
    world = pool()
    with pytest.raises(InvalidInput, match=r"Tenant sure is guaranteed 1\.5 of the pool"):
        world.step(TenantChanged(TenantSpec(TenantId("sure"), guaranteed_share=1.5)))


def test_a_guarantee_takes_headroom_while_it_is_due() -> None:
    """Where others hold all but the headroom, above its share by weight it would get nothing more."""
    world = pool(slots=16, prefill_pending_max_tokens=10**9)
    world.tenants("promised", guaranteed_share=0.5)
    world.tenants("b", "c", "d", "e")
    for tenant in ("b", "c", "d", "e", "promised", "promised", "promised"):
        for _ in range(2):
            ticket(world.submit(tenant, prompt=1_000))
    assert not tickets(world.submit("promised", prompt=1_000)), "two slots are headroom, and it has three shares"
    assert len(tickets(world.tick(10_000))) == 1
