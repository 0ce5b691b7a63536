"""The block key contract a second time, as plainly as it can be said, and the test vectors made with it.

Nothing here comes from the package: whoever writes the contract in another language starts from this file and
checks against ``schemas/evenhand/v1/block_key_vectors.json``, which this file writes:

    python tests/unit/core/block_key_reference.py --write
"""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

VECTORS = Path(__file__).parents[3] / "schemas" / "evenhand" / "v1" / "block_key_vectors.json"


def field(value: bytes) -> bytes:
    return len(value).to_bytes(4, "big") + value


def hmac_sha256(key: bytes, message: bytes) -> bytes:
    """RFC 2104, spelled out."""
    if len(key) > 64:
        key = hashlib.sha256(key).digest()
    key = key.ljust(64, b"\0")
    inner = hashlib.sha256(bytes(byte ^ 0x36 for byte in key) + message).digest()
    return hashlib.sha256(bytes(byte ^ 0x5C for byte in key) + inner).digest()


def salt(secret: bytes, pool: str, domain: str, generation: int) -> str:
    message = field(pool.encode("utf-8")) + field(domain.encode("utf-8")) + field(str(generation).encode("ascii"))
    return hmac_sha256(secret, message).hex()


def root(model: str, lora: str, cache_salt: str) -> bytes:
    message = b""
    for part in ("evenhand.block.v1", model, lora, cache_salt):
        message += field(part.encode("utf-8"))
    return hashlib.sha256(message).digest()


def keys(tokens: list[int], block_size: int, parent: bytes, extras: list[list[bytes]]) -> list[bytes]:
    """Keys of all whole blocks; ``extras`` holds the extra keys of each block, and may be shorter."""
    result = []
    for block in range(len(tokens) // block_size):
        message = parent
        for token in tokens[block * block_size : (block + 1) * block_size]:
            message += token.to_bytes(4, "little")
        for extra in extras[block] if block < len(extras) else []:
            message += field(extra)
        parent = hashlib.sha256(message).digest()[:8]
        result.append(parent)
    return result


def vectors() -> dict[str, Any]:
    """The whole document: salts, and chains of keys. Binary values are hex; keys are hex of 8 bytes big-endian."""
    secret = bytes(range(32))
    salts = [
        (secret, "chat", "tenant-a", 1),
        (secret, "chat", "tenant-a", 2),
        (secret, "chat", "tenant-b", 1),
        (secret, "chatt", "enant-a", 1),
        (secret, "größe", "名前", 10),
        (b"\x01" * 100, "p", "", 1),
    ]
    domain = salt(secret, "chat", "tenant-a", 1)
    chains: list[tuple[str, str, str, str, list[int], int, list[list[bytes]]]] = [
        ("two whole blocks", "m", "", "", [1, 2, 3, 4, 5, 6, 7, 8], 4, []),
        ("the rest of a block has no key", "m", "", "", [1, 2, 3, 4, 5, 6, 7, 8, 9], 4, []),
        ("less than a block", "m", "", "", [1, 2, 3], 4, []),
        ("no token", "m", "", "", [], 4, []),
        ("blocks of one token", "m", "", "", [7, 7, 7], 1, []),
        ("another model", "n", "", "", [1, 2, 3, 4, 5, 6, 7, 8], 4, []),
        ("a LoRA adapter", "m", "adapter", "", [1, 2, 3, 4, 5, 6, 7, 8], 4, []),
        ("a salt", "m", "", domain, [1, 2, 3, 4, 5, 6, 7, 8], 4, []),
        ("fields do not run together", "ma", "dapter", "", [1, 2, 3, 4, 5, 6, 7, 8], 4, []),
        ("names beyond ASCII", "größe/模型", "", "", [1, 2, 3, 4], 4, []),
        ("the range of a token id", "m", "", "", [0, 4_294_967_295, 256, 65_536], 2, []),
        ("an extra key in the first block", "m", "", "", [1, 2, 3, 4, 5, 6, 7, 8], 4, [[b"image-1"]]),
        ("two extra keys", "m", "", "", [1, 2, 3, 4], 4, [[b"image", b"-1"]]),
        ("an extra key in the second block", "m", "", "", [1, 2, 3, 4, 5, 6, 7, 8], 4, [[], [b"image-1"]]),
        ("blocks of sixteen", "m", "", domain, list(range(100, 180)), 16, []),
    ]
    return {
        "scheme": "evenhand.block.v1",
        "salts": [
            {
                "secret": secret.hex(),
                "pool": pool,
                "domain": name,
                "generation": generation,
                "salt": salt(secret, pool, name, generation),
            }
            for secret, pool, name, generation in salts
        ],
        "chains": [
            {
                "name": name,
                "model": model,
                "lora": lora,
                "salt": cache_salt,
                "token_ids": tokens,
                "block_size": block_size,
                "extra_keys": [[extra.hex() for extra in block] for block in extras],
                "root": root(model, lora, cache_salt).hex(),
                "keys": [key.hex() for key in keys(tokens, block_size, root(model, lora, cache_salt), extras)],
            }
            for name, model, lora, cache_salt, tokens, block_size, extras in chains
        ],
    }


def document() -> str:
    return json.dumps(vectors(), indent=1, ensure_ascii=True) + "\n"


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit(__doc__)
    VECTORS.write_text(document(), encoding="ascii")
