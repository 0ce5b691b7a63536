"""The durable cache map, in memory.

A commit is all or nothing, and it demands the positions it was made from; both as the database does it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from evenhand.core.block_key import pack_keys
from evenhand.core.errors import Fenced, Unavailable
from evenhand.core.ids import WorkerId
from evenhand.core.kv import Cleared, Removed, Stored, Tier, WorkerAnnounced, WorkerPosition
from evenhand.ports import LogPosition, MapCommit, MapStore, StoredMap, StoredWorker, WorkerDelta


@dataclass(slots=True)
class _Worker:
    position: WorkerPosition
    announced: WorkerAnnounced | None = None
    held: dict[Tier, dict[int, None]] = field(default_factory=dict)


class MemoryMapStore(MapStore):
    """``MapStore`` in memory."""

    def __init__(self) -> None:
        self.available = True
        """False: every call raises ``Unavailable`` and changes nothing."""
        self.unacknowledged_next = 0
        """So many commits from here on are kept, and the caller is told ``Unavailable`` all the same."""
        self.commits = 0
        """Commits that were kept."""
        self._workers: dict[WorkerId, _Worker] = {}
        self._positions: dict[int, LogPosition] = {}

    async def load(self) -> StoredMap:
        if not self.available:
            raise Unavailable("The map store is away.")
        workers = tuple(
            StoredWorker(worker_id, worker.position, worker.announced, _packed(worker.held))
            for worker_id, worker in sorted(self._workers.items())
        )
        return StoredMap(workers, dict(self._positions))

    async def positions(self) -> Mapping[int, LogPosition]:
        if not self.available:
            raise Unavailable("The map store is away.")
        return dict(self._positions)

    async def commit(self, commit: MapCommit) -> None:
        if not self.available:
            raise Unavailable("The map store is away.")
        for partition in sorted(commit.positions.keys() | commit.expected.keys()):
            if self._positions.get(partition) != commit.expected.get(partition):
                raise Fenced(f"Another writer has moved partition {partition} of the cache map.")
        self._positions.update(commit.positions)
        for delta in commit.deltas:
            self._apply(delta)
        self.commits += 1
        if self.unacknowledged_next:
            self.unacknowledged_next -= 1
            raise Unavailable("The map store did not acknowledge a commit.")

    def move_positions(self, positions: Mapping[int, LogPosition]) -> None:
        """Do as another writer would: the next commit that expects the former positions is fenced."""
        self._positions.update(positions)

    def _apply(self, delta: WorkerDelta) -> None:
        worker = self._workers.setdefault(delta.worker_id, _Worker(delta.position))
        worker.position = delta.position
        worker.announced = delta.announced or worker.announced
        if delta.replaced:
            worker.held.clear()
        for operation in delta.operations:
            match operation:
                case Stored(keys, tier):
                    worker.held.setdefault(tier, {}).update(dict.fromkeys(keys))
                case Removed(keys, tier):
                    held = worker.held.get(tier, {})
                    for key in keys:
                        held.pop(key, None)
                case Cleared():
                    worker.held.clear()


def _packed(held: Mapping[Tier, Mapping[int, None]]) -> tuple[tuple[Tier, bytes], ...]:
    return tuple((tier, pack_keys(held[tier])) for tier in sorted(held) if held[tier])
