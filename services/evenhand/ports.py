"""The doors of the core to the world: Protocols that have two implementations each.

In memory (``evenhand.memory``, for tests and simulation) and real (``evenhand.kafka``, ``evenhand.postgres``).
One contract suite (``tests/contract``) runs over both. A method that cannot do its work because a part is away
raises ``Unavailable``; one that finds another writer raises ``Fenced``.
"""

import hashlib
import struct
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from evenhand.core.facts import TenantSpec
from evenhand.core.ids import PoolId, TenantId, WorkerId
from evenhand.core.kv import KvOperation, Tier, WorkerAnnounced, WorkerPosition

KV_TOPIC = "evenhand.kv.v1"
CONTROL_TOPIC = "evenhand.control.v1"
ALL_TENANTS = TenantId("*")
"""Among a gateway's tenants: it may act for every tenant there is. No tenant has this name."""


@dataclass(frozen=True, slots=True)
class LogRecord:
    """One message of a partitioned log."""

    topic: str
    partition: int
    offset: int
    key: bytes
    value: bytes
    published_at_ms: int

    def digest(self) -> bytes:
        """What ``LogPosition.digest_before`` keeps of the record before it: SHA-256 of time, key and value.

        The time is in it because two idle heartbeats are equal in all else. It is signed: Kafka says −1 where a
        record has none.
        """
        head = struct.pack(">qI", self.published_at_ms, len(self.key))
        return hashlib.sha256(head + self.key + self.value).digest()


@dataclass(frozen=True, slots=True)
class LogPosition:
    """Where to read on in one partition, and what stood just before: a guard against another broker.

    ``digest_before`` is ``LogRecord.digest()`` of record ``next_offset − 1``; empty where none was read yet.
    A position of 0 without a digest means the beginning of what the log still keeps.
    """

    next_offset: int
    digest_before: bytes = b""


class LogReader(Protocol):
    """Reads a topic from positions that the caller keeps; commits nothing anywhere."""

    async def partition_count(self, topic: str) -> int:
        """Number of partitions of the topic, which must exist or be creatable."""
        ...

    def read(self, topic: str, positions: Mapping[int, LogPosition]) -> AsyncIterator[Sequence[LogRecord]]:
        """Records from the given positions on, in order within a partition, in batches as they arrive.

        Yields an empty batch now and then while nothing arrives (at least every 200 ms), so that callers can do
        their chores. Raises ``LogReplaced`` if the record before a position is another one or cannot be had.
        """
        ...

    @property
    def attached(self) -> bool:
        """Whether each ``read`` under way has a log that answers; an empty batch then says that nothing came.

        False while there is no read, until its positions are proven, and while the log is away.
        """
        ...

    async def close(self) -> None: ...


class LogReplaced(Exception):
    """The log is not the one the positions were made on: start over from its beginning."""

    def __init__(self, topic: str, partition: int, offset: int) -> None:
        super().__init__(f"Partition {partition} of {topic} is not the log that offset {offset} was read from.")
        self.topic, self.partition, self.offset = topic, partition, offset


class LogWriter(Protocol):
    """Appends to a topic; order per key is the order of the calls."""

    async def publish(self, topic: str, key: bytes, value: bytes) -> None:
        """Return once the broker has it; raise ``Unavailable`` if it may not have it."""
        ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class StoredWorker:
    """A worker as the map store knows it, with everything it holds."""

    worker_id: WorkerId
    position: WorkerPosition
    announced: WorkerAnnounced | None
    held: tuple[tuple[Tier, bytes], ...]
    """Per tier: keys packed as 8 bytes each, big-endian, each once."""
    delta_rows: int = 0
    """Rows stored behind its snapshot; a delta with ``replaced`` brings them to 0."""


@dataclass(frozen=True, slots=True)
class StoredMap:
    """The whole map and the log positions it stands for, read in one snapshot."""

    workers: tuple[StoredWorker, ...]
    positions: Mapping[int, LogPosition]


@dataclass(frozen=True, slots=True)
class WorkerDelta:
    """What one worker's batches changed, in order, since the last commit."""

    worker_id: WorkerId
    position: WorkerPosition
    announced: WorkerAnnounced | None
    replaced: bool
    """True: forget all that is stored of this worker first (new epoch, clear, snapshot, left)."""
    operations: tuple[KvOperation, ...]


@dataclass(frozen=True, slots=True)
class MapCommit:
    """One transaction: deltas and positions together, or nothing."""

    expected: Mapping[int, LogPosition]
    """Positions that must be stored now for the partitions below; an absent one means none is stored."""
    positions: Mapping[int, LogPosition]
    deltas: tuple[WorkerDelta, ...]


class MapStore(Protocol):
    """The durable cache map."""

    async def load(self) -> StoredMap: ...

    async def commit(self, commit: MapCommit) -> None:
        """Write all of it in one transaction; raise ``Fenced`` if a stored position is not the expected one.

        After ``Unavailable`` it may have been written all the same: compare ``positions`` before trying again.
        """
        ...

    async def positions(self) -> Mapping[int, LogPosition]:
        """The stored positions alone."""
        ...


@dataclass(frozen=True, slots=True)
class Lease:
    """Ownership of a pool: whoever holds the highest term may grant."""

    pool_id: PoolId
    holder: str
    term: int
    ttl_ms: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Clocks and open tickets of a pool's scheduler, as bytes only that scheduler reads."""

    pool_id: PoolId
    term: int
    payload: bytes


class LeaseStore(Protocol):
    """Fenced leases and the checkpoints written under them."""

    async def acquire(self, pool_id: PoolId, holder: str, ttl_ms: int) -> Lease | None:
        """Take the lease if it is free or has run out, under a term one higher; None while another holds it."""
        ...

    async def renew(self, lease: Lease) -> None:
        """Extend by the lease's ttl; raise ``Fenced`` if a later term exists or it has run out."""
        ...

    async def release(self, lease: Lease) -> None:
        """Let go at once; harmless if it is no longer held."""
        ...

    async def save_checkpoint(self, lease: Lease, payload: bytes) -> None:
        """Replace the pool's checkpoint; raise ``Fenced`` if the lease's term is not the current one."""
        ...

    async def load_checkpoint(self, pool_id: PoolId) -> Checkpoint | None: ...


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """What all workers of a pool have in common. The first worker to announce itself may define a pool."""

    pool_id: PoolId
    model: str
    block_size_tokens: int
    key_scheme: str
    salt_generation: int = 1


@dataclass(frozen=True, slots=True)
class Principal:
    """Who a credential belongs to. A gateway may act for the named tenants; others for their own only."""

    name: str
    role: str
    """``admin``, ``auditor`` or ``service``; settled usage is believed from ``service`` alone."""
    tenants: tuple[TenantId, ...]
    gateway: bool = False
    expires_at_ms: int | None = None


class Directory(Protocol):
    """Tenants, pools and credentials, as administrators left them."""

    async def tenants(self) -> tuple[TenantSpec, ...]: ...

    async def pools(self) -> tuple[PoolSpec, ...]: ...

    async def register_pool(self, pool: PoolSpec) -> PoolSpec:
        """Add the pool if it is unknown; return what is stored, which then decides."""
        ...

    async def principal_of(self, key_sha256: bytes) -> Principal | None:
        """The principal of a live API key by the SHA-256 of the whole key; None if unknown, revoked or expired."""
        ...

    async def revision(self) -> int:
        """Grows with every change; cheap to poll."""
        ...
