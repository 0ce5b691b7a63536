"""What an engine says about its cache: the facts, before they become bytes.

Field names are those of the wire, so that one vocabulary serves pool, encoder and tests. ``kv_events``
turns these into msgpack; a simulation reads them as they are.

Holds always: ``extra_keys``, where present, has one entry per hash; the hashes of one store chain one
after another, the first from ``parent_block_hash``. A store made from opaque keys carries no token ids.
"""

from dataclasses import dataclass

EngineHash = int | bytes
"""A block's name within one engine life: 32 bytes, or the last 8 of them as an unsigned integer."""

ExtraKeys = tuple[str, ...]
"""What else went into a block's hash, in order: the LoRA name on every block, the salt on the first."""


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Full blocks became findable. A second copy of a hash is stored, and later removed, once more."""

    block_hashes: tuple[EngineHash, ...]
    parent_block_hash: EngineHash | None
    token_ids: tuple[int, ...]
    block_size: int
    lora_id: int | None = None
    medium: str | None = "GPU"
    lora_name: str | None = None
    extra_keys: tuple[ExtraKeys | None, ...] | None = None
    group_idx: int | None = 0
    kv_cache_spec_kind: str | None = "full_attention"
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """One copy of each hash is gone: its block was taken for something else."""

    block_hashes: tuple[EngineHash, ...]
    medium: str | None = "GPU"
    group_idx: int | None = 0
    locality: str | None = None
    ownership: str | None = None


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """The whole prefix cache was reset; nothing is findable any more."""


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared
