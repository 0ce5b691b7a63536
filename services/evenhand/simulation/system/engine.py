"""Simulated engines: the real batching model, stepped on virtual time, with its event sockets and its polls.

Beside the engine stands the truth the checkers compare with: which block keys it can find, by events that never
left it, and what each leg made it compute.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from evenhand.core.block_key import child_key, root_hash
from evenhand.engine.batching import Engine, StepResult
from evenhand.engine.content import TokenContent
from evenhand.engine.events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent
from evenhand.engine.kv_events import EventEncoder
from evenhand.engine.limits import EngineLimits, StepTime
from evenhand.engine.request import EngineRequest, RequestState
from evenhand.simulation.system.clock import EPOCH_MS, VirtualLoop
from evenhand.simulation.system.faults import Fault, Weather
from evenhand.simulation.system.process import Process
from evenhand.simulation.system.trace import Trace
from evenhand.worker.engine_metrics import EngineMetrics
from evenhand.worker.load import EngineModel, EnginePolled, EnginePoller
from evenhand.worker.source import (
    FrameReceived,
    FrameReplayed,
    FrameSource,
    Put,
    ReplayEnded,
    ReplayFailed,
    SourceConnected,
    SourceEvent,
)

MODEL = "sim"
WIRE_S = 0.001
RECONNECT_S = 0.1
REPLAY_TIMEOUT_S = 2.0
REORDER_S_MAX = 0.1
HIGH_WATER_MARK = 100_000
"""Frames that wait for an edge; beyond it they are lost, as on a real socket."""


@dataclass(slots=True)
class Leg:
    """One request inside an engine: what it computed, and who hears of its end."""

    ticket: str
    request: EngineRequest
    content: TokenContent
    told: Callable[["Leg", str], None]
    """Told ``first`` at the first token, then one of ``finished``, ``lost``."""
    prompt_tokens: int = 0
    """Prompt tokens the engine has taken in, cached ones included; 0 until the first token."""
    cached_tokens: int = 0
    output_tokens: int = 0
    end: str = ""


class SimulatedEngine:
    """One engine host: a life at a time, each with an empty cache and sequence numbers from 0."""

    def __init__(
        self,
        name: str,
        loop: VirtualLoop,
        limits: EngineLimits,
        step_time: StepTime,
        kept_frames_max: int,
        weather: Weather,
        trace: Trace,
    ) -> None:
        self.name = name
        self.limits = limits
        self.weather = weather
        self.up = False
        self.mute = False
        """True: polls are not answered."""
        self.entered: Callable[[SimulatedEngine], None] = lambda _engine: None
        """Told when a request has come in."""
        self.sources: list[EngineSource] = []
        self.legs: dict[str, Leg] = {}
        """Legs that have not ended, by ticket."""
        self.counted: dict[str, Leg] = {}
        """Every leg there ever was, by ticket."""
        self.lives = 0
        self._loop = loop
        self._step_time = step_time
        self._trace = trace
        self._encoder = EventEncoder()
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=kept_frames_max)
        self._stepping = False
        self._salts: dict[str, bytes] = {}
        self.start()

    # ---- life

    def start(self) -> None:
        """Begin a life."""
        self.up = True
        self.lives += 1
        self.engine = Engine(self.limits, self._step_time)
        self.started_at_ms = EPOCH_MS + self._loop.now_ns // 1_000_000
        self.sequence = 0
        self.key_of: dict[int | bytes, int] = {}
        self.prompt_total = self.cached_total = self.output_total = 0
        self._kept.clear()
        self._stepping = False
        self._trace.add(self.name, f"starts life {self.lives}")
        for source in tuple(self.sources):
            source.reconnect(RECONNECT_S)

    def crash(self) -> None:
        """End a life: what ran is lost, what was cached is gone."""
        self._trace.add(self.name, "crashes")
        self.up = False
        for source in self.sources:
            source.connected = False
        for leg in tuple(self.legs.values()):
            self.count(leg)
            self._end(leg, "lost")

    # ---- requests

    def submit(
        self,
        ticket: str,
        token_ids: Sequence[int],
        output_tokens_max: int,
        salt: str,
        told: Callable[[Leg, str], None],
    ) -> Leg:
        """A client's request has arrived."""
        content = TokenContent(token_ids, block_size=self.limits.block_size, cache_salt=salt)
        request = EngineRequest(f"{self.lives}.{len(self.counted)}", content, len(token_ids), output_tokens_max)
        self.engine.submit(request)
        leg = Leg(ticket, request, content, told)
        request.label = leg
        self.legs[ticket] = self.counted[ticket] = leg
        self.entered(self)
        self._go()
        return leg

    def cancel(self, leg: Leg) -> None:
        """A client's connection is gone."""
        if leg.end or self.legs.get(leg.ticket) is not leg:
            return
        self.count(leg)
        self.engine.cancel(leg.request)
        self._end(leg, "cancelled")

    def reset_cache(self) -> bool:
        """Forget the prefix cache; False while anything runs."""
        if not self.up or self._stepping or not self.engine.reset_prefix_cache():
            return False
        self._publish(self.engine.pool.take_events())
        return True

    def _go(self) -> None:
        if not self._stepping and self.up and self.engine.has_work:
            self._stepping = True
            result = self.engine.step()
            self._note(result.events)
            self._loop.call_later(result.duration_ns / 1e9, self._deliver, self.lives, result)

    def _deliver(self, life: int, result: StepResult) -> None:
        if life != self.lives or not self.up:
            return
        self._stepping = False
        self._publish(result.events)
        self.output_total += result.output_tokens
        for request in result.first_tokens:
            self.prompt_total += request.prompt_tokens
            self.cached_total += request.cached_tokens
            self._tell(request, "first")
        for request in result.finished:
            self._tell(request, "finished")
        self._go()

    def _tell(self, request: EngineRequest, what: str) -> None:
        leg = request.label
        assert isinstance(leg, Leg), "every request has its leg"
        if leg.end:
            return
        self.count(leg)
        if what == "finished":
            self._end(leg, what)
        else:
            leg.told(leg, what)

    def count(self, leg: Leg) -> None:
        """Bring a leg's counts up to date, as its stream would have told them."""
        if leg.end:
            return
        request = leg.request
        leg.output_tokens = self.engine.output_tokens(request)
        if leg.output_tokens or request.state is RequestState.FINISHED:
            leg.prompt_tokens, leg.cached_tokens = request.prompt_tokens, request.cached_tokens

    def _end(self, leg: Leg, end: str) -> None:
        leg.end = end
        self.legs.pop(leg.ticket, None)
        if end != "cancelled":
            leg.told(leg, end)

    # ---- events

    def _note(self, events: Sequence[KvEvent]) -> None:
        """Learn the keys of what was stored, from the events themselves."""
        for event in events:
            if not isinstance(event, BlockStored):
                continue
            parent = event.parent_block_hash
            if parent is None:
                extras = event.extra_keys[0] if event.extra_keys else None
                at = self._root(extras[0] if extras else "")
            else:
                at = self.key_of[parent].to_bytes(8, "big")
            size = event.block_size
            for index, name in enumerate(event.block_hashes):
                tokens = event.token_ids[index * size : (index + 1) * size]
                at = child_key(at, b"".join([token.to_bytes(4, "little") for token in tokens]))
                self.key_of[name] = int.from_bytes(at, "big")

    def _root(self, salt: str) -> bytes:
        root = self._salts.get(salt)
        if root is None:
            root = self._salts[salt] = root_hash(MODEL, "", salt)
        return root

    def findable_keys(self) -> frozenset[int]:
        """Keys of every block that a prompt could hit now."""
        return frozenset(self.key_of[name] for name in self.engine.pool.findable()) if self.up else frozenset()

    def _publish(self, events: tuple[KvEvent, ...]) -> None:
        if not events:
            return
        at_s = EPOCH_MS / 1000 + self._loop.time()
        payload = self._encoder.batch(at_s, events, 0)
        sequence = self.sequence
        self.sequence += 1
        self._kept.append((sequence, payload))
        stored = sum(len(event.block_hashes) for event in events if isinstance(event, BlockStored))
        removed = sum(len(event.block_hashes) for event in events if isinstance(event, BlockRemoved))
        cleared = sum(isinstance(event, AllBlocksCleared) for event in events)
        self._trace.add(self.name, f"frame {self.lives}.{sequence} +{stored} -{removed} !{cleared}")
        for source in self.sources:
            if source.connected and not self.weather.strikes(Fault.FRAMES_LOST):
                source.frame(sequence, payload)
                if self.weather.strikes(Fault.FRAMES_DOUBLED):
                    source.frame(sequence, payload)

    def replay(self, source: "EngineSource", ask: int, from_seq: int) -> None:
        """Answer a request for replay, if this engine answers."""
        if not self.up or self.weather.strikes(Fault.REPLAYS_LOST):
            source.deliver(ReplayFailed(ask), REPLAY_TIMEOUT_S)
            return
        for sequence, payload in tuple(self._kept):
            if sequence >= from_seq:
                source.deliver(FrameReplayed(ask, sequence, payload))
        source.deliver(ReplayEnded(ask))

    # ---- polls

    def metrics(self) -> EngineMetrics:
        """What its metrics page says."""
        pool = self.engine.pool
        return EngineMetrics(
            running=self.engine.running,
            waiting=len(self.engine.waiting),
            kv_used_fraction=pool.usage,
            prompt_tokens_total=self.prompt_total,
            cached_tokens_total=self.cached_total,
            output_tokens_total=self.output_total,
            process_started_at_ms=self.started_at_ms,
            block_size_tokens=self.limits.block_size,
            kv_blocks=self.limits.blocks - 1,
        )


class EngineSource(FrameSource):
    """The engine's event sockets, as one edge sees them."""

    def __init__(self, engine: SimulatedEngine, process: Process) -> None:
        self.connected = False
        self._engine = engine
        self._process = process
        self._inbox: asyncio.Queue[SourceEvent] = asyncio.Queue(HIGH_WATER_MARK)
        self._last_at_s = 0.0

    @property
    def replays(self) -> bool:
        return True

    async def run(self, put: Put) -> None:
        self._engine.sources.append(self)
        try:
            if self._engine.up:
                self.reconnect(WIRE_S)
            while True:
                await put(await self._inbox.get())
        finally:
            self._engine.sources.remove(self)

    def ask_replay(self, ask: int, from_seq: int) -> None:
        delay_s = self._engine.weather.delay_s(WIRE_S)
        self._process.later(delay_s, self._engine.replay, self, ask, from_seq)

    def reconnect(self, delay_s: float) -> None:
        """The engine's socket is there: connect, and say so."""
        self._process.later(self._engine.weather.delay_s(delay_s), self._connect)

    def _connect(self) -> None:
        if self._engine.up and not self.connected and self in self._engine.sources:
            self.connected = True
            self.deliver(SourceConnected())

    def frame(self, sequence: int, payload: bytes) -> None:
        """A frame on its way from the engine."""
        if self._engine.weather.strikes(Fault.FRAMES_REORDERED):
            delay_s = WIRE_S + self._engine.weather.delay_s(REORDER_S_MAX / 2)
            self._process.later(delay_s, self._arrive, FrameReceived(sequence, payload))
        else:
            self.deliver(FrameReceived(sequence, payload))

    def deliver(self, event: SourceEvent, least_s: float = 0.0) -> None:
        """Bring an event to the edge, behind those on their way."""
        now_s = self._process.loop.time()
        at_s = max(self._last_at_s + 1e-8, now_s + least_s + self._engine.weather.delay_s(WIRE_S))
        self._last_at_s = at_s
        self._process.later(at_s - now_s, self._arrive, event)

    def _arrive(self, event: SourceEvent) -> None:
        if not self._inbox.full():
            self._inbox.put_nowait(event)


class SimulatedPoller(EnginePoller):
    """An edge's polls of its engine, without HTTP."""

    def __init__(self, engine: SimulatedEngine, process: Process) -> None:
        super().__init__("http://127.0.0.1:1")
        self._engine = engine
        self._process = process
        self._said: EngineModel | None = None

    async def poll(self) -> EnginePolled:
        engine = self._engine
        await self._process.pause(engine.weather.delay_s(WIRE_S))
        if not engine.up or engine.mute:
            return EnginePolled(False, None, self._said)
        self._said = EngineModel(MODEL, engine.limits.model_tokens_max)
        return EnginePolled(True, engine.metrics(), self._said)
