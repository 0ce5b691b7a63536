"""Small numbers for workers, so that "who holds this key" is one integer.

A set of workers is a bit mask: worker in slot ``s`` is bit ``1 << s``. The cache map and the keys presumed beside
it share one numbering, so their masks combine with ``|`` and ``&``. Each of them acquires a slot for a worker and
releases it when none of its masks has that bit any more; a slot is given to another worker only after every
holder has let go. Freed slots are used again, lowest first, so masks stay as wide as the fleet is large.

Slot numbers depend on the order of joins and never reach an output.
"""

from heapq import heappop, heappush
from operator import length_hint
from typing import NamedTuple

from evenhand.core.ids import WorkerId

MATCHES_MADE = 257
"""Matches of 0 … 256 blocks are made once a worker; deeper ones as they are found."""

ANSWERED_MASKS_MAX = 262_144
"""Masks of remembered look-ups, all together; beyond, all are forgotten."""


class PrefixMatch(NamedTuple):
    """How many of a prompt's first blocks one worker holds without a hole."""

    worker_id: WorkerId
    blocks: int


class WorkerSlots:
    """Numbering of workers by reference count. One writer."""

    __slots__ = ("_answered_masks", "_answers", "_bits", "_free", "_made", "_references", "_workers")

    def __init__(self) -> None:
        self._bits: dict[WorkerId, int] = {}
        self._references: dict[WorkerId, int] = {}
        self._workers: list[WorkerId | None] = []
        self._free: list[int] = []
        self._made: dict[int, tuple[PrefixMatch, ...]] = {}
        """Mask of one worker → its matches by number of blocks: making them is half of a look-up's time."""
        self._answers: dict[tuple[int, ...], tuple[PrefixMatch, ...]] = {}
        """Look-ups by their masks; true as long as slots mean the same workers, whatever is folded."""
        self._answered_masks = 0

    def __len__(self) -> int:
        """Workers that have a slot."""
        return len(self._bits)

    @property
    def width(self) -> int:
        """Slots ever in use at once: the bits of the widest mask."""
        return len(self._workers)

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
        self._made[bit] = tuple(PrefixMatch(worker_id, blocks) for blocks in range(MATCHES_MADE))
        self._references[worker_id] = 1
        return bit

    def release(self, worker_id: WorkerId) -> None:
        """Let go of the worker's slot. The caller has cleared the bit from all its masks."""
        self._references[worker_id] -= 1
        if self._references[worker_id]:
            return
        self._forget_answers()
        bit = self._bits.pop(worker_id)
        slot = bit.bit_length() - 1
        del self._references[worker_id], self._made[bit]
        self._workers[slot] = None
        heappush(self._free, slot)

    def matches(self, masks: tuple[int, ...]) -> tuple[PrefixMatch, ...]:
        """Who is in how many first ones of ``masks``, one mask a block: deepest first, then by worker id.

        Fastest where equal neighbours are one object, and where the same masks were asked for before.
        """
        known = self._answers.get(masks)
        if known is not None:
            return known
        if self._answered_masks + len(masks) >= ANSWERED_MASKS_MAX:
            self._forget_answers()
        self._answered_masks += len(masks) + 1
        self._answers[masks] = answer = self._found(masks) if masks else ()
        return answer

    def _found(self, masks: tuple[int, ...]) -> tuple[PrefixMatch, ...]:
        found: list[PrefixMatch] = []
        made_for = self._made.get
        count = len(masks)
        mask = before = masks[0]
        walked = iter(masks)
        for holding in walked:
            if holding is not before:
                before = holding
                left = mask & holding
                if left != mask:
                    blocks = count - 1 - length_hint(walked)
                    made = made_for(mask ^ left)
                    if made is not None and blocks < MATCHES_MADE:
                        found.append(made[blocks])
                    else:
                        found += self._each(mask ^ left, blocks)
                    mask = left
                    if not left:
                        break
        if mask:
            found += self._each(mask, count)
        found.reverse()
        return tuple(found)

    def _each(self, mask: int, blocks: int) -> list[PrefixMatch]:
        """One match for each worker of the mask, by worker id, last first."""
        each = []
        while mask:
            slot = mask.bit_length() - 1
            mask ^= 1 << slot
            worker_id = self._workers[slot]
            assert worker_id is not None, slot
            each.append(PrefixMatch(worker_id, blocks))
        each.sort(reverse=True)
        return each

    def _forget_answers(self) -> None:
        self._answers.clear()
        self._answered_masks = 0
