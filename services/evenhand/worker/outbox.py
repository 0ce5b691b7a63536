"""What an edge has to tell and has not told yet: numbered late, merged, bounded.

Operations get their batch's number when the batch is taken to be published, so that while one publish is under way
everything that comes merges into the next batch. There is one batch on its way at any time and it is published
again until the broker has it, so numbers have no holes and order needs no pipeline.

When more waits than may, all of it is dropped and a snapshot is owed instead. A snapshot takes a number of its
own: whoever misses it sees a hole and asks. What always holds: within an epoch, numbers taken grow by one.

Pure; two tasks of one loop use it, and nothing in it awaits.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from evenhand.core.ids import Epoch, Seq, WorkerId
from evenhand.core.kv import (
    SNAPSHOT_PART_KEYS_MAX,
    Cleared,
    KvBatch,
    KvOperation,
    Removed,
    SnapshotPart,
    Stored,
    Tier,
)

BATCH_KEYS_MAX = 65_536
"""Keys in one batch: 512 KiB, under the megabyte that a broker takes by default."""
BATCH_OPERATIONS_MAX = 8_192
BUFFER_BATCHES_MAX = 32
"""Full batches that may wait: 2 million keys, or 16 MiB."""


@dataclass(slots=True)
class _Pending:
    operations: list[KvOperation] = field(default_factory=list)
    keys: int = 0
    emitted_at_ms: int = 0


class Outbox:
    """Operations of one worker in one epoch, on their way out."""

    __slots__ = ("_pending", "epoch", "overflows", "seq", "snapshot_owed", "worker_id")

    def __init__(self, worker_id: WorkerId, epoch: Epoch, seq: Seq = Seq(0)) -> None:
        self.worker_id = worker_id
        self.epoch = epoch
        self.seq = seq
        """Last number taken."""
        self.snapshot_owed = False
        """Operations were dropped, or their readers are unknown: only a snapshot tells the truth."""
        self.overflows = 0
        self._pending: deque[_Pending] = deque()

    @property
    def next_seq(self) -> Seq:
        """Number of the batch that operations added next go out in, or of an earlier one than that."""
        return Seq(self.seq + max(1, len(self._pending)))

    @property
    def empty(self) -> bool:
        return not self._pending and not self.snapshot_owed

    def begin_epoch(self, epoch: Epoch) -> None:
        """Numbers begin anew; what waits belongs to the past and is dropped."""
        assert epoch > self.epoch, "epochs only grow"
        self.epoch = epoch
        self.seq = Seq(0)
        self._pending.clear()

    def add(self, operations: Sequence[KvOperation], emitted_at_ms: int) -> None:
        """Queue operations behind those that wait. While a snapshot is owed it will hold them anyway."""
        if self.snapshot_owed or not operations:
            return
        for operation in operations:
            self._add_one(operation, emitted_at_ms)
        if len(self._pending) > BUFFER_BATCHES_MAX:
            self.overflows += 1
            self.owe_snapshot()

    def owe_snapshot(self) -> None:
        """Tell everything anew instead of what waits."""
        self._pending.clear()
        self.snapshot_owed = True

    def take_batch(self) -> KvBatch | None:
        """Number what waits longest; None if nothing does, or a snapshot must come first."""
        if self.snapshot_owed or not self._pending:
            return None
        pending = self._pending.popleft()
        self.seq = Seq(self.seq + 1)
        return KvBatch(self.worker_id, self.epoch, self.seq, tuple(pending.operations), pending.emitted_at_ms)

    def take_snapshot(self, held: Sequence[tuple[Tier, Sequence[int]]]) -> tuple[SnapshotPart, ...]:
        """All parts of everything held now, under the next number; what waits is in it and waits no more."""
        self._pending.clear()
        self.snapshot_owed = False
        self.seq = Seq(self.seq + 1)
        slices = [
            (tier, keys[start : start + SNAPSHOT_PART_KEYS_MAX])
            for tier, keys in held
            for start in range(0, len(keys), SNAPSHOT_PART_KEYS_MAX)
        ] or [(Tier.DEVICE, ())]
        return tuple(
            SnapshotPart(self.worker_id, self.epoch, self.seq, self.seq, part, len(slices), tier, tuple(keys))
            for part, (tier, keys) in enumerate(slices)
        )

    def _add_one(self, operation: KvOperation, emitted_at_ms: int) -> None:
        if isinstance(operation, Cleared):
            self._append(operation, 0, emitted_at_ms)
            return
        keys = operation.keys
        if len(keys) <= BATCH_KEYS_MAX:
            self._append(operation, len(keys), emitted_at_ms)
            return
        for start in range(0, len(keys), BATCH_KEYS_MAX):
            some = keys[start : start + BATCH_KEYS_MAX]
            part: KvOperation = (
                Stored(some, operation.tier) if isinstance(operation, Stored) else Removed(some, operation.tier)
            )
            self._append(part, len(some), emitted_at_ms)

    def _append(self, operation: KvOperation, keys: int, emitted_at_ms: int) -> None:
        last = self._pending[-1] if self._pending else None
        if last is None or last.keys + keys > BATCH_KEYS_MAX or len(last.operations) >= BATCH_OPERATIONS_MAX:
            last = _Pending(emitted_at_ms=emitted_at_ms)
            self._pending.append(last)
        last.operations.append(operation)
        last.keys += keys
