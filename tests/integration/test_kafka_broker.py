"""The embedded broker as a process: it answers, goes, comes back on its port, and leaves nothing behind."""

import asyncio
import os
import signal
import socket
import sys
from pathlib import Path

import psutil
import pytest
from aiokafka.admin import AIOKafkaAdminClient

from evenhand.core.errors import InvalidConfig
from evenhand.kafka import EMBEDDED_PARTITIONS
from evenhand.local.broker import EmbeddedBroker


async def test_it_listens_on_loopback_alone(embedded_broker: EmbeddedBroker) -> None:
    connections = psutil.Process(embedded_broker.pid).net_connections(kind="tcp")
    listening = {connection.laddr.ip for connection in connections if connection.status == psutil.CONN_LISTEN}
    assert listening == {"127.0.0.1"}
    assert embedded_broker.memory_bytes() > 1_000_000


async def test_leaving_the_block_ends_it() -> None:
    async with EmbeddedBroker() as broker:
        pid = broker.pid
        assert pid
    assert not psutil.pid_exists(pid)
    assert not broker.running
    assert broker.memory_bytes() == 0


async def test_a_paused_broker_ends_too() -> None:
    async with EmbeddedBroker() as broker:
        pid = broker.pid
        assert pid
        await broker.pause()
    assert not psutil.pid_exists(pid)


async def test_a_restart_keeps_the_port_and_changes_the_cluster(embedded_broker: EmbeddedBroker) -> None:
    before, pid = embedded_broker.bootstrap, embedded_broker.pid
    cluster = await cluster_id(embedded_broker)
    await embedded_broker.restart()
    assert (embedded_broker.bootstrap, embedded_broker.pid != pid) == (before, True)
    assert await cluster_id(embedded_broker) != cluster
    await embedded_broker.kill()
    assert not embedded_broker.running
    await embedded_broker.restart()
    assert embedded_broker.bootstrap == before


async def cluster_id(broker: EmbeddedBroker) -> str:
    admin = AIOKafkaAdminClient(bootstrap_servers=broker.bootstrap)
    await admin.start()
    try:
        return str((await admin.describe_cluster())["cluster_id"])
    finally:
        await admin.close()


async def test_a_mentioned_topic_has_the_partitions_that_the_profile_assumes(
    embedded_broker: EmbeddedBroker, kafka_topic: str
) -> None:
    admin = AIOKafkaAdminClient(bootstrap_servers=embedded_broker.bootstrap)
    await admin.start()
    try:
        (described,) = await admin.describe_topics([kafka_topic])
    finally:
        await admin.close()
    assert len(described["partitions"]) == EMBEDDED_PARTITIONS


async def test_a_port_in_use_is_one_sentence() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(InvalidConfig, match=rf"^Port {port} is in use[^.]*\.$"):
            await EmbeddedBroker(port).start()


PARENT = """
import asyncio, sys
from evenhand.local.broker import EmbeddedBroker

async def main():
    broker = EmbeddedBroker()
    await broker.start()
    print(broker.pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


async def test_it_dies_with_a_killed_parent() -> None:
    services = str(Path(__file__).parents[2] / "services")
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PARENT, stdout=asyncio.subprocess.PIPE, env={**os.environ, "PYTHONPATH": services}
    )
    assert parent.stdout is not None
    async with asyncio.timeout(20):
        pid = int(await parent.stdout.readline())
    child = psutil.Process(pid)
    parent.send_signal(signal.SIGKILL)
    await parent.wait()
    assert await asyncio.to_thread(gone, child)


def gone(process: psutil.Process) -> bool:
    """Whether the process ends within some seconds; an orphan that nobody reaped counts as ended."""
    _, alive = psutil.wait_procs([process], timeout=10)
    return not alive or process.status() == psutil.STATUS_ZOMBIE
