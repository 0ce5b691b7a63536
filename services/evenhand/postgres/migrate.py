"""The schema's versions: plain SQL files, applied in order, each once and for ever.

``migrations/NNNN_name.sql`` run forward only, each in its own transaction together with the row that records its
version and SHA-256, all under one advisory lock, so that several services may call this at once. A file that was
applied and then edited is refused, and so is a database that knows versions this build does not: a half-known
schema is worse than none.

Services do not migrate by themselves; they call ``require_schema`` and refuse to be ready.
"""

import argparse
import asyncio
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import asyncpg

from evenhand.core.errors import InvalidConfig, SchemaMismatch, Unavailable
from evenhand.options import add_dsn, require_given

if TYPE_CHECKING:
    from evenhand.postgres.database import Connection

    AnyConnection = Connection | asyncpg.Connection[asyncpg.Record]

LOCK_KEY = 0x4556454E48414E44
"""``EVENHAND`` in ASCII: the advisory lock under which migrations run."""
LOCK_WAIT_MS_MAX = 60_000
CONNECT_SECONDS_MAX = 10.0
_FILE_NAME = re.compile(r"(\d{4})_([a-z0-9_]+)\.sql")

VERSIONS_EXIST = "select to_regclass('evenhand.schema_version') is not null"
APPLIED_VERSIONS = "select version, sha256 from evenhand.schema_version order by version"
RECORD_VERSION = "insert into evenhand.schema_version (version, name, sha256) values ($1, $2, $3)"


@dataclass(frozen=True, slots=True)
class Migration:
    """One file."""

    version: int
    name: str
    sql: str

    @property
    def sha256(self) -> bytes:
        return hashlib.sha256(self.sql.encode()).digest()


def known_migrations(folder: Path | None = None) -> tuple[Migration, ...]:
    """This build's migrations by version, from 1 without holes; raises ``InvalidConfig`` where they are not so."""
    folder = folder or _folder()
    migrations = []
    for file in sorted(folder.glob("*.sql")):
        match = _FILE_NAME.fullmatch(file.name)
        if match is None:
            raise InvalidConfig(f"The migration {file.name} is not named NNNN_name.sql.")
        migrations.append(Migration(int(match[1]), match[2], file.read_text(encoding="utf-8")))
    for place, migration in enumerate(migrations, start=1):
        if migration.version != place:
            raise InvalidConfig(f"Migration {place} is missing or there are two of it in {folder}.")
    if not migrations:
        raise InvalidConfig(f"There are no migrations in {folder}.")
    return tuple(migrations)


def _folder() -> Path:
    """In an installed package the files lie beside this module, in a source checkout at its root."""
    here = Path(__file__).resolve()
    for folder in (here.parent / "migrations", here.parents[3] / "migrations"):
        if folder.is_dir():
            return folder
    raise InvalidConfig("The migrations of this installation are missing.")


async def migrate(dsn: str, folder: Path | None = None) -> list[str]:
    """Apply what is missing; returns the names of what was applied, in order (empty: nothing was missing).

    Raises ``SchemaMismatch`` if the database holds an edited or unknown version, ``Unavailable`` if it is away or
    another migration does not end, ``InvalidConfig`` if it refuses the login or the SQL.
    """
    migrations = known_migrations(folder)
    connection = await _connect(dsn)
    try:
        await connection.execute(f"set lock_timeout = {LOCK_WAIT_MS_MAX}")
        await connection.execute("select pg_advisory_lock($1)", LOCK_KEY)
        applied = await _applied(connection)
        _require_known(migrations, applied)
        done = []
        for migration in migrations[len(applied) :]:
            async with connection.transaction():
                await connection.execute(migration.sql)
                await connection.execute(RECORD_VERSION, migration.version, migration.name, migration.sha256)
            done.append(f"{migration.version:04}_{migration.name}")
        return done
    except asyncpg.LockNotAvailableError as error:
        raise Unavailable("Another migration of this database does not end; try again later.") from error
    except (asyncpg.PostgresConnectionError, asyncpg.OperatorInterventionError, OSError) as error:
        raise Unavailable(f"The database went away during the migration: {error}.") from error
    except asyncpg.PostgresError as error:
        raise InvalidConfig(f"The database refuses a migration: {error}.") from error
    finally:
        await connection.close()


async def _connect(dsn: str) -> "asyncpg.Connection[asyncpg.Record]":
    try:
        return await asyncpg.connect(dsn, timeout=CONNECT_SECONDS_MAX)
    except (ValueError, asyncpg.ClientConfigurationError) as error:
        raise InvalidConfig(f"The database address cannot be understood: {error}.") from error
    except (OSError, asyncpg.CannotConnectNowError, asyncpg.PostgresConnectionError) as error:
        raise Unavailable(f"The database cannot be reached: {str(error).strip() or 'no answer'}.") from error
    except asyncpg.PostgresError as error:
        raise InvalidConfig(f"The database refuses the login: {error}.") from error


async def _applied(connection: "AnyConnection") -> Mapping[int, bytes]:
    if not await connection.fetchval(VERSIONS_EXIST):
        return {}
    return {row["version"]: row["sha256"] for row in await connection.fetch(APPLIED_VERSIONS)}


def _require_known(migrations: Sequence[Migration], applied: Mapping[int, bytes]) -> None:
    known = {migration.version: migration for migration in migrations}
    for place, (version, sha256) in enumerate(sorted(applied.items()), start=1):
        if version not in known:
            raise SchemaMismatch(
                f"The database has migration {version}, which this build does not know: a later one made it."
            )
        if version != place:
            raise SchemaMismatch(f"The database lacks migration {place} but has later ones.")
        if sha256 != known[version].sha256:
            raise SchemaMismatch(
                f"Migration {version:04}_{known[version].name} was edited after the database ran it; "
                f"add a migration instead."
            )


async def require_schema(connection: "AnyConnection", folder: Path | None = None) -> None:
    """Return if the database's schema is exactly this build's; else raise ``SchemaMismatch`` in one sentence."""
    migrations = known_migrations(folder)
    applied = await _applied(connection)
    if not applied:
        raise SchemaMismatch("The database has no Evenhand schema: run evenhand migrate on it first.")
    _require_known(migrations, applied)
    if len(applied) < len(migrations):
        raise SchemaMismatch(
            f"The database is at migration {len(applied)} and this build needs {len(migrations)}: "
            f"run evenhand migrate on it first."
        )


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Options of the command line; ends the process with usage and code 2 where they make no sense."""
    parser = argparse.ArgumentParser(
        prog="evenhand migrate", description="Bring a database's schema to this version."
    )
    add_dsn(parser)
    arguments = parser.parse_args(argv)
    require_given(parser, arguments, "dsn")
    return arguments


def main(argv: Sequence[str]) -> int:
    """``evenhand migrate --dsn …``."""
    arguments = parse(argv)
    done = asyncio.run(migrate(arguments.dsn))
    for name in done:
        print(f"applied {name}")
    if not done:
        print("nothing to apply: the schema is up to date")
    return 0
