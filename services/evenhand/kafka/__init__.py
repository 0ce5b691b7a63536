"""The log ports over Kafka, with aiokafka.

The client library reports every retry on its own logger, many a second while a broker is away; the ports here
say once that it is away and once that it is back, so the library is kept quiet.
"""

import logging

from evenhand.kafka.config import EMBEDDED_PARTITIONS, KafkaConfig, Profile, SecurityProtocol
from evenhand.kafka.reader import KafkaLogReader
from evenhand.kafka.topics import ensure_topic
from evenhand.kafka.writer import KafkaLogWriter

__all__ = [
    "EMBEDDED_PARTITIONS",
    "KafkaConfig",
    "KafkaLogReader",
    "KafkaLogWriter",
    "Profile",
    "SecurityProtocol",
    "ensure_topic",
]

logging.getLogger("aiokafka").setLevel(logging.CRITICAL)
