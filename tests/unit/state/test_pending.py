"""The pending group: net changes, positions, compaction. The model is the fold's own map."""

import random

import pytest

from evenhand.core.cache_map import CacheMap
from evenhand.core.fold import fold
from evenhand.core.ids import Epoch, Seq, WorkerId
from evenhand.core.kv import Cleared, KvBatch, KvOperation, Removed, Stored, Tier
from evenhand.ports import KV_TOPIC, LogPosition, LogRecord, MapCommit
from evenhand.state.pending import Pending

W1, W2 = WorkerId("w1"), WorkerId("w2")


def record(offset: int, partition: int = 0) -> LogRecord:
    return LogRecord(KV_TOPIC, partition, offset, b"k", b"v%d" % offset, 1_000 + offset)


class Folding:
    """A map and what is pending of it."""

    def __init__(self) -> None:
        self.cache_map = CacheMap()
        self.pending = Pending(self.cache_map)
        self.stored: dict[int, LogPosition] = {}
        self._seqs: dict[WorkerId, int] = {}

    def batch(self, worker_id: WorkerId, *operations: KvOperation) -> None:
        seq = self._seqs[worker_id] = self._seqs.get(worker_id, 0) + 1
        result = fold(self.cache_map, KvBatch(worker_id, Epoch(1), Seq(seq), operations))
        if result.changes:
            self.pending.take(worker_id, result, None)

    def seal(self) -> MapCommit:
        commit = self.pending.seal(self.stored)
        self.stored.update(commit.positions)
        return commit

    def is_empty(self) -> bool:
        return self.pending.empty


def test_a_group_begins_empty_and_is_empty_again() -> None:
    folding = Folding()
    assert folding.is_empty()
    folding.pending.read(record(4))
    assert not folding.is_empty()
    assert not folding.pending.changed
    assert folding.seal() == MapCommit({}, {0: LogPosition(5, record(4).digest())}, ())
    assert folding.is_empty()


def test_positions_are_the_last_record_of_each_partition_and_expect_the_former() -> None:
    folding = Folding()
    for offset in range(3):
        folding.pending.read(record(offset))
    folding.seal()
    folding.pending.read(record(3))
    folding.pending.read(record(9, partition=1))
    commit = folding.seal()
    assert commit.expected == {0: LogPosition(3, record(2).digest())}
    assert commit.positions == {0: LogPosition(4, record(3).digest()), 1: LogPosition(10, record(9).digest())}
    folding.pending.read(record(10, partition=1))
    assert folding.pending.positions() == {**commit.positions, 1: LogPosition(11, record(10).digest())}


def test_starting_over_sets_positions_back_and_reads_from_there() -> None:
    folding = Folding()
    folding.pending.read(record(7))
    folding.seal()
    folding.pending.read(record(8))
    folding.pending.start_over(range(2))
    assert folding.pending.positions() == {0: LogPosition(0), 1: LogPosition(0)}
    commit = folding.seal()
    assert commit.expected == {0: LogPosition(8, record(7).digest())}
    assert commit.positions == {0: LogPosition(0), 1: LogPosition(0)}


@pytest.mark.parametrize("order", ["store first", "remove first"])
def test_what_changes_back_is_not_written(order: str) -> None:
    folding = Folding()
    folding.batch(W1, Stored((1, 2)))
    folding.seal()
    if order == "store first":
        folding.batch(W1, Stored((3,)))
        folding.batch(W1, Removed((3,)))
    else:
        folding.batch(W1, Removed((1,)))
        folding.batch(W1, Stored((1,)))
    (delta,) = folding.seal().deltas
    assert delta.operations == ()
    assert not delta.replaced
    assert delta.position.seq == 3


def test_a_clear_replaces_and_what_came_before_it_in_the_group_is_void() -> None:
    folding = Folding()
    folding.batch(W1, Stored((1, 2), Tier.HOST))
    folding.seal()
    folding.batch(W1, Removed((1,), Tier.HOST), Stored((5,)))
    folding.batch(W1, Cleared())
    folding.batch(W1, Stored((2, 9), Tier.HOST))
    folding.batch(W1, Removed((2,), Tier.HOST))
    (delta,) = folding.seal().deltas
    assert delta.replaced
    assert delta.operations == (Stored((9,), Tier.HOST),)


def test_compaction_is_bounded_a_commit_and_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evenhand.state.pending.DELTA_ROWS_MAX", 2)
    monkeypatch.setattr("evenhand.state.pending.COMPACTIONS_PER_COMMIT_MAX", 1)
    folding = Folding()
    whole = []
    for number in range(1, 6):
        for worker_id in (W1, W2):
            folding.batch(worker_id, Stored((number,)))
        deltas = folding.seal().deltas
        whole += [(number, delta.worker_id) for delta in deltas if delta.replaced]
    assert whole == [(1, W1), (1, W2), (4, W1), (5, W2)]


def test_deltas_larger_than_the_worker_are_compacted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evenhand.state.pending.DELTA_KEYS_MIN", 4)
    folding = Folding()
    folding.batch(W1, Stored((0,)))
    folding.seal()
    for number in range(1, 4):
        folding.batch(W1, Stored((number,)), Removed((number - 1,)))
        (delta,) = folding.seal().deltas
        assert delta.replaced is (number == 3)
    assert delta.operations == (Stored((3,)),)


def test_restored_delta_rows_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evenhand.state.pending.DELTA_ROWS_MAX", 10)
    folding = Folding()
    folding.batch(W1, Stored((1,)))
    folding.seal()
    folding.pending.restored(W1, 10)
    folding.batch(W1, Stored((2,)))
    assert [delta.replaced for delta in folding.seal().deltas] == [True]


@pytest.mark.parametrize("seed", range(20))
def test_deltas_rebuild_the_map(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is folded and wherever it is sealed, the commits in order make the same map; no key cancels out."""
    monkeypatch.setattr("evenhand.state.pending.DELTA_ROWS_MAX", 6)
    chance = random.Random(seed)
    folding = Folding()
    rebuilt: dict[tuple[WorkerId, Tier], set[int]] = {}
    for _ in range(150):
        worker_id = chance.choice((W1, W2))
        operations: list[KvOperation] = []
        for _ in range(chance.randint(0, 3)):
            keys, tier = tuple(chance.sample(range(12), chance.randint(1, 4))), chance.choice(list(Tier))
            draw = chance.random()
            operations.append(
                Stored(keys, tier) if draw < 0.55 else Removed(keys, tier) if draw < 0.95 else Cleared()
            )
        folding.batch(worker_id, *operations)
        if chance.random() < 0.3:
            for delta in folding.seal().deltas:
                if delta.replaced:
                    for tier in Tier:
                        rebuilt.pop((delta.worker_id, tier), None)
                for operation in delta.operations:
                    assert not isinstance(operation, Cleared)
                    here = rebuilt.setdefault((delta.worker_id, operation.tier), set())
                    if isinstance(operation, Stored):
                        assert here.isdisjoint(operation.keys), f"seed {seed}: stored what is stored"
                        here.update(operation.keys)
                    else:
                        assert here.issuperset(operation.keys), f"seed {seed}: removed what is not stored"
                        here.difference_update(operation.keys)
            wanted = {
                (worker_id, tier): set(keys)
                for worker_id in folding.cache_map.worker_ids()
                for tier, keys in zip(Tier, folding.cache_map.worker(worker_id).held, strict=True)  # type: ignore[union-attr]
                if keys
            }
            assert {place: keys for place, keys in rebuilt.items() if keys} == wanted, f"seed {seed}"
