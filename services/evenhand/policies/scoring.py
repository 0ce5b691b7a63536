"""Routers that add up scores: AIBrix's ``vtc-basic``, llm-d's weighted scorers, and Preble's E2.

All send at once; engines serve first come, first served. Each docstring gives the rule and what is left out.
"""

import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from evenhand.core.errors import InvalidInput
from evenhand.core.facts import Usage
from evenhand.core.ids import WorkerId
from evenhand.policies.affinity import SENT_BLOCKS_MAX, MatchingPolicy
from evenhand.policies.central import OUTPUT_EXPECTED_FIRST_TOKENS, OUTPUT_STEP
from evenhand.policies.known_cache import SentMap
from evenhand.policies.plain import PushPolicy, Worker
from evenhand.policies.policy import Arrival, FleetWorker, check_least

NS_PER_S = 1_000_000_000


@dataclass(frozen=True, slots=True)
class VtcBasicSettings:
    """Parameters of ``vtc-basic``, with AIBrix's defaults."""

    fairness_weight: float = 1.0
    utilization_weight: float = 1.0
    load_max: float = 100.0
    input_weight: float = 1.0
    output_weight: float = 2.0
    window_s: float = 300.0
    bucket_min_tokens: float = 1_000.0
    tokens_max_default: float = 8_000.0
    """Taken for the largest user's tokens while nobody has any."""

    def __post_init__(self) -> None:
        check_least(self, 1, "load_max", "bucket_min_tokens")


class VtcBasic(PushPolicy):
    """Users with more tokens go to workers further along the list, whatever those hold.

    ``bucket = max(1000, (min + max)/2)`` over all users' tokens of the last five minutes; the user's place is
    ``n = min(tokens/bucket, workers − 1)``; worker i scores ``|i − n| + min(running/100, 1) + U(0, 0.1)``, least
    wins. Tokens are ``1·in + 2·out`` with the output guessed as ``ceil(1.5 · in)``, charged when routed and never
    settled. ``algorithms/vtc`` of vllm-project/aibrix. It delays nobody, so it bounds nothing. Left out: the input
    is estimated there as a quarter of the bytes; here it is the true number of tokens.
    """

    name = "vtc-basic"

    def __init__(self, settings: VtcBasicSettings, seed: int) -> None:
        super().__init__()
        self.settings = settings
        self._random = random.Random(f"vtc-basic/{seed}")  # noqa: S311 - no secret
        self._charges: deque[tuple[int, str, float]] = deque()
        """(when, user, tokens), oldest first, within the window."""
        self._tokens: dict[str, float] = {}
        self._live: dict[str, int] = {}
        """Charges of a user within the window."""

    def choose(self, arrival: Arrival, now_ns: int) -> Worker:
        settings = self.settings
        self._forget(now_ns)
        place = self.place_of(arrival.tenant)
        best, best_score = self.workers[0], math.inf
        for index, worker in enumerate(self.workers):
            running = min(worker.in_flight, worker.spec.slots)
            score = settings.fairness_weight * abs(index - place)
            score += settings.utilization_weight * min(running / settings.load_max, 1.0)
            score += self._random.uniform(0.0, 0.1)
            if score < best_score:
                best, best_score = worker, score
        self.charge(arrival.tenant, arrival.prompt_tokens, now_ns)
        return best

    def place_of(self, user: str) -> float:
        """Where along the list of workers the user's tokens put it."""
        settings = self.settings
        least = min(self._tokens.values(), default=settings.bucket_min_tokens)
        most = max(self._tokens.values(), default=settings.tokens_max_default)
        bucket = max(settings.bucket_min_tokens, (least + most) / 2)
        return min(self._tokens.get(user, 0.0) / bucket, len(self.workers) - 1.0)

    def charge(self, user: str, input_tokens: int, now_ns: int) -> float:
        """Book a request as it is routed; the user's tokens after it."""
        settings = self.settings
        tokens = settings.input_weight * input_tokens + settings.output_weight * math.ceil(1.5 * input_tokens)
        self._charges.append((now_ns, user, tokens))
        self._tokens[user] = self._tokens.get(user, 0.0) + tokens
        self._live[user] = self._live.get(user, 0) + 1
        return self._tokens[user]

    def _forget(self, now_ns: int) -> None:
        begin_ns = now_ns - int(self.settings.window_s * NS_PER_S)
        while self._charges and self._charges[0][0] <= begin_ns:
            _at, user, tokens = self._charges.popleft()
            self._live[user] -= 1
            if self._live[user]:
                self._tokens[user] -= tokens
            else:
                del self._live[user], self._tokens[user]


@dataclass(frozen=True, slots=True)
class WeightedScorersSettings:
    """Weights of the scorers, with llm-d's defaults."""

    prefix: float = 2.0
    queue: float = 1.0
    kv_use: float = 1.0
    blocks_max: int = 31_250
    """Bound of the approximate prefix index, per worker."""


class WeightedScorers(MatchingPolicy):
    """Most ``2·prefix + 1·queue + 1·kv``: three scores from 0 to 1; ties at random.

    *prefix* is the matched share of the prompt's blocks, by what was sent; *queue* is 1 for the shortest queue, 0
    for the longest and linear between, 1 for all where they are equal; *kv* is the free share of KV memory.
    llm-d/llm-d-router with its default plugins; flow control is off by default, so nobody waits there. Left out:
    queue and memory use are scraped there, and lag; here they are what was sent and has not ended.
    """

    name = "llm-d-scorers"

    def __init__(self, settings: WeightedScorersSettings, seed: int) -> None:
        super().__init__(SentMap(settings.blocks_max))
        self.settings = settings
        self._random = random.Random(f"llm-d/{seed}")  # noqa: S311 - no secret
        self._kv_tokens: dict[WorkerId, int] = {}
        self._held: dict[int, int] = {}

    def score(self, prefix: float, queue: float, kv_free: float) -> float:
        """The weighted sum of three scores."""
        return self.settings.prefix * prefix + self.settings.queue * queue + self.settings.kv_use * kv_free

    def choose(self, arrival: Arrival, now_ns: int) -> Worker:
        held = self.known.match(arrival.block_names)
        blocks = max(1, len(arrival.block_names))
        waiting = [max(0, worker.in_flight - worker.spec.slots) for worker in self.workers]
        longest, span = max(waiting), max(waiting) - min(waiting)
        best: list[Worker] = []
        best_score = -1.0
        for worker, queued in zip(self.workers, waiting, strict=True):
            queue = (longest - queued) / span if span else 1.0
            used = min(1.0, self._kv_tokens.get(worker.worker_id, 0) / worker.spec.kv_tokens)
            score = self.score(held.get(worker.worker_id, 0) / blocks, queue, 1.0 - used)
            if score > best_score:
                best, best_score = [worker], score
            elif score == best_score:
                best.append(worker)
        return best[0] if len(best) == 1 else self._random.choice(best)

    def sent(self, arrival: Arrival, worker: Worker) -> None:
        held = self.known.match(arrival.block_names).get(worker.worker_id, 0)
        tokens = arrival.prompt_tokens - held * worker.spec.block_size
        super().sent(arrival, worker)
        self._held[arrival.arrival_id] = tokens
        self._kv_tokens[worker.worker_id] = self._kv_tokens.get(worker.worker_id, 0) + tokens

    def worker_lost(self, worker_id: WorkerId, returned: Sequence[Arrival], now_ns: int) -> None:
        self._kv_tokens.pop(worker_id, None)
        super().worker_lost(worker_id, returned, now_ns)

    def finished(self, arrival: Arrival, worker_id: WorkerId, usage: Usage, now_ns: int) -> None:
        super().finished(arrival, worker_id, usage, now_ns)
        self._kv_tokens[worker_id] -= self._held.pop(arrival.arrival_id)

    def cancelled(self, arrival: Arrival, worker_id: WorkerId | None, usage: Usage, now_ns: int) -> None:
        super().cancelled(arrival, worker_id, usage, now_ns)
        if worker_id is not None:
            self._kv_tokens[worker_id] -= self._held.pop(arrival.arrival_id)


@dataclass(frozen=True, slots=True)
class ExploitExploreSettings:
    """Parameters of E2, with Preble's defaults."""

    window_s: float = 180.0
    rebalance: float = 1.5
    """The heaviest worker is spared while its load is more than this times the lightest's."""
    output_cost: float = 2.0
    """Load of an output token; an uncached prompt token is 1."""

    def __post_init__(self) -> None:
        if not self.window_s > 0:
            raise InvalidInput(f"The parameter 'window_s' is {self.window_s}, but must be above 0.")


class ExploitExplore(MatchingPolicy):
    """Exploit where the match is longer than the rest, else explore the least loaded.

    If the longest match is more tokens than remain to be computed: of the workers that hold it, the one of least
    load. Otherwise the worker of least cost, its load of the last three minutes plus what this prompt would add.
    If the heaviest worker is chosen and carries more than 1.5 times the lightest's load, the lightest takes it.
    Load is uncached prompt and expected output (mean of what finished), by the time it was sent. WukLab/preble,
    E2; "Preble: Efficient Distributed Prompt Scheduling for LLM Serving", ICLR 2025. Left out: the cost of what
    the prompt would evict, copying hot prefixes when queues grow, and the order inside its engines; its load is in
    profiled seconds, in tokens here.
    """

    name = "preble-e2"

    def __init__(self, settings: ExploitExploreSettings, seed: int) -> None:
        super().__init__(SentMap(SENT_BLOCKS_MAX))
        self.settings = settings
        self._loads: dict[WorkerId, float] = {}
        self._sent: deque[tuple[int, WorkerId, int, float]] = deque()
        """(when, worker, its epoch, load), oldest first, within the window."""
        self._epochs: dict[WorkerId, int] = {}
        self._output_expected = OUTPUT_EXPECTED_FIRST_TOKENS
        self._now_ns = 0

    def worker_joined(self, worker: FleetWorker, now_ns: int) -> None:
        super().worker_joined(worker, now_ns)
        self._loads[worker.worker_id] = 0.0
        self._epochs[worker.worker_id] = worker.epoch
        self.known.bound(worker.worker_id, worker.kv_blocks)

    def choose(self, arrival: Arrival, now_ns: int) -> Worker:
        self._forget(now_ns)
        held = self.known.match(arrival.block_names)
        most = next(iter(held.values()), 0)
        block_size = self.workers[0].spec.block_size
        if most * block_size > arrival.prompt_tokens - most * block_size:
            matching = [worker for worker in self.workers if held.get(worker.worker_id) == most]
            chosen = min(matching, key=self._load)
        else:
            chosen = min(self.workers, key=lambda worker: self._load(worker) + self._added(arrival, worker, held))
        lightest = min(self.workers, key=self._load)
        heaviest = max(self.workers, key=self._load)
        if chosen is heaviest and self._load(chosen) > self.settings.rebalance * max(1.0, self._load(lightest)):
            return lightest
        return chosen

    def sent(self, arrival: Arrival, worker: Worker) -> None:
        added = self._added(arrival, worker, self.known.match(arrival.block_names))
        super().sent(arrival, worker)
        self._loads[worker.worker_id] += added
        self._sent.append((self._now_ns, worker.worker_id, worker.spec.epoch, added))

    def finished(self, arrival: Arrival, worker_id: WorkerId, usage: Usage, now_ns: int) -> None:
        super().finished(arrival, worker_id, usage, now_ns)
        self._output_expected += (usage.output_tokens - self._output_expected) * OUTPUT_STEP

    def _load(self, worker: Worker) -> float:
        return self._loads[worker.worker_id]

    def _added(self, arrival: Arrival, worker: Worker, held: dict[WorkerId, int]) -> float:
        uncached = arrival.prompt_tokens - held.get(worker.worker_id, 0) * worker.spec.block_size
        output = min(self._output_expected, arrival.output_tokens_max)
        return max(1, uncached) + self.settings.output_cost * output

    def _forget(self, now_ns: int) -> None:
        self._now_ns = now_ns
        begin_ns = now_ns - int(self.settings.window_s * NS_PER_S)
        while self._sent and self._sent[0][0] <= begin_ns:
            _at, worker_id, epoch, load = self._sent.popleft()
            if self._epochs.get(worker_id) == epoch:
                self._loads[worker_id] -= load
