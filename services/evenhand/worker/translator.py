"""From an engine's own events to block keys: the heart of a worker's edge.

A pure state machine. It reads frames of one engine rank and returns what a cache map must be told, in order; it
knows no socket, clock or log. Time and the number of the batch that its answer goes out in are arguments.

::

    frame ─▶ decode ─▶ group a prefix? ─▶ tokens, extras, parent ─▶ keys ─▶ copies counted ─▶ operations
               │           no: counted        parent unknown: waits            0→1, 1→0 only
               └ unknown, malformed: counted

What always holds: an operation's keys are content keys of ``core.block_key``; a key goes out as stored only while
it is not held, as removed only while it is; nothing but a decoded clear clears; a bad event changes nothing but a
counter; memory is bounded by what the engine can hold (``holdings``) and what may wait (``waiting``).

It does not judge whether frames are in order or from one life of the engine: see ``continuity``.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from evenhand.core.block_key import KEY_BYTES
from evenhand.core.errors import MalformedMessage
from evenhand.core.ids import Seq
from evenhand.core.kv import Cleared, KvOperation, Removed, Stored, Tier
from evenhand.worker.chain_keys import KeyMaker, chain_keys, store_extras
from evenhand.worker.counters import TranslatorCounters
from evenhand.worker.engine_events import (
    BlockRemoved,
    BlockStored,
    EngineHash,
    decode_frame,
)
from evenhand.worker.holdings import TIERS, Holdings, Lane, LaneRecord
from evenhand.worker.prefix_groups import PrefixGroups
from evenhand.worker.waiting import Chain, WaitingStore, WaitingStores


@dataclass(frozen=True, slots=True)
class TranslatorConfig:
    """What an edge must know to compute keys."""

    model: str
    block_size_tokens: int = 0
    """Tokens a block; 0 takes the size of the first store."""
    kv_blocks: int = 0
    """Blocks that the engine can hold, its null block left out; 0 where that is unknown."""
    data_parallel_rank: int | None = None
    """Frames of another rank are not ours; None takes all."""


@dataclass(slots=True)
class Translated:
    """What one frame came to. Treat as frozen: it is left unfrozen because it is made once a frame."""

    operations: tuple[KvOperation, ...]
    emitted_at_ms: int = 0


@dataclass(frozen=True, slots=True)
class TranslatorState:
    """What a checkpoint keeps. Stores that wait for a parent are left out: they carry token ids."""

    block_size_tokens: int
    prefix_groups: tuple[tuple[int, bool], ...]
    lanes: tuple[LaneRecord, ...]


class Translator:
    """One engine rank's events, translated. Owned by one task; not safe to share."""

    __slots__ = (
        "_block_size",
        "_config",
        "_groups",
        "_holdings",
        "_keys",
        "_operations",
        "_waiting",
        "counters",
    )

    def __init__(self, config: TranslatorConfig, state: TranslatorState | None = None, seq: Seq = Seq(0)) -> None:
        """``state`` and ``seq`` continue from a checkpoint: all it holds counts as published by batch ``seq``."""
        self.counters = TranslatorCounters()
        self._config = config
        self._block_size = config.block_size_tokens
        self._keys = KeyMaker(config.model)
        self._holdings = Holdings(self.counters, config.kv_blocks)
        self._groups = PrefixGroups(self._holdings, self.counters)
        self._waiting = WaitingStores()
        self._operations: list[tuple[type[Stored | Removed | Cleared], Tier, list[int]]] = []
        if state is not None:
            self._block_size = self._block_size or state.block_size_tokens
            self._groups.restore(state.prefix_groups)
            self._holdings.restore(state.lanes, seq)

    @property
    def block_size_tokens(self) -> int:
        """0 until it is known."""
        return self._block_size

    @property
    def stores_waiting(self) -> int:
        return len(self._waiting)

    @property
    def phantoms_max(self) -> int:
        """Held or silent names that could be phantoms; no more than these are."""
        return self._holdings.doubted_total()

    @property
    def names_total(self) -> int:
        """Engine hashes known: what memory is spent on."""
        return self._holdings.names_total()

    def held(self, tier: Tier) -> tuple[int, ...]:
        """Keys held on a tier, oldest first."""
        return tuple(self._holdings.held(tier))

    def learn_kv_blocks(self, kv_blocks: int) -> None:
        """The engine's size became known."""
        self._holdings.set_device_blocks(kv_blocks)

    def counters_continue(self, counters: TranslatorCounters) -> None:
        """Count on where another translator of the same edge ended."""
        for name, value in counters.as_mapping().items():
            setattr(self.counters, name, value)

    def restamp(self, seq: Seq) -> None:
        """All that is held counts as stored in batch ``seq``: numbers have begun anew."""
        self._holdings.restamp(seq)

    def forget_all(self) -> None:
        """A new life of the engine's cache: nothing is held. Counters go on."""
        self._holdings.clear()
        self._waiting = WaitingStores()
        self._groups.clear()

    def state(self) -> TranslatorState:
        return TranslatorState(self._block_size, self._groups.known(), self._holdings.export())

    def translate(self, payload: bytes, now_ms: int, seq: Seq) -> Translated:
        """Read one frame. What it returns must go out in batch ``seq`` or a later one, in order.

        Never raises for any bytes: what cannot be read is counted.
        """
        counters = self.counters
        counters.frames += 1
        try:
            frame = decode_frame(payload, counters)
        except MalformedMessage:
            counters.frames_malformed += 1
            return Translated(())
        own_rank = self._config.data_parallel_rank
        if own_rank is not None and frame.data_parallel_rank not in (None, own_rank):
            counters.frames_of_other_rank += 1
            return Translated(())
        counters.events += len(frame.events)
        names: list[EngineHash] = []
        lane: Lane | None = None
        medium: str | None = None
        group: int | None = -1
        locality: str | None = None
        for event in frame.events:
            if isinstance(event, BlockRemoved):
                # Evictions come one block an event: a run of one sort is counted at once.
                if event.medium != medium or event.group_idx != group or event.locality != locality:
                    if names:
                        self._removed(lane, names)
                    names = []
                    medium, group, locality = event.medium, event.group_idx, event.locality
                    lane = self._groups.lane_of(event)
                elif lane is None:
                    self._groups.lane_of(event)
                names += event.block_hashes
                continue
            if names:
                self._removed(lane, names)
                names = []
            if isinstance(event, BlockStored):
                self._stored(event, now_ms, seq)
                # It may have told what kind of cache a group is.
                group = -1 if lane is None else group
            else:
                self._cleared()
        if names:
            self._removed(lane, names)
        if self._waiting.blocks:
            counters.stores_waiting_expired += self._waiting.drop_expired(now_ms)
        if self._holdings.in_excess:
            for tier in TIERS:
                self._emit(Removed, tier, self._holdings.silence_excess(tier))
        return Translated(self._take_operations(), frame.emitted_at_ms)

    def refute(self, keys: Sequence[int], tier: Tier, seq: Seq) -> tuple[KvOperation, ...]:
        """Keys that the engine turned out not to have; a store that went out after batch ``seq`` stands."""
        silenced = self._holdings.refute(tier, keys, seq)
        self.counters.keys_refuted += len(silenced)
        self.counters.keys_refutation_stale += len(keys) - len(silenced)
        self._emit(Removed, tier, silenced)
        return self._take_operations()

    # -- events

    def _stored(self, event: BlockStored, now_ms: int, seq: Seq) -> None:
        counters = self.counters
        lane = self._groups.lane_of_store(event)
        if lane is None:
            return
        names = event.block_hashes
        if not names:
            counters.stores_without_hashes += 1
            return
        token_ids, block_size = event.token_ids, event.block_size
        if not token_ids or block_size <= 0:
            self._stored_without_tokens(lane, names, seq)
            return
        if block_size != self._block_size:
            if self._block_size:
                counters.stores_of_other_block_size += 1
                return
            self._block_size = block_size
        count, extra_keys = len(names), event.extra_keys
        if len(token_ids) != count * block_size or (extra_keys is not None and len(extra_keys) != count):
            counters.events_malformed += 1
            return
        try:
            token_bytes = self._keys.pack(token_ids)
        except struct.error:
            counters.events_malformed += 1
            return
        counters.blocks_stored += count
        salt = ""
        extra_fields: Sequence[tuple[bytes, ...]] | None = None
        if extra_keys is not None and extra_keys.count(None) != count:
            extras = store_extras(event)
            salt, extra_fields = extras.salt, extras.fields
            if extra_fields is not None and len(extra_fields) < count:
                counters.stores_with_unknown_extras += 1
                names = names[: len(extra_fields)]
                if not names:
                    return
        parent = event.parent_block_hash
        if parent is None:
            parent_bytes = self._keys.root(event, salt)
        else:
            parent_key = lane.key_of.get(parent)
            if parent_key is None:
                parent_key = self._holdings.key(parent)
            if parent_key is None:
                counters.stores_waiting += 1
                chain = Chain(lane, names, token_bytes, extra_fields)
                self._waiting.add(WaitingStore(parent, chain, now_ms))
                counters.stores_waiting_overflowed += self._waiting.drop_overflow()
                return
            parent_bytes = parent_key.to_bytes(KEY_BYTES, "big")
        keys = chain_keys(parent_bytes, token_bytes, 4 * block_size, len(names), extra_fields)
        self._emit(Stored, lane.tier, self._holdings.store(lane, names, keys, seq))
        if self._waiting.blocks:
            self._link(names, keys, seq)

    def _removed(self, lane: Lane | None, names: list[EngineHash]) -> None:
        """A run of removals in one lane; None if it says nothing about a prefix held here."""
        if lane is None:
            return
        self.counters.blocks_removed += len(names)
        unknown: list[EngineHash] = []
        ended = self._holdings.remove(lane, names, unknown)
        for name in unknown:
            if not self._waiting.mark_removed(lane, name):
                self.counters.removals_unknown_blocks += 1
        self._emit(Removed, lane.tier, ended)

    def _cleared(self) -> None:
        self.counters.clears += 1
        self._holdings.clear()
        self._waiting = WaitingStores()
        self._operations.append((Cleared, Tier.DEVICE, []))

    def _stored_without_tokens(self, lane: Lane, names: Sequence[EngineHash], seq: Seq) -> None:
        self.counters.stores_without_tokens += 1
        found = {name: key for name in names if (key := self._holdings.key(name)) is not None}
        known = [name for name in names if name in found]
        self.counters.blocks_without_tokens_unknown += len(names) - len(known)
        self._emit(Stored, lane.tier, self._holdings.store(lane, known, [found[name] for name in known], seq))

    # -- keys

    def _link(self, names: Sequence[EngineHash], keys: Sequence[int], seq: Seq) -> None:
        """Chain whatever waited for these names, and what waited for that.

        What was removed while it waited gets a key for its children's sake, and is not held.
        """
        pending = [(names, keys)]
        while pending:
            names, keys = pending.pop()
            for parent, parent_key in zip(names, keys, strict=True):
                for store in self._waiting.take_children(parent):
                    self.counters.stores_linked += 1
                    chain = store.chain
                    parent_bytes, block_bytes = parent_key.to_bytes(KEY_BYTES, "big"), 4 * self._block_size
                    chained = chain_keys(
                        parent_bytes, chain.token_bytes, block_bytes, len(chain.names), chain.extra_fields
                    )
                    kept = [index for index, name in enumerate(chain.names) if name not in chain.gone]
                    held = [chain.names[index] for index in kept], [chained[index] for index in kept]
                    self._emit(Stored, chain.lane.tier, self._holdings.store(chain.lane, *held, seq))
                    pending.append((chain.names, chained))

    # -- operations

    def _emit(self, kind: type[Stored | Removed], tier: Tier, keys: Sequence[int]) -> None:
        if not keys:
            return
        operations = self._operations
        if operations and operations[-1][0] is kind and operations[-1][1] is tier:
            operations[-1][2].extend(keys)
        else:
            operations.append((kind, tier, list(keys)))

    def _take_operations(self) -> tuple[KvOperation, ...]:
        taken = self._operations
        if not taken:
            return ()
        self._operations = []
        operations: list[KvOperation] = []
        for kind, tier, keys in taken:
            operations.append(Cleared() if kind is Cleared else kind(tuple(keys), tier))  # type: ignore[call-arg]
        return tuple(operations)
