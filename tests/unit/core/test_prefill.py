"""What is pending at a worker: known where first tokens are told, modelled where they are not."""

import pytest
from tests.unit.core.scheduler_world import World, config, ticket, tickets

from evenhand.core.facts import LegOutcome, Ticket, Usage
from evenhand.core.ids import WorkerId
from evenhand.core.steps import Effect, Renew, Settle
from evenhand.core.worker import PREFILL_OVERDUE_FACTOR, PREFILL_OVERDUE_MS

FIRST_TOKEN = Usage(output_tokens=1)
RATE = 8_000.0


def told(world: World, granted: Ticket, after_ms: float = 0.0) -> tuple[Effect, ...]:
    return world.step(Renew(granted.ticket_id, FIRST_TOKEN), after_ms)


def pending(world: World) -> float:
    (worker,) = world.scheduler.status(world.now_ns).workers
    return worker.prefill_pending_tokens


def answered(world: World, ttft_ms: float, prompt: int = 1_000, tells: bool = True) -> tuple[Effect, ...]:
    """One whole leg of 10 output tokens, alone on its worker."""
    granted = ticket(world.submit("a", prompt=prompt, output=10))
    if tells:
        told(world, granted, ttft_ms)
    usage = Usage(prompt, 0, 10)
    return world.step(Settle(granted.ticket_id, usage, ttft_ms=ttft_ms), 0.0 if tells else ttft_ms)


@pytest.fixture
def world() -> World:
    world = World(config(worker_stale_after_ms=10**9, worker_lost_after_ms=10**9, ticket_ttl_ms=10**7))
    world.tenants("a")
    world.workers("w1", slots=64)
    return world


def test_the_first_token_frees_prefill_room_in_the_same_step(world: World) -> None:
    answered(world, 100.0)
    running = [ticket(world.submit("a", prompt=1_500)) for _ in range(2)]
    assert not tickets(world.submit("a", prompt=1_500, request_id="waits"))
    # The modelled prefill of both is long over, and yet they hold their room: none has its first token.
    assert not tickets(world.tick(700))
    assert pending(world) == 3_000
    assert ticket(told(world, running[0])).request_id == "waits"
    assert pending(world) == 3_000
    assert not tickets(told(world, running[0])), "once counts"
    assert pending(world) == 3_000


def test_a_leg_that_ends_without_a_first_token_gives_its_room_back(world: World) -> None:
    answered(world, 100.0)
    first, _ = [ticket(world.submit("a", prompt=1_500)) for _ in range(2)]
    world.submit("a", prompt=1_500, request_id="waits")
    assert ticket(world.cancel("a", first.request_id, Usage())).request_id == "waits"
    assert pending(world) == 3_000


def test_a_first_token_that_is_never_told_counts_no_more_after_a_bound(world: World) -> None:
    answered(world, 100.0)
    rate = world.scheduler.status(world.now_ns).workers[0].prefill_rate_tokens_per_s
    ticket(world.submit("a", prompt=4_000))
    assert not tickets(world.submit("a", prompt=100))
    bound_ms = PREFILL_OVERDUE_FACTOR * 4_000 / rate * 1_000 + PREFILL_OVERDUE_MS
    assert not tickets(world.tick(bound_ms - 1))
    assert len(tickets(world.tick(2))) == 1


def test_of_a_tenant_that_never_tells_prefill_is_modelled(world: World) -> None:
    answered(world, 100.0)
    answered(world, 100.0, tells=False)
    ticket(world.submit("a", prompt=4_000))
    rate = world.scheduler.status(world.now_ns).workers[0].prefill_rate_tokens_per_s
    assert not tickets(world.submit("a", prompt=100))
    assert len(tickets(world.tick(2_000 / rate * 1_000))) == 1


def test_a_tenant_that_has_shown_nothing_is_taken_to_tell(world: World) -> None:
    running = [ticket(world.submit("a", prompt=1_500)) for _ in range(2)]
    assert not tickets(world.submit("a", prompt=1_500, request_id="waits"))
    assert not tickets(world.tick(3_000 / RATE * 1_000)), "modelled, their prefill would be over"
    assert ticket(told(world, running[0])).request_id == "waits"


def test_a_tenant_that_lets_its_first_legs_run_overdue_is_modelled_from_then_on(world: World) -> None:
    ticket(world.submit("a", prompt=4_000))
    assert not tickets(world.submit("a", prompt=4_000))
    assert len(tickets(world.tick(PREFILL_OVERDUE_FACTOR * 4_000 / RATE * 1_000 + PREFILL_OVERDUE_MS + 1))) == 1
    assert not tickets(world.submit("a", prompt=100))
    assert len(tickets(world.tick(2_000 / RATE * 1_000))) == 1


def test_one_that_has_told_is_modelled_after_an_overdue_first_token_until_it_tells_again(world: World) -> None:
    answered(world, 125.0)
    ticket(world.submit("a", prompt=4_000))
    world.tick(10_000)
    ticket(world.submit("a", prompt=4_000))
    waits = world.submit("a", prompt=100)
    assert not tickets(waits)
    modelled = ticket(world.tick(2_000 / RATE * 1_000 + 1))
    world.tick(10_000)
    told(world, modelled)
    ticket(world.submit("a", prompt=4_000))
    assert not tickets(world.submit("a", prompt=100))
    assert not tickets(world.tick(4_000 / RATE * 1_000)), "awaited, for it tells again"


def test_who_tells_on_small_legs_and_not_on_large_ones_closes_a_worker_hardly_longer_than_modelled() -> None:
    world = World(config(worker_stale_after_ms=10**9, worker_lost_after_ms=10**9, ticket_ttl_ms=10**7))
    world.tenants("a", "other")
    world.workers("w1", slots=64, kv_blocks=1_000_000)
    for tells_in_between in (True, False, False):
        if tells_in_between:
            answered(world, 2.0, prompt=10)
        ticket(world.submit("a", prompt=160_000))
        began_ns = world.now_ns
        world.submit("other", prompt=10, request_id="waits")
        while not any(leg.request_id == "waits" for leg in tickets(world.effects)):
            world.tick(100)
        world.effects.clear()
        world.cancel("other", "waits", FIRST_TOKEN)
        modelled_ms = 160_000 / RATE * 1_000
        bound_ms = 1.5 * modelled_ms + PREFILL_OVERDUE_MS if tells_in_between else modelled_ms
        assert (world.now_ns - began_ns) / 1e6 <= bound_ms + 100


def test_single_wild_times_to_first_token_do_not_move_the_rate(world: World) -> None:
    for _ in range(9):
        answered(world, 270.0)
    (worker,) = world.scheduler.status(world.now_ns).workers
    steady = worker.prefill_rate_tokens_per_s
    assert steady == pytest.approx(4_000, rel=0.1)
    for ttft_ms in (30.0, 9_000.0, 25.0):
        answered(world, ttft_ms)
        (worker,) = world.scheduler.status(world.now_ns).workers
        assert worker.prefill_rate_tokens_per_s == pytest.approx(steady, rel=0.1)


def test_the_first_token_of_a_lost_leg_is_that_legs_alone(world: World) -> None:
    answered(world, 100.0)
    granted = ticket(world.submit("a", prompt=1_500))
    told(world, granted)
    again = ticket(world.lose(granted))
    assert again.worker_id == WorkerId("w1")
    assert pending(world) == 1_500


def test_a_time_to_first_token_longer_than_its_leg_is_not_believed() -> None:
    world = World(config(worker_stale_after_ms=10**9, worker_lost_after_ms=10**9))
    world.tenants("a")
    world.workers("w1")
    before = world.scheduler.status(0).workers[0].prefill_rate_tokens_per_s
    for _ in range(10):
        held = ticket(world.submit("a", prompt=500, output=1))
        world.step(Settle(held.ticket_id, Usage(500, 0, 1), LegOutcome.SETTLED, 3_600_000.0), 1)
    assert world.scheduler.status(0).workers[0].prefill_rate_tokens_per_s == before
