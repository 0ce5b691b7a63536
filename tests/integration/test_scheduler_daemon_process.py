"""``evenhand scheduler`` as a process over a real broker and a real database."""

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import aiohttp
import asyncpg
import grpc
import pytest
from tests.fixtures.scheduler_daemon import (
    USED,
    Client,
    acquire_request,
    announced,
    load,
    stored,
)

from evenhand.core.errors import Unavailable
from evenhand.kafka import KafkaConfig, KafkaLogWriter
from evenhand.local.broker import EmbeddedBroker
from evenhand.ports import KV_TOPIC
from evenhand.wire.generated import scheduler_pb2 as pb
from evenhand.wire.generated.scheduler_pb2_grpc import SchedulerStub
from evenhand.wire.kv_codec import encode_kv_message

SERVICES = Path(__file__).parents[2] / "services"
WAIT_S = 45.0


class SchedulerProcess:
    """One process; ``listen`` and ``pages`` are its addresses once it says it is ready."""

    def __init__(self, folder: Path, dsn: str, bootstrap: str, *options: str) -> None:
        self._arguments = [
            *("-m", "evenhand.cli", "scheduler", "--pool", "llama", "--dsn", dsn, "--kafka", bootstrap),
            *("--kafka-profile", "embedded", "--secret-file", str(folder / "master.secret")),
            *("--insecure-loopback", "--lease-ttl-ms", "1500", "--metrics-port", "0"),
            *options,
        ]
        if "--listen" not in options:
            self._arguments += ["--listen", "127.0.0.1:0"]
        self._process: asyncio.subprocess.Process | None = None
        self.listen = ""
        self.pages = ""

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            *self._arguments,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(SERVICES)},
        )

    async def ready(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        line = await asyncio.wait_for(self._process.stdout.readline(), WAIT_S)
        if not line:
            raise AssertionError((await self._process.communicate())[1].decode())
        found = re.search(r"pool llama on (\S+), pages on (\S+)", line.decode())
        assert found, line
        self.listen, self.pages = found.groups()

    async def ended(self) -> tuple[int, str]:
        """Its exit code and what it said on standard error."""
        assert self._process is not None
        _, told = await asyncio.wait_for(self._process.communicate(), WAIT_S)
        code = self._process.returncode
        assert code is not None
        return code, told.decode()

    def send(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    async def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.communicate()


@asynccontextmanager
async def running(process: SchedulerProcess) -> AsyncIterator[SchedulerProcess]:
    await process.start()
    try:
        await process.ready()
        yield process
    finally:
        await process.kill()


@asynccontextmanager
async def client_of(process: SchedulerProcess) -> AsyncIterator[Client]:
    async with grpc.aio.insecure_channel(process.listen) as channel:
        yield Client(SchedulerStub(channel))


async def acquired(client: Client, request_id: str, keys: range = range(0)) -> pb.AcquireResponse:
    """A grant, asked for again while the scheduler says that it is not ready to give one."""
    async with asyncio.timeout(WAIT_S):
        while True:
            try:
                return await client.stub.Acquire(acquire_request(request_id, keys), timeout=WAIT_S)
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
            await asyncio.sleep(0.05)


async def status(process: SchedulerProcess) -> dict[str, object]:
    async with aiohttp.ClientSession() as session, session.get(f"http://{process.pages}/status") as answer:
        page: dict[str, object] = json.loads(await answer.text())
        return page


async def until(process: SchedulerProcess, holds: Callable[[dict[str, object]], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not holds(await status(process)):
            await asyncio.sleep(0.05)


class Edge:
    """What an edge would publish for worker w1."""

    def __init__(self, bootstrap: str) -> None:
        self._bootstrap = bootstrap
        self._writer: KafkaLogWriter | None = None
        self._beating: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "Edge":
        self._writer = KafkaLogWriter(KafkaConfig.embedded(self._bootstrap))
        self._beating = asyncio.create_task(self._beat())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._beating is not None
        assert self._writer is not None
        self._beating.cancel()
        await asyncio.gather(self._beating, return_exceptions=True)
        await self._writer.close()

    async def say(self, *messages: object) -> None:
        assert self._writer is not None
        for message in messages:
            await self._writer.publish(KV_TOPIC, b"w1", encode_kv_message(message))  # type: ignore[arg-type]

    async def _beat(self) -> None:
        while True:
            with suppress(Unavailable):
                await self.say(announced("w1"), load("w1"))
            await asyncio.sleep(0.2)


@pytest.fixture
async def seeded_dsn(postgres_dsn: str) -> str:
    connection = await asyncpg.connect(postgres_dsn)
    await connection.execute("insert into evenhand.tenant (tenant_id) values ('a')")
    await connection.close()
    return postgres_dsn


async def test_it_serves_survives_kill_and_broker_loss_and_stops_cleanly(
    tmp_path: Path, seeded_dsn: str, embedded_broker: EmbeddedBroker
) -> None:
    bootstrap = embedded_broker.bootstrap
    process = SchedulerProcess(tmp_path, seeded_dsn, bootstrap)
    async with Edge(bootstrap) as edge:
        async with running(process), client_of(process) as client:
            await edge.say(announced("w1"), stored("w1", range(1, 9)))
            await until(process, lambda page: page["map_blocks"] == 8)
            granted = await acquired(client, "r1", range(1, 9))
            assert granted.predicted_cached_tokens == 8 * 16
            await asyncio.sleep(1.3)  # a checkpoint
            process.send(signal.SIGKILL)
            await process.kill()
        async with running(process), client_of(process) as client:
            # The lease of the killed one has to run out first; the ticket is in its checkpoint.
            await until(process, lambda page: page["owner"] is True)
            assert (await client.renew(granted.ticket)).state == pb.TICKET_STATE_OPEN
            assert (await client.settle(granted.ticket, USED)).attained_cost == 3

            await embedded_broker.restart()
            await edge.say(stored("w1", range(9, 12), seq=2))
            await until(process, lambda page: page["map_blocks"] == 11)
            again = await acquired(client, "r2", range(1, 12))
            assert again.predicted_cached_tokens == 11 * 16
            await client.settle(again.ticket, USED)

            process.send(signal.SIGTERM)
            code, told = await process.ended()
            assert code == 0, told
            assert "Traceback" not in told


async def test_a_database_without_migrations(
    tmp_path: Path, postgres_empty_dsn: str, embedded_broker: EmbeddedBroker
) -> None:
    await _fails(SchedulerProcess(tmp_path, postgres_empty_dsn, embedded_broker.bootstrap), "migrate")


async def test_a_port_in_use(tmp_path: Path, seeded_dsn: str, embedded_broker: EmbeddedBroker) -> None:
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    options = ("--listen", f"127.0.0.1:{port}")
    await _fails(
        SchedulerProcess(tmp_path, seeded_dsn, embedded_broker.bootstrap, *options), f"listen on 127.0.0.1:{port}"
    )
    server.close()
    await server.wait_closed()


async def test_no_broker(tmp_path: Path, seeded_dsn: str) -> None:
    await _fails(SchedulerProcess(tmp_path, seeded_dsn, "127.0.0.1:1"), "Kafka")


async def _fails(process: SchedulerProcess, words: str) -> None:
    """The start ends in one sentence and exit code 1."""
    await process.start()
    code, told = await process.ended()
    assert code == 1, told
    sentences = [line for line in told.splitlines() if line.startswith("evenhand scheduler: ")]
    assert len(sentences) == 1, told
    assert words in sentences[0]
    assert "Traceback" not in told
