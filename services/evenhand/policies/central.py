"""What policies with a central queue share: a queue a tenant, and the room of each worker.

``CentralPolicy`` holds the backlog and, whenever something has changed, calls ``pick`` until it answers None. Each
pick takes one arrival from the queues to a worker that has room for it.

**Room** is the same for all of them, so that they differ in what they choose and not in how full they run an
engine: a free slot; key-value memory for the uncached prompt and the expected output; and pending prefill
(uncached tokens sent there without a first token so far) below ``prefill_pending_max_tokens``, where the arrival
that crosses it is let in whole. An empty worker takes anything. The expected output is the mean of what finished,
256 before.
"""

from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from evenhand.core.facts import Usage
from evenhand.core.ids import WorkerId
from evenhand.core.kv import KvBatch, SnapshotPart
from evenhand.policies.known_cache import EventMap
from evenhand.policies.plain import PlainPolicy, Worker
from evenhand.policies.policy import Arrival, FleetWorker, Placed

OUTPUT_EXPECTED_FIRST_TOKENS = 256.0
OUTPUT_STEP = 1 / 64
"""Weight of the latest output length in the mean."""


class KvReserved(Enum):
    """Output for which memory is kept."""

    EXPECTED = "expected"
    """The mean of what finished, at most what the client allows."""
    MAX = "max"
    """All that the client allows: nothing is ever preempted."""


@dataclass(frozen=True, slots=True)
class RoomSettings:
    """How full a central queue runs an engine."""

    prefill_pending_max_tokens: int = 2_048
    """0: pending prefill is no limit."""
    kv_reserved: KvReserved = KvReserved.EXPECTED
    slots_max: int = 0
    """Arrivals on one worker at once; 0: the worker's own slots."""


class _Held:
    """What an arrival has reserved on its worker."""

    __slots__ = ("kv_tokens", "prefill_tokens")

    def __init__(self, kv_tokens: int, prefill_tokens: int) -> None:
        self.kv_tokens = kv_tokens
        self.prefill_tokens = prefill_tokens


class Room:
    """One worker's room."""

    __slots__ = ("held", "kv_tokens", "prefill_tokens", "worker")

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.kv_tokens = 0
        self.prefill_tokens = 0
        self.held: dict[int, _Held] = {}
        """By arrival id."""


class TenantQueues:
    """First come, first served within each tenant; tenants in the order in which they came to have a queue."""

    def __init__(self) -> None:
        self._queues: dict[str, OrderedDict[int, Arrival]] = {}
        self.count = 0

    def push(self, arrival: Arrival) -> bool:
        """Queue at the end; whether its tenant had nothing queued."""
        queue = self._queues.get(arrival.tenant)
        self.count += 1
        if queue is not None:
            queue[arrival.arrival_id] = arrival
            return False
        self._queues[arrival.tenant] = OrderedDict({arrival.arrival_id: arrival})
        return True

    def push_front(self, arrival: Arrival) -> bool:
        """Queue before all others of its tenant."""
        first = self.push(arrival)
        self._queues[arrival.tenant].move_to_end(arrival.arrival_id, last=False)
        return first

    def remove(self, arrival: Arrival) -> bool:
        """Take out; whether its tenant has nothing left."""
        queue = self._queues[arrival.tenant]
        del queue[arrival.arrival_id]
        self.count -= 1
        if queue:
            return False
        del self._queues[arrival.tenant]
        return True

    def head(self, tenant: str) -> Arrival:
        """The first of a tenant that has something queued."""
        return next(iter(self._queues[tenant].values()))

    def tenants(self) -> Iterator[str]:
        """Those with something queued."""
        return iter(self._queues)

    def first(self, tenant: str, count: int) -> Iterator[Arrival]:
        """At most ``count`` of a tenant, in order."""
        for seen, arrival in enumerate(self._queues[tenant].values()):
            if seen == count:
                return
            yield arrival

    def length(self, tenant: str) -> int:
        """How many of a tenant are queued."""
        return len(self._queues.get(tenant, ()))


class CentralPolicy(PlainPolicy):
    """A backlog here, and only what fits on the workers."""

    holds_backlog = True

    def __init__(self, room: RoomSettings) -> None:
        super().__init__()
        self.room = room
        self.queues = TenantQueues()
        self.rooms: dict[WorkerId, Room] = {}
        self._output_expected = OUTPUT_EXPECTED_FIRST_TOKENS
        self._stirred = False

    # ---- what a policy says

    @abstractmethod
    def pick(self, now_ns: int) -> Placed | None:
        """The next to go, to a worker with room for it; None if nothing can go now."""

    def uncached_tokens(self, arrival: Arrival, worker: Worker) -> int:
        """Prompt tokens that the worker would have to compute, as far as the policy knows."""
        return arrival.prompt_tokens

    def queued(self, arrival: Arrival, first: bool, now_ns: int) -> None:
        """It joined its queue; ``first``: nothing of its tenant was queued."""
        return

    def unqueued(self, arrival: Arrival, last: bool) -> None:
        """It left its queue without being placed."""
        return

    # ---- room

    def fits(self, arrival: Arrival, worker: Worker, uncached: int) -> bool:
        """Whether the worker has room for it now."""
        if not worker.in_flight:
            return True
        room = self.rooms[worker.worker_id]
        if not self.may_take(worker):
            return False
        return room.kv_tokens + uncached + self.output_reserved(arrival) <= worker.spec.kv_tokens

    def may_take(self, worker: Worker) -> bool:
        """Whether anything at all could fit there: a cheap look before ``fits``."""
        if not worker.in_flight:
            return True
        limit = self.room.prefill_pending_max_tokens
        room = self.rooms[worker.worker_id]
        return worker.in_flight < (self.room.slots_max or worker.spec.slots) and not (
            limit and room.prefill_tokens >= limit
        )

    def output_reserved(self, arrival: Arrival) -> int:
        """Output tokens for which memory is kept."""
        if self.room.kv_reserved is KvReserved.MAX:
            return arrival.output_tokens_max
        return min(arrival.output_tokens_max, int(self._output_expected) + 1)

    # ---- the interface

    def worker_joined(self, worker: FleetWorker, now_ns: int) -> None:
        super().worker_joined(worker, now_ns)
        self.rooms[worker.worker_id] = Room(self.by_id[worker.worker_id])
        self._stirred = True

    def worker_lost(self, worker_id: WorkerId, returned: Sequence[Arrival], now_ns: int) -> None:
        self.rooms.pop(worker_id, None)
        super().worker_lost(worker_id, returned, now_ns)

    def take_back(self, returned: Sequence[Arrival], now_ns: int) -> None:
        for arrival in reversed(returned):
            self.queued(arrival, self.queues.push_front(arrival), now_ns)
        self._stirred = True

    def submit(self, arrival: Arrival, now_ns: int) -> None:
        self.queued(arrival, self.queues.push(arrival), now_ns)
        self._stirred = True

    def place(self, now_ns: int) -> Sequence[Placed]:
        if not self._stirred or not self.queues.count:
            return ()
        self._stirred = False
        placed = []
        while self.queues.count:
            next_one = self.pick(now_ns)
            if next_one is None:
                break
            arrival, worker = next_one.arrival, self.by_id[next_one.worker_id]
            uncached = self.uncached_tokens(arrival, worker)
            self.queues.remove(arrival)
            self.sent(arrival, worker)
            room = self.rooms[worker.worker_id]
            held = _Held(uncached + self.output_reserved(arrival), uncached)
            room.held[arrival.arrival_id] = held
            room.kv_tokens += held.kv_tokens
            room.prefill_tokens += held.prefill_tokens
            self.placed(arrival, worker, now_ns)
            placed.append(next_one)
        return placed

    def placed(self, arrival: Arrival, worker: Worker, now_ns: int) -> None:
        """It goes to the worker; it is in no queue any more, and its room is taken."""
        return

    def first_token(self, arrival: Arrival, worker_id: WorkerId, cached_tokens: int, now_ns: int) -> None:
        super().first_token(arrival, worker_id, cached_tokens, now_ns)
        room = self.rooms[worker_id]
        held = room.held[arrival.arrival_id]
        room.prefill_tokens -= held.prefill_tokens
        held.prefill_tokens = 0
        self._stirred = True

    def finished(self, arrival: Arrival, worker_id: WorkerId, usage: Usage, now_ns: int) -> None:
        super().finished(arrival, worker_id, usage, now_ns)
        self._output_expected += (usage.output_tokens - self._output_expected) * OUTPUT_STEP
        self._release(arrival, worker_id)

    def cancelled(self, arrival: Arrival, worker_id: WorkerId | None, usage: Usage, now_ns: int) -> None:
        super().cancelled(arrival, worker_id, usage, now_ns)
        if worker_id is None:
            self.unqueued(arrival, self.queues.remove(arrival))
        else:
            self._release(arrival, worker_id)

    def _release(self, arrival: Arrival, worker_id: WorkerId) -> None:
        room = self.rooms[worker_id]
        held = room.held.pop(arrival.arrival_id)
        room.kv_tokens -= held.kv_tokens
        room.prefill_tokens -= held.prefill_tokens
        self._stirred = True


class InformedCentralPolicy(CentralPolicy):
    """A backlog here, and an exact map of the caches, from which it knows what would have to be computed where."""

    wants_map = True

    def __init__(self, room: RoomSettings) -> None:
        super().__init__(room)
        self.known = EventMap()

    def uncached_tokens(self, arrival: Arrival, worker: Worker) -> int:
        return self.uncached_given(arrival, worker, self.known.match(arrival.block_names))

    def uncached_given(self, arrival: Arrival, worker: Worker, held: dict[WorkerId, int]) -> int:
        """``uncached_tokens`` by a match that was looked up before: blocks held, by worker. At least 1."""
        return max(1, arrival.prompt_tokens - held.get(worker.worker_id, 0) * worker.spec.block_size)

    def fits_given(self, arrival: Arrival, worker: Worker, held: dict[WorkerId, int]) -> bool:
        """Whether the worker has room for it now, by a match that was looked up before."""
        return self.fits(arrival, worker, self.uncached_given(arrival, worker, held))

    def worker_lost(self, worker_id: WorkerId, returned: Sequence[Arrival], now_ns: int) -> None:
        self.known.lost(worker_id)
        super().worker_lost(worker_id, returned, now_ns)

    def map_changed(self, message: KvBatch | SnapshotPart, now_ns: int) -> None:
        self.known.changed(message)
