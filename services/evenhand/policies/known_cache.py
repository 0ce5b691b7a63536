"""What a policy knows of the workers' caches, in two forms.

``EventMap`` is exact: folded from what the workers publish, by the core's own map. ``SentMap`` is approximate:
what was sent to a worker is taken to be there, least recently used first out, up to a bound in blocks. Both answer
the same question, how many first blocks of a prompt each worker holds, and both are deterministic.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

from evenhand.core.cache_map import CacheMap
from evenhand.core.fold import fold
from evenhand.core.ids import WorkerId
from evenhand.core.kv import KvBatch, SnapshotPart, WorkerLeft


class KnownCache(Protocol):
    """Which worker holds how much of a prompt."""

    def bound(self, worker_id: WorkerId, blocks: int) -> None:
        """The worker's cache holds no more than this."""

    def match(self, names: Sequence[int]) -> dict[WorkerId, int]:
        """First blocks held without a hole, by worker, those with at least one; deepest first, then by id."""

    def sent(self, names: Sequence[int], worker_id: WorkerId) -> None:
        """A prompt went there."""

    def lost(self, worker_id: WorkerId) -> None:
        """The worker's cache is gone."""


class EventMap:
    """From the engines' events."""

    def __init__(self) -> None:
        self.map = CacheMap()

    def bound(self, worker_id: WorkerId, blocks: int) -> None:
        return

    def match(self, names: Sequence[int]) -> dict[WorkerId, int]:
        return {match.worker_id: match.blocks for match in self.map.match(names)}

    def sent(self, names: Sequence[int], worker_id: WorkerId) -> None:
        return

    def lost(self, worker_id: WorkerId) -> None:
        position = self.map.position(worker_id)
        if position is not None and not position.left:
            fold(self.map, WorkerLeft(worker_id, position.epoch))

    def changed(self, message: KvBatch | SnapshotPart) -> None:
        """A worker's edge published this."""
        fold(self.map, message)


class SentMap:
    """From what was sent: per worker the block names in order of last use, at most ``blocks_max`` of them."""

    def __init__(self, blocks_max: int) -> None:
        self.blocks_max = blocks_max
        self._held: dict[WorkerId, OrderedDict[int, None]] = {}
        self._bounds: dict[WorkerId, int] = {}

    def bound(self, worker_id: WorkerId, blocks: int) -> None:
        self._bounds[worker_id] = blocks

    def match(self, names: Sequence[int]) -> dict[WorkerId, int]:
        depths = []
        for worker_id, held in self._held.items():
            depth = 0
            for name in names:
                if name not in held:
                    break
                depth += 1
            if depth:
                depths.append((worker_id, depth))
        depths.sort(key=_deepest_first)
        return dict(depths)

    def blocks(self, worker_id: WorkerId) -> int:
        """How many it is taken to hold."""
        return len(self._held.get(worker_id, ()))

    def sent(self, names: Sequence[int], worker_id: WorkerId) -> None:
        held = self._held.setdefault(worker_id, OrderedDict())
        for name in reversed(names):
            held[name] = None
            held.move_to_end(name)
        blocks_max = min(self.blocks_max, self._bounds.get(worker_id, self.blocks_max))
        while len(held) > blocks_max:
            held.popitem(last=False)

    def lost(self, worker_id: WorkerId) -> None:
        self._held.pop(worker_id, None)


def _deepest_first(entry: tuple[WorkerId, int]) -> tuple[int, WorkerId]:
    return -entry[1], entry[0]
