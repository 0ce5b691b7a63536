"""An engine's own words: msgpack frames of vLLM and SGLang, decoded and nothing more.

A frame is ``[timestamp_s, events, data_parallel_rank]``. An event is a map with a ``type`` key (current vLLM) or
a positional array that starts with the type (SGLang, older vLLM); both carry integer hashes, signed or unsigned,
or 32-byte ones. Fields are positional in arrays, so their order here is the wire's.

Maps alone, or arrays alone, are decoded in one typed pass that refuses unknown fields and negative names. What
does not fit falls back to one event at a time, so that a bad event spoils itself and not its batch, and what is
unknown is counted. What is not fully understood never becomes a clear: a clear is only what decodes as one.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Final

import msgspec

from evenhand.core.errors import MalformedMessage
from evenhand.worker.counters import TranslatorCounters

EngineHash = int | bytes
"""A block's name within one life of an engine; says nothing about its content."""

KNOWN_TYPES: Final = frozenset({"BlockStored", "BlockRemoved", "AllBlocksCleared"})
EVENTS_PER_FRAME_MAX: Final = 1_000_000
TIMESTAMP_S_MAX: Final = 1e12
_HASH_MASK: Final = (1 << 64) - 1


class BlockStored(msgspec.Struct, gc=False):
    """Blocks became findable under these names, one chained to the next, the first to ``parent_block_hash``."""

    block_hashes: list[EngineHash]
    parent_block_hash: EngineHash | None = None
    token_ids: list[int] | None = None
    block_size: int = 0
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


class BlockRemoved(msgspec.Struct, gc=False):
    """One copy of each name is gone."""

    block_hashes: list[EngineHash]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(msgspec.Struct, gc=False):
    """Everything is gone."""


EngineEvent = BlockStored | BlockRemoved | AllBlocksCleared


class _StoredKnown(BlockStored, tag="BlockStored", forbid_unknown_fields=True, gc=False): ...


class _RemovedKnown(BlockRemoved, tag="BlockRemoved", forbid_unknown_fields=True, gc=False): ...


_Unsigned = Annotated[int, msgspec.Meta(ge=0)] | bytes


class _StoredStrict(BlockStored, tag="BlockStored", forbid_unknown_fields=True, gc=False):
    block_hashes: list[_Unsigned]
    parent_block_hash: _Unsigned | None = None


class _RemovedStrict(BlockRemoved, tag="BlockRemoved", forbid_unknown_fields=True, gc=False):
    block_hashes: list[_Unsigned]


class _ClearedStrict(AllBlocksCleared, tag="AllBlocksCleared", forbid_unknown_fields=True, gc=False): ...


class _StoredLoose(BlockStored, tag="BlockStored", gc=False): ...


class _RemovedLoose(BlockRemoved, tag="BlockRemoved", gc=False): ...


class _ClearedLoose(AllBlocksCleared, tag="AllBlocksCleared", gc=False): ...


class _StoredArray(BlockStored, tag="BlockStored", array_like=True, gc=False): ...


class _RemovedArray(BlockRemoved, tag="BlockRemoved", array_like=True, gc=False): ...


class _ClearedArray(AllBlocksCleared, tag="AllBlocksCleared", array_like=True, gc=False): ...


class EngineFrame(msgspec.Struct, array_like=True, gc=False):
    """One decoded frame. Integer names in it are unsigned."""

    timestamp_s: float
    events: Sequence[EngineEvent]
    data_parallel_rank: int | None = None

    @property
    def emitted_at_ms(self) -> int:
        """The engine's wall clock; 0 where it says nothing usable."""
        return int(self.timestamp_s * 1000) if 0.0 <= self.timestamp_s < TIMESTAMP_S_MAX else 0


class _FrameStrict(EngineFrame, array_like=True, gc=False):
    events: list[_StoredStrict | _RemovedStrict | _ClearedStrict]


class _StoredArrayStrict(
    _StoredStrict, tag="BlockStored", array_like=True, forbid_unknown_fields=True, gc=False
): ...


class _RemovedArrayStrict(
    _RemovedStrict, tag="BlockRemoved", array_like=True, forbid_unknown_fields=True, gc=False
): ...


class _ClearedArrayStrict(
    AllBlocksCleared, tag="AllBlocksCleared", array_like=True, forbid_unknown_fields=True, gc=False
): ...


class _FrameOfArrays(EngineFrame, array_like=True, gc=False):
    events: list[_StoredArrayStrict | _RemovedArrayStrict | _ClearedArrayStrict]


class _FrameRaw(msgspec.Struct, array_like=True, gc=False):
    timestamp_s: Any
    events: list[msgspec.Raw]
    data_parallel_rank: Any = None


_decode_strict = msgspec.msgpack.Decoder(_FrameStrict).decode
_decode_arrays = msgspec.msgpack.Decoder(_FrameOfArrays).decode
_decode_raw = msgspec.msgpack.Decoder(_FrameRaw).decode
_decode_map_known = msgspec.msgpack.Decoder(_StoredKnown | _RemovedKnown | _ClearedStrict).decode
_decode_map_loose = msgspec.msgpack.Decoder(_StoredLoose | _RemovedLoose | _ClearedLoose).decode
_decode_array = msgspec.msgpack.Decoder(_StoredArray | _RemovedArray | _ClearedArray).decode
_decode_any = msgspec.msgpack.Decoder().decode

_ARRAY_FIELDS: Final = {"BlockStored": 15, "BlockRemoved": 6, "AllBlocksCleared": 1}
"""Length of a positional event with every known field, its type included."""


def decode_frame(payload: bytes, counters: TranslatorCounters) -> EngineFrame:
    """Decode one frame; what in it is not understood is counted.

    Raises ``MalformedMessage`` only where the frame cannot even be split into events.
    """
    for decode in (_decode_strict, _decode_arrays):
        try:
            return decode(payload)
        except (msgspec.DecodeError, RecursionError):
            continue
    return _decode_event_by_event(payload, counters)


def _decode_event_by_event(payload: bytes, counters: TranslatorCounters) -> EngineFrame:
    try:
        raw = _decode_raw(payload)
    except (msgspec.DecodeError, RecursionError) as error:
        raise MalformedMessage("An engine's frame is not an array of time, events and rank.") from error
    events: list[EngineEvent] = []
    for encoded in raw.events[:EVENTS_PER_FRAME_MAX]:
        event, has_unknown_fields = _decode_event(encoded)
        if event is not None:
            events.append(_unsigned(event))
            counters.events_with_unknown_fields += has_unknown_fields
        elif _names_unknown_type(encoded):
            counters.events_of_unknown_type += 1
        else:
            counters.events_malformed += 1
    timestamp_s = raw.timestamp_s if type(raw.timestamp_s) in (int, float) else 0.0
    rank = raw.data_parallel_rank if type(raw.data_parallel_rank) is int else None
    return EngineFrame(timestamp_s, events, rank)


def _unsigned(event: EngineEvent) -> EngineEvent:
    """Names in one form: signed integers become the unsigned ones that they stand for."""
    if isinstance(event, AllBlocksCleared):
        return event
    event.block_hashes = [name & _HASH_MASK if isinstance(name, int) else name for name in event.block_hashes]
    if isinstance(event, BlockStored) and isinstance(event.parent_block_hash, int):
        event.parent_block_hash &= _HASH_MASK
    return event


def _decode_event(encoded: msgspec.Raw) -> tuple[EngineEvent | None, bool]:
    """The event, or None, and whether it has fields that are not known."""
    head = memoryview(encoded)
    lead = head[0]
    if 0x90 <= lead <= 0x9F or lead in (0xDC, 0xDD):
        try:
            event: EngineEvent = _decode_array(encoded)
        except (msgspec.DecodeError, RecursionError):
            return None, False
        length = lead - 0x90 if lead <= 0x9F else int.from_bytes(head[1 : 3 if lead == 0xDC else 5], "big")
        return event, length > _ARRAY_FIELDS[str(type(event).__struct_config__.tag)]
    try:
        return _decode_map_known(encoded), False
    except (msgspec.DecodeError, RecursionError):
        pass
    try:
        return _decode_map_loose(encoded), True
    except (msgspec.DecodeError, RecursionError):
        return None, False


def _names_unknown_type(encoded: msgspec.Raw) -> bool:
    try:
        value = _decode_any(encoded)
    except (msgspec.DecodeError, RecursionError, TypeError):
        return False
    if isinstance(value, dict):
        name = value.get("type")
    elif isinstance(value, list) and value:
        name = value[0]
    else:
        return False
    return isinstance(name, str) and name not in KNOWN_TYPES
