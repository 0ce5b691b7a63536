"""A scheduler's checkpoint as bytes: what the core gives as plain data, and when it was taken.

Block keys of open tickets only keep a lost leg's request near its cache, and they are most of the bytes; so they
are kept for the oldest tickets, up to ``KEYS_MAX`` in all.

Only this daemon and its successors read it. A payload of a version this build does not know is refused rather than
guessed at.
"""

from dataclasses import dataclass, replace

import msgspec

from evenhand.core.checkpoint import SchedulerCheckpoint
from evenhand.core.errors import SchemaMismatch
from evenhand.scheduler.adoption import NO_TERMS, EarlierTerms

VERSION = 2
KEYS_MAX = 65_536
"""Block keys in one checkpoint, about half a mebibyte."""


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """A checkpoint and the wall clock at which it was taken, in milliseconds."""

    version: int
    saved_wall_ms: int
    checkpoint: SchedulerCheckpoint
    earlier: EarlierTerms = NO_TERMS


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(SavedCheckpoint)


def encode_checkpoint(
    checkpoint: SchedulerCheckpoint, saved_wall_ms: int, earlier: EarlierTerms = NO_TERMS
) -> bytes:
    """Bytes for ``LeaseStore.save_checkpoint``."""
    keys_left, tickets = KEYS_MAX, []
    for held in checkpoint.tickets:
        keys_left -= len(held.block_keys)
        tickets.append(held if keys_left >= 0 else replace(held, block_keys=()))
    bounded = checkpoint if keys_left >= 0 else replace(checkpoint, tickets=tuple(tickets))
    return _encoder.encode(SavedCheckpoint(VERSION, saved_wall_ms, bounded, earlier))


def decode_checkpoint(payload: bytes) -> SavedCheckpoint:
    """Inverse of ``encode_checkpoint``; raises ``SchemaMismatch`` for what this build cannot read."""
    try:
        saved = _decoder.decode(payload)
    except msgspec.MsgspecError as error:
        raise SchemaMismatch("The scheduler's checkpoint is not one that this build can read.") from error
    if saved.version != VERSION:
        raise SchemaMismatch(f"The scheduler's checkpoint has version {saved.version}, not {VERSION}.")
    return saved
