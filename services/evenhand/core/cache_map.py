"""Which worker holds which block keys, on which tier.

Two views of one fact, kept in step by a single writer (``core.fold``):

- ``holders``: key → bit mask of the workers that hold it on any tier. A look-up is one dictionary access and one
  ``&`` a block, however many workers there are; a key that nobody holds has no entry.
- per worker and tier, the set of its keys: for clears, snapshots, and to know what a change really changes.

A key is chained from its parent, so equal keys mean equal prefixes; a worker matches as many first blocks as it
holds without a hole. Tiers count as one for a look-up: a block on the host tier is reloaded, not recomputed.

Workers that left are tombstones: their last position only, at most ``TOMBSTONES_MAX``. When more leave, the one of
the lowest epoch is dropped and ``epoch_floor`` rises to its epoch: a worker that is not known at all and whose
epoch is not above the floor counts as left, too. So a dropped tombstone never lets late events of a dead worker
back in, and a living worker that is caught by the floor is told it and returns with a later epoch.

What this does not do: it knows no order of events, no gaps, no time. Sets are never iterated in an order that
reaches an output: what leaves is sorted, or in the order of the caller's keys.
"""

from collections.abc import Container, Iterable, Sequence
from itertools import repeat
from operator import itemgetter

from evenhand.core.block_key import pack_keys, unpack_keys
from evenhand.core.ids import Epoch, Seq, WorkerId
from evenhand.core.kv import Tier, WorkerPosition
from evenhand.core.slots import PrefixMatch, WorkerSlots
from evenhand.core.snapshot import SnapshotAssembly

__all__ = ["TOMBSTONES_MAX", "CacheMap", "PrefixMatch", "WorkerCache"]

TOMBSTONES_MAX = 4_096
"""Workers that left and are still remembered one by one."""

INTERNED_MAX = 65_536
"""Masks kept for sharing; beyond, the table starts anew."""

TIERS = tuple(Tier)


def known_first(known: Container[int], keys: Sequence[int]) -> int:
    """How many of the first ``keys`` are known, if those known are the first; otherwise any number near that.

    A chain is known from its beginning, so bisection finds its end in a few probes; a hole only costs time.
    """
    low, high = 0, len(keys)
    if not high or keys[-1] in known:
        return high
    while low < high:
        middle = (low + high) // 2
        if keys[middle] in known:
            low = middle + 1
        else:
            high = middle
    return low


class WorkerCache:
    """What one worker holds, and how far its events are folded. Written by ``CacheMap`` and ``core.fold`` only."""

    __slots__ = (
        "asked",
        "bit",
        "copies",
        "epoch",
        "held",
        "missing_before",
        "seq",
        "snapshot",
        "snapshot_applied",
        "worker_id",
    )

    def __init__(self, worker_id: WorkerId, bit: int, epoch: Epoch) -> None:
        self.worker_id = worker_id
        self.bit = bit
        self.held: tuple[set[int], ...] = tuple(set() for _ in TIERS)
        self.copies = 0
        """Keys on all tiers: the sum of ``held``'s lengths."""
        self.enter(epoch)

    def enter(self, epoch: Epoch) -> None:
        """Begin an epoch of which nothing is folded yet. The caller has emptied ``held``."""
        self.epoch = epoch
        self.seq = Seq(0)
        self.missing_before = 0
        """A batch with a smaller number was missed; 0: none. A snapshot as of ``missing_before`` − 1 heals it."""
        self.asked = False
        """A snapshot was asked for since the last heartbeat."""
        self.snapshot: SnapshotAssembly | None = None
        self.snapshot_applied = (-1, -1)
        """``(seq, snapshot_id)`` of the last snapshot applied in this epoch."""

    @property
    def complete(self) -> bool:
        """Nothing is missing and no snapshot is half there."""
        return not self.missing_before and self.snapshot is None

    @property
    def position(self) -> WorkerPosition:
        return WorkerPosition(self.epoch, self.seq, self.complete)


class CacheMap:
    """The live map of any number of workers. One writer; look-ups see every change at once."""

    __slots__ = ("_interned", "_tombstones", "_workers", "epoch_floor", "holders", "refusals", "slots")

    def __init__(self) -> None:
        self.holders: dict[int, int] = {}
        """Key → mask of the workers that hold it on any tier, in ``slots``' numbering. Read-only for others."""
        self._workers: dict[WorkerId, WorkerCache] = {}
        self._tombstones: dict[WorkerId, WorkerPosition] = {}
        self.epoch_floor = Epoch(-1)
        """Workers that are not known at all are refused up to this epoch."""
        self.refusals: dict[WorkerId, int] = {}
        """Messages refused as old in a row, by worker; kept and bounded by ``core.fold``."""
        self._interned: dict[int, int] = {}
        """One object for equal masks, so that a look-up tells by identity where holders change."""
        self.slots = WorkerSlots()
        """Shared with whatever else speaks of the same workers in masks (``core.presence``)."""

    # Look-up

    def match(self, keys: Sequence[int]) -> tuple[PrefixMatch, ...]:
        """Workers that hold at least the first of ``keys``, with how many they hold without a hole.

        Deepest first, then by worker id.
        """
        holders = self.holders
        known = known_first(holders, keys)
        if not known:
            return ()
        try:
            masks = itemgetter(*keys[:known])(holders) if known > 1 else (holders[keys[0]],)
        except KeyError:  # a hole that no worker fills
            masks = tuple(map(holders.get, keys, repeat(0)))
        return self.slots.matches(masks)

    def depth(self, worker_id: WorkerId, keys: Sequence[int]) -> int:
        """How many of the first ``keys`` one worker holds without a hole: its part of ``match``."""
        cache = self._workers.get(worker_id)
        if cache is None:
            return 0
        holding, bit, depth = self.holders.get, cache.bit, 0
        for key in keys:
            if not holding(key, 0) & bit:
                break
            depth += 1
        return depth

    def holds_all(self, worker_id: WorkerId, keys: Sequence[int]) -> bool:
        """Whether the worker holds every one of ``keys``, on whatever tier."""
        cache = self._workers.get(worker_id)
        if cache is None:
            return not keys
        if cache.held[0].issuperset(keys):
            return True
        holding, bit = self.holders.get, cache.bit
        return all(holding(key, 0) & bit for key in keys)

    def position(self, worker_id: WorkerId) -> WorkerPosition | None:
        """How far the worker's events are folded; a tombstone's position has ``left``; None if unknown."""
        cache = self._workers.get(worker_id)
        return cache.position if cache is not None else self._tombstones.get(worker_id)

    def block_count(self, worker_id: WorkerId) -> int:
        """Copies the worker holds: a key on two tiers counts twice. 0 if it is unknown or left."""
        cache = self._workers.get(worker_id)
        return cache.copies if cache is not None else 0

    def packed(self, worker_id: WorkerId) -> tuple[tuple[Tier, bytes], ...]:
        """All keys by tier, ascending and packed, empty tiers left out: equal contents give equal bytes."""
        cache = self._workers.get(worker_id)
        if cache is None:
            return ()
        return tuple((tier, pack_keys(sorted(keys))) for tier, keys in zip(TIERS, cache.held, strict=True) if keys)

    def worker_ids(self) -> tuple[WorkerId, ...]:
        """Workers of the map, sorted; those that left are not among them."""
        return tuple(sorted(self._workers))

    def tombstones(self) -> tuple[tuple[WorkerId, WorkerPosition], ...]:
        """Workers that left and are still remembered, sorted by id."""
        return tuple(sorted(self._tombstones.items()))

    @property
    def key_count(self) -> int:
        """Distinct keys in the map, each once, whoever holds it."""
        return len(self.holders)

    @property
    def copy_count(self) -> int:
        """Copies in the map: the sum of ``block_count`` over all workers."""
        return sum(cache.copies for cache in self._workers.values())

    # Change; for core.fold and warm starts

    def worker(self, worker_id: WorkerId) -> WorkerCache | None:
        """The worker's live record, or None if it is unknown or left."""
        return self._workers.get(worker_id)

    def add(self, worker_id: WorkerId, epoch: Epoch) -> WorkerCache:
        """A record for a worker that has none; a tombstone of it is lifted."""
        assert worker_id not in self._workers, worker_id
        self._tombstones.pop(worker_id, None)
        cache = WorkerCache(worker_id, self.slots.acquire(worker_id), epoch)
        self._workers[worker_id] = cache
        return cache

    def store(self, cache: WorkerCache, tier: Tier, keys: Sequence[int]) -> Sequence[int]:
        """Add copies; returns the keys that the tier did not hold, each once, in the order given."""
        held, holders, bit = cache.held[tier], self.holders, cache.bit
        count_before = len(held)
        if cache.copies != count_before and not held.isdisjoint(keys):
            # With copies on other tiers, too, a bit in ``holders`` does not tell what this tier held.
            keys = [key for key in keys if key not in held]
        held.update(keys)
        gained = len(held) - count_before
        if gained != len(keys):
            keys = list(dict.fromkeys(keys))
            if gained != len(keys):
                keys = [key for key in keys if not holders.get(key, 0) & bit]
        cache.copies += gained
        mask_or_bit, interned = holders.setdefault, self._interned
        before, after = None, 0
        for key in keys:
            mask = mask_or_bit(key, bit)
            if mask is not bit:
                if mask is not before:
                    before, after = mask, mask | bit
                    after = interned.setdefault(after, after)
                holders[key] = after
        if len(interned) > INTERNED_MAX:
            interned.clear()
        return keys

    def remove(self, cache: WorkerCache, tier: Tier, keys: Sequence[int]) -> Sequence[int]:
        """Take copies away; returns the keys that the tier did hold, each once, in the order given."""
        held, holders, bit = cache.held[tier], self.holders, cache.bit
        count_before = len(held)
        on_other_tiers = cache.copies != count_before
        if on_other_tiers and not held.issuperset(keys):
            keys = [key for key in keys if key in held]
        held.difference_update(keys)
        lost = count_before - len(held)
        if lost != len(keys):
            keys = list(dict.fromkeys(keys))
            if lost != len(keys):
                keys = [key for key in keys if holders.get(key, 0) & bit]
        cache.copies -= lost
        gone = keys
        if on_other_tiers:
            for other in cache.held:
                if other is not held and not other.isdisjoint(gone):
                    gone = [key for key in gone if key not in other]
        interned = self._interned
        before, after = None, 0
        for key in gone:
            mask = holders[key]
            if mask is not before:
                before, after = mask, mask ^ bit
                after = interned.setdefault(after, after)
            if after:
                holders[key] = after
            else:
                del holders[key]
        if len(interned) > INTERNED_MAX:
            interned.clear()
        return keys

    def clear(self, cache: WorkerCache) -> None:
        """Take everything of one worker away, on every tier."""
        for tier in TIERS:
            if cache.held[tier]:
                # The order in which keys leave a dictionary that is never iterated cannot be seen.
                self.remove(cache, tier, tuple(cache.held[tier]))
        cache.held = tuple(set() for _ in TIERS)

    def replace(self, cache: WorkerCache, held: tuple[set[int], ...]) -> None:
        """Make the worker hold exactly ``held``, one set a tier; touches only what differs."""
        for tier, wanted in zip(TIERS, held, strict=True):
            self.remove(cache, tier, tuple(cache.held[tier] - wanted))
        for tier, wanted in zip(TIERS, held, strict=True):
            self.store(cache, tier, tuple(wanted - cache.held[tier]))

    def leave(self, worker_id: WorkerId, position: WorkerPosition) -> None:
        """Forget all that the worker held and keep its tombstone, within ``TOMBSTONES_MAX``."""
        assert position.left, worker_id
        self.forget(worker_id)
        self._tombstones[worker_id] = position
        if len(self._tombstones) > TOMBSTONES_MAX:
            lowest = min(self._tombstones, key=lambda known: (self._tombstones[known].epoch, known))
            self.epoch_floor = max(self.epoch_floor, self._tombstones.pop(lowest).epoch)

    def forget(self, worker_id: WorkerId) -> None:
        """Drop all knowledge of a worker, its tombstone included; its next message makes it a stranger."""
        self._tombstones.pop(worker_id, None)
        self.refusals.pop(worker_id, None)
        cache = self._workers.pop(worker_id, None)
        if cache is not None:
            self.clear(cache)
            self.slots.release(worker_id)

    def restore(self, worker_id: WorkerId, position: WorkerPosition, held: Iterable[tuple[Tier, bytes]]) -> None:
        """Load a worker as stored: its position, and per tier its keys packed as 8 bytes big-endian.

        What was known of it before is replaced. Raises ``ValueError`` for packed keys of a broken length.
        """
        unpacked = [(Tier(tier), unpack_keys(keys)) for tier, keys in held]
        self.forget(worker_id)
        if position.left:
            self.leave(worker_id, position)
            return
        cache = self.add(worker_id, position.epoch)
        cache.seq = position.seq
        # Which batch was missed is not stored; any up to the last one folded may be.
        cache.missing_before = 0 if position.complete else max(1, position.seq)
        for tier, keys in unpacked:
            self.store(cache, tier, keys)
