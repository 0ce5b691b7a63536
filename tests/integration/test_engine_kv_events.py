"""KV events over real sockets: three frames, replay, and every fault on demand."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import aiohttp
import msgspec
import pytest
import pytest_asyncio
import zmq
import zmq.asyncio

from evenhand.engine.config import EngineConfig
from evenhand.engine.limits import StepTime
from evenhand.engine.server import EngineServer

CONFIG = EngineConfig(
    name="e7",
    model="tiny",
    port=0,
    kv_events_port=0,
    kv_replay_port=0,
    block_size=32,
    kv_blocks=40,
    max_model_len=1024,
    max_num_batched_tokens=1024,
    data_parallel_rank=3,
    step_base_ms=0.5,
    prefill_token_us=1.0,
    running_sequence_us=1.0,
)


class Listener:
    """A subscriber and a replay client of one engine."""

    def __init__(self, server: EngineServer) -> None:
        self.server = server
        self.context = zmq.asyncio.Context()
        self.socket = self.context.socket(zmq.SUB)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.subscribe(b"")
        self.http = aiohttp.ClientSession(server.base_url)

    async def connect(self) -> None:
        """Connect, and return once the publisher knows the subscription: a probe has come through."""
        self.socket.connect(self.server.kv_events_endpoint)
        async with asyncio.timeout(20):
            while not await self.socket.poll(20):
                await self.faults(restart=True)
                await self.ask([1] * 32)
        # Batches come in order: once the last probe is seen, nothing older is under way.
        last = list(range(5000, 5032))
        await self.ask(last)
        while msgspec.msgpack.encode(last) not in (await self.socket.recv_multipart())[2]:
            pass
        await self.faults(restart=True)

    async def close(self) -> None:
        await self.http.close()
        self.socket.close()
        self.context.term()

    async def ask(self, prompt: list[int], **more: Any) -> dict[str, Any]:
        body = {"prompt": prompt, "max_tokens": 1, **more}
        async with self.http.post("/v1/completions", json=body) as response:
            assert response.status == 200
            answer: dict[str, Any] = await response.json()
            return answer

    async def faults(self, **settings: Any) -> None:
        async with self.http.post("/sim/faults", json=settings) as response:
            assert response.status == 200

    async def next(self) -> tuple[int, list[Any]]:
        async with asyncio.timeout(20):
            topic, sequence, payload = await self.socket.recv_multipart()
        assert topic == b"kv@e7@tiny"
        assert len(sequence) == 8
        timestamp, events, rank = msgspec.msgpack.decode(payload)
        assert timestamp > 1e9
        assert rank == 3
        return int.from_bytes(sequence, "big"), events

    async def replay(self, first: int) -> list[list[bytes]]:
        """All answers to one replay request, the end marker included."""
        socket = self.context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(self.server.kv_replay_endpoint)
        await socket.send_multipart([b"", first.to_bytes(8, "big")])
        answers: list[list[bytes]] = []
        async with asyncio.timeout(20):
            while not answers or answers[-1][2] != b"\xff" * 8:
                answers.append(await socket.recv_multipart())
        socket.close()
        return answers


@pytest_asyncio.fixture
async def listener() -> AsyncIterator[Listener]:
    server = EngineServer(CONFIG)
    await server.start()
    listener = Listener(server)
    await listener.connect()
    yield listener
    await listener.close()
    await server.stop()


async def test_stores_carry_tokens_salt_and_session(listener: Listener) -> None:
    prompt = list(range(100, 170))
    await listener.ask(prompt, cache_salt="s", session_id="c1")
    sequence, (event,) = await listener.next()
    assert sequence == 0
    assert event["type"] == "BlockStored"
    assert event["token_ids"] == prompt[:64]
    assert event["extra_keys"] == [["s"], None]
    assert (event["block_size"], event["medium"], event["session_id"]) == (32, "GPU", "c1")
    assert len(event["block_hashes"]) == 2
    assert event["parent_block_hash"] is None


@pytest.mark.parametrize("hash_form", ["int", "bytes"])
@pytest.mark.parametrize("event_form", ["map", "array"])
async def test_older_layouts_and_raw_digests_go_out_as_configured(event_form: str, hash_form: str) -> None:
    server = EngineServer(replace(CONFIG, event_form=event_form, hash_form=hash_form))
    await server.start()
    listener = Listener(server)
    await listener.connect()
    await listener.ask([1] * 64)
    _sequence, (event,) = await listener.next()
    hashes = event["block_hashes"] if event_form == "map" else event[1]
    assert (event["type"] if event_form == "map" else event[0]) == "BlockStored"
    assert [type(name) for name in hashes] == [int if hash_form == "int" else bytes] * 2
    await listener.close()
    await server.stop()


async def test_eviction_and_reset_are_told(listener: Listener) -> None:
    await listener.ask([1] * 64)
    for start in (100, 2000):
        await listener.ask(list(range(start, start + 640)))
    types = [event["type"] for _ in range(3) for event in (await listener.next())[1]]
    assert types.count("BlockRemoved") > 0
    async with listener.http.post("/reset_prefix_cache") as response:
        assert (await response.json())["success"]
    await listener.ask([1] * 64)
    _sequence, events = await listener.next()
    assert [event["type"] for event in events] == ["AllBlocksCleared", "BlockStored"]


async def test_replay_repeats_from_a_sequence_and_ends_with_the_marker(listener: Listener) -> None:
    sent = []
    for index in range(4):
        await listener.ask([index] * 32)
        sent.append(await listener.socket.recv_multipart())
    answers = await listener.replay(2)
    assert answers == [[b"", *sent[2]], [b"", *sent[3]], [b"", b"", b"\xff" * 8, b""]]
    assert await listener.replay(9) == [[b"", b"", b"\xff" * 8, b""]]


async def test_a_malformed_replay_request_is_ignored(listener: Listener) -> None:
    socket = listener.context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(listener.server.kv_replay_endpoint)
    await socket.send_multipart([b"", b"short"])
    await socket.send_multipart([b"", (0).to_bytes(8, "big")])
    async with asyncio.timeout(20):
        assert await socket.recv_multipart() == [b"", b"", b"\xff" * 8, b""]
    socket.close()


async def test_dropped_batches_leave_a_gap_that_replay_fills(listener: Listener) -> None:
    await listener.faults(drop_next=1)
    await listener.ask([1] * 32)
    await listener.ask([2] * 32)
    sequence, _events = await listener.next()
    assert sequence == 1
    assert [answer[2] for answer in await listener.replay(0)][:2] == [bytes(8), (1).to_bytes(8, "big")]


async def test_silent_sends_and_numbers_nothing(listener: Listener) -> None:
    await listener.faults(silent=True)
    await listener.ask([1] * 32)
    await listener.faults(silent=False)
    await listener.ask([2] * 32)
    sequence, (event,) = await listener.next()
    assert (sequence, event["token_ids"]) == (0, [2] * 32)


async def test_duplicates_repeat_each_batch(listener: Listener) -> None:
    await listener.faults(duplicate=True)
    await listener.ask([1] * 32)
    assert await listener.next() == await listener.next()


async def test_full_report_repeats_stores_of_reused_blocks(listener: Listener) -> None:
    prompt = [1] * 70
    await listener.ask(prompt)
    _sequence, (first,) = await listener.next()
    await listener.ask(prompt)
    await listener.ask(prompt, vllm_xargs={"kv_cache_report_mode": "full"})
    _sequence, (again,) = await listener.next()
    assert again == first
    await listener.faults(full_report=True)
    await listener.ask(prompt)
    _sequence, (third,) = await listener.next()
    assert third == first


async def test_delayed_events_come_late_and_in_order(listener: Listener) -> None:
    await listener.faults(delay_ms=150)
    started = asyncio.get_running_loop().time()
    await listener.ask([1] * 32)
    await listener.faults(delay_ms=0)
    for index in range(2, 12):
        await listener.ask([index] * 32)
    assert [(await listener.next())[0] for _ in range(11)] == list(range(11))
    assert asyncio.get_running_loop().time() - started >= 0.15


async def test_a_restart_in_place_begins_at_sequence_zero_on_the_same_socket(listener: Listener) -> None:
    for index in range(3):
        await listener.ask([index] * 32)
        assert (await listener.next())[0] == index
    await listener.faults(restart=True)
    await listener.ask([7] * 32)
    sequence, (event,) = await listener.next()
    assert (sequence, event["type"], event["token_ids"]) == (0, "BlockStored", [7] * 32)
    assert len(await listener.replay(0)) == 2


async def test_a_step_under_way_at_a_restart_says_nothing_in_the_next_life(listener: Listener) -> None:
    listener.server.runtime.engine.step_time = StepTime(base_ns=150_000_000)
    lost = asyncio.create_task(listener.http.post("/v1/completions", json={"prompt": [5] * 32, "max_tokens": 1}))
    async with asyncio.timeout(20):
        while not listener.server.runtime.open_streams:
            await asyncio.sleep(0)
    await listener.faults(restart=True)
    assert (await lost).status == 500
    await listener.ask([6] * 32)
    sequence, (event,) = await listener.next()
    assert (sequence, event["token_ids"]) == (0, [6] * 32)
    async with listener.http.get("/metrics") as response:
        assert 'vllm:prompt_tokens_total{engine="3",model_name="tiny"} 32.0' in await response.text()


async def test_what_is_delayed_dies_with_its_life(listener: Listener) -> None:
    await listener.faults(delay_ms=100)
    await listener.ask([1] * 32)
    await listener.faults(restart=True, delay_ms=0)
    await listener.ask([2] * 32)
    sequence, (event,) = await listener.next()
    assert (sequence, event["token_ids"]) == (0, [2] * 32)
    assert not await listener.socket.poll(150)
