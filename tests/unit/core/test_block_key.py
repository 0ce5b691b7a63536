"""Block keys against the vectors, and the vectors against a second implementation."""

import json
import struct
from typing import Any

import pytest
from tests.unit.core.block_key_reference import VECTORS, document

from evenhand.core.block_key import (
    block_keys,
    child_key,
    domain_salt,
    pack_keys,
    root_hash,
    unpack_keys,
    usable_blocks,
)

DOCUMENT: dict[str, Any] = json.loads(VECTORS.read_text(encoding="ascii"))


def chain_keys(chain: dict[str, Any]) -> list[bytes]:
    """Keys of a chain by ``child_key``, one block at a time, so that extra keys take part."""
    size, tokens, parent, keys = chain["block_size"], chain["token_ids"], bytes.fromhex(chain["root"]), []
    for block in range(len(tokens) // size):
        packed = struct.pack(f"<{size}I", *tokens[block * size : (block + 1) * size])
        extras = chain["extra_keys"][block] if block < len(chain["extra_keys"]) else []
        parent = child_key(parent, packed, [bytes.fromhex(extra) for extra in extras])
        keys.append(parent)
    return keys


def test_vectors_are_those_of_the_reference() -> None:
    assert VECTORS.read_text(encoding="ascii") == document(), "run block_key_reference.py --write, read the diff"


@pytest.mark.parametrize("vector", DOCUMENT["salts"], ids=lambda v: f"{v['pool']}-{v['domain']}-{v['generation']}")
def test_salts(vector: dict[str, Any]) -> None:
    secret = bytes.fromhex(vector["secret"])
    assert domain_salt(secret, vector["pool"], vector["domain"], vector["generation"]) == vector["salt"]


@pytest.mark.parametrize("chain", DOCUMENT["chains"], ids=lambda chain: chain["name"])
def test_chains(chain: dict[str, Any]) -> None:
    root = root_hash(chain["model"], chain["lora"], chain["salt"])
    assert root.hex() == chain["root"]
    assert [key.hex() for key in chain_keys(chain)] == chain["keys"]
    if not chain["extra_keys"]:
        keys = block_keys(chain["token_ids"], chain["block_size"], root)
        assert pack_keys(keys).hex() == "".join(chain["keys"])


def test_chains_of_different_content_share_no_key() -> None:
    """Model, LoRA, salt and extra keys keep chains apart; the only equal ones extend one another."""
    same = {"two whole blocks", "the rest of a block has no key"}
    first_keys: dict[str, str] = {}
    for chain in DOCUMENT["chains"]:
        if chain["keys"] and chain["name"] not in same and chain["name"] != "an extra key in the second block":
            assert first_keys.setdefault(chain["keys"][0], chain["name"]) == chain["name"]
    assert len(first_keys) == 10


def test_a_key_depends_on_its_whole_prefix() -> None:
    root = root_hash("m")
    one, other = block_keys(range(64), 16, root), block_keys([1, *range(1, 64)], 16, root)
    assert not set(one) & set(other)
    assert block_keys(range(32), 16, root) == one[:2]


def test_packing() -> None:
    keys = (0, 1, 2**64 - 1)
    assert pack_keys(keys) == bytes(8) + bytes(7) + b"\x01" + b"\xff" * 8
    assert unpack_keys(pack_keys(keys)) == keys
    assert unpack_keys(b"") == ()
    with pytest.raises(ValueError, match="multiple of 8 bytes long, not 9"):
        unpack_keys(b"123456789")


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="block size must be at least 1, not 0"):
        block_keys([1, 2], 0, root_hash("m"))
    for token in (-1, 2**32):
        with pytest.raises(struct.error):
            block_keys([token], 1, root_hash("m"))


def test_usable_blocks_leave_the_last_token_to_compute() -> None:
    assert [usable_blocks(tokens, 16) for tokens in (0, 1, 16, 17, 32, 33)] == [0, 0, 0, 1, 1, 2]
