"""Reference-counted KV blocks with a prefix cache, evicting as vLLM's V1 engine does.

::

              allocate (evicts its name)                store
    free ───────────────────────────────▶ held, no name ─────▶ held, named
     ▲ ▲                                        │                 │  ▲
     │ └──── free: to the FRONT of the queue ───┘                 │  │ touch (a hit)
     └──────────── free: to the END of the queue ─────────────────┘  │
             still findable until allocated ─────────────────────────┘

A freed block keeps its name and can be hit until someone takes it, so the queue of free blocks is at the
same time the LRU order of the cache. A request frees its last block first, so the leaves of a prefix tree
go before its root; blocks without a name are worth nothing and are reused at once.

Holds always:

- every block but the null block is free or held, never both; free + held = blocks − 1;
- a block is in the free queue exactly when its reference count is zero;
- the events, replayed as +1 per store and −1 per removal and zeroing at a clear, give exactly the number
  of findable copies of each name (but for full reports, which repeat stores on purpose).

One name may stand for several blocks: two requests that compute the same prefix side by side both keep
their copy, and each copy is stored and removed on its own. Block 0 is the null block and never handed out.

Not here: which request gets blocks and when (``batching``), sliding windows, tiers other than the GPU's.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from evenhand.engine.content import Content
from evenhand.engine.events import GPU, AllBlocksCleared, BlockRemoved, EngineHash, KvEvent

BlockId = int
"""Index of a block in the pool, from 1; 0 is the null block."""


class BlockPool:
    """A fixed number of blocks. Deterministic; owned by one engine.

    ``emit_events``: collect events for ``take_events``. ``coalesce_removals``: one removal event per
    allocation instead of one per block, which is cheaper and says the same.
    """

    __slots__ = (
        "_copies",
        "_events",
        "_free",
        "_name_of",
        "_references",
        "blocks",
        "coalesce_removals",
        "emit_events",
        "version",
    )

    def __init__(self, blocks: int, *, emit_events: bool = True, coalesce_removals: bool = False) -> None:
        assert blocks >= 2, "a pool needs the null block and one more"
        self.blocks = blocks
        self.emit_events = emit_events
        self.coalesce_removals = coalesce_removals
        self.version = 0
        """Grows with every change that could let a blocked request in, or keep one out."""
        self._references = [0] * blocks
        self._name_of: list[EngineHash | None] = [None] * blocks
        self._free: OrderedDict[BlockId, None] = OrderedDict.fromkeys(range(1, blocks))
        self._copies: dict[EngineHash, BlockId | dict[BlockId, None]] = {}
        self._events: list[KvEvent] = []

    @property
    def free_blocks(self) -> int:
        """Blocks nobody holds; findable ones among them are evicted only when taken."""
        return len(self._free)

    @property
    def held_blocks(self) -> int:
        """Blocks some request holds, without the null block."""
        return self.blocks - 1 - len(self._free)

    @property
    def usage(self) -> float:
        """Held share of the usable blocks, 0 to 1."""
        return self.held_blocks / (self.blocks - 1)

    @property
    def cached_names(self) -> int:
        """Distinct names that can be hit."""
        return len(self._copies)

    def match(self, names: Sequence[EngineHash], blocks_max: int) -> list[BlockId]:
        """One block for each name of the longest findable prefix, at most ``blocks_max``. Holds nothing."""
        found: list[BlockId] = []
        copies = self._copies
        for name in names[:blocks_max]:
            entry = copies.get(name)
            if entry is None:
                break
            found.append(entry if isinstance(entry, int) else next(iter(entry)))
        return found

    def unheld(self, block_ids: Iterable[BlockId]) -> int:
        """How many of these are in the free queue, and so would leave it when touched."""
        references = self._references
        return sum(1 for block_id in block_ids if not references[block_id])

    def touch(self, block_ids: Iterable[BlockId]) -> None:
        """Hold each block once more; those in the free queue leave it."""
        references, free = self._references, self._free
        for block_id in block_ids:
            if not references[block_id]:
                del free[block_id]
            references[block_id] += 1
        self.version += 1

    def allocate(self, count: int) -> list[BlockId]:
        """Take ``count <= free_blocks`` blocks from the front of the queue; their names are evicted."""
        assert count <= len(self._free), "the caller checks room before it allocates"
        references, name_of, copies = self._references, self._name_of, self._copies
        pop = self._free.popitem
        taken: list[BlockId] = []
        evicted: list[EngineHash] = []
        for _ in range(count):
            block_id, _none = pop(False)
            references[block_id] = 1
            taken.append(block_id)
            name = name_of[block_id]
            if name is None:
                continue
            name_of[block_id] = None
            evicted.append(name)
            entry = copies[name]
            if not isinstance(entry, int):
                del entry[block_id]
                if entry:
                    continue
            del copies[name]
        if evicted and self.emit_events:
            if self.coalesce_removals:
                self._events.append(BlockRemoved(tuple(evicted), GPU, 0))
            else:
                self._events.extend([BlockRemoved((name,), GPU, 0) for name in evicted])
        self.version += 1
        return taken

    def store(self, content: Content, block_ids: Sequence[BlockId], first: int, last: int) -> None:
        """Make blocks ``first`` to ``last`` (exclusive) of a request findable; they must be held and unnamed."""
        names, copies, name_of = content.names(last), self._copies, self._name_of
        for name, block_id in zip(names[first:last], block_ids[first:last], strict=True):
            assert name_of[block_id] is None, "a named block is never stored again"
            name_of[block_id] = name
            entry = copies.setdefault(name, block_id)
            if entry != block_id:
                if isinstance(entry, int):
                    copies[name] = {entry: None, block_id: None}
                else:
                    entry[block_id] = None
        if self.emit_events:
            self._events.append(content.stored(first, last))
        self.version += 1

    def report(self, content: Content, blocks: int) -> None:
        """Say once more that the first ``blocks`` blocks are stored; the pool does not change."""
        if blocks and self.emit_events:
            self._events.append(content.stored(0, blocks))

    def free(self, block_ids: Sequence[BlockId]) -> None:
        """Let go of a request's blocks, given in the request's order; the last is evicted first."""
        references, name_of, free = self._references, self._name_of, self._free
        unnamed: list[BlockId] = []
        for block_id in reversed(block_ids):
            left = references[block_id] - 1
            references[block_id] = left
            if left:
                assert left > 0, "a block is freed as often as it was held"
                continue
            free[block_id] = None
            if name_of[block_id] is None:
                unnamed.append(block_id)
        for block_id in reversed(unnamed):
            free.move_to_end(block_id, last=False)
        self.version += 1

    def reset(self) -> bool:
        """Forget all names. Refused, and False, while any block is held."""
        if self.held_blocks:
            return False
        self._copies.clear()
        self._name_of = [None] * self.blocks
        if self.emit_events:
            self._events.append(AllBlocksCleared())
        self.version += 1
        return True

    def take_events(self) -> tuple[KvEvent, ...]:
        """What happened since the last call, in order."""
        if not self._events:
            return ()
        events = tuple(self._events)
        self._events.clear()
        return events

    def findable(self) -> dict[EngineHash, int]:
        """Every name and how many blocks carry it. For reports and tests; costs the whole cache."""
        return {name: 1 if isinstance(e, int) else len(e) for name, e in self._copies.items()}

    def eviction_order(self) -> tuple[BlockId, ...]:
        """The free queue, next to be taken first. For tests; costs the whole queue."""
        return tuple(self._free)
