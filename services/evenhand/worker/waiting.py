"""Stores whose parent is not known yet.

A child may arrive before its parent: after a gap, or where an edge begins in the middle of a cache's life. It
is kept with its tokens until the parent's key is known, and linked then. The wait is bounded in blocks and in
age; the oldest goes first. A removal of a waiting block is remembered, so that linking does not bring it back;
its place in the chain stays, for its children.

Token ids are held here in memory only; a checkpoint leaves them out on purpose.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from evenhand.worker.engine_events import EngineHash
from evenhand.worker.holdings import Lane

WAITING_BLOCKS_MAX = 65_536
WAITING_AGE_MS_MAX = 60_000


@dataclass(slots=True, eq=False)
class Chain:
    """The blocks of one store event, ready to get their keys from their parent's."""

    lane: Lane
    names: Sequence[EngineHash]
    token_bytes: bytes
    extra_fields: Sequence[tuple[bytes, ...]] | None
    """Byte fields of each block; None where no block has any."""
    gone: set[EngineHash] = field(default_factory=set)
    """Names removed while the store waited."""


@dataclass(slots=True, eq=False)
class WaitingStore:
    """A chain whose parent is known by name only."""

    parent: EngineHash
    chain: Chain
    arrived_at_ms: int


class WaitingStores:
    """Bounded; oldest first. Each store is found by its parent and each of its blocks by lane and name."""

    __slots__ = ("_by_block", "_by_parent", "_in_order", "blocks")

    def __init__(self) -> None:
        self.blocks = 0
        self._in_order: OrderedDict[int, WaitingStore] = OrderedDict()
        self._by_parent: dict[EngineHash, list[WaitingStore]] = {}
        self._by_block: dict[tuple[Lane, EngineHash], list[WaitingStore]] = {}

    def __len__(self) -> int:
        return len(self._in_order)

    def add(self, store: WaitingStore) -> None:
        self._in_order[id(store)] = store
        self._by_parent.setdefault(store.parent, []).append(store)
        for name in store.chain.names:
            self._by_block.setdefault((store.chain.lane, name), []).append(store)
        self.blocks += len(store.chain.names)

    def take_children(self, parent: EngineHash) -> list[WaitingStore]:
        """All stores that wait for this name, in order of arrival; they wait no longer."""
        if not self._by_parent:
            return []
        stores = self._by_parent.pop(parent, [])
        for store in stores:
            self._unlist(store)
        return stores

    def mark_removed(self, lane: Lane, name: EngineHash) -> bool:
        """Remember that a waiting block is gone; False if no such block waits."""
        stores = self._by_block.get((lane, name))
        if not stores:
            return False
        stores.pop().chain.gone.add(name)
        if not stores:
            del self._by_block[lane, name]
        return True

    def drop_expired(self, now_ms: int) -> int:
        """Drop what has waited too long; the number of stores dropped."""
        expired = 0
        while self._in_order and self._oldest().arrived_at_ms + WAITING_AGE_MS_MAX < now_ms:
            self._drop(self._oldest())
            expired += 1
        return expired

    def drop_overflow(self) -> int:
        """Drop the oldest until the bound holds; the number of stores dropped."""
        dropped = 0
        while self.blocks > WAITING_BLOCKS_MAX:
            self._drop(self._oldest())
            dropped += 1
        return dropped

    def _oldest(self) -> WaitingStore:
        return next(iter(self._in_order.values()))

    def _drop(self, store: WaitingStore) -> None:
        siblings = self._by_parent[store.parent]
        siblings.remove(store)
        if not siblings:
            del self._by_parent[store.parent]
        self._unlist(store)

    def _unlist(self, store: WaitingStore) -> None:
        del self._in_order[id(store)]
        self.blocks -= len(store.chain.names)
        for name in store.chain.names:
            stores = self._by_block.get((store.chain.lane, name))
            if stores and store in stores:
                stores.remove(store)
                if not stores:
                    del self._by_block[store.chain.lane, name]
