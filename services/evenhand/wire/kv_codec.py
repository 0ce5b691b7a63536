"""Bytes of ``evenhand.kv.v1`` and ``evenhand.control.v1`` to core types and back.

The one place where these bytes become facts. What decodes is a fact that the fold may take as it is: ids are
named and storable, epochs and numbers are in range, keys are whole, tiers are known, parts are inside their
snapshot. Anything else is ``MalformedMessage`` in one sentence, and nothing but that is raised for any bytes.
Fields of a later schema are ignored; an operation of an unknown kind is not, because skipping it would make
the map wrong without a sign.

Small batches are the common case (one to four operations), so decoding looks at each field once and builds no
intermediate objects. It does not check order or gaps: those need the worker's past, which the fold has.
"""

import struct
from math import isfinite
from typing import assert_never

from google.protobuf.message import DecodeError

from evenhand.core.block_key import KEY_BYTES, pack_keys
from evenhand.core.errors import MalformedMessage
from evenhand.core.ids import Epoch, PoolId, Seq, WorkerId
from evenhand.core.kv import (
    SNAPSHOT_PART_KEYS_MAX,
    Cleared,
    ControlMessage,
    EpochFloor,
    KeysRefuted,
    KvBatch,
    KvMessage,
    KvOperation,
    Removed,
    SnapshotPart,
    SnapshotRequested,
    Stored,
    Tier,
    WorkerAnnounced,
    WorkerLeft,
    WorkerLoadReported,
)
from evenhand.wire.generated import kv_event_pb2 as pb

WORKER_ID_CHARACTERS_MAX = 200
NAME_CHARACTERS_MAX = 1_000
"""Pool, model, key scheme, address and reason."""
INT64_MAX = 2**63 - 1
"""Epochs and numbers are stored in signed 64-bit columns."""
INT32_MAX = 2**31 - 1
BATCH_OPERATIONS_MAX = 65_536
SNAPSHOT_PARTS_MAX = 4_096
"""Parts of one snapshot: 268 million keys."""

_TIERS: tuple[Tier | None, ...] = (None, Tier.DEVICE, Tier.HOST, Tier.DISK)
"""Core tier by wire number; 0 is unspecified."""
_WIRE_TIERS = (pb.TIER_DEVICE, pb.TIER_HOST, pb.TIER_DISK)
_UNPACKERS = tuple(struct.Struct(f">{count}Q").unpack for count in range(129))
"""Ready formats for the short lists that nearly all operations carry."""


def encode_kv_message(message: KvMessage) -> bytes:
    """Bytes of one message for ``evenhand.kv.v1``; its record key is the worker id in UTF-8.

    Raises ``ValueError`` or ``struct.error`` for numbers that do not fit the wire.
    """
    wire = pb.KvMessage(worker_id=message.worker_id, epoch=message.epoch)
    match message:
        case KvBatch():
            wire.batch.seq = message.seq
            wire.batch.emitted_at_ms = message.emitted_at_ms
            wire.batch.operations.extend([_wire_operation(operation) for operation in message.operations])
        case SnapshotPart():
            assert len(message.keys) <= SNAPSHOT_PART_KEYS_MAX, "a snapshot part holds too many keys"
            assert 0 <= message.part < message.parts <= SNAPSHOT_PARTS_MAX, "a snapshot part is out of range"
            wire.snapshot_part.seq = message.seq
            wire.snapshot_part.snapshot_id = message.snapshot_id
            wire.snapshot_part.part = message.part
            wire.snapshot_part.parts = message.parts
            wire.snapshot_part.tier = _WIRE_TIERS[message.tier]
            wire.snapshot_part.keys = pack_keys(message.keys)
        case WorkerAnnounced():
            wire.announced.CopyFrom(_wire_announced(message))
        case WorkerLoadReported():
            wire.load.CopyFrom(_wire_load(message))
        case WorkerLeft():
            wire.left.SetInParent()
        case _:
            assert_never(message)
    return wire.SerializeToString()


def decode_kv_message(key: bytes, value: bytes) -> KvMessage:
    """The fact in one record of ``evenhand.kv.v1``; raises ``MalformedMessage`` for anything out of contract."""
    try:
        wire = pb.KvMessage.FromString(value)
    except DecodeError as error:
        raise MalformedMessage("A message of evenhand.kv.v1 is not a KvMessage.") from error
    worker_id = _worker_id(wire.worker_id, key)
    epoch = Epoch(wire.epoch)
    if not 1 <= epoch <= INT64_MAX:
        raise _malformed(worker_id, f"names epoch {epoch}, which is out of range")
    body = wire.WhichOneof("body")
    if body == "batch":
        batch = wire.batch
        seq = batch.seq
        if not 1 <= seq <= INT64_MAX:
            raise _malformed(worker_id, f"numbers a batch {seq}, which is out of range")
        if len(batch.operations) > BATCH_OPERATIONS_MAX:
            raise _malformed(worker_id, f"puts more than {BATCH_OPERATIONS_MAX} operations into one batch")
        operations = tuple([_operation(worker_id, operation) for operation in batch.operations])
        return KvBatch(worker_id, epoch, Seq(seq), operations, batch.emitted_at_ms)
    if body == "load":
        return _load(worker_id, epoch, wire.load)
    if body == "announced":
        return _announced(worker_id, epoch, wire.announced)
    if body == "snapshot_part":
        return _snapshot_part(worker_id, epoch, wire.snapshot_part)
    if body == "left":
        return WorkerLeft(worker_id, epoch)
    raise _malformed(worker_id, "sent a message without a body that this build knows")


def encode_control_message(message: ControlMessage) -> bytes:
    """Bytes of one message for ``evenhand.control.v1``; its record key is the worker id in UTF-8."""
    wire = pb.ControlMessage(worker_id=message.worker_id)
    match message:
        case SnapshotRequested():
            wire.snapshot_requested.SetInParent()
            wire.snapshot_requested.reason = message.reason
        case EpochFloor():
            wire.epoch_floor.SetInParent()
            wire.epoch_floor.epoch = message.epoch
        case KeysRefuted():
            wire.keys_refuted.epoch = message.epoch
            wire.keys_refuted.seq = message.seq
            wire.keys_refuted.keys = pack_keys(message.keys)
            wire.keys_refuted.tier = _WIRE_TIERS[message.tier]
        case _:
            assert_never(message)
    return wire.SerializeToString()


def decode_control_message(key: bytes, value: bytes) -> ControlMessage:
    """The wish in one record of ``evenhand.control.v1``; raises ``MalformedMessage`` as above."""
    try:
        wire = pb.ControlMessage.FromString(value)
    except DecodeError as error:
        raise MalformedMessage("A message of evenhand.control.v1 is not a ControlMessage.") from error
    worker_id = _worker_id(wire.worker_id, key)
    body = wire.WhichOneof("body")
    if body == "snapshot_requested":
        return SnapshotRequested(worker_id, _name(worker_id, "reason", wire.snapshot_requested.reason, empty=True))
    if body == "epoch_floor":
        floor = wire.epoch_floor.epoch
        if floor > INT64_MAX:
            raise _malformed(worker_id, f"is given the epoch floor {floor}, which is out of range")
        return EpochFloor(worker_id, Epoch(floor))
    if body == "keys_refuted":
        refuted = wire.keys_refuted
        if not 1 <= refuted.epoch <= INT64_MAX or refuted.seq > INT64_MAX:
            raise _malformed(worker_id, "is refuted keys of an epoch or batch that is out of range")
        keys, tier = _keys(worker_id, refuted.keys), _tier(worker_id, refuted.tier)
        return KeysRefuted(worker_id, Epoch(refuted.epoch), Seq(refuted.seq), keys, tier)
    raise _malformed(worker_id, "is sent a control message without a body that this build knows")


def _malformed(worker_id: str, what: str) -> MalformedMessage:
    return MalformedMessage(f"Worker {worker_id[:WORKER_ID_CHARACTERS_MAX]!r} {what}.")


def _worker_id(text: str, key: bytes) -> WorkerId:
    if not text:
        raise MalformedMessage("A message names no worker.")
    if len(text) > WORKER_ID_CHARACTERS_MAX or "\0" in text:
        raise _malformed(text, f"has an id longer than {WORKER_ID_CHARACTERS_MAX} characters or with a zero byte")
    if text.encode() != key:
        raise _malformed(text, f"is named in a record whose key is {key[:WORKER_ID_CHARACTERS_MAX]!r}")
    return WorkerId(text)


def _name(worker_id: WorkerId, field: str, text: str, empty: bool = False) -> str:
    if not text and not empty:
        raise _malformed(worker_id, f"announces no {field}")
    if len(text) > NAME_CHARACTERS_MAX or "\0" in text:
        raise _malformed(
            worker_id, f"gives a {field} longer than {NAME_CHARACTERS_MAX} characters or with a zero byte"
        )
    return text


def _keys(worker_id: WorkerId, packed: bytes) -> tuple[int, ...]:
    count, rest = divmod(len(packed), KEY_BYTES)
    if rest:
        raise _malformed(
            worker_id, f"packs block keys into {len(packed)} bytes, which is no multiple of {KEY_BYTES}"
        )
    if count < len(_UNPACKERS):
        return _UNPACKERS[count](packed)
    if count > SNAPSHOT_PART_KEYS_MAX:
        raise _malformed(worker_id, f"packs {count} block keys together; {SNAPSHOT_PART_KEYS_MAX} are the most")
    return struct.unpack(f">{count}Q", packed)


def _tier(worker_id: WorkerId, number: int) -> Tier:
    tier = _TIERS[number] if 0 <= number < len(_TIERS) else None
    if tier is None:
        raise _malformed(worker_id, f"names tier {number}, which this build does not know")
    return tier


def _operation(worker_id: WorkerId, wire: pb.KvOperation) -> KvOperation:
    kind = wire.WhichOneof("kind")
    if kind == "stored":
        stored = wire.stored
        return Stored(_keys(worker_id, stored.keys), _tier(worker_id, stored.tier))
    if kind == "removed":
        removed = wire.removed
        return Removed(_keys(worker_id, removed.keys), _tier(worker_id, removed.tier))
    if kind == "cleared":
        return Cleared()
    raise _malformed(worker_id, "sent an operation of a kind that this build does not know")


def _wire_operation(operation: KvOperation) -> pb.KvOperation:
    match operation:
        case Stored(keys, tier):
            return pb.KvOperation(stored=pb.BlocksStored(keys=pack_keys(keys), tier=_WIRE_TIERS[tier]))
        case Removed(keys, tier):
            return pb.KvOperation(removed=pb.BlocksRemoved(keys=pack_keys(keys), tier=_WIRE_TIERS[tier]))
        case Cleared():
            return pb.KvOperation(cleared=pb.AllCleared())
        case _:
            assert_never(operation)


def _snapshot_part(worker_id: WorkerId, epoch: Epoch, wire: pb.SnapshotPart) -> SnapshotPart:
    if wire.seq > INT64_MAX:
        raise _malformed(worker_id, f"numbers a snapshot {wire.seq}, which is out of range")
    if not wire.part < wire.parts <= SNAPSHOT_PARTS_MAX:
        raise _malformed(
            worker_id, f"sent snapshot part {wire.part} of {wire.parts}, at most {SNAPSHOT_PARTS_MAX} count"
        )
    keys, tier = _keys(worker_id, wire.keys), _tier(worker_id, wire.tier)
    return SnapshotPart(worker_id, epoch, Seq(wire.seq), wire.snapshot_id, wire.part, wire.parts, tier, keys)


def _wire_announced(message: WorkerAnnounced) -> pb.WorkerAnnounced:
    return pb.WorkerAnnounced(
        pool_id=message.pool_id,
        address=message.address,
        model=message.model,
        block_size_tokens=message.block_size_tokens,
        key_scheme=message.key_scheme,
        kv_blocks=message.kv_blocks,
        slots=message.slots,
        data_parallel_rank=message.data_parallel_rank,
        sends_events=message.sends_events,
        model_length_max_tokens=message.model_length_max_tokens,
        salt_generation=message.salt_generation,
        seq=message.seq,
    )


def _announced(worker_id: WorkerId, epoch: Epoch, wire: pb.WorkerAnnounced) -> WorkerAnnounced:
    for field, number, least in (
        ("block size", wire.block_size_tokens, 1),
        ("number of KV blocks", wire.kv_blocks, 0),
        ("number of slots", wire.slots, 1),
        ("salt generation", wire.salt_generation, 1),
    ):
        if not least <= number <= INT32_MAX:
            raise _malformed(worker_id, f"announces a {field} of {number}, which is out of range")
    if wire.seq > INT64_MAX:
        raise _malformed(worker_id, f"announces batch number {wire.seq}, which is out of range")
    return WorkerAnnounced(
        worker_id=worker_id,
        pool_id=PoolId(_name(worker_id, "pool", wire.pool_id)),
        epoch=epoch,
        address=_name(worker_id, "address", wire.address),
        model=_name(worker_id, "model", wire.model),
        block_size_tokens=wire.block_size_tokens,
        key_scheme=_name(worker_id, "key scheme", wire.key_scheme),
        kv_blocks=wire.kv_blocks,
        slots=wire.slots,
        data_parallel_rank=wire.data_parallel_rank,
        sends_events=wire.sends_events,
        model_length_max_tokens=wire.model_length_max_tokens,
        salt_generation=wire.salt_generation,
        seq=Seq(wire.seq),
    )


def _wire_load(message: WorkerLoadReported) -> pb.WorkerLoadReported:
    return pb.WorkerLoadReported(
        running=message.running,
        waiting=message.waiting,
        kv_used_fraction=message.kv_used_fraction,
        prompt_tokens_total=message.prompt_tokens_total,
        cached_tokens_total=message.cached_tokens_total,
        output_tokens_total=message.output_tokens_total,
        process_started_at_ms=message.process_started_at_ms,
        healthy=message.healthy,
    )


def _load(worker_id: WorkerId, epoch: Epoch, wire: pb.WorkerLoadReported) -> WorkerLoadReported:
    used = wire.kv_used_fraction
    if not isfinite(used) or not 0.0 <= used <= 1.0:
        raise _malformed(worker_id, f"reports a KV use of {used}, which is no fraction of 1")
    return WorkerLoadReported(
        worker_id=worker_id,
        epoch=epoch,
        running=wire.running,
        waiting=wire.waiting,
        kv_used_fraction=used,
        prompt_tokens_total=wire.prompt_tokens_total,
        cached_tokens_total=wire.cached_tokens_total,
        output_tokens_total=wire.output_tokens_total,
        process_started_at_ms=wire.process_started_at_ms,
        healthy=wire.healthy,
    )
