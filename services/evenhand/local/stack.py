"""The whole system on one machine: embedded broker and database, and every service as a process of its own.

::

    Stack ── EmbeddedBroker        ── state service
          ── EmbeddedDatabase      ── scheduler
                                   ── one worker edge for each worker

Broker and database start first and stop last; the services come up side by side. Everything listens on loopback.
What is kept between runs (the database, the master secret, the edges' checkpoints) lies under ``data_dir``; logs
lie in ``data_dir/logs``. The broker keeps nothing: at each start the log is another one, which readers find out
and heal with snapshots.

Whatever dies, broker and database included, is started again on its old address, with a pause that grows while
it keeps dying, for as long as the stack runs; one watch for each part, so that none waits for another. The broker
ignores retention, so it is also restarted on purpose once it has grown past a bound.
"""

import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import quote

import aiohttp

from evenhand.core.errors import EvenhandError, InvalidConfig, Unavailable
from evenhand.local.broker import MEMORY_BYTES_MAX, EmbeddedBroker
from evenhand.local.database import EmbeddedDatabase, in_thread
from evenhand.local.ports import HOST, FreePorts, bind_fault
from evenhand.local.process import ManagedProcess
from evenhand.local.stack_file import StackWorker
from evenhand.logs import get_logger
from evenhand.loopback import is_loopback
from evenhand.postgres.database import Database, DatabaseConfig
from evenhand.postgres.migrate import migrate
from evenhand.postgres.seed import GeneratedKey, SeedFile, seed_directory
from evenhand.scheduler.config import split_address

log = get_logger("stack")

WATCH_SECONDS = 0.5
RESTART_PAUSE_SECONDS_MIN = 0.2
RESTART_PAUSE_SECONDS_MAX = 10.0
STEADY_SECONDS = 30.0
"""What has run for so long before it died is started again without a longer pause than the first time."""
READY_SECONDS_MAX = 90.0


@dataclass(frozen=True, slots=True)
class StackConfig:
    """What a stack is made of."""

    data_dir: Path
    """Kept between runs; made if it is absent."""
    pool: str
    seed: SeedFile
    workers: tuple[StackWorker, ...]
    listen: str = f"{HOST}:0"
    """HOST:PORT of the scheduler; port 0 takes a free one."""
    insecure_loopback: bool = False
    durable: bool = True
    """False: a crash of the machine may cost the database; for runs whose data is thrown away."""
    keep_keys: Callable[[dict[str, str]], None] | None = field(default=None, compare=False)
    """Takes newly made API keys by principal, in clear for the only time, before the database keeps their hashes:
    what stops a start half-way leaves no principal whose key nobody has."""


def evenhand(*arguments: str) -> tuple[str, ...]:
    """The command line that runs one of our commands with this interpreter."""
    return (sys.executable, "-m", "evenhand.cli", *arguments)


def http_ready(http: aiohttp.ClientSession, url: str) -> Callable[[], Awaitable[bool]]:
    """A check that is true once the page answers 200."""

    async def ready() -> bool:
        try:
            async with http.get(url, timeout=aiohttp.ClientTimeout(total=2)) as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    return ready


@dataclass(slots=True)
class Service:
    """One service of the stack: its process and how to tell that it is ready."""

    process: ManagedProcess
    ready: Callable[[], Awaitable[bool]]

    def runs(self) -> bool:
        return self.process.running

    async def start(self) -> None:
        await self.process.start(self.ready, READY_SECONDS_MAX)


class Stack:
    """``async with Stack(config) as stack``: everything runs and is ready inside the block."""

    def __init__(self, config: StackConfig) -> None:
        self.config = config
        self.logs = config.data_dir / "logs"
        self.broker = EmbeddedBroker(log_file=self.logs / "broker.log")
        self.database = EmbeddedDatabase(config.data_dir / "database", durable=config.durable)
        self._ports = FreePorts()
        self.services: dict[str, Service] = {}
        self.generated_keys: tuple[GeneratedKey, ...] = ()
        self.scheduler_address = ""
        self.metrics_ports: dict[str, int] = {}
        self._exit = AsyncExitStack()
        self._watches: list[asyncio.Task[None]] = []
        self._http: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseExceptionGroup as several:
            await self._exit.aclose()
            raise several.exceptions[0] from None
        except BaseException:
            await self._exit.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._exit.aclose()

    async def status(self) -> dict[str, object]:
        """The scheduler's ``/status`` page; raises ``Unavailable`` while it does not answer."""
        assert self._http is not None, "the stack is not started"
        url = f"http://{HOST}:{self.metrics_ports['scheduler']}/status"
        try:
            async with self._http.get(url, timeout=aiohttp.ClientTimeout(total=2)) as response:
                page: dict[str, object] = await response.json()
                return page
        except (aiohttp.ClientError, TimeoutError) as error:
            raise Unavailable("The scheduler's status page does not answer.") from error

    # Within

    async def _start(self) -> None:
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidConfig(
                f"The data directory {self.config.data_dir} cannot be used: {error.strerror}."
            ) from error
        self._http = await self._exit.enter_async_context(aiohttp.ClientSession())
        await self._exit.enter_async_context(self.broker)
        await self._exit.enter_async_context(self.database)
        await self._prepare_database()
        self.services = self._services()
        self._exit.push_async_callback(self._stop_services)
        async with asyncio.TaskGroup() as starting:
            for service in self.services.values():
                starting.create_task(service.start())
        self._exit.push_async_callback(self._end_watches)
        self._watch("broker", self._broker_runs, self.broker.restart)
        self._watch("database", lambda: self.database.pid is not None, lambda: in_thread(self.database.restart))
        for name, service in self.services.items():
            self._watch(name, service.runs, service.start)

    async def _stop_services(self) -> None:
        """The edges first, so that nothing new arrives; then scheduler and state service."""
        for names in ([name for name in self.services if name.startswith("edge-")], ["scheduler"], ["state"]):
            await asyncio.gather(*(self.services[name].process.stop() for name in names))

    async def _prepare_database(self) -> None:
        await migrate(self.database.dsn)
        async with (
            await Database.open(DatabaseConfig(self.database.dsn, "stack", connections_max=1)) as database,
            database.connection() as connection,
            connection.transaction(),
        ):
            result = await seed_directory(connection, self.config.seed)
            if self.config.keep_keys is not None and result.generated:
                self.config.keep_keys(keys_by_principal(result.generated))
        self.generated_keys = result.generated

    def _services(self) -> dict[str, Service]:
        return {"state": self._state(), "scheduler": self._scheduler()} | {
            f"edge-{worker.name}": self._edge(worker) for worker in self.config.workers
        }

    def _service(self, name: str, path: str, port: int, *arguments: str) -> Service:
        assert self._http is not None, "the stack is not started"
        self.metrics_ports[name] = port
        common = (
            "--kafka", self.broker.bootstrap, "--kafka-profile", "embedded", "--metrics-port", str(port),
        )  # fmt: skip
        process = ManagedProcess(name, evenhand(*arguments, *common), self.logs / f"{quote(name, safe='')}.log")
        return Service(process, http_ready(self._http, f"http://{HOST}:{port}{path}"))

    def _state(self) -> Service:
        return self._service("state", "/ready", self._ports.draw(), "state", "--dsn", self.database.dsn)

    def _scheduler(self) -> Service:
        host, _, port = self.config.listen.rpartition(":")
        self.scheduler_address = f"{host}:{int(port) or self._ports.draw()}"
        secret_file = self.config.data_dir / "master.secret"
        arguments: tuple[str, ...] = (
            "scheduler", "--pool", self.config.pool, "--listen", self.scheduler_address,
            "--dsn", self.database.dsn, "--secret-file", str(secret_file),
        )  # fmt: skip
        if self.config.insecure_loopback:
            arguments += ("--insecure-loopback",)
        return self._service("scheduler", "/healthz", self._ports.draw(), *arguments)

    def _edge(self, worker: StackWorker) -> Service:
        checkpoint = self.config.data_dir / "edges" / f"{quote(worker.name, safe='')}.checkpoint"
        checkpoint.parent.mkdir(exist_ok=True)
        arguments: tuple[str, ...] = (
            "worker-edge", "--worker-id", worker.name, "--pool", self.config.pool, "--address", worker.address,
            "--checkpoint", str(checkpoint), "--slots", str(worker.slots),
        )  # fmt: skip
        arguments += ("--kv-events", worker.kv_events) if worker.kv_events else ("--no-events",)
        if worker.replay:
            arguments += ("--replay", worker.replay)
        return self._service(f"edge-{worker.name}", "/health", self._ports.draw(), *arguments)

    def _broker_runs(self) -> bool:
        """Whether it runs and has not grown past its bound."""
        return self.broker.running and self.broker.memory_bytes() <= MEMORY_BYTES_MAX

    def _watch(self, name: str, runs: Callable[[], bool], start: Callable[[], Awaitable[None]]) -> None:
        self._watches.append(asyncio.create_task(_keep_alive(name, runs, start), name=f"watch of {name}"))

    async def _end_watches(self) -> None:
        for watch in self._watches:
            watch.cancel()
        await asyncio.gather(*self._watches, return_exceptions=True)


async def _keep_alive(name: str, runs: Callable[[], bool], start: Callable[[], Awaitable[None]]) -> None:
    """Start one part again whenever it no longer runs."""
    loop = asyncio.get_running_loop()
    pause_s, started_s = RESTART_PAUSE_SECONDS_MIN, loop.time()
    while True:
        await asyncio.sleep(WATCH_SECONDS)
        if runs():
            continue
        if loop.time() - started_s > STEADY_SECONDS:
            pause_s = RESTART_PAUSE_SECONDS_MIN
        log.warning(
            "a part of the stack ended or outgrew its bound and is started again", part=name, pause_s=pause_s
        )
        await asyncio.sleep(pause_s)
        pause_s = min(RESTART_PAUSE_SECONDS_MAX, pause_s * 2)
        started_s = loop.time()
        try:
            await start()
        except (EvenhandError, OSError) as error:
            log.warning("a part did not come up again", part=name, error=str(error))


def require_free(listen: str) -> None:
    """Raise ``InvalidConfig`` with one sentence if a stack cannot listen on the address."""
    host, port = split_address(listen, "The address to listen on")
    if not is_loopback(host):
        raise InvalidConfig(
            f"This command has no TLS and listens on loopback only, not on {listen}; the command scheduler has it."
        )
    fault = bind_fault(port, host)
    if fault is not None:
        raise InvalidConfig(f"The scheduler cannot listen on {listen}: {fault.strerror}.") from fault


def keys_by_principal(keys: Sequence[GeneratedKey]) -> dict[str, str]:
    """Generated API keys by the principal they are for."""
    return {generated.principal: generated.key for generated in keys}
