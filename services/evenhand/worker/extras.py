"""Extra keys of a block: what besides tokens went into an engine's hash.

vLLM publishes one entry per block: None, or a list with, in order, the LoRA name, ``(identifier, offset)`` pairs
of multi-modal inputs, the cache salt as bare text (first block of a prompt only) and digests of prompt embeddings.
Tagged forms (``["cache_salt", text]`` and the like) mean the same.

The salt goes into the root, the LoRA name too; pairs and digests go into the block's key as byte fields, which
``core.block_key.child_key`` length-prefixes: an identifier in UTF-8 and an offset as 8 bytes big-endian, signed; a
digest as it is. Anything else is not understood, and a chain stops there: a key that leaves something out could
match content that differs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

OFFSET_BYTES = 8


@dataclass(frozen=True, slots=True)
class BlockExtras:
    """One block's extra keys, understood."""

    fields: tuple[bytes, ...] = ()
    """What ``child_key`` takes as ``extra_keys``."""
    salt: str = ""


NO_EXTRAS = BlockExtras()


def read_extras(entry: Sequence[Any] | None, lora_name: str | None, first_block: bool) -> BlockExtras | None:
    """Understand one block's entry; None if anything in it is not understood."""
    if not entry:
        return NO_EXTRAS
    items = list(entry)
    if lora_name and items[0] in (lora_name, ["lora", lora_name]):
        del items[0]
    fields: list[bytes] = []
    salt = ""
    for item in items:
        text = _salt_of(item)
        if text is not None:
            if not first_block or salt or not text:
                return None
            salt = text
            continue
        encoded = _encode(item)
        if encoded is None:
            return None
        fields.extend(encoded)
    return BlockExtras(tuple(fields), salt)


def _salt_of(item: Any) -> str | None:
    match item:
        case str(text) | ["cache_salt", str(text)]:
            return text
        case _:
            return None


def _encode(item: Any) -> tuple[bytes, ...] | None:
    match item:
        case bytes(digest) | ["prompt_embeds", bytes(digest)]:
            return (digest,)
        case [str(identifier), int(offset)] | ["mm", str(identifier), int(offset)] if abs(offset) < 2**63:
            return identifier.encode(), offset.to_bytes(OFFSET_BYTES, "big", signed=True)
        case _:
            return None
