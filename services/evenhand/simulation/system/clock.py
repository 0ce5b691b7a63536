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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
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


class _NoSelector:
    """There are no sockets: waiting is a jump to the next timer."""

    def __init__(self, loop: "VirtualLoop") -> None:
        self._loop = loop

    def select(self, timeout_s: float | None = None) -> list[Any]:
        if timeout_s is None:
            raise NothingLeft("Nothing is left to do: no task is ready and no timer is set.")
        if timeout_s > 0:
            self._loop.jump()
        return []


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop on virtual time."""

    def __init__(self, run_in_thread: RunInThread) -> None:
        """``run_in_thread`` does the work of ``asyncio.to_thread``."""
        super().__init__()
        self._now_s = 0.0
        self._selector = _NoSelector(self)
        self._clock_resolution = 1e-10
        self._run_in_thread = run_in_thread

    def time(self) -> float:
        return self._now_s

    @property
    def now_ns(self) -> int:
        """Virtual time since the beginning."""
        return round(self._now_s * 1e9)

    def jump(self) -> None:
        """Go to the next timer; the loop has just made sure that there is a live one."""
        scheduled: list[asyncio.TimerHandle] = self._scheduled  # type: ignore[attr-defined]
        self._now_s = max(self._now_s, scheduled[0].when())

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> "asyncio.Future[Any]":
        return self._run_in_thread(lambda: func(*args))

    def _process_events(self, event_list: list[Any]) -> None:
        return

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
