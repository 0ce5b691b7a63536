"""What an edge remembers across its own restarts, in one local file.

The file is a line that names the format, a SHA-256 of the rest, and the rest in msgpack. It is written beside and
renamed into place after fsync, so a reader sees the old one or this one. A file that is torn, of another format or
of another worker is no checkpoint at all: the edge begins anew, which is always safe.

No token id, prompt or salt is in it: names of an engine's blocks, their keys, counts, and positions.
"""

import hashlib
import os
import struct
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from evenhand.core.ids import Epoch, Seq
from evenhand.core.kv import Tier
from evenhand.worker.continuity import FramePosition
from evenhand.worker.engine_events import EngineHash
from evenhand.worker.holdings import LaneRecord
from evenhand.worker.translator import TranslatorState

MAGIC: Final = b"evenhand worker edge checkpoint 1\n"
DIGEST_BYTES: Final = 32
FILE_BYTES_MAX: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class EdgeCheckpoint:
    """Where an edge stands."""

    worker_id: str
    model: str
    epoch: Epoch
    seq_reserved: Seq
    """No batch of this epoch has a larger number; after a restart numbers go on above it."""
    last_frame: FramePosition | None
    process_started_at_ms: int | None
    translator: TranslatorState


class _LaneWire(msgspec.Struct, array_like=True):
    tier: int
    group: int
    names: bytes | list[EngineHash]
    """8 bytes each in this machine's order where all are integers."""
    keys: bytes
    copies: bytes
    loud: bytes
    doubted: list[EngineHash]


class _CheckpointWire(msgspec.Struct):
    worker_id: str
    model: str
    epoch: int
    seq_reserved: int
    last_seq: int | None
    last_digest: bytes
    process_started_at_ms: int | None
    block_size_tokens: int
    prefix_groups: list[tuple[int, bool]]
    lanes: list[_LaneWire]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_CheckpointWire)


def encode_checkpoint(checkpoint: EdgeCheckpoint) -> bytes:
    """The file's bytes."""
    last = checkpoint.last_frame
    wire = _CheckpointWire(
        worker_id=checkpoint.worker_id,
        model=checkpoint.model,
        epoch=checkpoint.epoch,
        seq_reserved=checkpoint.seq_reserved,
        last_seq=None if last is None else last.seq,
        last_digest=b"" if last is None else last.digest,
        process_started_at_ms=checkpoint.process_started_at_ms,
        block_size_tokens=checkpoint.translator.block_size_tokens,
        prefix_groups=list(checkpoint.translator.prefix_groups),
        lanes=[_lane_to_wire(lane) for lane in checkpoint.translator.lanes],
    )
    body = _encoder.encode(wire)
    return MAGIC + hashlib.sha256(body).digest() + body


def decode_checkpoint(data: bytes, worker_id: str, model: str) -> EdgeCheckpoint | None:
    """The checkpoint, or None if these bytes are not one of this worker and model."""
    head = len(MAGIC) + DIGEST_BYTES
    body = data[head:]
    if not data.startswith(MAGIC) or hashlib.sha256(body).digest() != data[len(MAGIC) : head]:
        return None
    try:
        wire = _decoder.decode(body)
        lanes = tuple(_lane_from_wire(lane) for lane in wire.lanes)
    except (msgspec.DecodeError, ValueError, struct.error):
        return None
    if (wire.worker_id, wire.model) != (worker_id, model) or wire.epoch < 1:
        return None
    return EdgeCheckpoint(
        worker_id=wire.worker_id,
        model=wire.model,
        epoch=Epoch(wire.epoch),
        seq_reserved=Seq(wire.seq_reserved),
        last_frame=None if wire.last_seq is None else FramePosition(wire.last_seq, wire.last_digest),
        process_started_at_ms=wire.process_started_at_ms,
        translator=TranslatorState(wire.block_size_tokens, tuple(wire.prefix_groups), lanes),
    )


def write_checkpoint(path: Path, data: bytes) -> None:
    """Replace the file in one step; raises ``OSError`` where that cannot be done, and leaves the old one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(beside, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def read_checkpoint(path: Path, worker_id: str, model: str) -> EdgeCheckpoint | None:
    """The checkpoint in the file; None if there is none, or it is unreadable, torn or another's."""
    try:
        if path.stat().st_size > FILE_BYTES_MAX:
            return None
        data = path.read_bytes()
    except OSError:
        return None
    return decode_checkpoint(data, worker_id, model)


def _lane_to_wire(lane: LaneRecord) -> _LaneWire:
    integers = [name for name in lane.names if isinstance(name, int)]
    packed = len(integers) == len(lane.names)
    return _LaneWire(
        tier=int(lane.tier),
        group=lane.group,
        names=array("Q", integers).tobytes() if packed else list(lane.names),
        keys=array("Q", lane.keys).tobytes(),
        copies=array("Q", lane.copies).tobytes(),
        loud=bytes(lane.loud),
        doubted=list(lane.doubted),
    )


def _lane_from_wire(wire: _LaneWire) -> LaneRecord:
    names = _integers(wire.names) if isinstance(wire.names, bytes) else tuple(wire.names)
    keys, copies = _integers(wire.keys), _integers(wire.copies)
    if not len(names) == len(keys) == len(copies) == len(wire.loud) or not all(copies):
        raise ValueError("the columns of a lane differ in length")
    known = frozenset(names)
    if not all(name in known for name in wire.doubted):
        raise ValueError("a doubted name has no copies")
    return LaneRecord(
        Tier(wire.tier), wire.group, names, keys, copies, tuple(map(bool, wire.loud)), tuple(wire.doubted)
    )


def _integers(packed: bytes) -> tuple[int, ...]:
    values = array("Q")
    values.frombytes(packed)
    return tuple(values)
