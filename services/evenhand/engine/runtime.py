"""Runs an ``Engine`` at the pace of the clock and hands its tokens to whoever waits for them.

::

    submit ──▶ Engine ◀── step ── pacing task ── sleeps the step's duration ──▶ publish events, wake streams
                  ▲                                                                      │
    cancel ───────┘                          Stream.wait ◀──────────────────────────────┘

The clock only paces; every choice is the engine's and depends on nothing but the order of calls. One event
loop owns engine, streams and publisher.

Holds always: a stream ends exactly once, finished, cancelled or lost; a lost one belonged to a life of the
engine that a restart ended.
"""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from evenhand.core.errors import Unavailable
from evenhand.engine.batching import Engine, StepResult
from evenhand.engine.config import EngineConfig
from evenhand.engine.content import TokenContent
from evenhand.engine.kv_events import EventPublisher
from evenhand.engine.metrics import EngineMetrics
from evenhand.engine.request import EngineRequest
from evenhand.engine.waiting import Fcfs, LongestPrefixFirst

BEHIND_MAX_S = 0.25
"""How far the pace may fall behind the clock and still catch up; beyond it, time is lost instead."""


class StreamState(Enum):
    """What became of a request, as its client sees it."""

    OPEN = "open"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Progress:
    """What came since the last look."""

    token_ids: list[int]
    state: StreamState


class Stream:
    """One client's view of one request."""

    __slots__ = ("_changed", "_taken", "arrived_s", "content", "request", "state", "token_at_s", "tokens")

    def __init__(self, content: TokenContent, arrived_s: float) -> None:
        self.content = content
        self.arrived_s = arrived_s
        self.token_at_s = arrived_s
        self.state = StreamState.OPEN
        self.tokens = 0
        """Output tokens there are by now."""
        self.request: EngineRequest
        self._taken = 0
        self._changed = asyncio.Event()

    async def wait(self) -> Progress:
        """The output tokens since the last call, at least one unless the stream has ended."""
        while self._taken == self.tokens and self.state is StreamState.OPEN:
            self._changed.clear()
            await self._changed.wait()
        start = self.content.prompt_tokens + self._taken
        self._taken = self.tokens
        return Progress(self.content.token_ids(start, self.content.prompt_tokens + self.tokens), self.state)

    def update(self, tokens: int, state: StreamState) -> None:
        """New tokens or the end; wakes who waits."""
        self.tokens = tokens
        self.state = state
        self._changed.set()


@dataclass(slots=True)
class EngineFaults:
    """Faults of the engine itself; those of its wire are the publisher's."""

    full_report: bool = False
    unhealthy: bool = False


class EngineRuntime:
    """One engine with its clock, its metrics and its event publisher.

    ``now_s`` gives Unix time, for time stamps only.
    """

    def __init__(self, config: EngineConfig, publisher: EventPublisher, now_s: Callable[[], float]) -> None:
        self.config = config
        self.publisher = publisher
        self.faults = EngineFaults()
        self.open_streams: dict[str, Stream] = {}
        self._now_s = now_s
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._submitted = 0
        self.engine, self.metrics = self._new_life()

    def start(self) -> None:
        """Begin to step."""
        self._task = asyncio.get_running_loop().create_task(self._pace())

    async def stop(self) -> None:
        """Stop stepping and lose what is open."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        self._lose_streams()

    def submit(self, content: TokenContent, output_tokens_max: int, *, full_report: bool = False) -> Stream:
        """Queue a request. InvalidRequest if it can never run, Unavailable if too many wait."""
        if len(self.engine.waiting) >= self.config.max_queued:
            raise Unavailable(f"The engine's queue is full: {self.config.max_queued} requests are waiting.")
        stream = Stream(content, asyncio.get_running_loop().time())
        self._submitted += 1
        request = EngineRequest(
            f"r{self._submitted}",
            content,
            content.prompt_tokens,
            output_tokens_max,
            full_report=full_report or self.faults.full_report,
            label=stream,
        )
        self.engine.submit(request)
        stream.request = request
        self.open_streams[request.request_id] = stream
        self._wake.set()
        return stream

    def cancel(self, stream: Stream) -> None:
        """End a stream whose client went away; its blocks are free at once. Nothing if it has ended."""
        if stream.state is not StreamState.OPEN:
            return
        self.engine.cancel(stream.request)
        self._close(stream, StreamState.CANCELLED)
        self.metrics.success["abort"].inc()

    def reset_prefix_cache(self) -> bool:
        """Forget the prefix cache; refused while requests run. The event goes out with the next step."""
        return self.engine.reset_prefix_cache()

    def restart(self) -> None:
        """A restart in place: all requests are lost, the cache is empty, sequence numbers begin again."""
        self._lose_streams()
        self.engine, self.metrics = self._new_life()
        self.publisher.restart()

    def _new_life(self) -> tuple[Engine, EngineMetrics]:
        order = Fcfs() if self.config.order == "fcfs" else LongestPrefixFirst()
        engine = Engine(self.config.limits, self.config.step_time, order=order)
        metrics = EngineMetrics(self.config.model, self.config.data_parallel_rank, engine, self._now_s())
        return engine, metrics

    async def _pace(self) -> None:
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        while True:
            if not self.engine.has_work:
                self._wake.clear()
                await self._wake.wait()
                due_s = loop.time()
            engine = self.engine
            result = engine.step()
            due_s = max(due_s, loop.time() - BEHIND_MAX_S) + result.duration_ns / 1e9
            await asyncio.sleep(max(0.0, due_s - loop.time()))
            if engine is self.engine:
                self._deliver(result, loop.time())

    def _deliver(self, result: StepResult, now_s: float) -> None:
        """The end of a step: count, publish, and give every stream its tokens."""
        metrics = self.metrics
        for request in result.admitted:
            if request.preemptions == 0:
                metrics.prefix_queries.inc(request.prompt_tokens)
                metrics.prefix_hits.inc(request.cached_tokens)
        for request in result.first_tokens:
            metrics.prompt_tokens.inc(request.prompt_tokens)
            metrics.prompt_tokens_cached.inc(request.cached_tokens)
            assert isinstance(request.label, Stream), "every request of a runtime has a stream"
            metrics.first_token_s.observe(now_s - request.label.arrived_s)
        metrics.generation_tokens.inc(result.output_tokens)
        metrics.preemptions.inc(len(result.preempted))
        self.publisher.publish(result.events)
        for request in (*self.engine.running_requests(), *result.finished):
            stream = request.label
            assert isinstance(stream, Stream), "every request of a runtime has a stream"
            tokens = self.engine.output_tokens(request)
            if stream.state is not StreamState.OPEN or tokens == stream.tokens:
                continue
            if stream.tokens:
                metrics.inter_token_s.observe((now_s - stream.token_at_s) / (tokens - stream.tokens))
            stream.token_at_s = now_s
            stream.update(tokens, StreamState.OPEN)
        for request in result.finished:
            stream = request.label
            assert isinstance(stream, Stream), "every request of a runtime has a stream"
            if stream.state is StreamState.OPEN:
                metrics.request_s.observe(now_s - stream.arrived_s)
                metrics.success["length"].inc()
                self._close(stream, StreamState.FINISHED)

    def _close(self, stream: Stream, state: StreamState) -> None:
        del self.open_streams[stream.request.request_id]
        stream.update(stream.tokens, state)

    def _lose_streams(self) -> None:
        for stream in list(self.open_streams.values()):
            self._close(stream, StreamState.LOST)
