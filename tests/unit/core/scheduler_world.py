"""A small pool around a ``PoolScheduler``: sends inputs, keeps what came out, and asks short questions."""

from collections.abc import Sequence
from dataclasses import replace

from evenhand.core.cache_map import CacheMap
from evenhand.core.facts import (
    LegOutcome,
    Refusal,
    Request,
    SchedulerConfig,
    TenantSpec,
    Ticket,
    Usage,
    WorkerSpec,
)
from evenhand.core.fold import fold
from evenhand.core.ids import Epoch, PoolId, RequestId, Seq, TenantId, WorkerId
from evenhand.core.kv import KvBatch, Stored
from evenhand.core.presence import Presence
from evenhand.core.scheduler import PoolScheduler
from evenhand.core.steps import (
    Cancel,
    Effect,
    Granted,
    Input,
    LegEnded,
    MapChanged,
    Refused,
    Settle,
    Submit,
    TenantChanged,
    Tick,
    WorkerJoined,
)

MS = 1_000_000
POOL = PoolId("pool")
BLOCK = 16


def config(**changes: object) -> SchedulerConfig:
    return replace(SchedulerConfig(POOL), **changes)  # type: ignore[arg-type]


def chain(name: int, blocks: int) -> tuple[int, ...]:
    """Keys of a prompt all its own; two chains of one name share their prefix."""
    return tuple(name * 1_000_000 + i for i in range(1, blocks + 1))


class World:
    """One pool, its presence and its effects so far."""

    def __init__(self, settings: SchedulerConfig | None = None, term: int = 1) -> None:
        self.cache_map = CacheMap()
        self.presence = Presence(self.cache_map)
        self.scheduler = PoolScheduler(settings or config(), self.presence, term)
        self.now_ns = 0
        self.effects: list[Effect] = []
        self.seqs: dict[str, int] = {}
        self.count = 0

    def step(self, input: Input, after_ms: float = 0.0) -> tuple[Effect, ...]:
        self.now_ns += round(after_ms * MS)
        effects = self.scheduler.step(input, self.now_ns)
        self.effects.extend(effects)
        return effects

    def tick(self, after_ms: float) -> tuple[Effect, ...]:
        return self.step(Tick(), after_ms)

    def tenants(self, *names: str, **changes: object) -> None:
        for name in names:
            spec = replace(TenantSpec(TenantId(name)), **changes)  # type: ignore[arg-type]
            self.step(TenantChanged(spec))

    def workers(self, *names: str, epoch: int = 1, **changes: object) -> tuple[Effect, ...]:
        effects: list[Effect] = []
        for name in names:
            spec = WorkerSpec(WorkerId(name), POOL, f"http://{name}", Epoch(epoch), 8, 10_000, BLOCK)
            effects += self.step(WorkerJoined(replace(spec, **changes)))  # type: ignore[arg-type]
        return tuple(effects)

    def submit(
        self,
        tenant: str,
        keys: Sequence[int] = (),
        request_id: str | None = None,
        prompt: int | None = None,
        output: int = 16,
        **changes: object,
    ) -> tuple[Effect, ...]:
        self.count += 1
        prompt_tokens = prompt if prompt is not None else len(keys) * BLOCK + 1
        request = Request(
            RequestId(request_id or f"r{self.count}"), TenantId(tenant), tuple(keys), prompt_tokens, output
        )
        return self.step(Submit(replace(request, **changes)))  # type: ignore[arg-type]

    def settle(self, ticket: Ticket, usage: Usage | None = None, after_ms: float = 0.0) -> tuple[Effect, ...]:
        if usage is None:
            usage = Usage(ticket.prompt_tokens, ticket.predicted_cached_tokens, ticket.output_tokens_estimated)
        return self.step(Settle(ticket.ticket_id, usage), after_ms)

    def cancel(self, tenant: str, request_id: str, usage: Usage | None = None) -> tuple[Effect, ...]:
        return self.step(Cancel(TenantId(tenant), RequestId(request_id), usage))

    def lose(self, ticket: Ticket) -> tuple[Effect, ...]:
        return self.step(Settle(ticket.ticket_id, None, LegOutcome.WORKER_LOST))

    def store(self, worker: str, keys: Sequence[int], epoch: int = 1) -> None:
        """The worker's events say that it holds these keys from here on."""
        self.seqs[worker] = self.seqs.get(worker, 0) + 1
        batch = KvBatch(WorkerId(worker), Epoch(epoch), Seq(self.seqs[worker]), (Stored(tuple(keys)),))
        fold(self.cache_map, batch)
        self.step(MapChanged(WorkerId(worker)))

    def position(self, worker: str) -> Seq:
        return Seq(self.seqs[worker])

    def v(self, tenant: str) -> float:
        return next(t.virtual_time for t in self.scheduler.status(self.now_ns).tenants if t.tenant_id == tenant)


def tickets(effects: Sequence[Effect]) -> list[Ticket]:
    return [effect.ticket for effect in effects if isinstance(effect, Granted)]


def ticket(effects: Sequence[Effect]) -> Ticket:
    granted = tickets(effects)
    assert len(granted) == 1, effects
    return granted[0]


def refusal(effects: Sequence[Effect]) -> Refusal:
    refused = [effect for effect in effects if isinstance(effect, Refused)]
    assert len(refused) == 1, effects
    return refused[0].refusal


def ended(effects: Sequence[Effect]) -> list[LegEnded]:
    return [effect for effect in effects if isinstance(effect, LegEnded)]
