"""One suite over every ``LeaseStore``: in memory and in Postgres."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import pytest

from evenhand.core.errors import Fenced
from evenhand.core.ids import PoolId
from evenhand.memory import MemoryLeaseStore
from evenhand.ports import Checkpoint, Lease, LeaseStore
from evenhand.postgres.database import Database, DatabaseConfig
from evenhand.postgres.lease_store import PostgresLeaseStore

POOL, OTHER_POOL = PoolId("chat"), PoolId("code")
LONG_MS = 600_000

# The server's clock cannot be moved, so a lease is made to have run out.
RUN_OUT = "update evenhand.scheduler_lease set expires_at = clock_timestamp() - interval '1 second'"


@dataclass(frozen=True, slots=True)
class Subject:
    store: LeaseStore
    run_out: Callable[[], Awaitable[None]]
    """Let every lease's time pass."""


@pytest.fixture(params=["memory", "postgres"])
async def subject(request: pytest.FixtureRequest) -> AsyncIterator[Subject]:
    if request.param == "memory":
        now = [0]

        async def pass_time() -> None:
            now[0] += LONG_MS + 1

        yield Subject(MemoryLeaseStore(lambda: now[0]), pass_time)
        return
    dsn = request.getfixturevalue("postgres_dsn")
    async with await Database.open(DatabaseConfig(dsn, "test")) as database:

        async def run_out() -> None:
            async with database.connection() as connection:
                await connection.execute(RUN_OUT)

        yield Subject(PostgresLeaseStore(database), run_out)


async def taken(store: LeaseStore, holder: str, pool_id: PoolId = POOL) -> Lease:
    lease = await store.acquire(pool_id, holder, LONG_MS)
    assert lease is not None
    return lease


async def test_a_free_lease_is_taken_and_then_held(subject: Subject) -> None:
    lease = await taken(subject.store, "a")
    assert lease == Lease(POOL, "a", lease.term, LONG_MS)
    assert lease.term >= 1
    assert await subject.store.acquire(POOL, "b", LONG_MS) is None
    assert (await taken(subject.store, "b", OTHER_POOL)).holder == "b"
    await subject.store.renew(lease)


async def test_one_that_ran_out_is_taken_under_a_higher_term_and_not_revived(subject: Subject) -> None:
    first = await taken(subject.store, "a")
    await subject.run_out()
    with pytest.raises(Fenced):
        await subject.store.renew(first)
    second = await taken(subject.store, "b")
    assert second.term > first.term
    with pytest.raises(Fenced):
        await subject.store.renew(first)
    await subject.store.renew(second)


async def test_a_holder_that_comes_back_fences_its_former_life(subject: Subject) -> None:
    first = await taken(subject.store, "a")
    second = await taken(subject.store, "a")
    assert second.term > first.term
    with pytest.raises(Fenced):
        await subject.store.renew(first)


async def test_a_released_lease_is_free_at_once_and_terms_go_on(subject: Subject) -> None:
    first = await taken(subject.store, "a")
    await subject.store.release(first)
    second = await taken(subject.store, "b")
    assert second.term > first.term
    await subject.store.release(first)
    await subject.store.renew(second)


async def test_of_many_at_once_one_gets_it(subject: Subject) -> None:
    leases = await asyncio.gather(*(subject.store.acquire(POOL, f"h{n}", LONG_MS) for n in range(8)))
    assert sum(lease is not None for lease in leases) == 1


async def test_checkpoints_are_kept_under_the_current_term_alone(subject: Subject) -> None:
    store = subject.store
    assert await store.load_checkpoint(POOL) is None
    first = await taken(store, "a")
    await store.save_checkpoint(first, b"one")
    await store.save_checkpoint(first, b"two")
    assert await store.load_checkpoint(POOL) == Checkpoint(POOL, first.term, b"two")
    await subject.run_out()
    await store.save_checkpoint(first, b"three")
    second = await taken(store, "b")
    assert await store.load_checkpoint(POOL) == Checkpoint(POOL, first.term, b"three")
    with pytest.raises(Fenced):
        await store.save_checkpoint(first, b"late")
    await store.save_checkpoint(second, b"")
    assert await store.load_checkpoint(POOL) == Checkpoint(POOL, second.term, b"")
    assert await store.load_checkpoint(OTHER_POOL) is None


async def test_a_lease_that_was_never_given_saves_nothing(subject: Subject) -> None:
    with pytest.raises(Fenced):
        await subject.store.save_checkpoint(Lease(POOL, "a", 1, LONG_MS), b"x")
    with pytest.raises(Fenced):
        await subject.store.renew(Lease(POOL, "a", 1, LONG_MS))


# Postgres alone


async def test_a_checkpoint_under_way_delays_a_take_over(postgres_dsn: str) -> None:
    """What a former holder was writing is either seen by its successor or refused."""
    async with await Database.open(DatabaseConfig(postgres_dsn, "test")) as database:
        store = PostgresLeaseStore(database)
        first = await taken(store, "a")
        async with database.connection() as connection:
            await connection.execute(RUN_OUT)
            async with connection.transaction():
                await connection.execute("select from evenhand.scheduler_lease where pool_id = $1 for share", POOL)
                taking = asyncio.create_task(store.acquire(POOL, "b", LONG_MS))
                done, _ = await asyncio.wait([taking], timeout=0.2)
                assert not done
        second = await taking
        assert second is not None
        assert second.term > first.term
