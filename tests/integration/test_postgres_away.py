"""A database that goes away, in the middle of whatever was under way, is ``Unavailable`` and then back."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from asyncpg.pool import PoolConnectionProxy

from evenhand.core.errors import InvalidConfig, Unavailable
from evenhand.local.database import EmbeddedDatabase
from evenhand.postgres.database import Database, DatabaseConfig

SECONDS_MAX = 60.0
"""Longest wait for what a kill brings about at once."""


async def idle(connection: PoolConnectionProxy, server: EmbeddedDatabase) -> None:
    await asyncio.to_thread(server.kill)
    while True:  # its own process answers until it has noticed
        await connection.execute("select 1")


async def in_a_statement(connection: PoolConnectionProxy, server: EmbeddedDatabase) -> None:
    statement = asyncio.ensure_future(connection.execute("select pg_sleep(30)"))
    await asyncio.sleep(0.1)
    await asyncio.to_thread(server.kill)
    await statement


async def in_a_transaction(connection: PoolConnectionProxy, server: EmbeddedDatabase) -> None:
    async with connection.transaction():
        await connection.execute("create table never (x integer)")
        gone = asyncio.Event()
        connection.add_termination_listener(lambda _: gone.set())
        await asyncio.to_thread(server.kill)
        await gone.wait()  # its own process would commit until it has noticed


@pytest.mark.parametrize("scene", [idle, in_a_statement, in_a_transaction])
async def test_a_kill_is_unavailable_and_the_pool_recovers(
    scene: Callable[[PoolConnectionProxy, EmbeddedDatabase], Awaitable[None]], tmp_path: Path
) -> None:
    async with (
        EmbeddedDatabase(tmp_path / "data", durable=False) as server,
        await Database.open(DatabaseConfig(server.dsn, "test", connections_max=1)) as database,
    ):
        async with asyncio.timeout(SECONDS_MAX):
            with pytest.raises(Unavailable):
                async with database.connection() as connection:
                    await scene(connection, server)
            with pytest.raises(Unavailable):
                async with database.transaction() as connection:
                    await connection.execute("select 1")
        await asyncio.to_thread(server.restart)
        async with asyncio.timeout(SECONDS_MAX), database.connection() as connection:
            assert await connection.fetchval("select to_regclass('never') is null")


async def test_a_statement_beyond_its_time_is_unavailable(postgres_dsn: str) -> None:
    config = DatabaseConfig(postgres_dsn, "test", connections_max=1, statement_ms_max=100, acquire_ms_max=100)
    async with await Database.open(config) as database:
        with pytest.raises(Unavailable, match="canceling statement due to statement timeout"):
            async with database.connection() as connection:
                await connection.execute("select pg_sleep(10)")
        async with database.connection() as connection:
            assert await connection.fetchval("select 1") == 1
            with pytest.raises(Unavailable):
                async with database.connection():
                    pass


async def test_a_refused_login_is_a_setting(postgres_dsn: str) -> None:
    missing = postgres_dsn.replace("/test_", "/missing_")
    async with await Database.open(DatabaseConfig(missing, "test")) as database:
        with pytest.raises(InvalidConfig, match=r"refuses this service: database .* does not exist"):
            async with database.connection():
                pass
    for address in ("nonsense://", "postgresql://u:secret@127.0.0.1:abc/x"):
        config = DatabaseConfig(address, "test")
        assert "secret" not in repr(config)
        async with await Database.open(config) as database:
            with pytest.raises(InvalidConfig, match="The database address cannot be understood"):
                async with database.connection():
                    pass


async def test_a_fault_of_the_block_itself_stays_what_it_is(postgres_dsn: str) -> None:
    async with await Database.open(DatabaseConfig(postgres_dsn, "test")) as database:
        with pytest.raises(ValueError, match="mine"):
            async with database.connection():
                raise ValueError("mine")
