"""The printed bounds in time: by hand for small cases, and against waits that really happen."""

import math
import random

import pytest
from tests.unit.core.scheduler_world import MS, World, config, tickets

from evenhand.core.bounds import BandSiblings, Sibling, cost_ahead, most_cost_ahead, wait_ms, worst_wait
from evenhand.core.facts import Ticket

LONG_MS = 10**9


def at(v: float, weight: float = 1.0) -> Sibling:
    return Sibling(v, weight, charge=10.0, over=3.0, under=2.0)


def test_each_sibling_may_run_to_the_end_of_the_window_and_one_charge_beyond() -> None:
    assert cost_ahead(100.0, 50.0, [at(100.0)]) == 50.0 + 10.0 + 3.0 + 2.0
    assert cost_ahead(100.0, 50.0, [at(100.0, weight=2.0)]) == 130.0
    assert cost_ahead(100.0, 50.0, [at(500.0)]) == 0.0


def test_cost_becomes_time_at_what_guarantees_leave_of_the_rate() -> None:
    assert wait_ms(1_000.0, 2_000.0, 0.0, 70.0) == 570.0
    assert wait_ms(1_000.0, 2_000.0, 0.5, 70.0) == 1_070.0
    assert wait_ms(1_000.0, 2_000.0, 1.0, 70.0) == math.inf


def test_the_last_in_order_and_the_newcomer_wait_longest() -> None:
    band = BandSiblings(at(0.0), (at(100.0), at(140.0)), window=50.0, virtual_time_max=110.0)
    worst = worst_wait([band], 5.0, 0.0, 1_000.0, 0.0, 0.0, 0.0)
    assert worst.in_a_ms == pytest.approx(142.0 - 100.0 + 65.0)
    assert worst.newcomer_ms == pytest.approx((10.0 + 65.0) + (-30.0 + 65.0))


def test_a_light_tenant_waits_for_a_heavy_one_that_is_ahead_of_it() -> None:
    band = BandSiblings(at(0.0), (at(110.0, weight=1_000.0), at(100.0)), window=50.0, virtual_time_max=0.0)
    worst = worst_wait([band], 5.0, 0.0, 1_000.0, 0.0, 0.0, 0.0)
    assert worst.in_a_ms == pytest.approx(1_000.0 * (102.0 - 110.0 + 65.0))


@pytest.mark.parametrize("seed", range(50))
def test_the_most_that_anybody_waits_for_is_that_of_the_worst(seed: int) -> None:
    rng = random.Random(seed)
    far = 10.0 ** rng.uniform(0, 9)
    siblings = [
        Sibling(far + rng.uniform(0, 500), 10 ** rng.uniform(-3, 3), rng.uniform(0, 90), rng.uniform(0, 90), 30.0)
        for _ in range(rng.randrange(9))
    ]
    plain = [
        cost_ahead(one.v + one.under, 100.0, [other for other in siblings if other is not one]) for one in siblings
    ]
    assert most_cost_ahead(100.0, siblings) == pytest.approx(max(plain, default=0.0), rel=1e-6, abs=1e-3)


def test_other_bands_add_what_they_may_take() -> None:
    one = BandSiblings(at(0.0), (at(0.0),), window=50.0, virtual_time_max=0.0)
    other = BandSiblings(at(0.0, weight=3.0), (at(0.0),), window=50.0, virtual_time_max=0.0)
    alone = worst_wait([one], 20.0, 0.0, 1_000.0, 0.0, 0.0, 0.0)
    both = worst_wait([one, other], 20.0, 0.0, 1_000.0, 0.0, 0.0, 0.0)
    assert both.in_a_ms == alone.in_a_ms + 3.0 * (20.0 + 2.0 + 15.0)


def test_other_bands_follow_each_time_that_siblings_raise_the_clock_of_their_own() -> None:
    one = BandSiblings(at(0.0), (at(0.0), at(0.0)), window=50.0, virtual_time_max=0.0)
    other = BandSiblings(at(0.0, weight=3.0), (at(0.0),), window=50.0, virtual_time_max=0.0)
    alone = worst_wait([one], 20.0, 0.0, 1_000.0, 0.0, 0.0, 0.0)
    both = worst_wait([one, other], 20.0, 0.0, 1_000.0, 0.0, 0.0, 0.0)
    assert alone.in_a_ms == 50.0 + 2.0 + 15.0
    assert both.in_a_ms == alone.in_a_ms + 3.0 * (20.0 + 2.0 + alone.in_a_ms + 15.0)


@pytest.mark.parametrize("seed", range(4))
def test_no_newcomer_waits_longer_than_was_printed(seed: int) -> None:
    """A steady crowd of three; a newcomer asks now and then, and its wait is held against what was printed."""
    rng = random.Random(seed)
    long_ms = {"worker_stale_after_ms": LONG_MS, "worker_lost_after_ms": LONG_MS}
    world = World(config(window_delay_ms=200.0, cold_wait_factor=0.0, **long_ms))
    world.tenants("a", "b", "c", "late")
    world.workers("w1", "w2", slots=4)
    running: list[Ticket] = []
    for name in "abc" * 8:
        running += tickets(world.submit(name, prompt=rng.randrange(50, 400), output=32))
    printed: tuple[int, float] | None = None
    waits = 0
    for step in range(1_500):
        done = running.pop(rng.randrange(len(running)))
        # A leg takes about as long as its output at the default rate.
        effects = world.settle(done, after_ms=rng.choice([20.0, 60.0, 100.0]))
        effects += world.submit(rng.choice("abc"), prompt=rng.randrange(50, 400), output=32)
        if step > 200 and printed is None and rng.random() < 0.05:
            printed = (world.now_ns, world.scheduler.status(world.now_ns).newcomer_wait_max_ms)
            effects += world.submit("late", prompt=rng.randrange(50, 400), output=32)
        granted = tickets(effects)
        running += granted
        if printed is not None and any(t.tenant_id == "late" for t in granted):
            asked_ns, bound_ms = printed
            assert (world.now_ns - asked_ns) / MS <= bound_ms
            printed, waits = None, waits + 1
    assert waits > 20
    assert world.scheduler.status(world.now_ns).wait_max_ms > 0.0


def test_the_wait_for_a_warmer_worker_is_in_the_printed_ones() -> None:
    def printed(**changes: object) -> float:
        world = World(config(worker_stale_after_ms=LONG_MS, worker_lost_after_ms=LONG_MS, **changes))
        world.tenants("a")
        world.workers("w1", "w2")
        return world.scheduler.status(world.now_ns).newcomer_wait_max_ms

    assert printed() - printed(cold_wait_factor=0.0) == 5_000.0
    assert printed(cold_wait_ms_max=700) - printed(cold_wait_factor=0.0) == 700.0
