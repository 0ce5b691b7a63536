"""One row: a plan through one route, and everything that is counted about it.

Times to first token count from the *scheduled* arrival, whatever kept the client. A request that has no first
token when the run ends counts with what it has waited by then; one that was refused or failed counts as if it
waited to the end of the run, so that no route looks fast by answering few. After the window the backlog drains,
for a bounded time, and throughput is taken over window and drain together.
"""

import asyncio
import gc
import math
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from tests.benchmarks.alive import wheels
from tests.benchmarks.alive.plan import FLEET, HOT, TENANTS, WELL_BEHAVED, Arrival, Load, plan
from tests.benchmarks.alive.routes import AliveFleet, Route, RouteKind
from tests.benchmarks.alive.stream import AnswerFailed, StreamClient, StreamUsage

from evenhand.client import ClientError
from evenhand.core.facts import CostWeights
from evenhand.local.accounting import percentile

CANCEL_SECONDS_MAX = 15.0
COST = CostWeights()


@dataclass(frozen=True, slots=True)
class RunConfig:
    """How long and how much."""

    seconds: float = 45.0
    """The window: warm-up, load, and its quiet end."""
    warm_up_s: float = 5.0
    """What arrives before this fills empty caches; it is load like all else, and counted in throughput alone."""
    quiet_s: float = 3.0
    """Nothing arrives at the end of the window, so that what is unserved then was truly left waiting."""
    drain_s_max: float = 30.0
    seed: int = 1
    load: Load = field(default_factory=Load)


@dataclass(slots=True)
class Outcome:
    """What became of one arrival; times in ms from the start of the load."""

    arrival: Arrival
    lag_ms: float = 0.0
    first_ms: float | None = None
    done_ms: float | None = None
    usage: StreamUsage | None = None
    failure: str = ""

    def part_by(self, at_ms: float) -> float:
        """How much of its output had come by then, 0 to 1, taken as even between first and last token."""
        if self.usage is None or self.first_ms is None or self.done_ms is None or self.first_ms > at_ms:
            return 0.0
        if self.done_ms <= at_ms:
            return 1.0
        return (at_ms - self.first_ms) / max(1e-9, self.done_ms - self.first_ms)

    def cost_by(self, at_ms: float) -> float:
        """Cost served by then: what the engine did, cached tokens at a tenth."""
        part = self.part_by(at_ms)
        if not part or self.usage is None:
            return 0.0
        uncached = self.usage.prompt_tokens - self.usage.cached_tokens
        return COST.cost(uncached, self.usage.cached_tokens, 0) + COST.output * part * self.usage.output_tokens

    def work_by(self, at_ms: float) -> float:
        """Work delivered by then: the same whether cached or not, so that nobody gains by computing twice."""
        part = self.part_by(at_ms)
        if not part or self.usage is None:
            return 0.0
        return COST.uncached * self.usage.prompt_tokens + COST.output * part * self.usage.output_tokens


@dataclass(frozen=True, slots=True)
class TenantRow:
    """One tenant, or several together, in one row: of what arrived after the warm-up."""

    arrived: int
    unserved: int
    """Not wholly answered at the end of the window; refused and failed ones among them."""
    refused: int
    finished: int
    """With the drain."""
    p50_ms: float
    p99_ms: float
    cost: float
    """Cost served in the window."""
    work: float
    """Work delivered in the window: prompt + 2 · output tokens."""


@dataclass(frozen=True, slots=True)
class Cpu:
    """Percent of one core over the window; the machine's in percent of all its cores."""

    client: float
    engines: float
    busiest_engine: float
    router: float
    busiest_router: float
    machine: float
    others: float
    """What ran beside this, in percent of all cores."""


NOBODY = TenantRow(0, 0, 0, 0, math.nan, math.nan, 0.0, 0.0)
NO_CPU = Cpu(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Row:
    """A route at a factor. ``skipped``: why there are no figures."""

    route: str
    factor: float
    skipped: str = ""
    seconds: float = 0.0
    """Window and drain."""
    requests_per_s: float = 0.0
    tokens_per_s: float = 0.0
    hit_rate: float = 0.0
    lag_p99_ms: float = 0.0
    tenants: Mapping[str, TenantRow] = field(default_factory=dict)
    well_behaved: TenantRow = NOBODY
    everybody: TenantRow = NOBODY
    cpu: Cpu = NO_CPU
    failures: Mapping[str, int] = field(default_factory=dict)

    def distrust(self) -> str:
        """Why this row is not to be trusted; empty if there is no reason."""
        reasons = []
        if self.everybody.arrived and not self.everybody.work:
            reasons.append("nothing answered in the window")
        if self.cpu.busiest_router > 80:
            reasons.append(f"router at {self.cpu.busiest_router:.0f} % of a core")
        if self.cpu.client > 80:
            reasons.append(f"client at {self.cpu.client:.0f} % of a core")
        if self.cpu.busiest_engine > 80:
            reasons.append(f"an engine at {self.cpu.busiest_engine:.0f} % of a core")
        if self.lag_p99_ms > 20:
            reasons.append(f"client late by {self.lag_p99_ms:.0f} ms")
        if self.cpu.machine > 85:
            reasons.append(f"machine {self.cpu.machine:.0f} % busy")
        if self.cpu.others > 15:
            reasons.append(f"{self.cpu.others:.0f} % of the machine busy with other things")
        return ", ".join(reasons)


class CpuMeter:
    """Processor time of groups of processes, children included, between ``start`` and ``stop``."""

    def __init__(self, engines: Iterable[int], routers: Mapping[str, int]) -> None:
        self._engines = [_family(pid) for pid in engines]
        self._routers = [_family(pid) for pid in routers.values()]
        self._client = [psutil.Process()]
        self._before = self._read()

    def _read(self) -> list[float]:
        groups = [self._client, *self._engines, *self._routers]
        machine = psutil.cpu_times()
        busy = sum(machine) - machine.idle - getattr(machine, "iowait", 0.0)
        busy -= getattr(machine, "guest", 0.0) + getattr(machine, "guest_nice", 0.0)
        return [sum(map(_used_s, group)) for group in groups] + [busy]

    def stop(self, seconds: float) -> Cpu:
        """What was used since it was made."""
        used = [100 * (after - before) / seconds for after, before in zip(self._read(), self._before, strict=True)]
        count = len(self._engines)
        engines, routers = used[1 : 1 + count], used[1 + count : -1]
        cores = psutil.cpu_count() or 1
        ours = used[0] + sum(engines) + sum(routers)
        return Cpu(
            used[0],
            sum(engines),
            max(engines),
            sum(routers),
            max(routers, default=0.0),
            used[-1] / cores,
            max(0.0, used[-1] - ours) / cores,
        )


def _family(pid: int) -> list[psutil.Process]:
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def _used_s(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system)


class LoadRun:
    """Sends a plan through a route, open loop."""

    def __init__(self, route: Route, arrivals: list[Arrival]) -> None:
        self.outcomes = [Outcome(arrival) for arrival in arrivals]
        self._route = route
        self._client = StreamClient()
        self._loop = asyncio.get_running_loop()
        self._started_s = 0.0
        self._tasks: set[asyncio.Task[None]] = set()

    def now_ms(self) -> float:
        return (self._loop.time() - self._started_s) * 1_000

    async def window(self, seconds: float) -> None:
        """Every arrival at its time; returns at the end of the window, with whatever is still under way."""
        self._started_s = self._loop.time()
        for outcome in self.outcomes:
            await self._until(outcome.arrival.at_ms)
            outcome.lag_ms = self.now_ms() - outcome.arrival.at_ms
            task = self._loop.create_task(self._serve(outcome))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        await self._until(seconds * 1_000)

    async def drain(self, seconds_max: float) -> None:
        """Wait for what is under way, then cancel what is left."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=seconds_max)
        left = list(self._tasks)
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=CANCEL_SECONDS_MAX)
        self._client.close()

    async def _until(self, at_ms: float) -> None:
        wait_ms = at_ms - self.now_ms()
        if wait_ms > 0:
            await asyncio.sleep(wait_ms / 1_000)

    async def _serve(self, outcome: Outcome) -> None:
        try:
            async with self._route.place(outcome.arrival) as call:

                def first() -> None:
                    outcome.first_ms = self.now_ms()
                    call.first_token()

                usage = await self._client.call(call.host, call.port, call.body, call.headers, first)
                outcome.done_ms = self.now_ms()
                outcome.usage = usage
                call.used(usage)
        except AnswerFailed as error:
            outcome.failure = f"HTTP {error.status}" if error.status else "connection"
        except ClientError as error:
            outcome.failure = type(error).__name__


async def run_row(kind: RouteKind, factor: float, config: RunConfig) -> Row:
    """A fresh fleet, a fresh route, one plan. A route that cannot be installed becomes a row that says so."""
    if kind.wheel is not None:
        try:
            await asyncio.to_thread(wheels.installed, kind.wheel)
        except wheels.NotInstallable as error:
            return Row(kind.name, factor, skipped=str(error))
    arrivals = plan(config.load, FLEET, factor, (config.seconds - config.quiet_s) * 1_000, config.seed)
    with tempfile.TemporaryDirectory(prefix="evenhand-alive-") as temporary:
        folder = Path(temporary)
        async with AliveFleet(FLEET, folder, kind.own_models) as fleet, kind.opened(fleet, folder) as route:
            run = LoadRun(route, arrivals)
            meter = CpuMeter([process.pid or 0 for process in fleet.processes], route.router_pids())
            gc.collect()
            gc.disable()
            try:
                await run.window(config.seconds)
                cpu = meter.stop(config.seconds)
                await run.drain(config.drain_s_max)
            finally:
                gc.enable()
            ended_ms = run.now_ms()
    return _row(kind.name, factor, run.outcomes, config, ended_ms, cpu)


def _row(route: str, factor: float, outcomes: list[Outcome], config: RunConfig, ended_ms: float, cpu: Cpu) -> Row:
    window_ms = config.seconds * 1_000
    counted = [outcome for outcome in outcomes if outcome.arrival.at_ms >= config.warm_up_s * 1_000]
    finished = [outcome for outcome in outcomes if outcome.usage is not None]
    last_ms = max([window_ms, *(outcome.done_ms or 0.0 for outcome in finished)])
    if len(finished) < len(outcomes):
        last_ms = max(last_ms, ended_ms)
    usages = [outcome.usage for outcome in finished if outcome.usage is not None]
    prompt = sum(usage.prompt_tokens for usage in usages)
    tokens = prompt + sum(usage.output_tokens for usage in usages)
    failures: dict[str, int] = {}
    for outcome in outcomes:
        if outcome.failure:
            failures[outcome.failure] = failures.get(outcome.failure, 0) + 1
    return Row(
        route,
        factor,
        "",
        last_ms / 1_000,
        len(finished) * 1_000 / last_ms,
        tokens * 1_000 / last_ms,
        sum(usage.cached_tokens for usage in usages) / prompt if prompt else 0.0,
        percentile([outcome.lag_ms for outcome in outcomes], 0.99),
        {tenant: _tenant_row(counted, (tenant,), window_ms, ended_ms) for tenant in TENANTS},
        _tenant_row(counted, WELL_BEHAVED, window_ms, ended_ms),
        _tenant_row(counted, (HOT, *WELL_BEHAVED), window_ms, ended_ms),
        cpu,
        failures,
    )


def _tenant_row(outcomes: list[Outcome], tenants: tuple[str, ...], window_ms: float, ended_ms: float) -> TenantRow:
    own = [outcome for outcome in outcomes if outcome.arrival.tenant in tenants]
    waits = [
        (ended_ms if outcome.first_ms is None or outcome.failure else outcome.first_ms) - outcome.arrival.at_ms
        for outcome in own
    ]
    return TenantRow(
        len(own),
        sum(outcome.done_ms is None or outcome.done_ms > window_ms for outcome in own),
        sum(bool(outcome.failure) for outcome in own),
        sum(outcome.usage is not None for outcome in own),
        percentile(waits, 0.5),
        percentile(waits, 0.99),
        sum(outcome.cost_by(window_ms) for outcome in own),
        sum(outcome.work_by(window_ms) for outcome in own),
    )
