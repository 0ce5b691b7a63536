"""Keys keep their partitions: the hash is the one other Kafka clients use."""

from aiokafka.partitioner import murmur2 as murmur2_of_aiokafka
from hypothesis import given
from hypothesis import strategies as st

from evenhand.wire.partition import murmur2, partition_of


@given(st.binary(max_size=100))
def test_the_hash_is_kafkas(key: bytes) -> None:
    assert murmur2(key) == murmur2_of_aiokafka(key) & 0xFFFFFFFF


def test_known_values_of_the_java_client() -> None:
    signed = {b"21": -973932308, b"foobar": -790332482, b"a-little-bit-long-string": -985981536}
    assert {key: murmur2(key) for key in signed} == {key: value & 0xFFFFFFFF for key, value in signed.items()}


@given(st.binary(max_size=100), st.integers(1, 100))
def test_a_partition_is_in_range(key: bytes, partitions: int) -> None:
    assert 0 <= partition_of(key, partitions) < partitions
