"""Policies that know neither caches nor tenants: round robin, and least load."""

from dataclasses import dataclass

from evenhand.policies.plain import PushPolicy, Worker, fewest_in_flight
from evenhand.policies.policy import Arrival


@dataclass(frozen=True, slots=True)
class NoSettings:
    """A policy without parameters."""


class RoundRobin(PushPolicy):
    """The next worker in turn, whatever it holds and whatever it does; engines serve first come, first served."""

    name = "fcfs-round-robin"

    def __init__(self, settings: NoSettings, seed: int) -> None:
        super().__init__()
        self._turn = 0

    def choose(self, arrival: Arrival, now_ns: int) -> Worker:
        worker = self.workers[self._turn % len(self.workers)]
        self._turn += 1
        return worker


class LeastLoad(PushPolicy):
    """The worker with the fewest requests in flight, the first among equals."""

    name = "fcfs-least-load"

    def __init__(self, settings: NoSettings, seed: int) -> None:
        super().__init__()

    def choose(self, arrival: Arrival, now_ns: int) -> Worker:
        return fewest_in_flight(self.workers)
