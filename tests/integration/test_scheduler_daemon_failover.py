"""Two daemons and one lease: take-over, adopted tickets, a database that is away."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from tests.fixtures.scheduler_daemon import (
    USED,
    World,
    announced,
    connected,
    error_of,
    eventually,
    stored,
    tickets_open,
)

from evenhand.core.checkpoint import SchedulerCheckpoint
from evenhand.core.scheduler import PoolScheduler
from evenhand.scheduler.daemon import SchedulerDaemon
from evenhand.wire.generated import scheduler_pb2 as pb
from evenhand.wire.status import Code


async def crash(daemon: SchedulerDaemon) -> None:
    """End a daemon as kill -9 would: no last checkpoint, the lease not let go."""
    daemon._ownership._lease = None
    await daemon._close()
    daemon.actor.shutting_down = True


@asynccontextmanager
async def pair(world: World, **changed: object) -> AsyncIterator[tuple[SchedulerDaemon, SchedulerDaemon]]:
    """An owner and a warm standby."""
    settings: dict[str, Any] = {"lease_ttl_ms": 400, **changed}
    config = world.config(**settings)
    async with world.daemon(config) as owner, world.daemon(config, owner=False) as standby:
        await eventually(lambda: standby.warm)
        yield owner, standby


def clocks(daemon: SchedulerDaemon) -> dict[str, float]:
    tenants = daemon.status()["pool"]["tenants"]  # type: ignore[index]
    return {str(tenant["tenant_id"]): float(tenant["virtual_time"]) for tenant in tenants}


async def test_a_standby_says_it_is_not_the_owner(world: World) -> None:
    async with pair(world) as (_, standby), connected(standby) as client:
        error = await error_of(client.acquire("r1"))
        assert (error.reason, error.code) == ("NOT_THE_OWNER", Code.UNAVAILABLE)
        assert error.retry_after_ms
        for call in (client.settle("x"), client.renew("x"), client.cancel("x")):
            assert (await error_of(call)).reason == "NOT_THE_OWNER"


async def test_a_successor_goes_on_from_the_checkpoint(world: World) -> None:
    async with pair(world) as (owner, standby):
        world.say(stored("w2", range(1, 9)))
        async with connected(owner) as client:
            open_ticket = (await client.acquire("r1")).ticket
            done = (await client.acquire("r2", tenant="b")).ticket
            await client.settle(done, USED)
            before = clocks(owner)
            await asyncio.sleep(0.15)  # two checkpoints
        await crash(owner)
        await asyncio.wait_for(standby.wait_owner(), 5)
        assert clocks(standby) == before
        assert standby.actor.term == 2
        async with connected(standby) as client:
            assert (await client.renew(open_ticket)).state == pb.TICKET_STATE_OPEN
            settled = await client.settle(open_ticket, USED)
            assert settled.attained_cost == 3
            assert (await error_of(client.settle(open_ticket, USED))).reason == "TICKET_ALREADY_CLOSED"
            warm = await client.acquire("r3", range(1, 9), explain=True)
            assert warm.worker.worker_id == "w2"


async def test_a_ticket_the_checkpoint_does_not_know_is_adopted(world: World) -> None:
    async with pair(world, checkpoint_interval_ms=60_000) as (owner, standby):
        async with connected(owner) as client:
            settled_late = (await client.acquire("r1")).ticket
            renewed = (await client.acquire("r2")).ticket
        await crash(owner)
        await asyncio.wait_for(standby.wait_owner(), 5)
        assert tickets_open(standby) == 0
        async with connected(standby) as client:
            assert (await client.renew(renewed)).state == pb.TICKET_STATE_OPEN
            assert tickets_open(standby) == 1
            assert (await client.settle(settled_late, USED)).attained_cost == 3
            assert (await error_of(client.settle(settled_late, USED))).reason == "TICKET_ALREADY_CLOSED"
            again = await client.acquire("r2")
            assert (await client.settle(again.ticket, USED)).attained_cost == 3
            assert tickets_open(standby) == 0
            assert clocks(standby)["a"] == pytest.approx(6.0)


async def test_a_ticket_closed_before_the_checkpoint_is_not_adopted(world: World) -> None:
    async with pair(world) as (owner, standby):
        async with connected(owner) as client:
            ticket = (await client.acquire("r1")).ticket
            await client.settle(ticket, USED)
            await asyncio.sleep(0.15)  # two checkpoints
        before = clocks(owner)
        await crash(owner)
        await asyncio.wait_for(standby.wait_owner(), 5)
        async with connected(standby) as client:
            assert (await error_of(client.settle(ticket, USED))).reason == "UNKNOWN_TICKET"
        assert clocks(standby) == before


async def test_a_ticket_past_its_time_is_not_adopted(world: World) -> None:
    core = replace(world.config().core, ticket_ttl_ms=50)
    async with pair(world, core=core, checkpoint_interval_ms=60_000) as (owner, standby):
        async with connected(owner) as client:
            ticket = (await client.acquire("r1")).ticket
        await crash(owner)
        await asyncio.wait_for(standby.wait_owner(), 5)
        async with connected(standby) as client:
            assert (await error_of(client.renew(ticket))).reason == "UNKNOWN_TICKET"


async def test_a_graceful_stop_hands_over_at_once(world: World) -> None:
    async with pair(world, lease_ttl_ms=20_000) as (owner, standby):
        async with connected(owner) as client:
            ticket = (await client.acquire("r1")).ticket
        await owner.stop()
        await asyncio.wait_for(standby.wait_owner(), 5)
        async with connected(standby) as client:
            assert (await client.settle(ticket, USED)).attained_cost == 3


async def test_without_its_lease_store_it_decides_until_the_lease_runs_out(world: World) -> None:
    config = world.config(lease_ttl_ms=600)
    async with world.daemon(config) as daemon, connected(daemon) as client:
        world.leases.available = False
        first = await client.acquire("r1")
        await client.settle(first.ticket, USED)
        kept = await client.acquire("r2")
        await eventually(lambda: not daemon.actor.granting)
        error = await error_of(client.acquire("r3"))
        assert (error.reason, error.code) == ("NOT_THE_OWNER", Code.UNAVAILABLE)
        world.leases.available = True
        await eventually(lambda: daemon.actor.granting)
        assert daemon.actor.term == 2
        # Nobody else held a term meanwhile: what was granted since the last checkpoint is still known.
        assert tickets_open(daemon) == 1
        assert (await client.settle(kept.ticket, USED)).attained_cost == 3


async def test_a_fenced_owner_stops_at_once_and_tells_who_waits(world: World) -> None:
    world.say(announced("w1", slots=1, seq=0))
    async with world.daemon(world.config(lease_ttl_ms=600)) as daemon, connected(daemon) as client:
        for number in range(20):
            call = client.acquire(f"r{number}")
            await eventually(
                lambda call=call: call.done() or daemon.status()["pool"]["queued_total"] == 1  # type: ignore[index,misc]
            )
            if not call.done():
                break
        world.leases.take_over(daemon._config.pool_id, "another", 60_000)
        error = await error_of(call)
        assert (error.reason, error.code) == ("NOT_THE_OWNER", Code.UNAVAILABLE)
        assert not daemon.actor.granting


async def test_an_unreadable_checkpoint_does_not_stop_the_pool(world: World) -> None:
    async with world.daemon(world.config(lease_ttl_ms=400)) as daemon:
        await crash(daemon)
    world.leases._checkpoints.clear()
    lease = world.leases.take_over(world.config().pool_id, "older release", 1)
    await world.leases.save_checkpoint(lease, b"not a checkpoint")
    async with world.daemon(world.config(lease_ttl_ms=400)) as daemon, connected(daemon) as client:
        assert (await client.acquire("r1")).ticket
        assert b'evenhand_scheduler_faults_total{task="checkpoint"} 1.0' in daemon._page()


async def test_a_fault_at_the_start_of_a_term_costs_that_term_alone(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    restore, faults = PoolScheduler.restore, iter((RuntimeError("broken"),))

    def restore_faultily(
        scheduler: PoolScheduler, checkpoint: SchedulerCheckpoint, now_ns: int, elapsed_ns: int
    ) -> None:
        if fault := next(faults, None):
            raise fault
        restore(scheduler, checkpoint, now_ns, elapsed_ns)

    monkeypatch.setattr("evenhand.scheduler.daemon.TASK_RESTART_S", 0.01)
    async with world.daemon() as daemon, connected(daemon) as client:
        await client.acquire("r1")
        await asyncio.sleep(0.15)  # two checkpoints
    monkeypatch.setattr(PoolScheduler, "restore", restore_faultily)
    async with world.daemon() as daemon:
        assert daemon.actor.granting
        assert tickets_open(daemon) == 1
        assert b'evenhand_scheduler_faults_total{task="ownership"} 1.0' in daemon._page()
        assert sorted(task.get_name() for task in daemon._tasks) == [
            f"scheduler.{name}" for name in ("control", "directory", "health", "live_map", "ownership")
        ]
