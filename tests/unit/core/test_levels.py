"""Bands, tenants and users: the same rule at each level, and changes of it while the pool runs."""

from collections import Counter, defaultdict

import pytest
from tests.unit.core.scheduler_world import World, chain, config, ticket, tickets

from evenhand.core.errors import InvalidInput
from evenhand.core.facts import TenantSpec, Ticket, Usage
from evenhand.core.ids import TenantId
from evenhand.core.steps import BandsChanged, Granted, TenantChanged
from evenhand.core.tenant import USERS_AT_REST_MAX

LONG_MS = 10**9
BANDS = (("default", 1.0), ("gold", 3.0))


def pool(slots: int = 4, **changes: object) -> World:
    settings = {"worker_stale_after_ms": LONG_MS, "worker_lost_after_ms": LONG_MS, "bands": BANDS, **changes}
    world = World(config(**settings))
    world.workers("w1", slots=slots, kv_blocks=100_000)
    return world


class Crowd:
    """Senders that always have twelve requests waiting or running."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.running: list[Ticket] = []
        self.senders: dict[str, tuple[str, str]] = {}

    def ask(self, sender: tuple[str, str]) -> None:
        effects = self.world.submit(sender[0], user=sender[1], prompt=100)
        self.senders[f"r{self.world.count}"] = sender
        self.running.extend(tickets(effects))

    def serve(self, senders: list[tuple[str, str]], rounds: int) -> dict[tuple[str, str], float]:
        """Cost by (tenant, user) of so many requests served."""
        cost: defaultdict[tuple[str, str], float] = defaultdict(float)
        open_now = Counter(self.senders.values())
        for sender in senders:
            for _ in range(12 - open_now[sender]):
                self.ask(sender)
        for _ in range(rounds):
            done = self.running.pop(0)
            sender = self.senders.pop(done.request_id)
            cost[sender] += done.charge
            self.running.extend(tickets(self.world.settle(done, after_ms=1.0)))
            if sender in senders:
                self.ask(sender)
        return cost


def served(world: World, senders: list[tuple[str, str]], rounds: int) -> dict[tuple[str, str], float]:
    return Crowd(world).serve(senders, rounds)


def test_bands_share_by_weight_however_many_tenants_stand_in_them() -> None:
    world = pool()
    world.tenants("a", "b", "c", "d")
    world.tenants("rich", band="gold")
    cost = served(world, [("a", ""), ("b", ""), ("c", ""), ("d", ""), ("rich", "")], 800)
    total = sum(cost.values())
    assert cost["rich", ""] / total == pytest.approx(0.75, abs=0.03)
    assert [cost[name, ""] / total for name in "abcd"] == pytest.approx([0.0625] * 4, abs=0.02)


def test_no_band_comes_first() -> None:
    world = pool(bands=(("default", 1.0), ("gold", 100.0)))
    world.tenants("poor")
    world.tenants("rich", band="gold")
    cost = served(world, [("poor", ""), ("rich", "")], 1_500)
    assert cost["poor", ""] / sum(cost.values()) == pytest.approx(1 / 101, abs=0.005)


def test_users_share_what_their_tenant_gets_by_weight() -> None:
    world = pool()
    world.tenants("a", user_weights=(("chief", 2.0),))
    world.tenants("b")
    cost = served(world, [("a", "chief"), ("a", "one"), ("a", "two"), ("b", "")], 800)
    total = sum(cost.values())
    assert cost["b", ""] / total == pytest.approx(0.5, abs=0.03)
    assert cost["a", "chief"] / total == pytest.approx(0.25, abs=0.03)
    assert cost["a", "one"] == pytest.approx(cost["a", "two"], rel=0.1)


def test_a_user_that_comes_back_has_saved_nothing_up() -> None:
    world = pool(slots=1)
    world.tenants("a")
    crowd = Crowd(world)
    crowd.serve([("a", "busy"), ("a", "rests")], 4)
    crowd.serve([("a", "busy")], 60)
    cost = crowd.serve([("a", "busy"), ("a", "rests")], 60)
    assert cost["a", "rests"] == pytest.approx(cost["a", "busy"], rel=0.2)


def test_weights_of_bands_and_users_change_while_the_pool_runs() -> None:
    world = pool()
    world.tenants("a", "b")
    world.tenants("rich", band="gold")
    senders = [("a", "one"), ("a", "two"), ("b", ""), ("rich", "")]
    crowd = Crowd(world)
    crowd.serve(senders, 200)
    world.step(BandsChanged((("default", 1.0), ("gold", 1.0), ("silver", 1.0))))
    world.tenants("a", user_weights=(("one", 3.0),))
    cost = crowd.serve(senders, 800)
    total = sum(cost.values())
    assert cost["rich", ""] / total == pytest.approx(0.5, abs=0.06)
    assert cost["a", "one"] / (cost["a", "one"] + cost["a", "two"]) == pytest.approx(0.75, abs=0.06)


@pytest.mark.parametrize(
    ("bands", "sentence"),
    [
        ((("gold", 3.0),), "Band default cannot go while 1 tenants stand in it."),
        ((("default", 0.0),), "Band default has weight 0.0; it must be 0.01 to"),
        ((("default", 1.0), ("default", 2.0)), "Band default is named twice."),
        ((), "A pool has 1 to 64 bands, not 0."),
    ],
)
def test_impossible_bands_are_refused_and_change_nothing(
    bands: tuple[tuple[str, float], ...], sentence: str
) -> None:
    world = pool()
    world.tenants("a")
    before = world.scheduler.status(0)
    with pytest.raises(InvalidInput, match=sentence):
        world.step(BandsChanged(bands))
    assert world.scheduler.status(0) == before


def test_an_unknown_band_is_named_and_changes_nothing() -> None:
    world = pool()
    world.tenants("a")
    before = world.scheduler.status(0)
    for name in ("a", "b"):
        with pytest.raises(InvalidInput, match=f"Tenant {name} is in band lead, which the pool does not have"):
            world.step(TenantChanged(TenantSpec(TenantId(name), weight=9.0, band="lead")))
    assert world.scheduler.status(0) == before


def test_a_tenant_enters_another_band_as_a_newcomer() -> None:
    world = pool(slots=2)
    world.tenants("a", "b")
    world.tenants("rich", "richer", band="gold")
    served(world, [("a", ""), ("b", ""), ("rich", ""), ("richer", "")], 100)
    assert world.v("rich") > world.v("a") > 0
    world.tenants("a", band="gold")
    there = world.scheduler._legs.fair.bands["gold"].tenants
    assert world.v("a") == there.virtual_time_min > 0
    assert [t.band for t in world.scheduler.status(0).tenants if t.tenant_id == "a"] == ["gold"]


def test_what_was_charged_in_the_old_band_is_corrected_there() -> None:
    world = pool(slots=2)
    world.tenants("a")
    world.tenants("rich", band="gold")
    held = ticket(world.submit("a", prompt=1_000, output=500))
    world.tenants("a", band="gold")
    bands = {band.name: band.virtual_time for band in world.scheduler.status(0).bands}
    world.settle(held, Usage(1_000, 0, 1))
    after = {band.name: band.virtual_time for band in world.scheduler.status(0).bands}
    assert world.v("a") == 0.0
    assert after["gold"] == bands["gold"]
    assert after["default"] == 1_002.0


def test_a_decision_tells_of_each_level() -> None:
    world = pool(slots=1)
    world.tenants("a", "b")
    world.tenants("rich", band="gold", weight=2.0)
    running = ticket(world.submit("a", user="one"))
    for name, user in (("a", "one"), ("a", "two"), ("b", ""), ("rich", "")):
        world.submit(name, user=user)
    (granted,) = [e for e in world.settle(running) if isinstance(e, Granted)]
    bands, tenants, users = granted.decision.levels
    assert (granted.ticket.tenant_id, granted.ticket.band, granted.ticket.band_weight) == ("rich", "gold", 3.0)
    assert (bands.considered, bands.weight, tenants.weight, users.weight) == (2, 3.0, 2.0, 1.0)
    assert bands.virtual_time == bands.lo > 0.0  # lifted to the band that was there
    assert all(level.window > 0.0 for level in (bands, tenants, users))
    assert granted.decision.window == tenants.window


def test_what_affinity_wanted_is_told_without_a_name() -> None:
    world = pool(slots=1, window_fixed=10.0)
    world.tenants("hot", "cold", "late")
    keys = chain(1, 40)
    world.store("w1", keys)
    running = ticket(world.submit("cold", chain(2, 40)))
    for tenant in ("hot", "hot", "late"):
        world.submit(tenant, keys if tenant == "hot" else chain(3, 40))
    running = ticket(world.settle(running))
    assert running.tenant_id == "hot"
    (granted,) = [e for e in world.settle(running) if isinstance(e, Granted)]
    wish = granted.decision.affinity
    assert granted.ticket.tenant_id == "late"
    assert granted.decision.fairness_overrode_affinity
    assert wish is not None
    assert (wish.worker_id, wish.tenant_ordinal, wish.cached_tokens) == ("w1", 1, 640)
    assert "hot" not in repr(granted.decision)


def test_clocks_of_bands_and_users_survive_the_process() -> None:
    world = pool(slots=2)
    world.tenants("a", "b")
    world.tenants("rich", band="gold")
    senders = [("a", "one"), ("a", "two"), ("b", ""), ("rich", "x")]
    served(world, senders, 50)
    heir = World(config(bands=(("default", 5.0),)), term=2)
    heir.scheduler.restore(world.scheduler.checkpoint(), 0)
    heir.workers("w1", slots=2, kv_blocks=100_000)
    before, after = world.scheduler.status(0), heir.scheduler.status(0)
    assert [(b.name, b.virtual_time) for b in after.bands] == [(b.name, b.virtual_time) for b in before.bands]
    assert [b.weight for b in after.bands] == [5.0, 3.0]
    clocks = [
        {name: user.v for name, user in w.scheduler._legs.outstanding.tenants[TenantId("a")].users_known.items()}
        for w in (world, heir)
    ]
    least = world.scheduler._legs.outstanding.tenants[TenantId("a")].users.virtual_time_min
    assert clocks[1] == {name: v for name, v in clocks[0].items() if v > least}
    assert clocks[1]
    assert world.scheduler._legs.fair.pool.virtual_time_min == heir.scheduler._legs.fair.pool.virtual_time_min


def test_users_at_rest_are_forgotten_within_a_bound() -> None:
    world = pool()
    world.tenants("a")
    for number in range(3_000):
        for granted in tickets(world.submit("a", user=f"u{number}")):
            world.settle(granted)
    known = world.scheduler._legs.outstanding.tenants[TenantId("a")].users_known
    assert len(known) <= 2 * USERS_AT_REST_MAX


def test_a_band_that_is_idle_costs_the_others_nothing() -> None:
    world = pool()
    world.tenants("a", "b")
    world.tenants("rich", band="gold")
    cost = served(world, [("a", ""), ("b", "")], 200)
    assert cost["a", ""] == pytest.approx(cost["b", ""], rel=0.1)
    assert world.scheduler.status(0).tenants[0].cost_due == pytest.approx(
        world.scheduler.status(0).tenants[1].cost_due, rel=0.1
    )


@pytest.mark.parametrize("weight", [1e300, 1e-300, 0.0, float("nan")])
def test_a_weight_of_which_no_clock_can_be_made_is_refused_by_name(weight: float) -> None:
    world = World()
    with pytest.raises(InvalidInput, match=r"Tenant a has weight .*; it must be 0.01 to 100\."):
        world.tenants("a", weight=weight)
    with pytest.raises(InvalidInput, match=r"User u of tenant a has weight .*; it must be 0.01 to 100\."):
        world.tenants("a", user_weights=(("u", weight),))
