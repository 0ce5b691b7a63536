"""The simulated database: ``memory``'s stores behind a latency, transactional, away or slow when told to.

A commit takes half of its time before the transaction and half after it, so a process that dies while it waits has
written all of it or nothing, and has not heard which.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from evenhand.core.errors import Unavailable
from evenhand.core.facts import TenantSpec
from evenhand.core.ids import PoolId
from evenhand.memory import MemoryDirectory, MemoryLeaseStore, MemoryMapStore
from evenhand.ports import (
    Checkpoint,
    Directory,
    Lease,
    LeaseStore,
    LogPosition,
    MapCommit,
    MapStore,
    PoolSpec,
    Principal,
    StoredMap,
)
from evenhand.simulation.system.faults import Fault, Weather
from evenhand.simulation.system.process import Process
from evenhand.simulation.system.trace import Trace

STATEMENT_S = 0.002
COMMIT_S = 0.005
SLOW_FACTOR = 60.0
AWAY_S = 0.05


class Database:
    """What is stored, and how the database is doing."""

    def __init__(self, weather: Weather, trace: Trace, now_ms: Callable[[], int]) -> None:
        self.weather = weather
        self.trace = trace
        self.map = MemoryMapStore()
        self.leases = MemoryLeaseStore(now_ms)
        self.directory = MemoryDirectory()
        self.away = False
        self.slow = False
        self.cut_off: dict[str, None] = {}
        """Hosts that do not reach it."""
        self.on_commit: Callable[[str], None] = lambda _moment: None
        """Told ``before`` and ``after`` each transaction of the map; may kill who makes it."""

    async def statement(self, process: Process, usual_s: float = STATEMENT_S) -> None:
        """The time of one statement; raises ``Unavailable`` while the database is away."""
        if not self._answers(process):
            await process.pause(AWAY_S)
            raise Unavailable("The database is away.")
        await process.pause(self.weather.delay_s(usual_s) * (SLOW_FACTOR if self.slow else 1.0))
        if not self._answers(process):
            raise Unavailable("The database went away.")

    def _answers(self, process: Process) -> bool:
        return not self.away and process.name not in self.cut_off


@dataclass(frozen=True, slots=True)
class SimulatedMapStore(MapStore):
    """The durable map, as one process reaches it."""

    database: Database
    process: Process

    async def load(self) -> StoredMap:
        await self.database.statement(self.process, COMMIT_S)
        return await self.database.map.load()

    async def positions(self) -> Mapping[int, LogPosition]:
        await self.database.statement(self.process)
        return await self.database.map.positions()

    async def commit(self, commit: MapCommit) -> None:
        database = self.database
        await database.statement(self.process, COMMIT_S / 2)
        database.on_commit("before")
        self.process.check()
        await database.map.commit(commit)
        at = ",".join(f"{partition}:{position.next_offset}" for partition, position in commit.positions.items())
        database.trace.add(self.process.name, f"committed {at} {len(commit.deltas)}")
        database.on_commit("after")
        await database.statement(self.process, COMMIT_S / 2)
        if database.weather.strikes(Fault.COMMITS_UNACKNOWLEDGED):
            raise Unavailable("The database did not acknowledge a commit.")


@dataclass(frozen=True, slots=True)
class SimulatedLeaseStore(LeaseStore):
    """Leases and checkpoints, as one process reaches them."""

    database: Database
    process: Process

    async def acquire(self, pool_id: PoolId, holder: str, ttl_ms: int) -> Lease | None:
        await self.database.statement(self.process)
        lease = await self.database.leases.acquire(pool_id, holder, ttl_ms)
        if lease is not None:
            self.database.trace.add(self.process.name, f"holds term {lease.term}")
        await self.database.statement(self.process)
        return lease

    async def renew(self, lease: Lease) -> None:
        await self.database.statement(self.process)
        await self.database.leases.renew(lease)
        await self.database.statement(self.process)

    async def release(self, lease: Lease) -> None:
        await self.database.statement(self.process)
        await self.database.leases.release(lease)

    async def save_checkpoint(self, lease: Lease, payload: bytes) -> None:
        await self.database.statement(self.process, COMMIT_S)
        await self.database.leases.save_checkpoint(lease, payload)

    async def load_checkpoint(self, pool_id: PoolId) -> Checkpoint | None:
        await self.database.statement(self.process)
        return await self.database.leases.load_checkpoint(pool_id)


@dataclass(frozen=True, slots=True)
class SimulatedDirectory(Directory):
    """Tenants, pools and credentials, as one process reaches them."""

    database: Database
    process: Process

    async def tenants(self) -> tuple[TenantSpec, ...]:
        await self.database.statement(self.process)
        return await self.database.directory.tenants()

    async def pools(self) -> tuple[PoolSpec, ...]:
        await self.database.statement(self.process)
        return await self.database.directory.pools()

    async def register_pool(self, pool: PoolSpec) -> PoolSpec:
        await self.database.statement(self.process)
        return await self.database.directory.register_pool(pool)

    async def principal_of(self, key_sha256: bytes) -> Principal | None:
        await self.database.statement(self.process)
        return await self.database.directory.principal_of(key_sha256)

    async def revision(self) -> int:
        await self.database.statement(self.process)
        return await self.database.directory.revision()
