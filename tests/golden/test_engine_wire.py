"""The encoder against what a real engine put on the wire: byte for byte."""

import base64
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from evenhand.engine.events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent
from evenhand.engine.kv_events import EventEncoder, EventForm

CAPTURES = Path(__file__).parent / "captures"
STREAMS = (
    "e0.live.jsonl",
    "e0.dup_abort.jsonl",
    "e0.restart.jsonl",
    "dp2.0.jsonl",
    "dp2.1.jsonl",
    "hybrid.jsonl",
)


def event_of(fields: dict[str, Any]) -> KvEvent:
    values = {name: value for name, value in fields.items() if name != "type"}
    if "block_hashes" in values:
        values["block_hashes"] = tuple(values["block_hashes"])
    match fields["type"]:
        case "BlockStored":
            values["token_ids"] = tuple(values["token_ids"])
            values["extra_keys"] = tuple(k if k is None else tuple(k) for k in values["extra_keys"])
            return BlockStored(**values)
        case "BlockRemoved":
            return BlockRemoved(**values)
        case _:
            return AllBlocksCleared()


@pytest.mark.parametrize("name", STREAMS)
def test_every_recorded_payload_is_reproduced_byte_for_byte(name: str) -> None:
    encoder = EventEncoder()
    recorded = [json.loads(line) for line in (CAPTURES / name).read_text().splitlines()]
    assert recorded
    for line in recorded:
        timestamp, events, rank = line["decoded"]
        payload = encoder.batch(timestamp, [event_of(event) for event in events], rank)
        assert payload == base64.b64decode(line["payload_b64"]), f"sequence {line['seq']}"


def test_bytes_hashes_travel_as_binary() -> None:
    stored = BlockStored((b"\x01" * 32,), b"\x02" * 32, (1, 2), 2, None, "GPU", None)
    decoded = msgspec.msgpack.decode(EventEncoder().batch(1.0, [stored], 0))
    assert decoded[1][0]["block_hashes"] == [b"\x01" * 32]
    assert decoded[1][0]["parent_block_hash"] == b"\x02" * 32


def test_the_array_form_is_positional() -> None:
    events: list[KvEvent] = [
        BlockStored((5,), None, (1, 2), 2, None, "GPU", "l", group_idx=0),
        BlockRemoved((5,), "GPU", 0),
        AllBlocksCleared(),
    ]
    decoded = msgspec.msgpack.decode(EventEncoder(EventForm.ARRAY).batch(2.5, events, 3))
    assert decoded == [
        2.5,
        [
            ["BlockStored", [5], None, [1, 2], 2, None, "GPU", "l"],
            ["BlockRemoved", [5], "GPU"],
            ["AllBlocksCleared"],
        ],
        3,
    ]
