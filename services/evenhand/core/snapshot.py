"""Snapshots put together from their parts, while batches go on.

A snapshot states everything a worker held as of batch ``seq``. Its parts may arrive in any order, twice, and with
batches between them:

- it can begin only while no batch after ``seq`` is folded (what those did would be lost under it);
- operations of batches after ``seq`` that are folded while parts are missing are kept, at most
  ``SNAPSHOT_TAIL_KEYS_MAX`` keys of them, and happen again on top of the finished snapshot;
- beyond a bound the assembly is given up and another snapshot has to be asked for.

Nothing counts until the last part is there. Within an epoch a later snapshot has a larger ``(seq, snapshot_id)``.
"""

from collections.abc import Iterable

from evenhand.core.kv import Cleared, KvOperation, Removed, SnapshotPart, Stored, Tier

SNAPSHOT_TAIL_KEYS_MAX = 262_144
"""Keys (and, as one each, operations) of batches kept while a snapshot is incomplete."""

SNAPSHOT_KEYS_MAX = 16_777_216
"""Keys (and, as one each, parts) of one snapshot."""


class SnapshotAssembly:
    """One snapshot of one worker, as far as it has arrived. One writer: ``core.fold``."""

    __slots__ = ("_held", "_keys", "_parts", "_received", "_tail", "_tail_keys", "moved", "order", "seq")

    def __init__(self, first: SnapshotPart) -> None:
        self.seq = first.seq
        self.order = (int(first.seq), first.snapshot_id)
        """Later snapshots of one epoch have a larger order."""
        self.moved = True
        """A part has arrived since the last heartbeat."""
        self._parts = first.parts
        self._received: dict[int, None] = {}
        self._held: tuple[set[int], ...] = tuple(set() for _ in Tier)
        self._keys = 0
        self._tail: list[KvOperation] = []
        self._tail_keys = 0

    @property
    def finished(self) -> bool:
        return len(self._received) == self._parts

    def add(self, part: SnapshotPart) -> bool:
        """Take a part in; one that is there already changes nothing. False: too large, give it up."""
        if part.part not in self._received:
            self._received[part.part] = None
            self._held[part.tier].update(part.keys)
            self._keys += 1 + len(part.keys)
            self.moved = True
        return self._keys <= SNAPSHOT_KEYS_MAX

    def follow(self, operations: Iterable[KvOperation]) -> bool:
        """Keep what a batch after ``seq`` did. False: more than is kept, give the snapshot up."""
        for operation in operations:
            self._tail.append(operation)
            self._tail_keys += 1 if isinstance(operation, Cleared) else 1 + len(operation.keys)
        return self._tail_keys <= SNAPSHOT_TAIL_KEYS_MAX

    def result(self) -> tuple[set[int], ...]:
        """What the worker holds now, one set a tier: the snapshot, then the operations that followed it."""
        assert self.finished, "a snapshot counts only when every part is there"
        for operation in self._tail:
            match operation:
                case Stored(keys, tier):
                    self._held[tier].update(keys)
                case Removed(keys, tier):
                    self._held[tier].difference_update(keys)
                case Cleared():
                    for held in self._held:
                        held.clear()
        return self._held
