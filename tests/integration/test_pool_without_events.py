"""A pool whose engines send no KV events: the scheduler goes by what it sent where, and is right about it."""

import asyncio
import random
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.fixtures.scheduler_daemon import BLOCK_SIZE, POOL, WAIT_S, World, eventually

from evenhand.client import AsyncClient, Grant
from evenhand.core.block_key import KEY_SCHEME
from evenhand.core.ids import WorkerId
from evenhand.engine.config import EngineConfig
from evenhand.engine.server import EngineServer
from evenhand.memory import MemoryLogReader, MemoryLogWriter
from evenhand.ports import KV_TOPIC, PoolSpec
from evenhand.scheduler.daemon import SchedulerDaemon
from evenhand.state.config import StateConfig
from evenhand.state.metrics import StateMetrics
from evenhand.state.service import StateService
from evenhand.worker.config import EdgeConfig
from evenhand.worker.edge import WorkerEdge
from evenhand.worker.load import EnginePoller

MODEL = "sim"
WORKERS = ("w0", "w1")
KV_BLOCKS = 257
BLOCKS = 8
"""Whole blocks of a prompt; three tokens more follow, so that all of them can be reused."""


@dataclass
class Pool:
    """Engines without events, their edges, one scheduler and one caller."""

    world: World
    daemon: SchedulerDaemon
    engines: Mapping[str, EngineServer]
    client: AsyncClient
    http: aiohttp.ClientSession
    rng: random.Random

    def prompt(self) -> list[int]:
        return [self.rng.randrange(1_000) for _ in range(BLOCKS * BLOCK_SIZE + 3)]

    async def complete(self, prompt: list[int]) -> tuple[Grant, int]:
        """Run one request where the scheduler says; the grant and the engine's own count of cached tokens."""
        async with self.client.acquire(tokens=prompt, max_output_tokens=4) as grant:
            body = {"model": MODEL, "prompt": prompt, "max_tokens": 1, "cache_salt": grant.cache_salt}
            async with self.http.post(f"{grant.address}/v1/completions", json=body) as response:
                answer: dict[str, Any] = await response.json()
                assert response.status == 200, answer
            grant.record_usage(answer["usage"])
        return grant, answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    async def restart(self, worker: str) -> None:
        """A new engine process behind the same address; returns once the scheduler knows of its new epoch."""
        before = self.epoch(worker)
        async with self.http.post(
            f"{self.engines[worker].base_url}/sim/faults", json={"restart": True}
        ) as response:
            assert response.status == 200, await response.text()
        await eventually(lambda: self.epoch(worker) > before)

    def epoch(self, worker: str) -> int:
        return self.daemon.live_map.workers[WorkerId(worker)].epoch


@asynccontextmanager
async def edge_of(worker: str, engine: EngineServer, world: World) -> AsyncIterator[WorkerEdge]:
    config = EdgeConfig(
        worker_id=WorkerId(worker),
        pool_id=POOL,
        address=engine.base_url,
        kv_events="",
        sends_events=False,
        load_interval_ms=50,
        announce_interval_ms=200,
    )
    reader, stop = MemoryLogReader(world.log), asyncio.Event()
    async with EnginePoller(config.address) as poller:
        edge = WorkerEdge(config, None, MemoryLogWriter(world.log), reader, poller)
        running = asyncio.create_task(edge.run(stop, False))
        try:
            yield edge
        finally:
            stop.set()
            await asyncio.wait_for(running, WAIT_S)
            await reader.close()


@pytest.fixture
async def pool(tmp_path: Path) -> AsyncIterator[Pool]:
    world = World(tmp_path)
    world.directory.set_pool(PoolSpec(POOL, MODEL, BLOCK_SIZE, KEY_SCHEME))
    world.add_tenants("a")
    async with AsyncExitStack() as stack:
        engines: dict[str, EngineServer] = {}
        for name in WORKERS:
            engine = EngineServer(
                EngineConfig(
                    port=0,
                    kv_events_port=0,
                    kv_replay_port=0,
                    block_size=BLOCK_SIZE,
                    kv_blocks=KV_BLOCKS,
                    step_base_ms=1.0,
                    max_model_len=1_024,
                )
            )
            await engine.start()
            stack.push_async_callback(engine.stop)
            engines[name] = engine
            await stack.enter_async_context(edge_of(name, engine, world))
        daemon = await stack.enter_async_context(world.daemon())
        await eventually(lambda: len(daemon.live_map.workers) == len(WORKERS))
        client = await stack.enter_async_context(AsyncClient(daemon.address, pool=POOL, tenant="a"))
        http = await stack.enter_async_context(aiohttp.ClientSession())
        yield Pool(world, daemon, engines, client, http, random.Random(1))


async def test_a_prefix_returns_to_the_worker_it_was_sent_to(pool: Pool) -> None:
    for _ in range(4):
        prompt = pool.prompt()
        first, cached = await pool.complete(prompt)
        assert (first.predicted_cached_tokens, cached) == (0, 0)
        second, cached = await pool.complete(prompt)
        assert second.worker_id == first.worker_id
        assert second.predicted_cached_tokens == cached == BLOCKS * BLOCK_SIZE
        longer, cached = await pool.complete(prompt[: 5 * BLOCK_SIZE] + pool.prompt())
        assert longer.worker_id == first.worker_id
        assert longer.predicted_cached_tokens == cached == 5 * BLOCK_SIZE


async def test_a_restarted_engine_is_taken_to_be_empty(pool: Pool) -> None:
    prompt = pool.prompt()
    first, _ = await pool.complete(prompt)
    warm, cached = await pool.complete(prompt)
    assert warm.predicted_cached_tokens == cached > 0
    await pool.restart(first.worker_id)
    cold, cached = await pool.complete(prompt)
    assert (cold.predicted_cached_tokens, cached) == (0, 0)
    again, cached = await pool.complete(prompt)
    assert again.worker_id == cold.worker_id
    assert again.predicted_cached_tokens == cached == BLOCKS * BLOCK_SIZE


async def test_the_restart_of_another_engine_changes_nothing(pool: Pool) -> None:
    prompt = pool.prompt()
    first, _ = await pool.complete(prompt)
    await pool.restart(next(name for name in WORKERS if name != first.worker_id))
    second, cached = await pool.complete(prompt)
    assert second.worker_id == first.worker_id
    assert second.predicted_cached_tokens == cached == BLOCKS * BLOCK_SIZE


async def test_what_is_assumed_is_in_no_map(pool: Pool) -> None:
    prompt = pool.prompt()
    await pool.complete(prompt)
    grant, _ = await pool.complete(prompt)
    assert grant.predicted_cached_tokens > 0
    assert pool.daemon.live_map.cache_map.key_count == 0
    world = pool.world
    state = StateService(
        StateConfig(group_ms_max=1, idle_commit_ms=20),
        lambda _: world.map_store,
        world.directory,
        MemoryLogReader(world.log),
        MemoryLogWriter(world.log),
        StateMetrics(),
    )
    read_to = len(world.log.records(KV_TOPIC))
    running = asyncio.create_task(state.run())
    try:
        async with asyncio.timeout(WAIT_S):
            while sum(at.next_offset for at in (await world.map_store.positions()).values()) < read_to:
                await world.log.changed(0.05)
    finally:
        state.stop()
        await asyncio.wait_for(running, WAIT_S)
    stored = await world.map_store.load()
    assert sorted(worker.worker_id for worker in stored.workers) == list(WORKERS)
    assert not any(packed for worker in stored.workers for _, packed in worker.held)
