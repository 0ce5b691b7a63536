"""The blocking client, used from threads while the scheduler runs in the test's loop."""

import asyncio
import ctypes
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.unit.client.conftest import QUICK
from tests.unit.client.fake_scheduler import FakeScheduler

from evenhand.client import Client, ClientClosed, InvalidConfig, SchedulerUnreachable, WorkerLost
from evenhand.client.settings import RetryPolicy
from evenhand.wire.generated import scheduler_pb2 as pb

ASK: dict[str, Any] = {"prompt_tokens": 10, "max_output_tokens": 4}


@pytest.fixture
async def client(fake: FakeScheduler, mode: Any) -> AsyncIterator[Client]:
    made = Client(fake.address, pool="llama", mode=mode, retry=QUICK)
    yield made
    await asyncio.to_thread(made.close)


async def test_a_block_settles(fake: FakeScheduler, client: Client) -> None:
    def use() -> str:
        with client.acquire(tokens=range(12), max_output_tokens=3) as grant:
            grant.record_usage({"prompt_tokens": 12, "completion_tokens": 3})
            return grant.base_url

    assert await asyncio.to_thread(use) == "http://127.0.0.1:8000/v1"
    assert fake.settled[0].usage == pb.Usage(prompt_tokens=12, output_tokens=3)
    assert (await asyncio.to_thread(client.resolve)).block_size_tokens == 4


async def test_an_exception_settles_and_passes_on(fake: FakeScheduler, client: Client) -> None:
    def use() -> None:
        with client.acquire(**ASK):
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        await asyncio.to_thread(use)
    assert fake.settled[0].outcome == pb.OUTCOME_FAILED


async def test_many_threads_share_one_client(fake: FakeScheduler, client: Client) -> None:
    def use(number: int) -> None:
        for turn in range(10):
            with client.acquire(request_id=f"{number}-{turn}", **ASK) as grant:
                assert grant.request_id == f"{number}-{turn}"
                grant.record_usage(prompt_tokens=10, output_tokens=number)

    await asyncio.gather(*(asyncio.to_thread(use, number) for number in range(8)))
    assert len(fake.settled) == 80
    assert not fake.open


async def test_run_takes_another_leg(fake: FakeScheduler, client: Client) -> None:
    def call(grant: Any) -> int:
        if grant.leg == 1:
            raise WorkerLost("gone")
        return int(grant.leg)

    assert await asyncio.to_thread(lambda: client.run(call, **ASK)) == 2
    assert [settle.outcome for settle in fake.settled] == [pb.OUTCOME_WORKER_LOST, pb.OUTCOME_COMPLETED]
    assert not fake.queued


async def test_run_gives_up_after_its_legs(fake: FakeScheduler, client: Client) -> None:
    def call(grant: Any) -> None:
        raise ConnectionRefusedError("gone")

    with pytest.raises(ConnectionRefusedError):
        await asyncio.to_thread(lambda: client.run(call, legs_max=2, **ASK))
    await fake.until(lambda: fake.cancelled)
    assert not fake.queued


async def test_an_interrupt_while_waiting_gives_the_place_back(fake: FakeScheduler, client: Client) -> None:
    fake.holding = True
    idents: list[int] = []

    def use() -> None:
        idents.append(threading.get_ident())
        with pytest.raises(KeyboardInterrupt), client.acquire(**ASK):
            pass

    using = asyncio.create_task(asyncio.to_thread(use))
    await fake.until(lambda: fake.queued)
    # What a signal does to a main thread, done to this one: it is raised when the thread next runs bytecode.
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(idents[0]), ctypes.py_object(KeyboardInterrupt))
    fake.release()
    await using
    await fake.until(lambda: not fake.queued and not fake.open)


async def test_an_interrupt_in_the_moment_of_the_grant(fake: FakeScheduler, client: Client) -> None:
    block = client.acquire(**ASK)

    def enter_and_leave_without_exit() -> None:
        block.__enter__()
        client._tell(block.acquisition.abandon)

    await asyncio.to_thread(enter_and_leave_without_exit)
    await fake.until(lambda: fake.settled)
    assert fake.settled[0].outcome == pb.OUTCOME_CANCELLED


async def test_closing_ends_waiting_threads(fake: FakeScheduler, client: Client) -> None:
    fake.holding = True

    def use() -> None:
        with client.acquire(**ASK):
            pass

    using = asyncio.create_task(asyncio.to_thread(use))
    await fake.until(lambda: fake.queued)
    await asyncio.to_thread(client.close)
    with pytest.raises(ClientClosed):
        await using
    with pytest.raises(ClientClosed):
        await asyncio.to_thread(use)
    await asyncio.to_thread(client.close)
    assert not fake.queued
    assert not client._thread.is_alive()
    assert client._loop.is_closed()


async def test_leaving_a_block_after_closing_masks_nothing(fake: FakeScheduler, client: Client) -> None:
    def use() -> None:
        with client.acquire(**ASK):
            client.close()
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        await asyncio.to_thread(use)
    assert [settle.outcome for settle in fake.settled] == [pb.OUTCOME_CANCELLED]


def test_an_impossible_setting_leaves_no_thread() -> None:
    before = threading.active_count()
    with pytest.raises(InvalidConfig):
        Client("nowhere", pool="llama")
    assert threading.active_count() == before


def test_without_a_scheduler() -> None:
    once = RetryPolicy(attempts_max=1)
    with Client("127.0.0.1:1", pool="llama", retry=once) as client, pytest.raises(SchedulerUnreachable):
        client.acquire(**ASK).__enter__()
