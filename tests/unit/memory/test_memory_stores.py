"""Map store, lease store and directory in memory: their fault switches, and what a simulation relies on."""

import pytest

from evenhand.core.block_key import pack_keys
from evenhand.core.errors import Fenced, Unavailable
from evenhand.core.facts import TenantSpec
from evenhand.core.ids import Epoch, PoolId, Seq, TenantId, WorkerId
from evenhand.core.kv import Cleared, Removed, Stored, Tier, WorkerPosition
from evenhand.memory import MemoryDirectory, MemoryLeaseStore, MemoryMapStore
from evenhand.ports import LogPosition, MapCommit, PoolSpec, Principal, WorkerDelta

POOL = PoolId("p")


class Clock:
    def __init__(self) -> None:
        self.now_ms = 1_000

    def __call__(self) -> int:
        return self.now_ms


def commit(expected: int | None, following: int, *deltas: WorkerDelta) -> MapCommit:
    before = {} if expected is None else {0: LogPosition(expected, b"d")}
    return MapCommit(before, {0: LogPosition(following, b"d")}, deltas)


def delta(*operations: Stored | Removed | Cleared, seq: int = 1, replaced: bool = False) -> WorkerDelta:
    return WorkerDelta(WorkerId("w"), WorkerPosition(Epoch(1), Seq(seq), True), None, replaced, operations)


async def test_deltas_apply_in_order_and_replace() -> None:
    store = MemoryMapStore()
    await store.commit(commit(None, 1, delta(Stored((1, 2)), Removed((1,)), Stored((9,), Tier.HOST))))
    (worker,) = (await store.load()).workers
    assert worker.held == ((Tier.DEVICE, pack_keys((2,))), (Tier.HOST, pack_keys((9,))))
    await store.commit(commit(1, 2, delta(Stored((5,)), seq=2, replaced=True)))
    (worker,) = (await store.load()).workers
    assert worker.held == ((Tier.DEVICE, pack_keys((5,))),)
    await store.commit(commit(2, 3, delta(Cleared(), seq=3)))
    stored = await store.load()
    assert stored.workers[0].held == ()
    assert stored.positions == {0: LogPosition(3, b"d")}


async def test_a_commit_with_other_positions_is_fenced_and_changes_nothing() -> None:
    store = MemoryMapStore()
    await store.commit(commit(None, 1, delta(Stored((1,)))))
    before = await store.load()
    for expected in (None, 2):
        with pytest.raises(Fenced):
            await store.commit(commit(expected, 5, delta(Stored((7,)))))
    assert await store.load() == before
    store.move_positions({0: LogPosition(4, b"other")})
    with pytest.raises(Fenced):
        await store.commit(commit(1, 5))


async def test_an_unacknowledged_commit_is_kept() -> None:
    store = MemoryMapStore()
    store.unacknowledged_next = 1
    with pytest.raises(Unavailable):
        await store.commit(commit(None, 1, delta(Stored((1,)))))
    assert (await store.load()).positions == {0: LogPosition(1, b"d")}
    store.available = False
    with pytest.raises(Unavailable):
        await store.load()


async def test_a_lease_is_exclusive_until_it_runs_out_and_terms_grow() -> None:
    clock = Clock()
    store = MemoryLeaseStore(clock)
    first = await store.acquire(POOL, "a", 100)
    assert first is not None
    assert first.term == 1
    assert await store.acquire(POOL, "b", 100) is None
    clock.now_ms += 99
    await store.renew(first)
    clock.now_ms += 99
    assert await store.acquire(POOL, "b", 100) is None
    clock.now_ms += 1
    with pytest.raises(Fenced):
        await store.renew(first)
    second = await store.acquire(POOL, "b", 100)
    assert second is not None
    assert second.term == 2
    with pytest.raises(Fenced):
        await store.save_checkpoint(first, b"late")
    await store.save_checkpoint(second, b"kept")
    await store.release(first)
    assert await store.acquire(POOL, "a", 100) is None
    await store.release(second)
    third = await store.acquire(POOL, "a", 100)
    assert third is not None
    assert third.term == 3
    checkpoint = await store.load_checkpoint(POOL)
    assert checkpoint is not None
    assert (checkpoint.term, checkpoint.payload) == (2, b"kept")


async def test_a_take_over_fences_the_holder() -> None:
    store = MemoryLeaseStore(Clock())
    lease = await store.acquire(POOL, "a", 100)
    assert lease is not None
    store.take_over(POOL, "b", 100)
    with pytest.raises(Fenced):
        await store.renew(lease)
    store.available = False
    with pytest.raises(Unavailable):
        await store.load_checkpoint(POOL)


async def test_the_directory_counts_its_changes_and_forgets_expired_keys() -> None:
    clock = Clock()
    directory = MemoryDirectory(clock)
    revision = await directory.revision()
    directory.set_tenant(TenantSpec(TenantId("b")))
    directory.set_tenant(TenantSpec(TenantId("a"), weight=2.0))
    assert [tenant.tenant_id for tenant in await directory.tenants()] == ["a", "b"]
    directory.set_principal(b"h", Principal("me", "service", (TenantId("a"),), expires_at_ms=1_001))
    assert await directory.principal_of(b"h") is not None
    assert await directory.revision() == revision + 3
    clock.now_ms = 1_001
    assert await directory.principal_of(b"h") is None
    assert await directory.principal_of(b"unknown") is None


async def test_the_first_worker_defines_a_pool() -> None:
    directory = MemoryDirectory()
    first = PoolSpec(POOL, "m", 16, "s")
    assert await directory.register_pool(first) == first
    assert await directory.register_pool(PoolSpec(POOL, "m", 32, "s")) == first
    assert await directory.pools() == (first,)
