"""Credentials, roles, gateways, TLS, and what may be listened on."""

import asyncio
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from tests.fixtures.scheduler_daemon import (
    Client,
    World,
    connected,
    error_of,
    wall_ms,
)

from evenhand.core.errors import InvalidConfig, Unavailable
from evenhand.core.ids import TenantId
from evenhand.ports import Principal
from evenhand.scheduler.config import TlsConfig
from evenhand.scheduler.daemon import SchedulerDaemon
from evenhand.wire.generated import scheduler_pb2 as pb
from evenhand.wire.generated.scheduler_pb2_grpc import SchedulerStub
from evenhand.wire.status import Code

A, B = TenantId("a"), TenantId("b")


@pytest.fixture
def world(tmp_path: Path) -> World:
    world = World(tmp_path).populated(("a", "b", "c"), ("w1",))
    world.add_key("key-a", Principal("app-a", "service", (A,)))
    world.add_key("key-b", Principal("app-b", "service", (B,)))
    world.add_key("gateway", Principal("edge", "service", (A, B), gateway=True))
    world.add_key("any", Principal("edge-all", "service", (TenantId("*"),), gateway=True))
    world.add_key("admin", Principal("root", "admin", (A,)))
    world.add_key("auditor", Principal("eye", "auditor", (A,)))
    world.add_key("two", Principal("two", "service", (A, B)))
    world.add_key("none", Principal("none", "service", ()))
    return world


@pytest.fixture
async def daemon(world: World) -> AsyncIterator[SchedulerDaemon]:
    async with world.daemon(world.config(insecure_loopback=False)) as daemon:
        yield daemon


@pytest.mark.parametrize(
    ("key", "tenant", "reason"),
    [
        (None, "a", "CREDENTIAL_MISSING"),
        ("guess", "a", "CREDENTIAL_UNKNOWN"),
        ("x" * 600, "a", "CREDENTIAL_MISSING"),
        ("key-a", "b", "TENANT_NOT_ALLOWED"),
        ("gateway", "", "TENANT_NOT_ALLOWED"),
        ("gateway", "c", "TENANT_NOT_ALLOWED"),
        ("auditor", "", "TENANT_NOT_ALLOWED"),
        ("two", "", "TENANT_NOT_ALLOWED"),
        ("two", "a", "TENANT_NOT_ALLOWED"),
        ("none", "", "TENANT_NOT_ALLOWED"),
        ("any", "nobody", "UNKNOWN_TENANT"),
        ("key-a", "", None),
        ("key-a", "a", None),
        ("gateway", "b", None),
        ("any", "c", None),
        ("admin", "", None),
    ],
)
async def test_who_may_act_for_whom(
    daemon: SchedulerDaemon, key: str | None, tenant: str, reason: str | None
) -> None:
    async with connected(daemon, key) as client:
        if reason is None:
            assert (await client.acquire("r1", tenant=tenant)).ticket
            return
        error = await error_of(client.acquire("r1", tenant=tenant))
        assert error.reason == reason
        if reason != "UNKNOWN_TENANT":  # who may act for anybody may cancel what is not there
            assert (await error_of(client.cancel("r1", tenant))).reason == reason
        assert daemon.status()["pool"]["tickets_open"] == 0  # type: ignore[index]


async def test_a_ticket_of_another_tenant_is_unknown(daemon: SchedulerDaemon) -> None:
    async with connected(daemon, "key-a") as client:
        ticket = (await client.acquire("r1", tenant="")).ticket
    for key in ("key-b", "auditor"):
        async with connected(daemon, key) as client:
            for call in (client.settle(ticket), client.renew(ticket)):
                error = await error_of(call)
                assert (error.reason, error.code) == ("UNKNOWN_TICKET", Code.NOT_FOUND)
    async with connected(daemon, "gateway") as client:
        assert (await client.renew(ticket)).state == pb.TICKET_STATE_OPEN


async def test_usage_is_believed_from_services_alone(daemon: SchedulerDaemon) -> None:
    none_used = pb.Usage(prompt_tokens=1, cached_tokens=1)
    async with connected(daemon, "admin") as client:
        granted = await client.acquire("r1", tenant="")
        settled = await client.settle(granted.ticket, none_used)
        assert settled.attained_cost == pytest.approx(granted.charged_cost)
        granted = await client.acquire("r3", tenant="")
        settled = await client.settle(granted.ticket, none_used, pb.OUTCOME_WORKER_LOST)
        assert settled.attained_cost == pytest.approx(granted.charged_cost)
        assert not settled.request_continues
    async with connected(daemon, "key-a") as client:
        granted = await client.acquire("r2", tenant="")
        assert (await client.settle(granted.ticket, none_used)).attained_cost == 1


async def test_a_revoked_key_is_refused_within_a_second(world: World) -> None:
    async with (
        world.daemon(world.config(insecure_loopback=False, directory_poll_ms=500)) as daemon,
        connected(daemon, "key-a") as client,
    ):
        assert (await client.acquire("r1", tenant="")).ticket
        world.revoke_key("key-a")
        revoked = time.monotonic()
        codes = {grpc.StatusCode.OK}
        while codes == {grpc.StatusCode.OK}:
            call = client.acquire("r1", tenant="")
            codes = {await call.code()}
            assert time.monotonic() - revoked < 1.0
        assert codes == {grpc.StatusCode.UNAUTHENTICATED}


async def test_a_key_expires_while_it_is_cached(world: World, daemon: SchedulerDaemon) -> None:
    world.add_key("brief", Principal("brief", "service", (A,), expires_at_ms=wall_ms() + 300))
    async with connected(daemon, "brief") as client:
        assert (await client.acquire("r1", tenant="")).ticket
        await asyncio.sleep(0.35)
        assert (await error_of(client.acquire("r1", tenant=""))).reason == "CREDENTIAL_UNKNOWN"


async def test_with_the_directory_away_known_keys_go_on(world: World, daemon: SchedulerDaemon) -> None:
    async with connected(daemon, "key-a") as client:
        assert (await client.acquire("r1", tenant="")).ticket
        world.directory.available = False
        assert (await client.acquire("r2", tenant="")).ticket
        async with connected(daemon, "key-b") as other:
            error = await error_of(other.acquire("r1", tenant=""))
            assert (error.reason, error.code) == ("DIRECTORY_AWAY", Code.UNAVAILABLE)
        world.directory.available = True


async def test_a_key_is_checked_even_in_development(world: World) -> None:
    async with world.daemon() as daemon, connected(daemon, "guess") as client:
        assert (await error_of(client.acquire("r1"))).reason == "CREDENTIAL_UNKNOWN"


async def test_a_port_in_use_stops_the_start(world: World, daemon: SchedulerDaemon) -> None:
    config = world.config(listen=daemon.address, secret_file=world.folder / "other.secret")
    with pytest.raises(InvalidConfig, match=f"cannot listen on {daemon.address}"):
        async with SchedulerDaemon(config, world.ports()):
            pass


async def test_a_database_that_is_away_stops_the_start(world: World) -> None:
    world.map_store.available = False
    with pytest.raises(Unavailable, match="map store is away"):
        async with SchedulerDaemon(world.config(), world.ports()):
            pass


async def test_a_missing_certificate_stops_the_start(world: World) -> None:
    tls = TlsConfig(world.folder / "no.crt", world.folder / "no.key")
    with pytest.raises(InvalidConfig, match=r"no\.key cannot be read"):
        async with SchedulerDaemon(world.config(tls=tls), world.ports()):
            pass


async def test_tls(world: World) -> None:
    key, certificate = world.folder / "tls.key", world.folder / "tls.crt"
    arguments = ["-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1"]
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run(  # noqa: ASYNC221
        ["openssl", "req", *arguments, "-keyout", key, "-out", certificate, *names],
        check=True,
        capture_output=True,
    )
    config = world.config(listen="0.0.0.0:0", tls=TlsConfig(certificate, key), insecure_loopback=False)
    async with world.daemon(config) as daemon:
        port = daemon.address.rpartition(":")[2]
        credentials = grpc.ssl_channel_credentials(certificate.read_bytes())
        async with grpc.aio.secure_channel(f"localhost:{port}", credentials) as channel:
            client = Client(SchedulerStub(channel), (("authorization", "Bearer key-a"),))
            assert (await client.acquire("r1", tenant="")).ticket
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            client = Client(SchedulerStub(channel), (("authorization", "Bearer key-a"),))
            assert (await error_of(client.acquire("r1", tenant=""))).code is Code.UNAVAILABLE
