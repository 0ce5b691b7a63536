"""Acquire + Settle over gRPC: cycles a second and latency, client and daemon on the same cores.

    python tests/benchmarks/bench_acquire.py [--seconds 10] [--blocks 1000000] [--tenants 100] [--keys 64]

The daemon runs in a process of its own on memory ports: workers whose maps hold ``--blocks`` blocks together,
100 tenants, each with queued requests all the time. The client keeps ``--in-flight`` requests open, one request a
message, keys of 64 blocks, half of them warm on some worker. A cycle is one Acquire answered and its Settle
answered. First as unary calls, then over a Session stream, then over one whose client takes several answers in
one message (requests stay one a message); each also paced at half the target rate, for latency.
"""

import argparse
import asyncio
import gc
import multiprocessing
import os
import platform
import random
import struct
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import uvloop

from evenhand.core.block_key import KEY_SCHEME
from evenhand.core.facts import SchedulerConfig, TenantSpec
from evenhand.core.ids import Epoch, PoolId, Seq, TenantId, WorkerId
from evenhand.core.kv import Stored, WorkerAnnounced, WorkerLoadReported, WorkerPosition
from evenhand.memory import (
    MemoryDirectory,
    MemoryLeaseStore,
    MemoryLog,
    MemoryLogReader,
    MemoryLogWriter,
    MemoryMapStore,
)
from evenhand.ports import KV_TOPIC, MapCommit, PoolSpec, WorkerDelta
from evenhand.scheduler.config import DaemonConfig
from evenhand.scheduler.daemon import DaemonPorts, SchedulerDaemon
from evenhand.wire.generated import scheduler_pb2 as pb
from evenhand.wire.generated.scheduler_pb2_grpc import SchedulerStub
from evenhand.wire.kv_codec import encode_kv_message

if TYPE_CHECKING:
    from evenhand.wire.generated.scheduler_pb2_grpc import SchedulerAsyncStub

POOL = PoolId("bench")
BLOCK_SIZE = 16
SLOTS = 16
PROMPT_BLOCKS_STORED = 64
HEARTBEAT_S = 1.0
WARM_UP_S = 2.0
UNARY_TARGET, SESSION_TARGET, P99_MS_TARGET = 1_000, 2_000, 10.0


@dataclass(frozen=True)
class Load:
    """What the client sends."""

    tenants: int
    keys: int
    prompts: tuple[tuple[int, ...], ...]
    in_flight: int

    def request(self, number: int, chance: random.Random) -> pb.AcquireRequest:
        if chance.random() < 0.5:
            keys = self.prompts[chance.randrange(len(self.prompts))][: self.keys]
        else:
            keys = struct.unpack(f">{self.keys}Q", chance.randbytes(8 * self.keys))
        return pb.AcquireRequest(
            request_id=f"r{number}",
            tenant=f"t{number % self.tenants}",
            block_keys=struct.pack(f">{self.keys}Q", *keys),
            prompt_tokens=self.keys * BLOCK_SIZE + 5,
            max_output_tokens=256,
        )


def usage_of(granted: pb.AcquireResponse, keys: int) -> pb.Usage:
    prompt = keys * BLOCK_SIZE + 5
    return pb.Usage(prompt_tokens=prompt, cached_tokens=granted.predicted_cached_tokens, output_tokens=20)


def prompts_of(blocks: int) -> list[tuple[int, ...]]:
    chance = random.Random(1)
    count = blocks // PROMPT_BLOCKS_STORED
    return [tuple(chance.getrandbits(64) for _ in range(PROMPT_BLOCKS_STORED)) for _ in range(count)]


def announcement(number: int) -> WorkerAnnounced:
    return WorkerAnnounced(
        worker_id=WorkerId(f"worker-{number:02}"),
        pool_id=POOL,
        epoch=Epoch(1),
        address=f"http://10.0.0.{number}:8000",
        model="bench",
        block_size_tokens=BLOCK_SIZE,
        key_scheme=KEY_SCHEME,
        kv_blocks=100_000,
        slots=SLOTS,
        seq=Seq(1),
    )


async def stored_map(prompts: list[tuple[int, ...]], workers: int) -> MemoryMapStore:
    """The map, spread over the workers, as the state service would have left it."""
    store = MemoryMapStore()
    deltas = []
    for number in range(workers):
        operations = tuple(Stored(prompt) for prompt in prompts[number::workers])
        position = WorkerPosition(Epoch(1), Seq(1), complete=True)
        worker = announcement(number)
        deltas.append(WorkerDelta(worker.worker_id, position, worker, True, operations))
    await store.commit(MapCommit({}, {}, tuple(deltas)))
    return store


async def heartbeats(log: MemoryLog, workers: int) -> None:
    while True:
        for number in range(workers):
            worker_id = announcement(number).worker_id
            load = WorkerLoadReported(worker_id, Epoch(1), 4, 0, 0.5, 0, 0, 0, 1)
            log.append(KV_TOPIC, worker_id.encode(), encode_kv_message(load))
        await asyncio.sleep(HEARTBEAT_S)


async def serve(pipe: Connection, blocks: int, tenants: int, workers: int) -> None:
    directory = MemoryDirectory()
    directory.set_pool(PoolSpec(POOL, "bench", BLOCK_SIZE, KEY_SCHEME))
    for number in range(tenants):
        directory.set_tenant(TenantSpec(TenantId(f"t{number}"), weight=1.0 + number % 4))
    log = MemoryLog(now_ms=lambda: time.time_ns() // 1_000_000)
    leases = MemoryLeaseStore(lambda: time.monotonic_ns() // 1_000_000)
    ports = DaemonPorts(
        MemoryLogReader(log),
        MemoryLogWriter(log),
        await stored_map(prompts_of(blocks), workers),
        leases,
        directory,
    )
    core = SchedulerConfig(POOL, prefill_pending_max_tokens=1_000_000, prefill_rate_default_tokens_per_s=1e6)
    with tempfile.TemporaryDirectory() as folder:
        config = DaemonConfig(
            core, Path(folder) / "secret", insecure_loopback=True, drain_timeout_ms=1, metrics_listen="127.0.0.1:0"
        )
        beating = asyncio.create_task(heartbeats(log, workers))
        async with SchedulerDaemon(config, ports) as daemon:
            await daemon.wait_owner()
            gc.collect()
            gc.freeze()
            pipe.send(daemon.address)
            while await asyncio.get_running_loop().run_in_executor(None, pipe.recv) != "stop":
                pipe.send(time.process_time())
        beating.cancel()


def server(pipe: Connection, blocks: int, tenants: int, workers: int) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(pipe, blocks, tenants, workers))


@dataclass
class Figures:
    """What one run measured."""

    cycles_per_s: float
    latencies_ms: list[float]
    server_us: float = 0.0
    """CPU time of the daemon's process a cycle."""
    client_us: float = 0.0
    cycles: int = 1
    """All of them, the warm-up's too."""

    def percentile(self, share: float) -> float:
        ordered = sorted(self.latencies_ms)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


Cycle = Callable[[int, random.Random], Awaitable[float]]
"""One cycle; returns the milliseconds of its two calls, queueing in the scheduler left out by neither."""


async def closed_loop(cycle: Cycle, load: Load, seconds: float) -> Figures:
    """Keep ``in_flight`` cycles going."""
    latencies: list[float] = []
    numbers = iter(range(10**9))
    end = time.perf_counter() + WARM_UP_S + seconds
    begin = end - seconds

    async def one(seed: int) -> None:
        chance = random.Random(seed)
        while time.perf_counter() < end:
            milliseconds = await cycle(next(numbers), chance)
            if time.perf_counter() >= begin:
                latencies.append(milliseconds)

    await asyncio.gather(*(one(seed) for seed in range(load.in_flight)))
    return Figures(len(latencies) / seconds, latencies, cycles=next(numbers))


async def paced(cycle: Cycle, rate: float, seconds: float) -> Figures:
    """Start ``rate`` cycles a second, whatever comes back."""
    latencies: list[float] = []
    tasks: set[asyncio.Task[None]] = set()
    chance = random.Random(7)
    began = time.perf_counter()
    started = 0

    async def one(number: int) -> None:
        latencies.append(await cycle(number, chance))

    while (elapsed := time.perf_counter() - began) < seconds:
        while started < elapsed * rate:
            task = asyncio.create_task(one(10**9 + started))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            started += 1
        await asyncio.sleep(0.001)
    await asyncio.gather(*tasks)
    return Figures(started / seconds, latencies[int(rate) :], cycles=started)


def unary_cycle(stub: "SchedulerAsyncStub", load: Load) -> Cycle:
    async def cycle(number: int, chance: random.Random) -> float:
        request = load.request(number, chance)
        began = time.perf_counter()
        granted = await stub.Acquire(request, timeout=30)
        acquired = time.perf_counter()
        await stub.Settle(pb.SettleRequest(ticket=granted.ticket, usage=usage_of(granted, load.keys)), timeout=30)
        return (max(acquired - began, time.perf_counter() - acquired)) * 1000

    return cycle


class SessionClient:
    """The least a client can do over a Session: one future a call."""

    def __init__(self, stub: "SchedulerAsyncStub", answers_together: bool) -> None:
        self._answers_together = answers_together
        self._call = stub.Session(None)
        self._answers: dict[int, asyncio.Future[pb.SessionResponse]] = {}
        self._outgoing: asyncio.Queue[pb.SessionRequest] = asyncio.Queue()
        self._next = 0
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._write())]

    async def _read(self) -> None:
        while isinstance(answer := await self._call.read(), pb.SessionResponse):
            for each in (answer, *answer.more):
                future = self._answers.pop(each.call_id, None)
                if future is not None and not future.done():
                    future.set_result(each)

    async def _write(self) -> None:
        while True:
            await self._call.write(await self._outgoing.get())

    def ask(self, message: pb.SessionRequest) -> "asyncio.Future[pb.SessionResponse]":
        self._next += 1
        message.call_id, message.answers_together = self._next, self._answers_together
        future: asyncio.Future[pb.SessionResponse] = asyncio.get_running_loop().create_future()
        self._answers[self._next] = future
        self._outgoing.put_nowait(message)
        return future

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._call.cancel()


def session_cycle(client: SessionClient, load: Load) -> Cycle:
    async def cycle(number: int, chance: random.Random) -> float:
        message = pb.SessionRequest(acquire=load.request(number, chance))
        began = time.perf_counter()
        answer = await client.ask(message)
        if answer.HasField("error"):
            raise RuntimeError(answer.error.message)
        acquired = time.perf_counter()
        granted = answer.acquire
        settle = pb.SettleRequest(ticket=granted.ticket, usage=usage_of(granted, load.keys))
        answer = await client.ask(pb.SessionRequest(settle=settle))
        if answer.HasField("error"):
            raise RuntimeError(answer.error.message)
        return (max(acquired - began, time.perf_counter() - acquired)) * 1000

    return cycle


class CpuClock:
    """CPU seconds of the daemon's process and of this one."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def read(self) -> tuple[float, float]:
        self._pipe.send("cpu")
        return self._pipe.recv(), time.process_time()

    async def timed(self, run: Awaitable[Figures]) -> Figures:
        server_before, client_before = self.read()
        figures = await run
        server, client = self.read()
        figures.server_us = (server - server_before) / figures.cycles * 1e6
        figures.client_us = (client - client_before) / figures.cycles * 1e6
        return figures


async def measure(address: str, load: Load, seconds: float, clock: CpuClock) -> list[tuple[str, Figures]]:
    rows = []
    timed = clock.timed
    async with grpc.aio.insecure_channel(address) as channel:
        stub = SchedulerStub(channel)
        unary = unary_cycle(stub, load)
        rows.append(("unary, closed loop", await timed(closed_loop(unary, load, seconds))))
        rows.append((f"unary, paced {UNARY_TARGET // 2}/s", await timed(paced(unary, UNARY_TARGET / 2, seconds))))
        for together in (False, True):
            name = "session, answers together" if together else "session"
            client = SessionClient(stub, together)
            session = session_cycle(client, load)
            rows.append((f"{name}, closed loop", await timed(closed_loop(session, load, seconds))))
            rate = SESSION_TARGET // 2
            rows.append((f"{name}, paced {rate}/s", await timed(paced(session, rate, seconds))))
            await client.close()
    return rows


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--seconds", type=float, default=8.0)
    options.add_argument("--blocks", type=int, default=1_000_000)
    options.add_argument("--tenants", type=int, default=100)
    options.add_argument("--keys", type=int, default=64)
    options.add_argument("--workers", type=int, default=16, help=f"of {SLOTS} slots each")
    options.add_argument("--in-flight", type=int, default=600, help="above the pool's slots: every tenant queues")
    arguments = options.parse_args()
    here, there = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=server, args=(there, arguments.blocks, arguments.tenants, arguments.workers)
    )
    process.start()
    address = here.recv()
    prompts = tuple(prompts_of(arguments.blocks)[:4_000])
    load = Load(arguments.tenants, arguments.keys, prompts, arguments.in_flight)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        rows = runner.run(measure(address, load, arguments.seconds, CpuClock(here)))
    here.send("stop")
    process.join()
    print(f"\n{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    print(
        f"{arguments.blocks:,} blocks, {arguments.workers} workers of {SLOTS} slots, {arguments.tenants} tenants, "
        f"{arguments.keys} keys, {arguments.in_flight} in flight"
    )
    print(f"{'':<40}{'cycles/s':>10}{'p50 ms':>9}{'p99 ms':>9}{'daemon µs':>11}{'client µs':>11}")
    for name, figures in rows:
        p50, p99 = figures.percentile(0.5), figures.percentile(0.99)
        cpu = f"{figures.server_us:>11,.0f}{figures.client_us:>11,.0f}"
        print(f"{name:<40}{figures.cycles_per_s:>10,.0f}{p50:>9.2f}{p99:>9.2f}{cpu}")
    print(
        f"targets: unary {UNARY_TARGET:,}, session {SESSION_TARGET:,} cycles/s; paced p99 ≤ {P99_MS_TARGET:.0f} ms"
    )


if __name__ == "__main__":
    main()
