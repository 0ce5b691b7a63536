"""Evenhand as a policy: the real core behind the common interface, nothing of it rewritten.

``PoolScheduler``, ``Presence`` and the cache map with its one fold are those that the daemon runs. This adapter
does what the daemon's shell and the SDK do around them: it keeps tickets, tells the time to first token, settles
with the usage that the engine reports, renews with the usage so far, and folds what workers publish. A tenant is
made known with its weight at its first arrival, unless ``tenant_changed`` said more of it before.

What a simulation leaves out: heartbeats, expiring tickets, credentials, the network. So silence makes no worker
stale here, and queues are not bounded unless a tenant's spec says so.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from evenhand.core.cache_map import CacheMap
from evenhand.core.checkpoint import SchedulerCheckpoint
from evenhand.core.facts import (
    LegOutcome,
    Request,
    SchedulerConfig,
    TenantSpec,
    Ticket,
    Usage,
    WorkerSpec,
)
from evenhand.core.fold import fold
from evenhand.core.ids import Epoch, PoolId, RequestId, TenantId, TicketId, WorkerId
from evenhand.core.kv import KvBatch, SnapshotPart, WorkerLeft
from evenhand.core.presence import Presence
from evenhand.core.scheduler import PoolScheduler
from evenhand.core.steps import (
    Cancel,
    Effect,
    Granted,
    Input,
    MapChanged,
    Refused,
    Renew,
    Settle,
    Submit,
    TenantChanged,
    Tick,
    TicketAdopted,
    WakeAt,
    WorkerGone,
    WorkerJoined,
)
from evenhand.policies.policy import Arrival, EngineOrder, FleetWorker, Placed

POOL = PoolId("pool")
NEVER_MS = 1 << 40
"""Longer than any run, in ms."""
TICKET_TTL_MS = (1 << 32) - 1
"""Longest that a ticket may live unheard of: seven weeks."""
QUEUE_LENGTH_MAX = 1 << 40
NS_PER_MS = 1_000_000

RENEWED_CHANGE_MIN = 0.05
"""Usage is told again once its output has grown by so many tokens for each cost token charged, as by the SDK."""

SIMULATED = {
    "pool_id": POOL,
    "ticket_ttl_ms": TICKET_TTL_MS,
    "leg_ms_max": NEVER_MS,
    "worker_stale_after_ms": NEVER_MS,
    "worker_lost_after_ms": NEVER_MS,
    "queued_total_max": 1 << 40,
}
"""Settings of a core whose shell sends no heartbeats."""


@dataclass(frozen=True, slots=True)
class EvenhandSettings(SchedulerConfig):
    """The core's own settings, and four of the shell's."""

    sends_events: bool = True
    """False: workers publish nothing, and the map is what was sent there (approximate)."""
    renewed_after_ms: int = 1_000
    """A running request's usage so far is told this often where it has changed, as the SDK does; 0: only at its
    end."""
    ttft_told: bool = True
    """The client tells its time to first token, by which prefill rates are learned."""
    first_token_told: bool = True
    """The client renews at the first token, which frees prefill room; False: prefill is modelled alone."""


class _Leg:
    """A granted arrival."""

    __slots__ = (
        "arrival",
        "cached_tokens",
        "first_token_ns",
        "output_tokens",
        "renewed_ns",
        "ticket",
        "told_tokens",
    )

    def __init__(self, arrival: Arrival, ticket: Ticket, now_ns: int) -> None:
        self.arrival = arrival
        self.ticket = ticket
        self.first_token_ns = -1
        self.cached_tokens = 0
        self.output_tokens = 0
        self.told_tokens = 0
        """Output as the core was told last."""
        self.renewed_ns = now_ns


class Evenhand:
    """Windowed start-time fair queuing with affinity; see ``docs/fairness.md``."""

    name = "evenhand"
    holds_backlog = True
    wants_map = True
    refuses = True
    engine_order = EngineOrder.FCFS

    def __init__(self, settings: EvenhandSettings, seed: int) -> None:
        self.settings = settings
        self.wants_map = settings.sends_events
        self.wants_progress = settings.renewed_after_ms > 0
        self.map = CacheMap()
        self.presence = Presence(self.map)
        self.scheduler = PoolScheduler(settings, self.presence)
        self._arrivals: dict[RequestId, Arrival] = {}
        self._legs: dict[int, _Leg] = {}
        """By arrival id."""
        self._tenants: dict[str, TenantId] = {}
        self._specs: dict[TenantId, TenantSpec] = {}
        self._workers: dict[WorkerId, WorkerSpec] = {}
        self._term = 1
        self._placed: list[Placed] = []
        self._refused: list[Arrival] = []
        self._wake_at_ns: int | None = None

    # ---- the core

    def step(self, input: Input, now_ns: int) -> None:
        """One step of the core, and what its effects mean here."""
        self._obey(self.scheduler.step(input, now_ns), now_ns)

    def _obey(self, effects: Sequence[Effect], now_ns: int) -> None:
        for effect in effects:
            if isinstance(effect, Granted):
                arrival = self._arrivals[effect.ticket.request_id]
                self._legs[arrival.arrival_id] = _Leg(arrival, effect.ticket, now_ns)
                self._placed.append(Placed(arrival, effect.ticket.worker_id))
            elif isinstance(effect, Refused):
                refused = self._arrivals.pop(effect.request_id, None)
                if refused is not None:
                    self._refused.append(refused)
            elif isinstance(effect, WakeAt):
                self._wake_at_ns = max(effect.at_ns, now_ns + 1)

    # ---- tenants and workers

    def tenant_changed(self, spec: TenantSpec, now_ns: int) -> None:
        """An administrator's word on a tenant; before its first arrival, or while it runs."""
        self._tenants[str(spec.tenant_id)] = spec.tenant_id
        self._specs[spec.tenant_id] = spec
        self.step(TenantChanged(spec), now_ns)

    def worker_joined(self, worker: FleetWorker, now_ns: int) -> None:
        spec = WorkerSpec(
            worker.worker_id,
            POOL,
            "http://worker",
            Epoch(worker.epoch),
            worker.slots,
            worker.kv_blocks,
            worker.block_size,
            sends_events=self.settings.sends_events,
        )
        self._workers[worker.worker_id] = spec
        self.step(WorkerJoined(spec), now_ns)

    def worker_lost(self, worker_id: WorkerId, returned: Sequence[Arrival], now_ns: int) -> None:
        position = self.map.position(worker_id)
        if position is not None and not position.left:
            fold(self.map, WorkerLeft(worker_id, position.epoch))
        self._workers.pop(worker_id, None)
        for arrival in returned:
            del self._legs[arrival.arrival_id]
        self.step(WorkerGone(worker_id, f"Worker {worker_id} is gone."), now_ns)

    # ---- requests

    def submit(self, arrival: Arrival, now_ns: int) -> None:
        tenant = self._tenants.get(arrival.tenant)
        if tenant is None:
            tenant = TenantId(arrival.tenant)
            self.tenant_changed(TenantSpec(tenant, arrival.weight, queue_length_max=QUEUE_LENGTH_MAX), now_ns)
        self._arrivals[RequestId(str(arrival.arrival_id))] = arrival
        self._ask(arrival, now_ns)

    def _ask(self, arrival: Arrival, now_ns: int) -> None:
        request = Request(
            RequestId(str(arrival.arrival_id)),
            self._tenants[arrival.tenant],
            arrival.block_names,
            arrival.prompt_tokens,
            arrival.output_tokens_max,
            arrival.output_tokens_expected,
            user=arrival.user,
        )
        self.step(Submit(request), now_ns)

    def place(self, now_ns: int) -> Sequence[Placed]:
        if self._wake_at_ns is not None and self._wake_at_ns <= now_ns:
            self._wake_at_ns = None
            self.step(Tick(), now_ns)
        if not self._placed:
            return ()
        placed, self._placed = self._placed, []
        return placed

    def take_refused(self) -> Sequence[Arrival]:
        if not self._refused:
            return ()
        refused, self._refused = self._refused, []
        return refused

    def first_token(self, arrival: Arrival, worker_id: WorkerId, cached_tokens: int, now_ns: int) -> None:
        leg = self._legs[arrival.arrival_id]
        leg.first_token_ns = leg.renewed_ns = now_ns
        leg.cached_tokens = cached_tokens
        if self.settings.first_token_told:
            leg.told_tokens = 1
            self._renew(leg, 1, now_ns)

    def progress(self, worker_id: WorkerId, produced: Sequence[tuple[Arrival, int]], now_ns: int) -> None:
        due_ns = now_ns - self.settings.renewed_after_ms * NS_PER_MS
        for arrival, tokens in produced:
            leg = self._legs[arrival.arrival_id]
            leg.output_tokens += tokens
            if leg.renewed_ns <= due_ns:
                leg.renewed_ns = now_ns
                if leg.output_tokens - leg.told_tokens > RENEWED_CHANGE_MIN * leg.ticket.charge:
                    leg.told_tokens = leg.output_tokens
                    self._renew(leg, leg.output_tokens, now_ns)

    def _renew(self, leg: _Leg, output_tokens: int, now_ns: int) -> None:
        usage = Usage(leg.arrival.prompt_tokens, leg.cached_tokens, output_tokens)
        self.step(Renew(leg.ticket.ticket_id, usage), now_ns)

    def finished(self, arrival: Arrival, worker_id: WorkerId, usage: Usage, now_ns: int) -> None:
        leg = self._legs.pop(arrival.arrival_id)
        ticket = leg.ticket
        ttft_ms = (leg.first_token_ns - ticket.granted_at_ns) / NS_PER_MS if self.settings.ttft_told else None
        del self._arrivals[ticket.request_id]
        self.step(Settle(ticket.ticket_id, usage, LegOutcome.SETTLED, ttft_ms), now_ns)

    def cancelled(self, arrival: Arrival, worker_id: WorkerId | None, usage: Usage, now_ns: int) -> None:
        request_id = RequestId(str(arrival.arrival_id))
        self._arrivals.pop(request_id)
        leg = self._legs.pop(arrival.arrival_id, None)
        tenant = self._tenants[arrival.tenant]
        self.step(Cancel(tenant, request_id, usage if leg is not None else None), now_ns)

    # ---- the map

    def map_changed(self, message: KvBatch | SnapshotPart, now_ns: int) -> None:
        folded = fold(self.map, message)
        if folded.replaced or folded.operations:
            self.step(MapChanged(message.worker_id), now_ns)

    def wake_at_ns(self) -> int | None:
        return self._wake_at_ns

    # ---- failover

    def fail_over(self, checkpoint: SchedulerCheckpoint, elapsed_ns: int, now_ns: int) -> None:
        """Another process takes the pool over with a checkpoint that is ``elapsed_ns`` old.

        It is told of tenants and workers; clients renew the tickets they hold, those that the checkpoint does not
        know are adopted, and what waited is asked for again, in its order.
        """
        self._term += 1
        self._wake_at_ns = None
        self.presence = Presence(self.map)
        self.scheduler = PoolScheduler(self.settings, self.presence, self._term)
        self.scheduler.restore(checkpoint, now_ns, elapsed_ns)
        for tenant in self._specs.values():
            self.step(TenantChanged(tenant), now_ns)
        for worker in self._workers.values():
            self.step(WorkerJoined(worker), now_ns)
        known = {held.ticket.ticket_id for held in checkpoint.tickets}
        for leg in self._legs.values():
            if leg.ticket.ticket_id in known:
                self.step(Renew(leg.ticket.ticket_id), now_ns)
            else:
                self.step(TicketAdopted(leg.ticket, leg.arrival.block_names), now_ns)
        for arrival in list(self._arrivals.values()):
            if arrival.arrival_id not in self._legs:
                self._ask(arrival, now_ns)

    def ticket_of(self, arrival: Arrival) -> TicketId | None:
        """The open ticket of an arrival; None if it waits or has ended."""
        leg = self._legs.get(arrival.arrival_id)
        return leg.ticket.ticket_id if leg is not None else None
