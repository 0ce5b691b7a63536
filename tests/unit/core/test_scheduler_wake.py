"""The scheduler says itself when time alone brings something about: nobody has to tick it more often."""

import heapq

import pytest
from tests.unit.core.scheduler_world import MS, World, chain, config, ended, ticket, tickets

from evenhand.core.facts import Ticket
from evenhand.core.steps import Effect, Refused, Tick, WakeAt


def run_by_wakes(world: World, leg_ms: float, until_ms: float) -> list[Effect]:
    """Step only when a leg ends or the scheduler asked to be woken; everything that came out."""
    out: list[Effect] = []
    ends: list[tuple[int, str, Ticket]] = []
    wake_at_ns: int | None = None
    pending = world.effects
    while world.now_ns <= until_ms * MS:
        for effect in pending:
            if isinstance(effect, WakeAt):
                wake_at_ns = effect.at_ns
        for each in tickets(pending):
            heapq.heappush(ends, (world.now_ns + round(leg_ms * MS), each.ticket_id, each))
        out += pending
        times = [ends[0][0]] if ends else []
        if wake_at_ns is not None:
            times.append(max(wake_at_ns, world.now_ns))
        if not times:
            return out
        world.now_ns = min(times)
        if ends and ends[0][0] == world.now_ns:
            pending = list(world.settle(heapq.heappop(ends)[2]))
        else:
            wake_at_ns = None
            pending = list(world.step(Tick()))
    return out


@pytest.mark.parametrize("prompt", [300, 2_500])
def test_prefill_room_that_drains_by_itself_is_used_without_a_tick(prompt: int) -> None:
    world = World(config(worker_stale_after_ms=10**9, worker_lost_after_ms=10**9))
    world.tenants("a")
    world.workers("w1", slots=64)
    world.settle(ticket(world.submit("a", prompt=1)))  # no first token was told: prefill is modelled
    for n in range(30):
        world.submit("a", chain(n, 2), prompt=prompt)
    out = run_by_wakes(world, leg_ms=60_000.0, until_ms=20_000)
    assert len(tickets(out)) == 1 + 30
    # The model serves 8,000 tokens a second; the last is admitted before the pool has been idle for long.
    granted_at = max(each.granted_at_ns for each in tickets(out)) / MS
    assert granted_at <= 30 * prompt / 8.0


def test_deadlines_expiry_and_silence_come_by_themselves() -> None:
    world = World(config(ticket_ttl_ms=7_000))
    world.tenants("a")
    world.workers("w1", slots=1)
    world.submit("a", request_id="runs")
    world.submit("a", request_id="late", deadline_ns=3_000 * MS)
    world.submit("a", request_id="waits")
    out = run_by_wakes(world, leg_ms=10**6, until_ms=40_000)
    assert [e.request_id for e in out if isinstance(e, Refused)] == ["late", "waits"]
    assert [e.ticket.request_id for e in ended(out)] == ["runs"]
    assert world.scheduler.status(world.now_ns).workers == ()


def test_a_queue_with_room_below_it_always_moves() -> None:
    world = World(config(worker_stale_after_ms=10**9, worker_lost_after_ms=10**9, window_fixed=0.0))
    names = [f"t{n}" for n in range(12)]
    world.tenants(*names)
    world.workers("w1", "w2", slots=3)
    for n in range(120):
        world.submit(names[n % 12], chain(n % 5, 30), prompt=500 + 37 * (n % 7))
    out = run_by_wakes(world, leg_ms=200.0, until_ms=600_000)
    assert len(tickets(out)) == 120
    assert len(ended(out)) == 120
