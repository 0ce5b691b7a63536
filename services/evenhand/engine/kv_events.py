"""Cache events in vLLM's wire format, over ZMQ.

Three frames a batch: topic, sequence number (8 bytes, big-endian), msgpack of
``[timestamp s, events, data-parallel rank]``. An event is a map with a ``type`` key, fields in a fixed
order, trailing optional fields only when set; older engines send a positional array led by the type.
Stores in array form end with ``lora_name`` resp. ``medium``, the fields those engines knew.

Replay: a DEALER sends ``[b"", first sequence]``; the ROUTER answers each kept batch as
``[b"", topic, sequence, payload]`` and ends with ``[b"", b"", ff×8, b""]``. The last ``kept_batches_max``
batches are kept.

Holds always: sequence numbers of one life start at 0 and have no holes, whatever is lost on the way;
what is replayed is byte for byte what was published.

Faults on demand, so that consumers can be tested: ``drop_next`` loses batches on the wire (they stay
replayable), ``silent`` sends nothing and numbers nothing, ``duplicate`` sends each batch twice,
``delay_ms`` sends late, ``restart`` begins a new life at sequence 0.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

import msgspec
import zmq
import zmq.asyncio

from evenhand.core.errors import InvalidConfig
from evenhand.engine.events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent

END_OF_REPLAY = b"\xff" * 8
"""The sequence number −1: nothing more comes."""

KEPT_BATCHES_MAX = 10_000
HIGH_WATER_MARK = 100_000
DELAYED_BATCHES_MAX = 100_000
"""Batches waiting out ``delay_ms``; beyond it they are lost on the wire, as beyond a high-water mark."""


class EventForm(Enum):
    """How an event is laid out in msgpack."""

    MAP = "map"
    ARRAY = "array"


class EventEncoder:
    """Turns batches into msgpack. ``form`` is fixed for an engine's life, as a version of it would be."""

    def __init__(self, form: EventForm = EventForm.MAP) -> None:
        self.form = form
        self._encoder = msgspec.msgpack.Encoder()

    def batch(self, timestamp_s: float, events: Sequence[KvEvent], data_parallel_rank: int) -> bytes:
        """The payload of one batch."""
        if self.form is EventForm.MAP:
            return self._encoder.encode((timestamp_s, events, data_parallel_rank))
        return self._encoder.encode((timestamp_s, [_as_array(event) for event in events], data_parallel_rank))


def _as_array(event: KvEvent) -> list[object]:
    match event:
        case BlockStored():
            return [
                "BlockStored",
                event.block_hashes,
                event.parent_block_hash,
                event.token_ids,
                event.block_size,
                event.lora_id,
                event.medium,
                event.lora_name,
            ]
        case BlockRemoved():
            return ["BlockRemoved", event.block_hashes, event.medium]
        case AllBlocksCleared():
            return ["AllBlocksCleared"]


@dataclass(slots=True)
class WireFaults:
    """What goes wrong between engine and wire, at the moment."""

    silent: bool = False
    duplicate: bool = False
    drop_next: int = 0
    delay_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class PublisherConfig:
    """Where and how events go out."""

    host: str = "127.0.0.1"
    port: int = 0
    """0: any free port."""
    replay_port: int = 0
    topic: str = ""
    form: EventForm = EventForm.MAP
    data_parallel_rank: int = 0
    kept_batches_max: int = KEPT_BATCHES_MAX
    high_water_mark: int = HIGH_WATER_MARK


class EventPublisher:
    """The PUB and ROUTER sockets of one engine. Used from one event loop.

    ``now_s`` gives the timestamps; it decides nothing.
    """

    def __init__(self, config: PublisherConfig, now_s: Callable[[], float]) -> None:
        self.config = config
        self.faults = WireFaults()
        self.next_sequence = 0
        self._now_s = now_s
        self._topic = config.topic.encode()
        self._encoder = EventEncoder(config.form)
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=config.kept_batches_max)
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._publish: zmq.Socket[bytes] | None = None
        self._replay: zmq.asyncio.Socket | None = None
        self._replies: asyncio.Task[None] | None = None
        self._delayed: deque[asyncio.TimerHandle] = deque()
        self.endpoint = ""
        self.replay_endpoint = ""

    def start(self) -> None:
        """Bind both sockets and serve replays. InvalidConfig if a port is taken."""
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context = context
        self._publish = context.socket(zmq.PUB)
        self._publish.set_hwm(self.config.high_water_mark)
        self._publish.setsockopt(zmq.LINGER, 0)
        self._replay = zmq.asyncio.Context(context).socket(zmq.ROUTER)
        self._replay.setsockopt(zmq.LINGER, 0)
        self.endpoint = self._bind(self._publish, self.config.port, "KV events")
        self.replay_endpoint = self._bind(self._replay, self.config.replay_port, "KV events replay")
        self._replies = asyncio.get_running_loop().create_task(self._serve_replays(self._replay))

    async def stop(self) -> None:
        """Close both sockets; what is delayed is lost."""
        self._lose_delayed()
        if self._replies is not None:
            self._replies.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._replies
        for socket in (self._publish, self._replay):
            if socket is not None:
                socket.close(linger=0)
        if self._context is not None:
            self._context.term()

    def publish(self, events: tuple[KvEvent, ...]) -> None:
        """Send one batch; never blocks. Without events, or while silent, nothing is sent or numbered."""
        if not events or self.faults.silent:
            return
        sequence = self.next_sequence
        self.next_sequence += 1
        payload = self._encoder.batch(self._now_s(), events, self.config.data_parallel_rank)
        self._kept.append((sequence, payload))
        if self.faults.drop_next > 0:
            self.faults.drop_next -= 1
            return
        for _copy in range(2 if self.faults.duplicate else 1):
            self._send_later(sequence, payload)

    def restart(self) -> None:
        """Begin a new life on the same sockets: sequence 0, nothing kept, what is delayed is lost."""
        self.next_sequence = 0
        self._kept.clear()
        self._lose_delayed()

    def _lose_delayed(self) -> None:
        for handle in self._delayed:
            handle.cancel()
        self._delayed.clear()

    def _send_later(self, sequence: int, payload: bytes) -> None:
        """Send after the delay in force, and never before what already waits."""
        if not self._delayed and self.faults.delay_ms <= 0:
            self._send(sequence, payload)
            return
        if len(self._delayed) == DELAYED_BATCHES_MAX:
            return
        loop = asyncio.get_running_loop()
        due_s = loop.time() + self.faults.delay_ms / 1000
        if self._delayed:
            # Timers due at the same instant may fire in any order.
            due_s = max(due_s, self._delayed[-1].when() + 1e-6)
        self._delayed.append(loop.call_at(due_s, self._send_delayed, sequence, payload))

    def _send_delayed(self, sequence: int, payload: bytes) -> None:
        self._delayed.popleft()
        self._send(sequence, payload)

    def _send(self, sequence: int, payload: bytes) -> None:
        assert self._publish is not None, "started before it publishes"
        with contextlib.suppress(zmq.Again):
            self._publish.send_multipart([self._topic, sequence.to_bytes(8, "big"), payload], zmq.NOBLOCK)

    async def _serve_replays(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            frames = await socket.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != 8:
                continue
            peer, _empty, start = frames
            first = int.from_bytes(start, "big")
            for sequence, payload in list(self._kept):
                if sequence >= first:
                    await socket.send_multipart([peer, b"", self._topic, sequence.to_bytes(8, "big"), payload])
            await socket.send_multipart([peer, b"", b"", END_OF_REPLAY, b""])

    def _bind(self, socket: "zmq.Socket[bytes] | zmq.asyncio.Socket", port: int, purpose: str) -> str:
        endpoint = f"tcp://{self.config.host}:{port or '*'}"
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise InvalidConfig(f"The {purpose} socket cannot bind {endpoint}: {error.strerror}.") from error
        bound = socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(bound, bytes)
        return bound.decode().rstrip("\0")
