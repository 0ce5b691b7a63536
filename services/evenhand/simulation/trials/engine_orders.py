"""The admission order of the simulated engines behind a policy, told of what an order may charge for.

``DeficitLongestPrefix`` is DLPM inside an engine, the lower half of D²LPM (Cao et al., arXiv 2501.14312): most
cached first among tenants whose deficit is above zero; a preempted request goes first of all, and pays nothing a
second time. Only the first ``SCANNED_MAX`` requests of each tenant are compared.
"""

from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Protocol, assert_never, runtime_checkable

from evenhand.engine.block_pool import BlockPool
from evenhand.engine.request import EngineRequest, RequestState
from evenhand.engine.waiting import Fcfs, LongestPrefixFirst, WaitingOrder
from evenhand.policies.deficit import Deficits, DoubleDeficit
from evenhand.policies.policy import Arrival, EngineOrder, Policy

SCANNED_MAX = 32


@runtime_checkable
class TrialOrder(WaitingOrder, Protocol):
    """An order that counts what is done for whom. Requests are labelled with their flights."""

    def produced(self, produced: Sequence[tuple[Arrival, int]]) -> None:
        """Output tokens since the last call."""


class _Labelled(Protocol):
    """What a request's label is here."""

    arrival: Arrival


class DeficitLongestPrefix:
    """See the module."""

    __slots__ = ("_deficits", "_output_cost", "_preempted", "_queues", "_weights")

    def __init__(self, quantum: float, output_cost: float) -> None:
        self._deficits = Deficits(quantum)
        self._output_cost = output_cost
        self._preempted: deque[EngineRequest] = deque()
        self._queues: dict[str, OrderedDict[str, EngineRequest]] = {}
        self._weights: dict[str, float] = {}

    def push(self, request: EngineRequest) -> None:
        arrival = _arrival_of(request)
        self._queues.setdefault(arrival.tenant, OrderedDict())[request.request_id] = request
        self._weights[arrival.tenant] = arrival.weight

    def requeue(self, request: EngineRequest) -> None:
        self._preempted.appendleft(request)

    def head(self, pool: BlockPool) -> EngineRequest | None:
        if self._preempted:
            return self._preempted[0]
        if not self._queues:
            return None
        allowed = [tenant for tenant in self._queues if self._deficits.left(tenant) > 0]
        if not allowed:
            self._deficits.refill([(tenant, self._weights[tenant]) for tenant in self._queues])
            allowed = [tenant for tenant in self._queues if self._deficits.left(tenant) > 0]
        best: EngineRequest | None = None
        best_tokens = -1
        for tenant in allowed:
            for scanned, request in enumerate(self._queues[tenant].values()):
                if scanned == SCANNED_MAX:
                    break
                block_size = request.content.block_size
                usable = min(request.content.nameable_blocks, (request.prompt_tokens - 1) // block_size)
                tokens = len(pool.match(request.content.names(usable), usable)) * block_size
                if tokens > best_tokens:
                    best, best_tokens = request, tokens
        return best

    def remove(self, request: EngineRequest) -> None:
        tenant = _arrival_of(request).tenant
        queue = self._queues.get(tenant)
        if queue is None or queue.pop(request.request_id, None) is None:
            self._preempted.remove(request)
            return
        if not queue:
            del self._queues[tenant]
        if request.state is RequestState.PREFILL:  # admitted, not cancelled
            self._deficits.charge(tenant, request.prompt_tokens - request.cached_tokens)

    def __len__(self) -> int:
        return len(self._preempted) + sum(map(len, self._queues.values()))

    def produced(self, produced: Sequence[tuple[Arrival, int]]) -> None:
        for arrival, tokens in produced:
            self._deficits.charge(arrival.tenant, self._output_cost * tokens)


def _arrival_of(request: EngineRequest) -> Arrival:
    labelled: _Labelled = request.label  # type: ignore[assignment]
    return labelled.arrival


def engine_order(policy: Policy) -> WaitingOrder:
    """A fresh order for one engine."""
    match policy.engine_order:
        case EngineOrder.FCFS:
            return Fcfs()
        case EngineOrder.LONGEST_PREFIX:
            return LongestPrefixFirst()
        case EngineOrder.DEFICIT_LONGEST_PREFIX:
            assert isinstance(policy, DoubleDeficit), "the one policy with deficits inside the engines"
            return DeficitLongestPrefix(policy.settings.user_quantum, policy.settings.output_cost)
        case _:
            assert_never(policy.engine_order)
