"""What stands between clients and the one engine: nothing but the engine's own queue, or a policy before it.

``InEngine`` sends each request on at once, and the order of the engine's queue decides: as the paper has it.
``Behind`` puts a policy of the common interface (Evenhand's core here) before the engine, which then serves in
order of arrival. Both see the same engine, and it tells both of each token.
"""

from collections.abc import Sequence
from typing import Protocol

from evenhand.core.facts import Usage
from evenhand.engine.request import EngineRequest
from evenhand.engine.waiting import Fcfs, WaitingOrder
from evenhand.policies.policy import Arrival, FleetWorker, Policy
from evenhand.simulation.vtc.orders import VtcOrder


class Front(Protocol):
    """Told of each request's life; says which go to the engine now."""

    order: WaitingOrder

    def submit(self, request: EngineRequest, now_ns: int) -> None:
        """A client asks; ``label`` is the client."""

    def place(self, now_ns: int) -> Sequence[EngineRequest]:
        """What goes to the engine now. Asked at each end of a step and at each arrival at an idle engine."""

    def first_token(self, request: EngineRequest, now_ns: int) -> None:
        """Its prompt is computed and its first token out."""

    def produced(self, requests: Sequence[EngineRequest], now_ns: int) -> None:
        """Each of these has one token more, the first excepted."""

    def ended(self, request: EngineRequest, now_ns: int) -> None:
        """Its last token is out."""


class InEngine:
    """The engine's own queue: VTC, or first come first served if ``vtc`` is None."""

    def __init__(self, vtc: VtcOrder | None = None) -> None:
        self.order: WaitingOrder = Fcfs() if vtc is None else vtc
        self._vtc = vtc
        self._fresh: list[EngineRequest] = []

    def submit(self, request: EngineRequest, now_ns: int) -> None:
        self._fresh.append(request)

    def place(self, now_ns: int) -> Sequence[EngineRequest]:
        fresh, self._fresh = self._fresh, []
        return fresh

    def first_token(self, request: EngineRequest, now_ns: int) -> None:
        if self._vtc is not None:
            self._vtc.produced(request)

    def produced(self, requests: Sequence[EngineRequest], now_ns: int) -> None:
        if self._vtc is not None:
            for request in requests:
                self._vtc.produced(request)

    def ended(self, request: EngineRequest, now_ns: int) -> None:
        if self._vtc is not None:
            self._vtc.ended(request)


class Behind:
    """A policy decides which request goes next, and when; it must neither refuse nor wake by itself."""

    def __init__(self, policy: Policy, worker: FleetWorker) -> None:
        self.order: WaitingOrder = Fcfs()
        self._policy = policy
        self._requests: dict[int, EngineRequest] = {}
        """By arrival id."""
        self._arrivals: dict[str, Arrival] = {}
        """By request id."""
        self._worker_id = worker.worker_id
        policy.worker_joined(worker, 0)

    def submit(self, request: EngineRequest, now_ns: int) -> None:
        arrival = Arrival(
            int(request.request_id),
            now_ns,
            str(request.label),
            (),
            request.prompt_tokens,
            request.output_tokens_max,
            request.output_tokens_max,
        )
        self._requests[arrival.arrival_id] = request
        self._arrivals[request.request_id] = arrival
        self._policy.submit(arrival, now_ns)

    def place(self, now_ns: int) -> Sequence[EngineRequest]:
        return [self._requests[placed.arrival.arrival_id] for placed in self._policy.place(now_ns)]

    def first_token(self, request: EngineRequest, now_ns: int) -> None:
        arrival = self._arrivals[request.request_id]
        self._policy.first_token(arrival, self._worker_id, 0, now_ns)
        self._policy.progress(self._worker_id, [(arrival, 1)], now_ns)

    def produced(self, requests: Sequence[EngineRequest], now_ns: int) -> None:
        self._policy.progress(
            self._worker_id, [(self._arrivals[request.request_id], 1) for request in requests], now_ns
        )

    def ended(self, request: EngineRequest, now_ns: int) -> None:
        arrival = self._arrivals.pop(request.request_id)
        usage = Usage(request.prompt_tokens, 0, request.output_tokens_max)
        self._policy.finished(arrival, self._worker_id, usage, now_ns)
        del self._requests[arrival.arrival_id]
