"""What a trial leaves behind: each request's fate, and each tenant's service over time.

Tokens are booked when the engine has done the work: a prompt when it is admitted, split as the cache answered;
output as it is produced. What a lost worker had done for a request is taken back, for nobody got it.
"""

from array import array
from dataclasses import dataclass

from evenhand.policies.policy import Arrival
from evenhand.simulation.trials.workload import TenantPlan


class Outcome:
    """One request's fate. Written by the trial alone; times are −1 until they come."""

    __slots__ = (
        "arrival",
        "cached_tokens",
        "cancelled",
        "finished_ns",
        "first_token_ns",
        "legs",
        "output_tokens",
        "placed_ns",
        "refused",
        "worker",
    )

    def __init__(self, arrival: Arrival) -> None:
        self.arrival = arrival
        self.placed_ns = -1
        """When the policy gave it away; the last time, if a worker was lost."""
        self.first_token_ns = -1
        self.finished_ns = -1
        """When it ended, whichever way."""
        self.cached_tokens = 0
        self.output_tokens = 0
        self.legs = 0
        self.worker = -1
        """Number of the worker that served it last; −1: none."""
        self.cancelled = False
        self.refused = False

    @property
    def served(self) -> bool:
        """It ran to its end."""
        return self.finished_ns >= 0 and not self.cancelled and not self.refused

    @property
    def ttft_ns(self) -> int | None:
        """From arrival to the first token; None if there was none."""
        return self.first_token_ns - self.arrival.at_ns if self.first_token_ns >= 0 else None


class TenantSeries:
    """One tenant's service: running sums, and what they were at each sample."""

    __slots__ = (
        "backlogged",
        "cached",
        "cached_tokens",
        "output",
        "output_tokens",
        "plan",
        "prompt",
        "prompt_tokens",
        "waiting",
        "waiting_min",
    )

    def __init__(self, plan: TenantPlan) -> None:
        self.plan = plan
        self.prompt_tokens = 0
        """Cached ones included."""
        self.cached_tokens = 0
        self.output_tokens = 0
        self.waiting = 0
        """Requests that have come and that no engine has admitted."""
        self.waiting_min = 0
        """Its least value since the last sample."""
        self.prompt, self.cached, self.output = array("q"), array("q"), array("q")
        """At each sample."""
        self.backlogged = array("b")
        """1 where requests waited without a break since the sample before."""

    def sample(self) -> None:
        """Append what holds at this moment."""
        self.prompt.append(self.prompt_tokens)
        self.cached.append(self.cached_tokens)
        self.output.append(self.output_tokens)
        self.backlogged.append(1 if self.waiting_min > 0 else 0)
        self.waiting_min = self.waiting

    def admitted(self, prompt_tokens: int, cached_tokens: int) -> None:
        """Book a prompt that an engine took in."""
        self.prompt_tokens += prompt_tokens
        self.cached_tokens += cached_tokens

    def left_waiting(self) -> None:
        """One request of it was admitted, cancelled or refused."""
        self.waiting -= 1
        if self.waiting < self.waiting_min:
            self.waiting_min = self.waiting


@dataclass(frozen=True, slots=True)
class TrialResult:
    """One policy on one workload."""

    policy: str
    workload: str
    workers: int
    outcomes: tuple[Outcome, ...]
    """In order of arrival."""
    series: dict[str, TenantSeries]
    """By tenant, in the workload's order."""
    sample_ns: int
    """Sample k is at (k + 1) · this; 0: no samples."""
    ended_ns: int
    """When the last request ended: drain time is part of the run."""
    arrivals_ended_ns: int
    """When the last request came."""
    preemptions: int
    worker_prompt_tokens: tuple[int, ...] = ()
    """Prompt tokens that each engine computed."""
