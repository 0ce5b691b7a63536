"""One suite over every ``MapStore``: in memory and in Postgres."""

import asyncio
import random
from collections.abc import AsyncIterator

import asyncpg
import pytest

from evenhand.core.block_key import pack_keys, unpack_keys
from evenhand.core.errors import Fenced, SchemaMismatch
from evenhand.core.ids import BlockKey, Epoch, PoolId, Seq, WorkerId
from evenhand.core.kv import Cleared, KvOperation, Removed, Stored, Tier, WorkerAnnounced, WorkerPosition
from evenhand.memory import MemoryMapStore
from evenhand.ports import LogPosition, MapCommit, MapStore, StoredMap, WorkerDelta
from evenhand.postgres.database import Database, DatabaseConfig
from evenhand.postgres.map_store import PostgresMapStore

PARTITIONS = 4
FIRST, SECOND = WorkerId("w1"), WorkerId("w2")
HIGH = 2**64 - 1


@pytest.fixture(params=["memory", "postgres"])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[MapStore]:
    if request.param == "memory":
        yield MemoryMapStore()
        return
    dsn = request.getfixturevalue("postgres_dsn")
    async with await Database.open(DatabaseConfig(dsn, "test")) as database:
        yield PostgresMapStore(database, PARTITIONS)


@pytest.fixture
async def database(postgres_dsn: str) -> AsyncIterator[Database]:
    async with await Database.open(DatabaseConfig(postgres_dsn, "test")) as opened:
        yield opened


def at(offset: int) -> LogPosition:
    return LogPosition(offset, bytes([offset % 256]) * 32)


def position(seq: int, epoch: int = 1, complete: bool = True, left: bool = False) -> WorkerPosition:
    return WorkerPosition(Epoch(epoch), Seq(seq), complete, left)


def delta(worker_id: WorkerId, seq: int, *operations: KvOperation, replaced: bool = False) -> WorkerDelta:
    return WorkerDelta(worker_id, position(seq), None, replaced, operations)


def commit(before: int | None, after: int, *deltas: WorkerDelta, partition: int = 0) -> MapCommit:
    expected = {} if before is None else {partition: at(before)}
    return MapCommit(expected, {partition: at(after)}, deltas)


def held(stored: StoredMap) -> dict[WorkerId, dict[Tier, set[int]]]:
    found: dict[WorkerId, dict[Tier, set[int]]] = {}
    for worker in stored.workers:
        for tier, packed in worker.held:
            keys = unpack_keys(packed)
            assert len(set(keys)) == len(keys), "a key is there twice"
            found.setdefault(worker.worker_id, {})[tier] = set(keys)
    return found


def announced(worker_id: WorkerId, seq: int = 0) -> WorkerAnnounced:
    return WorkerAnnounced(
        worker_id=worker_id,
        pool_id=PoolId("chat"),
        epoch=Epoch(1),
        address="http://127.0.0.1:8000",
        model="llama",
        block_size_tokens=16,
        key_scheme="evenhand.block.v1",
        kv_blocks=1000,
        slots=8,
        seq=Seq(seq),
    )


async def test_an_empty_store_has_nothing(store: MapStore) -> None:
    assert await store.load() == StoredMap((), {})
    assert await store.positions() == {}


async def test_what_is_committed_is_loaded(store: MapStore) -> None:
    await store.commit(
        commit(
            None, 5, delta(FIRST, 1, Stored((1, 2, HIGH)), Stored((7,), Tier.HOST)), delta(SECOND, 4, Stored((2,)))
        )
    )
    await store.commit(commit(5, 6, delta(FIRST, 2, Removed((2,)), Stored((3,)))))
    stored = await store.load()
    assert held(stored) == {FIRST: {Tier.DEVICE: {1, 3, HIGH}, Tier.HOST: {7}}, SECOND: {Tier.DEVICE: {2}}}
    assert [(worker.worker_id, worker.position) for worker in stored.workers] == [
        (FIRST, position(2)),
        (SECOND, position(4)),
    ]
    assert stored.positions == await store.positions() == {0: at(6)}


async def test_partitions_move_apart_and_together(store: MapStore) -> None:
    await store.commit(commit(None, 5))
    await store.commit(commit(None, 9, partition=1))
    await store.commit(MapCommit({0: at(5), 1: at(9)}, {0: at(6), 1: at(10), 2: at(1)}, ()))
    assert await store.positions() == {0: at(6), 1: at(10), 2: at(1)}


@pytest.mark.parametrize(
    "wrong",
    [
        MapCommit({0: LogPosition(4, at(5).digest_before)}, {0: at(6)}, ()),
        MapCommit({0: LogPosition(5, b"\1" * 32)}, {0: at(6)}, ()),
        MapCommit({}, {0: at(6)}, ()),
        MapCommit({0: at(5), 1: at(1)}, {0: at(6), 1: at(2)}, ()),
    ],
    ids=["other offset", "other digest", "believed new", "one of two is not there"],
)
async def test_a_commit_from_other_positions_is_fenced_and_changes_nothing(
    store: MapStore, wrong: MapCommit
) -> None:
    await store.commit(commit(None, 5, delta(FIRST, 1, Stored((1,)))))
    before = await store.load()
    with pytest.raises(Fenced):
        await store.commit(MapCommit(wrong.expected, wrong.positions, (delta(FIRST, 2, Stored((9,))),)))
    assert await store.load() == before


async def test_replaced_forgets_what_was_stored(store: MapStore) -> None:
    await store.commit(commit(None, 1, delta(FIRST, 1, Stored((1, 2)), Stored((5,), Tier.DISK))))
    await store.commit(commit(1, 2, delta(FIRST, 2, Stored((3,)), replaced=True)))
    assert held(await store.load()) == {FIRST: {Tier.DEVICE: {3}}}
    await store.commit(commit(2, 3, delta(FIRST, 3, Stored((4,)), Cleared(), Stored((6,)))))
    assert held(await store.load()) == {FIRST: {Tier.DEVICE: {6}}}
    await store.commit(commit(3, 4, delta(FIRST, 4, replaced=True)))
    assert held(await store.load()) == {}


async def test_one_workers_removal_leaves_anothers_copy(store: MapStore) -> None:
    await store.commit(commit(None, 1, delta(FIRST, 1, Stored((1,))), delta(SECOND, 1, Stored((1,)))))
    await store.commit(commit(1, 2, delta(FIRST, 2, Removed((1,)))))
    assert held(await store.load()) == {SECOND: {Tier.DEVICE: {1}}}


async def test_an_announcement_stays_until_the_next(store: MapStore) -> None:
    said = announced(FIRST)
    await store.commit(commit(None, 1, WorkerDelta(FIRST, position(0), said, False, ())))
    await store.commit(commit(1, 2, delta(FIRST, 1, Stored((1,)))))
    assert [worker.announced for worker in (await store.load()).workers] == [said]
    later = announced(FIRST, 1)
    await store.commit(commit(2, 3, WorkerDelta(FIRST, position(1), later, False, ())))
    assert [worker.announced for worker in (await store.load()).workers] == [later]


async def test_a_worker_that_left_is_a_tombstone(store: MapStore) -> None:
    await store.commit(commit(None, 1, delta(FIRST, 1, Stored((1,)))))
    gone = position(1, epoch=7, complete=True, left=True)
    await store.commit(commit(1, 2, WorkerDelta(FIRST, gone, None, True, ())))
    stored = await store.load()
    assert [(worker.position, worker.held) for worker in stored.workers] == [(gone, ())]


async def test_of_two_writers_at_once_one_is_fenced(store: MapStore) -> None:
    for before in (None, 1):
        after = 1 if before is None else 2
        results = await asyncio.gather(
            *(store.commit(commit(before, after, delta(FIRST, after, Stored((after,))))) for _ in range(2)),
            return_exceptions=True,
        )
        assert sorted(type(result).__name__ for result in results) == ["Fenced", "NoneType"]


@pytest.mark.parametrize("seed", range(3))
async def test_many_commits_equal_the_model(store: MapStore, seed: int) -> None:
    """Random commits against plain sets; the view of Postgres shows the same, row by row."""
    chance = random.Random(seed)
    model: dict[tuple[WorkerId, Tier], set[int]] = {}
    keys = [chance.getrandbits(64) for _ in range(40)]
    before: int | None = None
    for number in range(1, 40):
        deltas = []
        for worker_id in chance.sample([FIRST, SECOND, WorkerId("w3")], chance.randint(1, 3)):
            replaced = chance.random() < 0.15
            if replaced:
                for tier in Tier:
                    model.pop((worker_id, tier), None)
            operations: list[KvOperation] = []
            for _ in range(chance.randint(0, 6)):
                tier = chance.choice(list(Tier))
                here = model.setdefault((worker_id, tier), set())
                some = tuple(chance.sample(keys, chance.randint(1, 6)))
                if chance.random() < 0.6:
                    here.update(some)
                    operations.append(Stored(some, tier))
                elif chance.random() < 0.9:
                    here.difference_update(some)
                    operations.append(Removed(some, tier))
                else:
                    for every in Tier:
                        model.pop((worker_id, every), None)
                    operations.append(Cleared())
            deltas.append(delta(worker_id, number, *operations, replaced=replaced))
        await store.commit(commit(before, number, *deltas))
        before = number
        if number % 13 == 0:
            await _assert_equals_model(store, model, seed)
    await _assert_equals_model(store, model, seed)


async def _assert_equals_model(store: MapStore, model: dict[tuple[WorkerId, Tier], set[int]], seed: int) -> None:
    stored = held(await store.load())
    found = {(worker_id, tier): keys for worker_id, tiers in stored.items() for tier, keys in tiers.items()}
    wanted = {place: keys for place, keys in model.items() if keys}
    assert found == wanted, f"seed {seed}"
    if isinstance(store, PostgresMapStore):
        async with store._database.connection() as connection:
            rows = await connection.fetch("select worker_id, tier, key from evenhand.cache_map")
        seen: dict[tuple[WorkerId, Tier], set[int]] = {}
        for row in rows:
            here = seen.setdefault((WorkerId(row["worker_id"]), Tier(row["tier"])), set())
            key = row["key"] % 2**64
            assert key not in here, f"seed {seed}: the view shows a key twice"
            here.add(key)
        assert seen == wanted, f"seed {seed}"


# Postgres alone


async def test_a_changed_partition_count_is_refused(database: Database) -> None:
    await PostgresMapStore(database, PARTITIONS).commit(commit(None, 1))
    with pytest.raises(SchemaMismatch, match=r"4 partitions .* which has 8"):
        await PostgresMapStore(database, 8).load()
    with pytest.raises(Fenced):
        await PostgresMapStore(database, 8).commit(commit(1, 2))


async def test_deltas_are_counted_and_a_replacement_resets_them(database: Database) -> None:
    store = PostgresMapStore(database, PARTITIONS)
    await store.commit(commit(None, 1, delta(FIRST, 1, Stored((1, 2)))))
    await store.commit(commit(1, 2, delta(FIRST, 2, Stored((3,)), Removed((1,)))))
    assert [worker.delta_rows for worker in (await store.load()).workers] == [3]
    await store.commit(commit(2, 3, delta(FIRST, 2, Stored((2, 3)), replaced=True)))
    stored = await store.load()
    assert [worker.delta_rows for worker in stored.workers] == [0]
    assert held(stored) == {FIRST: {Tier.DEVICE: {2, 3}}}
    async with database.connection() as connection:
        assert await connection.fetchval("select count(*) from evenhand.kv_delta") == 0
        assert await connection.fetchval("select keys from evenhand.kv_snapshot") == pack_keys((2, 3))


async def test_a_key_is_in_at_most_one_delta_of_a_commit(database: Database) -> None:
    store = PostgresMapStore(database, PARTITIONS)
    await store.commit(commit(None, 1, delta(FIRST, 1, Stored((1, 2)), Removed((2,)), Stored((3,)))))
    async with database.connection() as connection:
        rows = await connection.fetch("select stored, keys from evenhand.kv_delta order by ordinal")
    assert [(row["stored"], unpack_keys(row["keys"])) for row in rows] == [(True, (1, 3)), (False, (2,))]


async def test_a_load_sees_one_moment(database: Database, postgres_dsn: str) -> None:
    """A commit that lands while a load is under way is wholly in it or not at all."""
    store = PostgresMapStore(database, PARTITIONS)
    await store.commit(commit(None, 1, delta(FIRST, 1, Stored((1,)))))
    going = True

    async def write() -> None:
        number = 1
        while going:
            await store.commit(commit(number, number + 1, delta(FIRST, number + 1, Stored((number + 1,)))))
            number += 1

    writer = asyncio.create_task(write())
    try:
        for _ in range(30):
            stored = await store.load()
            number = stored.positions[0].next_offset
            assert stored.workers[0].position.seq == number
            assert held(stored)[FIRST][Tier.DEVICE] == set(range(1, number + 1))
    finally:
        going = False
        await writer


async def test_unpack_keys_of_sql_equals_the_core(database: Database) -> None:
    keys = (0, 1, BlockKey(2**63), HIGH, 0x0102030405060708)
    async with database.connection() as connection:
        rows = await connection.fetch("select key from evenhand.unpack_keys($1) order by place", pack_keys(keys))
        empty = await connection.fetch("select key from evenhand.unpack_keys($1)", b"")
    assert tuple(row["key"] % 2**64 for row in rows) == keys
    assert empty == []


async def test_an_unknown_schema_is_refused(postgres_empty_dsn: str) -> None:
    async with await Database.open(DatabaseConfig(postgres_empty_dsn, "test")) as database:
        store = PostgresMapStore(database, PARTITIONS)
        with pytest.raises(SchemaMismatch, match="has no Evenhand schema: run evenhand migrate"):
            await store.load()
        with pytest.raises(SchemaMismatch, match="The database's schema is not this build's") as caught:
            await store.positions()
    assert isinstance(caught.value.__cause__, asyncpg.UndefinedTableError)
