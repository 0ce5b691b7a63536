"""``evenhand demo``: the main job at work, in about a minute, and beside two routers that everybody knows.

Everything is real but the engines: an embedded broker and database, four simulated vLLM engines that speak the
engine's own HTTP and event formats, their edges, the state service and the scheduler, each a process of its own.
The same planned load then runs through Evenhand, round robin and cache-greedy routing, one after the other on the
same engines with emptied caches. It ends with a summary and a chart, and leaves nothing running.
"""

import argparse
import asyncio
import signal
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from rich.console import Console
from rich.live import Live

from evenhand.client import AsyncClient
from evenhand.core.errors import InvalidConfig, Unavailable
from evenhand.core.facts import CostWeights, WorkerSpec
from evenhand.core.ids import Epoch, PoolId, WorkerId
from evenhand.local.accounting import Ledger
from evenhand.local.chart import save_chart
from evenhand.local.engines import EngineFleet, FleetConfig
from evenhand.local.load import LoadRun
from evenhand.local.routers import EvenhandRouter, PolicyRouter, Router
from evenhand.local.stack import Stack, StackConfig, keys_by_principal
from evenhand.local.stack_file import StackWorker
from evenhand.local.table import WorkerView, live_view, summary_table
from evenhand.local.workload import Arrival, DemoLoad, plan, plan_from_mooncake
from evenhand.logs import configure_logs
from evenhand.policies.table import make_policy
from evenhand.postgres.seed import SeedApiKey, SeedFile, SeedTenant

POOL = "demo"
PLAIN_POLICIES: dict[str, tuple[str, dict[str, object]]] = {
    "round-robin": ("fcfs-round-robin", {}),
    "cache-greedy": ("longest-prefix", {"exact_map": False}),
}
"""Plain routers of the demo: the policy of ``evenhand.policies`` behind each, and its parameters."""
POLICIES = ("evenhand", *PLAIN_POLICIES)
TRACE = Path(__file__).parent / "data" / "mooncake_conversation_sample.jsonl"
REFRESH_SECONDS = 0.5
PLAIN_REPORT_SECONDS = 6.0
READY_SECONDS_MAX = 90.0
QUIET_SECONDS = 2.0
"""Nothing new arrives in the last seconds of a load, so that what is short of its due was truly left waiting."""
PLAIN_WIDTH = 120
"""Columns where there is no terminal to ask."""


@dataclass(frozen=True, slots=True)
class DemoConfig:
    """What one run of the demo does."""

    seconds: float
    """Length of the load under each policy."""
    seed: int
    workload: str
    policies: tuple[str, ...]
    chart: Path


def parser() -> argparse.ArgumentParser:
    """The command line; every option is explained by --help."""
    options = argparse.ArgumentParser(prog="evenhand demo", description=(__doc__ or "").split("\n\n", 2)[1])
    options.add_argument("--seconds", type=float, default=18.0, help="length of the load under each policy")
    options.add_argument("--seed", type=int, default=1, help="the same seed plans the same load")
    options.add_argument(
        "--workload",
        choices=("tenants", "mooncake"),
        default="tenants",
        help="a flood, conversations and cold prompts; or a replay of the Mooncake conversation trace",
    )
    options.add_argument("--policies", default=",".join(POLICIES), help="which to run, separated by commas")
    options.add_argument("--chart", type=Path, default=Path("evenhand-demo.png"), help="where the chart is saved")
    return options


def config_of(arguments: argparse.Namespace) -> DemoConfig:
    """The settings in a parsed command line; raises ``InvalidConfig`` with one sentence."""
    policies = tuple(arguments.policies.split(","))
    for policy in policies:
        if policy not in POLICIES:
            raise InvalidConfig(f"There is no policy {policy!r}; the policies are {', '.join(POLICIES)}.")
    if not 1 <= arguments.seconds <= 3_600:
        raise InvalidConfig(f"--seconds must lie between 1 and 3600, not {arguments.seconds:g}.")
    if not arguments.chart.absolute().parent.is_dir():
        raise InvalidConfig(f"The chart cannot be saved as {arguments.chart}: its folder does not exist.")
    return DemoConfig(arguments.seconds, arguments.seed, arguments.workload, policies, arguments.chart)


class Demo:
    """One run: the fleet, the stack, and the load under each policy."""

    def __init__(self, config: DemoConfig, console: Console) -> None:
        self.config = config
        self.console = console
        self.arrivals = self._plan()
        self.tenants = sorted({arrival.tenant for arrival in self.arrivals})
        self.ledgers: list[tuple[str, Ledger]] = []

    def _plan(self) -> list[Arrival]:
        duration_ms = (self.config.seconds - min(QUIET_SECONDS, self.config.seconds / 4)) * 1_000
        if self.config.workload == "mooncake":
            return plan_from_mooncake(TRACE, duration_ms, speed=5.0)
        return plan(DemoLoad(), duration_ms, self.config.seed)

    async def run(self) -> None:
        """Everything from start to summary; whatever happens, nothing is left running."""
        async with AsyncExitStack() as exit_stack:
            folder = Path(exit_stack.enter_context(tempfile.TemporaryDirectory(prefix="evenhand-demo-")))
            logs = folder / "logs"
            logs.mkdir()
            self.console.print("starting broker, database, four engines, edges, state service and scheduler …")
            fleet = await exit_stack.enter_async_context(EngineFleet(FleetConfig(), logs))
            seed = SeedFile(
                tenants=[SeedTenant(tenant_id=tenant) for tenant in self.tenants],
                api_keys=[SeedApiKey(principal=tenant, tenants=[tenant]) for tenant in self.tenants],
            )
            config = StackConfig(folder, POOL, seed, fleet.workers, durable=False)
            stack = await exit_stack.enter_async_context(Stack(config))
            http = await exit_stack.enter_async_context(
                aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(None))
            )
            keys = keys_by_principal(stack.generated_keys)
            clients = {
                tenant: await exit_stack.enter_async_context(
                    AsyncClient(stack.scheduler_address, pool=POOL, api_key=keys[tenant])
                )
                for tenant in self.tenants
            }
            await _workers_known(stack, len(fleet.workers))
            salts = {tenant: (await client.resolve()).cache_salt for tenant, client in clients.items()}
            for policy in self.config.policies:
                await fleet.reset_caches(http)
                await self._run_policy(self._router(policy, clients, salts, fleet), fleet, stack, http)
        self._summarise()

    def _router(
        self, policy: str, clients: dict[str, AsyncClient], salts: dict[str, str], fleet: EngineFleet
    ) -> Router:
        if policy == "evenhand":
            return EvenhandRouter(clients, wait_s_max=self.config.seconds + 60)
        name, settings = PLAIN_POLICIES[policy]
        return PolicyRouter(make_policy(name, settings), _specs(fleet), salts, fleet.config.model, policy)

    async def _run_policy(
        self, router: Router, fleet: EngineFleet, stack: Stack, http: aiohttp.ClientSession
    ) -> None:
        ledger = Ledger(dict.fromkeys(self.tenants, 1.0), CostWeights())
        self.ledgers.append((router.name, ledger))
        load = LoadRun(router, self.arrivals, ledger, http, fleet.config.model)
        running = asyncio.create_task(load.run(self.config.seconds))
        try:
            await self._show(running, load, fleet, stack, http)
            await running
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def _show(
        self,
        running: "asyncio.Task[None]",
        load: LoadRun,
        fleet: EngineFleet,
        stack: Stack,
        http: aiohttp.ClientSession,
    ) -> None:
        """Redraw the live table until the load is over; without a terminal, print it now and then."""
        interactive = self.console.is_terminal
        pause = REFRESH_SECONDS if interactive else PLAIN_REPORT_SECONDS
        with Live(console=self.console, auto_refresh=False, transient=True) as live:
            while not running.done():
                await asyncio.wait((running,), timeout=pause)
                blocks, note = await _map_view(stack)
                workers = await asyncio.gather(
                    *(_worker_view(worker, blocks.get(worker.name, 0), fleet, http) for worker in fleet.workers)
                )
                waits = {tenant: load.waits_ms(tenant) for tenant in self.tenants}
                left = max(0.0, self.config.seconds - load.elapsed_ms / 1_000)
                title = f"{load.router.name}: {left:.0f} s left"
                view = live_view(title, load.ledger, waits, workers, note)
                if interactive:
                    live.update(view, refresh=True)
                else:
                    self.console.print(view)

    def _summarise(self) -> None:
        self.console.print(summary_table(self.ledgers, self.config.seconds))
        self.console.print(
            "got/due: service got, of the max-min fair share of all that was served. Waits count from the planned "
            "arrival, unanswered requests included. Evenhand keeps an eighth of each worker's slots for tenants "
            "below their share, so a flood alone finishes less than under a router that gives it everything.",
            style="dim",
        )
        save_chart(self.ledgers, self.config.chart)
        self.console.print(f"chart: {self.config.chart.absolute()}")


def _specs(fleet: EngineFleet) -> list[WorkerSpec]:
    config = fleet.config
    return [
        WorkerSpec(
            WorkerId(worker.name),
            PoolId(POOL),
            worker.address,
            Epoch(1),
            config.slots,
            config.kv_blocks - 1,
            config.block_size,
            sends_events=False,
        )
        for worker in fleet.workers
    ]


async def _workers_known(stack: Stack, count: int) -> None:
    """Return once the scheduler owns its pool and knows all workers."""
    try:
        async with asyncio.timeout(READY_SECONDS_MAX):
            while True:
                page = await stack.status()
                known = page["workers_known"]
                if page["owner"] and isinstance(known, list) and len(known) == count:
                    return
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise Unavailable(f"The scheduler did not see {count} workers within {READY_SECONDS_MAX:.0f} s.") from None


async def _map_view(stack: Stack) -> tuple[dict[str, int], str]:
    """Blocks that the cache map knows by worker, and a line about the whole of it."""
    try:
        page = await stack.status()
    except Unavailable as error:
        return {}, str(error)
    blocks = page["map_blocks_by_worker"]
    assert isinstance(blocks, dict), "the status page maps workers to blocks"
    return blocks, f"cache map: {page['map_blocks']} copies of {page['map_keys']} blocks"


async def _worker_view(
    worker: StackWorker, blocks_held: int, fleet: EngineFleet, http: aiohttp.ClientSession
) -> WorkerView:
    figures = {"vllm:num_requests_running": 0.0, "vllm:num_requests_waiting": 0.0}
    async with http.get(f"{worker.address}/metrics") as response:
        for line in (await response.text()).splitlines():
            metric = line.partition("{")[0]
            if metric in figures:
                figures[metric] += float(line.rpartition(" ")[2])
    running, waiting = figures.values()
    return WorkerView(worker.name, int(running), int(waiting), blocks_held, fleet.config.kv_blocks - 1)


async def run(config: DemoConfig, console: Console) -> int:
    """Run until the end, or until SIGINT or SIGTERM stops it cleanly."""
    task = asyncio.create_task(Demo(config, console).run())
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    try:
        await task
    except asyncio.CancelledError:
        console.print("stopped; nothing is left running.")
        return 130
    return 0


def main(argv: Sequence[str]) -> int:
    """The command's entry; a fault reaches the caller as one sentence."""
    config = config_of(parser().parse_args(argv))
    configure_logs("demo", "console", "warning")
    console = Console()
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    return asyncio.run(run(config, console))
