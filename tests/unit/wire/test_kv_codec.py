"""The KV codec: what it encodes comes back, what is out of contract is one sentence, and no bytes crash it."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
from evenhand.wire.kv_codec import (
    decode_control_message,
    decode_kv_message,
    encode_control_message,
    encode_kv_message,
)

names = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=40)
worker_ids = names.map(WorkerId)
epochs = st.integers(1, 2**63 - 1).map(Epoch)
seqs = st.integers(1, 2**63 - 1).map(Seq)
seqs_or_none = st.integers(0, 2**63 - 1).map(Seq)
uint32 = st.integers(0, 2**32 - 1)
uint64 = st.integers(0, 2**64 - 1)
int32_positive = st.integers(1, 2**31 - 1)
keys = st.lists(uint64, max_size=200).map(tuple)
tiers = st.sampled_from(Tier)
operations = st.one_of(st.builds(Stored, keys, tiers), st.builds(Removed, keys, tiers), st.builds(Cleared))


@st.composite
def snapshot_parts(draw: st.DrawFn) -> SnapshotPart:
    parts = draw(st.integers(1, 4_096))
    part = draw(st.integers(0, parts - 1))
    ids = draw(st.tuples(worker_ids, epochs, seqs_or_none, uint64))
    return SnapshotPart(*ids, part, parts, draw(tiers), draw(keys))


kv_messages: st.SearchStrategy[KvMessage] = st.one_of(
    st.builds(KvBatch, worker_ids, epochs, seqs, st.lists(operations, max_size=8).map(tuple), uint64),
    snapshot_parts(),
    st.builds(
        WorkerAnnounced,
        worker_id=worker_ids,
        pool_id=names.map(PoolId),
        epoch=epochs,
        address=names,
        model=names,
        block_size_tokens=int32_positive,
        key_scheme=names,
        kv_blocks=st.integers(0, 2**31 - 1),
        slots=int32_positive,
        data_parallel_rank=uint32,
        sends_events=st.booleans(),
        model_length_max_tokens=uint32,
        salt_generation=int32_positive,
        seq=seqs_or_none,
    ),
    st.builds(
        WorkerLoadReported,
        worker_id=worker_ids,
        epoch=epochs,
        running=uint32,
        waiting=uint32,
        kv_used_fraction=st.floats(0, 1),
        prompt_tokens_total=uint64,
        cached_tokens_total=uint64,
        output_tokens_total=uint64,
        process_started_at_ms=uint64,
        healthy=st.booleans(),
    ),
    st.builds(WorkerLeft, worker_ids, epochs),
)
control_messages: st.SearchStrategy[ControlMessage] = st.one_of(
    st.builds(
        SnapshotRequested, worker_ids, st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
    ),
    st.builds(EpochFloor, worker_ids, st.integers(0, 2**63 - 1).map(Epoch)),
    st.builds(KeysRefuted, worker_ids, epochs, seqs_or_none, keys, tiers),
)


@given(kv_messages)
def test_every_kv_message_comes_back(message: KvMessage) -> None:
    assert decode_kv_message(message.worker_id.encode(), encode_kv_message(message)) == message


@given(control_messages)
def test_every_control_message_comes_back(message: ControlMessage) -> None:
    assert decode_control_message(message.worker_id.encode(), encode_control_message(message)) == message


@given(st.binary(max_size=300), st.binary(max_size=20))
def test_random_bytes_are_malformed_or_a_message(value: bytes, key: bytes) -> None:
    with contextlib.suppress(MalformedMessage):
        decode_kv_message(key, value)
    with contextlib.suppress(MalformedMessage):
        decode_control_message(key, value)


@given(kv_messages, st.data())
def test_damaged_messages_are_malformed_or_a_message(message: KvMessage, data: st.DataObject) -> None:
    value = bytearray(encode_kv_message(message))
    for _ in range(data.draw(st.integers(1, 4))):
        value[data.draw(st.integers(0, len(value) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(MalformedMessage):
        decode_kv_message(message.worker_id.encode(), bytes(value[: data.draw(st.integers(0, len(value)))]))


def batch(**changed: object) -> pb.KvMessage:
    stored = pb.KvOperation(stored=pb.BlocksStored(keys=bytes(16), tier=pb.TIER_DEVICE))
    wire = pb.KvMessage(worker_id="w", epoch=5, batch=pb.KvBatch(seq=1, operations=[stored]))
    wire.MergeFrom(pb.KvMessage(**changed))  # type: ignore[arg-type]
    return wire


def operation(**kind: object) -> pb.KvMessage:
    operations = [pb.KvOperation(**kind)]  # type: ignore[arg-type]
    return pb.KvMessage(worker_id="w", epoch=5, batch=pb.KvBatch(seq=1, operations=operations))


def part(**changed: object) -> pb.KvMessage:
    fields = {"seq": 1, "part": 0, "parts": 1, "tier": pb.TIER_DEVICE, **changed}
    return pb.KvMessage(worker_id="w", epoch=5, snapshot_part=pb.SnapshotPart(**fields))  # type: ignore[arg-type]


def announced(**changed: object) -> pb.KvMessage:
    fields = {"pool_id": "p", "address": "http://a:1", "model": "m", "block_size_tokens": 16, "key_scheme": "s",
              "kv_blocks": 10, "slots": 4, "salt_generation": 1, **changed}  # fmt: skip
    return pb.KvMessage(worker_id="w", epoch=5, announced=pb.WorkerAnnounced(**fields))  # type: ignore[arg-type]


def load(used: float) -> pb.KvMessage:
    return pb.KvMessage(worker_id="w", epoch=5, load=pb.WorkerLoadReported(kv_used_fraction=used))


@pytest.mark.parametrize(
    ("wire", "sentence"),
    [
        (pb.KvMessage(epoch=5, left=pb.WorkerLeft()), "names no worker"),
        (pb.KvMessage(worker_id="w", epoch=5), "without a body"),
        (pb.KvMessage(worker_id="other", epoch=5, left=pb.WorkerLeft()), "whose key is b'w'"),
        (pb.KvMessage(worker_id="w" * 201, epoch=5, left=pb.WorkerLeft()), "longer than 200"),
        (pb.KvMessage(worker_id="w\0", epoch=5, left=pb.WorkerLeft()), "zero byte"),
        (pb.KvMessage(worker_id="w", left=pb.WorkerLeft()), "epoch 0"),
        (pb.KvMessage(worker_id="w", epoch=2**63, left=pb.WorkerLeft()), "out of range"),
        (pb.KvMessage(worker_id="w", epoch=5, batch=pb.KvBatch()), "a batch 0"),
        (pb.KvMessage(worker_id="w", epoch=5, batch=pb.KvBatch(seq=2**64 - 1)), "out of range"),
        (operation(), "of a kind that this build does not know"),
        (operation(stored=pb.BlocksStored(keys=bytes(15), tier=pb.TIER_HOST)), "15 bytes"),
        (operation(stored=pb.BlocksStored(keys=bytes(8))), "tier 0"),
        (operation(removed=pb.BlocksRemoved(keys=bytes(8), tier=9)), "tier 9"),  # type: ignore[arg-type]
        (operation(removed=pb.BlocksRemoved(keys=bytes(8), tier=-1)), "tier -1"),  # type: ignore[arg-type]
        (part(part=1), "part 1 of 1"),
        (part(parts=0), "part 0 of 0"),
        (part(parts=5_000), "of 5000"),
        (part(seq=2**63), "out of range"),
        (part(tier=0), "tier 0"),
        (part(keys=bytes(8 * (SNAPSHOT_PART_KEYS_MAX + 1))), "65537 block keys"),
        (announced(pool_id=""), "no pool"),
        (announced(model=""), "no model"),
        (announced(address="\0"), "zero byte"),
        (announced(key_scheme=""), "no key scheme"),
        (announced(block_size_tokens=0), "block size of 0"),
        (announced(kv_blocks=2**31), "out of range"),
        (announced(slots=0), "slots of 0"),
        (announced(salt_generation=0), "salt generation of 0"),
        (announced(seq=2**63), "out of range"),
        (load(float("nan")), "no fraction"),
        (load(-0.5), "no fraction"),
        (load(1.5), "no fraction"),
    ],
)
def test_each_breach_is_one_sentence(wire: pb.KvMessage, sentence: str) -> None:
    key = wire.worker_id.encode() if wire.worker_id.startswith("w") else b"w"
    with pytest.raises(MalformedMessage, match=sentence) as raised:
        decode_kv_message(key, wire.SerializeToString())
    assert str(raised.value).endswith(".")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("wire", "sentence"),
    [
        (pb.ControlMessage(epoch_floor=pb.EpochFloor(epoch=1)), "names no worker"),
        (pb.ControlMessage(worker_id="w"), "without a body"),
        (pb.ControlMessage(worker_id="x", epoch_floor=pb.EpochFloor(epoch=1)), "whose key"),
        (pb.ControlMessage(worker_id="w", epoch_floor=pb.EpochFloor(epoch=2**63)), "out of range"),
        (pb.ControlMessage(worker_id="w", keys_refuted=pb.KeysRefuted(seq=1, tier=pb.TIER_HOST)), "out of range"),
        (pb.ControlMessage(worker_id="w", keys_refuted=pb.KeysRefuted(epoch=1, seq=1)), "tier 0"),
        (
            pb.ControlMessage(
                worker_id="w", keys_refuted=pb.KeysRefuted(epoch=1, keys=bytes(9), tier=pb.TIER_HOST)
            ),
            "9 bytes",
        ),
        (
            pb.ControlMessage(worker_id="w", snapshot_requested=pb.SnapshotRequested(reason="x" * 1_001)),
            "longer than 1000",
        ),
    ],
)
def test_each_control_breach_is_one_sentence(wire: pb.ControlMessage, sentence: str) -> None:
    with pytest.raises(MalformedMessage, match=sentence):
        decode_control_message(b"w", wire.SerializeToString())


def test_fields_of_a_later_schema_are_ignored() -> None:
    later_field = b"\xd2\x0f\x05hello"  # field 250, length-delimited
    expected = KvBatch(WorkerId("w"), Epoch(5), Seq(1), (Stored((0, 0)),))
    assert decode_kv_message(b"w", batch().SerializeToString() + later_field) == expected


def test_keys_are_big_endian() -> None:
    message = KvBatch(WorkerId("w"), Epoch(5), Seq(1), (Stored((1, 2**64 - 1)),))
    assert bytes(7) + b"\x01" + b"\xff" * 8 in encode_kv_message(message)


def test_the_largest_part_fits_below_kafkas_default_limit() -> None:
    message = SnapshotPart(
        WorkerId("w" * 200), Epoch(2**63 - 1), Seq(1), 1, 0, 1, Tier.DISK, range(SNAPSHOT_PART_KEYS_MAX)
    )
    assert len(encode_kv_message(message)) < 600_000
