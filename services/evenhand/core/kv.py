"""Facts about KV caches, as they stand on the bus once decoded.

A worker edge turns an engine's own events into these; the state service and the scheduler fold them into a
cache map with one and the same ``core.fold``. No token id and no salt ever appears here: a block is known by
its key alone.

Order: batches of one worker carry ``epoch`` and ``seq``. Within an epoch ``seq`` starts at 1 and grows by one
a batch. A snapshot states everything held as of the batch ``seq`` it names; it comes in parts and counts only
when it is complete.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from evenhand.core.ids import Epoch, PoolId, Seq, WorkerId

SNAPSHOT_PART_KEYS_MAX = 65_536
"""Keys in one snapshot part: 512 KiB at 8 bytes a key."""


class Tier(IntEnum):
    """Where a copy of a block lives. Smaller is nearer to the accelerator."""

    DEVICE = 0
    HOST = 1
    DISK = 2


@dataclass(frozen=True, slots=True)
class Stored:
    """Blocks that a tier holds from here on; none of them was held there before, by the edge's count."""

    keys: Sequence[int]
    tier: Tier = Tier.DEVICE


@dataclass(frozen=True, slots=True)
class Removed:
    """Blocks whose last copy on a tier is gone, or that were refuted."""

    keys: Sequence[int]
    tier: Tier = Tier.DEVICE


@dataclass(frozen=True, slots=True)
class Cleared:
    """Everything this worker held, on every tier, is gone. A barrier: what came before it is void."""


KvOperation = Stored | Removed | Cleared


@dataclass(frozen=True, slots=True)
class KvBatch:
    """What one worker's cache did, in order."""

    worker_id: WorkerId
    epoch: Epoch
    seq: Seq
    operations: tuple[KvOperation, ...]
    emitted_at_ms: int = 0
    """Wall clock of the engine's event, for lag measurement only; nothing decides by it."""


@dataclass(frozen=True, slots=True)
class SnapshotPart:
    """One part of everything a worker held as of batch ``seq`` of ``epoch``.

    A snapshot of parts 0 … ``parts`` − 1 under one ``snapshot_id`` replaces the worker's map when all have
    arrived; an empty cache is one part without keys. A part for a tier other than the last one's is allowed.
    Within an epoch a later snapshot has a larger ``(seq, snapshot_id)``.
    """

    worker_id: WorkerId
    epoch: Epoch
    seq: Seq
    snapshot_id: int
    part: int
    parts: int
    tier: Tier
    keys: Sequence[int]


@dataclass(frozen=True, slots=True)
class WorkerAnnounced:
    """A worker's edge says who it is: at its start, at each new epoch, and every few seconds (heartbeat)."""

    worker_id: WorkerId
    pool_id: PoolId
    epoch: Epoch
    address: str
    """Where clients call the engine, ``http://HOST:PORT``."""
    model: str
    block_size_tokens: int
    key_scheme: str
    """``evenhand.block.v1``; workers of another scheme are refused by the pool."""
    kv_blocks: int
    """Blocks the engine's cache can hold, the null block excluded."""
    slots: int
    """Sequences the engine runs at once (``max_num_seqs``)."""
    data_parallel_rank: int = 0
    sends_events: bool = True
    """False: the pool's map of this worker is approximate, assumed after each dispatch."""
    model_length_max_tokens: int = 0
    """Longest prompt plus output the engine takes; 0 where it is unknown."""
    salt_generation: int = 1
    seq: Seq = Seq(0)
    """Last batch published before this; a fold that has seen fewer has a gap."""


@dataclass(frozen=True, slots=True)
class WorkerLoadReported:
    """A worker's load as its engine tells it, and that the edge is alive. Not folded, never stored."""

    worker_id: WorkerId
    epoch: Epoch
    running: int
    waiting: int
    kv_used_fraction: float
    prompt_tokens_total: int
    """The engine's own counters since its process started; the audit compares usage with them."""
    cached_tokens_total: int
    output_tokens_total: int
    process_started_at_ms: int
    healthy: bool = True
    """False: the engine did not answer its health check; the edge itself is alive."""


@dataclass(frozen=True, slots=True)
class WorkerLeft:
    """A worker is gone for good, with this epoch and all before it; only a later epoch may return."""

    worker_id: WorkerId
    epoch: Epoch


KvMessage = KvBatch | SnapshotPart | WorkerAnnounced | WorkerLoadReported | WorkerLeft
"""Everything that travels on ``evenhand.kv.v1``, keyed by worker id."""


@dataclass(frozen=True, slots=True)
class SnapshotRequested:
    """Ask a worker's edge for a snapshot. Idempotent; the edge makes at most one an interval."""

    worker_id: WorkerId
    reason: str


@dataclass(frozen=True, slots=True)
class EpochFloor:
    """Tell a worker's edge that its batches are refused as old: its next epoch must exceed ``epoch``."""

    worker_id: WorkerId
    epoch: Epoch


@dataclass(frozen=True, slots=True)
class KeysRefuted:
    """Keys predicted from the map that the engine then did not report as cached.

    Holds only against copies that the edge had published by batch ``seq`` of ``epoch``; a later store stands.
    """

    worker_id: WorkerId
    epoch: Epoch
    seq: Seq
    keys: Sequence[int]
    tier: Tier = Tier.DEVICE


ControlMessage = SnapshotRequested | EpochFloor | KeysRefuted
"""Everything that travels on ``evenhand.control.v1``, keyed by worker id."""


@dataclass(frozen=True, slots=True)
class WorkerPosition:
    """How far one worker's events are folded."""

    epoch: Epoch
    seq: Seq
    complete: bool
    """False: a gap was seen in this epoch and no snapshot has healed it yet."""
    left: bool = False
    """True: a tombstone; only a later epoch brings the worker back."""
