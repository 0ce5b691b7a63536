"""The ZMQ source against a scripted engine: every shape of frame, and replays that answer late, oddly or never."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
import zmq
import zmq.asyncio

from evenhand.worker.source import (
    FrameReceived,
    FrameReplayed,
    ReplayEnded,
    ReplayFailed,
    SourceConnected,
    SourceEvent,
)
from evenhand.worker.zmq_source import END_SEQ, REPLAY_PACE_S, REPLAYS_AT_ONCE_MAX, ZmqSource, read_frame

WAIT_S = 10.0
Answer = Callable[["ScriptedEngine", bytes, int], Awaitable[None]]


def number(seq: int) -> bytes:
    return seq.to_bytes(8, "big")


@dataclass
class ScriptedEngine:
    """A PUB and a ROUTER that say what the test tells them."""

    pub: zmq.asyncio.Socket
    router: zmq.asyncio.Socket
    events_endpoint: str
    replay_endpoint: str
    asked: list[int] = field(default_factory=list)

    async def answer(self, client: bytes, *frames: bytes) -> None:
        await self.router.send_multipart([client, b"", *frames])

    async def serve(self, answer: Answer) -> None:
        while True:
            client, _, first = await self.router.recv_multipart()
            self.asked.append(int.from_bytes(first, "big"))
            await answer(self, client, self.asked[-1])


@asynccontextmanager
async def scripted(answer: Answer | None = None) -> AsyncIterator[ScriptedEngine]:
    context = zmq.asyncio.Context()
    with context.socket(zmq.XPUB) as pub, context.socket(zmq.ROUTER) as router:
        pub.bind("tcp://127.0.0.1:0")
        router.bind("tcp://127.0.0.1:0")
        engine = ScriptedEngine(
            pub, router, pub.getsockopt_string(zmq.LAST_ENDPOINT), router.getsockopt_string(zmq.LAST_ENDPOINT)
        )
        serving = asyncio.create_task(engine.serve(answer)) if answer else None
        try:
            yield engine
        finally:
            if serving is not None:
                serving.cancel()
                await asyncio.gather(serving, return_exceptions=True)
    context.destroy(linger=0)


@asynccontextmanager
async def running(source: ZmqSource) -> AsyncIterator["asyncio.Queue[SourceEvent]"]:
    queue: asyncio.Queue[SourceEvent] = asyncio.Queue(1_000)
    task = asyncio.create_task(source.run(queue.put))
    try:
        yield queue
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def next_of(queue: "asyncio.Queue[SourceEvent]", *kinds: type) -> SourceEvent:
    """The next event of one of these kinds; others are passed over."""
    async with asyncio.timeout(WAIT_S):
        while True:
            event = await queue.get()
            if isinstance(event, kinds):
                return event


async def subscribed(engine: ScriptedEngine) -> bytes:
    """The topic that the source asks for."""
    async with asyncio.timeout(WAIT_S):
        message = await engine.pub.recv()
    assert message[:1] == b"\x01"
    return message[1:]


@pytest.mark.parametrize(
    ("frames", "expected"),
    [
        ([b"kv@x", number(7), b"p"], (7, b"p")),
        ([b"", number(7), b"p"], (7, b"p")),
        ([number(7), b"p"], (7, b"p")),
        ([b"kv@x", b"7", b"p"], None),
        ([b"kv@x", END_SEQ, b""], None),
        ([b"p"], None),
        ([], None),
        ([b"a", b"b", number(7), b"p"], None),
    ],
)
def test_frames_come_with_and_without_topic(frames: list[bytes], expected: tuple[int, bytes] | None) -> None:
    found = read_frame(frames)
    assert (found and (found.seq, found.payload)) == expected


async def test_frames_arrive_and_malformed_ones_are_counted() -> None:
    async with scripted() as engine:
        source = ZmqSource(engine.events_endpoint, topic="kv@")
        assert not source.replays
        async with running(source) as queue:
            assert await subscribed(engine) == b"kv@"
            await next_of(queue, SourceConnected)
            await engine.pub.send_multipart([b"other", number(0), b"not for us"])
            await engine.pub.send_multipart([b"kv@e", b"short", b"bad number"])
            await engine.pub.send_multipart([b"kv@e", number(3), b"payload"])
            event = await next_of(queue, FrameReceived)
            assert event == FrameReceived(3, b"payload")
            assert source.counters.frames_malformed == 1


@pytest.mark.parametrize("topic", [[b"kv@e"], [b""], []])
async def test_a_replay_is_told_frame_by_frame_with_topic_or_without(topic: list[bytes]) -> None:
    async def answer(engine: ScriptedEngine, client: bytes, first: int) -> None:
        for seq in range(first, first + 3):
            await engine.answer(client, *topic, number(seq), b"p%d" % seq)
        await engine.answer(client, *topic, b"odd", b"x")
        await engine.answer(client, *([b""] if topic else []), END_SEQ, b"")

    async with scripted(answer) as engine:
        source = ZmqSource(engine.events_endpoint, engine.replay_endpoint)
        async with running(source) as queue:
            source.ask_replay(1, 5)
            told = [await next_of(queue, FrameReplayed) for _ in range(3)]
            assert told == [FrameReplayed(1, seq, b"p%d" % seq) for seq in (5, 6, 7)]
            assert await next_of(queue, ReplayEnded) == ReplayEnded(1)
            assert engine.asked == [5]
            assert source.counters.frames_malformed == 1


async def test_a_replay_that_is_never_answered_fails_and_the_next_works() -> None:
    async def answer(engine: ScriptedEngine, client: bytes, first: int) -> None:
        if len(engine.asked) > 1:
            await engine.answer(client, b"", END_SEQ, b"")

    async with scripted(answer) as engine:
        source = ZmqSource(engine.events_endpoint, engine.replay_endpoint, replay_wait_s=0.1)
        async with running(source) as queue:
            source.ask_replay(1, 0)
            assert await next_of(queue, ReplayEnded, ReplayFailed) == ReplayFailed(1)
            source.ask_replay(2, 0)
            assert await next_of(queue, ReplayEnded, ReplayFailed) == ReplayEnded(2)


async def test_a_replay_without_its_end_fails() -> None:
    async def answer(engine: ScriptedEngine, client: bytes, first: int) -> None:
        await engine.answer(client, b"t", number(first), b"p")

    async with scripted(answer) as engine:
        source = ZmqSource(engine.events_endpoint, engine.replay_endpoint, replay_wait_s=0.1)
        async with running(source) as queue:
            source.ask_replay(1, 0)
            assert await next_of(queue, FrameReplayed, ReplayFailed) == FrameReplayed(1, 0, b"p")
            assert await next_of(queue, FrameReplayed, ReplayFailed) == ReplayFailed(1)


async def test_a_later_wish_ends_the_replay_under_way() -> None:
    async def answer(engine: ScriptedEngine, client: bytes, first: int) -> None:
        await engine.answer(client, b"t", number(first), b"p")
        if first:
            await engine.answer(client, b"", END_SEQ, b"")

    async with scripted(answer) as engine:
        source = ZmqSource(engine.events_endpoint, engine.replay_endpoint, replay_wait_s=WAIT_S)
        async with running(source) as queue:
            source.ask_replay(1, 0)
            assert await next_of(queue, FrameReplayed) == FrameReplayed(1, 0, b"p")
            source.ask_replay(2, 8)
            assert await next_of(queue, FrameReplayed) == FrameReplayed(2, 8, b"p")
            assert await next_of(queue, ReplayEnded, ReplayFailed) == ReplayEnded(2)


async def test_an_engine_whose_replays_make_no_sense_is_asked_at_a_pace() -> None:
    async def answer(engine: ScriptedEngine, client: bytes, first: int) -> None:
        await engine.answer(client, b"", END_SEQ, b"")

    async with scripted(answer) as engine:
        source = ZmqSource(engine.events_endpoint, engine.replay_endpoint)
        async with running(source) as queue:
            began = asyncio.get_running_loop().time()
            for ask in range(REPLAYS_AT_ONCE_MAX + 2):
                source.ask_replay(ask, 0)
                assert await next_of(queue, ReplayEnded, ReplayFailed) == ReplayEnded(ask)
            assert asyncio.get_running_loop().time() - began >= REPLAY_PACE_S


async def test_a_long_silence_is_looked_into() -> None:
    async with scripted() as engine:
        source = ZmqSource(engine.events_endpoint, silence_s=0.05)
        async with running(source) as queue:
            await next_of(queue, SourceConnected)
            await next_of(queue, SourceConnected)
            await next_of(queue, SourceConnected)
            assert source.counters.handshakes <= 1


async def test_an_engine_that_comes_back_is_connected_again() -> None:
    async with scripted() as first:
        source = ZmqSource(first.events_endpoint.replace("127.0.0.1", "localhost"))
        async with running(source) as queue:
            await subscribed(first)
            await next_of(queue, SourceConnected)
            first.pub.close(linger=0)
            context = zmq.asyncio.Context()
            with context.socket(zmq.XPUB) as pub:
                async with asyncio.timeout(WAIT_S):
                    while True:
                        try:
                            pub.bind(first.events_endpoint)
                            break
                        except zmq.ZMQError:
                            await asyncio.sleep(0.01)
                    await next_of(queue, SourceConnected)
                    await pub.recv()
                await pub.send_multipart([b"", number(0), b"again"])
                assert await next_of(queue, FrameReceived) == FrameReceived(0, b"again")
            context.destroy(linger=0)
    assert source.counters.handshakes == 2
