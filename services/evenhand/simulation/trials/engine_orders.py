"""The admission order of the simulated engines behind a policy, told of what an order may charge for."""

from collections.abc import Sequence
from typing import Protocol, assert_never, runtime_checkable

from evenhand.engine.waiting import Fcfs, LongestPrefixFirst, WaitingOrder
from evenhand.policies.policy import Arrival, EngineOrder, Policy


@runtime_checkable
class TrialOrder(WaitingOrder, Protocol):
    """An order that counts what is done for whom."""

    def admitted(self, arrival: Arrival, cached_tokens: int) -> None:
        """The engine took it in; again after a preemption."""

    def produced(self, produced: Sequence[tuple[Arrival, int]]) -> None:
        """Output tokens since the last call."""


def engine_order(policy: Policy) -> WaitingOrder:
    """A fresh order for one engine."""
    match policy.engine_order:
        case EngineOrder.FCFS:
            return Fcfs()
        case EngineOrder.LONGEST_PREFIX:
            return LongestPrefixFirst()
        case EngineOrder.DEFICIT_LONGEST_PREFIX:
            return LongestPrefixFirst()
        case _:
            assert_never(policy.engine_order)
