"""Strict priority for the well-behaved: the limit of what isolation can reach, not a policy to run.

Whoever asks for no more than its share goes first, the oldest first; the rest go, the oldest first, when nobody of
them waits. Each goes to the worker with room that holds most of its prompt. It needs to be told who is
well-behaved, which no scheduler knows.
"""

from collections import OrderedDict
from collections.abc import Sequence

from evenhand.core.ids import WorkerId
from evenhand.policies.central import InformedCentralPolicy, RoomSettings
from evenhand.policies.plain import Worker
from evenhand.policies.policy import Arrival, Placed


class StrictPriority(InformedCentralPolicy):
    """The well-behaved first."""

    name = "strict-priority"

    def __init__(self, settings: RoomSettings, seed: int) -> None:
        super().__init__(settings)
        self._first: OrderedDict[int, Arrival] = OrderedDict()
        self._rest: OrderedDict[int, Arrival] = OrderedDict()

    def pick(self, now_ns: int) -> Placed | None:
        order = self._first or self._rest
        arrival = next(iter(order.values()))
        held = self.known.match(arrival.block_names)
        best: Worker | None = None
        for worker in self.workers:
            if not self.fits_given(arrival, worker, held):
                continue
            if best is None or _better(worker, best, held):
                best = worker
        return Placed(arrival, best.worker_id) if best is not None else None

    def queued(self, arrival: Arrival, first: bool, now_ns: int) -> None:
        order = self._first if arrival.well_behaved else self._rest
        order[arrival.arrival_id] = arrival

    def take_back(self, returned: Sequence[Arrival], now_ns: int) -> None:
        super().take_back(returned, now_ns)
        for arrival in reversed(returned):
            order = self._first if arrival.well_behaved else self._rest
            order.move_to_end(arrival.arrival_id, last=False)

    def unqueued(self, arrival: Arrival, last: bool) -> None:
        order = self._first if arrival.well_behaved else self._rest
        del order[arrival.arrival_id]

    def placed(self, arrival: Arrival, worker: Worker, now_ns: int) -> None:
        self.unqueued(arrival, False)


def _better(worker: Worker, other: Worker, held: dict[WorkerId, int]) -> bool:
    mine, others = held.get(worker.worker_id, 0), held.get(other.worker_id, 0)
    return (-mine, worker.in_flight) < (-others, other.in_flight)
