"""What workers are taken to hold: the cache map, and what dispatched prompts will have brought there.

Events tell of a block only after the engine has computed it, and some engines send none. Two kinds of keys are
therefore assumed beside the map:

- **presumed**: the keys of a dispatched prompt, from the dispatch until its ticket has ended and the map holds
  them all, or ``grace_ns`` after the end has passed; at once if it was cancelled before its prefill. So the
  followers of a prompt that come before any event still go to its worker.
- **approximate**, for workers that send no events: what was presumed stays for ``approximate_lifetime_ns`` after
  its ticket's end. Never persisted.

A worker's assumed keys are at most its KV blocks: beyond, approximate keys go first, the least recently used
first and a prompt's last block before its first, then the presumption of the oldest ticket. A later epoch of a
worker, seen here or in the map, drops everything assumed of it.

What is assumed is marked in ``CacheMap``'s worker numbering, so a look-up is one walk over both. Whoever blames
a prediction asks ``match_map_only``: only the map can be refuted.

One writer, the pool's scheduler. Time is an argument and may not go backwards.
"""

from collections import OrderedDict, deque
from collections.abc import Sequence
from enum import Enum
from itertools import repeat
from operator import or_

from evenhand.core.cache_map import CacheMap, known_first
from evenhand.core.facts import WorkerSpec
from evenhand.core.ids import Epoch, TicketId, WorkerId
from evenhand.core.kv import WorkerPosition
from evenhand.core.slots import PrefixMatch

GRACE_NS = 5_000_000_000
"""Default time that the map gets to catch up after a ticket's end."""

APPROXIMATE_LIFETIME_NS = 120_000_000_000
"""Default lifetime of a key on a worker that sends no events."""


_NOBODY = repeat(0)


class PrefillOutcome(Enum):
    """What an ended ticket left in its worker's cache."""

    PREFILLED = "prefilled"
    CANCELLED_BEFORE_PREFILL = "cancelled_before_prefill"


class _Presumption:
    """One ticket's keys on one worker."""

    __slots__ = ("ended", "keys", "ticket_id", "worker")

    def __init__(self, ticket_id: TicketId, worker: "_Worker", keys: Sequence[int]) -> None:
        self.ticket_id = ticket_id
        self.worker = worker
        self.keys = keys
        self.ended = False


class _Worker:
    """What is assumed of one worker."""

    __slots__ = (
        "approximate",
        "bit",
        "capacity",
        "ended",
        "epoch",
        "overlap",
        "presumed",
        "presumptions",
        "sends_events",
        "worker_id",
    )

    def __init__(self, worker_id: WorkerId, bit: int) -> None:
        self.worker_id = worker_id
        self.bit = bit
        self.epoch = Epoch(-1)
        self.capacity = 0
        self.sends_events = True
        self.presumed: dict[int, int] = {}
        """Key → tickets that presume it."""
        self.presumptions: dict[TicketId, _Presumption] = {}
        """Oldest first."""
        self.ended: dict[TicketId, _Presumption] = {}
        """Those of ``presumptions`` whose ticket has ended and that wait for the map."""
        self.approximate: OrderedDict[int, int] = OrderedDict()
        """Key → end of its lifetime in ns, least recently used first."""
        self.overlap = 0
        """Keys both presumed and approximate."""

    @property
    def assumed_count(self) -> int:
        return len(self.presumed) + len(self.approximate) - self.overlap


class Presence:
    """The union of the map, presumed keys and approximate keys."""

    __slots__ = ("_approximate_lifetime_ns", "_grace_ns", "_graces", "_map", "_marks", "_tickets", "_workers")

    def __init__(
        self,
        cache_map: CacheMap,
        grace_ns: int = GRACE_NS,
        approximate_lifetime_ns: int = APPROXIMATE_LIFETIME_NS,
    ) -> None:
        self._map = cache_map
        self._grace_ns = grace_ns
        self._approximate_lifetime_ns = approximate_lifetime_ns
        self._marks: dict[int, int] = {}
        """Key → mask of the workers it is presumed or approximate on."""
        self._workers: dict[WorkerId, _Worker] = {}
        self._tickets: dict[TicketId, _Presumption] = {}
        self._graces: deque[tuple[int, _Presumption]] = deque()
        """``(end of grace, presumption)`` in order of time; entries of dropped presumptions are passed over."""

    # Look-up

    def match(self, keys: Sequence[int]) -> tuple[PrefixMatch, ...]:
        """Workers taken to hold at least the first of ``keys``, and how many: deepest first, then by worker id."""
        marks, holders = self._marks, self._map.holders
        if not marks or not keys:
            return self._map.match(keys)
        # A chain is known from its beginning, so bisection finds where it ends; nothing beyond a hole counts.
        low, high = 0, len(keys)
        while low < high:
            middle = (low + high) // 2
            key = keys[middle]
            if key in holders or key in marks:
                low = middle + 1
            else:
                high = middle
        if not low:
            return ()
        known = keys[:low]
        if marks.keys().isdisjoint(known):
            return self._map.match(known)
        held, assumed = map(holders.get, known, _NOBODY), map(marks.get, known, _NOBODY)
        return self._map.slots.matches(tuple(map(or_, held, assumed)))

    def match_map_only(self, keys: Sequence[int]) -> tuple[PrefixMatch, ...]:
        """As ``match``, by the map alone."""
        return self._map.match(keys)

    def depth_map_only(self, worker_id: WorkerId, keys: Sequence[int]) -> int:
        """How many of the first ``keys`` one worker holds, by the map alone."""
        return self._map.depth(worker_id, keys)

    def map_position(self, worker_id: WorkerId) -> WorkerPosition | None:
        """How far the map itself is folded for a worker; None if it knows nothing of it."""
        return self._map.position(worker_id)

    def filled_blocks(self, worker_id: WorkerId) -> int:
        """Blocks of the worker's cache that hold something: the map's copies and the keys assumed beside them."""
        return self._map.block_count(worker_id) + self.assumed_count(worker_id)

    def assumed_count(self, worker_id: WorkerId) -> int:
        """Keys presumed or approximate on a worker, each once; never above its KV blocks."""
        worker = self._workers.get(worker_id)
        return worker.assumed_count if worker is not None else 0

    @property
    def ticket_count(self) -> int:
        """Tickets whose keys are presumed, those that wait for the map included."""
        return len(self._tickets)

    def next_expiry_ns(self) -> int | None:
        """When ``expire`` next has something to do, at the earliest; None if nothing is assumed with an end."""
        ends = [next(iter(worker.approximate.values())) for worker in self._workers.values() if worker.approximate]
        if self._graces:
            ends.append(self._graces[0][0])
        return min(ends, default=None)

    # Workers

    def worker_joined(self, spec: WorkerSpec) -> None:
        """Know a worker, or its changed spec; a later epoch than the known one drops what was assumed of it."""
        worker = self._workers.get(spec.worker_id)
        if worker is None:
            worker = _Worker(spec.worker_id, self._map.slots.acquire(spec.worker_id))
            self._workers[spec.worker_id] = worker
        self._enter(worker, spec.epoch)
        worker.capacity = spec.kv_blocks
        worker.sends_events = spec.sends_events
        if spec.sends_events:
            self._drop_approximate(worker, len(worker.approximate))
        self._shrink(worker)

    def worker_gone(self, worker_id: WorkerId) -> None:
        """Forget all that is assumed of a worker; its tickets end here without effect."""
        worker = self._workers.pop(worker_id, None)
        if worker is not None:
            self._drop_all(worker)
            self._map.slots.release(worker_id)

    def map_changed(self, worker_id: WorkerId) -> None:
        """The map was folded forward for this worker: end presumptions it has caught up with."""
        worker = self._workers.get(worker_id)
        if worker is None:
            return
        position = self._map.position(worker_id)
        if position is not None:
            self._enter(worker, position.epoch)
        for presumption in tuple(worker.ended.values()):
            if self._map.holds_all(worker_id, presumption.keys):
                self._drop(presumption)

    # Tickets

    def presume(self, ticket_id: TicketId, worker_id: WorkerId, keys: Sequence[int], now_ns: int) -> None:
        """Take the keys of a dispatched prompt as present on its worker.

        An unknown worker or a ticket presumed already changes nothing; of a prompt larger than the worker's KV
        the first keys are presumed.
        """
        worker = self._workers.get(worker_id)
        if worker is None or ticket_id in self._tickets:
            return
        keys = tuple(dict.fromkeys(keys[: worker.capacity]))
        presumption = _Presumption(ticket_id, worker, keys)
        self._tickets[ticket_id] = worker.presumptions[ticket_id] = presumption
        presumed, approximate, marks, bit = worker.presumed, worker.approximate, self._marks, worker.bit
        known = known_first(marks, keys)
        fresh = keys[known:]
        if not approximate and marks.keys().isdisjoint(fresh):
            # What nobody is taken to hold is most of a prompt, and needs no look at each key.
            presumed.update(dict.fromkeys(fresh, 1))
            marks.update(dict.fromkeys(fresh, bit))
            keys = keys[:known]
        for key in keys:
            count = presumed.get(key, 0)
            presumed[key] = count + 1
            if not count:
                worker.overlap += key in approximate
                marks[key] = marks.get(key, 0) | bit
        self._shrink(worker)

    def ticket_ended(self, ticket_id: TicketId, outcome: PrefillOutcome, now_ns: int) -> None:
        """A ticket is over. Unknown tickets, and those that have ended, change nothing."""
        presumption = self._tickets.get(ticket_id)
        if presumption is None or presumption.ended:
            return
        worker = presumption.worker
        if outcome is PrefillOutcome.CANCELLED_BEFORE_PREFILL:
            self._drop(presumption)
        elif not worker.sends_events:
            self._approximate(worker, presumption.keys, now_ns + self._approximate_lifetime_ns)
            self._drop(presumption)
        elif self._map.holds_all(worker.worker_id, presumption.keys):
            self._drop(presumption)
        else:
            presumption.ended = True
            worker.ended[ticket_id] = presumption
            self._graces.append((now_ns + self._grace_ns, presumption))

    def expire(self, now_ns: int) -> None:
        """Drop presumptions whose grace is over and approximate keys whose lifetime is."""
        graces = self._graces
        while graces and graces[0][0] <= now_ns:
            _, presumption = graces.popleft()
            if self._tickets.get(presumption.ticket_id) is presumption:
                self._drop(presumption)
        for worker in self._workers.values():
            over = 0
            for end_ns in worker.approximate.values():
                if end_ns > now_ns:
                    break
                over += 1
            self._drop_approximate(worker, over)

    # Within

    def _enter(self, worker: _Worker, epoch: Epoch) -> None:
        if epoch > worker.epoch:
            self._drop_all(worker)
            worker.epoch = epoch

    def _shrink(self, worker: _Worker) -> None:
        """Bring what is assumed of a worker within its KV blocks."""
        while worker.approximate and worker.assumed_count > worker.capacity:
            self._drop_approximate(worker, 1)
        while len(worker.presumed) > worker.capacity:
            self._drop(next(iter(worker.presumptions.values())))

    def _approximate(self, worker: _Worker, keys: Sequence[int], end_ns: int) -> None:
        """Keep keys, which are presumed, for their lifetime too.

        The last block becomes the least recent: a prefix is useful without it, it is not without the prefix.
        """
        approximate = worker.approximate
        for key in reversed(keys):
            worker.overlap += approximate.pop(key, None) is None
            approximate[key] = end_ns

    def _drop(self, presumption: _Presumption) -> None:
        """End a presumption: keys that no other ticket presumes there are unmarked."""
        worker = presumption.worker
        del self._tickets[presumption.ticket_id], worker.presumptions[presumption.ticket_id]
        worker.ended.pop(presumption.ticket_id, None)
        presumed, approximate, marks, bit = worker.presumed, worker.approximate, self._marks, worker.bit
        for key in presumption.keys:
            count = presumed.pop(key) - 1
            if count:
                presumed[key] = count
            elif approximate and key in approximate:
                worker.overlap -= 1
            else:
                mask = marks.pop(key) ^ bit
                if mask:
                    marks[key] = mask

    def _drop_approximate(self, worker: _Worker, count: int) -> None:
        for _ in range(count):
            key, _ = worker.approximate.popitem(last=False)
            if key in worker.presumed:
                worker.overlap -= 1
            else:
                self._unmark(key, worker.bit)

    def _drop_all(self, worker: _Worker) -> None:
        for presumption in tuple(worker.presumptions.values()):
            self._drop(presumption)
        self._drop_approximate(worker, len(worker.approximate))

    def _unmark(self, key: int, bit: int) -> None:
        mask = self._marks[key] ^ bit
        if mask:
            self._marks[key] = mask
        else:
            del self._marks[key]
