"""The scheduler daemon of one pool, composed: ports in, a gRPC address out.

::

    start    secret → directory → map from the store → listen → tail the log → caught up → stand for the lease
    stop     refuse what is queued → wait, bounded, for open tickets → last checkpoint, lease let go → close

The only composition root of this package. ``main`` gives it the real ports, tests and ``evenhand up`` give it
whichever they like. Each background task has a guard: an unexpected fault is recorded and counted, and the task
starts again after a pause. Everything stops with the context.
"""

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import grpc
from aiohttp import web
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from evenhand.core.errors import InvalidConfig, Unavailable
from evenhand.core.kv import ControlMessage
from evenhand.logs import get_logger
from evenhand.pages import Pages, alive, metrics, readiness
from evenhand.ports import KV_TOPIC, Directory, LeaseStore, LogReader, LogWriter, MapStore
from evenhand.scheduler.actor import PoolActor
from evenhand.scheduler.calls import Calls
from evenhand.scheduler.config import DaemonConfig, TlsConfig, split_address
from evenhand.scheduler.control import ControlPublisher
from evenhand.scheduler.directory_watch import DirectoryWatch
from evenhand.scheduler.identity import Identity
from evenhand.scheduler.live_map import LiveMap
from evenhand.scheduler.metrics import SchedulerMetrics
from evenhand.scheduler.office import PoolOffice
from evenhand.scheduler.ownership import Ownership
from evenhand.scheduler.secret import load_master_secret
from evenhand.scheduler.servicer import Servicer
from evenhand.scheduler.session import SessionLimits
from evenhand.scheduler.tickets import TicketSigner
from evenhand.wire.generated import scheduler_pb2
from evenhand.wire.generated.scheduler_pb2_grpc import add_SchedulerServicer_to_server

SERVICE = "evenhand.v1.Scheduler"
START_TIMEOUT_S = 15.0
"""Longest wait for the broker and the database at the start."""
TASK_RESTART_S = 1.0
STOP_GRACE_S = 0.5
"""Streams still open after the last checkpoint end this much later."""
MESSAGE_BYTES_MAX = 4 * 1024 * 1024
KEEPALIVE_MS = 10_000
KEEPALIVE_TIMEOUT_MS = 5_000
"""A peer that does not answer for so long is gone: its stream breaks, its calls are withdrawn."""

log = get_logger("scheduler")


@dataclass(frozen=True, slots=True)
class DaemonPorts:
    """Everything outside that the daemon needs. Whoever made them closes them."""

    reader: LogReader
    writer: LogWriter
    map_store: MapStore
    leases: LeaseStore
    directory: Directory


class SchedulerDaemon:
    """``async with SchedulerDaemon(config, ports) as daemon``: serves until the block is left."""

    def __init__(self, config: DaemonConfig, ports: DaemonPorts) -> None:
        pool_id = config.pool_id
        self._config = config
        self._ports = ports
        secret = load_master_secret(config.secret_file)
        signer = TicketSigner(secret.ticket_key(pool_id))
        self.metrics = SchedulerMetrics(pool_id, config.metric_tenants_max)
        self._control = ControlPublisher(ports.writer, self.metrics)
        ttl_ms = min(config.core.ticket_ttl_ms, config.core.leg_ms_max)
        self.actor = PoolActor(signer, self.metrics, self._control.wish, ttl_ms, config.calls_pending_max)
        self.watch = DirectoryWatch(ports.directory, pool_id, config.directory_poll_ms, self.actor.tell)
        self.live_map = LiveMap(
            ports.map_store,
            ports.reader,
            self.watch,
            config.core,
            self.actor.tell,
            self._wish,
            self.metrics,
        )
        self._office = PoolOffice(config.core, self.actor, self.live_map, self.watch, self.metrics)
        self._ownership = Ownership(
            ports.leases,
            pool_id,
            f"scheduler-{uuid.uuid4()}",
            config.lease_ttl_ms,
            config.checkpoint_interval_ms,
            self._office,
        )
        calls = Calls(self.actor, self.live_map, self.watch, secret, signer, pool_id, ttl_ms)
        identity = Identity(self.watch, config.insecure_loopback)
        limits = SessionLimits(
            config.session_calls_max, config.acquire_timeout_default_ms, config.acquire_timeout_max_ms
        )
        self._servicer = Servicer(calls, identity, self.metrics, limits)
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        self._server: grpc.aio.Server | None = None
        self._pages: Pages | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.address = ""
        """HOST:PORT of the gRPC service, once started."""
        self.metrics_address = ""
        """HOST:PORT of the pages; empty if they are not served."""

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    @property
    def warm(self) -> bool:
        """The map is loaded and the log read to its end."""
        return self.live_map.caught_up.is_set()

    async def wait_owner(self) -> None:
        """Return once this process may grant."""
        await self._ownership.owning.wait()

    def status(self) -> dict[str, object]:
        """The pool as it stands, in plain values: what ``/status`` shows."""
        return dict(self._office.status_page())

    async def stop(self) -> None:
        """Drain and close, within the configured time and a little more."""
        await self._health.enter_graceful_shutdown()
        self.actor.shut_down()
        if self.actor.granting and self.actor.open:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._config.drain_timeout_ms / 1000):
                    await self.actor.nothing_open()
        await self._end_tasks()
        await self._ownership.resign()
        await self._close()

    def _wish(self, message: ControlMessage) -> None:
        """What the fold asks of edges, published by the owner alone: a standby folds the same log."""
        if self.actor.granting:
            self._control.wish(message)

    # ---- within ---------------------------------------------------------------------------------------------

    async def _start(self) -> None:
        began = time.monotonic()
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await self.watch.refresh()
                await self._ports.reader.partition_count(KV_TOPIC)
                await self.live_map.load()
        except TimeoutError as error:
            raise Unavailable(f"Broker and database did not answer within {START_TIMEOUT_S:.0f} s.") from error
        self.metrics.know_tenants(self.watch.tenants)
        await self._listen()
        if self._config.metrics_listen is not None:
            host, port = split_address(self._config.metrics_listen, "metrics_listen")
            self._pages = Pages(
                {
                    "/metrics": lambda: metrics(self._page()),
                    "/status": lambda: web.json_response(self.status()),
                    "/healthz": lambda: alive() if self.warm else readiness("starting"),
                },
                port,
                host,
            )
            await self._pages.start()
            self.metrics_address = self._pages.address
        self._spawn("directory", self.watch.run)
        self._spawn("control", self._control.run)
        self._spawn("live_map", self.live_map.run)
        self._spawn("ownership", self._stand_for_office)
        self._spawn("health", self._tell_health)
        log.info("started", address=self.address, pool=self._config.pool_id, load_s=time.monotonic() - began)

    async def _stand_for_office(self) -> None:
        await self.live_map.caught_up.wait()
        await self._ownership.run()

    async def _tell_health(self) -> None:
        """SERVING for the server once it is warm, for the service's own name only while this process may grant."""
        await self.live_map.caught_up.wait()
        await self._health.set("", health_pb2.HealthCheckResponse.SERVING)
        owning = self._ownership.owning
        told = None
        while True:
            state = (
                health_pb2.HealthCheckResponse.SERVING
                if owning.is_set()
                else health_pb2.HealthCheckResponse.NOT_SERVING
            )
            if state != told:
                await self._health.set(SERVICE, state)
                told = state
            await asyncio.sleep(self._config.lease_ttl_ms / 20_000)

    async def _listen(self) -> None:
        options = [
            ("grpc.so_reuseport", 0),
            ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
            ("grpc.keepalive_time_ms", KEEPALIVE_MS),
            ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
        ]
        server = self._server = grpc.aio.server(
            options=options, maximum_concurrent_rpcs=self._config.calls_pending_max
        )
        add_SchedulerServicer_to_server(self._servicer, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)  # type: ignore[no-untyped-call]
        await self._health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
        if self._config.reflection:
            names = (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
            assert scheduler_pb2.DESCRIPTOR.services_by_name["Scheduler"].full_name == SERVICE
            reflection.enable_server_reflection(names, server)
        listen, tls = self._config.listen, self._config.tls
        try:
            if tls is None:
                port = server.add_insecure_port(listen)
            else:
                port = server.add_secure_port(listen, server_credentials(tls))
        except RuntimeError as error:
            raise InvalidConfig(
                f"The scheduler cannot listen on {listen}: the port is taken or not ours."
            ) from error
        await server.start()
        self.address = f"{listen.rpartition(':')[0]}:{port}"

    def _page(self) -> bytes:
        self.metrics.know_tenants(self.watch.tenants)
        self._office.refresh_gauges()
        return self.metrics.page()

    def _spawn(self, name: str, run: Callable[[], Awaitable[None]]) -> None:
        self._tasks.append(asyncio.create_task(self._guard(name, run), name=f"scheduler.{name}"))

    async def _guard(self, name: str, run: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await run()
                return
            except Exception as error:
                self.metrics.faults.add(name)
                log.error("task_fault", task=name, exc_info=error)
                await asyncio.sleep(TASK_RESTART_S)

    async def _end_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()

    async def _close(self) -> None:
        await self._end_tasks()
        if self._server is not None:
            await self._server.stop(STOP_GRACE_S)
            self._server = None
        if self._pages is not None:
            await self._pages.stop()
            self._pages = None


def server_credentials(tls: TlsConfig) -> grpc.ServerCredentials:
    """Credentials from PEM files; raises ``InvalidConfig`` naming the file that cannot be read."""
    contents = []
    for path in (tls.key_file, tls.certificate_file, *([tls.ca_file] if tls.ca_file else [])):
        try:
            contents.append(path.read_bytes())
        except OSError as error:
            raise InvalidConfig(f"The TLS file {path} cannot be read: {error.strerror}.") from error
    key, certificate, *ca = contents
    return grpc.ssl_server_credentials(
        [(key, certificate)], root_certificates=ca[0] if ca else None, require_client_auth=bool(ca)
    )
