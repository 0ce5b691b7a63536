"""NVIDIA Dynamo's router: its cost of a worker, and its weighted classes.

``DynamoCost`` (ai-dynamo/dynamo, ``scheduling/selector/default.rs``): least
``scale · max(0, prefill − credit · overlap) + decode + weight · active``, in blocks: *prefill* is the prompt and
the prefill already active there, *overlap* the blocks of the prompt that the worker holds, *decode* the distinct
blocks of the requests there with this one. Ties are broken at random. Temperature 0, all cache on the device.

``DynamoClasses`` (``scheduling/policy_queue.rs``): a deficit round robin over configured classes, here the
tenants. Cost is ``max(1, input − cached tokens on the best worker)``, frozen when it is queued; output is never
charged. A request queues only while every worker's active prefill exceeds a threshold; otherwise it goes at once
by cost. The feature is off by default, so quantum and threshold are not its authors' defaults: the quantum is the
lesser of their documents' example, the threshold one full step.

Left out: host and disk tiers, taints, temperature, sessions, limits of a class.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from evenhand.core.facts import Usage
from evenhand.core.ids import WorkerId
from evenhand.policies.affinity import MatchingPolicy
from evenhand.policies.central import TenantQueues
from evenhand.policies.known_cache import EventMap
from evenhand.policies.plain import Worker
from evenhand.policies.policy import Arrival, FleetWorker, Placed, check_least


@dataclass(frozen=True, slots=True)
class DynamoCostSettings:
    """Parameters of the cost, with their defaults."""

    overlap_credit: float = 1.0
    prefill_scale: float = 1.0
    active_request_weight: float = 0.0


class _Active:
    """What is active on one worker, as the router counts it."""

    __slots__ = ("blocks", "prefill_tokens", "requests", "unnamed")

    def __init__(self) -> None:
        self.blocks: dict[int, int] = {}
        """Named block → requests there that use it."""
        self.unnamed = 0
        """Last, incomplete blocks."""
        self.prefill_tokens = 0
        self.requests: dict[int, int] = {}
        """Arrival → its prompt tokens without overlap, 0 once its prefill is over."""


class DynamoCost(MatchingPolicy):
    """The worker of least cost."""

    name = "dynamo-cost"

    def __init__(self, settings: DynamoCostSettings, seed: int) -> None:
        super().__init__(EventMap())
        self.cost_settings = settings
        self._random = random.Random(f"dynamo/{seed}")  # noqa: S311 - no secret
        self._active: dict[WorkerId, _Active] = {}

    def cost(self, prefill_blocks: float, overlap_blocks: float, decode_blocks: float, active: int) -> float:
        """Of one worker for one prompt."""
        settings = self.cost_settings
        adjusted = max(0.0, prefill_blocks - settings.overlap_credit * overlap_blocks)
        return settings.prefill_scale * adjusted + decode_blocks + settings.active_request_weight * active

    def active_prefill_tokens(self, worker: Worker) -> int:
        """Prompt tokens sent there, without overlap, whose first token has not come."""
        return self._active[worker.worker_id].prefill_tokens

    def choose(self, arrival: Arrival, now_ns: int) -> Worker:
        held = self.known.match(arrival.block_names)
        best: list[Worker] = []
        best_cost = 0.0
        for worker in self.workers:
            active = self._active[worker.worker_id]
            block_size = worker.spec.block_size
            prefill = (active.prefill_tokens + arrival.prompt_tokens) / block_size
            new = sum(1 for name in arrival.block_names if name not in active.blocks)
            partial = 1 if arrival.prompt_tokens > len(arrival.block_names) * block_size else 0
            decode = len(active.blocks) + active.unnamed + new + partial
            cost = self.cost(prefill, held.get(worker.worker_id, 0), decode, len(active.requests))
            if not best or cost < best_cost:
                best, best_cost = [worker], cost
            elif cost == best_cost:
                best.append(worker)
        return best[0] if len(best) == 1 else self._random.choice(best)

    def worker_joined(self, worker: FleetWorker, now_ns: int) -> None:
        super().worker_joined(worker, now_ns)
        self._active[worker.worker_id] = _Active()

    def worker_lost(self, worker_id: WorkerId, returned: Sequence[Arrival], now_ns: int) -> None:
        self._active.pop(worker_id, None)
        super().worker_lost(worker_id, returned, now_ns)

    def sent(self, arrival: Arrival, worker: Worker) -> None:
        super().sent(arrival, worker)
        active = self._active[worker.worker_id]
        held = self.known.match(arrival.block_names).get(worker.worker_id, 0)
        uncached = max(0, arrival.prompt_tokens - held * worker.spec.block_size)
        active.requests[arrival.arrival_id] = uncached
        active.prefill_tokens += uncached
        active.unnamed += 1
        blocks = active.blocks
        for name in arrival.block_names:
            blocks[name] = blocks.get(name, 0) + 1

    def first_token(self, arrival: Arrival, worker_id: WorkerId, cached_tokens: int, now_ns: int) -> None:
        super().first_token(arrival, worker_id, cached_tokens, now_ns)
        active = self._active[worker_id]
        active.prefill_tokens -= active.requests[arrival.arrival_id]
        active.requests[arrival.arrival_id] = 0

    def finished(self, arrival: Arrival, worker_id: WorkerId, usage: Usage, now_ns: int) -> None:
        super().finished(arrival, worker_id, usage, now_ns)
        self._release(arrival, worker_id)

    def cancelled(self, arrival: Arrival, worker_id: WorkerId | None, usage: Usage, now_ns: int) -> None:
        super().cancelled(arrival, worker_id, usage, now_ns)
        if worker_id is not None:
            self._release(arrival, worker_id)

    def _release(self, arrival: Arrival, worker_id: WorkerId) -> None:
        active = self._active[worker_id]
        active.prefill_tokens -= active.requests.pop(arrival.arrival_id)
        active.unnamed -= 1
        blocks = active.blocks
        for name in arrival.block_names:
            count = blocks[name] - 1
            if count:
                blocks[name] = count
            else:
                del blocks[name]


@dataclass(frozen=True, slots=True)
class DynamoClassesSettings(DynamoCostSettings):
    """Parameters of the classes; see the module for what is nobody's default."""

    quantum_tokens: int = 1_024
    """Credit of a tenant of weight 1 for each round."""
    busy_share: float = 1.0
    """A worker is busy while its active prefill exceeds this many full steps of prompt tokens."""

    def __post_init__(self) -> None:
        check_least(self, 1, "quantum_tokens")


class DeficitRing:
    """Deficit round robin over tenants with a queue, in the order in which tenants were first seen.

    A tenant that is served keeps the turn while its credit lasts; credit is given once a round; if nobody can
    afford its first request, all get as many whole rounds as the first one needs. An empty queue forfeits credit.
    """

    def __init__(self, quantum_tokens: int) -> None:
        self._quantum = quantum_tokens
        self._tenants: list[str] = []
        self._credit: dict[str, float] = {}
        self._weights: dict[str, float] = {}
        self._cursor = 0
        self._carry: str | None = None

    def know(self, tenant: str, weight: float) -> None:
        """See a tenant; its weight holds from here on."""
        if tenant not in self._weights:
            self._tenants.append(tenant)
            self._credit[tenant] = 0.0
        self._weights[tenant] = weight

    def forfeit(self, tenant: str) -> None:
        """Its queue is empty."""
        self._credit[tenant] = 0.0
        if self._carry == tenant:
            self._carry = None

    def next(self, costs: dict[str, int]) -> str:
        """Whose turn it is; ``costs``: of the first request of each tenant with a queue. The cost is paid."""
        assert costs, "somebody has a queue"
        if self._carry is not None and costs.get(self._carry, 1 << 62) <= self._credit[self._carry]:
            return self._pay(self._carry, costs)
        ring = [self._tenants[(self._cursor + k) % len(self._tenants)] for k in range(len(self._tenants))]
        ring = [tenant for tenant in ring if tenant in costs]
        for tenant in ring:
            if costs[tenant] > self._credit[tenant]:
                self._credit[tenant] += self._quantum * self._weights[tenant]
            if costs[tenant] <= self._credit[tenant]:
                return self._pay(tenant, costs)
        rounds = min(
            -(-(costs[tenant] - self._credit[tenant]) // (self._quantum * self._weights[tenant]))
            for tenant in ring
        )
        for tenant in ring:
            self._credit[tenant] += rounds * self._quantum * self._weights[tenant]
        return self._pay(next(tenant for tenant in ring if costs[tenant] <= self._credit[tenant]), costs)

    def _pay(self, tenant: str, costs: dict[str, int]) -> str:
        self._credit[tenant] -= costs[tenant]
        self._cursor = (self._tenants.index(tenant) + 1) % len(self._tenants)
        self._carry = tenant if self._credit[tenant] > 0 else None
        return tenant


class DynamoClasses(DynamoCost):
    """By cost while a worker is free of prefill, else a queue a tenant and a deficit round robin over them."""

    name = "dynamo-classes"
    holds_backlog = True

    def __init__(self, settings: DynamoClassesSettings, seed: int) -> None:
        super().__init__(settings, seed)
        self.settings = settings
        self.queues = TenantQueues()
        self.ring = DeficitRing(settings.quantum_tokens)
        self._costs: dict[int, int] = {}
        """Frozen when queued."""

    def submit(self, arrival: Arrival, now_ns: int) -> None:
        self._queue(arrival, front=False)

    def take_back(self, returned: Sequence[Arrival], now_ns: int) -> None:
        for arrival in reversed(returned):
            self._queue(arrival, front=True)

    def place(self, now_ns: int) -> Sequence[Placed]:
        placed = []
        while self.queues.count and self.workers and not self._all_busy():
            costs = {tenant: self._costs[self.queues.head(tenant).arrival_id] for tenant in self.queues.tenants()}
            tenant = self.ring.next(costs)
            arrival = self.queues.head(tenant)
            if self.queues.remove(arrival):
                self.ring.forfeit(tenant)
            del self._costs[arrival.arrival_id]
            worker = self.choose(arrival, now_ns)
            self.sent(arrival, worker)
            placed.append(Placed(arrival, worker.worker_id))
        return placed

    def cancelled(self, arrival: Arrival, worker_id: WorkerId | None, usage: Usage, now_ns: int) -> None:
        if worker_id is None:
            if self.queues.remove(arrival):
                self.ring.forfeit(arrival.tenant)
            del self._costs[arrival.arrival_id]
            return
        super().cancelled(arrival, worker_id, usage, now_ns)

    def _queue(self, arrival: Arrival, front: bool) -> None:
        self.ring.know(arrival.tenant, arrival.weight)
        held = self.known.match(arrival.block_names)
        block_size = self.workers[0].spec.block_size if self.workers else 0
        cached = max(held.values(), default=0) * block_size
        self._costs[arrival.arrival_id] = max(1, arrival.prompt_tokens - cached)
        if front:
            self.queues.push_front(arrival)
        else:
            self.queues.push(arrival)

    def _all_busy(self) -> bool:
        share = self.settings.busy_share
        return all(
            self.active_prefill_tokens(worker) > share * worker.spec.batched_tokens_max for worker in self.workers
        )
