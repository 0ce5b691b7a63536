"""Who is asked of those whose guarantee is due: whoever can take nothing stops nobody."""

from collections.abc import Iterator

import pytest
from tests.unit.core.scheduler_world import MS, World, config, ticket, tickets

from evenhand.core.facts import Ticket, Usage, WorkerLoad
from evenhand.core.guarantees import Guarantees
from evenhand.core.ids import TenantId, WorkerId
from evenhand.core.steps import WorkerHeard

LONG_MS = 10**9
LEG_MS = 400
CONSIDERED = 4
SLOTS = 8
ONLY_W0 = (WorkerId("w1"), WorkerId("w2"))


def pool() -> World:
    """Three workers, nine tenants beside the guaranteed one; the first worker's engine is full."""
    world = World(
        config(
            tenants_considered_max=CONSIDERED,
            prefill_pending_max_tokens=10**9,
            worker_stale_after_ms=LONG_MS,
            worker_lost_after_ms=LONG_MS,
            ticket_ttl_ms=10**7,
        )
    )
    world.workers("w0", "w1", "w2", slots=SLOTS)
    world.tenants(*others())
    world.tenants("g", guaranteed_share=0.5)
    fill(world, 1.0)
    return world


def others() -> Iterator[str]:
    return (f"x{index}" for index in range(9))


def fill(world: World, fraction: float) -> None:
    world.step(WorkerHeard(WorkerId("w0"), WorkerLoad(0, 0, fraction, world.now_ns)))


def share_of_g(world: World, grants: int) -> float:
    """What part of the grants it gets while it and the others keep requests waiting; legs take as long."""
    got = 0
    for name in (*others(), "g"):
        for _ in range(10):
            world.submit(name, prompt=500, output=20, user="works")
    running: list[tuple[int, Ticket]] = [
        (world.now_ns + LEG_MS * MS, leg) for leg in tickets(world.effects) if leg.user == "works"
    ]
    for _ in range(grants):
        world.now_ns, done = running.pop(0)
        effects = world.settle(done, Usage(500, 0, 20))
        effects += world.submit(done.tenant_id, prompt=500, output=20, user="works")
        granted = tickets(effects)
        got += sum(leg.tenant_id == "g" for leg in granted)
        running += [(world.now_ns + LEG_MS * MS, leg) for leg in granted]
    return got / grants


@pytest.mark.parametrize("stuck", [0, CONSIDERED, 5 * CONSIDERED])
def test_guarantees_that_can_take_nothing_do_not_stop_another(stuck: int) -> None:
    world = pool()
    for index in range(stuck):
        world.tenants(f"s{index}", guaranteed_share=0.005)
        world.submit(f"s{index}", prompt=10, excluded_workers=ONLY_W0)
    world.tick(5_000)
    assert share_of_g(world, 800) > 0.4


def test_who_found_nothing_is_asked_again_in_turn_and_first_where_it_is_most_behind() -> None:
    world = pool()
    names = [f"s{index}" for index in range(3 * CONSIDERED)]
    for name in names:
        world.tenants(name, guaranteed_share=0.005)
        world.submit(name, prompt=10, excluded_workers=ONLY_W0)
    guarantees = world.scheduler._legs.guarantees
    asked: list[str] = []
    for _ in range(3):
        due = guarantees.due()
        assert len(due) <= 2 * CONSIDERED
        assert [tenant.guarantee_tag for tenant in due] == sorted(tenant.guarantee_tag for tenant in due)
        asked += [tenant.node_id for tenant in due]
        guarantees.asked(due, None)
    assert sorted(set(asked)) == sorted(names)
    fill(world, 0.0)
    world.tick(0)
    world.tick(0)
    granted = [leg.tenant_id for leg in tickets(world.effects)]
    assert len(granted) == SLOTS, "there is room"
    assert set(granted) <= set(names)


def test_who_leaves_is_asked_no_more() -> None:
    world = pool()
    world.tenants("s", guaranteed_share=0.005)
    world.submit("s", prompt=10, excluded_workers=ONLY_W0, request_id="r")
    guarantees: Guarantees = world.scheduler._legs.guarantees
    assert [tenant.node_id for tenant in guarantees.due()] == ["s"]
    assert world.scheduler._legs.outstanding.tenants[TenantId("s")] in guarantees._vain
    world.cancel("s", "r")
    assert not guarantees.due()
    assert not guarantees._vain
    assert ticket(world.submit("s", prompt=10)).tenant_id == "s"


@pytest.mark.parametrize("stuck", [0, 1, 6])
@pytest.mark.parametrize("weight", [0.01, 1.0])
def test_users_of_its_own_that_can_take_nothing_do_not_stop_a_guarantee(stuck: int, weight: float) -> None:
    world = pool()
    world.tenants("g", weight=weight, guaranteed_share=0.5)
    for index in range(stuck):
        world.submit("g", prompt=10, user=f"stuck{index}", excluded_workers=ONLY_W0)
    world.tick(5_000)
    assert share_of_g(world, 800) > 0.4


def test_a_guarantee_inside_the_windows_lifts_those_of_its_own_that_it_passes() -> None:
    """Its users' clocks pay then, as in any turn, and nobody stays more than a window behind who passes it."""
    world = pool()
    world.submit("g", prompt=10, user="stuck", excluded_workers=ONLY_W0)
    world.tick(5_000)
    share_of_g(world, 400)
    legs = [leg for leg in tickets(world.effects) if leg.tenant_id == "g"]
    assert all(leg.user != "stuck" for leg in legs)
    users = world.scheduler._legs.outstanding.tenants[TenantId("g")].users_known
    window = world.scheduler._legs.fair.window_of_users(
        users["works"].tenant, world.scheduler._legs.cost_rate.per_s
    )
    last_charge = max(leg.charge for leg in legs)
    assert users["works"].v <= users["stuck"].v + window + last_charge
