"""Which partition a record key belongs to: murmur2, as every Kafka client's default partitioner has it.

A worker's partition must never change, or its batches would be read out of order; so this is a function of
key and partition count alone, the same in the memory log, in the real writer and in other languages' clients.
"""

from functools import lru_cache

KEYS_REMEMBERED_MAX = 65_536
_SEED = 0x9747B28C
_MULTIPLIER = 0x5BD1E995
_MASK = 0xFFFFFFFF


def murmur2(data: bytes) -> int:
    """MurmurHash2 of ``data`` with Kafka's seed, as an unsigned 32-bit integer."""
    value = (_SEED ^ len(data)) & _MASK
    whole = len(data) & ~3
    for start in range(0, whole, 4):
        word = (int.from_bytes(data[start : start + 4], "little") * _MULTIPLIER) & _MASK
        word = ((word ^ (word >> 24)) * _MULTIPLIER) & _MASK
        value = ((value * _MULTIPLIER) & _MASK) ^ word
    if rest := data[whole:]:
        value = ((value ^ int.from_bytes(rest, "little")) * _MULTIPLIER) & _MASK
    value = ((value ^ (value >> 13)) * _MULTIPLIER) & _MASK
    return value ^ (value >> 15)


@lru_cache(maxsize=KEYS_REMEMBERED_MAX)
def partition_of(key: bytes, partitions: int) -> int:
    """Partition of ``key`` among ``partitions`` ≥ 1."""
    return (murmur2(key) & 0x7FFFFFFF) % partitions
