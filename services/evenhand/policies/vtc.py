"""Virtual token counter at the router: fair by counters, first come, first served within each tenant.

Whose counter is least is served next; the counter pays 1·input at admission and 2 for each output token as it is
produced; a tenant that had nothing queued is lifted to the least of those that have (``vtc_counters``). Sheng et
al., "Fairness in Serving Large Language Models", OSDI 2024, and its artifact. There it admits into one engine's
batch; here one queue stands before several workers, as the paper's own outlook proposes: ``vtc`` takes the least
loaded worker with room, ``vtc-affine`` the one with room that holds most of the prompt.

With ``prediction`` the output is charged in advance: exactly (the paper's oracle), or the truth times a number
from 0.5 to 1.5, drawn once a request from the seed (its ±50 %). What was predicted wrong is settled.

If the least tenant's first request fits nowhere, nothing goes: no other tenant may overtake it. Left out: nothing
of the algorithm; the engine below is continuous batching with chunked prefill rather than the paper's alternation.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from evenhand.core.errors import InvalidInput
from evenhand.core.facts import Usage
from evenhand.core.ids import TenantId, WorkerId
from evenhand.policies.central import InformedCentralPolicy, RoomSettings
from evenhand.policies.plain import Worker, fewest_in_flight
from evenhand.policies.policy import Arrival, Placed
from evenhand.policies.vtc_counters import INPUT_COST, OUTPUT_COST, VtcCounters, VtcLeg

PREDICTION_ERROR = 0.5
"""The noisy prediction is even within this part of the truth, above and below."""


class Prediction(Enum):
    """Who says how long an output will be."""

    NONE = "none"
    ORACLE = "oracle"
    NOISY = "noisy"
    """The truth times a number within ``PREDICTION_ERROR`` of 1."""


@dataclass(frozen=True, slots=True)
class VtcSettings(RoomSettings):
    """Parameters of VTC; costs as published."""

    input_cost: float = INPUT_COST
    output_cost: float = OUTPUT_COST
    prediction: Prediction = Prediction.NONE
    cached_free: bool = False
    """Charge only the input that had to be computed; as published, all of it."""

    def __post_init__(self) -> None:
        if self.input_cost < 0 or self.output_cost < 0:
            raise InvalidInput(
                f"VTC's costs are {self.input_cost} and {self.output_cost}, but cannot be negative."
            )


class Vtc(InformedCentralPolicy):
    """The least counter next, to the least loaded worker with room."""

    name = "vtc"
    wants_progress = True

    def __init__(self, settings: VtcSettings, seed: int) -> None:
        super().__init__(settings)
        self.settings = settings
        self.counters = VtcCounters(input_cost=settings.input_cost, output_cost=settings.output_cost)
        self._random = random.Random(f"vtc/{seed}")  # noqa: S311 - no secret
        self._predicted: dict[int, float] = {}
        self._legs: dict[int, VtcLeg] = {}

    def pick(self, now_ns: int) -> Placed | None:
        tenant = self.counters.least()
        assert tenant is not None, "who has a queue is known to the counters"
        arrival = self.queues.head(tenant)
        worker = self.worker_for(arrival)
        return Placed(arrival, worker.worker_id) if worker is not None else None

    def worker_for(self, arrival: Arrival) -> Worker | None:
        """The worker to take, of those with room."""
        possible = [worker for worker in self.workers if self.may_take(worker)]
        if not possible:
            return None
        held = self.known.match(arrival.block_names)
        with_room = [worker for worker in possible if self.fits_given(arrival, worker, held)]
        return fewest_in_flight(with_room) if with_room else None

    def queued(self, arrival: Arrival, first: bool, now_ns: int) -> None:
        self.counters.set_weight(TenantId(arrival.tenant), arrival.weight)
        self.counters.enter(TenantId(arrival.tenant))

    def unqueued(self, arrival: Arrival, last: bool) -> None:
        self.counters.leave(TenantId(arrival.tenant))

    def placed(self, arrival: Arrival, worker: Worker, now_ns: int) -> None:
        tenant = TenantId(arrival.tenant)
        self.counters.leave(tenant)
        tokens = self.uncached_tokens(arrival, worker) if self.settings.cached_free else arrival.prompt_tokens
        self._legs[arrival.arrival_id] = self.counters.admit(tenant, tokens, self._prediction(arrival))

    def progress(self, worker_id: WorkerId, produced: Sequence[tuple[Arrival, int]], now_ns: int) -> None:
        for arrival, tokens in produced:
            self.counters.produce(self._legs[arrival.arrival_id], tokens)

    def finished(self, arrival: Arrival, worker_id: WorkerId, usage: Usage, now_ns: int) -> None:
        super().finished(arrival, worker_id, usage, now_ns)
        self._end(arrival)

    def cancelled(self, arrival: Arrival, worker_id: WorkerId | None, usage: Usage, now_ns: int) -> None:
        super().cancelled(arrival, worker_id, usage, now_ns)
        self._end(arrival)

    def take_back(self, returned: Sequence[Arrival], now_ns: int) -> None:
        for arrival in returned:
            self.counters.end(self._legs.pop(arrival.arrival_id))
        super().take_back(returned, now_ns)

    def _end(self, arrival: Arrival) -> None:
        self._predicted.pop(arrival.arrival_id, None)
        leg = self._legs.pop(arrival.arrival_id, None)
        if leg is not None:
            self.counters.end(leg)

    def _prediction(self, arrival: Arrival) -> float:
        if self.settings.prediction is Prediction.NONE:
            return 0.0
        if self.settings.prediction is Prediction.ORACLE:
            return float(arrival.output_tokens)
        predicted = self._predicted.get(arrival.arrival_id)
        if predicted is None:
            predicted = arrival.output_tokens * self._random.uniform(1 - PREDICTION_ERROR, 1 + PREDICTION_ERROR)
            self._predicted[arrival.arrival_id] = predicted
        return predicted


class VtcAffine(Vtc):
    """The least counter next, to the worker with room that holds most of its prompt."""

    name = "vtc-affine"

    def worker_for(self, arrival: Arrival) -> Worker | None:
        possible = [worker for worker in self.workers if self.may_take(worker)]
        if not possible:
            return None
        held = self.known.match(arrival.block_names)
        possible.sort(key=lambda worker: (-held.get(worker.worker_id, 0), worker.in_flight))
        for worker in possible:
            if self.fits_given(arrival, worker, held):
                return worker
        return None
