"""A bounded pool of connections to Postgres, and the one place where its faults get our names.

Connections are made when they are first needed, so a service may start before its database; until then, and
whenever the database is away, slow beyond the bound or shutting down, callers see ``Unavailable`` and may try
again on the same object. A pooled connection that died is replaced by itself.

Always: every statement has a time limit on the server and a longer one here, and no transaction idles for long
with locks held. Not here: retries, which belong to who knows what may be repeated.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self
from urllib.parse import parse_qsl, unquote, urlsplit

import asyncpg

from evenhand.core.errors import InvalidConfig, SchemaMismatch, Unavailable
from evenhand.loopback import is_loopback

if TYPE_CHECKING:
    Connection = asyncpg.pool.PoolConnectionProxy[asyncpg.Record]
    Pool = asyncpg.Pool[asyncpg.Record]

_AWAY = (
    asyncpg.PostgresConnectionError,
    asyncpg.OperatorInterventionError,
    asyncpg.InsufficientResourcesError,
    asyncpg.TransactionRollbackError,
    asyncpg.IdleInTransactionSessionTimeoutError,
    asyncpg.LockNotAvailableError,
    asyncpg.PostgresSystemError,
    asyncpg.ReadOnlySQLTransactionError,
    ConnectionError,
    TimeoutError,
)
"""Faults that trying again may cure: deadlocks, cancelled statements and a standby not yet promoted among them."""
_TLS_MODES = frozenset({"require", "verify-ca", "verify-full"})
_HOST_AND_PORT = re.compile(r"^(\[[^]]*\]|[^:]*)(:\d*)?$")
_REFUSED = (asyncpg.InvalidAuthorizationSpecificationError, asyncpg.InvalidCatalogNameError)


@dataclass(frozen=True, slots=True)
class DatabaseConfig:
    """How a service talks to Postgres."""

    dsn: str = field(repr=False)
    """``postgresql://USER:PASSWORD@HOST:PORT/DATABASE``, or ``…@/DATABASE?host=/socket/folder``."""
    service: str
    """Shown by the server as ``application_name``."""
    connections_max: int = 4
    connect_ms_max: int = 3_000
    acquire_ms_max: int = 5_000
    """Longest wait for a free connection of the pool."""
    statement_ms_max: int = 15_000
    idle_in_transaction_ms_max: int = 15_000


def plaintext_hosts(dsn: str, environment: Mapping[str, str]) -> tuple[str, ...]:
    """Servers beyond this machine that the address lets be reached without TLS.

    Unless it says ``sslmode=require`` or more, TLS is used if the server offers it, and anyone on the way may say
    that it does not. What the address leaves open comes from ``PGSSLMODE`` and ``PGHOST``. An address that makes
    no sense has no host; whoever connects is told.
    """
    try:
        parts = urlsplit(dsn)
    except ValueError:
        return ()
    query = dict(parse_qsl(parts.query))
    if (query.get("sslmode") or environment.get("PGSSLMODE", "")) in _TLS_MODES:
        return ()
    named = parts.netloc.rpartition("@")[2] or query.get("host") or environment.get("PGHOST", "")
    hosts = (unquote(_HOST_AND_PORT.sub(r"\1", each.strip())).strip("[]") for each in named.split(","))
    return tuple(host for host in hosts if host and not host.startswith("/") and not is_loopback(host))


class Database:
    """Owner of the pool. ``async with Database.open(config) as database``, or ``open`` and ``close``."""

    def __init__(self, config: DatabaseConfig, pool: "Pool") -> None:
        self.config = config
        self._pool = pool

    @classmethod
    async def open(cls, config: DatabaseConfig) -> Self:
        """Make the pool; it connects when a connection is first asked for."""
        pool = await asyncpg.create_pool(
            config.dsn,
            min_size=0,
            max_size=config.connections_max,
            timeout=config.connect_ms_max / 1000,
            command_timeout=config.statement_ms_max / 1000 + 2,
            max_inactive_connection_lifetime=60,
            server_settings={
                "application_name": f"evenhand-{config.service}",
                "statement_timeout": str(config.statement_ms_max),
                "idle_in_transaction_session_timeout": str(config.idle_in_transaction_ms_max),
                "timezone": "UTC",
            },
        )
        return cls(config, pool)

    @asynccontextmanager
    async def connection(self) -> AsyncIterator["Connection"]:
        """A connection of the pool; faults of the database inside the block become ours.

        Raises ``Unavailable`` (try again), ``InvalidConfig`` (refused login, no such database) or
        ``SchemaMismatch`` (a table or column is missing).
        """
        acquired = closed = False
        try:
            async with self._pool.acquire(timeout=self.config.acquire_ms_max / 1000) as connection:
                acquired = True
                try:
                    yield connection
                finally:
                    closed = _is_closed(connection)
        except ValueError as error:
            # An address that makes no sense is noticed when it is first used; what the block raises is its own.
            if acquired:
                raise
            raise InvalidConfig(f"The database address cannot be understood: {_said(error)}.") from error
        except _REFUSED as error:
            raise InvalidConfig(f"The database refuses this service: {error}.") from error
        except (
            asyncpg.UndefinedTableError,
            asyncpg.UndefinedColumnError,
            asyncpg.InvalidSchemaNameError,
        ) as error:
            raise SchemaMismatch(f"The database's schema is not this build's: {error}.") from error
        except _AWAY as error:
            raise Unavailable(f"The database is away: {_said(error)}.") from error
        except OSError as error:
            raise Unavailable(f"The database cannot be reached: {_said(error)}.") from error
        except asyncpg.InternalClientError as error:
            # What the client says when a connection broke while it was giving it back; it throws it away then.
            raise Unavailable(f"The connection to the database broke: {_said(error)}.") from error
        except asyncpg.InterfaceError as error:
            # A closed connection and a wrong argument are the same class there; only the first is the peer's.
            if not closed:
                raise
            raise Unavailable(f"The connection to the database is gone: {_said(error)}.") from error

    @asynccontextmanager
    async def transaction(self, snapshot: bool = False) -> AsyncIterator["Connection"]:
        """All of the block or nothing; with ``snapshot`` one repeatable, read-only view of everything."""
        async with self.connection() as connection:
            options = connection.transaction(
                isolation="repeatable_read" if snapshot else "read_committed", readonly=snapshot
            )
            async with options:
                yield connection

    async def close(self) -> None:
        """End all connections, waiting a little for those in use."""
        try:
            async with asyncio.timeout(2):
                await self._pool.close()
        except TimeoutError:
            self._pool.terminate()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _is_closed(connection: "Connection") -> bool:
    try:
        return connection.is_closed()
    except asyncpg.InterfaceError:
        # The pool takes a connection back by itself when the server closes it.
        return True


def _said(error: BaseException) -> str:
    return str(error).strip().rstrip(".") or type(error).__name__
