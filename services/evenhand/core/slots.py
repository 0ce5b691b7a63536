"""Small numbers for workers, so that "who holds this key" is one integer.

A set of workers is a bit mask: worker in slot ``s`` is bit ``1 << s``. The cache map and the keys presumed beside
it share one numbering, so their masks combine with ``|`` and ``&``. Each of them acquires a slot for a worker and
releases it when none of its masks has that bit any more; a slot is given to another worker only after every
holder has let go. Freed slots are used again, lowest first, so masks stay as wide as the fleet is large.

Slot numbers depend on the order of joins and never reach an output: matches are sorted by worker id.
"""

from collections.abc import Iterable
from heapq import heappop, heappush
from typing import NamedTuple

from evenhand.core.ids import WorkerId


class PrefixMatch(NamedTuple):
    """How many of a prompt's first blocks one worker holds without a hole."""

    worker_id: WorkerId
    blocks: int


class WorkerSlots:
    """Numbering of workers by reference count. One writer."""

    __slots__ = ("_bits", "_free", "_references", "_workers")

    def __init__(self) -> None:
        self._bits: dict[WorkerId, int] = {}
        self._references: dict[WorkerId, int] = {}
        self._workers: list[WorkerId | None] = []
        self._free: list[int] = []

    def __len__(self) -> int:
        """Workers that have a slot."""
        return len(self._bits)

    @property
    def width(self) -> int:
        """Slots ever in use at once: the bits of the widest mask."""
        return len(self._workers)

    def bit_of(self, worker_id: WorkerId) -> int:
        """The worker's mask, or 0 if it has no slot."""
        return self._bits.get(worker_id, 0)

    def acquire(self, worker_id: WorkerId) -> int:
        """Mask of the worker: one bit. Every call is matched by one ``release``."""
        bit = self._bits.get(worker_id)
        if bit is not None:
            self._references[worker_id] += 1
            return bit
        if self._free:
            slot = heappop(self._free)
            self._workers[slot] = worker_id
        else:
            slot = len(self._workers)
            self._workers.append(worker_id)
        self._bits[worker_id] = bit = 1 << slot
        self._references[worker_id] = 1
        return bit

    def release(self, worker_id: WorkerId) -> None:
        """Let go of the worker's slot. The caller has cleared the bit from all its masks."""
        self._references[worker_id] -= 1
        if self._references[worker_id]:
            return
        slot = self._bits.pop(worker_id).bit_length() - 1
        del self._references[worker_id]
        self._workers[slot] = None
        heappush(self._free, slot)

    def matches(self, dropped: Iterable[tuple[int, int]]) -> tuple[PrefixMatch, ...]:
        """Matches sorted by worker id, from ``(mask of workers, blocks they hold)``; the masks are disjoint."""
        found = []
        workers = self._workers
        for mask, blocks in dropped:
            while mask:
                slot = mask.bit_length() - 1
                mask ^= 1 << slot
                worker_id = workers[slot]
                assert worker_id is not None
                found.append(PrefixMatch(worker_id, blocks))
        found.sort()
        return tuple(found)
