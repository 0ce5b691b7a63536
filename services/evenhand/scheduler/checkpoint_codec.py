"""A scheduler's checkpoint as bytes: what the core gives as plain data, and when it was taken.

Only this daemon and its successors read it. A payload of a version this build does not know is refused rather than
guessed at.
"""

from dataclasses import dataclass

import msgspec

from evenhand.core.checkpoint import SchedulerCheckpoint
from evenhand.core.errors import SchemaMismatch

VERSION = 1


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """A checkpoint and the wall clock at which it was taken, in milliseconds."""

    version: int
    saved_wall_ms: int
    checkpoint: SchedulerCheckpoint


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(SavedCheckpoint)


def encode_checkpoint(checkpoint: SchedulerCheckpoint, saved_wall_ms: int) -> bytes:
    """Bytes for ``LeaseStore.save_checkpoint``."""
    return _encoder.encode(SavedCheckpoint(VERSION, saved_wall_ms, checkpoint))


def decode_checkpoint(payload: bytes) -> SavedCheckpoint:
    """Inverse of ``encode_checkpoint``; raises ``SchemaMismatch`` for what this build cannot read."""
    try:
        saved = _decoder.decode(payload)
    except msgspec.MsgspecError as error:
        raise SchemaMismatch("The scheduler's checkpoint is not one that this build can read.") from error
    if saved.version != VERSION:
        raise SchemaMismatch(f"The scheduler's checkpoint has version {saved.version}, not {VERSION}.")
    return saved
