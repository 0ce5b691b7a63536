"""The processes that run the product's own code: worker edges, the state service, schedulers.

Each is composed as its own ``main`` composes it, from the same objects, over simulated ports.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from evenhand.core.errors import Unavailable
from evenhand.core.facts import SchedulerConfig
from evenhand.core.kv import ControlMessage
from evenhand.core.status import PoolStatus
from evenhand.ports import KV_TOPIC, MapStore
from evenhand.scheduler.actor import PoolActor, Stepper
from evenhand.scheduler.adoption import Adoption
from evenhand.scheduler.calls import Calls
from evenhand.scheduler.control import ControlPublisher
from evenhand.scheduler.directory_watch import DirectoryWatch
from evenhand.scheduler.identity import Identity
from evenhand.scheduler.live_map import LiveMap
from evenhand.scheduler.metrics import SchedulerMetrics
from evenhand.scheduler.office import PoolOffice
from evenhand.scheduler.ownership import Ownership
from evenhand.scheduler.secret import MasterSecret
from evenhand.scheduler.servicer import Servicer
from evenhand.scheduler.session import SessionLimits
from evenhand.scheduler.tickets import TicketSigner
from evenhand.simulation.system.book import Book
from evenhand.simulation.system.broker import Broker, SimulatedReader, SimulatedWriter
from evenhand.simulation.system.engine import EngineSource, SimulatedEngine, SimulatedPoller
from evenhand.simulation.system.process import Process
from evenhand.simulation.system.stores import (
    Database,
    SimulatedDirectory,
    SimulatedLeaseStore,
    SimulatedMapStore,
)
from evenhand.state.config import StateConfig
from evenhand.state.metrics import StateMetrics
from evenhand.state.service import StateService
from evenhand.worker.config import EdgeConfig
from evenhand.worker.edge import WorkerEdge

SECRET = b"the simulated pool's master secret"
CALLS_PENDING_MAX = 10_000
LEASE_TTL_MS = 2_000
CHECKPOINT_INTERVAL_MS = 1_000
DIRECTORY_POLL_MS = 500
CALL_TIMEOUT_MS = 60_000
START_RETRY_S = 0.5


class EdgeHost:
    """One worker edge."""

    def __init__(self, config: EdgeConfig, engine: SimulatedEngine, broker: Broker, process: Process) -> None:
        self.process = process
        self.edge = WorkerEdge(
            config,
            EngineSource(engine, process),
            SimulatedWriter(broker, process),
            SimulatedReader(broker, process),
            SimulatedPoller(engine, process),
        )
        self.stop = asyncio.Event()
        self._counted: dict[str, int] = {}
        self.task = process.start(self.edge.run(self.stop, leave=True))

    def count_from_here(self) -> None:
        """The engine begins another life: what was counted of the last one is of no use."""
        if self.edge.state is not None:
            self._counted = self.edge.state.all_counters()

    def counted(self, name: str) -> int:
        """How often the edge has counted something since its engine's life began."""
        assert self.edge.state is not None, "the edge is at work"
        return self.edge.state.all_counters()[name] - self._counted.get(name, 0)

    @property
    def checkpoint(self) -> Path | None:
        return self.edge.config.checkpoint


class StateHost:
    """One state service."""

    def __init__(self, config: StateConfig, broker: Broker, database: Database, process: Process) -> None:
        self.process = process
        store: MapStore = SimulatedMapStore(database, process)
        self.service = StateService(
            config,
            lambda _partitions: store,
            SimulatedDirectory(database, process),
            SimulatedReader(broker, process),
            SimulatedWriter(broker, process),
            StateMetrics(),
        )
        self.task = process.start(self.service.run())


class WatchedActor(PoolActor):
    """The actor, with an independent book of every step it takes."""

    def __init__(self, book: Book, process: Process, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._book = book
        self._process = process

    def _wake(self) -> None:
        if self._process.alive:  # a timer is no task: nobody cancels it when the process dies
            super()._wake()

    def begin_term(self, scheduler: Stepper, term: int, lease_until_ns: int, adoption: Adoption) -> None:
        super().begin_term(self._book.watch(scheduler, term), term, lease_until_ns, adoption)


class Aborted(Exception):
    """A call was answered with an error, as gRPC carries it."""

    def __init__(self, code: int, sentence: str, trailers: tuple[tuple[str, bytes], ...]) -> None:
        super().__init__(sentence)
        self.code, self.sentence, self.trailers = code, sentence, trailers


class CallContext:
    """What the servicer needs of a gRPC call."""

    def __init__(self, remaining_s: float) -> None:
        self._remaining_s = remaining_s

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()

    def time_remaining(self) -> float:
        return self._remaining_s

    async def abort(self, code: Any, sentence: str, trailers: tuple[tuple[str, bytes], ...]) -> NoReturn:
        raise Aborted(code.value[0], sentence, trailers)


class SchedulerHost:
    """One scheduler daemon, without its gRPC server and its pages."""

    def __init__(
        self, config: SchedulerConfig, broker: Broker, database: Database, book: Book, process: Process
    ) -> None:
        self.process = process
        self.serving = False
        """Its address answers."""
        secret = MasterSecret(SECRET)
        signer = TicketSigner(secret.ticket_key(config.pool_id))
        self._reader = SimulatedReader(broker, process)
        self.metrics = SchedulerMetrics(config.pool_id, 16)
        self._control = ControlPublisher(SimulatedWriter(broker, process), self.metrics)
        ttl_ms = config.ticket_ttl_ms
        self.actor = WatchedActor(
            book, process, signer, self.metrics, self._control.wish, ttl_ms, CALLS_PENDING_MAX
        )
        directory = SimulatedDirectory(database, process)
        self.watch = DirectoryWatch(directory, config.pool_id, DIRECTORY_POLL_MS, self.actor.tell)
        self.live_map = LiveMap(
            SimulatedMapStore(database, process),
            self._reader,
            self.watch,
            config,
            self.actor.tell,
            self._wish,
            self.metrics,
        )
        self.office = PoolOffice(config, self.actor, self.live_map, self.watch, self.metrics)
        self.ownership = Ownership(
            SimulatedLeaseStore(database, process),
            config.pool_id,
            f"{process.name} {process.number}",
            LEASE_TTL_MS,
            CHECKPOINT_INTERVAL_MS,
            self.office,
        )
        calls = Calls(self.actor, self.live_map, self.watch, secret, signer, config.pool_id, ttl_ms)
        limits = SessionLimits(CALLS_PENDING_MAX, CALL_TIMEOUT_MS, CALL_TIMEOUT_MS)
        self.servicer = Servicer(calls, Identity(self.watch, insecure_loopback=True), self.metrics, limits)
        self.ended: list[Callable[[], None]] = []
        """Told when the process dies: the calls that are open."""
        self._tasks: list[asyncio.Task[Any]] = []
        process.start(self._run())

    @property
    def granting(self) -> bool:
        """Whether it is in office now, by its own clock."""
        return self.process.within(lambda: self.actor.granting)

    def status(self) -> PoolStatus | None:
        """The pool as it sees it; None out of office."""
        return self.process.within(self.office.status) if self.granting else None

    def kill(self) -> None:
        """Die at once; connections break."""
        self.process.kill()
        self.serving = False
        ended, self.ended = self.ended, []
        for tell in ended:
            tell()

    async def stop(self, drain_s: float) -> None:
        """Drain and resign, as a daemon that is told to."""
        self.actor.shut_down()
        if self.actor.granting and self.actor.open:
            try:
                async with asyncio.timeout(drain_s):
                    await self.actor.nothing_open()
            except TimeoutError:
                pass
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.ownership.resign()

    def _wish(self, message: ControlMessage) -> None:
        if self.actor.granting:
            self._control.wish(message)

    async def _run(self) -> None:
        while True:
            try:
                await self.watch.refresh()
                await self._reader.partition_count(KV_TOPIC)
                await self.live_map.load()
                break
            except Unavailable:
                await asyncio.sleep(START_RETRY_S)
        self.metrics.know_tenants(self.watch.tenants)
        self.serving = True
        for work in (self.watch.run(), self._control.run(), self.live_map.run(), self._stand_for_office()):
            self._tasks.append(self.process.start(work))

    async def _stand_for_office(self) -> None:
        await self.live_map.caught_up.wait()
        await self.ownership.run()
