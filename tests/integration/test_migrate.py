"""Migrations: once, in order, at the same time by many, and never on a schema this build does not know."""

import asyncio
import shutil
from pathlib import Path

import asyncpg
import pytest

from evenhand.core.errors import InvalidConfig, SchemaMismatch, Unavailable
from evenhand.postgres.migrate import known_migrations, main, migrate, require_schema

SOURCE = Path(__file__).parents[2] / "migrations"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the migrations with a second one behind them."""
    copy = tmp_path / "migrations"
    shutil.copytree(SOURCE, copy)
    number = len(known_migrations(copy)) + 1
    (copy / f"{number:04}_more.sql").write_text("create table evenhand.more (x integer);")
    return copy


async def check(dsn: str, folder: Path | None = None) -> None:
    connection = await asyncpg.connect(dsn)
    try:
        await require_schema(connection, folder)
    finally:
        await connection.close()


async def test_a_schema_is_made_once_and_then_known(postgres_empty_dsn: str) -> None:
    with pytest.raises(SchemaMismatch, match="has no Evenhand schema: run evenhand migrate"):
        await check(postgres_empty_dsn)
    done = await migrate(postgres_empty_dsn)
    assert done == [f"{known.version:04}_{known.name}" for known in known_migrations()]
    await check(postgres_empty_dsn)
    assert await migrate(postgres_empty_dsn) == []


async def test_many_at_once_apply_each_once(postgres_empty_dsn: str, folder: Path) -> None:
    results = await asyncio.gather(*(migrate(postgres_empty_dsn, folder) for _ in range(4)))
    assert sorted(len(done) for done in results) == [0, 0, 0, len(known_migrations(folder))]


async def test_older_and_later_databases_are_refused(postgres_dsn: str, folder: Path) -> None:
    with pytest.raises(SchemaMismatch, match="is at migration 1 and this build needs 2: run evenhand migrate"):
        await check(postgres_dsn, folder)
    assert await migrate(postgres_dsn, folder) == ["0002_more"]
    await check(postgres_dsn, folder)
    with pytest.raises(SchemaMismatch, match="has migration 2, which this build does not know"):
        await check(postgres_dsn)
    with pytest.raises(SchemaMismatch, match="has migration 2, which this build does not know"):
        await migrate(postgres_dsn)


async def test_an_edited_migration_is_refused(postgres_dsn: str, folder: Path) -> None:
    first = folder / "0001_initial.sql"
    first.write_text(first.read_text() + "\n-- edited\n")
    with pytest.raises(SchemaMismatch, match="0001_initial was edited after the database ran it"):
        await migrate(postgres_dsn, folder)
    with pytest.raises(SchemaMismatch, match="0001_initial was edited"):
        await check(postgres_dsn, folder)


async def test_a_failing_migration_leaves_nothing_of_itself(postgres_dsn: str, folder: Path) -> None:
    (folder / "0002_more.sql").write_text("create table evenhand.more (x integer); select 1/0;")
    with pytest.raises(InvalidConfig, match="refuses a migration: division by zero"):
        await migrate(postgres_dsn, folder)
    await check(postgres_dsn)
    connection = await asyncpg.connect(postgres_dsn)
    assert await connection.fetchval("select to_regclass('evenhand.more')") is None
    await connection.close()


def test_files_that_are_no_row_of_migrations_are_refused(folder: Path, tmp_path: Path) -> None:
    (folder / "0004_far.sql").write_text("select 1")
    with pytest.raises(InvalidConfig, match="Migration 3 is missing"):
        known_migrations(folder)
    (folder / "0004_far.sql").rename(folder / "far.sql")
    with pytest.raises(InvalidConfig, match=r"far\.sql is not named NNNN_name\.sql"):
        known_migrations(folder)
    with pytest.raises(InvalidConfig, match="There are no migrations"):
        known_migrations(tmp_path)


async def test_a_database_that_is_away_or_not_there_is_one_sentence(postgres_empty_dsn: str) -> None:
    with pytest.raises(Unavailable, match="cannot be reached"):
        await migrate("postgresql://postgres@127.0.0.1:1/x")
    with pytest.raises(InvalidConfig, match="refuses the login"):
        await migrate(postgres_empty_dsn.replace("/test_", "/missing_"))
    with pytest.raises(InvalidConfig, match="cannot be understood"):
        await migrate("nonsense://x")


def test_the_command_tells_what_it_did(postgres_empty_dsn: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--dsn", postgres_empty_dsn]) == 0
    assert "applied 0001_initial" in capsys.readouterr().out
    assert main(["--dsn", postgres_empty_dsn]) == 0
    assert "up to date" in capsys.readouterr().out
