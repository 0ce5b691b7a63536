"""What the production profile adds: idempotent producing, errors for positions out of range, topics as configured.

Over librdkafka's mock cluster of three brokers where it can show a thing; it does not drop what a retry repeats,
so that part, retention and topic settings run against Apache Kafka alone.
"""

import asyncio
import struct
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, cast

import pytest
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, RecordsToDelete
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import KafkaConnectionError
from aiokafka.protocol.produce import ProduceRequest
from tests.fixtures.kafka import MockCluster

from evenhand.core.errors import Unavailable
from evenhand.kafka import KafkaConfig, KafkaLogReader, KafkaLogWriter, ensure_topic
from evenhand.kafka.config import RETENTION_MS
from evenhand.local.broker import EmbeddedBroker
from evenhand.ports import CONTROL_TOPIC, KV_TOPIC, LogPosition, LogRecord, LogReplaced

# Of a record batch, version 2: what a broker tells a retry by.
PRODUCER_STAMP = struct.Struct(">qhi")
PRODUCER_STAMP_AT = 43
NO_PRODUCER = -1


class LosesOneAnswer:
    """Stands before a producer's client: the broker's first answer to a produce request never arrives."""

    def __init__(self, writer: KafkaLogWriter) -> None:
        client = cast("Any", writer._producer).client
        self.stamps: list[tuple[int, int, int]] = []
        self.lost = False
        self._send = client.send
        client.send = self.send

    async def send(self, node: int, request: Any, **arguments: Any) -> Any:
        answer = await self._send(node, request, **arguments)
        if isinstance(request, ProduceRequest):
            self.stamps += [stamp(records) for records in batches(request)]
            if not self.lost:
                self.lost = True
                raise KafkaConnectionError("the answer was lost")
        return answer


def batches(request: ProduceRequest) -> Sequence[bytes]:
    topics: Sequence[tuple[str, Sequence[tuple[int, bytes]]]] = cast("Any", request)._topics
    return [bytes(records) for _, partitions in topics for _, records in partitions]


def stamp(records: bytes) -> tuple[int, int, int]:
    """Producer id, producer epoch and first sequence number of a batch."""
    producer_id, epoch, sequence = PRODUCER_STAMP.unpack_from(records, PRODUCER_STAMP_AT)
    return producer_id, epoch, sequence


async def read_all(config: KafkaConfig, topic: str, positions: Mapping[int, LogPosition]) -> list[LogRecord]:
    """Everything there is: until the log has been silent for a while."""
    reader, records, silent = KafkaLogReader(config), list[LogRecord](), 0
    async for batch in reader.read(topic, positions):
        records.extend(batch)
        silent = 0 if batch else silent + 1
        if silent > 5:
            break
    await reader.close()
    return records


def from_start(partitions: int) -> Mapping[int, LogPosition]:
    return {number: LogPosition(0) for number in range(partitions)}


async def published_through_a_lost_answer(config: KafkaConfig, topic: str) -> LosesOneAnswer:
    writer = KafkaLogWriter(config)
    await writer.publish(topic, b"k", b"zero")
    faulty = LosesOneAnswer(writer)
    await writer.publish(topic, b"k", b"one")
    await writer.publish(topic, b"k", b"two")
    await writer.close()
    return faulty


async def test_a_retry_carries_the_same_stamp(mock_cluster: str, kafka_topic: str) -> None:
    faulty = await published_through_a_lost_answer(KafkaConfig.production(mock_cluster), kafka_topic)
    first, retry, following = faulty.stamps
    assert first == retry
    assert first[0] >= 0
    assert following == (first[0], first[1], first[2] + 1)


async def test_the_embedded_profile_has_no_stamp_and_may_write_twice(kafka_topic: str) -> None:
    async with EmbeddedBroker() as broker:
        config = KafkaConfig.embedded(broker.bootstrap)
        faulty = await published_through_a_lost_answer(config, kafka_topic)
        records = await read_all(config, kafka_topic, from_start(config.partitions))
    assert {producer_id for producer_id, _, _ in faulty.stamps} == {NO_PRODUCER}
    assert [record.value for record in records] == [b"zero", b"one", b"one", b"two"]


async def test_a_reader_stops_where_the_brokers_say_the_end_is(mock_cluster: str, kafka_topic: str) -> None:
    config = KafkaConfig.production(mock_cluster)
    writer = KafkaLogWriter(config)
    await writer.publish_many(kafka_topic, [(b"worker-%d" % (number % 9), b"v") for number in range(100)])
    await writer.close()
    partitions = await ensure_topic(config, kafka_topic)
    records = await read_all(config, kafka_topic, from_start(partitions))
    consumer = AIOKafkaConsumer(bootstrap_servers=mock_cluster)
    await consumer.start()
    ends = await consumer.end_offsets([TopicPartition(kafka_topic, number) for number in range(partitions)])
    await consumer.stop()
    assert sum(ends.values()) == len(records) == 100
    for partition, end in ends.items():
        offsets = [record.offset for record in records if record.partition == partition.partition]
        assert offsets == list(range(end))


async def test_an_error_for_a_position_out_of_range_ends_the_read_at_once(
    mock_cluster: str, kafka_topic: str
) -> None:
    config = KafkaConfig.production(mock_cluster, verify_silence_ms=60_000)
    writer = KafkaLogWriter(config)
    await writer.publish(kafka_topic, b"k", b"v")
    await writer.close()
    (record,) = await read_all(config, kafka_topic, from_start(await ensure_topic(config, kafka_topic)))
    with pytest.raises(LogReplaced):
        await read_all(config, kafka_topic, {record.partition: LogPosition(50, record.digest())})


async def test_a_writer_lets_go_of_a_dead_cluster_in_time(kafka_topic: str) -> None:
    """Idempotent clients retry for ever; neither a publish nor the end of the process may wait that long."""
    cluster = MockCluster()
    writer = KafkaLogWriter(KafkaConfig.production(cluster.bootstrap, publish_timeout_ms=500))
    await writer.publish(kafka_topic, b"k", b"taken")
    cluster.end()
    tasks = len(asyncio.all_tasks())
    async with asyncio.timeout(5.0):
        for _ in range(2):
            with pytest.raises(Unavailable, match="within 500 ms"):
                await writer.publish(kafka_topic, b"k", b"not taken")
        await writer.close()
    assert len(asyncio.all_tasks()) < tasks, "the client left tasks behind"


@pytest.fixture
async def admin(real_kafka: KafkaConfig) -> AsyncIterator[AIOKafkaAdminClient]:
    admin = AIOKafkaAdminClient(bootstrap_servers=real_kafka.bootstrap)
    await admin.start()
    yield admin
    await admin.close()


@pytest.mark.real_kafka
async def test_apache_kafka_writes_a_retry_once(real_kafka: KafkaConfig, kafka_topic: str) -> None:
    await published_through_a_lost_answer(real_kafka, kafka_topic)
    records = await read_all(real_kafka, kafka_topic, from_start(real_kafka.partitions))
    assert [record.value for record in records] == [b"zero", b"one", b"two"]


@pytest.mark.real_kafka
@pytest.mark.parametrize("topic", [KV_TOPIC, CONTROL_TOPIC])
async def test_apache_kafka_has_the_topics_as_configured(
    real_kafka: KafkaConfig, admin: AIOKafkaAdminClient, topic: str
) -> None:
    partitions = await ensure_topic(real_kafka, topic)
    assert await ensure_topic(real_kafka, topic) == partitions >= 1
    response: Any = (await admin.describe_configs([ConfigResource(ConfigResourceType.TOPIC, topic)]))[0]
    settings = {entry[0]: entry[1] for entry in response.resources[0][4]}
    assert settings["retention.ms"] == str(RETENTION_MS[topic])
    assert settings["cleanup.policy"] == "delete"


@pytest.mark.real_kafka
async def test_apache_kafka_may_forget_what_was_read_but_not_what_was_not(
    real_kafka: KafkaConfig, admin: AIOKafkaAdminClient, kafka_topic: str
) -> None:
    writer = KafkaLogWriter(real_kafka)
    await writer.publish_many(kafka_topic, [(b"k", b"%d" % number) for number in range(6)])
    await writer.close()
    records = await read_all(real_kafka, kafka_topic, from_start(real_kafka.partitions))
    partition = records[0].partition
    await admin.delete_records({TopicPartition(kafka_topic, partition): RecordsToDelete(before_offset=4)})
    read_up_to_there = {partition: LogPosition(4, records[3].digest())}
    assert await read_all(real_kafka, kafka_topic, read_up_to_there) == records[4:]
    assert await read_all(real_kafka, kafka_topic, {partition: LogPosition(0)}) == records[4:]
    with pytest.raises(LogReplaced):
        await read_all(real_kafka, kafka_topic, {partition: LogPosition(2, records[1].digest())})
