"""The plugin in a real vLLM: events of the engine's own loop reach Kafka; predictions are the engine's hits."""

import asyncio
import json
import os
import random
import sysconfig
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from tests.e2e.real_engine import make_model

import evenhand
from evenhand.core.block_key import block_keys, root_hash, usable_blocks
from evenhand.core.cache_map import CacheMap
from evenhand.core.fold import fold
from evenhand.core.ids import WorkerId
from evenhand.kafka import KafkaConfig, KafkaLogReader
from evenhand.local.broker import EmbeddedBroker
from evenhand.ports import KV_TOPIC, LogPosition
from evenhand.wire.kv_codec import decode_kv_message

PYTHON_VARIABLE = "EVENHAND_TEST_VLLM_PYTHON"
SCRIPT = Path(__file__).parent / "vllm_plugin_process.py"
WORKER = WorkerId("in-vllm")
BLOCK_SIZE = 32
BLOCKS = 40
START_S = 240.0
ANSWER_S = 60.0
QUIET_S = 0.5
"""A map that has not changed for so long has caught up with an idle engine."""

pytestmark = [pytest.mark.real_engine, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def vllm_python() -> Path:
    named = os.environ.get(PYTHON_VARIABLE)
    if not named or not Path(named).exists():
        pytest.skip(f"needs an interpreter with vLLM, named by {PYTHON_VARIABLE}")
    return Path(named)


class EngineProcess:
    """The engine's process, one prompt after another."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def answer(self, wait_s: float) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = await asyncio.wait_for(self.process.stdout.readline(), wait_s)
        assert line, "the engine's process ended"
        answer: dict[str, Any] = json.loads(line)
        return answer

    async def cached_tokens(self, prompt: list[int]) -> int:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(prompt).encode() + b"\n")
        await self.process.stdin.drain()
        cached: int = (await self.answer(ANSWER_S))["cached_tokens"]
        return cached


@pytest_asyncio.fixture
async def engine(
    vllm_python: Path, embedded_broker: EmbeddedBroker, tmp_path: Path
) -> AsyncIterator[EngineProcess]:
    model = await make_model(vllm_python, tmp_path)
    services = Path(evenhand.__file__).parent.parent
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "PYTHONHASHSEED": "0",
        "VLLM_HOST_IP": "127.0.0.1", "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "EVENHAND_KAFKA": embedded_broker.bootstrap, "EVENHAND_KAFKA_PROFILE": "embedded",
        "EVENHAND_WORKER_ID": WORKER, "EVENHAND_POOL": "p", "EVENHAND_ADDRESS": "http://127.0.0.1:9",
        "EVENHAND_MODEL": "tiny", "EVENHAND_BLOCK_SIZE": str(BLOCK_SIZE), "EVENHAND_KV_BLOCKS": str(BLOCKS - 1),
    }  # fmt: skip
    with (tmp_path / "engine.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            str(vllm_python), str(SCRIPT), str(model), str(BLOCKS), str(services), sysconfig.get_path("purelib"),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=log, env=environment,
            start_new_session=True,
        )  # fmt: skip
    found = EngineProcess(process)
    try:
        try:
            ready = await found.answer(START_S)
        except AssertionError:
            pytest.fail((tmp_path / "engine.log").read_text(errors="replace")[-3000:])
        assert ready["ready"] == "evenhand.worker.vllm_plugin"
        yield found
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), 30)
        except TimeoutError:
            process.kill()
            await process.wait()


async def follow(bootstrap: str, cache_map: CacheMap, changed: asyncio.Event) -> None:
    reader = KafkaLogReader(KafkaConfig.embedded(bootstrap))
    try:
        partitions = await reader.partition_count(KV_TOPIC)
        async for records in reader.read(KV_TOPIC, {number: LogPosition(0) for number in range(partitions)}):
            for record in records:
                if fold(cache_map, decode_kv_message(record.key, record.value)).operations:
                    changed.set()
    finally:
        await reader.close()


async def caught_up(changed: asyncio.Event) -> None:
    """Wait until nothing has changed for a while."""
    while True:
        changed.clear()
        try:
            await asyncio.wait_for(changed.wait(), QUIET_S)
        except TimeoutError:
            return


async def test_predictions_from_the_plugin_are_the_engines_own_hits(
    engine: EngineProcess, embedded_broker: EmbeddedBroker
) -> None:
    rng = random.Random(7)
    cache_map, changed = CacheMap(), asyncio.Event()
    following = asyncio.create_task(follow(embedded_broker.bootstrap, cache_map, changed))
    conversations = [[rng.randrange(100, 1_500) for _ in range(70)] for _ in range(6)]
    hits = 0
    try:
        for turn in range(40):
            prompt = rng.choice(conversations)
            await caught_up(changed)
            keys = block_keys(prompt, BLOCK_SIZE, root_hash("tiny"))
            blocks = next((m.blocks for m in cache_map.match(keys) if m.worker_id == WORKER), 0)
            predicted = min(blocks, usable_blocks(len(prompt), BLOCK_SIZE)) * BLOCK_SIZE
            assert await engine.cached_tokens(prompt) == predicted, turn
            hits += predicted > 0
            if len(prompt) < 700:
                prompt += [rng.randrange(100, 1_500) for _ in range(45)]
        assert hits > 10
        assert cache_map.block_count(WORKER) > 10
        position = cache_map.position(WORKER)
        assert position is not None
        assert position.complete
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
