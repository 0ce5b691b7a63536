"""What most policies share: who is in the fleet, what is in flight, and answers to calls that do not matter.

``PlainPolicy`` keeps the fleet and the arrivals in flight on each worker, as a router counts them: sent and not
ended. ``PushPolicy`` sends each arrival at once to the worker that ``choose`` names; while there is no worker,
arrivals wait and go, in order, when one joins.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence

from evenhand.core.facts import Usage
from evenhand.core.ids import WorkerId
from evenhand.core.kv import KvBatch, SnapshotPart
from evenhand.policies.policy import Arrival, EngineOrder, FleetWorker, Placed


class Worker:
    """A worker of the fleet and what the policy has in flight there."""

    __slots__ = ("in_flight", "index", "prefilling", "spec", "worker_id")

    def __init__(self, spec: FleetWorker, index: int) -> None:
        self.spec = spec
        self.worker_id = spec.worker_id
        self.index = index
        """Order of first joining; the tie-breaker."""
        self.in_flight = 0
        self.prefilling = 0
        """Of those, without a first token so far."""


def fewest_in_flight(workers: Sequence[Worker]) -> Worker:
    """Least load; the first among equals."""
    return min(workers, key=_in_flight)


def _in_flight(worker: Worker) -> int:
    return worker.in_flight


class PlainPolicy(ABC):
    """Fleet and counts; the rest does nothing."""

    name = "plain"
    holds_backlog = False
    wants_map = False
    wants_progress = False
    refuses = False
    engine_order = EngineOrder.FCFS

    def __init__(self) -> None:
        self.workers: list[Worker] = []
        """In order of first joining; lost ones are not among them."""
        self.by_id: dict[WorkerId, Worker] = {}
        self._known: dict[WorkerId, int] = {}

    def worker_joined(self, worker: FleetWorker, now_ns: int) -> None:
        index = self._known.setdefault(worker.worker_id, len(self._known))
        self.by_id[worker.worker_id] = Worker(worker, index)
        self.workers = sorted(self.by_id.values(), key=lambda known: known.index)

    def worker_lost(self, worker_id: WorkerId, returned: Sequence[Arrival], now_ns: int) -> None:
        if self.by_id.pop(worker_id, None) is not None:
            self.workers = sorted(self.by_id.values(), key=lambda known: known.index)
        self.take_back(returned, now_ns)

    def take_back(self, returned: Sequence[Arrival], now_ns: int) -> None:
        """Queue what a lost worker left undone; by default as if it had just come."""
        for arrival in returned:
            self.submit(arrival, now_ns)

    @abstractmethod
    def submit(self, arrival: Arrival, now_ns: int) -> None: ...

    @abstractmethod
    def place(self, now_ns: int) -> Sequence[Placed]: ...

    def take_refused(self) -> Sequence[Arrival]:
        return ()

    def sent(self, arrival: Arrival, worker: Worker) -> None:
        """Count an arrival as placed; whoever overrides ``place`` calls it."""
        worker.in_flight += 1
        worker.prefilling += 1

    def first_token(self, arrival: Arrival, worker_id: WorkerId, cached_tokens: int, now_ns: int) -> None:
        worker = self.by_id.get(worker_id)
        if worker is not None:
            worker.prefilling -= 1

    def progress(self, worker_id: WorkerId, produced: Sequence[tuple[Arrival, int]], now_ns: int) -> None:
        return

    def finished(self, arrival: Arrival, worker_id: WorkerId, usage: Usage, now_ns: int) -> None:
        worker = self.by_id.get(worker_id)
        if worker is not None:
            worker.in_flight -= 1

    def cancelled(self, arrival: Arrival, worker_id: WorkerId | None, usage: Usage, now_ns: int) -> None:
        worker = self.by_id.get(worker_id) if worker_id is not None else None
        if worker is not None:
            worker.in_flight -= 1
            worker.prefilling -= usage.output_tokens == 0

    def map_changed(self, message: KvBatch | SnapshotPart, now_ns: int) -> None:
        return

    def wake_at_ns(self) -> int | None:
        return None


class PushPolicy(PlainPolicy):
    """Sends at once; the engine's own queue holds the backlog."""

    def __init__(self) -> None:
        super().__init__()
        self._waiting: deque[Arrival] = deque()
        """Filled within one instant, or while there is no worker."""

    @abstractmethod
    def choose(self, arrival: Arrival, now_ns: int) -> Worker:
        """The worker for an arrival; at least one is there. The counts do not hold the arrival yet."""

    def submit(self, arrival: Arrival, now_ns: int) -> None:
        self._waiting.append(arrival)

    def place(self, now_ns: int) -> Sequence[Placed]:
        waiting = self._waiting
        if not waiting or not self.workers:
            return ()
        placed = []
        while waiting:
            arrival = waiting.popleft()
            worker = self.choose(arrival, now_ns)
            self.sent(arrival, worker)
            placed.append(Placed(arrival, worker.worker_id))
        return placed

    def cancelled(self, arrival: Arrival, worker_id: WorkerId | None, usage: Usage, now_ns: int) -> None:
        if worker_id is None:
            self._waiting.remove(arrival)
        super().cancelled(arrival, worker_id, usage, now_ns)
