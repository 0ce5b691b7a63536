"""What an engine says about its cache: the facts, in the shape they have on the wire.

Field names and their order are the wire's, so one vocabulary serves pool, encoder and tests, and an event
is encoded as it stands. They are msgspec structs and not dataclasses because a simulation makes one or two
a block, and a frozen dataclass of this width costs more to make than everything else done to the block.

Holds always: ``extra_keys``, where present, has one entry per hash; the hashes of one store chain one
after another, the first from ``parent_block_hash``. A store made from opaque names carries no token ids.
"""

import msgspec

EngineHash = int | bytes
"""A block's name within one engine life: 32 bytes, or the last 8 of them as an unsigned integer."""

ExtraKeys = tuple[str, ...]
"""What else went into a block's hash, in order: the LoRA name on every block, the salt on the first."""

GPU = "GPU"
"""The medium of every block here."""

FULL_ATTENTION = "full_attention"
"""The kind of the one group of blocks here, group 0."""


class BlockStored(msgspec.Struct, frozen=True, tag=True, omit_defaults=True, gc=False):
    """Full blocks became findable. A second copy of a hash is stored, and later removed, once more."""

    block_hashes: tuple[EngineHash, ...]
    parent_block_hash: EngineHash | None
    token_ids: tuple[int, ...]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: tuple[ExtraKeys | None, ...] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


class BlockRemoved(msgspec.Struct, frozen=True, tag=True, omit_defaults=True, gc=False):
    """One copy of each hash is gone: its block was taken for something else."""

    block_hashes: tuple[EngineHash, ...]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, tag=True, gc=False):
    """The whole prefix cache was reset; nothing is findable any more."""


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared
