"""A scheduler lost in mid-run: what its successor does not know makes shares unequal by one bound at most.

The successor has the last checkpoint. Legs that were granted since are made known by their owners' tickets; what
was granted and ended since is known to nobody, and what ended of the rest is open there until it runs out. The
truth is kept here, by the clients: service is what legs truly cost, ÷ their tickets' φ. While all tenants stay
backlogged and reach every worker, two of them differ over any interval by at most ``B_i + B_j`` (P4); what a
take-over forgets was got in one interval, so it adds as much at most.
"""

import random
from dataclasses import dataclass, field, replace

import pytest

from evenhand.core.cache_map import CacheMap
from evenhand.core.checkpoint import NodeClocks, SchedulerCheckpoint
from evenhand.core.facts import CostWeights, Request, SchedulerConfig, TenantSpec, Ticket, Usage, WorkerSpec
from evenhand.core.ids import Epoch, PoolId, RequestId, TenantId, TicketId, WorkerId
from evenhand.core.presence import Presence
from evenhand.core.scheduler import PoolScheduler
from evenhand.core.steps import (
    Granted,
    Input,
    LegEnded,
    Settle,
    Submit,
    TenantChanged,
    Tick,
    TicketAdopted,
    WorkerJoined,
)

POOL = PoolId("pool")
BLOCK = 16
MS = 1_000_000
QUEUED = 10
CHECKPOINT_STEPS = 40
STEPS = 400


@dataclass
class Client:
    """One tenant's side: what it asks for, and what it truly got."""

    spec: TenantSpec
    waiting: dict[RequestId, Request] = field(default_factory=dict)
    got: float = 0.0
    """Legs by their charge while they run, by their truth once they have ended; ÷ φ."""
    charge_max: float = 0.0
    under_max: float = 0.0
    over_max: float = 0.0


class Run:
    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.window = rng.choice([0.0, 300.0, 2_000.0])
        self.config = SchedulerConfig(
            POOL,
            window_fixed=self.window,
            headroom_divisor=1 << 40,
            ticket_confirm_ms=rng.choice([20, 200]),
            worker_stale_after_ms=1 << 30,
            worker_lost_after_ms=1 << 31,
        )
        self.clients = {
            TenantId(f"t{index}"): Client(TenantSpec(TenantId(f"t{index}"), rng.choice([0.5, 1.0, 3.0])))
            for index in range(rng.randrange(2, 5))
        }
        self.workers = [
            WorkerSpec(WorkerId(f"w{index}"), POOL, "http://w", Epoch(1), rng.choice([1, 2, 4]), 1 << 20, BLOCK)
            for index in range(rng.randrange(1, 4))
        ]
        self.running: dict[TicketId, Ticket] = {}
        self.truth: dict[TicketId, Usage] = {}
        self.now_ns = self.count = self.term = 0
        self.ranges: dict[tuple[TenantId, TenantId], tuple[float, float]] = {}
        self.begin(None)

    def begin(self, checkpoint: SchedulerCheckpoint | None) -> None:
        """A scheduler comes into office and is told what a shell tells it."""
        self.term += 1
        self.scheduler = PoolScheduler(self.config, Presence(CacheMap()), self.term)
        if checkpoint is not None:
            self.scheduler.restore(checkpoint, self.now_ns)
        for worker in self.workers:
            self.step(WorkerJoined(worker))
        for client in self.clients.values():
            self.step(TenantChanged(client.spec))
        for ticket in tuple(self.running.values()):
            self.step(TicketAdopted(ticket))
        for client in self.clients.values():
            for request in tuple(client.waiting.values()):
                self.step(Submit(request))

    def act(self) -> None:
        """One leg ends, and everybody asks again."""
        self.now_ns += self.rng.randrange(1, 10) * MS
        if self.running:
            ticket_id = self.rng.choice(list(self.running))
            self.step(Settle(ticket_id, self.truth[ticket_id]))
        self.step(Tick())
        for tenant_id, client in self.clients.items():
            while len(client.waiting) < QUEUED:
                self.count += 1
                prompt, output = self.rng.randrange(10, 300), self.rng.choice([1, 30, 300])
                expected = self.rng.choice([1, 100, 300])
                request = Request(RequestId(f"r{self.count}"), tenant_id, (), prompt, output, expected)
                client.waiting[request.request_id] = request
                self.step(Submit(request))

    def step(self, input: Input) -> None:
        for effect in self.scheduler.step(input, self.now_ns):
            match effect:
                case Granted(ticket) if ticket.ticket_id not in self.truth:
                    client = self.clients[ticket.tenant_id]
                    del client.waiting[ticket.request_id]
                    self.running[ticket.ticket_id] = ticket
                    cached = self.rng.choice([0, ticket.prompt_tokens])
                    output = self.rng.randrange(0, ticket.output_tokens_max + 1)
                    self.truth[ticket.ticket_id] = Usage(ticket.prompt_tokens, cached, output)
                    client.got += ticket.charge / ticket.weight
                    client.charge_max = max(client.charge_max, ticket.charge / ticket.weight)
                    self._note(ticket.tenant_id)
                case LegEnded(ticket) if ticket.ticket_id in self.running:
                    self.clients[ticket.tenant_id].got += self._wrong_by(ticket)
                    del self.running[ticket.ticket_id]
                    self._note(ticket.tenant_id)
                case _:
                    pass

    def _wrong_by(self, ticket: Ticket) -> float:
        usage = self.truth[ticket.ticket_id]
        cost = CostWeights().cost(usage.uncached_tokens, usage.cached_tokens, usage.output_tokens)
        return (cost - ticket.charge) / ticket.weight

    def _note(self, tenant_id: TenantId) -> None:
        mine = [self._wrong_by(t) for t in self.running.values() if t.tenant_id == tenant_id]
        client = self.clients[tenant_id]
        client.under_max = max(client.under_max, sum(w for w in mine if w > 0.0))
        client.over_max = max(client.over_max, -sum(w for w in mine if w < 0.0))
        for other_id in self.clients:
            if other_id != tenant_id:
                key = min(tenant_id, other_id), max(tenant_id, other_id)
                apart = self.clients[key[0]].got - self.clients[key[1]].got
                low, high = self.ranges.get(key, (apart, apart))
                self.ranges[key] = min(low, apart), max(high, apart)

    def share_of_bound(self) -> float:
        """The largest range of a pair, as part of ``B_i + B_j``."""
        parts = [0.0]
        for (i, j), (low, high) in self.ranges.items():
            bounds = [
                self.window + client.charge_max + client.under_max + client.over_max
                for client in (self.clients[i], self.clients[j])
            ]
            parts.append((high - low) / sum(bounds))
        return max(parts)


def parts_of_bound(seed: int, forget: bool = False) -> tuple[float, float]:
    """``share_of_bound`` before a take-over in mid-run and over all of it."""
    run = Run(seed)
    checkpoint = run.scheduler.checkpoint(run.now_ns)
    before = 0.0
    for step in range(STEPS):
        if step % CHECKPOINT_STEPS == 0 and step < STEPS // 2:
            checkpoint = run.scheduler.checkpoint(run.now_ns)
        if step == STEPS // 2:
            before = run.share_of_bound()
            run.begin(without_one_clock(checkpoint) if forget else checkpoint)
        run.act()
    return before, run.share_of_bound()


def without_one_clock(checkpoint: SchedulerCheckpoint) -> SchedulerCheckpoint:
    """The first tenant has got nothing, and no worker remembers otherwise."""
    first, *others = checkpoint.tenants
    bands = tuple(replace(band, workers=NodeClocks()) for band in checkpoint.bands)
    return replace(checkpoint, tenants=(replace(first, v=0.0), *others), bands=bands)


@pytest.mark.parametrize("seed", range(30))
def test_a_take_over_adds_one_bound_of_unfairness_at_most(seed: int) -> None:
    before, after = parts_of_bound(seed)
    print(f"seed {seed}: {before:.2f} of the bound before, {after:.2f} over the take-over")
    assert before <= 1.0 + 1e-9
    assert after <= 2.0 + 1e-9


def test_a_forgotten_clock_would_be_seen() -> None:
    assert max(parts_of_bound(seed, forget=True)[1] for seed in range(5)) > 2.0
