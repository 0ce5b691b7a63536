"""Crashes and absences, planned from the seed: when each strikes, what it takes down, when that is back.

Each fault's disasters come from a stream of their own, so one that is switched off changes no other's time. At the
end of the load everything is brought back at once, and nothing strikes any more.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Final

from evenhand.core.facts import TenantSpec, TenantState
from evenhand.core.ids import TenantId, WorkerId
from evenhand.core.steps import BandsChanged, WorkerDrained
from evenhand.simulation.system.faults import Fault

if TYPE_CHECKING:
    from evenhand.simulation.system.system import System

Act = Callable[[Random], Awaitable[None]]

TIMES: Final = (0, 1, 1, 2, 3)
"""How often a disaster strikes in one run, if its fault is among the run's: one of these."""
RARE_TIMES: Final = (0, 0, 1)
RESETS_TRIED_MAX: Final = 20
DRAIN_S: Final = 1.0


class Disasters:
    """The disasters of one run."""

    def __init__(self, system: "System") -> None:
        self._system = system
        self._tasks: list[asyncio.Task[None]] = []
        self._over = asyncio.Event()
        self._tenants: dict[TenantId, TenantSpec] = {spec.tenant_id: spec for spec in system.shape.tenants}
        """As the directory has them, or had them last."""
        self._acts: dict[Fault, Act] = {
            Fault.BROKER_AWAY: self._broker_away,
            Fault.BROKER_REPLACED: self._broker_replaced,
            Fault.ENGINE_CRASH: self._engine_crash,
            Fault.EDGE_CRASH: self._edge_crash,
            Fault.STATE_CRASH: self._state_crash,
            Fault.SCHEDULER_CRASH: self._scheduler_crash,
            Fault.SCHEDULER_CUT_OFF: self._scheduler_cut_off,
            Fault.DATABASE_SLOW: self._database_slow,
            Fault.DATABASE_AWAY: self._database_away,
            Fault.WORKERS_DRAINED: self._worker_drained,
            Fault.WORKERS_LEAVE: self._worker_leaves,
            Fault.LOADS_MISSING: self._loads_missing,
            Fault.CACHES_RESET: self._cache_reset,
            Fault.TENANTS_CHANGED: self._tenant_changed,
            Fault.TENANTS_SUSPENDED: self._tenant_suspended,
            Fault.TENANTS_DELETED: self._tenant_deleted,
            Fault.BANDS_CHANGED: self._bands_changed,
        }

    def begin(self, seconds: float) -> None:
        """Let the planned faults strike during so much time."""
        system = self._system
        for fault, act in self._acts.items():
            random = system.chance.stream(f"disasters {fault.value}")
            times = random.choice(RARE_TIMES if fault is Fault.BROKER_REPLACED else TIMES)
            moments = sorted(random.uniform(0.0, seconds) for _ in range(times))
            if fault in system.weather.faults:
                self._tasks.append(system.loop.create_task(self._strike(fault, act, moments, random)))

    async def end(self) -> None:
        """Bring everything back."""
        self._over.set()
        await asyncio.gather(*self._tasks)

    async def _strike(self, fault: Fault, act: Act, moments: list[float], random: Random) -> None:
        loop, began_s = self._system.loop, self._system.loop.time()
        for moment in moments:
            await self._rest(began_s + moment - loop.time())
            if self._over.is_set():
                return
            self._system.weather.count(fault)
            self._system.trace.add("disaster", fault.value)
            await act(random)

    async def _rest(self, seconds: float) -> None:
        """Wait, but no longer than the load lasts."""
        try:
            async with asyncio.timeout(max(0.0, seconds)):
                await self._over.wait()
        except TimeoutError:
            return

    # ---- broker and database

    async def _broker_away(self, random: Random) -> None:
        self._system.broker.log.available = False
        await self._rest(random.uniform(0.1, 6.0))
        self._system.broker.log.available = True

    async def _broker_replaced(self, random: Random) -> None:
        broker = self._system.broker
        broker.log.available = False
        await self._rest(random.uniform(0.1, 2.0))
        broker.replace()
        broker.log.available = True

    async def _database_slow(self, random: Random) -> None:
        self._system.database.slow = True
        await self._rest(random.uniform(0.5, 5.0))
        self._system.database.slow = False

    async def _database_away(self, random: Random) -> None:
        self._system.database.away = True
        await self._rest(random.uniform(0.1, 5.0))
        self._system.database.away = False

    async def _scheduler_cut_off(self, random: Random) -> None:
        name = random.choice(self._system.network.schedulers).process.name
        self._system.database.cut_off[name] = None
        await self._rest(random.uniform(0.5, 8.0))
        self._system.database.cut_off.pop(name, None)

    # ---- workers

    def _worker(self, random: Random) -> str:
        return random.choice(list(self._system.engines))

    async def _engine_crash(self, random: Random) -> None:
        name = self._worker(random)
        engine, with_edge = self._system.engines[name], random.random() < 0.25
        engine.crash()
        if with_edge:
            self._system.kill_edge(name)
        await self._rest(random.choice((0.01, 1.0, 8.0)) * random.uniform(0.2, 1.0))
        self._system.start_engine(name)
        if with_edge and self._system.edges[name] is None:
            self._system.start_edge(name)

    async def _edge_crash(self, random: Random) -> None:
        name, lost_disk = self._worker(random), random.random() < 0.25
        self._system.kill_edge(name, lost_disk)
        await self._rest(random.choice((0.1, 2.0, 8.0)) * random.uniform(0.2, 1.0))
        if self._system.edges[name] is None:
            self._system.start_edge(name)

    async def _worker_leaves(self, random: Random) -> None:
        name = self._worker(random)
        edge = self._system.edges[name]
        if edge is not None:
            edge.stop.set()
            await asyncio.wait((edge.task,))
            self._system.kill_edge(name, lost_disk=True)
        await self._rest(random.uniform(0.2, 6.0))
        if self._system.edges[name] is None:
            self._system.start_edge(name)

    async def _loads_missing(self, random: Random) -> None:
        engine = self._system.engines[self._worker(random)]
        engine.mute = True
        await self._rest(random.uniform(0.3, 8.0))
        engine.mute = False

    async def _cache_reset(self, random: Random) -> None:
        engine = self._system.engines[self._worker(random)]
        for _ in range(RESETS_TRIED_MAX):
            if engine.reset_cache() or self._over.is_set():
                return
            await self._rest(random.uniform(0.01, 0.3))

    async def _worker_drained(self, random: Random) -> None:
        worker_id = WorkerId(self._worker(random))
        for draining in (True, False):
            for host in self._system.network.schedulers:
                if host.process.alive and host.granting:
                    step = WorkerDrained(worker_id, draining)
                    host.process.within(lambda host=host, step=step: host.actor.tell(step))  # type: ignore[misc]
            if draining:
                await self._rest(random.uniform(0.3, 5.0))

    # ---- the directory

    def _set_tenant(self, spec: TenantSpec) -> None:
        self._tenants[spec.tenant_id] = spec
        self._system.database.directory.set_tenant(spec)

    async def _tenant_changed(self, random: Random) -> None:
        spec = self._tenants[random.choice(sorted(self._tenants))]
        self._set_tenant(
            replace(
                spec,
                weight=random.choice((0.25, 1.0, 3.0, 8.0)),
                band=random.choice(self._system.shape.bands)[0],
                concurrency_max=random.choice((0, 0, 1, 3)),
                user_weights=random.choice(((), (("ben", 2.0),))),
                queue_length_max=random.choice((1_000, 1_000, 3)),
            )
        )

    async def _tenant_suspended(self, random: Random) -> None:
        tenant_id = random.choice(sorted(self._tenants))
        state = random.choice((TenantState.SUSPENDED, TenantState.DRAINING))
        self._set_tenant(replace(self._tenants[tenant_id], state=state))
        await self._rest(random.uniform(0.2, 4.0))
        self._set_tenant(replace(self._tenants[tenant_id], state=TenantState.ACTIVE))

    async def _tenant_deleted(self, random: Random) -> None:
        tenant_id = random.choice(sorted(self._tenants))
        self._system.deleted[tenant_id] = None
        self._system.database.directory.remove_tenant(tenant_id)
        await self._rest(random.uniform(0.1, 3.0))
        self._set_tenant(replace(self._tenants[tenant_id], weight=random.choice((1.0, 2.0))))

    async def _bands_changed(self, random: Random) -> None:
        bands = tuple((name, random.choice((0.5, 1.0, 2.0, 5.0))) for name, _ in self._system.shape.bands)
        for host in self._system.network.schedulers:
            if host.process.alive and host.granting:
                host.process.within(lambda host=host: host.actor.tell(BandsChanged(bands)))  # type: ignore[misc]

    # ---- services

    async def _state_crash(self, random: Random) -> None:
        system, moment = self._system, random.choice(("now", "before", "after"))
        died = asyncio.Event()

        def kill() -> None:
            if system.state is not None:
                system.trace.add("state", f"dies {moment}")
                system.state.process.kill()
                system.state = None
            died.set()

        def on_commit(reached: str) -> None:
            if reached == moment and not died.is_set():
                kill()

        if moment == "now":
            kill()
        else:
            system.database.on_commit = on_commit
            await asyncio.wait(
                (asyncio.ensure_future(died.wait()), asyncio.ensure_future(self._over.wait())),
                return_when=asyncio.FIRST_COMPLETED,
            )
            system.database.on_commit = lambda _moment: None
        await self._rest(random.choice((0.1, 1.0, 5.0)) * random.uniform(0.2, 1.0))
        if system.state is None:
            system.start_state()

    async def _scheduler_crash(self, random: Random) -> None:
        system = self._system
        index, graceful = random.randrange(len(system.network.schedulers)), random.random() < 0.3
        host = system.network.schedulers[index]
        if graceful:
            system.trace.add(host.process.name, "stops")
            await asyncio.wait((host.process.start(host.stop(DRAIN_S)),))
        system.trace.add(host.process.name, "dies")
        host.kill()
        await self._rest(random.choice((0.1, 1.0, 6.0)) * random.uniform(0.2, 1.0))
        system.start_scheduler(index)
