"""The state service over ports in memory: folds, commits once, and bears what its surroundings do."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from evenhand.core.block_key import unpack_keys
from evenhand.core.errors import Fenced, Unavailable
from evenhand.core.ids import Epoch, PoolId, Seq, WorkerId
from evenhand.core.kv import (
    ControlMessage,
    EpochFloor,
    KvBatch,
    KvMessage,
    KvOperation,
    Removed,
    SnapshotPart,
    SnapshotRequested,
    Stored,
    Tier,
    WorkerAnnounced,
    WorkerLeft,
    WorkerLoadReported,
)
from evenhand.memory import MemoryDirectory, MemoryLog, MemoryLogReader, MemoryLogWriter, MemoryMapStore
from evenhand.ports import CONTROL_TOPIC, KV_TOPIC, LogPosition, MapCommit, PoolSpec
from evenhand.state.config import StateConfig
from evenhand.state.metrics import StateMetrics
from evenhand.state.service import StateService
from evenhand.wire.kv_codec import decode_control_message, encode_kv_message

W1, W2 = WorkerId("w1"), WorkerId("w2")
POOL = PoolId("chat")
SECONDS_MAX = 10.0


class RecordingStore(MemoryMapStore):
    """Keeps every commit that was kept."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[MapCommit] = []

    async def commit(self, commit: MapCommit) -> None:
        before = self.commits
        try:
            await super().commit(commit)
        finally:
            if self.commits > before:
                self.kept.append(commit)


@dataclass
class World:
    log: MemoryLog = field(default_factory=lambda: MemoryLog(partitions=2))
    store: RecordingStore = field(default_factory=RecordingStore)
    directory: MemoryDirectory = field(default_factory=MemoryDirectory)
    config: StateConfig = field(default_factory=lambda: StateConfig(group_ms_max=1, idle_commit_ms=20))

    def service(self) -> StateService:
        return StateService(
            self.config,
            lambda _: self.store,
            self.directory,
            MemoryLogReader(self.log),
            MemoryLogWriter(self.log),
            StateMetrics(),
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[StateService]:
        """A service that is stopped in order at the end."""
        service = self.service()
        task = asyncio.create_task(service.run())
        try:
            yield service
        finally:
            service.stop()
            await asyncio.wait_for(task, SECONDS_MAX)

    def say(self, *messages: KvMessage) -> None:
        for message in messages:
            self.log.append(KV_TOPIC, message.worker_id.encode(), encode_kv_message(message))

    async def held(self) -> dict[WorkerId, dict[Tier, set[int]]]:
        return {
            worker.worker_id: {tier: set(unpack_keys(packed)) for tier, packed in worker.held}
            for worker in (await self.store.load()).workers
            if not worker.position.left
        }

    async def settled(self) -> None:
        """Everything in the log is committed."""

        def caught_up() -> bool:
            stored = self.store._positions
            return all(
                stored.get(partition, LogPosition(0)).next_offset == self.log.end_offset(KV_TOPIC, partition)
                for partition in range(self.log.partitions)
            )

        await eventually(caught_up)

    def asked(self) -> list[ControlMessage]:
        return [decode_control_message(record.key, record.value) for record in self.log.records(CONTROL_TOPIC)]


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(SECONDS_MAX):
        while not condition():
            await asyncio.sleep(0.005)


def announced(
    worker_id: WorkerId, seq: int = 0, epoch: int = 1, block_size: int = 16, model: str = "llama"
) -> WorkerAnnounced:
    return WorkerAnnounced(
        worker_id=worker_id,
        pool_id=POOL,
        epoch=Epoch(epoch),
        address="http://127.0.0.1:8000",
        model=model,
        block_size_tokens=block_size,
        key_scheme="evenhand.block.v1",
        kv_blocks=1000,
        slots=8,
        seq=Seq(seq),
    )


def batch(worker_id: WorkerId, seq: int, *operations: KvOperation, epoch: int = 1) -> KvBatch:
    return KvBatch(worker_id, Epoch(epoch), Seq(seq), operations)


def load(worker_id: WorkerId) -> WorkerLoadReported:
    return WorkerLoadReported(worker_id, Epoch(1), 0, 0, 0.0, 0, 0, 0, 1)


def snapshot(worker_id: WorkerId, seq: int, *keys: int, epoch: int = 1) -> SnapshotPart:
    return SnapshotPart(worker_id, Epoch(epoch), Seq(seq), 1, 0, 1, Tier.DEVICE, keys)


async def test_events_become_the_map() -> None:
    world = World()
    world.say(announced(W1), announced(W2), batch(W1, 1, Stored((1, 2, 3))), batch(W2, 1, Stored((1,), Tier.HOST)))
    async with world.running():
        await world.settled()
        assert await world.held() == {W1: {Tier.DEVICE: {1, 2, 3}}, W2: {Tier.HOST: {1}}}
        world.say(batch(W1, 2, Removed((2,)), Stored((9,))))
        await world.settled()
        assert await world.held() == {W1: {Tier.DEVICE: {1, 3, 9}}, W2: {Tier.HOST: {1}}}
    assert [worker.announced for worker in (await world.store.load()).workers] == [announced(W1), announced(W2)]


async def test_what_comes_and_goes_within_a_group_is_never_written() -> None:
    world = World()
    world.say(announced(W1), batch(W1, 1, Stored((1,))))
    async with world.running():
        await world.settled()
    world.say(
        batch(W1, 2, Stored((2, 3))), batch(W1, 3, Removed((1, 2))), batch(W1, 4, Stored((1,))), batch(W1, 5)
    )
    world.store.kept.clear()
    async with world.running():
        await world.settled()
    assert [delta.operations for commit in world.store.kept for delta in commit.deltas] == [(Stored((3,)),)]
    assert await world.held() == {W1: {Tier.DEVICE: {1, 3}}}


async def test_a_restart_goes_on_where_it_was() -> None:
    world = World()
    world.say(announced(W1))
    for seq in range(1, 30):
        world.say(batch(W1, seq, Stored((seq,))), batch(W1, seq, Stored((seq + 1000,))))
        if seq % 10 == 0:
            async with world.running():
                await world.settled()
    async with world.running() as service:
        await world.settled()
        assert service.cache_map.copy_count == 29
        assert b'evenhand_state_records_total{outcome="gap"}' not in service.metrics_page()
    assert await world.held() == {W1: {Tier.DEVICE: set(range(1, 30))}}
    assert world.asked() == []


async def test_load_alone_moves_positions_and_nothing_else() -> None:
    world = World()
    world.say(announced(W1))
    async with world.running():
        await world.settled()
        world.store.kept.clear()
        world.say(*[load(W1)] * 5)
        await world.settled()
        assert [commit.deltas for commit in world.store.kept] == [()] * len(world.store.kept)


async def test_a_poisoned_record_is_counted_and_passed() -> None:
    world = World()
    world.say(announced(W1))
    for poison in (b"\xff\xff", b"", encode_kv_message(load(W2))):
        world.log.append(KV_TOPIC, b"w1", poison)
    world.say(batch(W1, 1, Stored((1,))))
    async with world.running() as service:
        await world.settled()
        assert b'evenhand_state_records_total{outcome="malformed"} 3.0' in service.metrics_page()
    assert await world.held() == {W1: {Tier.DEVICE: {1}}}


async def test_a_gap_asks_for_a_snapshot_that_heals_it() -> None:
    world = World()
    world.say(announced(W1), batch(W1, 1, Stored((1,))), batch(W1, 3, Stored((3,))))
    async with world.running():
        await world.settled()
        assert [worker.position.complete for worker in (await world.store.load()).workers] == [False]
        await eventually(lambda: len(world.asked()) == 1)
        assert isinstance(world.asked()[0], SnapshotRequested)
        world.say(snapshot(W1, 3, 1, 2, 3))
        await world.settled()
        assert [worker.position.complete for worker in (await world.store.load()).workers] == [True]
    assert await world.held() == {W1: {Tier.DEVICE: {1, 2, 3}}}


async def test_old_epochs_are_told_the_floor_at_a_bounded_rate() -> None:
    world = World()
    world.say(announced(W1, epoch=7), *[batch(W1, seq, Stored((seq,)), epoch=3) for seq in range(1, 100)])
    async with world.running():
        await world.settled()
        await eventually(lambda: len(world.asked()) >= 1)
    assert world.asked() == [EpochFloor(W1, Epoch(7))]


async def test_a_worker_that_left_is_forgotten_and_its_late_events_change_nothing() -> None:
    world = World()
    world.say(announced(W1), batch(W1, 1, Stored((1,))), WorkerLeft(W1, Epoch(1)), batch(W1, 2, Stored((2,))))
    async with world.running() as service:
        await world.settled()
        assert service.cache_map.copy_count == 0
    world.say(batch(W1, 3, Stored((3,))))
    async with world.running():
        await world.settled()
        assert await world.held() == {}
        world.say(announced(W1, epoch=2), batch(W1, 1, Stored((5,)), epoch=2))
        await world.settled()
    assert await world.held() == {W1: {Tier.DEVICE: {5}}}


async def test_a_worker_that_fell_silent_while_others_spoke_counts_as_left() -> None:
    config = StateConfig(group_ms_max=1, idle_commit_ms=20, worker_forgotten_after_ms=500)
    world = World(config=config)
    world.say(announced(W1), batch(W1, 1, Stored((1,))), announced(W2), batch(W2, 1, Stored((2,))))
    async with world.running() as service:
        await world.settled()
        assert service.cache_map.worker_ids() == (W1, W2)
        # A pause of the whole log is nobody's silence.
        await asyncio.sleep(0.6)
        world.say(load(W2))
        await world.settled()
        assert service.cache_map.worker_ids() == (W1, W2)
        async with asyncio.timeout(SECONDS_MAX):
            while W1 in service.cache_map.worker_ids():
                world.say(load(W2))
                await asyncio.sleep(0.01)
        await world.settled()
        assert await world.held() == {W2: {Tier.DEVICE: {2}}}
        world.say(announced(W1, epoch=2), batch(W1, 1, Stored((5,)), epoch=2))
        await world.settled()
        assert await world.held() == {W1: {Tier.DEVICE: {5}}, W2: {Tier.DEVICE: {2}}}


async def test_the_first_worker_defines_the_pool_and_others_must_agree() -> None:
    world = World()
    world.say(announced(W1), batch(W1, 1, Stored((1,))))
    async with world.running() as service:
        await world.settled()
        assert await world.directory.pools() == (PoolSpec(POOL, "llama", 16, "evenhand.block.v1"),)
        world.say(announced(W2, block_size=32), batch(W2, 1, Stored((2,))))
        await world.settled()
        assert b"evenhand_state_workers_refused_total 1.0" in service.metrics_page()
        assert b'evenhand_state_records_total{outcome="refused"} 2.0' in service.metrics_page()
        assert await world.held() == {W1: {Tier.DEVICE: {1}}}
        # It comes back as the pool has it: what was passed over is a gap, and a snapshot heals it.
        world.say(announced(W2, seq=1), snapshot(W2, 1, 2))
        await world.settled()
        assert await world.held() == {W1: {Tier.DEVICE: {1}}, W2: {Tier.DEVICE: {2}}}


async def test_a_worker_that_changes_its_model_loses_what_it_held() -> None:
    world = World()
    world.say(announced(W1), announced(W2), batch(W1, 1, Stored((1,))))
    async with world.running():
        await world.settled()
        world.say(announced(W1, epoch=2, model="mistral"), batch(W1, 1, Stored((7,)), epoch=2))
        await world.settled()
        assert await world.held() == {W2: {}}
        world.say(announced(W1, epoch=3), batch(W1, 1, Stored((8,)), epoch=3))
        await world.settled()
    assert await world.held() == {W1: {Tier.DEVICE: {8}}, W2: {}}


async def test_events_wait_for_the_announcement() -> None:
    world = World()
    world.say(batch(W1, 1, Stored((1,))))
    async with world.running() as service:
        await world.settled()
        assert await world.held() == {}
        assert b'evenhand_state_records_total{outcome="unannounced"} 1.0' in service.metrics_page()
        world.say(announced(W1, seq=1))
        await eventually(lambda: len(world.asked()) == 1)
        world.say(snapshot(W1, 1, 1))
        await world.settled()
    assert await world.held() == {W1: {Tier.DEVICE: {1}}}


async def test_while_the_database_is_away_folding_goes_on_and_then_it_catches_up() -> None:
    world = World()
    world.say(announced(W1))
    async with world.running() as service:
        await world.settled()
        world.store.available = False
        for seq in range(1, 20):
            world.say(batch(W1, seq, Stored((seq,))))
        await eventually(lambda: service.cache_map.copy_count == 19)
        assert await_nothing_stored(world)
        world.store.available = True
        await world.settled()
    assert await world.held() == {W1: {Tier.DEVICE: set(range(1, 20))}}


def await_nothing_stored(world: World) -> bool:
    return all(not worker.held for worker in world.store._workers.values())


async def test_reading_pauses_at_the_bound_and_says_so() -> None:
    world = World(
        config=StateConfig(group_ms_max=1, group_key_changes_max=5, lag_key_changes_max=5, slice_records_max=1)
    )
    world.say(announced(W1))
    async with world.running() as service:
        await world.settled()
        world.store.available = False
        for seq in range(1, 50):
            world.say(batch(W1, seq, Stored((seq,))))
        await eventually(lambda: "Reading waits for commits" in service.not_ready())
        assert service.cache_map.copy_count <= 12
        world.store.available = True
        await world.settled()
        assert service.not_ready() == ""
    assert await world.held() == {W1: {Tier.DEVICE: set(range(1, 50))}}


async def test_a_commit_whose_end_was_not_heard_is_not_made_twice() -> None:
    world = World()
    world.say(announced(W1))
    async with world.running():
        await world.settled()
        world.store.unacknowledged_next = 2
        world.say(batch(W1, 1, Stored((1,))))
        await world.settled()
        world.say(batch(W1, 2, Stored((2,))))
        await world.settled()
    assert await world.held() == {W1: {Tier.DEVICE: {1, 2}}}


async def test_another_writer_ends_the_service() -> None:
    world = World()
    world.say(announced(W1))
    first = world.service()
    running = asyncio.create_task(first.run())
    await world.settled()
    world.store.move_positions({0: LogPosition(77), 1: LogPosition(77)})
    world.say(batch(W1, 1, Stored((1,))), announced(W2))
    with pytest.raises(Fenced):
        await asyncio.wait_for(running, SECONDS_MAX)
    assert await world.held() == {W1: {}}


async def test_of_two_services_one_ends() -> None:
    world = World()
    world.say(announced(W1))
    tasks = [asyncio.create_task(world.service().run()) for _ in range(2)]
    for seq in range(1, 200):
        world.say(batch(W1, seq, Stored((seq,))))
        await asyncio.sleep(0.002)
        if any(task.done() for task in tasks):
            break
    done, left = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED, timeout=SECONDS_MAX)
    assert [type(task.exception()) for task in done] == [Fenced]
    await world.settled()
    assert await world.held() == {W1: {Tier.DEVICE: set(range(1, seq + 1))}}
    for task in left:
        task.cancel()
    await asyncio.wait(left)


async def test_a_replaced_log_marks_all_incomplete_and_starts_over() -> None:
    world = World()
    world.say(announced(W1), announced(W2), batch(W1, 1, Stored((1,))), batch(W2, 1, Stored((2,))))
    async with world.running():
        await world.settled()
        world.log.replace()
        await eventually(lambda: {message.worker_id for message in world.asked()} == {W1, W2})
        await eventually(lambda: all(at == LogPosition(0) for at in world.store._positions.values()))
        stored = await world.store.load()
        assert [worker.position.complete for worker in stored.workers] == [False, False]
        assert await world.held() == {W1: {Tier.DEVICE: {1}}, W2: {Tier.DEVICE: {2}}}
        world.say(snapshot(W1, 1, 1, 7), batch(W1, 2, Stored((8,))), snapshot(W2, 1))
        await world.settled()
        stored = await world.store.load()
        assert [worker.position.complete for worker in stored.workers] == [True, True]
    assert await world.held() == {W1: {Tier.DEVICE: {1, 7, 8}}, W2: {}}


async def test_a_log_that_was_replaced_while_the_service_was_away_is_noticed() -> None:
    world = World()
    world.say(announced(W1), batch(W1, 1, Stored((1,))))
    async with world.running():
        await world.settled()
    world.log.replace()
    world.say(announced(W1, seq=2))
    async with world.running():
        await eventually(lambda: len(world.asked()) >= 1)
        world.say(snapshot(W1, 2, 4))
        await world.settled()
    assert await world.held() == {W1: {Tier.DEVICE: {4}}}


async def test_many_deltas_become_a_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evenhand.state.pending.DELTA_ROWS_MAX", 3)
    world = World()
    world.say(announced(W1))
    async with world.running() as service:
        await world.settled()
        for seq in range(1, 12):
            world.say(batch(W1, seq, Stored((seq,))))
            await world.settled()
        assert b"evenhand_state_compactions_total 2.0" in service.metrics_page()
    deltas = [delta for commit in world.store.kept for delta in commit.deltas]
    whole = [delta.operations for delta in deltas if delta.replaced and delta.operations]
    assert whole == [(Stored((1, 2, 3, 4)),), (Stored(tuple(range(1, 9))),)]
    assert await world.held() == {W1: {Tier.DEVICE: set(range(1, 12))}}


async def test_what_is_away_at_the_start_is_waited_for_and_then_named() -> None:
    world = World(config=StateConfig(start_ms_max=200))
    world.log.available = False
    with pytest.raises(Unavailable, match="The state service cannot start: The log is away"):
        await world.service().run()
    world = World()
    world.store.available = False
    world.say(announced(W1), batch(W1, 1, Stored((1,))))
    service = world.service()
    running = asyncio.create_task(service.run())
    await eventually(lambda: service.not_ready() == "The map store is away.")
    world.store.available = True
    await world.settled()
    service.stop()
    await running


async def test_pools_that_cannot_be_asked_hold_back_the_announcement_alone() -> None:
    world = World()
    world.directory.available = False
    world.say(announced(W1), batch(W1, 1, Stored((1,))))
    async with world.running() as service:
        await eventually(lambda: service.not_ready() == "The directory is away.")
        world.directory.available = True
        await world.settled()
        assert service.not_ready() == ""
    assert await world.held() == {W1: {Tier.DEVICE: {1}}}


async def test_without_a_log_it_is_not_ready() -> None:
    world = World()
    async with world.running() as service:
        await eventually(lambda: service.not_ready() == "")
        world.log.available = False
        assert service.not_ready() == "The log does not answer."
        world.log.available = True
        await eventually(lambda: service.not_ready() == "")
