"""Cancelled at any moment, a client leaves nothing open at the scheduler and passes the cancellation on."""

import asyncio
from typing import Any

import pytest
from tests.unit.client.fake_scheduler import FakeScheduler

from evenhand.client import AsyncClient
from evenhand.wire.generated import scheduler_pb2 as pb

STEPS = 48


async def one_request(client: AsyncClient) -> None:
    async with client.acquire(tokens=list(range(32)), max_output_tokens=4) as grant:
        grant.record_usage(prompt_tokens=32, output_tokens=1)
        await asyncio.sleep(0)
        grant.record_usage(output_tokens=2)


async def turns_of(client: AsyncClient) -> int:
    """How many turns of the loop one request takes."""
    task, turns = asyncio.create_task(one_request(client)), 0
    while not task.done():
        await asyncio.sleep(0)
        turns += 1
    await task
    return turns


@pytest.mark.parametrize("step", range(STEPS))
async def test_at_every_turn_of_the_loop(fake: FakeScheduler, connect: Any, step: int) -> None:
    async with connect() as client:
        turns = await turns_of(client)
        client._views.forget("")  # so that resolving is cancelled, too
        task = asyncio.create_task(one_request(client))
        for _ in range(turns * step // STEPS):
            await asyncio.sleep(0)
        task.cancel()
        outcome = (await asyncio.gather(task, return_exceptions=True))[0]
        assert outcome is None or isinstance(outcome, asyncio.CancelledError)
    assert not fake.open
    assert not fake.queued
    assert all(settle.outcome in (pb.OUTCOME_COMPLETED, pb.OUTCOME_CANCELLED) for settle in fake.settled)


@pytest.mark.parametrize("step", range(STEPS))
async def test_with_the_client_closing_around_it(fake: FakeScheduler, connect: Any, step: int) -> None:
    async def everything() -> None:
        async with connect() as client:
            await one_request(client)
            await asyncio.gather(*(one_request(client) for _ in range(3)))

    task = asyncio.create_task(everything())
    for _ in range(step * 8):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert not fake.open
    assert not fake.queued


async def test_while_waiting_in_the_queue(fake: FakeScheduler, connect: Any) -> None:
    fake.holding = True
    async with connect() as client:
        task = asyncio.create_task(one_request(client))
        await fake.until(lambda: fake.queued)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await fake.until(lambda: not fake.queued)
    assert not fake.open


async def test_in_the_moment_of_the_grant(fake: FakeScheduler, connect: Any) -> None:
    fake.holding = True
    async with connect() as client:
        task = asyncio.create_task(one_request(client))
        await fake.until(lambda: fake.queued)
        fake.release()
        await fake.until(lambda: fake.open)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await fake.until(lambda: not fake.open)


async def test_in_the_block(fake: FakeScheduler, connect: Any) -> None:
    entered = asyncio.Event()

    async def hold() -> None:
        async with client.acquire(prompt_tokens=4, max_output_tokens=4) as grant:
            grant.record_usage(prompt_tokens=4, output_tokens=3)
            entered.set()
            await asyncio.sleep(60)

    async with connect() as client:
        task = asyncio.create_task(hold())
        await entered.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert fake.settled[0].outcome == pb.OUTCOME_CANCELLED
    assert fake.settled[0].usage.output_tokens == 3


async def test_while_leaving_the_block(fake: FakeScheduler, connect: Any) -> None:
    leaving = asyncio.Event()

    async def hold() -> None:
        async with client.acquire(prompt_tokens=4, max_output_tokens=4):
            fake.lose_next_answer.add("settle")
            leaving.set()

    async with connect() as client:
        task = asyncio.create_task(hold())
        await leaving.wait()
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert len(fake.settled) == 1
    assert not fake.open


async def test_a_time_limit_around_the_block_is_a_cancellation(fake: FakeScheduler, connect: Any) -> None:
    async with connect() as client:
        with pytest.raises(TimeoutError):  # the block is what is tested
            async with asyncio.timeout(0.1), client.acquire(prompt_tokens=4, max_output_tokens=4):
                await asyncio.sleep(60)
    assert fake.settled[0].outcome == pb.OUTCOME_CANCELLED


async def test_while_no_scheduler_answers(fake: FakeScheduler, connect: Any) -> None:
    address = fake.address
    await fake.stop()
    async with connect(address=address, close_wait_s=0.1) as client:
        task = asyncio.create_task(one_request(client))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_an_abandoned_async_generator_gives_its_place_back(fake: FakeScheduler, connect: Any) -> None:
    async def stream(client: AsyncClient) -> Any:
        async with client.acquire(prompt_tokens=4, max_output_tokens=4) as grant:
            for count in range(100):
                grant.record_usage(prompt_tokens=4, output_tokens=count)
                yield count

    async with connect() as client:
        generator = stream(client)
        async for count in generator:
            if count == 5:
                break
        await generator.aclose()
    assert fake.settled[0].outcome == pb.OUTCOME_CANCELLED
    assert fake.settled[0].usage.output_tokens == 5
