"""The recorded streams of a real engine, and a fold of them that shares no code with the product."""

import base64
import hashlib
import json
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CAPTURES = Path(__file__).parent / "captures"
MODEL = "tiny"
BLOCK_SIZE = 32
KV_BLOCKS = 39
"""40 blocks, one of them the null block."""


@dataclass(frozen=True)
class RecordedFrame:
    """One frame as it was received."""

    seq: int
    received_at_s: float
    payload: bytes
    decoded: list[Any]

    @property
    def events(self) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = self.decoded[1]
        return events


def lines(name: str) -> Iterator[dict[str, Any]]:
    """The JSON objects of one recorded file."""
    with (CAPTURES / name).open() as file:
        yield from map(json.loads, file)


def frames(name: str) -> list[RecordedFrame]:
    """The frames of one recorded file."""
    return [
        RecordedFrame(line["seq"], line["recv_ts"], base64.b64decode(line["payload_b64"]), line["decoded"])
        for line in lines(name)
    ]


def prefixed(*fields: bytes) -> bytes:
    return b"".join(len(field).to_bytes(4, "big") + field for field in fields)


def independent_root(model: str, salt: str) -> bytes:
    return hashlib.sha256(prefixed(b"evenhand.block.v1", model.encode(), b"", salt.encode())).digest()


def independent_keys(parent: bytes, token_ids: Sequence[int], block_size: int) -> list[bytes]:
    keys = []
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        tokens = b"".join(struct.pack("<I", token) for token in token_ids[start : start + block_size])
        parent = hashlib.sha256(parent + tokens).digest()[:8]
        keys.append(parent)
    return keys


@dataclass
class OracleFold:
    """What an engine holds by its own events, straight from their JSON form. Full-attention groups only.

    ``skips_reports`` leaves out stores whose every block is held already and which begin at the root: in the
    recordings those are the re-reports of full-report mode and nothing else, so this is what the engine truly has.
    """

    model: str = MODEL
    block_size: int = BLOCK_SIZE
    skips_reports: bool = False
    keys: dict[int, bytes] = field(default_factory=dict)
    copies: Counter[int] = field(default_factory=Counter)
    groups: dict[int, str] = field(default_factory=dict)
    reported_again: set[int] = field(default_factory=set)

    def fold(self, events: Sequence[dict[str, Any]]) -> None:
        for event in events:
            if event["type"] == "AllBlocksCleared":
                self.keys.clear()
                self.copies.clear()
                self.reported_again.clear()
                continue
            group = event["group_idx"]
            if event["type"] == "BlockStored":
                self.groups[group] = event["kv_cache_spec_kind"]
            if self.groups[group] != "full_attention":
                continue
            if event["type"] == "BlockStored":
                self._stored(event)
            else:
                for name in event["block_hashes"]:
                    self.copies[name] -= 1
                    assert self.copies[name] >= 0, "a recording removes what was never stored"

    def _stored(self, event: dict[str, Any]) -> None:
        parent = event["parent_block_hash"]
        salts = [text for entry in event["extra_keys"][:1] if entry for text in entry]
        start = independent_root(self.model, salts[0] if salts else "") if parent is None else self.keys[parent]
        keys = independent_keys(start, event["token_ids"], self.block_size)
        names = event["block_hashes"]
        assert len(keys) == len(names)
        report = parent is None and len(names) > 1 and all(self.copies[name] for name in names)
        if report:
            self.reported_again.update(int.from_bytes(key, "big") for key in keys)
        for name, key in zip(names, keys, strict=True):
            self.keys[name] = key
            if not (report and self.skips_reports):
                self.copies[name] += 1

    def held(self) -> set[int]:
        return {int.from_bytes(self.keys[name], "big") for name, count in self.copies.items() if count > 0}
