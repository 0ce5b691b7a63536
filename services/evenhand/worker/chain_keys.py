"""From a store's tokens and extra keys to the content keys of its blocks.

The rule is ``core.block_key``'s, block by block; here it is arranged for speed: formats are made once, roots are
remembered, and a SHA-256 that is copied is a third cheaper than one that is made.
"""

import hashlib
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from evenhand.core.block_key import KEY_BYTES, child_key, root_hash
from evenhand.worker.engine_events import BlockStored
from evenhand.worker.extras import read_extras

PACKERS_MAX: Final = 256
"""Store lengths whose packing format is kept ready."""
ROOTS_MAX: Final = 4_096
"""Roots (salt, LoRA) remembered; a root costs one hash, so all are forgotten at once when there are more."""
_EMPTY_SHA256: Final = hashlib.sha256()
_UNPACKERS: Final = tuple(struct.Struct(f">{count}Q").unpack for count in range(65))
"""Ready formats for the short chains that nearly all stores are."""


@dataclass(frozen=True, slots=True)
class StoreExtras:
    """What a store's extra keys say."""

    salt: str
    fields: Sequence[tuple[bytes, ...]] | None
    """Byte fields of each block, up to the first that is not understood; None where no block has any."""


class KeyMaker:
    """Keys under one model. Remembers what is costly to make, within bounds."""

    __slots__ = ("_model", "_packers", "_roots")

    def __init__(self, model: str) -> None:
        self._model = model
        self._packers: dict[int, Callable[..., bytes]] = {}
        self._roots: dict[tuple[str, str], bytes] = {}

    def pack(self, token_ids: Sequence[int]) -> bytes:
        """Token ids as ``core.block_key`` hashes them; raises ``struct.error`` for one outside uint32."""
        count = len(token_ids)
        packer = self._packers.get(count)
        if packer is None:
            packer = struct.Struct(f"<{count}I").pack
            if len(self._packers) < PACKERS_MAX:
                self._packers[count] = packer
        return packer(*token_ids)

    def root(self, event: BlockStored, salt: str) -> bytes:
        """Parent of a first block. An adapter that is told by number alone is named ``#NUMBER``."""
        lora = event.lora_name or ("" if event.lora_id is None else f"#{event.lora_id}")
        root = self._roots.get((lora, salt))
        if root is None:
            if len(self._roots) >= ROOTS_MAX:
                self._roots.clear()
            root = self._roots[lora, salt] = root_hash(self._model, lora, salt)
        return root


def store_extras(event: BlockStored) -> StoreExtras:
    """Understand the extra keys of a store that has any."""
    entries = event.extra_keys
    assert entries, "a store without extra keys has nothing to understand"
    at_root = event.parent_block_hash is None
    match entries[0]:
        case [str(salt)] if salt and at_root and not event.lora_name and entries.count(None) == len(entries) - 1:
            return StoreExtras(salt, None)  # Nearly all that have any: a salt and nothing else.
    salt = ""
    fields: list[tuple[bytes, ...]] = []
    for index, entry in enumerate(entries):
        extras = read_extras(entry, event.lora_name, first_block=at_root and index == 0)
        if extras is None:
            return StoreExtras(salt, fields)
        salt = salt or extras.salt
        fields.append(extras.fields)
    return StoreExtras(salt, fields if any(fields) else None)


def chain_keys(
    parent: bytes,
    token_bytes: bytes,
    block_bytes: int,
    count: int,
    extra_fields: Sequence[tuple[bytes, ...]] | None = None,
) -> tuple[int, ...]:
    """Keys of ``count`` blocks, one under the other, the first under ``parent`` (root or key)."""
    keys = []
    if extra_fields is None:
        begin = _EMPTY_SHA256.copy
        for start in range(0, count * block_bytes, block_bytes):
            sha256 = begin()
            sha256.update(parent + token_bytes[start : start + block_bytes])
            parent = sha256.digest()[:KEY_BYTES]
            keys.append(parent)
    else:
        for index in range(count):
            start = index * block_bytes
            parent = child_key(parent, token_bytes[start : start + block_bytes], extra_fields[index])
            keys.append(parent)
    if count < len(_UNPACKERS):
        return _UNPACKERS[count](b"".join(keys))
    return struct.unpack(f">{count}Q", b"".join(keys))
