"""One request from acquire to settlement, whatever happens in between, over both transports."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.client.fake_scheduler import SALT, FakeScheduler

from evenhand.client import (
    AsyncClient,
    ClientClosed,
    ClientError,
    InvalidRequest,
    Outcome,
    TicketState,
    WorkerLost,
    held,
    openai_kwargs,
)
from evenhand.core.block_key import block_keys, pack_keys, root_hash
from evenhand.wire.generated import scheduler_pb2 as pb

ASK: dict[str, Any] = {"prompt_tokens": 10, "max_output_tokens": 4}


async def test_a_completed_block_settles_what_was_recorded(fake: FakeScheduler, connect: Any) -> None:
    tokens = list(range(11))
    async with connect() as client:
        async with client.acquire(tokens=tokens, lora="fr", max_output_tokens=128, request_id="r1") as grant:
            assert grant.address == "127.0.0.1:8000"
            assert grant.base_url == "http://127.0.0.1:8000/v1"
            assert (grant.worker_id, grant.leg, grant.cache_salt) == ("w0", 1, SALT)
            assert grant.predicted_cached_tokens == 8
            assert grant.explanation.sentence == "It holds the prefix."
            assert openai_kwargs(grant)["extra_body"] == {"cache_salt": SALT}
            details = SimpleNamespace(cached_tokens=8)
            grant.record_usage(
                SimpleNamespace(prompt_tokens=11, completion_tokens=3, prompt_tokens_details=details)
            )
            grant.first_token()
        assert grant.settlement is not None
        assert grant.settlement.delivered
        assert grant.settlement.correction == -3.0
        assert grant.state is TicketState.CLOSED
    asked = fake.acquired[0]
    assert asked.block_keys == pack_keys(block_keys(tokens, 4, root_hash("m", "fr", SALT)))
    assert (asked.prompt_tokens, asked.max_output_tokens, asked.pool) == (11, 128, "llama")
    settled = fake.settled[0]
    assert settled.outcome == pb.OUTCOME_COMPLETED
    assert settled.usage == pb.Usage(prompt_tokens=11, cached_tokens=8, output_tokens=3)
    assert settled.ttft_ms > 0
    assert not fake.open
    assert not fake.queued


async def test_nothing_recorded_sends_no_usage(fake: FakeScheduler, connect: Any) -> None:
    async with connect() as client, client.acquire(**ASK):
        pass
    assert not fake.settled[0].HasField("usage")
    assert fake.resolved == 0, "a prompt without tokens needs no salt"


async def test_an_exception_settles_as_failed_and_passes_on_unchanged(fake: FakeScheduler, connect: Any) -> None:
    boom = ValueError("mine")
    async with connect() as client:
        with pytest.raises(ValueError, match="mine") as caught:  # noqa: PT012  # the block is what is tested
            async with client.acquire(**ASK) as grant:
                grant.record_usage(prompt_tokens=10, output_tokens=2)
                raise boom
    assert caught.value is boom
    assert fake.settled[0].outcome == pb.OUTCOME_FAILED
    assert fake.settled[0].usage.output_tokens == 2


async def test_an_exception_is_not_masked_by_a_settlement_that_fails(fake: FakeScheduler, connect: Any) -> None:
    async with connect(settle_wait_s=0.2, close_wait_s=0.3) as client:
        with pytest.raises(ValueError, match="mine"):  # noqa: PT012  # the block is what is tested
            async with client.acquire(**ASK):
                await fake.stop()
                raise ValueError("mine")


async def test_a_failed_worker_settles_as_lost_and_gives_the_request_up(fake: FakeScheduler, connect: Any) -> None:
    async with connect() as client:
        async with client.acquire(request_id="r1", **ASK) as grant:
            grant.worker_failed()
        await fake.until(lambda: fake.cancelled)
    assert fake.settled[0].outcome == pb.OUTCOME_WORKER_LOST
    assert fake.cancelled[0].request_id == "r1"
    assert not fake.queued


async def test_a_settlement_whose_answer_was_lost_counts(fake: FakeScheduler, connect: Any) -> None:
    async with connect() as client:
        async with client.acquire(**ASK) as grant:
            fake.lose_next_answer.add("settle")
        assert grant.settlement is not None
        assert grant.settlement.delivered
    assert len(fake.settled) == 1


async def test_an_expired_ticket_is_reported_in_the_settlement(fake: FakeScheduler, connect: Any) -> None:
    async with connect() as client:
        async with client.acquire(**ASK) as grant:
            fake.open.clear()
            fake.ended[grant.ticket] = "expired"
        assert grant.settlement is not None
        assert not grant.settlement.delivered
        assert grant.settlement.sentence == "The ticket is closed."


async def test_the_same_request_id_gets_the_same_ticket(fake: FakeScheduler, connect: Any) -> None:
    async with (
        connect() as client,
        client.acquire(request_id="r1", **ASK) as one,
        client.acquire(request_id="r1", **ASK) as two,
    ):
        assert one.ticket == two.ticket
    assert len(fake.settled) == 1


async def test_a_cancelled_block_leaves_another_of_the_same_id_alone(fake: FakeScheduler, connect: Any) -> None:
    fake.holding = True

    async def ask() -> str:
        async with client.acquire(request_id="r1", **ASK) as grant:
            ticket: str = grant.ticket
            return ticket

    async with connect() as client:
        one, two = asyncio.create_task(ask()), asyncio.create_task(ask())
        await fake.until(lambda: len(fake.acquired) == 2)
        one.cancel()
        await asyncio.gather(one, return_exceptions=True)
        fake.release()
        assert await two == "t-r1-1"
    assert not fake.cancelled
    assert not fake.open


async def test_closing_settles_what_is_open_and_fails_what_waits(fake: FakeScheduler, connect: Any) -> None:
    async with connect() as client:
        held = client.acquire(request_id="held", **ASK)
        await held.__aenter__()
        fake.holding = True

        async def wait() -> None:
            async with client.acquire(request_id="waits", **ASK):
                pass

        waiting = asyncio.create_task(wait())
        await fake.until(lambda: fake.queued)
        await client.close()
        with pytest.raises(ClientClosed):
            await waiting
        await held.__aexit__(None, None, None)
        with pytest.raises(ClientClosed):
            async with client.acquire(**ASK):
                pass
    assert [settle.outcome for settle in fake.settled] == [pb.OUTCOME_CANCELLED]
    assert not fake.open
    assert not fake.queued


async def test_an_acquisition_is_entered_once(connect: Any) -> None:
    async with connect() as client:
        acquisition = client.acquire(**ASK)
        async with acquisition:
            pass
        with pytest.raises(ClientError, match="once"):
            async with acquisition:
                pass


async def test_usage_so_far_is_told_with_the_renewals(fake: FakeScheduler, connect: Any) -> None:
    fake.renew_after_ms = 50
    async with connect() as client, client.acquire(**ASK) as grant:
        grant.record_usage(prompt_tokens=10, output_tokens=1)
        await fake.until(lambda: any(renew.usage.output_tokens == 1 for renew in fake.renewed))
        grant.record_usage(output_tokens=2)
        await fake.until(lambda: any(renew.usage.output_tokens == 2 for renew in fake.renewed))
    assert fake.settled[0].usage == pb.Usage(prompt_tokens=10, output_tokens=2)


async def test_the_first_token_is_told_at_once_and_once(fake: FakeScheduler, connect: Any) -> None:
    async with connect() as client, client.acquire(**ASK) as grant:
        grant.first_token()
        await fake.until(lambda: fake.renewed)
        grant.first_token()
        await asyncio.sleep(0)
    assert [renew.usage for renew in fake.renewed] == [pb.Usage(output_tokens=1)]
    assert not fake.settled[0].HasField("usage"), "nothing was recorded"


async def test_usage_that_grew_by_what_matters_is_told_between_renewals(
    fake: FakeScheduler, connect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held, "USAGE_LOOK_S", 0.02)
    fake.charged_cost = 1_000.0
    async with connect() as client, client.acquire(**ASK) as grant:
        grant.record_usage(prompt_tokens=10, output_tokens=50)
        await asyncio.sleep(0.1)
        assert not fake.renewed, "a growth of a twentieth of the charge is no news"
        grant.record_usage(output_tokens=51)
        await fake.until(lambda: fake.renewed)
        grant.record_usage(output_tokens=101)
        await asyncio.sleep(0.1)
    assert [renew.usage.output_tokens for renew in fake.renewed] == [51]


async def test_many_requests_at_once_keep_apart(fake: FakeScheduler, connect: Any) -> None:
    async def one(client: AsyncClient, number: int) -> None:
        async with client.acquire(request_id=f"r{number}", **ASK) as grant:
            assert grant.request_id == f"r{number}"
            await asyncio.sleep(0)
            grant.record_usage(prompt_tokens=10, output_tokens=number)

    async with connect() as client:
        await asyncio.gather(*(one(client, number) for number in range(100)))
    assert {settle.ticket: settle.usage.output_tokens for settle in fake.settled} == {
        f"t-r{number}-1": number for number in range(100)
    }


class TestSaltAndKeys:
    async def test_the_pool_is_resolved_once(self, fake: FakeScheduler, connect: Any) -> None:
        async with connect() as client:
            for _ in range(3):
                async with client.acquire(tokens=[1] * 8, max_output_tokens=1):
                    pass
        assert fake.resolved == 1

    async def test_another_generation_resolves_again(self, fake: FakeScheduler, connect: Any) -> None:
        async with connect() as client:
            for generation in (1, 2, 2):
                fake.salt_generation = generation
                async with client.acquire(tokens=[1] * 8, max_output_tokens=1):
                    pass
        assert fake.resolved == 2

    async def test_an_invalid_request_resolves_again(self, fake: FakeScheduler, connect: Any) -> None:
        from evenhand.wire.status import wire_error

        async with connect() as client:
            async with client.acquire(tokens=[1] * 8, max_output_tokens=1):
                pass
            fake.fail("acquire", wire_error("INVALID_REQUEST", "The keys do not fit."))
            with pytest.raises(InvalidRequest, match="do not fit"):
                async with client.acquire(tokens=[1] * 8, max_output_tokens=1):
                    pass
            async with client.acquire(tokens=[1] * 8, max_output_tokens=1):
                pass
        assert fake.resolved == 2

    async def test_a_key_scheme_this_build_does_not_know(self, fake: FakeScheduler, connect: Any) -> None:
        fake.key_scheme = "other.v9"
        async with connect() as client:
            with pytest.raises(ClientError, match=r"other\.v9"):
                async with client.acquire(tokens=[1] * 8, max_output_tokens=1):
                    pass

    async def test_a_gateway_resolves_for_each_tenant(self, fake: FakeScheduler, connect: Any) -> None:
        async with connect(tenant="a") as client:
            for tenant in (None, "a", "b"):
                async with client.acquire(tokens=[1] * 8, max_output_tokens=1, tenant=tenant):
                    pass
        assert fake.resolved == 2
        assert [ask.tenant for ask in fake.acquired] == ["a", "a", "b"]

    async def test_a_pool_view_shows_no_salt(self, connect: Any) -> None:
        async with connect() as client:
            view = await client.resolve()
        assert view.cache_salt == SALT
        assert SALT not in repr(view)


class TestBadInput:
    @pytest.mark.parametrize(
        ("ask", "sentence"),
        [
            ({}, "needs tokens"),
            ({"tokens": [], "max_output_tokens": 1}, "empty"),
            ({"prompt_tokens": -1}, "prompt_tokens must be"),
            ({"block_keys": [1]}, "needs tokens"),
            ({"block_keys": [1], "tokens": [1]}, "not both"),
            ({"block_keys": [-1], "prompt_tokens": 4}, "Block keys must be"),
            ({"block_keys": b"123", "prompt_tokens": 4}, "multiple of 8"),
            ({"tokens": [1, 2], "prompt_tokens": 3}, "2 tokens"),
            ({"prompt_tokens": 4, "max_output_tokens": 0}, "max_output_tokens must be"),
            ({"prompt_tokens": 4, "expected_output_tokens": -2}, "expected_output_tokens must be"),
            ({"prompt_tokens": 4, "timeout": 0.0}, "timeout must be"),
            ({"prompt_tokens": 4, "timeout": -1}, "timeout must be"),
            ({"prompt_tokens": 4, "timeout": float("inf")}, "timeout must be"),
            ({"prompt_tokens": 4, "timeout": float("nan")}, "timeout must be"),
            ({"prompt_tokens": 4, "request_id": ""}, "request id"),
        ],
    )
    async def test_is_refused_at_once(self, ask: dict[str, Any], sentence: str) -> None:
        async with AsyncClient("127.0.0.1:1", pool="llama") as client:
            with pytest.raises(InvalidRequest, match=sentence):
                client.acquire(**{"max_output_tokens": 1, **ask})

    async def test_a_token_id_outside_the_wire(self, fake: FakeScheduler, connect: Any) -> None:
        async with connect() as client:
            with pytest.raises(InvalidRequest, match="Token ids"):
                async with client.acquire(tokens=[-1] * 4, max_output_tokens=1):
                    pass
        assert not fake.acquired


class TestRun:
    async def test_a_lost_worker_is_followed_by_another_leg(self, fake: FakeScheduler, connect: Any) -> None:
        seen = []

        async def call(grant: Any) -> str:
            seen.append((grant.worker_id, grant.leg))
            if grant.worker_id == "w0":
                raise ConnectionResetError("gone")
            grant.record_usage(prompt_tokens=10, output_tokens=1)
            return "text"

        async with connect() as client:
            assert await client.run(call, **ASK) == "text"
        assert seen == [("w0", 1), ("w1", 2)]
        assert [settle.outcome for settle in fake.settled] == [pb.OUTCOME_WORKER_LOST, pb.OUTCOME_COMPLETED]
        assert len({ask.request_id for ask in fake.acquired}) == 1
        assert not fake.cancelled

    async def test_legs_are_bounded_and_the_request_is_given_up(self, fake: FakeScheduler, connect: Any) -> None:
        async def call(grant: Any) -> None:
            raise WorkerLost("It does not answer.")

        async with connect() as client:
            with pytest.raises(WorkerLost):
                await client.run(call, legs_max=2, **ASK)
            await fake.until(lambda: fake.cancelled)
        assert len(fake.acquired) == 2
        assert not fake.queued

    async def test_another_error_is_not_tried_again(self, fake: FakeScheduler, connect: Any) -> None:
        async def call(grant: Any) -> None:
            raise ValueError("500")

        async with connect() as client:
            with pytest.raises(ValueError, match="500"):
                await client.run(call, **ASK)
        assert len(fake.acquired) == 1
        assert fake.settled[0].outcome == pb.OUTCOME_FAILED

    async def test_a_loss_only_the_scheduler_knows_of(self, fake: FakeScheduler, connect: Any) -> None:
        fake.renew_after_ms = 50  # unary learns of it from a renewal
        cancelled = asyncio.Event()

        async def call(grant: Any) -> int:
            if grant.leg == 1:
                fake.lose_worker(grant.ticket)
                try:
                    await asyncio.sleep(60)
                finally:
                    cancelled.set()
            return int(grant.leg)

        async with connect() as client:
            assert await client.run(call, **ASK) == 2
        assert cancelled.is_set()
        assert len(fake.settled) == 1
        assert not fake.queued

    async def test_a_cancel_while_a_lost_leg_is_settled_leaves_nothing(
        self, fake: FakeScheduler, connect: Any
    ) -> None:
        gate = fake.gates["settle"] = asyncio.Event()

        async def call(grant: Any) -> None:
            raise ConnectionResetError("gone")

        async with connect() as client:
            running = asyncio.create_task(client.run(call, **ASK))
            await fake.until(lambda: fake.settled)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            gate.set()
            await fake.until(lambda: fake.cancelled)
        assert len(fake.acquired) == 1
        assert not fake.queued

    async def test_a_cancel_between_legs_leaves_nothing(self, fake: FakeScheduler, connect: Any) -> None:
        async def call(grant: Any) -> None:
            fake.holding = True
            raise ConnectionResetError("gone")

        async with connect() as client:
            running = asyncio.create_task(client.run(call, **ASK))
            await fake.until(lambda: len(fake.acquired) == 2)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            await fake.until(lambda: fake.cancelled)
        assert not fake.queued
        assert not fake.open


async def test_a_lost_worker_shows_on_the_grant_and_ends_the_request(fake: FakeScheduler, connect: Any) -> None:
    fake.renew_after_ms = 50
    async with connect() as client:
        async with client.acquire(**ASK) as grant:
            fake.lose_worker(grant.ticket)
            assert await grant.wait_ended() is TicketState.WORKER_LOST
        assert grant.settlement is not None
        assert grant.settlement.outcome is Outcome.WORKER_LOST
        await fake.until(lambda: fake.cancelled)
    assert not fake.settled
    assert not fake.queued
