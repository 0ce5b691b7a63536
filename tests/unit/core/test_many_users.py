"""A tenant with very many users costs a decision no more than one with some."""

from tests.unit.core.scheduler_world import World, chain, config, ticket

from evenhand.core.heads import FOLLOWED_USERS_MAX
from evenhand.core.ids import TenantId, WorkerId

LONG_MS = 10**9
USERS = 3 * FOLLOWED_USERS_MAX


def seen(world: World) -> list[str]:
    """Users whose waiting request knows that a part of it is on the worker."""
    users = world.scheduler._legs.outstanding.tenants[TenantId("a")].users_known.values()
    return [u.node_id for u in users for q in u.queue.values() if q.cached.get(WorkerId("w1"))]


def test_what_a_dispatch_puts_on_a_worker_is_seen_at_once_by_those_next_in_turn_and_no_more() -> None:
    world = World(config(worker_stale_after_ms=LONG_MS, worker_lost_after_ms=LONG_MS, matches_refresh_ms=LONG_MS))
    world.tenants("a")
    world.workers("w1", slots=1)
    first = ticket(world.submit("a", chain(9, 4)))
    for index in range(USERS):
        world.submit("a", chain(1, 4), user=f"u{index:03}")
    assert seen(world) == []
    assert ticket(world.settle(first)).user == "u000"
    assert seen(world) == [f"u{index:03}" for index in range(1, FOLLOWED_USERS_MAX)]
