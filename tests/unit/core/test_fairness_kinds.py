"""docs/invariants.md, "Fairness", by kind: small pools driven to a steady state, and what each tenant got."""

from collections import Counter
from collections.abc import Callable

import pytest
from tests.unit.core.scheduler_world import BLOCK, World, chain, config, ended, ticket, tickets

from evenhand.core.facts import SchedulerConfig, Ticket, Usage
from evenhand.core.steps import Effect

CYCLE_MS = 50
"""Between two ends of legs; the window of 750 ms is then small against a run."""

Send = Callable[[], tuple[Effect, ...]]


def steady(**changes: object) -> SchedulerConfig:
    settings = {"prefill_pending_max_tokens": 10**9, "matches_refresh_ms": 0} | changes
    return config(worker_stale_after_ms=10**9, worker_lost_after_ms=10**9, **settings)


def backlogged(world: World, senders: dict[str, Send], cycles: int, true_output: int = 16) -> list[Ticket]:
    """Keep every tenant waiting and let the oldest ticket end each cycle; what was granted meanwhile."""
    running: list[Ticket] = []
    slots = sum(worker.slots for worker in world.scheduler.status(world.now_ns).workers)
    for _ in range(4 + slots):
        for send in senders.values():
            running += tickets(send())
    granted: list[Ticket] = []
    for _ in range(cycles):
        oldest = running.pop(0)
        usage = Usage(oldest.prompt_tokens, oldest.predicted_cached_tokens, true_output)
        for next_ticket in tickets(world.settle(oldest, usage, after_ms=CYCLE_MS)):
            running.append(next_ticket)
            granted.append(next_ticket)
            more = tickets(senders[next_ticket.tenant_id]())
            running += more
            granted += more
    while running:
        running += tickets(world.settle(running.pop(0)))
    return granted


def cost_of(granted: list[Ticket]) -> Counter[str]:
    costs: Counter[str] = Counter()
    for each in granted:
        costs[each.tenant_id] += round(each.charge)
    return costs


def test_all_cached_does_not_take_every_turn() -> None:
    """100 tokens all cached against 100 tokens all uncached: cost decides, with a floor for the cached."""
    world = World(steady())
    world.tenants("cached", "cold")
    world.workers("w1", slots=4)
    hot = chain(1, 6)
    world.store("w1", hot)
    count = iter(range(10, 10**6))
    senders: dict[str, Send] = {
        "cached": lambda: world.submit("cached", hot, prompt=100, output=16),
        "cold": lambda: world.submit("cold", chain(next(count), 6), prompt=100, output=16),
    }
    granted = backlogged(world, senders, 400)
    turns = Counter(str(each.tenant_id) for each in granted)
    costs = cost_of(granted)
    assert costs["cached"] == pytest.approx(costs["cold"], rel=0.1)
    assert 1.5 < turns["cached"] / turns["cold"] < 3.5


def test_uncached_tenants_are_not_starved_by_longest_prefix() -> None:
    world = World(steady())
    world.tenants("hot", "cold")
    world.workers("w1", "w2", slots=2)
    hot = chain(1, 60)
    world.store("w1", hot)
    world.store("w2", hot)
    count = iter(range(10, 10**6))
    senders: dict[str, Send] = {
        "hot": lambda: world.submit("hot", hot),
        "cold": lambda: world.submit("cold", chain(next(count), 60)),
    }
    costs = cost_of(backlogged(world, senders, 300))
    assert costs["cold"] == pytest.approx(costs["hot"], rel=0.15)


def test_turns_are_not_tokens_shares_follow_weighted_cost() -> None:
    world = World(steady())
    world.tenants("heavy", weight=3.0)
    world.tenants("light")
    world.workers("w1", "w2", slots=4)
    senders: dict[str, Send] = {
        "heavy": lambda: world.submit("heavy", prompt=50, output=16),
        "light": lambda: world.submit("light", prompt=800, output=16),
    }
    costs = cost_of(backlogged(world, senders, 800))
    assert costs["heavy"] / costs["light"] == pytest.approx(3.0, rel=0.1)


@pytest.mark.parametrize("spread", [1, 2, 4])
def test_shares_hold_for_the_whole_fleet(spread: int) -> None:
    """4:1 stays 4:1 however many workers a tenant's cache ties it to."""
    world = World(steady())
    world.tenants("four", weight=4.0)
    world.tenants("one")
    names = ("w1", "w2", "w3", "w4")
    world.workers(*names, slots=4)
    for name in names[:spread]:
        world.store(name, chain(1, 20))
    world.store("w4", chain(2, 20))
    senders: dict[str, Send] = {
        "four": lambda: world.submit("four", chain(1, 20)),
        "one": lambda: world.submit("one", chain(2, 20)),
    }
    costs = cost_of(backlogged(world, senders, 900))
    assert costs["four"] / costs["one"] == pytest.approx(4.0, rel=0.15)


def test_the_long_are_not_starved_by_the_short() -> None:
    world = World(steady())
    world.tenants("short", "long")
    world.workers("w1", slots=2)
    senders: dict[str, Send] = {
        "short": lambda: world.submit("short", prompt=20, output=16),
        "long": lambda: world.submit("long", prompt=5_000, output=16),
    }
    costs = cost_of(backlogged(world, senders, 1_500))
    assert costs["long"] == pytest.approx(costs["short"], rel=0.25)


def test_within_a_tenant_the_long_are_not_overtaken_for_ever() -> None:
    world = World(steady(overtakes_max=8))
    world.tenants("a")
    world.workers("w1", slots=1)
    hot = chain(1, 30)
    world.store("w1", hot)
    running = ticket(world.submit("a", hot))
    world.submit("a", chain(2, 300), request_id="long")
    for turn in range(20):
        world.submit("a", hot)
        running = ticket(world.settle(running))
        if running.request_id == "long":
            assert turn <= 8
            return
    pytest.fail("the long request still waits")


def test_an_idle_tenant_saves_nothing_up_and_is_not_punished_later() -> None:
    world = World(steady(window_fixed=0.0))
    world.tenants("busy", "idle")
    world.workers("w1", slots=2)
    ticket(world.submit("idle", prompt=100, output=16))
    senders: dict[str, Send] = {
        "busy": lambda: world.submit("busy", prompt=100, output=16),
        "idle": lambda: world.submit("idle", prompt=100, output=16),
    }
    backlogged(world, {"busy": senders["busy"]}, 200)
    both = cost_of(backlogged(world, senders, 200))
    assert both["busy"] == pytest.approx(both["idle"], rel=0.1)


def test_a_newcomer_waits_no_longer_than_one_residual() -> None:
    """Under a flood of one tenant, another finds a place without waiting for the flood's backlog."""
    world = World(steady())
    world.tenants("flood", "newcomer")
    world.workers("w1", slots=8)
    running = [t for _ in range(200) for t in tickets(world.submit("flood", prompt=400, output=16))]
    assert not tickets(world.submit("newcomer", prompt=400, output=16, request_id="new"))
    granted = [t for n in range(2) for t in tickets(world.settle(running[n], after_ms=10))]
    assert "new" in [t.request_id for t in granted]


def test_under_reported_estimates_buy_nothing() -> None:
    """Who always says "one token" is charged the truth at the end; its lead is bounded by what runs."""
    world = World(steady())
    world.tenants("liar", "honest")
    world.workers("w1", slots=4)
    senders: dict[str, Send] = {
        "liar": lambda: world.submit("liar", prompt=50, output=200, output_tokens_expected=1),
        "honest": lambda: world.submit("honest", prompt=50, output=200, output_tokens_expected=100),
    }
    backlogged(world, senders, 600, true_output=100)
    got = {str(t.tenant_id): t.cost_got for t in world.scheduler.status(world.now_ns).tenants}
    assert got["liar"] == pytest.approx(got["honest"], rel=0.1)


def test_share_got_follows_share_due() -> None:
    world = World(steady())
    world.tenants("a", weight=2.0)
    world.tenants("b")
    world.workers("w1", slots=4)
    senders: dict[str, Send] = {
        "a": lambda: world.submit("a", prompt=100, output=16),
        "b": lambda: world.submit("b", prompt=300, output=16),
    }
    backlogged(world, senders, 600)
    status = world.scheduler.status(world.now_ns)
    for tenant in status.tenants:
        assert tenant.cost_got == pytest.approx(tenant.cost_due, rel=0.05)
    assert sum(t.cost_due for t in status.tenants) == pytest.approx(status.cost_dispatched, rel=0.05)


def test_a_time_scaled_window_shrinks_with_the_number_of_tenants() -> None:
    windows = []
    for count in (1, 10):
        world = World(steady(window_delay_ms=500.0, cost_rate_default_per_s=1_000.0))
        world.workers("w1", slots=1)
        for n in range(count):
            world.tenants(f"t{n}")
            world.submit(f"t{n}")
            world.submit(f"t{n}")
        windows.append(world.scheduler.status(0).window)
    assert windows == [500.0, 50.0]


def test_affinity_inside_the_window_fairness_outside_it() -> None:
    world = World(steady(window_fixed=1_000.0))
    world.tenants("hot", "cold")
    world.workers("w1", slots=1)
    hot = chain(1, 40)
    world.store("w1", hot)
    running = ticket(world.submit("hot", hot, output=100))
    for n in range(30):
        world.submit("hot", hot, output=100)
        world.submit("cold", chain(100 + n, 40), output=100)
    order = []
    for _ in range(20):
        effects = world.settle(running, Usage(running.prompt_tokens, running.predicted_cached_tokens, 100))
        assert ended(effects)
        running = ticket(effects)
        order.append(running.tenant_id)
    assert order[:3] == ["hot"] * 3
    assert "cold" in order
    assert running.prompt_tokens > BLOCK
