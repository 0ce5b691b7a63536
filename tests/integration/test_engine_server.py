"""A simulated engine over HTTP, as the openai client and a Prometheus scraper see it."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import openai
import pytest
import pytest_asyncio

from evenhand.core.errors import InvalidConfig
from evenhand.engine.config import EngineConfig
from evenhand.engine.server import EngineServer

FAST = {
    "port": 0,
    "kv_events_port": 0,
    "kv_replay_port": 0,
    "model": "tiny",
    "lora": ("tiny-lora",),
    "block_size": 32,
    "kv_blocks": 40,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 1024,
    "max_model_len": 1024,
    "step_base_ms": 0.5,
    "prefill_token_us": 1.0,
    "running_sequence_us": 1.0,
}


def config_with(**more: Any) -> EngineConfig:
    return EngineConfig(**{**FAST, **more})


@pytest_asyncio.fixture
async def server() -> AsyncIterator[EngineServer]:
    engine = EngineServer(config_with())
    await engine.start()
    yield engine
    await engine.stop()


@pytest_asyncio.fixture
async def client(server: EngineServer) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{server.base_url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest_asyncio.fixture
async def http(server: EngineServer) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(server.base_url) as session:
        yield session


async def metrics_of(http: aiohttp.ClientSession) -> dict[str, float]:
    async with http.get("/metrics") as response:
        text = await response.text()
    values = {}
    for line in text.splitlines():
        if line.startswith(("vllm:", "process_")) and "_bucket" not in line and "_created" not in line:
            name, value = line.rsplit(" ", 1)
            values[name.split("{", 1)[0]] = float(value)
    return values


async def until(condition: Any) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0)


async def test_token_prompts_report_what_was_cached(client: openai.AsyncOpenAI) -> None:
    prompt = list(range(500, 600))
    cached = []
    for _ in range(2):
        answer = await client.completions.create(model="tiny", prompt=prompt, max_tokens=8)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (100, 8)
        cached.append(answer.usage.prompt_tokens_details.cached_tokens)
        assert answer.choices[0].finish_reason == "length"
    assert cached == [0, 96]


async def test_a_salt_and_a_lora_separate_caches(client: openai.AsyncOpenAI) -> None:
    async def cached(model: str, salt: str | None) -> int | None:
        extra = {"cache_salt": salt} if salt else {}
        answer = await client.completions.create(
            model=model, prompt=list(range(500, 600)), max_tokens=1, extra_body=extra
        )
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        return answer.usage.prompt_tokens_details.cached_tokens

    keys = [("tiny", None), ("tiny", "a"), ("tiny", "b"), ("tiny-lora", "a")]
    assert [await cached(*key) for key in keys] == [0, 0, 0, 0]
    assert [await cached(*key) for key in keys] == [96, 96, 96, 96]


async def test_streaming_gives_the_same_text_and_usage_as_not_streaming(client: openai.AsyncOpenAI) -> None:
    messages: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Grüße!"}]
    whole = await client.chat.completions.create(model="tiny", messages=messages, max_tokens=20)
    stream = await client.chat.completions.create(
        model="tiny",
        messages=messages,
        max_tokens=20,
        stream=True,
        stream_options={"include_usage": True},
    )
    text, usage, reasons = "", None, []
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reasons.append(choice.finish_reason)
    assert text == whole.choices[0].message.content
    assert usage is not None
    assert whole.usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (whole.usage.prompt_tokens, 20)
    assert [reason for reason in reasons if reason] == ["length"]


async def test_a_conversation_sent_back_as_text_hits_its_output_blocks(client: openai.AsyncOpenAI) -> None:
    messages: Any = [{"role": "user", "content": "Tell me something of some length, please."}]
    first = await client.chat.completions.create(model="tiny", messages=messages, max_tokens=100)
    assert first.usage is not None
    messages += [
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "Go on."},
    ]
    second = await client.chat.completions.create(model="tiny", messages=messages, max_tokens=1)
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    expected = (first.usage.total_tokens - 1) // 32 * 32
    assert second.usage.prompt_tokens_details.cached_tokens == expected > 100


async def test_a_chat_without_max_tokens_has_a_length_of_its_own(client: openai.AsyncOpenAI) -> None:
    messages: Any = [{"role": "user", "content": "Hello"}]
    lengths = []
    for _ in range(2):
        answer = await client.chat.completions.create(model="tiny", messages=messages)
        assert answer.usage is not None
        lengths.append(answer.usage.completion_tokens)
    assert lengths[0] == lengths[1]
    assert 16 <= lengths[0] <= 271


async def test_token_ids_are_returned_on_request(http: aiohttp.ClientSession) -> None:
    body = {"prompt": [400, 401], "max_tokens": 3, "return_token_ids": True}
    async with http.post("/v1/completions", json=body) as response:
        (choice,) = (await response.json())["choices"]
    assert choice["prompt_token_ids"] == [400, 401]
    assert len(choice["token_ids"]) == 3


async def test_a_client_that_disconnects_frees_its_request(
    server: EngineServer, http: aiohttp.ClientSession
) -> None:
    engine = server.runtime.engine
    for stream in (True, False):
        body = {"prompt": list(range(100)), "max_tokens": 900, "stream": stream}
        call = asyncio.create_task(http.post("/v1/completions", json=body))
        await until(lambda: engine.running == 1)
        if stream:
            response = await call
            assert (await response.content.readline()).startswith(b"data: ")
            response.close()
        else:
            call.cancel()
        await until(lambda: engine.running == 0)
        assert engine.pool.held_blocks == 0
        assert not server.runtime.open_streams
    assert (await metrics_of(http))["vllm:num_requests_running"] == 0


async def test_metrics_carry_vllms_names_and_count(
    client: openai.AsyncOpenAI, http: aiohttp.ClientSession
) -> None:
    for _ in range(2):
        await client.completions.create(model="tiny", prompt=list(range(100)), max_tokens=8)
    values = await metrics_of(http)
    assert values["vllm:prompt_tokens_total"] == 200
    assert values["vllm:generation_tokens_total"] == 16
    assert values["vllm:prefix_cache_queries_total"] == 200
    assert values["vllm:prefix_cache_hits_total"] == 96
    assert values["vllm:time_to_first_token_seconds_count"] == 2
    assert values["vllm:num_requests_running"] == values["vllm:num_requests_waiting"] == 0
    async with http.get("/metrics") as response:
        info = next(line for line in (await response.text()).splitlines() if "cache_config_info{" in line)
    assert 'block_size="32"' in info
    assert 'num_gpu_blocks="40"' in info


async def test_small_endpoints(server: EngineServer, http: aiohttp.ClientSession) -> None:
    async with http.get("/health") as response:
        assert response.status == 200
    async with http.get("/v1/models") as response:
        assert [model["id"] for model in (await response.json())["data"]] == ["tiny", "tiny-lora"]
    async with http.get("/load") as response:
        assert await response.json() == {"server_load": 0}
    async with http.post("/tokenize", json={"prompt": "ab"}) as response:
        assert await response.json() == {"count": 3, "max_model_len": 1024, "tokens": [1, 102, 103]}
    messages = [{"role": "user", "content": "ab"}]
    async with http.post("/tokenize", json={"messages": messages}) as response:
        assert (await response.json())["count"] == 21
    async with http.post("/reset_prefix_cache") as response:
        assert await response.json() == {"success": True}


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/v1/completions", {"prompt": [1] * 2000}, 400, "maximum context length is 1024 tokens"),
        ("/v1/completions", {"prompt": []}, 400, "prompt is empty"),
        ("/v1/completions", {}, 400, "prompt must be a string"),
        ("/v1/completions", {"prompt": [1, -2]}, 400, "non-negative token ids"),
        ("/v1/completions", {"prompt": "x", "max_tokens": 0}, 400, "max_tokens must be a positive"),
        ("/v1/completions", {"prompt": "x", "n": 2}, 400, "n must be 1"),
        ("/v1/completions", {"prompt": ["x", "y"]}, 400, "one a request"),
        ("/v1/completions", {"prompt": "x", "stream": "yes"}, 400, "stream must be true or false"),
        ("/v1/completions", {"prompt": "x", "cache_salt": 7}, 400, "cache_salt must be a non-empty"),
        ("/v1/completions", {"prompt": "x", "model": "gpt"}, 404, "`gpt` does not exist"),
        ("/v1/completions", [], 400, "must be a JSON object"),
        ("/v1/chat/completions", {"messages": []}, 400, "messages must be a non-empty list"),
        ("/v1/chat/completions", {"messages": [{"content": "x"}]}, 400, "must have a role"),
        ("/v1/nothing", {}, 404, "Not Found"),
        ("/sim/faults", {"silent": 1}, 400, "silent must be true or false"),
        ("/sim/faults", {"explode": True}, 400, "There is no fault 'explode'"),
        ("/sim/faults", {"drop_next": -1}, 400, "drop_next must be a whole number"),
    ],
)
async def test_bad_requests_get_one_sentence(
    http: aiohttp.ClientSession, path: str, body: object, status: int, words: str
) -> None:
    async with http.post(path, json=body) as response:
        assert response.status == status
        error = (await response.json())["error"]
    assert words in error["message"]
    assert error["code"] == status
    assert "\n" not in error["message"]


async def test_broken_json_is_named(http: aiohttp.ClientSession) -> None:
    async with http.post("/v1/completions", data=b"{") as response:
        assert response.status == 400
        assert json.loads(await response.read())["error"]["message"] == "The request body is not valid JSON."


async def test_a_full_queue_answers_503() -> None:
    server = EngineServer(config_with(max_num_seqs=1, max_queued=1))
    await server.start()
    async with aiohttp.ClientSession(server.base_url) as http:
        body = {"prompt": [1, 2], "max_tokens": 900}
        first = asyncio.create_task(http.post("/v1/completions", json=body))
        await until(lambda: server.runtime.engine.running == 1)
        second = asyncio.create_task(http.post("/v1/completions", json=body))
        await until(lambda: len(server.runtime.engine.waiting) == 1)
        async with http.post("/v1/completions", json=body) as response:
            assert response.status == 503
            assert "queue is full" in (await response.json())["error"]["message"]
        for call in (first, second):
            call.cancel()
        await until(lambda: not server.runtime.open_streams)
    await server.stop()


async def test_a_restart_in_place_loses_requests_cache_and_counters(
    server: EngineServer, http: aiohttp.ClientSession
) -> None:
    before = await metrics_of(http)
    body = {"prompt": list(range(64)), "max_tokens": 900}
    whole = asyncio.create_task(http.post("/v1/completions", json=body))
    streaming = await http.post("/v1/completions", json={**body, "stream": True})
    await until(lambda: server.runtime.engine.running == 2)
    async with http.post("/sim/faults", json={"restart": True}) as response:
        assert response.status == 200
    assert (await whole).status == 500
    with pytest.raises(aiohttp.ClientError):
        await streaming.read()
    after = await metrics_of(http)
    assert after["process_start_time_seconds"] > before["process_start_time_seconds"]
    assert after["vllm:prompt_tokens_total"] == 0
    async with http.post("/v1/completions", json={**body, "max_tokens": 1}) as response:
        assert (await response.json())["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_two_engines_live_in_one_process_and_share_nothing() -> None:
    servers = [EngineServer(config_with(name=name)) for name in ("a", "b")]
    for server in servers:
        await server.start()
    assert len({server.base_url for server in servers}) == 2
    async with aiohttp.ClientSession() as http:
        cached = []
        for server in (servers[0], servers[0], servers[1]):
            body = {"prompt": list(range(64)), "max_tokens": 1}
            async with http.post(f"{server.base_url}/v1/completions", json=body) as response:
                usage = (await response.json())["usage"]
                cached.append(usage["prompt_tokens_details"]["cached_tokens"])
    assert cached == [0, 32, 0]
    for server in servers:
        await server.stop()


async def test_a_taken_port_is_named_and_nothing_stays_open(server: EngineServer) -> None:
    http_port = int(server.base_url.rsplit(":", 1)[1])
    events_port = int(server.kv_events_endpoint.rsplit(":", 1)[1])
    for taken in ({"port": http_port}, {"kv_events_port": events_port}, {"kv_replay_port": events_port}):
        with pytest.raises(InvalidConfig, match=f"{next(iter(taken.values()))}: Address"):
            await EngineServer(config_with(**taken)).start()
