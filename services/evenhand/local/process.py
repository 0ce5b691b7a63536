"""Child processes that do not outlive their parent and stop when told.

A child is started in its own process group, with the parent's death wired to its own (Linux), so that neither
Ctrl-C nor ``kill -9`` of the parent leaves anything running. Its log goes to a file; the last lines are quoted
when it fails to start.

What wires it is a line of Python that runs in the child and then becomes the program. It is not done between fork
and exec: the parent has threads (gRPC's among them), and code that runs in a fork of such a process may crash.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

from evenhand.core.errors import Unavailable

STOP_SECONDS_MAX = 8.0
"""After SIGTERM a child has this long before SIGKILL."""

READY_POLL_SECONDS = 0.05
LOG_TAIL_LINES = 8
_DIE_WITH_PARENT = (
    "import ctypes, os, sys; "
    f"ctypes.CDLL(None).prctl(1, {int(signal.SIGKILL)}); "  # 1 is PR_SET_PDEATHSIG
    "os.getppid() == int(sys.argv[1]) or os._exit(1); "
    "os.execvp(sys.argv[2], sys.argv[2:])"
)


def _bound_to_us(arguments: Sequence[str]) -> tuple[str, ...]:
    """The command line behind the line that binds it to this process; as it is where the system cannot bind."""
    if sys.platform != "linux":
        return tuple(arguments)
    return (sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid()), *arguments)


class ManagedProcess:
    """One child process. ``start`` returns once it is ready; ``stop`` returns once it is gone."""

    def __init__(
        self, name: str, arguments: Sequence[str], log_file: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self.arguments = tuple(arguments)
        self.log_file = log_file
        self.environment = dict(environment or {})
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def start(self, ready: Callable[[], Awaitable[bool]], timeout_s: float = 60.0) -> None:
        """Start and wait until ``ready()`` is true.

        Raises ``Unavailable`` with one sentence, the last log lines behind it, if the child ends or stays unready.
        """
        with self.log_file.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *_bound_to_us(self.arguments),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **self.environment},
                process_group=0,
            )
        try:
            async with asyncio.timeout(timeout_s):
                while not await ready():
                    if not self.running:
                        raise Unavailable(self._failure(f"ended with exit code {self._process.returncode}"))
                    await asyncio.sleep(READY_POLL_SECONDS)
        except TimeoutError:
            await self.stop()
            raise Unavailable(self._failure(f"was not ready within {timeout_s:.0f} s")) from None
        except BaseException:
            await self.stop()
            raise

    def _failure(self, what: str) -> str:
        tail = self.log_file.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        return f"The {self.name} {what}; its log {self.log_file} ends with:\n  " + "\n  ".join(tail)

    def kill(self) -> None:
        """``kill -9`` of the child's whole group; harmless if it is gone."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            try:
                os.killpg(self._process.pid, number)
            except ProcessLookupError:
                return

    async def wait(self) -> int:
        """Exit code, once the child has ended."""
        assert self._process is not None, f"{self.name} was never started"
        return await self._process.wait()

    async def stop(self) -> None:
        """SIGTERM, then SIGKILL if it is still there after ``STOP_SECONDS_MAX``."""
        if not self.running:
            return
        self._signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(STOP_SECONDS_MAX):
                await self.wait()
        except TimeoutError:
            self.kill()
            await self.wait()
