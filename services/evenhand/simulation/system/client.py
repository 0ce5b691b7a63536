"""Simulated clients: ask for a place, call the worker, keep the ticket alive, settle; call by call, as the SDK.

::

    ask ──error──▶ ask again (same request id)          until the request's deadline
     └─granted─▶ call the engine ─finished─▶ settle ──▶ FINISHED
                     │  └─ lost ─▶ settle as WORKER_LOST ─▶ ask again, not that worker
                     └─ the ticket is over ─▶ hang up ─▶ ask again

One outcome a request: told exactly once, or never where the client vanished.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from random import Random
from typing import Any

from evenhand.core.block_key import block_keys, pack_keys, root_hash
from evenhand.core.facts import RefusalReason
from evenhand.simulation.system.engine import MODEL, Leg, SimulatedEngine
from evenhand.simulation.system.faults import Fault, Weather
from evenhand.simulation.system.network import CallFailed, Network
from evenhand.simulation.system.process import Process
from evenhand.simulation.system.workload import BLOCK_SIZE, MODEL_TOKENS_MAX, Arrival, tokens
from evenhand.wire.generated import scheduler_pb2 as pb
from evenhand.wire.status import (
    DIRECTORY_AWAY,
    INTERNAL_FAULT,
    NOT_THE_OWNER,
    TICKET_ALREADY_CLOSED,
    UNKNOWN_POOL,
    UNKNOWN_TICKET,
)

PATIENCE_S = 45.0
"""How long a client tries to get its answer."""
RETRY_S = 0.25
RETRY_S_FIRST = 0.05
RETRY_S_MAX = 2.0
"""Pauses between tries of one question double, as the SDK's do, from the first to the longest."""
SETTLE_TRIES_MAX = 40
RENEW_RETRY_S = 0.5
ENGINE_WIRE_S = 0.002

_AGAIN = frozenset(
    {
        "",
        NOT_THE_OWNER,
        DIRECTORY_AWAY,
        RefusalReason.NO_WORKER.value,
        RefusalReason.SHUTTING_DOWN.value,
        RefusalReason.QUEUE_FULL.value,
        RefusalReason.RATE_LIMITED.value,
        RefusalReason.CANCELLED.value,
    }
)
"""Refusals after which a client asks again; an empty reason is a broken connection."""


class Outcome(Enum):
    """How a request ended, as its client sees it."""

    FINISHED = "finished"
    REFUSED = "refused"
    GAVE_UP = "gave_up"
    CANCELLED = "cancelled"
    VANISHED = "vanished"


@dataclass(slots=True)
class Turn:
    """A finished request, for the next turn to follow."""

    token_ids: list[int]


@dataclass(slots=True)
class Surroundings:
    """What all clients of a run share."""

    network: Network
    engines: dict[str, SimulatedEngine]
    weather: Weather
    pool: str
    random: Random
    """Draws the clients' pauses."""
    salts: dict[str, str] = field(default_factory=dict)
    turns: dict[str, list[Turn]] = field(default_factory=dict)
    violated: Callable[[str], None] = lambda _sentence: None
    prefixes: dict[tuple[str, int], list[int]] = field(default_factory=dict)

    def prefix(self, arrival: Arrival) -> list[int]:
        """Token ids of the prefix that a request shares with others."""
        key = arrival.prefix, arrival.prefix_tokens
        if key not in self.prefixes:
            self.prefixes[key] = tokens(*key)
        return self.prefixes[key]


class Client:
    """One request's client, in a process of its own."""

    def __init__(self, number: int, arrival: Arrival, around: Surroundings, process: Process) -> None:
        self.request_id = f"r{number}"
        self.arrival = arrival
        self.process = process
        self.outcome: Outcome | None = None
        self.why = ""
        self.tickets: list[str] = []
        self.settled: list[tuple[str, pb.SettleRequest]] = []
        """Tokens that were settled with a usage, as told."""
        self.unknown: list[tuple[str, int]] = []
        """Tokens whose settlement was answered UNKNOWN_TICKET, and when."""
        self._around = around
        self._deadline_s = 0.0
        self._excluded: list[str] = []
        self._token_ids: list[int] = []
        self._leg: Leg | None = None
        self._cancelling = False
        self._failed = 0
        """Tries of the present question that have failed, one after another."""

    async def run(self) -> None:
        """Live through the request."""
        around, loop = self._around, self.process.loop
        self._deadline_s = loop.time() + PATIENCE_S
        salt = await self._resolve()
        if salt is None:
            self._end(Outcome.GAVE_UP, "resolve")
            return
        self._token_ids = self._prompt()
        keys = block_keys(self._token_ids, BLOCK_SIZE, root_hash(MODEL, "", salt))
        if around.weather.strikes(Fault.CLIENTS_CANCEL):
            loop.call_later(around.weather.delay_s(1.0), self._cancel_soon)
        while self.outcome is None:
            grant = await self._acquire(pack_keys(keys))
            if isinstance(grant, pb.AcquireResponse):
                await self._use(grant)

    # ---- asking

    async def _resolve(self) -> str | None:
        tenant = self.arrival.tenant_id
        salt = self._around.salts.get(tenant)
        while salt is None and self.process.loop.time() < self._deadline_s:
            try:
                wire = pb.ResolveRequest(pool=self._around.pool, tenant=tenant)
                answer = await self._call("Resolve", wire, 5.0)
                salt = self._around.salts[tenant] = answer.cache_salt
            except CallFailed as failed:
                if failed.error.reason == RefusalReason.UNKNOWN_TENANT.value:
                    return None
                if failed.error.reason not in (*_AGAIN, UNKNOWN_POOL):
                    self._around.violated(f"Resolve of {tenant} failed: {failed.error}.")
                await self.process.pause(self._pause_s(failed))
        return salt

    def _prompt(self) -> list[int]:
        arrival, turns = self.arrival, self._around.turns.get(self.arrival.tenant_id)
        own = tokens(f"{self.request_id} of {arrival.tenant_id}", arrival.own_tokens)
        room = MODEL_TOKENS_MAX - arrival.own_tokens - arrival.output_tokens
        if arrival.follows and turns and len(turns[-1].token_ids) <= room:
            return turns[-1].token_ids + own
        return self._around.prefix(arrival) + own

    async def _acquire(self, keys: bytes) -> pb.AcquireResponse | None:
        """A grant, or None where the request has its outcome or should ask again."""
        left_s = self._deadline_s - self.process.loop.time()
        if left_s <= 0:
            await self._give_up(Outcome.GAVE_UP, "patience")
            return None
        wire = pb.AcquireRequest(
            request_id=self.request_id,
            pool=self._around.pool,
            tenant=self.arrival.tenant_id,
            block_keys=keys,
            prompt_tokens=len(self._token_ids),
            max_output_tokens=self.arrival.output_tokens,
            user=self.arrival.user,
            excluded_workers=self._excluded,
        )
        if self._around.weather.strikes(Fault.CLIENTS_REPEAT):
            beside = self.process.start(self._ask_beside(wire, left_s))
            self.process.later(self._around.weather.delay_s(2.0), beside.cancel)
        try:
            answer: pb.AcquireResponse = await self._call("Acquire", wire, left_s)
        except CallFailed as failed:
            await self._refused(failed)
            return None
        self._failed = 0
        if self._cancelling:
            await self._give_up(Outcome.CANCELLED, "granted")
            return None
        return answer

    async def _ask_beside(self, wire: pb.AcquireRequest, timeout_s: float) -> None:
        """The same call once more at the same time, hung up after a while; what it brings is the other's too."""
        try:
            await self._call("Acquire", wire, timeout_s)
        except CallFailed:
            return

    async def _refused(self, failed: CallFailed) -> None:
        error = failed.error
        if self._cancelling:
            await self._give_up(Outcome.CANCELLED, error.reason)
        elif error.reason in _AGAIN:
            await self.process.pause(self._pause_s(failed))
        elif error.reason == RefusalReason.DEADLINE.value:
            self._end(Outcome.GAVE_UP, error.reason)
        else:
            if error.reason in (INTERNAL_FAULT, RefusalReason.REQUEST_ID_REUSED.value):
                self._around.violated(f"Request {self.request_id} was answered {error.reason}: {error.sentence}")
            self._end(Outcome.REFUSED, error.reason)

    def _pause_s(self, failed: CallFailed) -> float:
        """How long to wait before the next try: ever longer, and at least as long as the scheduler asks for."""
        ceiling_s = min(RETRY_S_MAX, RETRY_S_FIRST * 2.0 ** min(self._failed, 16))
        self._failed += 1
        return max((failed.error.retry_after_ms or 0) / 1000, self._around.random.uniform(0.2, 1.0) * ceiling_s)

    # ---- using

    async def _use(self, grant: pb.AcquireResponse) -> None:
        """Run a leg on the engine it was granted."""
        loop, around = self.process.loop, self._around
        self.tickets.append(grant.ticket)
        granted_at_s = loop.time()
        stream = Stream(self.process, around.weather)
        leg = await self._connect(grant, stream)
        if leg is None:
            await self._lose(grant)
            return
        self._leg = leg
        renew_at_s = loop.time() + grant.renew_after_ms / 1000
        first_told = False
        try:
            while not stream.end:
                if self._cancelling:
                    break
                await stream.changed(max(0.0, renew_at_s - loop.time()))
                if stream.first_at_s and stream.is_open() and not first_told:
                    first_told = True
                    self.process.start(self._renew(grant, stream))
                if loop.time() >= renew_at_s and stream.is_open():
                    over, wait_s = await self._renew(grant, stream)
                    if over:
                        return
                    renew_at_s = loop.time() + wait_s
        finally:
            if stream.end != "finished":
                loop.call_later(around.weather.delay_s(ENGINE_WIRE_S), self._engine(grant).cancel, leg)
        if stream.end == "finished":
            ttft_ms = (stream.first_at_s - granted_at_s) * 1000
            await self._settle(grant.ticket, pb.OUTCOME_COMPLETED, usage_of(leg), ttft_ms)
            self._finish(leg)
        elif stream.end == "lost":
            await self._lose(grant)
        else:
            self._engine(grant).count(leg)
            await self._give_up(Outcome.CANCELLED, "running", usage_of(leg) if stream.first_at_s else None)

    def _engine(self, grant: pb.AcquireResponse) -> SimulatedEngine:
        return self._around.engines[grant.worker.worker_id]

    async def _connect(self, grant: pb.AcquireResponse, stream: "Stream") -> Leg | None:
        """Bring the request to the engine; None if nobody answers there."""
        engine, weather = self._engine(grant), self._around.weather
        await self.process.pause(weather.delay_s(ENGINE_WIRE_S))
        if not engine.up:
            await self.process.pause(weather.delay_s(ENGINE_WIRE_S))
            return None
        return engine.submit(
            grant.ticket, self._token_ids, self.arrival.output_tokens, grant.cache_salt, stream.told
        )

    async def _lose(self, grant: pb.AcquireResponse) -> None:
        worker_id = grant.worker.worker_id
        if worker_id not in self._excluded:
            self._excluded.append(worker_id)
        await self._settle(grant.ticket, pb.OUTCOME_WORKER_LOST, None, 0.0)

    async def _renew(self, grant: pb.AcquireResponse, stream: "Stream") -> tuple[bool, float]:
        """Keep the ticket alive; whether it is over, else when to renew again."""
        wire = pb.RenewRequest(ticket=grant.ticket)
        leg = self._leg
        if stream.first_at_s and leg is not None:
            self._engine(grant).count(leg)
            wire.usage.CopyFrom(usage_of(leg))
        try:
            answer: pb.RenewResponse = await self._call("Renew", wire, 1.0)
        except CallFailed as failed:
            return failed.error.reason == UNKNOWN_TICKET, RENEW_RETRY_S
        return answer.state != pb.TICKET_STATE_OPEN, grant.renew_after_ms / 1000

    async def _settle(self, ticket: str, outcome: int, usage: pb.Usage | None, ttft_ms: float) -> None:
        wire = pb.SettleRequest(ticket=ticket, outcome=outcome, ttft_ms=ttft_ms)  # type: ignore[arg-type]
        if usage is not None:
            wire.usage.CopyFrom(usage)
            self.settled.append((ticket, wire))
        for _ in range(SETTLE_TRIES_MAX):
            try:
                await self._call("Settle", wire, 2.0)
                return
            except CallFailed as failed:
                if failed.error.reason == UNKNOWN_TICKET:
                    self.unknown.append((ticket, self.process.loop.now_ns))
                if failed.error.reason in (UNKNOWN_TICKET, TICKET_ALREADY_CLOSED):
                    return
                if failed.error.reason not in _AGAIN:
                    self._around.violated(f"Settle of {self.request_id} failed: {failed.error}.")
                    return
                await self.process.pause(RETRY_S)

    # ---- ending

    def _cancel_soon(self) -> None:
        if self.outcome is None and self.process.alive:
            self._cancelling = True

    async def _give_up(self, outcome: Outcome, why: str, usage: pb.Usage | None = None) -> None:
        """Tell the scheduler that nobody wants the request any more, once it can be reached."""
        wire = pb.CancelRequest(
            pool=self._around.pool, tenant=self.arrival.tenant_id, request_id=self.request_id, usage=usage
        )
        self._end(outcome, why)
        for _ in range(SETTLE_TRIES_MAX):
            try:
                await self._call("Cancel", wire, 2.0)
                return
            except CallFailed:
                await self.process.pause(RETRY_S)

    def _finish(self, leg: Leg) -> None:
        turns = self._around.turns.setdefault(self.arrival.tenant_id, [])
        turns.append(Turn(leg.content.token_ids(0, leg.content.prompt_tokens + leg.output_tokens)))
        del turns[:-4]
        self._end(Outcome.FINISHED, "")

    def _end(self, outcome: Outcome, why: str) -> None:
        if self.outcome is not None:
            self._around.violated(f"Request {self.request_id} ended {self.outcome.value}, then {outcome.value}.")
        self.outcome, self.why = outcome, why

    def vanish(self) -> None:
        """The client's host is gone: its connections break, nothing is told to anybody."""
        if self.outcome is None:
            self.outcome = Outcome.VANISHED
            self.process.kill()

    async def _call(self, method: str, wire: Any, timeout_s: float) -> Any:
        return await self._around.network.call(self.process, method, wire, timeout_s)


class Stream:
    """The answer of an engine, as it comes over the network."""

    def __init__(self, process: Process, weather: Weather) -> None:
        self.end = ""
        self.first_at_s = 0.0
        self._process = process
        self._weather = weather
        self._last_at_s = 0.0
        self._changed = asyncio.Event()

    def told(self, _leg: Leg, what: str) -> None:
        """The engine says something; it arrives in order."""
        now_s = self._process.loop.time()
        self._last_at_s = max(self._last_at_s + 1e-8, now_s + self._weather.delay_s(ENGINE_WIRE_S))
        self._process.later(self._last_at_s - now_s, self._arrive, what)

    def is_open(self) -> bool:
        """Whether more may come."""
        return not self.end

    async def changed(self, seconds_max: float) -> None:
        """Return when something has come, or after this long."""
        self._changed.clear()
        try:
            async with asyncio.timeout(seconds_max):
                await self._changed.wait()
        except TimeoutError:
            return

    def _arrive(self, what: str) -> None:
        if what == "first":
            self.first_at_s = self._process.loop.time()
        else:
            self.end = what
        self._changed.set()


def usage_of(leg: Leg) -> pb.Usage:
    """What a stream has told of its leg's usage."""
    return pb.Usage(
        prompt_tokens=leg.prompt_tokens, cached_tokens=leg.cached_tokens, output_tokens=leg.output_tokens
    )
