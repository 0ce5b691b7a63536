"""A scheduler that is away, slow, elsewhere or somebody else: survived within the deadline, or reported."""

import asyncio
import socket
import ssl
import subprocess
import time
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import status_pb2
from tests.unit.client.conftest import QUICK
from tests.unit.client.fake_scheduler import FakeScheduler

from evenhand.client import (
    AsyncClient,
    DeadlineExceeded,
    InvalidConfig,
    NotTheOwner,
    NoWorker,
    QueueFull,
    RetryPolicy,
    SchedulerUnreachable,
    TicketState,
    Unauthenticated,
    UnexpectedAnswer,
)
from evenhand.wire.generated import scheduler_pb2 as pb
from evenhand.wire.status import wire_error

ASK: dict[str, Any] = {"prompt_tokens": 10, "max_output_tokens": 4}
ONCE = RetryPolicy(attempts_max=1)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class TestLostConnection:
    async def test_a_waiting_request_is_asked_for_again_under_its_id(self, fake: FakeScheduler) -> None:
        fake.holding = True
        async with AsyncClient(fake.address, pool="llama", retry=QUICK) as client:

            async def ask() -> str:
                async with client.acquire(request_id="r1", **ASK) as grant:
                    return grant.request_id

            asking = asyncio.create_task(ask())
            await fake.until(lambda: fake.queued)
            fake.drop_streams()
            await fake.until(lambda: len(fake.acquired) == 2)
            fake.release()
            assert await asking == "r1"
        assert fake.streams_opened == 2
        assert not fake.open

    async def test_open_tickets_are_renewed_over_the_next_stream(self, fake: FakeScheduler) -> None:
        def renewed(times: int) -> bool:
            return len(fake.renewed) == times and bool(fake.streams)

        client = AsyncClient(fake.address, pool="llama", retry=QUICK)
        async with client, client.acquire(request_id="r1", **ASK) as grant:
            for opened in (2, 3):
                fake.drop_streams()
                await fake.until(partial(renewed, opened - 1))
                assert fake.streams_opened == opened
            assert {renew.ticket for renew in fake.renewed} == {grant.ticket}
            assert grant.state is TicketState.OPEN
            fake.lose_worker(grant.ticket)
            assert await grant.wait_ended() is TicketState.WORKER_LOST

    async def test_a_ticket_forgotten_by_a_restarted_scheduler_is_reported(self, fake: FakeScheduler) -> None:
        async with AsyncClient(fake.address, pool="llama", retry=QUICK) as client:
            async with client.acquire(**ASK) as grant:
                port = fake.port
                await fake.stop()
                other = FakeScheduler()
                await other.start(port=port)
                assert await grant.wait_ended() is TicketState.CLOSED
                assert grant.end_sentence == "No such ticket."
            assert grant.settlement is not None
            assert not grant.settlement.delivered
        await other.stop()

    async def test_a_scheduler_that_starts_late_is_waited_for(self, mode: str) -> None:
        late, port = FakeScheduler(), free_port()
        async with AsyncClient(f"127.0.0.1:{port}", pool="llama", mode=mode, retry=QUICK) as client:  # type: ignore[arg-type]

            async def ask() -> str:
                async with client.acquire(**ASK) as grant:
                    return grant.worker_id

            asking = asyncio.create_task(ask())
            await asyncio.sleep(0.1)
            await late.start(port=port)
            assert await asking == "w0"
        await late.stop()

    async def test_a_ticket_not_renewed_in_time_is_reported(self, fake: FakeScheduler, connect: Any) -> None:
        fake.ttl_ms, fake.renew_after_ms = 900, 50
        async with connect(settle_wait_s=0.1, close_wait_s=0.1) as client, client.acquire(**ASK) as grant:
            await fake.stop()
            assert await asyncio.wait_for(grant.wait_ended(), 5) is TicketState.CLOSED
            assert "could not be renewed" in grant.end_sentence

    async def test_one_failed_renewal_is_not_the_end(self, fake: FakeScheduler, connect: Any) -> None:
        fake.renew_after_ms = 50
        fake.fail("renew", wire_error("NOT_THE_OWNER", "Not the owner."))
        async with connect(mode="unary", retry=ONCE) as client, client.acquire(**ASK) as grant:
            await fake.until(lambda: fake.renewed)
            assert grant.state is TicketState.OPEN

    async def test_a_silent_stream_is_noticed(self, fake: FakeScheduler) -> None:
        client = AsyncClient(fake.address, pool="llama", retry=QUICK, heartbeat_s=0.1)
        async with client, client.acquire(**ASK) as grant:
            fake.mute = True
            await fake.until(lambda: fake.streams_opened == 2)
            fake.mute = False
            fake.drop_streams()
            await fake.until(lambda: fake.renewed)
            assert grant.state is TicketState.OPEN

    async def test_an_idle_stream_is_left_alone(self, fake: FakeScheduler) -> None:
        async with AsyncClient(fake.address, pool="llama", heartbeat_s=0.02) as client:
            async with client.acquire(**ASK):
                pass
            await asyncio.sleep(0.15)
        assert fake.resolved == 0


class TestRefusedAndSlow:
    async def test_a_refused_connection_is_a_typed_error(self, mode: str) -> None:
        address = f"127.0.0.1:{free_port()}"
        async with AsyncClient(address, pool="llama", mode=mode, retry=ONCE) as client:  # type: ignore[arg-type]
            with pytest.raises(SchedulerUnreachable, match=address) as caught:
                async with client.acquire(**ASK):
                    pass
        assert isinstance(caught.value.__cause__, grpc.aio.AioRpcError)

    async def test_the_deadline_ends_the_retries(self, mode: str) -> None:
        address = f"127.0.0.1:{free_port()}"
        async with AsyncClient(address, pool="llama", mode=mode, close_wait_s=0.1) as client:  # type: ignore[arg-type]
            started = time.monotonic()
            with pytest.raises(SchedulerUnreachable):
                async with client.acquire(timeout=0.5, **ASK):
                    pass
            assert time.monotonic() - started < 1.5

    async def test_a_mute_scheduler_ends_at_the_deadline(self, fake: FakeScheduler, connect: Any) -> None:
        fake.mute = True
        async with connect(close_wait_s=0.1) as client:
            with pytest.raises(DeadlineExceeded) as caught:
                async with client.acquire(timeout=0.2, **ASK):
                    pass
            assert isinstance(caught.value, TimeoutError)
            with pytest.raises(DeadlineExceeded):
                await client.resolve(timeout=0.1)

    async def test_the_scheduler_learns_the_deadline_and_keeps_it(self, fake: FakeScheduler) -> None:
        fake.holding = True
        async with AsyncClient(fake.address, pool="llama", retry=QUICK) as client:
            with pytest.raises(DeadlineExceeded) as caught:
                async with client.acquire(timeout=0.3, **ASK):
                    pass
        assert caught.value.reason == "DEADLINE_PASSED"
        assert 100 < fake.acquired[0].timeout_ms <= 300
        assert not fake.queued
        assert not fake.cancelled, "a request the scheduler has refused holds nothing"

    async def test_leaving_a_block_is_bounded_while_the_scheduler_is_mute(
        self, fake: FakeScheduler, connect: Any
    ) -> None:
        started = 0.0
        async with connect(settle_wait_s=0.2, close_wait_s=0.2) as client:
            async with client.acquire(**ASK) as grant:
                fake.mute = True
                started = time.monotonic()
            assert time.monotonic() - started < 1.0
            assert grant.settlement is None
        assert time.monotonic() - started < 1.5


class TestRetries:
    async def test_the_owner_is_found_among_several_addresses(self, fake: FakeScheduler, connect: Any) -> None:
        standby = FakeScheduler()
        await standby.start()
        standby.fail("acquire", *(wire_error("NOT_THE_OWNER", "Not the owner.", 5_000) for _ in range(9)))
        nobody = f"127.0.0.1:{free_port()}"
        async with connect(address=f"{nobody},{standby.address} , {fake.address}") as client:
            async with client.acquire(timeout=3, **ASK):
                pass
            async with client.acquire(timeout=3, **ASK):
                pass
        assert len(fake.settled) == 2
        assert len(standby.errors["acquire"]) == 8, "the address that worked is kept"
        await standby.stop()

    async def test_no_worker_is_tried_again_after_the_pause(self, fake: FakeScheduler, connect: Any) -> None:
        fake.fail("acquire", wire_error("NO_WORKER_IN_POOL", "No worker.", 200))
        started = time.monotonic()
        async with connect() as client, client.acquire(**ASK):
            assert time.monotonic() - started >= 0.2

    async def test_tries_are_bounded(self, fake: FakeScheduler, connect: Any) -> None:
        fake.fail("acquire", *(wire_error("NOT_THE_OWNER", "Not the owner.") for _ in range(9)))
        policy = RetryPolicy(attempts_max=3, backoff_ms_base=1, backoff_ms_max=2)
        async with connect(retry=policy) as client:
            with pytest.raises(NotTheOwner) as caught:
                async with client.acquire(**ASK):
                    pass
        assert caught.value.attempt == 3
        assert len(fake.errors["acquire"]) == 6

    async def test_a_pause_beyond_the_deadline_is_not_begun(self, fake: FakeScheduler, connect: Any) -> None:
        fake.fail("acquire", wire_error("NO_WORKER_IN_POOL", "No worker.", 60_000))
        async with connect() as client:
            with pytest.raises(NoWorker) as caught:
                async with client.acquire(timeout=5, **ASK):
                    pass
        assert caught.value.retry_after_s == 60

    async def test_a_full_queue_is_the_callers_to_handle(self, fake: FakeScheduler, connect: Any) -> None:
        fake.fail("acquire", wire_error("TENANT_QUEUE_FULL", "The queue is full.", 1_500, "acme"))
        async with connect() as client:
            with pytest.raises(QueueFull, match=r"The queue is full\.") as caught:
                async with client.acquire(**ASK):
                    pass
        assert (caught.value.retry_after_s, caught.value.answer.quota_subject) == (1.5, "acme")
        assert not fake.cancelled

    async def test_a_settlement_survives_a_change_of_owner(self, fake: FakeScheduler, connect: Any) -> None:
        async with connect() as client:
            async with client.acquire(**ASK) as grant:
                fake.fail("settle", *(wire_error("NOT_THE_OWNER", "Not the owner.", 10) for _ in range(3)))
            assert grant.settlement is not None
            assert grant.settlement.delivered

    async def test_an_error_outside_the_contract(self, fake: FakeScheduler, connect: Any) -> None:
        fake.fail("acquire", status_pb2.Status(code=2, message="Traceback"))
        async with connect() as client:
            with pytest.raises(UnexpectedAnswer, match="UNKNOWN: Traceback"):
                async with client.acquire(**ASK):
                    pass


class TestCredentials:
    async def test_a_wrong_key(self, fake: FakeScheduler, connect: Any) -> None:
        fake.required_key = "right"
        async with connect(api_key="wrong") as client:
            with pytest.raises(Unauthenticated, match="unknown") as caught:
                async with client.acquire(**ASK):
                    pass
            assert caught.value.reason == "CREDENTIAL_UNKNOWN"
        async with connect(api_key="right") as client, client.acquire(**ASK):
            pass

    async def test_the_key_stands_in_no_repr(self) -> None:
        async with AsyncClient("127.0.0.1:1", pool="llama", api_key="s3cret") as client:
            assert "s3cret" not in repr(client._settings)

    async def test_tls_with_a_ca_file(self, tmp_path: Path, mode: str) -> None:
        key, certificate = self_signed(tmp_path)
        fake = FakeScheduler()
        await fake.start(grpc.ssl_server_credentials([(key.read_bytes(), certificate.read_bytes())]))
        address = f"localhost:{fake.port}"
        secured: dict[str, Any] = {"pool": "llama", "mode": mode, "api_key": "k"}
        async with AsyncClient(address, ca_file=certificate, **secured) as client, client.acquire(**ASK):
            pass
        assert len(fake.settled) == 1
        (tmp_path / "other").mkdir()
        _, other = self_signed(tmp_path / "other")
        async with AsyncClient(address, ca_file=other, retry=ONCE, **secured) as client:
            with pytest.raises(SchedulerUnreachable):
                async with client.acquire(**ASK):
                    pass
        async with AsyncClient(address, tls=False, retry=ONCE, **secured) as client:
            with pytest.raises(SchedulerUnreachable):
                async with client.acquire(**ASK):
                    pass
        await fake.stop()


def self_signed(folder: Path) -> tuple[Path, Path]:
    """A key and a certificate of its own for localhost."""
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    options = "-x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    names = "subjectAltName=DNS:localhost,IP:127.0.0.1"
    subprocess.run(
        ["openssl", "req", *options.split(), "-addext", names, "-keyout", key, "-out", certificate],
        check=True,
        capture_output=True,
    )
    ssl.create_default_context(cafile=str(certificate))
    return key, certificate


class TestSettings:
    @pytest.fixture(autouse=True)
    def _no_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("EVENHAND_ADDRESS", "EVENHAND_API_KEY", "EVENHAND_CA_FILE", "EVENHAND_TENANT"):
            monkeypatch.delenv(name, raising=False)

    @pytest.mark.parametrize(
        ("given", "sentence"),
        [
            ({"address": ""}, "address is empty"),
            ({"address": "nowhere"}, "host:port, not 'nowhere'"),
            ({"address": "http://h:1"}, "host:port"),
            ({"address": "h:99999"}, "host:port"),
            ({"pool": ""}, "pool's name is empty"),
            ({"mode": "carrier pigeon"}, "session or unary"),
            ({"ca_file": "/no/such/file"}, "/no/such/file cannot be read"),
            ({"ca_file": __file__}, "no PEM certificate"),
            ({"api_key": "naïve"}, "printable ASCII"),
            ({"api_key": "two\nlines"}, "printable ASCII"),
            ({"settle_wait_s": 0}, "settle_wait_s must be"),
            ({"heartbeat_s": float("nan")}, "heartbeat_s must be"),
        ],
    )
    async def test_an_impossible_setting_is_named(self, given: dict[str, Any], sentence: str) -> None:
        with pytest.raises(InvalidConfig, match=sentence):
            AsyncClient(**{"pool": "llama", **given})

    def test_an_impossible_retry_policy_is_named(self) -> None:
        with pytest.raises(InvalidConfig, match="attempts_max"):
            RetryPolicy(attempts_max=0)
        with pytest.raises(InvalidConfig, match="backoff_ms_base"):
            RetryPolicy(backoff_ms_base=10, backoff_ms_max=5)

    async def test_the_environment_fills_in(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        _, certificate = self_signed(tmp_path)
        monkeypatch.setenv("EVENHAND_ADDRESS", "a:1,b:2,a:1")
        monkeypatch.setenv("EVENHAND_API_KEY", "k")
        monkeypatch.setenv("EVENHAND_TENANT", "acme")
        monkeypatch.setenv("EVENHAND_CA_FILE", str(certificate))
        async with AsyncClient(pool="llama") as client:
            made = client._settings
        assert made.addresses == ("a:1", "b:2")
        assert made.metadata() == (("authorization", "Bearer k"),)
        assert made.tenant == "acme"
        assert made.tls
        assert made.root_certificates == certificate.read_bytes()

    @pytest.mark.parametrize(
        ("address", "tls", "secure"),
        [
            ("127.0.0.1:7077", None, False),
            ("localhost:7077", None, False),
            ("[::1]:7077", None, False),
            ("unix:/tmp/evenhand.sock", None, False),
            ("scheduler:7077", None, True),
            ("10.0.0.1:7077,127.0.0.1:7077", None, True),
            ("scheduler:7077", False, False),
            ("127.0.0.1:7077", True, True),
        ],
    )
    async def test_tls_is_the_default_beyond_this_machine(
        self, address: str, tls: bool | None, secure: bool
    ) -> None:
        async with AsyncClient(address, pool="llama", tls=tls) as client:
            assert client._settings.tls is secure


async def test_the_unasked_end_of_an_unknown_ticket_changes_nothing(fake: FakeScheduler) -> None:
    async with AsyncClient(fake.address, pool="llama") as client, client.acquire(**ASK) as grant:
        stream = next(iter(fake.streams))
        fake.streams[stream].put_nowait(pb.SessionResponse(ticket_ended=pb.TicketEnded(ticket="another")))
        fake.streams[stream].put_nowait(pb.SessionResponse(call_id=999_999))
        await client.resolve()
        assert grant.state is TicketState.OPEN
