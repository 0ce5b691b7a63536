"""The embedded Postgres: one owner, gone with it, back after a kill."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import asyncpg
import pytest

from evenhand.core.errors import InvalidConfig
from evenhand.local.database import EmbeddedDatabase

GONE_SECONDS_MAX = 10.0

OWNER = """
import sys
from pathlib import Path
from evenhand.local.database import EmbeddedDatabase
database = EmbeddedDatabase(Path(sys.argv[1]), durable=False)
database.start()
print(database.pid, flush=True)
sys.stdin.read()
"""


async def value(dsn: str, sql: str) -> object:
    connection = await asyncpg.connect(dsn)
    try:
        return await connection.fetchval(sql)
    finally:
        await connection.close()


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def gone(pid: int) -> None:
    async with asyncio.timeout(GONE_SECONDS_MAX):
        while lives(pid):
            await asyncio.sleep(0.02)


async def test_it_starts_answers_and_is_gone(tmp_path: Path) -> None:
    async with EmbeddedDatabase(tmp_path / "data", tcp_port=0, durable=False) as database:
        pid = database.pid
        assert pid is not None
        assert await value(database.dsn, "select 1") == 1
        assert await value(database.tcp_dsn, "select 2") == 2
        with pytest.raises(asyncpg.InvalidPasswordError):
            await value(database.tcp_dsn.replace("postgres:", "postgres:wrong"), "select 3")
    assert database.pid is None
    assert not lives(pid)


async def test_a_second_owner_is_refused_with_a_sentence(tmp_path: Path) -> None:
    async with EmbeddedDatabase(tmp_path, durable=False) as database:
        with pytest.raises(InvalidConfig, match=r"The database directory .* is in use by another process\.$"):
            async with EmbeddedDatabase(tmp_path, durable=False):
                pass
        assert await value(database.dsn, "select 1") == 1


async def test_after_kill_9_it_comes_back_with_what_was_committed(tmp_path: Path) -> None:
    async with EmbeddedDatabase(tmp_path, tcp_port=0, durable=False) as database:
        await value(database.dsn, "create table kept as select 7 as x")
        before = database.tcp_dsn
        await asyncio.to_thread(database.kill)
        assert database.pid is None
        await asyncio.to_thread(database.restart)
        assert database.tcp_dsn == before
        assert await value(database.tcp_dsn, "select x from kept") == 7


async def test_a_pid_file_that_names_another_process_is_stale(tmp_path: Path) -> None:
    async with EmbeddedDatabase(tmp_path, durable=False) as database:
        await value(database.dsn, "create table kept as select 7 as x")
        pid_file = tmp_path / "pg" / "postmaster.pid"
        lines = pid_file.read_text().splitlines()
        await asyncio.to_thread(database.kill)
    pid_file.write_text("\n".join([str(os.getppid()), *lines[1:]]) + "\n")
    async with EmbeddedDatabase(tmp_path, durable=False) as database:
        assert await value(database.dsn, "select x from kept") == 7


async def test_it_ends_when_its_owner_is_killed(tmp_path: Path) -> None:
    with subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-c", OWNER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as owner:
        assert owner.stdout is not None
        pid = int(await asyncio.to_thread(owner.stdout.readline))
        assert lives(pid)
        owner.send_signal(signal.SIGKILL)
        owner.wait()
        async with EmbeddedDatabase(tmp_path, durable=False) as database:
            assert await value(database.dsn, "select 1") == 1
    await gone(pid)


async def test_what_cannot_start_says_why(tmp_path: Path) -> None:
    async with EmbeddedDatabase(tmp_path / "first", tcp_port=0, durable=False) as first:
        port = int(first.tcp_dsn.rsplit(":", 1)[1].split("/")[0])
        with pytest.raises(InvalidConfig, match=f"Port {port} .* cannot be used: .*Address already in use"):
            async with EmbeddedDatabase(tmp_path / "second", tcp_port=port, durable=False):
                pass
    (tmp_path / "file").touch()
    with pytest.raises(InvalidConfig, match="cannot be used"):
        async with EmbeddedDatabase(tmp_path / "file" / "data"):
            pass
    (tmp_path / "first" / "pg" / "PG_VERSION").write_text("9\n")
    with pytest.raises(InvalidConfig, match="was made by Postgres 9"):
        async with EmbeddedDatabase(tmp_path / "first"):
            pass


async def test_a_long_path_moves_the_socket(tmp_path: Path) -> None:
    async with EmbeddedDatabase(tmp_path / ("x" * 120), durable=False) as database:
        assert await value(database.dsn, "select 1") == 1


async def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    """Where the path is long the socket lies in the common temporary folder, under a name that can be foretold."""
    cluster = tmp_path / "data" / "pg"
    cluster.mkdir(parents=True)
    cluster.chmod(0o777)
    with pytest.raises(InvalidConfig, match=r"pg belongs to somebody else or others may write to it"):
        async with EmbeddedDatabase(tmp_path / "data"):
            pass
