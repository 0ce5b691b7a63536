"""Fenced leases and checkpoints in Postgres.

The server's clock alone decides who holds what. A term grows with every change of owner and its row is never
deleted, so a former owner can always be told from the present one, whatever it believes. Locks are row locks of
one statement: a checkpoint that is being written delays a take-over, and one that comes after it is refused.
"""

from evenhand.core.errors import Fenced
from evenhand.core.ids import PoolId
from evenhand.ports import Checkpoint, Lease, LeaseStore
from evenhand.postgres.database import Database

# Free, run out, or the holder's own: take it under the next term. The clock is read when the row is at hand, not
# when the statement began to wait for it.
ACQUIRE = """
insert into evenhand.scheduler_lease as held (pool_id, holder, term, expires_at)
values ($1, $2, 1, clock_timestamp() + $3 * interval '1 millisecond')
on conflict (pool_id) do update
    set holder = excluded.holder,
        term = held.term + 1,
        expires_at = clock_timestamp() + $3 * interval '1 millisecond'
    where held.expires_at <= clock_timestamp() or held.holder = excluded.holder
returning term
"""

# A lease that ran out is not revived: somebody may have acted on its end.
RENEW = """
update evenhand.scheduler_lease
set expires_at = clock_timestamp() + $3 * interval '1 millisecond'
where pool_id = $1 and term = $2 and expires_at > clock_timestamp()
returning term
"""

# The row stays, so that terms go on growing.
RELEASE = """
update evenhand.scheduler_lease set expires_at = clock_timestamp() where pool_id = $1 and term = $2
"""

SAVE_CHECKPOINT = """
insert into evenhand.scheduler_checkpoint (pool_id, term, payload, saved_at)
select held.pool_id, held.term, $3, clock_timestamp()
from evenhand.scheduler_lease held where held.pool_id = $1 and held.term = $2
for share
on conflict (pool_id) do update
    set term = excluded.term, payload = excluded.payload, saved_at = excluded.saved_at
returning term
"""

LOAD_CHECKPOINT = "select term, payload from evenhand.scheduler_checkpoint where pool_id = $1"


class PostgresLeaseStore(LeaseStore):
    """``LeaseStore`` in Postgres."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def acquire(self, pool_id: PoolId, holder: str, ttl_ms: int) -> Lease | None:
        async with self._database.connection() as connection:
            term = await connection.fetchval(ACQUIRE, pool_id, holder, ttl_ms)
        return None if term is None else Lease(pool_id, holder, term, ttl_ms)

    async def renew(self, lease: Lease) -> None:
        async with self._database.connection() as connection:
            term = await connection.fetchval(RENEW, lease.pool_id, lease.term, lease.ttl_ms)
        if term is None:
            raise Fenced(f"Term {lease.term} of pool {lease.pool_id} is over: its lease ran out or was taken.")

    async def release(self, lease: Lease) -> None:
        async with self._database.connection() as connection:
            await connection.execute(RELEASE, lease.pool_id, lease.term)

    async def save_checkpoint(self, lease: Lease, payload: bytes) -> None:
        async with self._database.connection() as connection:
            term = await connection.fetchval(SAVE_CHECKPOINT, lease.pool_id, lease.term, payload)
        if term is None:
            raise Fenced(f"Term {lease.term} of pool {lease.pool_id} is over: another scheduler owns it.")

    async def load_checkpoint(self, pool_id: PoolId) -> Checkpoint | None:
        async with self._database.connection() as connection:
            row = await connection.fetchrow(LOAD_CHECKPOINT, pool_id)
        return None if row is None else Checkpoint(pool_id, row["term"], row["payload"])
