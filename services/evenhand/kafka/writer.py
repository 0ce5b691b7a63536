"""``LogWriter`` over Kafka: acknowledged by all in-sync replicas, in order per key, bounded in time.

A key's partition is murmur2 of the key over the partition count found when the topic was first written to; a
count that changes later does not move a worker in the middle of its life.

Where the profile is idempotent, a retry inside the client is never written twice. A publish that raised
``Unavailable`` may still arrive: the client keeps what it took, in order. Whoever publishes it again therefore
risks a duplicate, which the fold ignores, and never a swap.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

from aiokafka import AIOKafkaProducer
from aiokafka.errors import KafkaConnectionError, KafkaError, KafkaTimeoutError, MessageSizeTooLargeError

from evenhand.core.errors import InvalidInput, Unavailable
from evenhand.kafka.config import KafkaConfig, Profile
from evenhand.kafka.embedded import mention_topics_first
from evenhand.kafka.topics import ensure_topic
from evenhand.logs import get_logger
from evenhand.ports import LogWriter
from evenhand.wire.partition import partition_of

MESSAGE_BYTES_MAX = 1_000_000
"""Apache Kafka's default bound on a batch, less what a batch adds."""

BATCH_BYTES_MAX = 256 * 1024
"""Records of one partition that travel together."""

_log = get_logger("kafka")


class KafkaLogWriter(LogWriter):
    """Appends to topics of one cluster. Calls may overlap; per key their order is the order of the calls."""

    def __init__(self, config: KafkaConfig) -> None:
        self._config = config
        self._producer: AIOKafkaProducer | None = None
        self._partitions: dict[str, int] = {}
        self._taking = asyncio.Lock()
        """Held while a record is handed to the client; first come, first served."""

    async def publish(self, topic: str, key: bytes, value: bytes) -> None:
        await self.publish_many(topic, [(key, value)])

    async def publish_many(self, topic: str, records: Sequence[tuple[bytes, bytes]]) -> None:
        """Publish keys and values in order, without waiting between them; returns once the broker has all.

        Raises ``InvalidInput`` for a record that no broker takes, and ``Unavailable`` if any may be missing.
        """
        producer: AIOKafkaProducer | None = None
        try:
            async with asyncio.timeout(self._config.publish_timeout_ms / 1_000):
                deliveries = await self._take_all(topic, records)
                producer = self._producer
                outcomes = await asyncio.gather(*deliveries, return_exceptions=True)
        except TimeoutError as error:
            raise self._unavailable(
                topic, f"did not take it within {self._config.publish_timeout_ms} ms"
            ) from error
        except KafkaError as error:
            await self._start_over(producer, error)
            raise self._unavailable(topic, f"answered {error}") from error
        for outcome in outcomes:
            if isinstance(outcome, MessageSizeTooLargeError):
                raise InvalidInput(f"A record for {topic} is larger than Kafka takes.") from outcome
            if isinstance(outcome, BaseException):
                await self._start_over(producer, outcome)
                raise self._unavailable(topic, f"answered {outcome}") from outcome

    async def close(self) -> None:
        """Send what was taken, as far as the broker answers in time, and let go."""
        producer, self._producer = self._producer, None
        if producer is not None:
            await _stop(producer, self._config.publish_timeout_ms / 1_000)

    async def _take_all(self, topic: str, records: Sequence[tuple[bytes, bytes]]) -> Sequence[asyncio.Future[Any]]:
        """Hand records to the client, in order; returns their deliveries. None is left over if one fails."""
        deliveries: list[asyncio.Future[Any]] = []
        async with self._taking:
            try:
                for key, value in records:
                    deliveries.append(await self._take(topic, key, value))
            except BaseException:
                for delivery in deliveries:
                    delivery.cancel()
                raise
        return deliveries

    async def _take(self, topic: str, key: bytes, value: bytes) -> asyncio.Future[Any]:
        """Hand one record to the client, in order; returns its delivery."""
        if len(key) + len(value) > MESSAGE_BYTES_MAX:
            raise InvalidInput(
                f"A record of {len(key) + len(value)} bytes for {topic} is larger than Kafka takes."
            )
        while self._producer is None:
            await self._start()
        producer = self._producer
        if topic not in self._partitions:
            self._partitions[topic] = await ensure_topic(self._config, topic)
        partition = partition_of(key, self._partitions[topic])
        if partition not in await producer.partitions_for(topic):
            raise Unavailable(f"Topic {topic} has lost partition {partition}.")
        delivery: asyncio.Future[Any] = await producer.send(topic, value, key, partition)
        return delivery

    async def _start(self) -> None:
        """Try once to connect, or wait a little where nobody listens; the caller's deadline bounds the tries."""
        producer = AIOKafkaProducer(
            **self._config.client_arguments(),
            acks="all",
            enable_idempotence=self._config.idempotent,
            linger_ms=self._config.linger_ms,
            max_request_size=2 * MESSAGE_BYTES_MAX,
            max_batch_size=BATCH_BYTES_MAX,
        )
        if self._config.profile is Profile.EMBEDDED:
            mention_topics_first(producer.client, lambda: tuple(self._partitions))
        try:
            await producer.start()
        except KafkaConnectionError:
            await producer.stop()
            await asyncio.sleep(self._config.reconnect_wait_ms_min / 1_000)
        except BaseException:
            await producer.stop()
            raise
        else:
            self._producer = producer

    async def _start_over(self, producer: AIOKafkaProducer | None, error: BaseException) -> None:
        """Drop a client that may be broken for good; one that merely waited too long mends itself."""
        if producer is None or producer is not self._producer or isinstance(error, KafkaTimeoutError):
            return
        _log.warning("kafka_producer_restarted", bootstrap=self._config.bootstrap, reason=str(error))
        self._producer = None
        await _stop(producer, self._config.publish_timeout_ms / 1_000)

    def _unavailable(self, topic: str, what: str) -> Unavailable:
        return Unavailable(f"Kafka at {self._config.bootstrap} may not have a record of {topic}: it {what}.")


async def _stop(producer: AIOKafkaProducer, seconds_max: float) -> None:
    """Stop a client within bounded time; what it could not send is lost, and its publishers were told so."""
    try:
        async with asyncio.timeout(seconds_max):
            await producer.flush()
    except TimeoutError:
        _log.warning("kafka_records_abandoned", reason="the broker did not take them in time")
        # stop() would wait for them for ever, so its other steps are taken one by one.
        await producer._sender.close()
        await producer.client.close()
        producer._closed = True
    else:
        await producer.stop()
