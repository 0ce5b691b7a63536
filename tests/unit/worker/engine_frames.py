"""Frames as engines write them, made by hand for tests."""

from collections.abc import Sequence
from typing import Any

import msgspec

from evenhand.core.block_key import block_keys, root_hash
from evenhand.core.ids import Seq
from evenhand.core.kv import KvOperation, Removed, Stored, Tier
from evenhand.worker.translator import Translator, TranslatorConfig

MODEL = "m"
SIZE = 4


def frame(*events: Any, rank: int | None = 0, at: Any = 1.5) -> bytes:
    return msgspec.msgpack.encode([at, list(events), rank])


def tokens(first: int, blocks: int) -> list[int]:
    return list(range(first, first + blocks * SIZE))


def stored(names: Sequence[Any], token_ids: Sequence[Any], parent: Any = None, **more: Any) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": list(names),
        "parent_block_hash": parent,
        "token_ids": list(token_ids),
        "block_size": SIZE,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    } | more


def removed(*names: Any, **more: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(names), "medium": "GPU"} | more


CLEARED = {"type": "AllBlocksCleared"}


def keys(token_ids: Sequence[int], salt: str = "", lora: str = "") -> tuple[int, ...]:
    return block_keys(token_ids, SIZE, root_hash(MODEL, lora, salt))


def translator(**settings: Any) -> Translator:
    return Translator(TranslatorConfig(MODEL, SIZE, **settings))


def feed(subject: Translator, *events: Any, now_ms: int = 0, seq: int = 1) -> tuple[KvOperation, ...]:
    return subject.translate(frame(*events), now_ms, Seq(seq)).operations


def stores(*some: int, tier: Tier = Tier.DEVICE) -> Stored:
    return Stored(tuple(some), tier)


def removes(*some: int, tier: Tier = Tier.DEVICE) -> Removed:
    return Removed(tuple(some), tier)
