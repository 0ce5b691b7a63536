"""Workers that a request excludes: not taken as long as there is another, at no more cost than any request."""

import time

import pytest
from tests.unit.core.scheduler_world import World, ticket, tickets

from evenhand.core.facts import WorkerLoad
from evenhand.core.ids import WorkerId
from evenhand.core.steps import WorkerDrained, WorkerGone, WorkerHeard

OTHER = (WorkerId("w1"),)


def beaten(world: World, *names: str) -> None:
    for name in names:
        world.step(WorkerHeard(WorkerId(name), WorkerLoad(0, 0, 0.0, world.now_ns)))


def waiting_for_a_full_worker() -> World:
    """One request waits for w0, which is full, and excludes w1, which is idle."""
    world = World()
    world.tenants("a", "b")
    world.workers("w0", slots=1)
    ticket(world.submit("b", prompt=10))
    world.workers("w1")
    assert not tickets(world.submit("a", prompt=10, excluded_workers=OTHER))
    return world


def test_an_excluded_worker_is_taken_once_the_other_has_left() -> None:
    world = waiting_for_a_full_worker()
    granted = tickets(world.step(WorkerDrained(WorkerId("w0"), True)))
    assert [(each.tenant_id, each.worker_id) for each in granted] == [("a", "w1")]


def test_an_excluded_worker_is_taken_while_the_other_is_silent() -> None:
    world = waiting_for_a_full_worker()
    for _ in range(6):
        world.now_ns += 1_000_000_000
        beaten(world, "w1")
    assert [each.worker_id for each in tickets(world.effects) if each.tenant_id == "a"] == ["w1"]


def test_an_excluded_worker_is_left_alone_again_once_another_has_come() -> None:
    world = World()
    world.tenants("a", "b")
    world.workers("w1", slots=1)
    held = ticket(world.submit("b", prompt=10))
    world.submit("a", prompt=10, excluded_workers=OTHER)
    world.workers("w0", slots=1)
    assert [each.worker_id for each in tickets(world.effects) if each.tenant_id == "a"] == ["w0"]
    world.submit("a", prompt=10, excluded_workers=OTHER)
    assert not tickets(world.settle(held))
    world.step(WorkerGone(WorkerId("w0"), "gone"))
    assert [each.worker_id for each in tickets(world.effects) if each.tenant_id == "a"][1:] == ["w1"]


@pytest.mark.parametrize("workers_count", [8, 16])
def test_a_request_that_excludes_workers_costs_no_more_than_another(workers_count: int) -> None:
    """Names of workers are the client's own, many to a request: such requests must not stop the pool."""
    world = World()
    world.tenants("evil", "good")
    world.workers(*[f"w{i}" for i in range(workers_count)])
    excluded = tuple(WorkerId(f"w{i}") for i in range(workers_count - 1))
    for i in range(160):
        world.submit("evil", prompt=300, output=5, user=f"u{i % 4}", excluded_workers=excluded)
    world.tick(1)
    began_s = time.process_time()
    for _ in range(10):
        world.tick(1)
    step_ms = (time.process_time() - began_s) * 100
    assert step_ms < 5.0, f"{step_ms:.1f} ms a step, with {workers_count} workers and 153 requests that wait"
