"""Frames from inside the engine's own process: numbered here, handed over without ever waiting.

``offer`` is called in the engine's scheduling loop. It appends to a bounded deque and returns; a full deque drops
the batch, and its number is missing, so the edge sees a gap and begins a new life of the map rather than keep a
wrong one. ``run`` is the other side, on the edge's own thread and loop: it encodes what was offered and delivers
it. There is no replay: a process that dies takes its cache along.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from evenhand.worker.source import FrameReceived, FrameSource, Put

OFFERED_BATCHES_MAX = 100_000
LOOK_S = 0.002
"""Between two looks at an empty deque. Looking costs less than waking another thread from the engine's loop."""


class PluginSource(FrameSource):
    """One engine rank's batches. ``offer`` may be called from one thread, ``run`` from another."""

    def __init__(self, batches_max: int = OFFERED_BATCHES_MAX) -> None:
        self.dropped = 0
        self._offered: deque[tuple[int, Any]] = deque()
        self._batches_max = batches_max
        self._next_seq = 0

    @property
    def replays(self) -> bool:
        return False

    def offer(self, batch: Any) -> bool:
        """Hand over one event batch, which nobody changes any more. False: dropped, for too many wait."""
        seq, self._next_seq = self._next_seq, self._next_seq + 1
        if len(self._offered) >= self._batches_max:
            self.dropped += 1
            return False
        self._offered.append((seq, batch))
        return True

    @property
    def waiting(self) -> int:
        """Batches offered and not delivered."""
        return len(self._offered)

    async def run(self, put: Put) -> None:
        encode: Callable[[Any], bytes] = msgspec.msgpack.Encoder().encode
        while True:
            while self._offered:
                seq, batch = self._offered.popleft()
                await put(FrameReceived(seq, encode(batch)))
            await asyncio.sleep(LOOK_S)

    def ask_replay(self, ask: int, from_seq: int) -> None:
        raise AssertionError("a source without replay is never asked for one")
