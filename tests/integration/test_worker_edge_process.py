"""``evenhand worker-edge`` as a process, over a real broker: killed, started again, ended."""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
from tests.e2e.ports import free_port
from tests.integration.edge_bench import WAIT_S, WORKER, Bench, bench

from evenhand.core.block_key import unpack_keys
from evenhand.core.cache_map import CacheMap
from evenhand.core.fold import FoldOutcome, fold
from evenhand.kafka import KafkaConfig, KafkaLogReader
from evenhand.local.broker import EmbeddedBroker
from evenhand.ports import KV_TOPIC, LogPosition
from evenhand.wire.kv_codec import decode_kv_message


class KafkaMap:
    """Folds everything that the topic has."""

    def __init__(self) -> None:
        self.cache_map = CacheMap()
        self.stale = 0

    def held(self) -> set[int]:
        return {key for _, packed in self.cache_map.packed(WORKER) for key in unpack_keys(packed)}

    def epoch(self) -> int:
        position = self.cache_map.position(WORKER)
        return 0 if position is None else position.epoch

    async def follow(self, bootstrap: str) -> None:
        reader = KafkaLogReader(KafkaConfig.embedded(bootstrap))
        try:
            partitions = await reader.partition_count(KV_TOPIC)
            async for records in reader.read(KV_TOPIC, {number: LogPosition(0) for number in range(partitions)}):
                for record in records:
                    result = fold(self.cache_map, decode_kv_message(record.key, record.value))
                    self.stale += result.outcome is FoldOutcome.STALE_EPOCH
        finally:
            await reader.close()

    async def until_held(self, expected: set[int], what: str) -> None:
        try:
            async with asyncio.timeout(WAIT_S):
                while self.held() != expected:
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise AssertionError(f"not in time: {what}; {len(self.held())} of {len(expected)} keys") from None


@asynccontextmanager
async def following(bootstrap: str) -> AsyncIterator[KafkaMap]:
    found = KafkaMap()
    task = asyncio.create_task(found.follow(bootstrap))
    try:
        yield found
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def start(b: Bench, broker: EmbeddedBroker, checkpoint: Path, port: int) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "evenhand.cli", "worker-edge",
        "--worker-id", WORKER, "--pool", "p", "--address", b.engine.base_url,
        "--kv-events", b.engine.kv_events_endpoint, "--replay", b.engine.kv_replay_endpoint,
        "--kafka", broker.bootstrap, "--kafka-profile", "embedded",
        "--checkpoint", str(checkpoint), "--metrics-port", str(port), "--log-level", "error",
    )  # fmt: skip


async def until_ready(port: int) -> None:
    async with asyncio.timeout(WAIT_S), aiohttp.ClientSession() as http:
        while True:
            try:
                async with http.get(f"http://127.0.0.1:{port}/ready") as response:
                    if response.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.05)


async def end(process: asyncio.subprocess.Process, number: signal.Signals) -> int:
    if process.returncode is None:
        process.send_signal(number)
    return await asyncio.wait_for(process.wait(), WAIT_S)


async def test_an_edge_killed_at_any_time_comes_back_in_the_same_epoch(
    embedded_broker: EmbeddedBroker, tmp_path: Path
) -> None:
    checkpoint, port = tmp_path / "w0.checkpoint", free_port()
    expected: set[int] = set()
    async with bench() as b, following(embedded_broker.bootstrap) as seen:
        epochs = set()
        process = await start(b, embedded_broker, checkpoint, port)
        try:
            for _ in range(3):
                await until_ready(port)
                for _ in range(3):
                    prompt = b.prompt(3)
                    await b.complete(prompt)
                    expected |= b.keys(prompt)
                await seen.until_held(expected, "everything stored")
                epochs.add(seen.epoch())
                async with asyncio.timeout(WAIT_S):
                    while not checkpoint.exists():
                        await asyncio.sleep(0.02)
                await end(process, signal.SIGKILL)
                missed = b.prompt(2)
                await b.complete(missed)
                expected |= b.keys(missed)
                process = await start(b, embedded_broker, checkpoint, port)
                await seen.until_held(expected, "what was missed while it was dead")
            assert len(epochs) == 1
            assert seen.stale == 0
            async with (
                aiohttp.ClientSession() as http,
                http.get(f"http://127.0.0.1:{port}/metrics") as response,
            ):
                page = await response.text()
            assert f'evenhand_edge_keys_held_device{{worker_id="{WORKER}"}} {len(expected)}' in page
            assert await end(process, signal.SIGTERM) == 0
        finally:
            await end(process, signal.SIGKILL)
