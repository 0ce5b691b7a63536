"""What a caller says of a request, checked before anything is sent.

Always: a prompt is given in one of three ways, and every count is one that a scheduler takes. Token ids are turned
into block keys later, when the pool is known; they never leave this process.
"""

import struct
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

from evenhand.client.errors import InvalidRequest
from evenhand.client.settings import check_seconds
from evenhand.core.block_key import KEY_BYTES, pack_keys
from evenhand.wire.generated import scheduler_pb2 as pb
from evenhand.wire.scheduler_codec import REQUEST_ID_CHARACTERS_MAX, TOKENS_MAX


@dataclass(frozen=True, slots=True)
class Prompt:
    """The prompt itself: token ids to be hashed, or keys hashed elsewhere, or a length alone."""

    tokens: Sequence[int] | None = field(repr=False)
    packed_keys: bytes = field(repr=False)
    prompt_tokens: int


def prompt_of(
    tokens: Sequence[int] | None, block_keys: Sequence[int] | bytes | None, prompt_tokens: int | None
) -> Prompt:
    """Check the three ways of giving a prompt; raises ``InvalidRequest``."""
    if tokens is None and prompt_tokens is None:
        raise InvalidRequest("A request needs tokens, or block_keys with prompt_tokens, or prompt_tokens alone.")
    if tokens is not None and block_keys is not None:
        raise InvalidRequest("A request names its prompt by tokens or by block_keys, not both.")
    if tokens is not None and prompt_tokens is not None and prompt_tokens != len(tokens):
        raise InvalidRequest(f"prompt_tokens says {prompt_tokens}, but there are {len(tokens)} tokens.")
    count = len(tokens) if tokens is not None else checked_count("prompt_tokens", prompt_tokens, 1)
    if not 0 < count <= TOKENS_MAX:
        raise InvalidRequest("The prompt is empty." if not count else "The prompt is too long to be sent.")
    return Prompt(tokens, b"" if block_keys is None else _packed(block_keys), count)


def acquire_request(
    prompt: Prompt,
    *,
    pool: str,
    tenant: str,
    request_id: str | None,
    max_output_tokens: int,
    expected_output_tokens: int,
    user: str,
    traceparent: str,
    excluded_workers: Sequence[str],
    explain: bool,
    timeout_s: float,
) -> pb.AcquireRequest:
    """The request as it travels, but for keys that wait for the pool; raises ``InvalidRequest``."""
    check_seconds("timeout", timeout_s, InvalidRequest)
    if request_id is not None and not 0 < len(request_id) <= REQUEST_ID_CHARACTERS_MAX:
        raise InvalidRequest(
            f"A request id has 1 to {REQUEST_ID_CHARACTERS_MAX} characters, not {len(request_id)}."
        )
    return pb.AcquireRequest(
        request_id=request_id or uuid.uuid4().hex,
        pool=pool,
        tenant=tenant,
        block_keys=prompt.packed_keys,
        prompt_tokens=prompt.prompt_tokens,
        max_output_tokens=checked_count("max_output_tokens", max_output_tokens, 1),
        expected_output_tokens=checked_count("expected_output_tokens", expected_output_tokens, 0),
        user=user,
        traceparent=traceparent,
        excluded_workers=excluded_workers,
        explain=explain,
    )


def checked_count(name: str, count: object, least: int) -> int:
    """The count, if it is a whole number that a scheduler takes; raises ``InvalidRequest`` naming it."""
    if not isinstance(count, int) or not least <= count <= TOKENS_MAX:
        raise InvalidRequest(f"{name} must be a whole number from {least} to {TOKENS_MAX}, not {count!r}.")
    return count


def _packed(keys: Sequence[int] | bytes) -> bytes:
    if isinstance(keys, bytes):
        if len(keys) % KEY_BYTES:
            raise InvalidRequest(f"Packed block keys must be a multiple of 8 bytes long, not {len(keys)}.")
        return keys
    try:
        return pack_keys(keys)
    except (struct.error, TypeError) as error:
        raise InvalidRequest("Block keys must be whole numbers from 0 to 18446744073709551615.") from error
