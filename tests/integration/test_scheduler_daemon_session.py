"""The Session stream: many calls at once, tickets kept alive, what happens when it breaks."""

import asyncio
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from tests.fixtures.scheduler_daemon import (
    USED,
    WAIT_S,
    Client,
    World,
    acquire_request,
    announced,
    connected,
    eventually,
    load,
    wall_ms,
)

from evenhand.client import AsyncClient, PermissionDenied
from evenhand.core.ids import TenantId
from evenhand.core.kv import WorkerLeft
from evenhand.ports import Principal
from evenhand.scheduler.daemon import SchedulerDaemon
from evenhand.wire.generated import scheduler_pb2 as pb
from evenhand.wire.status import Code, decode_status

SLOTS = 2


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path).populated(("a", "b"), ("w1",), SLOTS)


def acquire(call_id: int, request_id: str, **fields: object) -> pb.SessionRequest:
    return pb.SessionRequest(call_id=call_id, acquire=acquire_request(request_id, (), **fields))


def settle(call_id: int, ticket: str) -> pb.SessionRequest:
    return pb.SessionRequest(call_id=call_id, settle=pb.SettleRequest(ticket=ticket, usage=USED))


async def read(
    session: "grpc.aio.StreamStreamCall[pb.SessionRequest, pb.SessionResponse]",
) -> pb.SessionResponse:
    message = await asyncio.wait_for(session.read(), WAIT_S)
    assert isinstance(message, pb.SessionResponse), "the stream ended"
    return message


def pool(daemon: SchedulerDaemon) -> dict[str, int]:
    return daemon.status()["pool"]  # type: ignore[return-value]


async def test_calls_are_read_in_order_and_answered_as_they_come(daemon: SchedulerDaemon, client: Client) -> None:
    session = client.session()
    for number in range(1, SLOTS + 2):
        await session.write(acquire(number, f"r{number}"))
    granted = {answer.call_id: answer.acquire for answer in [await read(session) for _ in range(SLOTS)]}
    assert sorted(granted) == [1, 2]
    await session.write(pb.SessionRequest(call_id=90, resolve=pb.ResolveRequest(tenant="a")))
    assert (await read(session)).resolve.block_size_tokens == 16
    await session.write(pb.SessionRequest(call_id=91, renew=pb.RenewRequest(ticket=granted[1].ticket)))
    assert (await read(session)).renew.state == pb.TICKET_STATE_OPEN
    await session.write(settle(92, granted[2].ticket))
    answers = {answer.call_id: answer for answer in (await read(session), await read(session))}
    assert answers[92].settle.attained_cost == 3
    assert answers[SLOTS + 1].acquire.request_id == "r3"
    await session.write(pb.SessionRequest(call_id=93, cancel=pb.CancelRequest(tenant="a", request_id="r3")))
    assert (await read(session)).cancel.was_open
    session.cancel()


@pytest.mark.parametrize("together", [False, True])
async def test_answers_ready_at_once_travel_together_where_the_client_takes_them(
    world: World, daemon: SchedulerDaemon, client: Client, together: bool
) -> None:
    session = client.session()
    for number in range(1, SLOTS + 1):
        await session.write(acquire(number, f"r{number}"))
        await read(session)
    count = 100
    for number in range(1, count + 1):
        message = acquire(number, f"q{number}", tenant="b")
        message.answers_together = together
        await session.write(message)
    await eventually(lambda: pool(daemon)["queued_total"] == count)
    world.directory.remove_tenant(TenantId("b"))  # all of them are refused in one step
    answers: list[pb.SessionResponse] = []
    messages = 0
    while len(answers) < count:
        answer = await read(session)
        messages += 1
        answers += [answer, *answer.more]
    assert sorted(answer.call_id for answer in answers) == list(range(1, count + 1))
    assert {decode_status(answer.error).reason for answer in answers} == {"UNKNOWN_TENANT"}
    assert messages == (2 if together else count)
    session.cancel()


async def test_errors_come_as_status_and_the_stream_goes_on(client: Client) -> None:
    session = client.session()
    await session.write(settle(1, "nonsense"))
    await session.write(acquire(2, ""))
    await session.write(pb.SessionRequest(call_id=3))
    await session.write(acquire(4, "r1", tenant="nobody"))
    reasons = [decode_status((await read(session)).error).reason for _ in range(4)]
    assert reasons == ["UNKNOWN_TICKET", "INVALID_REQUEST", "INVALID_REQUEST", "UNKNOWN_TENANT"]
    await session.write(acquire(5, "r1"))
    assert (await read(session)).acquire.ticket
    session.cancel()


async def test_a_deadline_in_the_queue(daemon: SchedulerDaemon, client: Client) -> None:
    session = client.session()
    for number in range(1, SLOTS + 1):
        await session.write(acquire(number, f"r{number}"))
        await read(session)
    await session.write(acquire(9, "late", timeout_ms=30))
    answer = await read(session)
    error = decode_status(answer.error)
    assert (answer.call_id, error.reason, error.code) == (9, "DEADLINE_PASSED", Code.DEADLINE_EXCEEDED)
    assert pool(daemon)["queued_total"] == 0
    session.cancel()


async def test_tickets_live_as_long_as_their_stream(world: World) -> None:
    core = replace(world.config().core, ticket_ttl_ms=150)
    async with world.daemon(world.config(core)) as daemon, connected(daemon) as client:
        session = client.session()
        await session.write(acquire(1, "r1"))
        held = (await read(session)).acquire
        loose = await client.acquire("r2")
        await eventually(lambda: loose.ticket not in daemon.actor.by_token)
        for _ in range(3):  # the loose one's time several times over
            again = await client.acquire("r2")
            await eventually(lambda again=again: again.ticket not in daemon.actor.by_token)  # type: ignore[misc]
        assert held.ticket in daemon.actor.by_token
        session.cancel()
        await eventually(lambda: held.ticket not in daemon.actor.by_token)
        assert pool(daemon)["tickets_open"] == 0


async def test_a_break_withdraws_what_waits_and_keeps_what_was_told(
    daemon: SchedulerDaemon, client: Client
) -> None:
    session = client.session()
    await session.write(acquire(1, "r1"))
    first = (await read(session)).acquire
    for number in range(2, 8):
        await session.write(acquire(number, f"r{number}"))
    await eventually(lambda: pool(daemon)["queued_total"] == 7 - SLOTS)
    session.cancel()
    await eventually(lambda: pool(daemon)["queued_total"] == 0)
    assert not daemon.actor._waiting

    resumed = client.session()
    await resumed.write(acquire(1, "r1"))
    assert (await read(resumed)).acquire.ticket == first.ticket
    await resumed.write(settle(2, first.ticket))
    assert (await read(resumed)).settle.attained_cost == 3
    resumed.cancel()


async def test_a_broken_connection_is_a_break(daemon: SchedulerDaemon) -> None:
    async with connected(daemon) as client:
        session = client.session()
        for number in range(1, 8):
            await session.write(acquire(number, f"r{number}"))
        await eventually(lambda: pool(daemon)["queued_total"] == 7 - SLOTS)
    await eventually(lambda: pool(daemon)["queued_total"] == 0)


async def test_a_client_that_has_said_all_still_gets_its_answers(daemon: SchedulerDaemon, client: Client) -> None:
    session = client.session()
    for number in range(1, SLOTS + 2):
        await session.write(acquire(number, f"r{number}"))
    granted = [(await read(session)).acquire for _ in range(SLOTS)]
    await session.done_writing()
    await client.settle(granted[0].ticket, USED)
    assert (await read(session)).acquire.request_id == f"r{SLOTS + 1}"
    assert await asyncio.wait_for(session.read(), WAIT_S) is grpc.aio.EOF  # type: ignore[attr-defined]
    assert await session.code() is grpc.StatusCode.OK


async def test_a_lost_worker_is_told_unasked(world: World, daemon: SchedulerDaemon, client: Client) -> None:
    world.say(announced("w2", slots=SLOTS))
    world.say(load("w2"))
    await eventually(lambda: "w2" in daemon.live_map.workers)
    session = client.session()
    await session.write(acquire(1, "r1"))
    first = (await read(session)).acquire
    gone = announced(first.worker.worker_id)
    world.say(WorkerLeft(gone.worker_id, gone.epoch))
    told = await read(session)
    assert told.call_id == 0
    assert told.ticket_ended.ticket == first.ticket
    assert told.ticket_ended.state == pb.TICKET_STATE_WORKER_LOST
    await session.write(acquire(2, "r1"))
    second = (await read(session)).acquire
    assert (second.leg, second.worker.worker_id == first.worker.worker_id) == (2, False)
    session.cancel()


async def test_a_ticket_taken_up_by_another_stream_is_its(world: World) -> None:
    core = replace(world.config().core, ticket_ttl_ms=300)
    async with world.daemon(world.config(core)) as daemon, connected(daemon) as client:
        first, second = client.session(), client.session()
        await first.write(acquire(1, "r1"))
        ticket = (await read(first)).acquire.ticket
        await second.write(pb.SessionRequest(call_id=1, renew=pb.RenewRequest(ticket=ticket)))
        assert (await read(second)).renew.state == pb.TICKET_STATE_OPEN
        await asyncio.sleep(0.15)  # the first stream's renewals come and go
        assert daemon.actor.by_token[ticket].listener is not None
        second.cancel()
        await eventually(lambda: ticket not in daemon.actor.by_token)
        first.cancel()


async def test_more_than_a_session_may_wait_for_is_refused_and_settles_are_still_read(world: World) -> None:
    config = world.config(session_calls_max=3)
    async with world.daemon(config) as daemon, connected(daemon) as client:
        session = client.session()
        tickets = []
        for number in range(1, SLOTS + 1):
            await session.write(acquire(number, f"r{number}"))
            tickets.append((await read(session)).acquire.ticket)
        for number in range(10, 14):
            await session.write(acquire(number, f"r{number}"))
        refused = await read(session)
        assert refused.call_id == 13
        error = decode_status(refused.error)
        assert (error.reason, error.quota_subject) == ("TENANT_QUEUE_FULL", "session")
        await session.write(settle(20, tickets[0]))
        answers = {answer.call_id for answer in (await read(session), await read(session))}
        assert answers == {20, 10}
        session.cancel()
        await eventually(lambda: pool(daemon)["queued_total"] == 0)


async def test_a_revoked_key_ends_the_stream(world: World) -> None:
    world.add_key("key-a", Principal("app", "service", (TenantId("a"),)))
    async with world.daemon(world.config(insecure_loopback=False)) as daemon, connected(daemon, "key-a") as client:
        session = client.session()
        await session.write(acquire(1, "r1"))
        assert (await read(session)).acquire.ticket
        before = daemon.watch.revision
        world.revoke_key("key-a")
        await eventually(lambda: daemon.watch.revision != before)
        await session.write(acquire(2, "r2"))
        assert await session.code() is grpc.StatusCode.UNAUTHENTICATED
        assert pool(daemon)["queued_total"] == 0


async def test_a_key_that_expires_ends_the_stream(world: World) -> None:
    expires_at_ms = wall_ms() + 400
    world.add_key("key-a", Principal("app", "service", (TenantId("a"),), expires_at_ms=expires_at_ms))
    async with world.daemon(world.config(insecure_loopback=False)) as daemon, connected(daemon, "key-a") as client:
        session = client.session()
        await session.write(acquire(1, "r1"))
        assert (await read(session)).acquire.ticket
        await eventually(lambda: wall_ms() > expires_at_ms)
        await session.write(acquire(2, "r2"))
        assert await session.code() is grpc.StatusCode.UNAUTHENTICATED
        assert pool(daemon)["queued_total"] == 0


async def test_a_stop_ends_streams_in_bounded_time(world: World) -> None:
    async with world.daemon() as daemon, connected(daemon) as client:
        session = client.session()
        await session.write(acquire(1, "r1"))
        await read(session)
        async with asyncio.timeout(5):
            await daemon.stop()
        assert await session.code() is not grpc.StatusCode.OK


async def test_the_sdk_takes_answers_that_travel_together(world: World, daemon: SchedulerDaemon) -> None:
    count = 100
    async with AsyncClient(daemon.address, pool="llama", tenant="b") as sdk:

        async def ask(number: int) -> None:
            async with sdk.acquire(prompt_tokens=1, max_output_tokens=1, request_id=f"r{number}"):
                await asyncio.sleep(60)  # held until the test is over

        asking = [asyncio.create_task(ask(number)) for number in range(SLOTS + count)]
        await eventually(lambda: pool(daemon)["queued_total"] == count)
        world.directory.remove_tenant(TenantId("b"))  # all that wait are refused in one step
        await eventually(lambda: sum(task.done() for task in asking) == count)
        assert {type(task.exception()) for task in asking if task.done()} == {PermissionDenied}
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
