"""A simulated engine, a worker edge and a log in memory, put together for tests."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp

from evenhand.core.block_key import block_keys, root_hash, unpack_keys
from evenhand.core.cache_map import CacheMap
from evenhand.core.fold import FoldOutcome, FoldResult, fold
from evenhand.core.ids import PoolId, WorkerId
from evenhand.core.kv import ControlMessage, KvMessage
from evenhand.engine.config import EngineConfig
from evenhand.engine.server import EngineServer
from evenhand.memory.log import MemoryLog, MemoryLogReader, MemoryLogWriter
from evenhand.ports import CONTROL_TOPIC, KV_TOPIC
from evenhand.wire.kv_codec import decode_kv_message, encode_control_message
from evenhand.worker.config import EdgeConfig
from evenhand.worker.edge import WorkerEdge
from evenhand.worker.load import EnginePoller
from evenhand.worker.zmq_source import ZmqSource

WORKER = WorkerId("w0")
BLOCK_SIZE = 16
WAIT_S = 15.0


@dataclass
class MapReader:
    """Folds everything the log has of the topic."""

    log: MemoryLog
    cache_map: CacheMap = field(default_factory=CacheMap)
    messages: list[KvMessage] = field(default_factory=list)
    results: list[FoldResult] = field(default_factory=list)
    _read: int = 0

    def catch_up(self) -> None:
        records = self.log.records(KV_TOPIC)  # one worker: one partition
        for record in records[self._read :]:
            message = decode_kv_message(record.key, record.value)
            self.messages.append(message)
            self.results.append(fold(self.cache_map, message))
        self._read = len(records)

    def held(self) -> set[int]:
        return {key for _, packed in self.cache_map.packed(WORKER) for key in unpack_keys(packed)}

    def epoch(self) -> int:
        position = self.cache_map.position(WORKER)
        return 0 if position is None else position.epoch

    def complete(self) -> bool:
        position = self.cache_map.position(WORKER)
        return position is not None and position.complete

    def count(self, kind: type[Any]) -> int:
        return sum(isinstance(message, kind) for message in self.messages)

    def outcomes(self, outcome: FoldOutcome) -> int:
        return sum(result.outcome is outcome for result in self.results)

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        """Fold on until the condition holds; fails, naming it, if it does not in time."""
        try:
            async with asyncio.timeout(WAIT_S):
                while True:
                    self.catch_up()
                    if condition():
                        return
                    await self.log.changed(0.05)
        except TimeoutError:
            raise AssertionError(f"not in time: {what}") from None


@dataclass
class Bench:
    """One engine and its log; edges come and go."""

    engine: EngineServer
    log: MemoryLog
    http: aiohttp.ClientSession
    rng: random.Random

    def prompt(self, blocks: int) -> list[int]:
        return [self.rng.randrange(1_000) for _ in range(blocks * BLOCK_SIZE + 3)]

    def keys(self, prompt: list[int], salt: str = "") -> set[int]:
        return set(block_keys(prompt, BLOCK_SIZE, root_hash("sim", "", salt)))

    async def complete(self, prompt: list[int], salt: str = "") -> int:
        """Run one request of one output token; the engine's own count of cached tokens."""
        body: dict[str, Any] = {"model": "sim", "prompt": prompt, "max_tokens": 1}
        if salt:
            body["cache_salt"] = salt
        async with self.http.post(f"{self.engine.base_url}/v1/completions", json=body) as response:
            answer = await response.json()
            assert response.status == 200, answer
            cached: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            return cached

    async def fault(self, **faults: Any) -> None:
        async with self.http.post(f"{self.engine.base_url}/sim/faults", json=faults) as response:
            assert response.status == 200, await response.text()

    def tell(self, message: ControlMessage) -> None:
        self.log.append(CONTROL_TOPIC, message.worker_id.encode(), encode_control_message(message))

    def edge_config(self, checkpoint: Path | None = None, replays: bool = True) -> EdgeConfig:
        return EdgeConfig(
            worker_id=WORKER,
            pool_id=PoolId("p"),
            address=self.engine.base_url,
            kv_events=self.engine.kv_events_endpoint,
            replay=self.engine.kv_replay_endpoint if replays else "",
            checkpoint=checkpoint,
            load_interval_ms=50,
            announce_interval_ms=200,
            snapshot_interval_ms=300,
            checkpoint_interval_ms=100,
        )

    @asynccontextmanager
    async def edge(
        self, config: EdgeConfig | None = None, leave: bool = False, now_ms: Callable[[], int] | None = None
    ) -> AsyncIterator[WorkerEdge]:
        config = config or self.edge_config()
        source = (
            ZmqSource(config.kv_events, config.replay or None, replay_wait_s=0.5) if config.kv_events else None
        )
        writer, reader = MemoryLogWriter(self.log), MemoryLogReader(self.log)
        stop = asyncio.Event()
        async with EnginePoller(config.address) as poller:
            edge = WorkerEdge(config, source, writer, reader, poller, **({"now_ms": now_ms} if now_ms else {}))
            running = asyncio.create_task(edge.run(stop, leave))
            try:
                async with asyncio.timeout(WAIT_S):
                    while not (running.done() or (edge.state is not None and edge.state.continuity.settled)):
                        await asyncio.sleep(0.005)
                yield edge
            finally:
                stop.set()
                await asyncio.wait_for(running, WAIT_S)
                await reader.close()


@asynccontextmanager
async def bench(seed: int = 1, **engine: Any) -> AsyncIterator[Bench]:
    """An engine on free ports and an empty log."""
    config = EngineConfig(port=0, kv_events_port=0, kv_replay_port=0, block_size=BLOCK_SIZE)
    kv_blocks = engine.pop("kv_blocks", 257)
    length = min(2_048, (kv_blocks - 1) * BLOCK_SIZE)
    config = replace(config, kv_blocks=kv_blocks, step_base_ms=1.0, max_model_len=length, **engine)
    server = EngineServer(config)
    await server.start()
    try:
        async with aiohttp.ClientSession() as http:
            yield Bench(server, MemoryLog(partitions=1), http, random.Random(seed))
    finally:
        await server.stop()
