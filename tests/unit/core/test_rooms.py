"""Times at which rooms open again are kept for workers, not for each time that one has closed."""

from tests.unit.core.scheduler_world import World, config, ticket, tickets

from evenhand.core.facts import Usage
from evenhand.core.rooms import REOPEN_KEPT_MIN, REOPEN_PER_WORKER_MAX
from evenhand.core.steps import Renew

LONG_MS = 10**9


def closed_often(count: int) -> World:
    """A worker that has closed for want of prefill room so many times, for minutes each, and opened at once."""
    world = World(
        config(
            prefill_rate_default_tokens_per_s=50.0,
            worker_stale_after_ms=LONG_MS,
            worker_lost_after_ms=LONG_MS,
        )
    )
    world.tenants("a", "b")
    world.workers("w1")
    for _ in range(count):
        leg = ticket(world.submit("a", prompt=3_000, output=4))
        world.step(Renew(leg.ticket_id, Usage(3_000, 0, 1)), 20)
        world.settle(leg)
    return world


def test_past_closings_leave_nothing_behind() -> None:
    kept_max = REOPEN_KEPT_MIN + REOPEN_PER_WORKER_MAX
    world = closed_often(3 * kept_max)
    assert len(world.scheduler._legs.rooms._reopen) <= kept_max


def test_a_worker_that_is_closed_at_a_sweep_opens_in_time() -> None:
    """Whenever the sweep comes, before or after the closing that counts."""
    for count in range(REOPEN_KEPT_MIN, REOPEN_KEPT_MIN + 2 * REOPEN_PER_WORKER_MAX):
        world = closed_often(count)
        silent = ticket(world.submit("b", prompt=3_000, output=4))
        world.submit("a", prompt=10)
        (worker,) = world.scheduler._legs.rooms.workers.values()
        assert worker.closed == "prefill_full"
        opens_ns = worker.prefill_room_at_ns(2_048)
        next_ns = world.scheduler._legs.rooms.next_change_ns(True)
        assert next_ns is not None
        assert next_ns <= opens_ns
        before = len(tickets(world.effects))
        while world.now_ns < opens_ns:
            world.step(Renew(silent.ticket_id), min(20_000, (opens_ns - world.now_ns) / 1e6))
        assert len(tickets(world.effects)) == before + 1
