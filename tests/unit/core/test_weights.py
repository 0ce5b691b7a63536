"""Weights lie no farther apart than clocks can tell: shares follow them even after years of the smallest."""

import pytest
from tests.unit.core.scheduler_world import World, config, ticket

from evenhand.core.facts import WEIGHT_MAX, WEIGHT_MIN
from evenhand.core.ids import TenantId

COST_MAX = 1e12
"""Three years at 10,000 a second."""


def test_shares_follow_the_largest_weights_beside_one_of_the_smallest_that_has_had_much() -> None:
    world = World(config(headroom_divisor=2**20, worker_stale_after_ms=10**9, worker_lost_after_ms=10**9))
    world.tenants("tiny", weight=WEIGHT_MIN)
    world.tenants("a", weight=WEIGHT_MAX)
    world.tenants("b", weight=0.6 * WEIGHT_MAX)
    world.workers("w1", slots=1, kv_blocks=100_000)
    tiny = world.scheduler._legs.outstanding.tenants[TenantId("tiny")]
    tiny.band.tenants.place(tiny, COST_MAX / WEIGHT_MIN, None)
    leg = ticket(world.submit("tiny", prompt=10, output=1))
    world.submit("tiny", prompt=10, output=1)
    for name in "ab":
        for _ in range(600):
            world.submit(name, prompt=500, output=20)
    got = {"tiny": 0, "a": 0, "b": 0}
    for _ in range(500):
        world.effects.clear()
        world.settle(leg, after_ms=1)
        leg = ticket(world.effects)
        got[leg.tenant_id] += 1
    assert got["a"] / got["b"] == pytest.approx(1 / 0.6, rel=0.05)
