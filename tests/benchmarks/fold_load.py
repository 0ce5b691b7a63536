"""The load of the fold and look-up benchmarks: what 64 engines' caches do, in batches.

Every worker holds a share of common prefixes, each to a depth of its own, and private conversations. A batch
stores 1 to 64 blocks (the next turn of a conversation, a new one, or more of a common prefix) and, once the
worker's cache is full, removes 1 to 64 blocks from the end of its oldest conversations. Deterministic by seed.
"""

import json
import random
from collections import deque
from dataclasses import dataclass

from evenhand.core.ids import Epoch, Seq, WorkerId
from evenhand.core.kv import KvBatch, KvOperation, Removed, Stored

WORKERS = 64
PREFIX_BLOCKS = 64
PREFIXES = 64
HOLDERS_MIN = 8
OPERATION_BLOCKS_MAX = 64
TURNS_MAX = 8


@dataclass(frozen=True, slots=True)
class FoldLoad:
    """Batches with, for each operation in order, the block it hangs on (None: the root, or a removal)."""

    batches: tuple[KvBatch, ...]
    parents: tuple[tuple[int | None, ...], ...]
    prefixes: tuple[tuple[int, ...], ...]
    blocks: int
    """Blocks stored plus blocks removed."""

    def rival_events(self) -> list[tuple[int, bytes]]:
        """``(worker number, JSON of one event)`` for each operation, as the rival's tree takes them."""
        events: list[tuple[int, bytes]] = []
        for batch, parents in zip(self.batches, self.parents, strict=True):
            for operation, parent in zip(batch.operations, parents, strict=True):
                data: dict[str, object]
                if isinstance(operation, Stored):
                    blocks = [{"block_hash": key, "tokens_hash": key} for key in operation.keys]
                    data = {"stored": {"parent_hash": parent, "blocks": blocks}}
                else:
                    assert isinstance(operation, Removed)
                    data = {"removed": {"block_hashes": list(operation.keys)}}
                event = {"event_id": len(events), "data": data, "dp_rank": 0}
                events.append((int(batch.worker_id[1:]), json.dumps(event).encode()))
        return events


class _Engine:
    """One worker's cache: depths of common prefixes, and conversations, oldest first."""

    def __init__(self, number: int, chance: random.Random, prefixes: list[tuple[int, ...]], capacity: int) -> None:
        self.worker_id = WorkerId(f"w{number:02d}")
        self._chance, self._prefixes, self._capacity = chance, prefixes, capacity
        self._depths = [0] * len(prefixes)
        self._conversations: deque[list[int]] = deque()
        self._held = 0

    def common(self, prefix: int, depth: int) -> tuple[Stored, int | None] | None:
        """Hold a common prefix down to a depth; None if it is held that far."""
        held, keys = self._depths[prefix], self._prefixes[prefix]
        if depth <= held:
            return None
        self._depths[prefix] = depth
        self._held += depth - held
        return Stored(keys[held:depth]), keys[held - 1] if held else None

    def turn(self, blocks: int) -> tuple[Stored, int | None]:
        """The next turn of one of the latest conversations, or a new one."""
        conversations, parent = self._conversations, None
        keys = tuple(self._chance.getrandbits(64) for _ in range(blocks))
        if conversations and self._chance.random() < 0.7:
            conversation = conversations[-1 - self._chance.randrange(min(TURNS_MAX, len(conversations)))]
            parent = conversation[-1]
            conversation.extend(keys)
        else:
            conversations.append(list(keys))
        self._held += blocks
        return Stored(keys), parent

    def evict(self) -> Removed | None:
        """Room again: the end of the oldest conversation goes, last block first."""
        if self._held <= self._capacity or len(self._conversations) <= TURNS_MAX:
            return None
        oldest = self._conversations[0]
        count = min(len(oldest), self._chance.randint(1, OPERATION_BLOCKS_MAX))
        keys = tuple(reversed(oldest[-count:]))
        del oldest[-count:]
        if not oldest:
            self._conversations.popleft()
        self._held -= count
        return Removed(keys)


def mixed_load(seed: int, blocks: int, capacity: int) -> FoldLoad:
    """About ``blocks`` blocks of stores and removals; each worker holds about ``capacity`` blocks."""
    chance = random.Random(seed)
    prefixes = [tuple(chance.getrandbits(64) for _ in range(PREFIX_BLOCKS)) for _ in range(PREFIXES)]
    engines = [_Engine(number, chance, prefixes, capacity) for number in range(WORKERS)]
    reach = [
        {engine: chance.randint(1, PREFIX_BLOCKS) for engine in chance.sample(range(WORKERS), HOLDERS_MIN + n % 9)}
        for n in range(PREFIXES)
    ]
    wanted = [(prefix, engine, depth) for prefix in range(PREFIXES) for engine, depth in reach[prefix].items()]
    chance.shuffle(wanted)
    seqs = [0] * WORKERS
    batches, parents, done = [], [], 0
    while done < blocks:
        number = chance.randrange(WORKERS)
        stored: tuple[Stored, int | None] | None = None
        if wanted and chance.random() < 0.5:
            prefix, number, depth = wanted.pop()
            stored = engines[number].common(prefix, depth)
        if stored is None:
            stored = engines[number].turn(chance.randint(1, OPERATION_BLOCKS_MAX))
        operations: list[KvOperation] = [stored[0]]
        hang = [stored[1]]
        removed = engines[number].evict()
        if removed is not None:
            operations.append(removed)
            hang.append(None)
        seqs[number] += 1
        batches.append(KvBatch(engines[number].worker_id, Epoch(1), Seq(seqs[number]), tuple(operations)))
        parents.append(tuple(hang))
        done += len(stored[0].keys) + (len(removed.keys) if removed else 0)
    return FoldLoad(tuple(batches), tuple(parents), tuple(prefixes), done)


def store_load(seed: int, blocks: int) -> FoldLoad:
    """Stores of 64 fresh blocks each, turn after turn: the rival's best case."""
    chance = random.Random(seed)
    tails: list[int | None] = [None] * WORKERS
    batches, parents = [], []
    for index in range(blocks // 64):
        number, seq = index % WORKERS, Seq(index // WORKERS + 1)
        keys = tuple(chance.getrandbits(64) for _ in range(64))
        batches.append(KvBatch(WorkerId(f"w{number:02d}"), Epoch(1), seq, (Stored(keys),)))
        parents.append((tails[number] if seq % 8 != 1 else None,))
        tails[number] = keys[-1]
    return FoldLoad(tuple(batches), tuple(parents), (), len(batches) * 64)
