"""Tenants, pools and credentials in Postgres, as administrators left them.

Readers poll ``revision``, one row that grows with every change of the three tables, and read the rest only then.
Of an API key only its SHA-256 is stored: keys are long and random, so a plain hash is enough, and whoever reads
the table can use none of them.
"""

from evenhand.core.facts import TenantSpec, TenantState
from evenhand.core.ids import PoolId, TenantId
from evenhand.ports import Directory, PoolSpec, Principal
from evenhand.postgres.database import Database

TENANTS = """
select tenant_id, weight, concurrency_max, queue_length_max, queue_bytes_max, cache_domain, state
from evenhand.tenant order by tenant_id
"""

POOLS = """
select pool_id, model, block_size_tokens, key_scheme, salt_generation from evenhand.pool order by pool_id
"""

# The first to announce itself defines the pool; whoever comes second reads what the first one wrote.
REGISTER_POOL = """
insert into evenhand.pool (pool_id, model, block_size_tokens, key_scheme, salt_generation)
values ($1, $2, $3, $4, $5) on conflict (pool_id) do nothing
"""
POOL = """
select pool_id, model, block_size_tokens, key_scheme, salt_generation from evenhand.pool where pool_id = $1
"""

PRINCIPAL = """
select principal, role, tenants, gateway, (extract(epoch from expires_at) * 1000)::bigint as expires_at_ms
from evenhand.api_key
where key_sha256 = $1 and revoked_at is null and (expires_at is null or expires_at > clock_timestamp())
"""

REVISION = "select revision from evenhand.directory_revision"


class PostgresDirectory(Directory):
    """``Directory`` in Postgres."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def tenants(self) -> tuple[TenantSpec, ...]:
        async with self._database.connection() as connection:
            rows = await connection.fetch(TENANTS)
        return tuple(
            TenantSpec(
                tenant_id=TenantId(row["tenant_id"]),
                weight=row["weight"],
                concurrency_max=row["concurrency_max"],
                queue_length_max=row["queue_length_max"],
                queue_bytes_max=row["queue_bytes_max"],
                cache_domain=row["cache_domain"],
                state=TenantState(row["state"]),
            )
            for row in rows
        )

    async def pools(self) -> tuple[PoolSpec, ...]:
        async with self._database.connection() as connection:
            rows = await connection.fetch(POOLS)
        return tuple(PoolSpec(PoolId(row[0]), row[1], row[2], row[3], row[4]) for row in rows)

    async def register_pool(self, pool: PoolSpec) -> PoolSpec:
        async with self._database.connection() as connection:
            row = await connection.fetchrow(POOL, pool.pool_id)
            if row is None:
                await connection.execute(
                    REGISTER_POOL,
                    pool.pool_id,
                    pool.model,
                    pool.block_size_tokens,
                    pool.key_scheme,
                    pool.salt_generation,
                )
                row = await connection.fetchrow(POOL, pool.pool_id)
        assert row is not None, "a pool that was just registered is not there"
        return PoolSpec(PoolId(row[0]), row[1], row[2], row[3], row[4])

    async def principal_of(self, key_sha256: bytes) -> Principal | None:
        async with self._database.connection() as connection:
            row = await connection.fetchrow(PRINCIPAL, key_sha256)
        if row is None:
            return None
        tenants = tuple(TenantId(tenant) for tenant in row["tenants"])
        return Principal(row["principal"], row["role"], tenants, row["gateway"], row["expires_at_ms"])

    async def revision(self) -> int:
        async with self._database.connection() as connection:
            revision: int = await connection.fetchval(REVISION)
        return revision
