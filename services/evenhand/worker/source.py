"""Where an engine's frames come from, as the edge sees it: one interface, two sources.

``ZmqSource`` reads a running engine's sockets; ``PluginSource`` is fed inside the engine's own process. Both put
``SourceEvent``s on the edge's bounded queue and wait when it is full; what an engine sends meanwhile its own
buffers hold or drop, and a drop shows as a gap.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol


@dataclass(slots=True)
class FrameReceived:
    """A frame from the engine as it happens. Treat as frozen; it is made once a frame."""

    seq: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class SourceConnected:
    """The event socket is connected; whatever was sent before may be missing."""


@dataclass(slots=True)
class FrameReplayed:
    """A frame of replay ``ask``. Treat as frozen."""

    ask: int
    seq: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class ReplayEnded:
    """Replay ``ask`` is complete."""

    ask: int


@dataclass(frozen=True, slots=True)
class ReplayFailed:
    """Replay ``ask`` was not answered in time."""

    ask: int


SourceEvent = FrameReceived | SourceConnected | FrameReplayed | ReplayEnded | ReplayFailed
Put = Callable[[SourceEvent], Awaitable[None]]


class FrameSource(Protocol):
    """A source of one engine rank's frames."""

    @property
    def replays(self) -> bool:
        """Whether past frames can be asked for."""
        ...

    async def run(self, put: Put) -> None:
        """Deliver until cancelled; connections are made again by themselves."""
        ...

    def ask_replay(self, ask: int, from_seq: int) -> None:
        """Begin replay number ``ask``; one under way is given up, and nothing more of it is delivered but what is
        on its way already."""
        ...
