"""Who may speak for a pool, with the directory in memory."""

from dataclasses import replace

import pytest

from evenhand.core.block_key import KEY_SCHEME
from evenhand.core.errors import Unavailable
from evenhand.core.ids import Epoch, PoolId, WorkerId
from evenhand.core.kv import WorkerAnnounced
from evenhand.memory import MemoryDirectory
from evenhand.ports import PoolSpec
from evenhand.state.pools import PoolGate, Standing

W1 = WorkerAnnounced(WorkerId("w1"), PoolId("p"), Epoch(1), "http://w1:1", "m", 16, KEY_SCHEME, 100, 4)


async def test_the_first_worker_defines_the_pool_and_the_others_must_agree() -> None:
    directory = MemoryDirectory()
    gate = PoolGate(directory)
    assert gate.standing(W1.worker_id) is Standing.UNANNOUNCED
    assert await gate.decide(W1) is None
    assert await directory.pools() == (PoolSpec(PoolId("p"), "m", 16, KEY_SCHEME),)
    reason = await gate.decide(replace(W1, worker_id=WorkerId("w2"), block_size_tokens=32))
    assert reason == "Worker w2 cannot join pool p: its block size is 32 tokens, the pool's is 16."
    assert gate.standing(WorkerId("w2")) is Standing.REFUSED
    assert await gate.decide(replace(W1, worker_id=WorkerId("w2"))) is None
    assert gate.standing(WorkerId("w2")) is Standing.ADMITTED


async def test_a_key_scheme_unknown_to_this_build_defines_no_pool() -> None:
    directory = MemoryDirectory()
    gate = PoolGate(directory)
    reason = await gate.decide(replace(W1, key_scheme="other.v9"))
    assert reason is not None
    assert "its key scheme is 'other.v9'" in reason
    assert await directory.pools() == ()


async def test_a_pool_that_an_administrator_changed_is_asked_for_again() -> None:
    directory = MemoryDirectory()
    gate = PoolGate(directory)
    assert await gate.decide(W1) is None
    directory.set_pool(PoolSpec(PoolId("p"), "m", 32, KEY_SCHEME))
    assert await gate.decide(replace(W1, block_size_tokens=32)) is None
    assert await gate.decide(W1) is not None


async def test_while_the_directory_is_away_nothing_is_decided() -> None:
    directory = MemoryDirectory()
    gate = PoolGate(directory)
    directory.available = False
    with pytest.raises(Unavailable):
        await gate.decide(W1)
    assert gate.standing(W1.worker_id) is Standing.UNANNOUNCED
