"""One run of the whole system: compose it, load it, let faults strike, calm down, and check.

::

    start ──▶ load (arrivals, faults) ──▶ calm (all back, no more faults) ──▶ quiet ──▶ check

The run ends at the first violation, or when everything has drained and the checkers agree; both bounded in
virtual time.
"""

import asyncio
import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TextIO

import structlog

from evenhand.core.facts import SchedulerConfig
from evenhand.core.ids import PoolId, TenantId, WorkerId
from evenhand.memory import MemoryLog
from evenhand.scheduler.secret import MasterSecret
from evenhand.scheduler.tickets import TicketSigner
from evenhand.simulation.system.book import Book, Totals
from evenhand.simulation.system.broker import Broker
from evenhand.simulation.system.chance import Chance
from evenhand.simulation.system.checkers import differences, final_check, unknown_max
from evenhand.simulation.system.client import Client, Surroundings
from evenhand.simulation.system.clock import EPOCH_MS, SKEW_MS_MAX, Clock, Disks, VirtualLoop, seams
from evenhand.simulation.system.disasters import Disasters
from evenhand.simulation.system.engine import SimulatedEngine
from evenhand.simulation.system.faults import Fault, Weather, met_faults
from evenhand.simulation.system.hosts import SECRET, EdgeHost, SchedulerHost, StateHost
from evenhand.simulation.system.inside import LAST, Inside
from evenhand.simulation.system.network import Network
from evenhand.simulation.system.process import Process, task_factory
from evenhand.simulation.system.stores import Database
from evenhand.simulation.system.trace import Trace
from evenhand.simulation.system.workload import BLOCK_SIZE, STEP, Shape, draw_shape, tokens
from evenhand.state.config import StateConfig
from evenhand.worker.config import EdgeConfig

POOL: Final = PoolId("pool")
WARM_UP_S: Final = 2.0
"""Before the first arrival: services start, workers announce themselves."""
DRAIN_S_MAX: Final = 180.0
"""Virtual time in which everything must have an end once faults have ceased."""
QUIET_S_MAX: Final = 60.0
"""Virtual time in which maps must agree once nothing runs."""
LAST_TOKENS: Final = 2 * BLOCK_SIZE
LOOK_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class Options:
    """What a run is a function of."""

    seed: int
    requests: int = 150
    faults: frozenset[Fault] = frozenset(Fault)
    workload: str = "mixed"


@dataclass(slots=True)
class Result:
    """What a run came to."""

    options: Options
    digest: str = ""
    events: int = 0
    violations: list[str] = field(default_factory=list)
    virtual_s: float = 0.0
    outcomes: dict[str, int] = field(default_factory=dict)
    struck: dict[str, int] = field(default_factory=dict)
    totals: Totals = field(default_factory=Totals)
    requests: int = 0
    last_events: list[str] = field(default_factory=list)


class System:
    """Everything of one run, alive."""

    def __init__(self, options: Options, loop: VirtualLoop, disks: Disks, file: TextIO | None) -> None:
        self.options = options
        self.loop = loop
        self.disks = disks
        self.chance = Chance(options.seed)
        self.shape: Shape = draw_shape(self.chance.stream("shape"), options.requests, options.workload)
        self.trace = Trace(lambda: loop.now_ns, file)
        self.weather = Weather(self.chance, met_faults(options.faults, self.chance.stream("faults met")))
        self.violations: list[str] = []
        self.violation = asyncio.Event()
        self.config = SchedulerConfig(
            POOL,
            bands=self.shape.bands,
            output_estimator=self.shape.estimator,
            window_delay_ms=self.shape.window_delay_ms,
            ticket_ttl_ms=6_000,
            ticket_confirm_ms=4_000,
            worker_stale_after_ms=2_000,
            worker_lost_after_ms=5_000,
        )
        log = MemoryLog(self.shape.partitions, self.broker_ms)
        self.broker = Broker(log, self.weather, self.trace)
        self.database = Database(self.weather, self.trace, self.broker_ms)
        for spec in self.shape.tenants:
            self.database.directory.set_tenant(spec)
        self.book = Book(self.config, self.trace, self.violated)
        self.network = Network(self.weather)
        self.engines = {
            name: SimulatedEngine(
                name, loop, self.shape.limits, STEP, self.shape.kept_frames_max, self.weather, self.trace
            )
            for name in (f"w{number}" for number in range(self.shape.engines))
        }
        signer = TicketSigner(MasterSecret(SECRET).ticket_key(POOL))
        inside = Inside(self.book, signer, self.shape.slots, self.violated)
        for engine in self.engines.values():
            engine.entered = inside.entered
        self.edges: dict[str, EdgeHost | None] = dict.fromkeys(self.engines)
        self.deleted: dict[TenantId, None] = {}
        """Tenants that were deleted in this run, whether or not they are back."""
        self.unknown: dict[str, int] = {}
        """Keys that earlier edges of a worker have declared unknown, of its engine's present life."""
        self.state: StateHost | None = None
        self.clients: list[Client] = []
        self._incarnations = 0
        self._skews: dict[str, int] = {}
        self.around = Surroundings(
            self.network,
            self.engines,
            self.weather,
            POOL,
            self.chance.stream("clients' pauses"),
            violated=self.violated,
        )

    def broker_ms(self) -> int:
        """The broker's and the database's wall clock."""
        return EPOCH_MS + self.loop.now_ns // 1_000_000

    def violated(self, sentence: str) -> None:
        """Something that must always hold does not."""
        self.trace.add("violation", sentence)
        self.violations.append(sentence)
        self.violation.set()

    # ---- processes

    def process(self, name: str) -> Process:
        """A fresh process on the host of this name."""
        self._incarnations += 1
        skew_ms = self._skews.get(name)
        if skew_ms is None:
            drawn = self.chance.stream(f"skew {name}").randint(-SKEW_MS_MAX, SKEW_MS_MAX)
            skew_ms = self._skews[name] = drawn if Fault.CLOCK_SKEW in self.weather.faults else 0
        origin_s = self.chance.stream("monotonic origins").randint(1, 1_000_000)
        return Process(
            name, self._incarnations, self.loop, Clock(origin_s * 1_000_000_000, skew_ms), self._reported
        )

    def _reported(self, name: str, error: BaseException) -> None:
        self.violated(f"{name} ended with {type(error).__name__}: {error}")

    def start_edge(self, name: str) -> None:
        """Start the edge of a worker, from its checkpoint if it has one."""
        config = EdgeConfig(
            WorkerId(name),
            POOL,
            f"http://{name}:8000",
            slots=self.shape.slots,
            checkpoint=Path(f"/simulated/{name}"),
            load_interval_ms=self.shape.load_interval_ms,
            announce_interval_ms=1_000,
            snapshot_interval_ms=2_000,
            checkpoint_interval_ms=1_000,
        )
        self.trace.add(name, "edge starts")
        process = self.process(f"edge-{name}")
        self.edges[name] = process.within(lambda: EdgeHost(config, self.engines[name], self.broker, process))

    def kill_edge(self, name: str, lost_disk: bool = False) -> None:
        """The edge of a worker dies; with ``lost_disk`` its checkpoint is gone, too."""
        host, self.edges[name] = self.edges[name], None
        if host is None:
            return
        self.trace.add(name, f"edge dies {lost_disk}")
        self.unknown[name] = self.unknown.get(name, 0) + unknown_max(host)
        host.process.kill()
        if lost_disk and host.checkpoint is not None:
            self.disks.remove(host.checkpoint)

    def start_engine(self, name: str) -> None:
        """Begin an engine's next life, of which nothing is unknown yet."""
        if self.engines[name].up:
            return
        self.engines[name].start()
        self.unknown[name] = 0
        edge = self.edges[name]
        if edge is not None:
            edge.count_from_here()

    def start_state(self) -> None:
        self.trace.add("state", "starts")
        config = StateConfig(start_ms_max=600_000)
        process = self.process("state")
        self.state = process.within(lambda: StateHost(config, self.broker, self.database, process))

    def start_scheduler(self, index: int) -> None:
        """Start the scheduler at an address; whoever was there is gone."""
        name = f"scheduler-{index}"
        self.trace.add(name, "starts")
        process = self.process(name)
        host = process.within(lambda: SchedulerHost(self.config, self.broker, self.database, self.book, process))
        if index < len(self.network.schedulers):
            self.network.schedulers[index] = host
        else:
            self.network.schedulers.append(host)

    # ---- one run

    async def run(self) -> None:
        """From start to check; returns at the first violation."""
        for name in self.engines:
            self.start_edge(name)
        self.start_state()
        for index in range(self.shape.schedulers):
            self.start_scheduler(index)
        disasters = Disasters(self)
        body = self.loop.create_task(self._live(disasters))
        watch = self.loop.create_task(self.violation.wait())
        await asyncio.wait((body, watch), return_when=asyncio.FIRST_COMPLETED)
        if body.done():
            watch.cancel()
            body.result()
        else:
            body.cancel()
        await asyncio.gather(body, watch, return_exceptions=True)

    async def _live(self, disasters: Disasters) -> None:
        await asyncio.sleep(WARM_UP_S)
        disasters.begin(self.shape.load_s + 2.0)
        began_s = self.loop.time()
        for number, arrival in enumerate(self.shape.arrivals):
            await asyncio.sleep(max(0.0, began_s + arrival.at_s - self.loop.time()))
            client = Client(number, arrival, self.around, self.process(f"client-{number}"))
            self.clients.append(client)
            client.process.start(client.run())
            if self.weather.strikes(Fault.CLIENTS_VANISH):
                self.loop.call_later(self.weather.delay_s(1.0), client.vanish)
        await disasters.end()
        self.weather.calm = True
        self.trace.add("system", "calm")
        await self._drained()
        for name, engine in self.engines.items():
            # A lost frame is noticed at the next one: the world goes on, so there is one.
            engine.submit(f"{LAST}{name}", tokens(f"last {name}", LAST_TOKENS), 1, "", lambda _leg, _what: None)
        await self._agreed()
        final_check(self)
        self.book.judge()

    async def _drained(self) -> None:
        """Wait until every client has its outcome and no ticket is open."""
        until_s = self.loop.time() + DRAIN_S_MAX
        while self.loop.time() < until_s:
            page = self.book.page
            waiting = [client for client in self.clients if client.outcome is None]
            if not waiting and page is not None and not page.open and not page.waiting:
                return
            await asyncio.sleep(LOOK_S)
        stuck = ", ".join(client.request_id for client in self.clients if client.outcome is None)
        tickets = ", ".join(self.book.page.open) if self.book.page is not None else ""
        self.violated(f"Not drained after {DRAIN_S_MAX:.0f} s: requests [{stuck}], tickets [{tickets}].")

    async def _agreed(self) -> None:
        """Wait until all maps hold what the engines do, and nothing is presumed any more."""
        until_s = self.loop.time() + QUIET_S_MAX
        found = await differences(self)
        while found and self.loop.time() < until_s:
            await asyncio.sleep(LOOK_S)
            found = await differences(self)
        for sentence in found:
            self.violated(f"After {QUIET_S_MAX:.0f} s of quiet: {sentence}")

    def kill_all(self) -> None:
        """End every process."""
        for client in self.clients:
            client.process.kill()
        for host in self.network.schedulers:
            host.kill()
        for edge in self.edges.values():
            if edge is not None:
                edge.process.kill()
        if self.state is not None:
            self.state.process.kill()

    def result(self) -> Result:
        outcomes: dict[str, int] = {}
        for client in self.clients:
            name = client.outcome.value if client.outcome is not None else "open"
            outcomes[name] = outcomes.get(name, 0) + 1
            self.trace.add(client.request_id, f"outcome {name} {client.why}")
        for name, engine in self.engines.items():
            self.trace.add(name, f"holds {len(engine.findable_keys())} {sorted(engine.findable_keys())[:4]}")
        return Result(
            options=self.options,
            digest=self.trace.digest,
            events=self.trace.events,
            violations=self.violations,
            virtual_s=self.loop.time(),
            outcomes=outcomes,
            struck=dict(sorted(self.weather.struck.items())),
            totals=self.book.totals,
            requests=len(self.clients),
            last_events=list(self.trace.last) if self.violations else [],
        )


def simulate(options: Options, file: TextIO | None = None) -> Result:
    """Run one seed to its end; the same options give the same result, in any process."""
    disks = Disks()

    def run_in_thread(work: Any) -> "asyncio.Future[Any]":
        done: asyncio.Future[Any] = loop.create_future()

        def finish() -> None:
            if not done.cancelled():
                try:
                    done.set_result(work())
                except Exception as error:  # handed to whoever waits for the thread
                    done.set_exception(error)

        loop.call_later(system.weather.delay_s(0.005), finish)
        return done

    loop = VirtualLoop(run_in_thread)
    loop.set_task_factory(task_factory)  # type: ignore[arg-type]
    with _quiet(), seams(loop, disks), _without_gc():
        asyncio.set_event_loop(loop)
        try:
            system = System(options, loop, disks, file)
            loop.set_exception_handler(
                lambda _loop, context: system.violated(
                    f"A fault nobody caught: {context.get('exception', context)}"
                )
            )
            loop.run_until_complete(system.run())
            result = system.result()
            system.kill_all()
            loop.set_exception_handler(lambda _loop, _context: None)
            loop.run_until_complete(asyncio.sleep(1.0))
            loop.run_until_complete(loop.shutdown_asyncgens())
            return result
        finally:
            asyncio.set_event_loop(None)
            loop.close()


@contextmanager
def _quiet() -> Iterator[None]:
    """Services log nothing: a run tells what happened by its trace."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    try:
        yield
    finally:
        structlog.configure(**before)


@contextmanager
def _without_gc() -> Iterator[None]:
    """Garbage is collected between runs: when it is must not depend on the process."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
