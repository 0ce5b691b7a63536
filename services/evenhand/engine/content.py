"""What a request's blocks hold, and the names the pool finds them by.

Two forms, one interface:

- ``TokenContent``: real token ids. Names are chained SHA-256 digests, made as blocks fill up. Output
  tokens are a pure function of the prompt, so the same prompt always answers the same, on any engine.
- ``BlockContent``: opaque names given by the caller, no tokens. A policy simulation runs on these, since
  hashing costs more than everything else the pool does.

Holds always: the name of block i depends on all tokens up to its end, on the LoRA name, and through the
first block on the cache salt; so two tenants with different salts never share a name.

The digest is not vLLM's: an engine's hash is opaque outside it, and nothing may depend on its value.
"""

import hashlib
import sys
from array import array
from collections.abc import Sequence
from enum import Enum
from typing import Protocol

from evenhand.engine.events import FULL_ATTENTION, GPU, BlockStored, EngineHash, ExtraKeys

VOCABULARY_SIZE = 32_000
"""Token ids of generated output lie in [FIRST_OUTPUT_TOKEN, VOCABULARY_SIZE)."""

FIRST_OUTPUT_TOKEN = 300
"""Below stand the tokenizer's bytes and specials."""

_MASK_64 = (1 << 64) - 1


class HashForm(Enum):
    """How an engine names blocks on the wire."""

    INT = "int"
    BYTES = "bytes"


class Content(Protocol):
    """What the pool and the batch need to know of a request's tokens."""

    block_size: int

    @property
    def nameable_blocks(self) -> int:
        """Blocks, from the first, that can ever have a name; later ones are never cached."""

    def names(self, count: int) -> Sequence[EngineHash]:
        """At least the first ``count`` block names, ``count <= nameable_blocks``."""

    def stored(self, first: int, last: int) -> BlockStored:
        """The event for blocks ``first`` to ``last`` (exclusive), whose names are known."""


def output_token(seed: int, index: int) -> int:
    """The token at ``index`` of the output that ``seed`` answers with: splitmix64, no state."""
    x = (seed + (index + 1) * 0x9E3779B97F4A7C15) & _MASK_64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return FIRST_OUTPUT_TOKEN + (x ^ (x >> 31)) % (VOCABULARY_SIZE - FIRST_OUTPUT_TOKEN)


class TokenContent:
    """Prompt token ids, then generated ones.

    ``output_token_ids`` gives the first output tokens explicitly (a recorded run); past its end, and
    without it, they are generated from the prompt.
    """

    __slots__ = (
        "_digest",
        "_names",
        "_tokens",
        "block_size",
        "cache_salt",
        "hash_form",
        "lora_name",
        "prompt_tokens",
        "seed",
        "session_id",
    )

    def __init__(
        self,
        prompt_token_ids: Sequence[int],
        *,
        block_size: int,
        hash_form: HashForm = HashForm.INT,
        cache_salt: str | None = None,
        lora_name: str | None = None,
        session_id: str | None = None,
        output_token_ids: Sequence[int] = (),
    ) -> None:
        self.block_size = block_size
        self.hash_form = hash_form
        self.cache_salt = cache_salt
        self.lora_name = lora_name
        self.session_id = session_id
        self.prompt_tokens = len(prompt_token_ids)
        self.seed = int.from_bytes(hashlib.sha256(_packed(prompt_token_ids)).digest()[:8], "big")
        self._tokens = [*prompt_token_ids, *output_token_ids]
        self._names: list[EngineHash] = []
        self._digest = b"evenhand.engine.root"

    @property
    def nameable_blocks(self) -> int:
        return sys.maxsize

    def token_ids(self, start: int, stop: int) -> list[int]:
        """Tokens ``start`` to ``stop`` (exclusive), counted from the first of the prompt."""
        for index in range(len(self._tokens) - self.prompt_tokens, stop - self.prompt_tokens):
            self._tokens.append(output_token(self.seed, index))
        return self._tokens[start:stop]

    def names(self, count: int) -> Sequence[EngineHash]:
        names = self._names
        for index in range(len(names), count):
            tokens = self.token_ids(index * self.block_size, (index + 1) * self.block_size)
            digest = hashlib.sha256(self._digest)
            digest.update(_packed(tokens))
            for kind, extra in ((b"lora", self.lora_name), (b"salt", self.cache_salt if index == 0 else None)):
                if extra:
                    encoded = extra.encode()
                    digest.update(kind + len(encoded).to_bytes(4, "little") + encoded)
            self._digest = digest.digest()
            as_int = self.hash_form is HashForm.INT
            names.append(int.from_bytes(self._digest[-8:], "big") if as_int else self._digest)
        return names

    def extra_keys(self, index: int) -> ExtraKeys | None:
        """What beside tokens names block ``index``: LoRA name on all, salt on the first; None if nothing."""
        lora = (self.lora_name,) if self.lora_name else ()
        salt = (self.cache_salt,) if self.cache_salt and index == 0 else ()
        return (*lora, *salt) or None

    def stored(self, first: int, last: int) -> BlockStored:
        return BlockStored(
            block_hashes=tuple(self._names[first:last]),
            parent_block_hash=self._names[first - 1] if first else None,
            token_ids=tuple(self.token_ids(first * self.block_size, last * self.block_size)),
            block_size=self.block_size,
            lora_id=1 if self.lora_name else None,
            medium=GPU,
            lora_name=self.lora_name,
            extra_keys=tuple(self.extra_keys(index) for index in range(first, last)),
            group_idx=0,
            kv_cache_spec_kind=FULL_ATTENTION,
            session_id=self.session_id,
        )


class BlockContent:
    """Opaque block names, in order, for the prompt and for as much of the output as is ever reused."""

    __slots__ = ("_names", "block_size")

    def __init__(self, names: Sequence[EngineHash], *, block_size: int) -> None:
        self.block_size = block_size
        self._names = names

    @property
    def nameable_blocks(self) -> int:
        return len(self._names)

    def names(self, count: int) -> Sequence[EngineHash]:
        return self._names

    def stored(self, first: int, last: int) -> BlockStored:
        names = self._names
        parent = names[first - 1] if first else None
        return BlockStored(
            tuple(names[first:last]), parent, (), self.block_size, None, GPU, None, None, 0, FULL_ATTENTION
        )


def _packed(token_ids: Sequence[int]) -> bytes:
    """Token ids as little-endian unsigned 32-bit integers, whatever the machine's own order."""
    packed = array("I", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()
