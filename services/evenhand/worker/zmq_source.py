"""A running engine's event sockets: SUB for what happens, DEALER for what was missed.

Frames on the wire are ``[topic, number, payload]`` (or without the topic), the number 8 bytes big-endian. A replay
is asked for with ``[empty, first number]`` and answered by ``[empty, topic, number, payload]`` each (some versions
leave the topic out), then an end marker whose number is −1 and whose payload is empty. Each replay has a socket of
its own, so that answers to one that was given up cannot be taken for this one's.

ZeroMQ connects again by itself and resolves names each time. Each completed handshake is told, because frames sent
before it never arrive. So is a long silence: a replay then shows whether it was silence or a loss. What always
holds: queues are bounded (``RECEIVE_FRAMES_MAX`` in the socket, the edge's queue behind it), and malformed frames
are counted and passed over.
"""

import asyncio
from dataclasses import dataclass

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from evenhand.worker.source import (
    FrameReceived,
    FrameReplayed,
    FrameSource,
    Put,
    ReplayEnded,
    ReplayFailed,
    SourceConnected,
)

RECEIVE_FRAMES_MAX = 100_000
RECONNECT_MS_MIN = 50
RECONNECT_MS_MAX = 2_000
HEARTBEAT_MS = 2_000
HEARTBEAT_TIMEOUT_MS = 6_000
"""A peer that is gone without a word counts as disconnected after this long."""
REPLAY_WAIT_S = 2.0
"""Longest wait for the next frame of a replay."""
REPLAYS_AT_ONCE_MAX = 20
REPLAY_PACE_S = 0.5
"""So many replays may follow one another at once; later ones are this far apart. An engine whose replays never
make sense would otherwise be asked, and begin a life, without pause."""
SILENCE_S = 30.0
"""After this long without a frame the last one is asked for again."""
SEQ_BYTES = 8
END_SEQ = b"\xff" * SEQ_BYTES


@dataclass(slots=True)
class ZmqCounters:
    """Totals; they only grow."""

    frames_received: int = 0
    frames_malformed: int = 0
    handshakes: int = 0
    replays: int = 0
    replays_failed: int = 0


class ZmqSource(FrameSource):
    """One engine rank's sockets. ``run`` owns them; one run at a time."""

    def __init__(
        self,
        events_endpoint: str,
        replay_endpoint: str | None = None,
        topic: str = "",
        replay_wait_s: float = REPLAY_WAIT_S,
        silence_s: float = SILENCE_S,
    ) -> None:
        """Endpoints are ``tcp://HOST:PORT``; ``topic`` subscribes to topics that begin with it."""
        self.counters = ZmqCounters()
        self._events_endpoint = events_endpoint
        self._replay_endpoint = replay_endpoint
        self._topic = topic.encode()
        self._replay_wait_s = replay_wait_s
        self._silence_s = silence_s
        self._wanted = (0, 0)
        self._wake = asyncio.Event()

    @property
    def replays(self) -> bool:
        return self._replay_endpoint is not None

    def ask_replay(self, ask: int, from_seq: int) -> None:
        self._wanted = (ask, from_seq)
        self._wake.set()

    async def run(self, put: Put) -> None:
        context = zmq.asyncio.Context()
        try:
            with context.socket(zmq.SUB) as sub:
                sub.setsockopt(zmq.RCVHWM, RECEIVE_FRAMES_MAX)
                sub.setsockopt(zmq.SUBSCRIBE, self._topic)
                _tune(sub)
                monitor = sub.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
                sub.connect(self._events_endpoint)
                try:
                    async with asyncio.TaskGroup() as tasks:
                        tasks.create_task(self._receive(sub, put))
                        tasks.create_task(self._watch(monitor, put))
                        if self._replay_endpoint is not None:
                            tasks.create_task(self._replay(context, self._replay_endpoint, put))
                finally:
                    sub.disable_monitor()
                    monitor.close(linger=0)
        finally:
            context.destroy(linger=0)

    async def _receive(self, sub: zmq.asyncio.Socket, put: Put) -> None:
        while True:
            try:
                async with asyncio.timeout(self._silence_s):
                    frames = await sub.recv_multipart()
            except TimeoutError:
                await put(SourceConnected())
                continue
            frame = read_frame(frames)
            if frame is None:
                self.counters.frames_malformed += 1
                continue
            self.counters.frames_received += 1
            await put(frame)

    async def _watch(self, monitor: zmq.asyncio.Socket, put: Put) -> None:
        while True:
            await recv_monitor_message(monitor)
            self.counters.handshakes += 1
            await put(SourceConnected())

    async def _replay(self, context: zmq.asyncio.Context, endpoint: str, put: Put) -> None:
        """Serve the latest wish; a newer one ends the one under way."""
        due = 0.0
        while True:
            await self._wake.wait()
            while self._wake.is_set():
                now = asyncio.get_running_loop().time()
                due = max(due, now - REPLAYS_AT_ONCE_MAX * REPLAY_PACE_S)
                await asyncio.sleep(max(0.0, due - now))
                due += REPLAY_PACE_S
                self._wake.clear()
                ask, from_seq = self._wanted
                self.counters.replays += 1
                serving = asyncio.create_task(self._replay_once(context, endpoint, ask, from_seq, put))
                newer = asyncio.create_task(self._wake.wait())
                try:
                    await asyncio.wait((serving, newer), return_when=asyncio.FIRST_COMPLETED)
                    if serving.done():
                        serving.result()
                finally:
                    serving.cancel()
                    newer.cancel()
                    await asyncio.gather(serving, newer, return_exceptions=True)

    async def _replay_once(
        self, context: zmq.asyncio.Context, endpoint: str, ask: int, from_seq: int, put: Put
    ) -> None:
        with context.socket(zmq.DEALER) as dealer:
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.setsockopt(zmq.RCVHWM, RECEIVE_FRAMES_MAX)
            _tune(dealer)
            dealer.connect(endpoint)
            await dealer.send_multipart([b"", from_seq.to_bytes(SEQ_BYTES, "big")])
            while True:
                try:
                    async with asyncio.timeout(self._replay_wait_s):
                        frames = await dealer.recv_multipart()
                except TimeoutError:
                    self.counters.replays_failed += 1
                    await put(ReplayFailed(ask))
                    return
                answer = frames[1:] if frames[0] == b"" and len(frames) > 1 else frames
                if END_SEQ in answer[:2] and not answer[-1]:
                    await put(ReplayEnded(ask))
                    return
                frame = read_frame(answer)
                if frame is None:
                    self.counters.frames_malformed += 1
                    continue
                await put(FrameReplayed(ask, frame.seq, frame.payload))


def read_frame(frames: list[bytes]) -> FrameReceived | None:
    """A frame with or without its topic; None if it is neither."""
    if len(frames) == 3:
        number, payload = frames[1], frames[2]
    elif len(frames) == 2:
        number, payload = frames
    else:
        return None
    if len(number) != SEQ_BYTES or number == END_SEQ:
        return None
    return FrameReceived(int.from_bytes(number, "big"), payload)


def _tune(socket: zmq.asyncio.Socket) -> None:
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS_MIN)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MS_MAX)
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
