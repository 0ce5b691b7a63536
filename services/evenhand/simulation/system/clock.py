"""Virtual time: an event loop that never waits, and clocks that the services read in place of the machine's.

The loop's time jumps to the next timer whenever nothing is ready, so a simulated hour costs what happens in it. A
service asks the module ``time``; while a simulation runs, every module of the services that has imported it finds
``VirtualTime`` there instead. Whose clock it is follows from the running task's context: each simulated process
has a monotonic clock with an origin of its own, and a wall clock off by its host's skew.

What always holds: the order of callbacks depends on the order of the calls that set them alone; nothing waits.
"""

import asyncio
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass
from heapq import heappop, heappush
from pathlib import Path
from types import ModuleType
from typing import Any

from evenhand.worker import edge
from evenhand.worker.checkpoint import EdgeCheckpoint, decode_checkpoint

EPOCH_MS = 1_750_000_000_000
"""Wall clock, in milliseconds since 1970, at the beginning of every run."""
SKEW_MS_MAX = 3_000
"""How far a host's wall clock may be off, either way."""
SERVICES = ("evenhand.worker.", "evenhand.state.", "evenhand.scheduler.")
"""Packages whose modules read virtual time while a simulation runs."""


class NothingLeft(RuntimeError):
    """Nothing is ready and no timer is set: the run can never go on."""


@dataclass(slots=True)
class Clock:
    """One process's clocks, against the run's own time."""

    monotonic_origin_ns: int = 0
    wall_skew_ms: int = 0


CLOCK: ContextVar[Clock] = ContextVar("clock")
"""Clock of the process whose code runs; code of no process reads none."""

RunInThread = Callable[[Callable[[], Any]], "asyncio.Future[Any]"]


class Handle:
    """A call to come; what ``asyncio`` and its users need of its handles."""

    __slots__ = ("arguments", "call", "context", "when_s")

    def __init__(
        self, when_s: float, call: Callable[..., Any] | None, arguments: tuple[Any, ...], context: Context
    ) -> None:
        self.when_s = when_s
        self.call = call
        """None once it is cancelled."""
        self.arguments = arguments
        self.context = context

    def cancel(self) -> None:
        self.call = None
        self.arguments = ()

    def cancelled(self) -> bool:
        return self.call is None

    def when(self) -> float:
        return self.when_s


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop on virtual time: it has no sockets, and waiting is a jump to the next timer.

    It keeps its own queue of calls and its own timers, both in the order in which they were set; the loop of the
    standard library spends more on each call than most calls here take.
    """

    def __init__(self, run_in_thread: RunInThread) -> None:
        """``run_in_thread`` does the work of ``asyncio.to_thread``."""
        super().__init__()
        self._now_s = 0.0
        self._calls: deque[Handle] = deque()
        self._timers: list[tuple[float, int, Handle]] = []
        self._timers_set = 0
        self._stopping = False
        self._run_in_thread = run_in_thread

    def time(self) -> float:
        return self._now_s

    @property
    def now_ns(self) -> int:
        """Virtual time since the beginning."""
        return round(self._now_s * 1e9)

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> Handle:
        handle = Handle(self._now_s, callback, args, copy_context() if context is None else context)
        self._calls.append(handle)
        return handle

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> Handle:
        return self.call_at(self._now_s + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> Handle:
        handle = Handle(when, callback, args, copy_context() if context is None else context)
        self._timers_set += 1
        heappush(self._timers, (when, self._timers_set, handle))
        return handle

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> "asyncio.Future[Any]":
        return self._run_in_thread(lambda: func(*args))

    def _run_once(self) -> None:
        """Run what is ready, or jump to the next timer and run what is due then."""
        calls, timers = self._calls, self._timers
        if not calls and not self._stopping:
            while timers and timers[0][2].call is None:
                heappop(timers)
            if not timers:
                raise NothingLeft("Nothing is left to do: no task is ready and no timer is set.")
            self._now_s = max(self._now_s, timers[0][0])
        now_s = self._now_s
        while timers and timers[0][0] <= now_s:
            calls.append(heappop(timers)[2])
        for _ in range(len(calls)):
            handle = calls.popleft()
            call = handle.call
            if call is None:
                continue
            try:
                handle.context.run(call, *handle.arguments)
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException as error:  # a call's fault is told to the run, which ends as violated
                self.call_exception_handler({"message": f"A fault in {call}.", "exception": error})

    def _write_to_self(self) -> None:
        return


class VirtualTime(ModuleType):
    """Stands where a service's module has imported ``time``; has only what services use."""

    CLOCK_BOOTTIME = getattr(time, "CLOCK_BOOTTIME", 7)

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__("time")
        self._loop = loop

    def monotonic_ns(self) -> int:
        return self._loop.now_ns + CLOCK.get().monotonic_origin_ns

    def monotonic(self) -> float:
        return self.monotonic_ns() / 1e9

    def clock_gettime_ns(self, _clock: int) -> int:
        return self.monotonic_ns()

    def time_ns(self) -> int:
        return self._loop.now_ns + (EPOCH_MS + CLOCK.get().wall_skew_ms) * 1_000_000

    def time(self) -> float:
        return self.time_ns() / 1e9

    def perf_counter(self) -> float:
        """Computing takes no virtual time."""
        return self._loop.time()


class Disks:
    """Files of the simulated hosts: what a path held when its last write ended."""

    def __init__(self) -> None:
        self._files: dict[Path, bytes] = {}

    def write(self, path: Path, data: bytes) -> None:
        """As ``worker.checkpoint.write_checkpoint``."""
        self._files[path] = data

    def read(self, path: Path, worker_id: str, model: str) -> EdgeCheckpoint | None:
        """As ``worker.checkpoint.read_checkpoint``."""
        data = self._files.get(path)
        return None if data is None else decode_checkpoint(data, worker_id, model)

    def remove(self, path: Path) -> None:
        self._files.pop(path, None)


@contextmanager
def seams(loop: VirtualLoop, disks: Disks) -> Iterator[None]:
    """Put virtual time and simulated disks where the services look for the machine's, and take them away again."""
    virtual = VirtualTime(loop)
    replaced: list[tuple[ModuleType, str, object]] = []

    def put(module: ModuleType, name: str, stand_in: object) -> None:
        replaced.append((module, name, getattr(module, name)))
        setattr(module, name, stand_in)

    for name in sorted(sys.modules):
        if name.startswith(SERVICES) and getattr(sys.modules[name], "time", None) is time:
            put(sys.modules[name], "time", virtual)
    put(edge, "write_checkpoint", disks.write)
    put(edge, "read_checkpoint", disks.read)
    try:
        yield
    finally:
        for module, name, original in reversed(replaced):
            setattr(module, name, original)
