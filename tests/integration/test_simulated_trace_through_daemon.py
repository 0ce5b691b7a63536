"""A simulated trial, replayed through the daemon over gRPC: the same inputs at the same times, the same decisions.

The trial's ``evenhand`` policy is watched: each input of its core, each map message, with its time. The daemon is
then given the same ones in the same order (requests, settles and cancels over gRPC, map messages through the log)
under a clock that stands still between them, and what it decides is compared to the last bit.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from tests.fixtures.scheduler_daemon import BLOCK_SIZE, POOL, WAIT_S, Client, World, announced, connected, seed

from evenhand.core.block_key import pack_keys
from evenhand.core.facts import Decision, SchedulerConfig, Ticket, Usage
from evenhand.core.ids import TicketId
from evenhand.core.kv import KvBatch, SnapshotPart
from evenhand.core.scheduler import PoolScheduler
from evenhand.core.steps import (
    Cancel,
    Effect,
    Granted,
    Input,
    MapChanged,
    Renew,
    Settle,
    Submit,
    TenantChanged,
    Tick,
    WorkerHeard,
    WorkerJoined,
)
from evenhand.policies.evenhand import QUEUE_LENGTH_MAX, SIMULATED, Evenhand, EvenhandSettings
from evenhand.scheduler import actor, calls
from evenhand.scheduler.daemon import SchedulerDaemon
from evenhand.simulation.trials.settings import TrialSettings
from evenhand.simulation.trials.trial import run_trial
from evenhand.simulation.trials.workload import Workload
from evenhand.simulation.trials.workloads import HotTenant, hot_tenant
from evenhand.wire.generated import scheduler_pb2 as pb

CORE: dict[str, Any] = {**SIMULATED, "pool_id": POOL, "ticket_ttl_ms": 3_600_000}
SLOTS, KV_BLOCKS = 8, 2_048
PLAN = HotTenant(
    duration_s=12.0,
    others=4,
    hot_per_second=24.0,
    prefix_tokens=1_600,
    output_tokens=60,
    block_size=BLOCK_SIZE,
    kv_blocks=KV_BLOCKS,
    slots=SLOTS,
)
WORKERS = 3


@dataclass(frozen=True, slots=True)
class Told:
    """Something the core was told of, or its map, and when."""

    what: Input | KvBatch | SnapshotPart
    at_ns: int


class Watched(Evenhand):
    """The policy, and what it told its core."""

    def __init__(self, settings: EvenhandSettings) -> None:
        self.told: list[Told] = []
        self.granted: list[Granted] = []
        super().__init__(settings, 0)

    def step(self, input: Input, now_ns: int) -> None:
        if not isinstance(input, MapChanged):  # comes with its message
            self.told.append(Told(input, now_ns))
        super().step(input, now_ns)

    def _obey(self, effects: Sequence[Effect], now_ns: int) -> None:
        self.granted += [effect for effect in effects if isinstance(effect, Granted)]
        super()._obey(effects, now_ns)

    def map_changed(self, message: KvBatch | SnapshotPart, now_ns: int) -> None:
        self.told.append(Told(message, now_ns))
        super().map_changed(message, now_ns)


class Steps:
    """What the daemon's core is told and grants, and when that was."""

    def __init__(self) -> None:
        self.inputs: list[Input] = []
        self.granted: list[Granted] = []
        self.stepped = asyncio.Event()

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        step = PoolScheduler.step

        def watched(scheduler: PoolScheduler, input: Input, now_ns: int) -> tuple[Effect, ...]:
            effects = step(scheduler, input, now_ns)
            self.inputs.append(input)
            self.granted += [effect for effect in effects if isinstance(effect, Granted)]
            self.stepped.set()
            return effects

        monkeypatch.setattr(PoolScheduler, "step", watched)

    async def until(self, kind: type[Input], since: int) -> None:
        """Return once the core was told an input of this kind after the first ``since``."""
        async with asyncio.timeout(WAIT_S):
            while not any(isinstance(input, kind) for input in self.inputs[since:]):
                self.stepped.clear()
                await self.stepped.wait()


class Replay:
    """Tells the daemon what the trial told its core."""

    def __init__(self, world: World, daemon: SchedulerDaemon, client: Client, steps: Steps) -> None:
        self.world, self.daemon, self.steps = world, daemon, steps
        self.stub: Any = client.stub
        self.answers: dict[str, asyncio.Task[pb.AcquireResponse]] = {}
        self.requests: dict[TicketId, str] = {}

    async def tell(self, what: Input | KvBatch | SnapshotPart) -> None:
        since = len(self.steps.inputs)
        match what:
            case KvBatch() | SnapshotPart():
                self.world.say(what)
                await self.steps.until(MapChanged, since)
            case Submit(request):
                acquire = pb.AcquireRequest(
                    request_id=request.request_id,
                    tenant=request.tenant_id,
                    block_keys=pack_keys(request.block_keys),
                    prompt_tokens=request.prompt_tokens,
                    max_output_tokens=request.output_tokens_max,
                )
                call = self.stub.Acquire(acquire, timeout=WAIT_S * 6)
                self.answers[request.request_id] = asyncio.ensure_future(call)
                await self.steps.until(Submit, since)
            case Renew(ticket_id, usage):
                grant = await self.answers[self.requests[ticket_id]]
                await self.stub.Renew(pb.RenewRequest(ticket=grant.ticket, usage=_wire(usage)), timeout=WAIT_S)
            case Settle(ticket_id, usage, _, ttft_ms):
                grant = await self.answers[self.requests[ticket_id]]
                settle = pb.SettleRequest(ticket=grant.ticket, outcome=pb.OUTCOME_COMPLETED, usage=_wire(usage))
                if ttft_ms is not None:
                    settle.ttft_ms = ttft_ms
                await self.stub.Settle(settle, timeout=WAIT_S)
            case Cancel(tenant_id, request_id, usage):
                cancel = pb.CancelRequest(tenant=tenant_id, request_id=request_id)
                if usage is not None:
                    cancel.usage.CopyFrom(_wire(usage))
                await self.stub.Cancel(cancel, timeout=WAIT_S)
            case Tick():
                self.daemon.actor.tell(what)
            case TenantChanged() | WorkerJoined():
                pass  # told before the first request
            case _:
                raise AssertionError(f"the trial told its core {what!r}")


def _with_cancels(workload: Workload) -> Workload:
    """Every seventh client gives up: while it waits, or while its leg runs."""
    impatient = [
        replace(arrival, cancel_after_ns=400_000_000) if arrival.arrival_id % 7 == 3 else arrival
        for arrival in workload.arrivals
    ]
    return replace(workload, arrivals=impatient)


def _wire(usage: Usage | None) -> pb.Usage:
    assert usage is not None
    return pb.Usage(
        prompt_tokens=usage.prompt_tokens, cached_tokens=usage.cached_tokens, output_tokens=usage.output_tokens
    )


def _facts(granted: Granted) -> tuple[object, ...]:
    """A grant without what another process or moment may change: the term, absolute times."""
    ticket, decision = granted.ticket, granted.decision
    left_out = {"ticket_id", "term", "granted_at_ns"}
    facts = [getattr(ticket, field.name) for field in fields(Ticket) if field.name not in left_out]
    return (*facts, *(getattr(decision, field.name) for field in fields(Decision)))


async def test_the_daemon_decides_as_the_simulation_did(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = seed()
    policy = Watched(EvenhandSettings(**CORE))
    run_trial(policy, _with_cancels(hot_tenant(PLAN, chance)), TrialSettings(workers=WORKERS))
    cancels = sum(isinstance(told.what, Cancel) for told in policy.told)
    renewals = sum(isinstance(told.what, Renew) for told in policy.told)
    assert cancels > 5
    assert renewals > len(policy.granted) // 2
    assert len(policy.granted) > 200
    assert len({granted.decision.reason for granted in policy.granted}) > 1
    assert any(granted.ticket.predicted_cached_tokens for granted in policy.granted)

    world = World(tmp_path)
    world.add_pool()
    for told in policy.told:
        if isinstance(told.what, TenantChanged):
            tenant = told.what.spec
            world.add_tenants(tenant.tenant_id, weight=tenant.weight, queue_length_max=QUEUE_LENGTH_MAX)
    for number in range(WORKERS):
        world.say(announced(f"w{number:04}", slots=SLOTS, kv_blocks=KV_BLOCKS))
    base_ns = time.monotonic_ns()
    clock = SimpleNamespace(**vars(time))
    clock.monotonic_ns = lambda: base_ns
    monkeypatch.setattr(actor, "time", clock)
    monkeypatch.setattr(calls, "time", clock)
    steps = Steps()
    steps.watch(monkeypatch)
    core = SchedulerConfig(**CORE)
    async with world.daemon(world.config(core, acquire_timeout_max_ms=3_600_000)) as daemon:
        await daemon.live_map.caught_up.wait()
        async with asyncio.timeout(WAIT_S):
            while sum(isinstance(input, WorkerHeard) for input in steps.inputs) < WORKERS:
                await asyncio.sleep(0.01)
        async with connected(daemon) as client:
            replay = Replay(world, daemon, client, steps)
            replay.requests = {g.ticket.ticket_id: g.ticket.request_id for g in policy.granted}
            for told in policy.told:
                clock.monotonic_ns = lambda at_ns=base_ns + told.at_ns: at_ns
                await replay.tell(told.what)
            answers = await asyncio.gather(*replay.answers.values(), return_exceptions=True)
    refused = [answer for answer in answers if isinstance(answer, grpc.aio.AioRpcError)]
    assert {answer.code() for answer in refused} <= {grpc.StatusCode.CANCELLED}
    assert len(answers) - len(refused) == len(steps.granted) == len(policy.granted)
    for theirs, ours in zip(steps.granted, policy.granted, strict=True):
        assert _facts(theirs) == _facts(ours)
