"""What a daemon shows and keeps stays bounded and true, whatever clients, workers and probes do."""

import asyncio
from typing import Any

import aiohttp
import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families
from tests.fixtures.scheduler_daemon import (
    BLOCK_SIZE,
    USED,
    Client,
    World,
    acquire_request,
    announced,
    connected,
    error_of,
    eventually,
    stored,
)

from evenhand.core.ids import Epoch, TenantId, WorkerId
from evenhand.core.kv import WorkerLeft
from evenhand.scheduler.daemon import SERVICE, SchedulerDaemon
from evenhand.scheduler.predictions import LEGS_MIN
from evenhand.wire.generated import scheduler_pb2 as pb

HOSTILE = "hostile"


async def page(daemon: SchedulerDaemon, name: str = "/metrics") -> str:
    async with (
        aiohttp.ClientSession(f"http://{daemon.metrics_address}") as session,
        session.get(name) as response,
    ):
        return await response.text()


def series(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_predictions_that_keep_missing_raise_an_alarm(world: World) -> None:
    keys = tuple(range(1, 9))
    prompt_tokens = len(keys) * BLOCK_SIZE + 1
    async with world.daemon(world.config(metrics_listen="127.0.0.1:0")) as daemon, connected(daemon) as client:
        world.say(stored("w1", keys))
        await eventually(lambda: daemon.live_map.cache_map.copy_count == len(keys))
        for number in range(LEGS_MIN):
            assert series(await page(daemon))["evenhand_scheduler_workers_mispredicted", ()] == 0
            granted = await client.acquire(f"r{number}", keys)
            assert granted.predicted_cached_tokens == len(keys) * BLOCK_SIZE
            used = pb.Usage(prompt_tokens=prompt_tokens, cached_tokens=0, output_tokens=1)
            await client.settle(granted.ticket, used)
        shown = series(await page(daemon))
        assert shown["evenhand_scheduler_workers_mispredicted", ()] == 1
        assert shown["evenhand_scheduler_cached_tokens_predicted_total", ()] == LEGS_MIN * len(keys) * BLOCK_SIZE
        assert shown["evenhand_scheduler_cached_tokens_agreed_total", ()] == 0
        assert daemon.status()["workers_mispredicted"] == ["w1"]
        world.say(WorkerLeft(WorkerId("w1"), Epoch(1)))
        await eventually(lambda: daemon.status()["workers_mispredicted"] == [])


async def abuse(client: Client, world: World, round_number: int) -> None:
    """Names of every kind that a client or a worker may choose, each used once."""
    for number in range(20):
        name = f"{HOSTILE}-{round_number}-{number}"
        await error_of(client.stub.Acquire(acquire_request(name, tenant=name), timeout=5))
        await error_of(client.stub.Acquire(acquire_request(name, pool=name), timeout=5))
        await error_of(client.stub.Acquire(acquire_request(name, prompt_tokens=10**8), timeout=5))
        await error_of(client.stub.Resolve(pb.ResolveRequest(pool=name, tenant=name), timeout=5))
        await error_of(client.settle(name))
        await error_of(client.stub.Acquire(acquire_request("r"), metadata=(("authorization", f"Bearer {name}"),)))
        granted = await client.acquire(name)
        await error_of(client.acquire(name, prompt_tokens=77))
        await client.settle(granted.ticket, USED)
        world.say(announced(name))
        world.say(WorkerLeft(WorkerId(name), Epoch(1)))
        world.log.append("evenhand.kv.v1", name.encode(), name.encode())


async def test_series_are_the_same_whatever_names_are_used(world: World) -> None:
    async with world.daemon(world.config(metrics_listen="127.0.0.1:0")) as daemon, connected(daemon) as client:
        await abuse(client, world, 0)
        await eventually(lambda: set(daemon.live_map.workers) == {"w1", "w2"})
        once = await page(daemon)
        for round_number in (1, 2):
            await abuse(client, world, round_number)
        await eventually(lambda: set(daemon.live_map.workers) == {"w1", "w2"})
        later = await page(daemon)
    assert set(series(later)) == set(series(once))
    assert HOSTILE not in later


async def test_probes_touch_no_counter(world: World) -> None:
    async with world.daemon(world.config(metrics_listen="127.0.0.1:0")) as daemon, connected(daemon) as client:
        await client.acquire("r1")
        await asyncio.gather(*(page(daemon, name) for name in ("/healthz", "/status", "/metrics")))
        before = daemon.status()
        counted = series(await page(daemon))
        async with grpc.aio.insecure_channel(daemon.address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)  # type: ignore[no-untyped-call]
            for _ in range(10):
                await stub.Check(health_pb2.HealthCheckRequest(service=SERVICE))
                for name in ("/healthz", "/status", "/metrics"):
                    await page(daemon, name)
        after = daemon.status()
        live = ("tickets_open", "queued_total", "grants", "cost_outstanding", "cost_dispatched")
        assert [after["pool"][name] for name in live] == [before["pool"][name] for name in live]  # type: ignore[index]
        counters = {key: value for key, value in series(await page(daemon)).items() if "messages" not in key[0]}
        assert counters == {key: value for key, value in counted.items() if "messages" not in key[0]}


async def test_a_tenant_deleted_while_nobody_is_in_office_is_forgotten(world: World) -> None:
    world.add_tenants("passing")
    async with world.daemon() as daemon, connected(daemon) as client:
        granted = await client.acquire("r1", tenant="passing")
        await client.settle(granted.ticket, USED)
    world.directory.remove_tenant(TenantId("passing"))
    async with world.daemon() as daemon:
        pool = daemon.status()["pool"]
        assert {tenant["tenant_id"] for tenant in pool["tenants"]} == {"a", "b"}  # type: ignore[index]
        assert b"passing" not in daemon._office.checkpoint()


async def fill(client: Client, daemon: SchedulerDaemon) -> None:
    """Take every place, so that whoever comes next waits."""
    for number in range(16):
        await client.acquire(f"filler-{number}")
    assert daemon.status()["pool"]["queued_total"] == 0  # type: ignore[index]


@pytest.mark.parametrize(
    ("settings", "fields"),
    [
        ({"acquire_timeout_default_ms": 50}, {}),
        ({"acquire_timeout_max_ms": 50}, {"timeout_ms": 60_000}),
    ],
)
async def test_a_wait_is_bounded_by_the_settings(
    world: World, settings: dict[str, Any], fields: dict[str, Any]
) -> None:
    async with world.daemon(world.config(**settings)) as daemon, connected(daemon) as client:
        await fill(client, daemon)
        call = client.stub.Acquire(acquire_request("waits", **fields))
        assert (await asyncio.wait_for(error_of(call), 10)).reason == "DEADLINE_PASSED"


async def test_no_more_calls_wait_than_the_setting_says(world: World) -> None:
    async with world.daemon(world.config(calls_pending_max=3)) as daemon, connected(daemon) as client:
        await fill(client, daemon)
        async with connected(daemon) as other:
            session = other.session()
            for number in range(4):
                await session.write(
                    pb.SessionRequest(call_id=number + 1, acquire=acquire_request(f"waits-{number}"))
                )
            refused = await asyncio.wait_for(session.read(), 10)
            assert isinstance(refused, pb.SessionResponse), "the stream ended"
            assert refused.call_id == 4
            session.cancel()


async def test_a_stop_waits_for_open_tickets_as_long_as_the_setting_says(world: World) -> None:
    took_s = []
    for number, drain_timeout_ms in enumerate((50, 700)):
        config = world.config(drain_timeout_ms=drain_timeout_ms)
        loop = asyncio.get_running_loop()
        async with world.daemon(config) as daemon, connected(daemon) as client:
            await client.acquire(f"open-{number}")
            began = loop.time()
            await daemon.stop()
            took_s.append(loop.time() - began)
    assert took_s[1] >= 0.7
    assert took_s[1] - took_s[0] > 0.3
