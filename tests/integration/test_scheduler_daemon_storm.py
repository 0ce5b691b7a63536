"""Everything at once: clients that cancel, sessions that break, workers that come, go and restart, a lapsed lease.

Whatever happened in which order, in the end nothing is held: no ticket, no slot, no queue entry, no waiting call;
and no call ended in a fault.
"""

import asyncio
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import grpc
from tests.fixtures.scheduler_daemon import (
    Client,
    World,
    acquire_request,
    announced,
    connected,
    eventually,
    load,
    seed,
    stored,
)

from evenhand.core.kv import WorkerLeft
from evenhand.scheduler.daemon import SchedulerDaemon
from evenhand.wire.generated import scheduler_pb2 as pb

WORKERS = ("w1", "w2", "w3")
TENANTS = ("a", "b", "c")
STORM_S = 3.0
TICKET_TTL_MS = 400


class Storm:
    """The weather and the people in it."""

    def __init__(self, world: World, daemon: SchedulerDaemon, chance: random.Random) -> None:
        self.world, self.daemon, self.chance = world, daemon, chance
        self.outcomes: Counter[str] = Counter()
        self.started = 0
        self.epochs = dict.fromkeys(WORKERS, 1)
        self.seqs = dict.fromkeys(WORKERS, 0)
        self.over = asyncio.Event()

    async def heartbeats(self) -> None:
        while True:
            for worker in WORKERS:
                self.world.say(load(worker, self.epochs[worker]))
            await asyncio.sleep(0.05)

    async def weather(self) -> None:
        """Workers restart, leave, return and store; the lease store goes away now and then."""
        while not self.over.is_set():
            worker = self.chance.choice(WORKERS)
            what = self.chance.random()
            if what < 0.3:
                self.epochs[worker] += 1
                self.seqs[worker] = 0
                self.world.say(announced(worker, self.epochs[worker], slots=4))
            elif what < 0.4:
                left = announced(worker, self.epochs[worker])
                self.world.say(WorkerLeft(left.worker_id, left.epoch))
                self.epochs[worker] += 1
                self.seqs[worker] = 0
                await asyncio.sleep(0.05)
                self.world.say(announced(worker, self.epochs[worker], slots=4))
            elif what < 0.95:
                self.seqs[worker] += 1
                keys = range(self.chance.randrange(50), 60)
                self.world.say(stored(worker, keys, self.seqs[worker], self.epochs[worker]))
            else:
                self.world.leases.available = False
                await asyncio.sleep(self.chance.uniform(0.0, 0.5))
                self.world.leases.available = True
            await asyncio.sleep(self.chance.uniform(0, 0.05))

    def request(self) -> pb.AcquireRequest:
        self.started += 1
        keys = range(self.chance.randrange(50))
        tenant = self.chance.choice(TENANTS)
        name = f"r{self.chance.randrange(60)}" if self.chance.random() < 0.1 else f"r{self.started}-once"
        return acquire_request(name, keys, tenant=tenant, timeout_ms=self.chance.choice((5, 50, 1_000)))

    def settle(self, ticket: str) -> pb.SettleRequest:
        outcome = self.chance.choice((pb.OUTCOME_COMPLETED, pb.OUTCOME_CANCELLED, pb.OUTCOME_WORKER_LOST))
        usage = pb.Usage(prompt_tokens=1, cached_tokens=0, output_tokens=1) if self.chance.random() < 0.7 else None
        return pb.SettleRequest(ticket=ticket, outcome=outcome, usage=usage)

    async def unary(self, client: Client) -> None:
        """One request after another by calls; some are given up, some tickets are left lying."""
        while not self.over.is_set():
            call = client.stub.Acquire(self.request(), timeout=2)
            if self.chance.random() < 0.3:
                await asyncio.sleep(self.chance.uniform(0, 0.02))
                call.cancel()
            code = await call.code()
            self.outcomes[code.name] += 1
            if code is grpc.StatusCode.OK:
                await asyncio.sleep(self.chance.uniform(0, 0.02))
                if self.chance.random() < 0.7:
                    settling = client.stub.Settle(self.settle((await call).ticket), timeout=2)
                    self.outcomes[f"settle {(await settling.code()).name}"] += 1

    async def session(self, client: Client) -> None:
        """Streams, one after another, each broken at some point. grpc.aio wants one writer at a time."""
        while not self.over.is_set():
            stream, writing = client.session(), asyncio.Lock()
            life = asyncio.get_running_loop().time() + self.chance.uniform(0.01, 0.5)
            answers = asyncio.create_task(self._answers(stream, writing))
            try:
                while asyncio.get_running_loop().time() < life and not answers.done():
                    message = pb.SessionRequest(call_id=self.started + 1, acquire=self.request())
                    message.answers_together = True
                    async with writing:
                        await stream.write(message)
                    await asyncio.sleep(self.chance.uniform(0, 0.01))
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                pass
            stream.cancel()
            await asyncio.gather(answers, return_exceptions=True)

    async def _answers(
        self, stream: "grpc.aio.StreamStreamCall[pb.SessionRequest, pb.SessionResponse]", writing: asyncio.Lock
    ) -> None:
        while isinstance(answer := await stream.read(), pb.SessionResponse):
            for each in (answer, *answer.more):
                kind = each.WhichOneof("result")
                self.outcomes[f"session {kind}"] += 1
                if kind == "acquire" and self.chance.random() < 0.7:
                    settle = self.settle(each.acquire.ticket)
                    async with writing:
                        await stream.write(pb.SessionRequest(call_id=1, settle=settle))


async def test_after_the_storm_nothing_is_held(tmp_path: Path) -> None:
    chance = random.Random(seed())
    world = World(tmp_path)
    world.add_pool()
    world.add_tenants(*TENANTS, queue_length_max=20)
    for worker in WORKERS:
        world.say(announced(worker, slots=4))
    core = replace(
        world.config().core, ticket_ttl_ms=TICKET_TTL_MS, worker_stale_after_ms=500, worker_lost_after_ms=1_000
    )
    async with world.daemon(world.config(core, lease_ttl_ms=300)) as daemon, connected(daemon) as client:
        storm = Storm(world, daemon, chance)
        beating = asyncio.create_task(storm.heartbeats())
        people = [asyncio.create_task(storm.unary(client)) for _ in range(6)]
        people += [asyncio.create_task(storm.session(client)) for _ in range(4)]
        people.append(asyncio.create_task(storm.weather()))
        await asyncio.wait(people, timeout=STORM_S, return_when=asyncio.FIRST_EXCEPTION)
        storm.over.set()
        await asyncio.wait_for(asyncio.gather(*people), 10)
        print(dict(storm.outcomes))
        assert storm.outcomes["OK"] > 20
        assert storm.outcomes["session acquire"] > 20
        assert not {"INTERNAL", "UNKNOWN", "settle INTERNAL", "settle UNKNOWN"} & storm.outcomes.keys()
        assert b"evenhand_scheduler_faults_total{" not in daemon._page()
        await eventually(lambda: daemon.actor.granting)
        try:
            await eventually(lambda: _held(daemon) == {})
        except TimeoutError:
            raise AssertionError(f"still held: {_held(daemon)}") from None
        beating.cancel()


def _held(daemon: SchedulerDaemon) -> dict[str, object]:
    """All that is not as it was before anybody came."""
    pool = daemon.status()["pool"]
    if pool is None:
        return {"pool": None}
    assert isinstance(pool, dict)
    held: dict[str, object] = {
        "queued": pool["queued_total"],
        "tickets": pool["tickets_open"],
        "slots": sum(worker["slots_used"] for worker in pool["workers"]),
        "kv": sum(worker["kv_blocks_reserved"] for worker in pool["workers"]),
        "outstanding": round(sum(abs(tenant["cost_outstanding"]) for tenant in pool["tenants"]), 6),
        "waiting": len(daemon.actor._waiting),
        "waiting count": daemon.actor._waiting_count,
        "open": len(daemon.actor.open),
        "tokens": len(daemon.actor.by_token),
    }
    return {name: value for name, value in held.items() if value}
