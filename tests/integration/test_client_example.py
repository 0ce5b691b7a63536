"""The example of the README, run as a user runs it: SDK, daemon, simulated engine and the openai package."""

import asyncio
import os
import re
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
from tests.fixtures.scheduler_daemon import BLOCK_SIZE, World, announced, load

from evenhand.client import AsyncClient, RetryPolicy, openai_kwargs
from evenhand.core.ids import TenantId
from evenhand.engine.config import EngineConfig
from evenhand.engine.server import EngineServer
from evenhand.ports import Principal
from evenhand.scheduler.daemon import SchedulerDaemon

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "docs" / "examples" / "openai_client.py"


@pytest.fixture
async def engine() -> AsyncIterator[EngineServer]:
    config = EngineConfig(
        port=0, kv_events_port=0, kv_replay_port=0, model="test-model", block_size=BLOCK_SIZE, step_base_ms=0.5
    )
    server = EngineServer(config)
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
async def daemon(tmp_path: Path, engine: EngineServer) -> AsyncIterator[SchedulerDaemon]:
    world = World(tmp_path)
    world.add_pool()
    world.add_tenants("a")
    world.add_key("key-a", Principal("app", "service", (TenantId("a"),)))
    world.say(replace(announced("w1"), address=engine.base_url))
    world.say(load("w1"))
    async with world.daemon() as daemon:
        yield daemon


async def test_the_example_runs(daemon: SchedulerDaemon) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-W",
        "error",
        EXAMPLE,
        "llama",
        env={**os.environ, "EVENHAND_ADDRESS": daemon.address, "EVENHAND_API_KEY": "key-a"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, err.decode()
    first, _, second, usage = out.decode().splitlines()
    assert first.startswith("w1 at http://127.0.0.1:")
    assert second.startswith("w1 at http://127.0.0.1:")
    assert "Usage(prompt_tokens=100, cached_tokens=96, output_tokens=16)" in usage
    assert not daemon.actor.open


def test_the_readme_shows_the_example_as_it_is() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert EXAMPLE.read_text() in blocks


async def test_usage_of_a_streamed_answer(daemon: SchedulerDaemon) -> None:
    ask: dict[str, Any] = {"tokens": list(range(100)), "max_output_tokens": 8}
    async with (
        AsyncClient(daemon.address, pool="llama", api_key="key-a") as client,
        openai.AsyncOpenAI(api_key="none", max_retries=0) as worker,
        client.acquire(**ask) as grant,
    ):
        stream = await worker.with_options(base_url=grant.base_url).completions.create(
            model="test-model",
            prompt=ask["tokens"],
            max_tokens=8,
            stream=True,
            stream_options={"include_usage": True},
            **openai_kwargs(grant),
        )
        async for chunk in stream:
            grant.first_token()
            grant.record_usage(chunk.usage)
        assert grant.usage is not None
        assert grant.usage.output_tokens == 8
    assert not daemon.actor.open


async def test_an_engine_that_is_gone_is_a_lost_worker(daemon: SchedulerDaemon, engine: EngineServer) -> None:
    await engine.stop()
    ask: dict[str, Any] = {"tokens": list(range(100)), "max_output_tokens": 8}
    retry = RetryPolicy(attempts_max=2, backoff_ms_base=1, backoff_ms_max=2)
    async with (
        AsyncClient(daemon.address, pool="llama", api_key="key-a", retry=retry) as client,
        openai.AsyncOpenAI(api_key="none", max_retries=0) as worker,
    ):

        async def call(grant: Any) -> Any:
            asked = worker.with_options(base_url=grant.base_url)
            return await asked.completions.create(model="test-model", prompt=ask["tokens"], **openai_kwargs(grant))

        with pytest.raises(openai.APIConnectionError):
            await client.run(call, legs_max=2, **ask)
    assert not daemon.actor.open
