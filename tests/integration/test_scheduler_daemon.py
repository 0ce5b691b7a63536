"""Acquire, Renew, Settle and Cancel over gRPC against a daemon on memory ports."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from evenhand.scheduler.daemon import SchedulerDaemon
from evenhand.wire.generated import scheduler_pb2 as pb
from tests.fixtures.scheduler_daemon import Client, World, announced, connected, error_of, load, stored


@pytest.fixture
def world(tmp_path: Path) -> World:
    world = World(tmp_path)
    world.add_pool()
    world.add_tenants("a", "b")
    for worker in ("w1", "w2"):
        world.say(announced(worker))
        world.say(load(worker))
    return world


@pytest.fixture
async def daemon(world: World) -> AsyncIterator[SchedulerDaemon]:
    async with world.daemon() as daemon:
        yield daemon


@pytest.fixture
async def client(daemon: SchedulerDaemon) -> AsyncIterator[Client]:
    async with connected(daemon) as client:
        yield client


async def test_a_request_goes_to_the_worker_that_holds_its_prefix(world: World, client: Client) -> None:
    keys = tuple(range(1, 65))
    world.say(stored("w2", keys))
    await client.acquire("warm-up")
    granted = await client.acquire("r1", keys, explain=True)
    assert granted.worker.worker_id == "w2"
    assert granted.worker.address == "http://w2:8000"
    assert granted.predicted_cached_tokens == 64 * 16
    assert granted.explanation.reason == "affinity"
    assert {candidate.worker_id for candidate in granted.explanation.candidates} == {"w1", "w2"}
    settled = await client.settle(
        granted.ticket, pb.Usage(prompt_tokens=1025, cached_tokens=1024, output_tokens=10)
    )
    assert settled.attained_cost == pytest.approx(1 + 102.4 + 20)
    assert (await error_of(client.settle(granted.ticket))).reason == "TICKET_ALREADY_CLOSED"
