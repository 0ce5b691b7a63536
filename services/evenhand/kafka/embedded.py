"""What the embedded broker needs from a producer: that a topic is mentioned before it is written to.

The broker takes records for a topic that it does not know, and loses them, and refuses the partition from then
on, as soon as anyone mentions the topic. A client that reconnects after a restart, with what it knew of topics
before, does exactly that. So each connection that a producer opens first asks for the metadata of its topics,
which makes them; requests of one connection are answered in order, so nothing can overtake it.
"""

from collections.abc import Callable, Sequence
from typing import Any

from aiokafka.errors import KafkaError
from aiokafka.protocol.metadata import MetadataRequest


def mention_topics_first(client: Any, topics: Callable[[], Sequence[str]]) -> None:
    """Make every connection that this aiokafka client opens from here on mention ``topics()`` first."""
    open_connection = client._get_conn

    async def open_and_mention(node_id: Any, **arguments: Any) -> Any:
        table = dict(client._conns)
        connection = await open_connection(node_id, **arguments)
        mentioned = list(topics())
        if connection is None or not mentioned or any(connection is known for known in table.values()):
            return connection
        try:
            await connection.send(MetadataRequest(mentioned))
        except (KafkaError, OSError, TimeoutError):
            connection.close()
            return None
        return connection

    client._get_conn = open_and_mention
