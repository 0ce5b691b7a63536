"""Policies that follow the cache and know no tenants. All send at once; engines serve first come, first served.

``SessionHash``, ``LongestPrefix``, ``LoadAwarePrefix``, ``CacheAware`` and ``PrefixCache``; each docstring gives
the rule, where it is published, and what is left out.
"""

import hashlib
import math
import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from evenhand.core.errors import InvalidInput
from evenhand.core.ids import WorkerId
from evenhand.core.kv import KvBatch, SnapshotPart
from evenhand.policies.known_cache import EventMap, KnownCache, SentMap
from evenhand.policies.plain import PushPolicy, Worker, fewest_in_flight
from evenhand.policies.policy import Arrival, FleetWorker, check_least

SENT_BLOCKS_MAX = 1 << 20
"""Block names an approximate map keeps of one worker where its authors bound it by time or memory alone."""

POINTS_MAX = 10_000
"""Places of one worker on the ring; all are built anew whenever the fleet changes."""


@dataclass(frozen=True, slots=True)
class SessionHashSettings:
    """Parameters of the ring."""

    points: int = 100
    """Places of each worker on the ring, 1 … ``POINTS_MAX``."""

    def __post_init__(self) -> None:
        check_least(self, 1, "points")
        if self.points > POINTS_MAX:
            raise InvalidInput(f"The parameter 'points' is {self.points}, but must be at most {POINTS_MAX}.")


class SessionHash(PushPolicy):
    """Consistent hash of the conversation: all its turns go to one worker while the fleet stays.

    Each worker has ``points`` places on a ring of 64 bits; a conversation goes to the next place after its own
    hash, so a worker that leaves hands over only what was its own. Session-based routing of production-stack and
    of SGLang's gateway. A request without a conversation goes to the least loaded, as production-stack does it.
    """

    name = "session-hash"

    def __init__(self, settings: SessionHashSettings, seed: int) -> None:
        super().__init__()
        self._points = settings.points
        self._ring: list[tuple[int, WorkerId]] = []

    def worker_joined(self, worker: FleetWorker, now_ns: int) -> None:
        super().worker_joined(worker, now_ns)
        self._build()

    def worker_lost(self, worker_id: WorkerId, returned: Sequence[Arrival], now_ns: int) -> None:
        super().worker_lost(worker_id, returned, now_ns)
        self._build()

    def choose(self, arrival: Arrival, now_ns: int) -> Worker:
        if not arrival.session:
            return fewest_in_flight(self.workers)
        at = bisect_right(self._ring, _ring_place(arrival.session), key=_place_of)
        return self.by_id[self._ring[at % len(self._ring)][1]]

    def _build(self) -> None:
        self._ring = sorted(
            (_ring_place(f"{worker.worker_id}#{point}"), worker.worker_id)
            for worker in self.workers
            for point in range(self._points)
        )


def _ring_place(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def _place_of(entry: tuple[int, WorkerId]) -> int:
    return entry[0]


class MatchingPolicy(PushPolicy):
    """A policy that looks prompts up in what it knows of the caches."""

    def __init__(self, known: KnownCache) -> None:
        super().__init__()
        self.known = known
        self.wants_map = isinstance(known, EventMap)

    def worker_lost(self, worker_id: WorkerId, returned: Sequence[Arrival], now_ns: int) -> None:
        self.known.lost(worker_id)
        super().worker_lost(worker_id, returned, now_ns)

    def sent(self, arrival: Arrival, worker: Worker) -> None:
        super().sent(arrival, worker)
        self.known.sent(arrival.block_names, worker.worker_id)

    def map_changed(self, message: KvBatch | SnapshotPart, now_ns: int) -> None:
        if isinstance(self.known, EventMap):
            self.known.changed(message)


@dataclass(frozen=True, slots=True)
class LongestPrefixSettings:
    """Parameters of greedy longest prefix."""

    exact_map: bool = True
    """Follow the engines' events; False: what was sent, within the worker's own KV blocks."""


class LongestPrefix(MatchingPolicy):
    """The worker that holds most of the prompt; among equals the least loaded, then the first.

    The affinity-only extreme, and the order that SGLang's engines use inside (longest prefix match). Its
    starvation is described in SGLang's own issues; nothing here bounds it.
    """

    name = "longest-prefix"

    def __init__(self, settings: LongestPrefixSettings, seed: int) -> None:
        super().__init__(EventMap() if settings.exact_map else SentMap(SENT_BLOCKS_MAX))

    def worker_joined(self, worker: FleetWorker, now_ns: int) -> None:
        super().worker_joined(worker, now_ns)
        self.known.bound(worker.worker_id, worker.kv_blocks)

    def choose(self, arrival: Arrival, now_ns: int) -> Worker:
        held = self.known.match(arrival.block_names)
        return min(self.workers, key=lambda worker: (-held.get(worker.worker_id, 0), worker.in_flight))


@dataclass(frozen=True, slots=True)
class LoadAwarePrefixSettings:
    """Parameters of the load-aware form."""

    beta: float = 1.0
    """Weight of the load's excess over the mean."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.beta < math.inf:
            raise InvalidInput(f"The parameter 'beta' is {self.beta}, but must be 0 or more and finite.")


class LoadAwarePrefix(MatchingPolicy):
    """Best ``matched/prompt − β · (load − mean) / max(1, mean)``, load being requests in flight.

    The load-aware prefix routing of vllm-project/production-stack (#1035). Ties go to the first worker.
    """

    name = "load-aware-prefix"

    def __init__(self, settings: LoadAwarePrefixSettings, seed: int) -> None:
        super().__init__(EventMap())
        self.beta = settings.beta

    def score(self, matched_tokens: int, prompt_tokens: int, load: int, mean: float) -> float:
        """Of one worker for one prompt."""
        return matched_tokens / max(1, prompt_tokens) - self.beta * (load - mean) / max(1.0, mean)

    def choose(self, arrival: Arrival, now_ns: int) -> Worker:
        held = self.known.match(arrival.block_names)
        mean = sum(worker.in_flight for worker in self.workers) / len(self.workers)
        best, best_score = self.workers[0], -math.inf
        for worker in self.workers:
            matched = held.get(worker.worker_id, 0) * worker.spec.block_size
            score = self.score(matched, arrival.prompt_tokens, worker.in_flight, mean)
            if score > best_score:
                best, best_score = worker, score
        return best


@dataclass(frozen=True, slots=True)
class CacheAwareSettings:
    """Parameters of ``cache_aware``, with the router's command-line defaults."""

    cache_threshold: float = 0.3
    balance_abs_threshold: int = 64
    balance_rel_threshold: float = 1.5
    tree_blocks_max: int = SENT_BLOCKS_MAX
    """Bound of the approximate tree, per worker; the authors bound it in characters (2^26)."""


class CacheAware(MatchingPolicy):
    """Shortest queue while loads are far apart, else the worker whose tree matches, else the least loaded.

    ``max − min > abs`` and ``max > rel · min``: the least loaded, whatever is cached. Otherwise, if the best
    match is more than the threshold of the prompt: that worker; if not, the least loaded. The tree knows what was
    sent. ``cache_aware`` of SGLang's router and of vllm-project/router; earlier versions send what does not match
    to the smallest tree instead of the least loaded. Left out: the tree is of characters there, of blocks here.
    """

    name = "cache-aware"

    def __init__(self, settings: CacheAwareSettings, seed: int) -> None:
        super().__init__(SentMap(settings.tree_blocks_max))
        self.settings = settings

    def choose(self, arrival: Arrival, now_ns: int) -> Worker:
        settings = self.settings
        loads = [worker.in_flight for worker in self.workers]
        most, least = max(loads), min(loads)
        if most - least > settings.balance_abs_threshold and most > settings.balance_rel_threshold * least:
            return fewest_in_flight(self.workers)
        held = self.known.match(arrival.block_names)
        if held:
            best = next(iter(held))
            matched = held[best] * self.by_id[best].spec.block_size
            if matched / max(1, arrival.prompt_tokens) > settings.cache_threshold:
                return self.by_id[best]
        return fewest_in_flight(self.workers)


@dataclass(frozen=True, slots=True)
class PrefixCacheSettings:
    """Parameters of AIBrix's ``prefix-cache``, as its code has them."""

    imbalance_max: int = 8
    """Running requests between the fullest and the emptiest worker."""
    deviations: float = 1.0
    """Standard deviations above the mean that a matching worker may be loaded."""
    table_blocks_max: int = SENT_BLOCKS_MAX


class PrefixCache(MatchingPolicy):
    """The best match among workers that are not overloaded; the least loaded while loads are far apart.

    ``max − min > 8`` running requests: only the least loaded. Otherwise matching workers by share matched, most
    first, then by fewest requests, and the first of them with ``requests ≤ mean + 1 · σ``; none: the least loaded.
    Ties of least load are broken at random. ``prefix-cache`` of vllm-project/aibrix; its documents say 16 and 2 σ,
    its code 8 and 1. Left out: its hash table forgets by time as well.
    """

    name = "prefix-cache"

    def __init__(self, settings: PrefixCacheSettings, seed: int) -> None:
        super().__init__(SentMap(settings.table_blocks_max))
        self.settings = settings
        self._random = random.Random(f"prefix-cache/{seed}")  # noqa: S311 - no secret

    def choose(self, arrival: Arrival, now_ns: int) -> Worker:
        loads = [worker.in_flight for worker in self.workers]
        least = min(loads)
        if max(loads) - least > self.settings.imbalance_max:
            return self._least_loaded(least)
        mean = sum(loads) / len(loads)
        sigma = math.sqrt(sum((load - mean) ** 2 for load in loads) / len(loads))
        held = self.known.match(arrival.block_names)
        matching = [self.by_id[worker_id] for worker_id in held]
        matching.sort(key=lambda worker: (-held[worker.worker_id], worker.in_flight))
        for worker in matching:
            if worker.in_flight <= mean + self.settings.deviations * sigma:
                return worker
        return self._least_loaded(least)

    def _least_loaded(self, least: int) -> Worker:
        return self._random.choice([worker for worker in self.workers if worker.in_flight == least])
