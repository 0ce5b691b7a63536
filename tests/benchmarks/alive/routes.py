"""Every way from a tenant to the engines: what is started for it, and how one request goes through.

===================  =========================================================================================
``round-robin``      straight to the engines, one after the other
``evenhand``         the real stack (broker, database, state service, scheduler, edges) and the SDK
``vllm-cache``       ``vllm-router --policy cache_aware``
``vllm-kv``          ``vllm-router --policy kv_aware``, fed with the engines' KV events and replays over ZMQ
``sglang``           ``sglang-router`` with its default policy, ``cache_aware``
``kvwarden``         ``scheduling: drr``, its tenant limits lifted, so that its deficit round robin alone decides
``kvwarden-limits``  the same with its default limits: 600 requests a minute and 64 at once for each tenant
===================  =========================================================================================

All else is as published. Two things have no published answer. kvwarden serves one engine a model name and
chooses none, so each engine has a name of its own and the client takes the names in turn; it admits as many
requests at once as the fleet has slots, which is what its ``max_concurrent`` is for. Prompts go as token ids
where that costs the router least (``kv_aware`` would ask an engine to tokenize text), and as text where the
router matches or counts text (``cache_aware``, kvwarden).
"""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

import aiohttp
from tests.benchmarks.alive import wheels
from tests.benchmarks.alive.plan import FLEET, TENANTS, Arrival
from tests.benchmarks.alive.stream import StreamUsage

from evenhand.client import AsyncClient, Grant
from evenhand.core.errors import Unavailable
from evenhand.local.engines import EngineFleet, FleetConfig
from evenhand.local.ports import HOST, FreePorts
from evenhand.local.process import ManagedProcess
from evenhand.local.stack import Stack, StackConfig, http_ready, keys_by_principal
from evenhand.local.stack_file import StackWorker
from evenhand.postgres.seed import SeedApiKey, SeedFile, SeedTenant

POOL = "alive"
ACQUIRE_SECONDS_MAX = 600.0
READY_SECONDS_MAX = 90.0
STATUS_POLL_SECONDS = 0.05
UNLIMITED = 1_000_000
"""Of kvwarden's limits: more than a run can reach."""


@dataclass(slots=True)
class Call:
    """Where one request goes, and who wants to know how it went."""

    host: str
    port: int
    body: bytes
    headers: str = ""
    grant: Grant | None = None

    def first_token(self) -> None:
        if self.grant is not None:
            self.grant.first_token()

    def used(self, usage: StreamUsage) -> None:
        if self.grant is not None:
            self.grant.record_usage(
                prompt_tokens=usage.prompt_tokens,
                cached_tokens=usage.cached_tokens,
                output_tokens=usage.output_tokens,
            )


class Route(Protocol):
    """One way to the engines, ready for requests."""

    def place(self, arrival: Arrival) -> AbstractAsyncContextManager[Call]: ...

    def router_pids(self) -> Mapping[str, int]:
        """Processes between client and engines, by name."""
        ...


class AliveFleet(EngineFleet):
    """Engines with a stock engine's empty event topic; with ``own_models`` each serves a model of its own name."""

    def __init__(self, config: FleetConfig, logs: Path, own_models: bool = False) -> None:
        self.own_models = own_models
        super().__init__(config, logs)

    def _command(self, number: int) -> tuple[str, ...]:
        model = f"engine-{number}" if self.own_models else self.config.model
        return (*super()._command(number), "--topic", "-", "--model", model)


def _host_port(address: str) -> tuple[str, int]:
    parts = urlsplit(address)
    return parts.hostname or HOST, parts.port or 80


def _body(model: str, rest: bytes, salt: str = "") -> bytes:
    salted = f'"cache_salt":{json.dumps(salt)},' if salt else ""
    return f'{{"model":"{model}",{salted}'.encode() + rest


@dataclass(slots=True)
class Direct:
    """Engines in turn."""

    turns: "itertools.cycle[tuple[str, int]]"

    @asynccontextmanager
    async def place(self, arrival: Arrival) -> AsyncIterator[Call]:
        host, port = next(self.turns)
        yield Call(host, port, _body(FLEET.model, arrival.ids_body))

    def router_pids(self) -> Mapping[str, int]:
        return {}


@dataclass(slots=True)
class ThroughRouter:
    """One router process in front of all engines. ``models`` are named in turn."""

    port: int
    process: ManagedProcess
    text: bool
    models: "itertools.cycle[str]" = field(default_factory=lambda: itertools.cycle((FLEET.model,)))

    @asynccontextmanager
    async def place(self, arrival: Arrival) -> AsyncIterator[Call]:
        body = _body(next(self.models), arrival.text_body if self.text else arrival.ids_body)
        yield Call(HOST, self.port, body, f"X-Tenant-ID: {arrival.tenant}\r\n")

    def router_pids(self) -> Mapping[str, int]:
        return {self.process.name: self.process.pid or 0}


@dataclass(slots=True)
class ThroughEvenhand:
    """Acquire, call, settle: one client a tenant, each with a key of its own."""

    clients: dict[str, AsyncClient]
    stack: Stack
    addresses: dict[str, tuple[str, int]]

    @asynccontextmanager
    async def place(self, arrival: Arrival) -> AsyncIterator[Call]:
        async with self.clients[arrival.tenant].acquire(
            tokens=arrival.prompt, max_output_tokens=arrival.output_tokens, timeout=ACQUIRE_SECONDS_MAX
        ) as grant:
            host, port = self.addresses[grant.address]
            yield Call(host, port, _body(FLEET.model, arrival.ids_body, grant.cache_salt), grant=grant)

    def router_pids(self) -> Mapping[str, int]:
        pids = {name: service.process.pid for name, service in self.stack.services.items()}
        pids |= {"broker": self.stack.broker.pid, "database": self.stack.database.pid}
        return {name: pid for name, pid in pids.items() if pid}


@asynccontextmanager
async def _round_robin(fleet: EngineFleet, folder: Path) -> AsyncIterator[Route]:
    yield Direct(itertools.cycle([_host_port(worker.address) for worker in fleet.workers]))


async def _workers_known(stack: Stack, count: int) -> None:
    """Return once the scheduler owns the pool and every worker takes requests."""
    try:
        async with asyncio.timeout(READY_SECONDS_MAX):
            while True:
                pool = (await stack.status())["pool"]
                if isinstance(pool, dict) and [row["state"] for row in pool["workers"]] == ["ready"] * count:
                    return
                await asyncio.sleep(STATUS_POLL_SECONDS)
    except TimeoutError:
        raise Unavailable(f"The scheduler did not see {count} workers within {READY_SECONDS_MAX:.0f} s.") from None


@asynccontextmanager
async def _evenhand(fleet: EngineFleet, folder: Path) -> AsyncIterator[Route]:
    seed = SeedFile(
        tenants=[SeedTenant(tenant_id=tenant) for tenant in TENANTS],
        api_keys=[SeedApiKey(principal=tenant, tenants=[tenant]) for tenant in TENANTS],
    )
    async with AsyncExitStack() as exit_stack:
        config = StackConfig(folder / "stack", POOL, seed, fleet.workers, durable=False)
        stack = await exit_stack.enter_async_context(Stack(config))
        await _workers_known(stack, len(fleet.workers))
        keys = keys_by_principal(stack.generated_keys)
        clients = {
            tenant: await exit_stack.enter_async_context(
                AsyncClient(stack.scheduler_address, pool=POOL, api_key=keys[tenant])
            )
            for tenant in TENANTS
        }
        for client in clients.values():
            await client.resolve()
        addresses = {worker.address: _host_port(worker.address) for worker in fleet.workers}
        yield ThroughEvenhand(clients, stack, addresses)


@asynccontextmanager
async def _process(
    name: str,
    command: list[str],
    port: int,
    folder: Path,
    text: bool,
    environment: Mapping[str, str] | None = None,
) -> AsyncIterator[ThroughRouter]:
    process = ManagedProcess(name, command, folder / f"{name}.log", environment)
    async with aiohttp.ClientSession() as http:
        await process.start(http_ready(http, f"http://{HOST}:{port}/health"), READY_SECONDS_MAX)
    try:
        yield ThroughRouter(port, process, text)
    finally:
        await process.stop()


def _vllm_command(workers: tuple[StackWorker, ...], policy: str, port: int, metrics_port: int) -> list[str]:
    command = [
        wheels.installed(wheels.VLLM_ROUTER).command("vllm-router"), "--host", HOST, "--port", str(port),
        "--prometheus-port", str(metrics_port), "--policy", policy, "--log-level", "warning",
        "--worker-startup-check-interval", "1", "--worker-urls", *(worker.address for worker in workers),
    ]  # fmt: skip
    if policy == "kv_aware":
        command += ["--kv-event-model", FLEET.model, "--kv-event-block-size", str(FLEET.block_size)]
        for worker in workers:
            command += ["--kv-event-source", f"{worker.address}={worker.kv_events}"]
            command += ["--kv-event-replay-source", f"{worker.address}={worker.replay}"]
    return command


def _vllm(policy: str) -> "OpenRoute":
    @asynccontextmanager
    async def opened(fleet: EngineFleet, folder: Path) -> AsyncIterator[Route]:
        ports = FreePorts()
        port = ports.draw()
        command = _vllm_command(fleet.workers, policy, port, ports.draw())
        async with _process("vllm-router", command, port, folder, text=policy == "cache_aware") as route:
            yield route

    return opened


@asynccontextmanager
async def _sglang(fleet: EngineFleet, folder: Path) -> AsyncIterator[Route]:
    ports = FreePorts()
    port = ports.draw()
    command = [
        wheels.installed(wheels.SGLANG_ROUTER).command("sglang-router"), "launch", "--host", HOST, "--port",
        str(port), "--prometheus-host", HOST, "--prometheus-port", str(ports.draw()), "--log-level", "warn",
        "--worker-startup-check-interval", "1", "--worker-urls", *(worker.address for worker in fleet.workers),
    ]  # fmt: skip
    async with _process("sglang-router", command, port, folder, text=True) as route:
        yield route


def _kvwarden(limits: bool) -> "OpenRoute":
    @asynccontextmanager
    async def opened(fleet: EngineFleet, folder: Path) -> AsyncIterator[Route]:
        port = FreePorts().draw()
        defaults: dict[str, object] = {"scheduling": "drr"}
        if not limits:
            defaults |= {"max_concurrent_requests": UNLIMITED, "rate_limit_rpm": UNLIMITED}
        config = {
            "host": HOST,
            "port": port,
            "max_concurrent": fleet.config.engines * fleet.config.slots,
            "tenant_defaults": defaults,
            "models": [
                {"model_id": worker.name, "port": _host_port(worker.address)[1]} for worker in fleet.workers
            ],
        }
        path = folder / "kvwarden.yaml"
        path.write_text(json.dumps(config), encoding="utf-8")
        command = [
            wheels.installed(wheels.KVWARDEN).command("kvwarden"), "serve", "--config", str(path),
            "--no-interactive", "--log-level", "WARNING",
        ]  # fmt: skip
        environment = {"KVWARDEN_DEV_SKIP_ENGINE_LAUNCH": "1", "KVWARDEN_TELEMETRY": "0"}
        async with _process("kvwarden", command, port, folder, text=True, environment=environment) as route:
            route.models = itertools.cycle([worker.name for worker in fleet.workers])
            yield route

    return opened


OpenRoute = Callable[[EngineFleet, Path], AbstractAsyncContextManager[Route]]


@dataclass(frozen=True, slots=True)
class RouteKind:
    """A row of the tables."""

    name: str
    says: str
    opened: OpenRoute
    wheel: tuple[str, str] | None = None
    own_models: bool = False
    plain: bool = True
    """Knows no tenants."""


KINDS = (
    RouteKind("round-robin", "no router, engines in turn", _round_robin),
    RouteKind("evenhand", "this project: stack and SDK", _evenhand, plain=False),
    RouteKind("vllm-cache", "vllm-router, cache_aware", _vllm("cache_aware"), wheels.VLLM_ROUTER),
    RouteKind("vllm-kv", "vllm-router, kv_aware with KV events", _vllm("kv_aware"), wheels.VLLM_ROUTER),
    RouteKind("sglang", "sglang-router, cache_aware", _sglang, wheels.SGLANG_ROUTER),
    RouteKind("kvwarden", "kvwarden, drr, no tenant limits", _kvwarden(False), wheels.KVWARDEN, True, False),
    RouteKind("kvwarden-limits", "kvwarden, drr, default limits", _kvwarden(True), wheels.KVWARDEN, True, False),
)
