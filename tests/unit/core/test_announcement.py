"""A worker that differs from its pool is refused, with the reason."""

from dataclasses import replace

from evenhand.core.announcement import check_announcement
from evenhand.core.ids import Epoch, PoolId, WorkerId
from evenhand.core.kv import WorkerAnnounced
from evenhand.ports import PoolSpec

POOL = PoolSpec(PoolId("chat"), "m", 16, "evenhand.block.v1")
WORKER = WorkerAnnounced(WorkerId("w"), POOL.pool_id, Epoch(1), "http://e:1", "m", 16, "evenhand.block.v1", 100, 8)


def test_a_worker_like_its_pool_is_welcome() -> None:
    assert check_announcement(POOL, WORKER) is None
    assert check_announcement(None, WORKER) is None
    assert check_announcement(POOL, replace(WORKER, salt_generation=7, slots=1, kv_blocks=3)) is None


def test_each_difference_is_named() -> None:
    who = "Worker w cannot join pool chat: its "
    assert check_announcement(POOL, replace(WORKER, block_size_tokens=32)) == (
        who + "block size is 32 tokens, the pool's is 16."
    )
    assert check_announcement(POOL, replace(WORKER, model="n")) == who + "model is 'n', the pool's is 'm'."
    other = check_announcement(None, replace(WORKER, key_scheme="x"))
    assert other == who + "key scheme is 'x', and this build knows 'evenhand.block.v1' only."
    assert check_announcement(replace(POOL, key_scheme="old"), WORKER) == (
        who + "key scheme is 'evenhand.block.v1', the pool's is 'old'."
    )
    assert "compared with pool other" in str(check_announcement(replace(POOL, pool_id=PoolId("other")), WORKER))
