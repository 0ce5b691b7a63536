"""Content keys of blocks, and the salts that keep cache domains apart.

::

    salt  = HMAC-SHA256(master secret, pool, domain, generation)      hex, sent as the request's cache_salt
    root  = SHA-256("evenhand.block.v1", model, lora, salt)           every field length-prefixed; 32 bytes
    key_i = first 8 bytes, big-endian, of SHA-256(key_{i-1} ‖ token ids as LE uint32 ‖ extra keys)

``key_{-1}`` is the root; later parents are 8 bytes big-endian. Extra keys (multi-modal hashes and the like) are
length-prefixed; the salt is not among them, it is in the root. A field is length-prefixed as its UTF-8 byte
length in 4 bytes big-endian, then the bytes. Only whole blocks have a key.

A key says: this token prefix, under this model, this LoRA adapter and this cache domain. Two tenants of
different domains never share a key, and whoever lacks a domain's salt cannot compute its keys.
"""

import hashlib
import hmac
import struct
from collections.abc import Iterable, Sequence

KEY_SCHEME = "evenhand.block.v1"
KEY_BYTES = 8


def _prefixed(*fields: bytes) -> bytes:
    return b"".join(struct.pack(">I", len(field)) + field for field in fields)


def domain_salt(master_secret: bytes, pool: str, domain: str, generation: int) -> str:
    """Salt of one cache domain in one pool: 64 hex digits, sent to the engine as ``cache_salt``."""
    message = _prefixed(pool.encode(), domain.encode(), str(generation).encode())
    return hmac.new(master_secret, message, hashlib.sha256).hexdigest()


def root_hash(model: str, lora: str = "", salt: str = "") -> bytes:
    """Parent of every first block: 32 bytes. ``lora`` and ``salt`` are empty where there is none."""
    return hashlib.sha256(_prefixed(KEY_SCHEME.encode(), model.encode(), lora.encode(), salt.encode())).digest()


def child_key(parent: bytes, token_bytes: bytes, extra_keys: Sequence[bytes] = ()) -> bytes:
    """Key of the block under ``parent`` (32-byte root or 8-byte key): 8 bytes.

    ``token_bytes`` holds exactly one block's token ids as little-endian uint32.
    """
    return hashlib.sha256(parent + token_bytes + _prefixed(*extra_keys)).digest()[:KEY_BYTES]


def block_keys(token_ids: Sequence[int], block_size: int, root: bytes) -> tuple[int, ...]:
    """Keys of all whole blocks of a prompt, first to last, as unsigned 64-bit integers.

    Raises ``ValueError`` if ``block_size`` is below 1 and ``struct.error`` for a token id outside uint32.
    """
    if block_size < 1:
        raise ValueError(f"The block size must be at least 1, not {block_size}.")
    count = len(token_ids) // block_size
    packed = struct.pack(f"<{count * block_size}I", *token_ids[: count * block_size])
    parent, keys, sha256 = root, [], hashlib.sha256
    for start in range(0, len(packed), 4 * block_size):
        parent = sha256(parent + packed[start : start + 4 * block_size]).digest()[:KEY_BYTES]
        keys.append(parent)
    return unpack_keys(b"".join(keys))


def pack_keys(keys: Iterable[int]) -> bytes:
    """Keys as they travel: 8 bytes each, big-endian, no separator."""
    values = tuple(keys)
    return struct.pack(f">{len(values)}Q", *values)


def unpack_keys(packed: bytes) -> tuple[int, ...]:
    """Inverse of ``pack_keys``; raises ``ValueError`` for a length that is no multiple of 8."""
    if len(packed) % KEY_BYTES:
        raise ValueError(f"Packed block keys must be a multiple of {KEY_BYTES} bytes long, not {len(packed)}.")
    return struct.unpack(f">{len(packed) // KEY_BYTES}Q", packed)


def usable_blocks(prompt_tokens: int, block_size: int) -> int:
    """Blocks of a prompt that can be reused at most: an engine recomputes at least the last token's block."""
    return max(0, (prompt_tokens - 1) // block_size)
