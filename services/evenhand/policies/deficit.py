"""Deficit longest prefix match: affinity within a quantum of fairness.

Cao et al., "Locality-aware Fair Scheduling in LLM Serving", arXiv 2501.14312. A deficit q per client; the queue in
longest-prefix order; a request may go while its client's q > 0; computed input and w_out per output token lower q,
cached input is free; when nobody queued has q > 0, all of those queued get +Q until one has. Its bound is 2(U + Q)
with U = w_in·L + w_out·M.

``Dlpm`` is that rule at the router, over all workers with room at once: the pair of request and worker with most
tokens cached. ``DoubleDeficit`` (D²LPM) sends at once and lets each engine run DLPM inside: a deficit per client
and worker; of the workers with q > 0, those that hold most of the prompt, else the one with the shortest queue;
none: refill. It charges all input when it sends and the output when that is over.

Left out: the radix tree of the paper's router is the exact map here, which favours it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from evenhand.core.facts import Usage
from evenhand.core.ids import WorkerId
from evenhand.policies.affinity import MatchingPolicy
from evenhand.policies.central import InformedCentralPolicy, RoomSettings
from evenhand.policies.known_cache import EventMap
from evenhand.policies.plain import Worker, fewest_in_flight
from evenhand.policies.policy import Arrival, EngineOrder, Placed, check_least

OUTPUT_COST = 2.0
MATCH_AGE_MAX_NS = 200_000_000
"""A queued arrival's match is looked up again when it is older; the one that goes is always looked up afresh."""


class Deficits:
    """A deficit per key, in cost tokens; quanta by weight."""

    __slots__ = ("_left", "quantum")

    def __init__(self, quantum: float) -> None:
        self.quantum = quantum
        self._left: dict[str, float] = {}

    def left(self, key: str) -> float:
        """What it may still take; 0 for one that was never seen."""
        return self._left.get(key, 0.0)

    def charge(self, key: str, cost: float) -> None:
        """Take from it; it may go below zero."""
        self._left[key] = self._left.get(key, 0.0) - cost

    def refill(self, weights: Sequence[tuple[str, float]]) -> None:
        """Give each +Q·weight, as often as needed for one of them to be above zero."""
        rounds = min(int(max(0.0, -self.left(key)) // (self.quantum * weight)) + 1 for key, weight in weights)
        for key, weight in weights:
            self._left[key] = self.left(key) + rounds * self.quantum * weight


@dataclass(frozen=True, slots=True)
class DlpmSettings(RoomSettings):
    """Parameters of DLPM; the paper varies Q from 2,000 to 32,000."""

    quantum: float = 8_000.0
    output_cost: float = OUTPUT_COST
    considered_max: int = 32
    """First requests of each client that are compared."""

    def __post_init__(self) -> None:
        check_least(self, 1, "quantum", "considered_max")


class _Match:
    """What a queued arrival is known to find, by worker."""

    __slots__ = ("at_ns", "held")

    def __init__(self, at_ns: int, held: dict[WorkerId, int]) -> None:
        self.at_ns = at_ns
        self.held = held


class Dlpm(InformedCentralPolicy):
    """Most cached first among clients with deficit left."""

    name = "dlpm"
    wants_progress = True

    def __init__(self, settings: DlpmSettings, seed: int) -> None:
        super().__init__(settings)
        self.settings = settings
        self.deficits = Deficits(settings.quantum)
        self._matches: dict[int, _Match] = {}
        self._weights: dict[str, float] = {}

    def pick(self, now_ns: int) -> Placed | None:
        open_workers = [worker for worker in self.workers if self.may_take(worker)]
        if not open_workers:
            return None
        tenants = [tenant for tenant in self.queues.tenants() if self.deficits.left(tenant) > 0]
        if not tenants:
            self.deficits.refill([(tenant, self._weights[tenant]) for tenant in self.queues.tenants()])
            tenants = [tenant for tenant in self.queues.tenants() if self.deficits.left(tenant) > 0]
        best: Placed | None = None
        best_order: tuple[int, int, int] | None = None
        for tenant in tenants:
            for arrival in self.queues.first(tenant, self.settings.considered_max):
                held = self._match(arrival, now_ns)
                for worker in open_workers:
                    cached = held.get(worker.worker_id, 0)
                    order = (-cached, worker.in_flight, arrival.arrival_id)
                    if best_order is not None and order >= best_order:
                        continue
                    if self.fits_given(arrival, worker, held):
                        best, best_order = Placed(arrival, worker.worker_id), order
        return best

    def _match(self, arrival: Arrival, now_ns: int) -> dict[WorkerId, int]:
        match = self._matches.get(arrival.arrival_id)
        if match is None or now_ns - match.at_ns > MATCH_AGE_MAX_NS:
            match = _Match(now_ns, self.known.match(arrival.block_names))
            self._matches[arrival.arrival_id] = match
        return match.held

    def queued(self, arrival: Arrival, first: bool, now_ns: int) -> None:
        self._weights[arrival.tenant] = arrival.weight

    def unqueued(self, arrival: Arrival, last: bool) -> None:
        self._matches.pop(arrival.arrival_id, None)

    def placed(self, arrival: Arrival, worker: Worker, now_ns: int) -> None:
        self._matches.pop(arrival.arrival_id, None)
        self.deficits.charge(arrival.tenant, self.uncached_tokens(arrival, worker))

    def progress(self, worker_id: WorkerId, produced: Sequence[tuple[Arrival, int]], now_ns: int) -> None:
        cost = self.settings.output_cost
        for arrival, tokens in produced:
            self.deficits.charge(arrival.tenant, cost * tokens)


@dataclass(frozen=True, slots=True)
class DoubleDeficitSettings:
    """Parameters of D²LPM; the paper varies Q^w from 2,000 to 100,000 and Q^u from 500 to 32,000."""

    worker_quantum: float = 20_000.0
    """Q^w, at the router: per client and worker."""
    user_quantum: float = 8_000.0
    """Q^u, inside each engine: per client."""
    output_cost: float = OUTPUT_COST

    def __post_init__(self) -> None:
        check_least(self, 1, "worker_quantum", "user_quantum")


class DoubleDeficit(MatchingPolicy):
    """Deficits per client and worker at the router, DLPM inside each engine."""

    name = "d2lpm"
    engine_order = EngineOrder.DEFICIT_LONGEST_PREFIX

    def __init__(self, settings: DoubleDeficitSettings, seed: int) -> None:
        super().__init__(EventMap())
        self.settings = settings
        self._by_tenant: dict[str, Deficits] = {}

    def choose(self, arrival: Arrival, now_ns: int) -> Worker:
        deficits = self._by_tenant.setdefault(arrival.tenant, Deficits(self.settings.worker_quantum))
        allowed = [worker for worker in self.workers if deficits.left(worker.worker_id) > 0]
        if not allowed:
            deficits.refill([(worker.worker_id, arrival.weight) for worker in self.workers])
            allowed = [worker for worker in self.workers if deficits.left(worker.worker_id) > 0]
        held = self.known.match(arrival.block_names)
        most = max(held.get(worker.worker_id, 0) for worker in self.workers)
        # The longest match counts among all workers; a lesser match elsewhere is no reason to go there.
        matching = [worker for worker in allowed if most and held.get(worker.worker_id, 0) == most]
        return fewest_in_flight(matching or allowed)

    def sent(self, arrival: Arrival, worker: Worker) -> None:
        super().sent(arrival, worker)
        self._by_tenant[arrival.tenant].charge(worker.worker_id, arrival.prompt_tokens)

    def finished(self, arrival: Arrival, worker_id: WorkerId, usage: Usage, now_ns: int) -> None:
        super().finished(arrival, worker_id, usage, now_ns)
        self._by_tenant[arrival.tenant].charge(worker_id, self.settings.output_cost * usage.output_tokens)
