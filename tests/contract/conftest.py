"""Every implementation of the log ports under one fixture."""

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import pytest
import pytest_asyncio

from evenhand.kafka import KafkaConfig, KafkaLogReader, KafkaLogWriter
from evenhand.local.broker import EmbeddedBroker
from evenhand.memory import MemoryLog, MemoryLogReader, MemoryLogWriter
from evenhand.ports import LogReader, LogWriter


@dataclass(frozen=True, slots=True)
class LogUnderTest:
    """One implementation: a topic of the test's own, and as many readers and writers as it wants."""

    topic: str
    new_reader: Callable[[], LogReader]
    new_writer: Callable[[], LogWriter]


@pytest_asyncio.fixture(params=["memory", "embedded", "mock", pytest.param("real", marks=pytest.mark.real_kafka)])
async def log(request: pytest.FixtureRequest, kafka_topic: str) -> AsyncIterator[LogUnderTest]:
    """Memory; the embedded broker; librdkafka's mock cluster in the production profile; Apache Kafka."""
    if request.param == "memory":
        memory = MemoryLog(partitions=4)
        yield LogUnderTest(kafka_topic, lambda: MemoryLogReader(memory), lambda: MemoryLogWriter(memory))
    elif request.param == "embedded":
        async with EmbeddedBroker() as broker:
            yield over_kafka(KafkaConfig.embedded(broker.bootstrap), kafka_topic)
    elif request.param == "mock":
        addresses = request.getfixturevalue("mock_cluster")
        yield over_kafka(KafkaConfig.production(addresses, verify_silence_ms=500), kafka_topic)
    else:
        yield over_kafka(request.getfixturevalue("real_kafka"), kafka_topic)


def over_kafka(config: KafkaConfig, topic: str) -> LogUnderTest:
    return LogUnderTest(topic, lambda: KafkaLogReader(config), lambda: KafkaLogWriter(config))
