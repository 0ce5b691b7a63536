"""The map and the fold against a naive model, over any order of messages a log may bring.

The model keeps, by worker, its epoch, the highest number folded, and a set of ``(tier, key)``; snapshots it keeps
whole. Beside it stands a *store* that sees nothing but ``FoldResult``: what is persisted must be the map, always.
"""

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from evenhand.core.block_key import pack_keys, unpack_keys
from evenhand.core.cache_map import CacheMap
from evenhand.core.fold import FoldOutcome, FoldResult, fold
from evenhand.core.ids import Epoch, PoolId, Seq, WorkerId
from evenhand.core.kv import (
    Cleared,
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
    WorkerPosition,
)

WORKERS = [WorkerId(name) for name in ("w0", "w1", "w2")]
PROMPT = tuple(range(1, 9))

keys = st.lists(st.integers(1, 8), max_size=6).map(tuple)
tiers = st.sampled_from([Tier.DEVICE, Tier.DEVICE, Tier.HOST])
operations = st.lists(
    st.one_of(st.builds(Stored, keys, tiers), st.builds(Removed, keys, tiers), st.just(Cleared())), max_size=5
).map(tuple)
workers = st.sampled_from(WORKERS)

Copies = set[tuple[Tier, int]]


def apply(copies: Copies, operations: tuple[KvOperation, ...]) -> None:
    for operation in operations:
        match operation:
            case Stored(keys, tier):
                copies |= {(tier, key) for key in keys}
            case Removed(keys, tier):
                copies -= {(tier, key) for key in keys}
            case Cleared():
                copies.clear()


@dataclass
class Edge:
    """The truth of one worker: its engine's cache, and what its edge has published."""

    epoch: int = 1
    seq: int = 0
    copies: Copies = field(default_factory=set)
    snapshots: int = 0


@dataclass
class Known:
    """What the model knows of one worker, in the epoch it has seen last."""

    epoch: int
    seq: int = 0
    copies: Copies = field(default_factory=set)
    left: bool = False
    missed: set[int] = field(default_factory=set)
    """Numbers of batches that are neither folded nor covered by a snapshot."""
    parts: dict[int, SnapshotPart] = field(default_factory=dict)
    order: tuple[int, int] = (-1, -1)
    done: tuple[int, int] = (-1, -1)
    after: list[KvBatch] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        return not self.missed and not self.parts


class Model:
    """The rules once more, without regard to speed or memory."""

    def __init__(self) -> None:
        self.known: dict[WorkerId, Known] = {}

    def fold(self, message: KvMessage) -> None:
        known = self.known.get(message.worker_id)
        if known is not None and (message.epoch < known.epoch or (known.left and message.epoch == known.epoch)):
            return
        if known is None or message.epoch > known.epoch:
            known = self.known[message.worker_id] = Known(message.epoch)
        match message:
            case KvBatch():
                self._batch(known, message)
            case SnapshotPart():
                self._part(known, message)
            case WorkerAnnounced():
                if message.seq > known.seq:
                    known.missed |= set(range(known.seq + 1, message.seq + 1))
            case WorkerLeft():
                self.known[message.worker_id] = Known(message.epoch, known.seq, left=True)

    def _batch(self, known: Known, batch: KvBatch) -> None:
        if batch.seq <= known.seq:
            return
        known.missed |= set(range(known.seq + 1, batch.seq))
        known.seq = batch.seq
        apply(known.copies, batch.operations)
        if known.parts and batch.seq > known.order[0]:
            known.after.append(batch)

    def _part(self, known: Known, part: SnapshotPart) -> None:
        order = (part.seq, part.snapshot_id)
        if order <= known.done:
            return
        if known.parts and order < known.order:
            return
        if not known.parts or order > known.order:
            if part.seq < known.seq:
                return
            known.parts, known.order, known.after = {}, order, []
        known.parts[part.part] = part
        if len(known.parts) < part.parts:
            return
        known.copies = {(part.tier, key) for part in known.parts.values() for key in part.keys}
        for batch in known.after:
            apply(known.copies, batch.operations)
        known.seq = max(known.seq, part.seq)
        known.missed = {number for number in known.missed if number > part.seq}
        known.parts, known.after, known.done = {}, [], order


class Store:
    """A durable map that is told only results."""

    def __init__(self) -> None:
        self.positions: dict[WorkerId, WorkerPosition] = {}
        self.copies: dict[WorkerId, Copies] = {}

    def persist(self, worker_id: WorkerId, result: FoldResult) -> None:
        if not result.changes:
            assert not result.operations
            assert not result.replaced
            return
        assert result.position is not None
        self.positions[worker_id] = result.position
        copies = self.copies.setdefault(worker_id, set())
        if result.replaced:
            copies.clear()
        for operation in result.operations:
            match operation:
                case Stored(keys, tier):
                    added = {(tier, key) for key in keys}
                    assert len(added) == len(keys), "told twice"
                    assert not added & copies, "told although it is stored"
                    copies |= added
                case Removed(keys, tier):
                    removed = {(tier, key) for key in keys}
                    assert len(removed) == len(keys), "told twice"
                    assert removed <= copies, "told although it is not stored"
                    assert not result.replaced
                    copies -= removed
                case Cleared():
                    raise AssertionError("a clear is told as replaced")


class CacheMapMachine(RuleBasedStateMachine):
    """Edges publish, the log loses, repeats and delays; the fold must follow the model."""

    def __init__(self) -> None:
        super().__init__()
        self.cache_map = CacheMap()
        self.model = Model()
        self.store = Store()
        self.edges = {worker_id: Edge() for worker_id in WORKERS}
        self.sent: list[KvMessage] = []

    def deliver(self, message: KvMessage) -> None:
        self.sent = [*self.sent[-30:], message]
        known = self.cache_map.position(message.worker_id)
        result = fold(self.cache_map, message)
        self.model.fold(message)
        self.store.persist(message.worker_id, result)
        assert result.position == self.cache_map.position(message.worker_id)
        if known is not None and known.complete and result.position and not result.position.complete:
            pending = result.outcome is FoldOutcome.SNAPSHOT_PENDING
            asked = any(isinstance(wish, SnapshotRequested) for wish in result.control)
            assert asked or pending, "incomplete, and nobody asks"

    def held(self, worker_id: WorkerId) -> Copies:
        return {(tier, key) for tier, packed in self.cache_map.packed(worker_id) for key in unpack_keys(packed)}

    @rule(worker_id=workers, operations=operations, lost=st.integers(0, 4))
    def batch(self, worker_id: WorkerId, operations: tuple[KvOperation, ...], lost: int) -> None:
        edge = self.edges[worker_id]
        edge.seq += 1
        apply(edge.copies, operations)
        message = KvBatch(worker_id, Epoch(edge.epoch), Seq(edge.seq), operations)
        if lost:
            self.deliver(message)

    @rule(worker_id=workers)
    def restart(self, worker_id: WorkerId) -> None:
        edge = self.edges[worker_id]
        self.edges[worker_id] = Edge(epoch=edge.epoch + 1)

    @rule(worker_id=workers)
    def heartbeat(self, worker_id: WorkerId) -> None:
        edge = self.edges[worker_id]
        self.deliver(
            WorkerAnnounced(
                worker_id,
                PoolId("p"),
                Epoch(edge.epoch),
                "http://e:1",
                "m",
                16,
                "evenhand.block.v1",
                100,
                8,
                seq=Seq(edge.seq),
            )
        )

    @rule(worker_id=workers, left=st.booleans())
    def leave(self, worker_id: WorkerId, left: bool) -> None:
        self.deliver(WorkerLeft(worker_id, Epoch(self.edges[worker_id].epoch)))
        self.edges[worker_id] = Edge(epoch=self.edges[worker_id].epoch + 1)

    @rule(data=st.data(), worker_id=workers)
    def snapshot(self, data: st.DataObject, worker_id: WorkerId) -> None:
        """A snapshot in up to three parts, in any order, some twice or lost, batches between them."""
        edge = self.edges[worker_id]
        edge.snapshots += 1
        copies = sorted(edge.copies)
        cuts = [[copy for copy in copies if copy[0] is tier] for tier in (Tier.DEVICE, Tier.HOST)]
        cuts = [cut for cut in cuts if cut] or [[]]
        if len(cuts[0]) > 1:
            cuts[:1] = [cuts[0][:1], cuts[0][1:]]
        parts = [
            SnapshotPart(
                worker_id,
                Epoch(edge.epoch),
                Seq(edge.seq),
                edge.snapshots,
                index,
                len(cuts),
                cut[0][0] if cut else Tier.DEVICE,
                tuple(key for _, key in cut),
            )
            for index, cut in enumerate(cuts)
        ]
        order = data.draw(
            st.lists(st.sampled_from(range(len(parts))), max_size=5) | st.permutations(range(len(parts)))
        )
        for index in order:
            if data.draw(st.integers(0, 2)) == 2:
                self.batch(worker_id, data.draw(operations), data.draw(st.integers(0, 4)))
            self.deliver(parts[index])

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def repeat(self, data: st.DataObject) -> None:
        """Something comes again: late, of an old epoch, out of order."""
        self.deliver(data.draw(st.sampled_from(self.sent)))

    @precondition(lambda self: self.sent)
    @rule()
    def repeat_last_changes_nothing(self) -> None:
        """Folding twice equals folding once."""
        message = self.sent[-1]
        contents = [self.cache_map.packed(worker_id) for worker_id in WORKERS]
        positions = [self.cache_map.position(worker_id) for worker_id in WORKERS]
        self.deliver(message)
        assert [self.cache_map.packed(worker_id) for worker_id in WORKERS] == contents
        assert [self.cache_map.position(worker_id) for worker_id in WORKERS] == positions

    @rule()
    def restart_of_the_reader(self) -> None:
        """A new process loads what the store knows; half snapshots are lost with the old one."""
        self.cache_map = CacheMap()
        for worker_id, position in self.store.positions.items():
            copies = sorted(self.store.copies[worker_id])
            held = [(tier, pack_keys(key for at, key in copies if at is tier)) for tier in Tier]
            self.cache_map.restore(worker_id, position, held)
            known = self.model.known[worker_id]
            # Which batch was missed is not stored: any snapshot from here on heals, the next heartbeat tells more.
            known.missed = set() if known.complete else {known.seq}
            known.parts, known.after, known.done = {}, [], (-1, -1)

    @invariant()
    def map_is_model_is_store(self) -> None:
        for worker_id, known in self.model.known.items():
            held = {
                (tier, key) for tier, packed in self.cache_map.packed(worker_id) for key in unpack_keys(packed)
            }
            assert held == known.copies, worker_id
            assert held == self.store.copies.get(worker_id, set()), worker_id
            position = self.cache_map.position(worker_id)
            assert position is not None
            assert (position.epoch, position.left) == (known.epoch, known.left)
            if not known.left:
                assert position.seq == known.seq
                assert position.complete or not known.complete, "whole, but taken as incomplete"
                assert known.complete or not position.complete, "not whole, but taken as complete"
            assert self.cache_map.block_count(worker_id) == len(held)

    @invariant()
    def complete_means_equal_to_the_engine(self) -> None:
        for worker_id, known in self.model.known.items():
            edge = self.edges[worker_id]
            position = self.cache_map.position(worker_id)
            if (
                position
                and position.complete
                and not position.left
                and (known.epoch, known.seq) == (edge.epoch, edge.seq)
            ):
                held = {(t, key) for t, packed in self.cache_map.packed(worker_id) for key in unpack_keys(packed)}
                assert held == edge.copies

    @invariant()
    def look_ups_are_the_models(self) -> None:
        for first in (0, 3):
            prompt = PROMPT[first:]
            depths = []
            for worker_id, known in self.model.known.items():
                held = {key for _, key in known.copies}
                depth = next((index for index, key in enumerate(prompt) if key not in held), len(prompt))
                if depth:
                    depths.append((-depth, worker_id))
            assert [(-match.blocks, match.worker_id) for match in self.cache_map.match(prompt)] == sorted(depths)

    @invariant()
    def nothing_is_kept_of_nobody(self) -> None:
        model = [copies for known in self.model.known.values() for copies in known.copies]
        assert self.cache_map.copy_count == len(model)
        assert self.cache_map.key_count == len({key for _, key in model})
        assert len(self.cache_map.slots) == sum(not known.left for known in self.model.known.values())


TestCacheMapModel = CacheMapMachine.TestCase
TestCacheMapModel.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
