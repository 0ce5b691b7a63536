"""The SDK against the real scheduler daemon, on memory ports."""

import asyncio
import socket
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.fixtures.scheduler_daemon import POOL, World, announced, stored

from evenhand.client import (
    AsyncClient,
    Client,
    DeadlineExceeded,
    PermissionDenied,
    QueueFull,
    RequestTooLarge,
    RetryPolicy,
    TicketState,
    Unauthenticated,
    UnknownPool,
)
from evenhand.core.facts import SchedulerConfig
from evenhand.core.ids import TenantId
from evenhand.ports import Principal
from evenhand.scheduler.config import TlsConfig
from evenhand.scheduler.daemon import SchedulerDaemon

QUICK = RetryPolicy(backoff_ms_base=10, backoff_ms_max=50)
ASK: dict[str, Any] = {"prompt_tokens": 40, "max_output_tokens": 8}
SLOTS = 8


@pytest.fixture(params=["session", "unary"])
def mode(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def world(tmp_path: Path) -> World:
    world = World(tmp_path).populated(("a", "b"), ("w1", "w2"), SLOTS)
    world.add_key("key-a", Principal("app", "service", (TenantId("a"),)))
    return world


@pytest.fixture
async def client(daemon: SchedulerDaemon, mode: Any) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(daemon.address, pool="llama", api_key="key-a", mode=mode, retry=QUICK) as client:
        yield client


def queued(daemon: SchedulerDaemon) -> int:
    status = daemon._office.status()
    assert status is not None
    return sum(tenant.queue_length for tenant in status.tenants)


def is_empty(daemon: SchedulerDaemon) -> bool:
    return not daemon.actor.open and not queued(daemon)


async def until(condition: Any, within_s: float = 10.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.005)


async def test_a_prompt_goes_where_its_keys_are(
    world: World, daemon: SchedulerDaemon, client: AsyncClient
) -> None:
    tokens = list(range(1_000, 1_070))
    view = await client.resolve()
    assert (view.model, view.block_size_tokens, view.tenant) == ("test-model", 16, "a")
    packed = view.packed_keys(tokens)
    keys = [int.from_bytes(packed[at : at + 8], "big") for at in range(0, len(packed), 8)]
    world.say(stored("w2", keys))
    await until(lambda: daemon.live_map.cache_map.key_count == 4)
    async with client.acquire(tokens=tokens, max_output_tokens=8, explain=True) as grant:
        assert (grant.worker_id, grant.predicted_cached_tokens) == ("w2", 64)
        assert grant.cache_salt == view.cache_salt
        assert grant.explanation.reason == "affinity"
        assert {candidate.worker_id for candidate in grant.explanation.candidates} == {"w1", "w2"}
        grant.record_usage(prompt_tokens=70, cached_tokens=64, output_tokens=3)
    assert grant.settlement is not None
    assert grant.settlement.delivered
    assert grant.settlement.attained_cost == pytest.approx(6 + 0.1 * 64 + 2 * 3)
    assert is_empty(daemon)


async def test_many_requests_share_the_slots_and_leave_nothing(
    daemon: SchedulerDaemon, client: AsyncClient
) -> None:
    async def one(number: int) -> None:
        async with client.acquire(request_id=f"r{number}", **ASK) as grant:
            await asyncio.sleep(0)
            grant.record_usage(prompt_tokens=40, output_tokens=number % 8)

    await asyncio.gather(*(one(number) for number in range(100)))
    assert is_empty(daemon)


@pytest.mark.parametrize("step", range(16))
async def test_a_cancellation_at_any_turn_leaves_nothing(
    daemon: SchedulerDaemon, client: AsyncClient, step: int
) -> None:
    async def one() -> None:
        async with client.acquire(tokens=list(range(64)), max_output_tokens=8):
            await asyncio.sleep(0)

    await one()
    client._views.forget("")
    task = asyncio.create_task(one())
    for _ in range(step * 4):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await until(lambda: not client._held.busy)
    assert is_empty(daemon)


async def test_who_is_cancelled_in_the_queue_leaves_it(daemon: SchedulerDaemon, client: AsyncClient) -> None:
    async def hold(entered: asyncio.Queue[None]) -> None:
        async with client.acquire(**ASK):
            entered.put_nowait(None)
            await asyncio.sleep(60)

    entered: asyncio.Queue[None] = asyncio.Queue()
    holders = [asyncio.create_task(hold(entered)) for _ in range(2 * SLOTS + 3)]
    await until(lambda: queued(daemon) > 0)
    for holder in holders:
        holder.cancel()
    await asyncio.gather(*holders, return_exceptions=True)
    await until(lambda: is_empty(daemon))


async def test_a_lost_worker_gives_run_another_leg(
    world: World, daemon: SchedulerDaemon, client: AsyncClient
) -> None:
    seen: list[tuple[str, int]] = []

    async def call(grant: Any) -> str:
        seen.append((grant.worker_id, grant.leg))
        if grant.leg == 1:
            raise ConnectionResetError("gone")
        return "text"

    assert await client.run(call, **ASK) == "text"
    assert [leg for _, leg in seen] == [1, 2]
    assert seen[0][0] != seen[1][0]
    await until(lambda: is_empty(daemon))


async def test_tickets_outlive_their_time_until_the_engine_restarts(world: World, mode: Any) -> None:
    core = SchedulerConfig(POOL, worker_stale_after_ms=60_000, worker_lost_after_ms=90_000, ticket_ttl_ms=600)
    async with world.daemon(world.config(core)) as daemon:
        async with (
            AsyncClient(daemon.address, pool="llama", api_key="key-a", mode=mode, retry=QUICK) as client,
            client.acquire(**ASK) as grant,
        ):
            await asyncio.sleep(1.0)  # nothing can be awaited: that the ticket does not run out is what is tested
            assert grant.state is TicketState.OPEN
            assert len(daemon.actor.open) == 1
            world.say(announced(grant.worker_id, epoch=2, slots=SLOTS))
            assert await asyncio.wait_for(grant.wait_ended(), 10) is TicketState.WORKER_LOST
            assert grant.end_sentence
        await until(lambda: is_empty(daemon))


async def test_open_tickets_survive_a_restart_of_the_scheduler(world: World, mode: Any) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config = world.config(listen=f"127.0.0.1:{port}")
    client = AsyncClient(f"127.0.0.1:{port}", pool="llama", api_key="key-a", mode=mode, retry=QUICK)
    async with client:
        async with world.daemon(config):
            held = client.acquire(request_id="held", **ASK)
            grant = await held.__aenter__()
        waiting = asyncio.create_task(client.acquire(request_id="waits", **ASK).__aenter__())
        async with world.daemon(config) as second:
            assert (await waiting).request_id == "waits"
            grant.record_usage(prompt_tokens=40, output_tokens=2)
            await held.__aexit__(None, None, None)
            assert grant.settlement is not None
            assert grant.settlement.delivered, grant.settlement.sentence
            await client.close()
            assert is_empty(second)


class TestRefusals:
    async def test_a_wrong_key(self, daemon: SchedulerDaemon, mode: Any) -> None:
        async with AsyncClient(daemon.address, pool="llama", api_key="wrong", mode=mode) as client:
            with pytest.raises(Unauthenticated, match="unknown"):
                async with client.acquire(**ASK):
                    pass

    async def test_another_tenant(self, client: AsyncClient) -> None:
        with pytest.raises(PermissionDenied):
            async with client.acquire(tenant="b", **ASK):
                pass

    async def test_another_pool(self, daemon: SchedulerDaemon, mode: Any) -> None:
        async with AsyncClient(daemon.address, pool="qwen", api_key="key-a", mode=mode) as client:
            with pytest.raises(UnknownPool, match="llama"):
                async with client.acquire(**ASK):
                    pass

    async def test_a_request_no_worker_could_run(self, client: AsyncClient) -> None:
        with pytest.raises(RequestTooLarge):
            async with client.acquire(prompt_tokens=1_000_000, max_output_tokens=8):
                pass

    async def test_a_deadline_in_the_queue(self, daemon: SchedulerDaemon, client: AsyncClient) -> None:
        blocks = [client.acquire(**ASK) for _ in range(2 * SLOTS)]
        for block in blocks:
            await block.__aenter__()
        with pytest.raises(DeadlineExceeded):
            async with client.acquire(timeout=0.2, **ASK):
                pass
        await until(lambda: queued(daemon) == 0)

    async def test_a_full_queue(self, world: World, daemon: SchedulerDaemon, mode: Any) -> None:
        world.add_tenants("small", queue_length_max=1)
        world.add_key("key-small", Principal("app", "service", (TenantId("small"),)))
        await until(lambda: TenantId("small") in daemon.watch.tenants)
        async with AsyncClient(daemon.address, pool="llama", api_key="key-small", mode=mode) as client:
            for _ in range(2 * SLOTS):
                await client.acquire(**ASK).__aenter__()
            waiting = asyncio.create_task(client.acquire(**ASK).__aenter__())
            await until(lambda: queued(daemon) == 1)
            with pytest.raises(QueueFull) as caught:
                async with client.acquire(**ASK):
                    pass
            assert caught.value.retry_after_s
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        await until(lambda: is_empty(daemon))


async def test_the_blocking_client(daemon: SchedulerDaemon, mode: Any) -> None:
    def use(client: Client, number: int) -> None:
        for _ in range(5):
            with client.acquire(tokens=range(40), max_output_tokens=8) as grant:
                grant.record_usage(prompt_tokens=40, output_tokens=number)

    def use_all() -> None:
        with Client(daemon.address, pool="llama", api_key="key-a", mode=mode) as client:
            use(client, 1)
            other = asyncio.run(asyncio.to_thread(use, client, 2))
            assert other is None

    await asyncio.to_thread(use_all)
    assert is_empty(daemon)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> TlsConfig:
    """A certificate of its own for loopback."""
    folder = tmp_path_factory.mktemp("tls")
    made = TlsConfig(folder / "certificate.pem", folder / "key.pem")
    options = "-x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    command = ["openssl", "req", *options.split(), "-addext", "subjectAltName=IP:127.0.0.1"]
    command += ["-keyout", str(made.key_file), "-out", str(made.certificate_file)]
    subprocess.run(command, check=True, capture_output=True)
    return made


async def test_over_tls(world: World, certificate: TlsConfig, mode: Any) -> None:
    async with world.daemon(world.config(tls=certificate, insecure_loopback=False)) as daemon:
        settings: dict[str, Any] = {"pool": "llama", "mode": mode, "ca_file": certificate.certificate_file}
        async with AsyncClient(daemon.address, api_key="key-a", **settings) as client, client.acquire(**ASK):
            pass
        async with AsyncClient(daemon.address, api_key="", **settings) as client:
            with pytest.raises(Unauthenticated, match="no API key"):
                async with client.acquire(**ASK):
                    pass
        assert is_empty(daemon)
