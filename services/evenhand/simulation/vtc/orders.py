"""VTC as the order in which an engine admits, with one of its predictions of output.

The counters are ``policies.vtc_counters``; this puts them on an engine's waiting queue. A request keeps its
place among its client's own. Nothing here is preempted: the engine reserves every output at admission.
"""

from collections import deque
from random import Random
from typing import assert_never

from evenhand.core.ids import TenantId
from evenhand.engine.block_pool import BlockPool
from evenhand.engine.request import EngineRequest
from evenhand.policies.vtc import PREDICTION_ERROR, Prediction
from evenhand.policies.vtc_counters import VtcCounters, VtcLeg


class VtcOrder:
    """The oldest request of the client with the least counter. ``label`` of a request is its client."""

    def __init__(self, prediction: Prediction, seed: int) -> None:
        self.counters = VtcCounters()
        self._prediction = prediction
        self._random = Random(seed)  # noqa: S311  a seeded error
        self._queues: dict[TenantId, deque[EngineRequest]] = {}
        self._legs: dict[str, VtcLeg] = {}
        self._waiting = 0

    def push(self, request: EngineRequest) -> None:
        client = _client(request)
        self._queues.setdefault(client, deque()).append(request)
        self.counters.enter(client)
        self._waiting += 1

    def requeue(self, request: EngineRequest) -> None:
        raise AssertionError("an engine that reserves whole outputs preempts nobody")

    def head(self, pool: BlockPool) -> EngineRequest | None:
        client = self.counters.least()
        return None if client is None else self._queues[client][0]

    def remove(self, request: EngineRequest) -> None:
        """It was admitted: nobody cancels here."""
        client = _client(request)
        assert self._queues[client].popleft() is request, "only heads are admitted"
        self._waiting -= 1
        self.counters.leave(client)
        self._legs[request.request_id] = self.counters.admit(client, request.prompt_tokens, self._predict(request))

    def __len__(self) -> int:
        return self._waiting

    def produced(self, request: EngineRequest) -> None:
        """The request produced a token."""
        self.counters.produce(self._legs[request.request_id])

    def ended(self, request: EngineRequest) -> None:
        """Its last token is out."""
        self.counters.end(self._legs.pop(request.request_id))

    def _predict(self, request: EngineRequest) -> float:
        truth = request.output_tokens_max
        match self._prediction:
            case Prediction.NONE:
                return 0.0
            case Prediction.ORACLE:
                return float(truth)
            case Prediction.NOISY:
                return self._random.uniform(truth * (1 - PREDICTION_ERROR), truth * (1 + PREDICTION_ERROR))
            case _ as never:
                assert_never(never)


def _client(request: EngineRequest) -> TenantId:
    assert isinstance(request.label, str), "a request is labelled with its client"
    return TenantId(request.label)
