"""Topics: made where they are missing, never changed where they exist.

A worker's partition must never change, so nothing here adds partitions to a topic; whoever finds another count
than the one its positions were made with refuses to go on.
"""

import asyncio
from typing import Any

from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.errors import KafkaError

from evenhand.core.errors import Unavailable
from evenhand.kafka.config import RETENTION_DEFAULT_MS, RETENTION_MS, KafkaConfig, Profile

SEGMENT_MS = 15 * 60_000
"""A segment is closed after so long, so that retention frees space in steps of it."""


async def ensure_topic(config: KafkaConfig, topic: str) -> int:
    """Create the topic if it is missing; return how many partitions it has.

    Raises ``Unavailable`` if the broker does not answer within ``request_timeout_ms``, or will not create it.
    """
    admin = AIOKafkaAdminClient(**config.client_arguments())
    try:
        async with asyncio.timeout(config.request_timeout_ms / 1_000):
            await admin.start()
            # The embedded broker makes a topic that is mentioned, and breaks one that is created twice at once.
            refusal = await _create(admin, config, topic) if config.profile is Profile.PRODUCTION else ""
            return await _partition_count(admin, topic, refusal)
    except (KafkaError, OSError, TimeoutError) as error:
        raise Unavailable(f"Kafka at {config.bootstrap} did not answer about topic {topic}.") from error
    finally:
        await admin.close()


async def _create(admin: AIOKafkaAdminClient, config: KafkaConfig, topic: str) -> str:
    """Ask for the topic; return why it was refused, empty if it was not. An existing topic is a refusal, too."""
    settings = {
        "cleanup.policy": "delete",
        "retention.ms": str(RETENTION_MS.get(topic, RETENTION_DEFAULT_MS)),
        "segment.ms": str(SEGMENT_MS),
    }
    wanted = NewTopic(topic, config.partitions, 1, topic_configs=settings)
    wanted.replication_factor = config.replication_factor  # the constructor refuses -1, the broker knows it
    if admin._client.cluster.controller is None:
        return "the cluster has no controller"
    try:
        response: Any = await admin.create_topics([wanted])
    except KafkaError as error:  # the broker may not offer creation at all, and still have the topic
        return str(error)
    (outcome,) = response.topic_errors
    _, code, *sentence = outcome
    return "" if not code else str((sentence or [None])[0] or f"error {code}")


async def _partition_count(admin: AIOKafkaAdminClient, topic: str, refusal: str) -> int:
    (described,) = await admin.describe_topics([topic])
    count = len(described["partitions"])
    if described["error_code"] or not count:
        raise Unavailable(f"Topic {topic} does not exist and could not be created: {refusal or 'not ready yet'}.")
    return count
