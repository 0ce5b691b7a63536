"""One worker's engine events as a worker edge would publish them: copies counted, batches numbered.

Only the first copy of a block and the loss of its last one go out, as ``core.kv`` asks. ``snapshot`` states all
that is held, as of the last batch. The real translator does the same and much more; this is its short form for
engines whose block names are the keys.
"""

from collections.abc import Iterable

from evenhand.core.ids import Epoch, Seq, WorkerId
from evenhand.core.kv import Cleared, KvBatch, KvOperation, Removed, SnapshotPart, Stored, Tier
from evenhand.engine.events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent


class MapFeed:
    """One life of one worker's cache."""

    __slots__ = ("_copies", "epoch", "seq", "snapshots", "worker_id")

    def __init__(self, worker_id: WorkerId, epoch: int) -> None:
        self.worker_id = worker_id
        self.epoch = Epoch(epoch)
        self.seq = 0
        self.snapshots = 0
        self._copies: dict[int, int] = {}

    def batch(self, events: Iterable[KvEvent]) -> KvBatch | None:
        """The next batch; None if nothing goes out."""
        operations: list[KvOperation] = []
        for event in events:
            match event:
                case BlockStored():
                    keys = self._stored(event.block_hashes)  # type: ignore[arg-type]
                    if keys:
                        operations.append(Stored(keys))
                case BlockRemoved():
                    keys = self._removed(event.block_hashes)  # type: ignore[arg-type]
                    if keys:
                        operations.append(Removed(keys))
                case AllBlocksCleared():
                    self._copies.clear()
                    operations.append(Cleared())
        if not operations:
            return None
        self.seq += 1
        return KvBatch(self.worker_id, self.epoch, Seq(self.seq), tuple(operations))

    def snapshot(self) -> SnapshotPart:
        """Everything held as of the last batch, in one part."""
        self.snapshots += 1
        keys = tuple(self._copies)
        return SnapshotPart(self.worker_id, self.epoch, Seq(self.seq), self.snapshots, 0, 1, Tier.DEVICE, keys)

    def _stored(self, names: tuple[int, ...]) -> tuple[int, ...]:
        copies = self._copies
        if copies.keys().isdisjoint(names):
            copies.update(dict.fromkeys(names, 1))
            return names
        new = []
        for name in names:
            count = copies.get(name, 0)
            copies[name] = count + 1
            if not count:
                new.append(name)
        return tuple(new)

    def _removed(self, names: tuple[int, ...]) -> tuple[int, ...]:
        copies = self._copies
        gone = []
        for name in names:
            count = copies[name] - 1
            if count:
                copies[name] = count
            else:
                del copies[name]
                gone.append(name)
        return tuple(gone)
