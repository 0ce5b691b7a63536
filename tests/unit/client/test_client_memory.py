"""A client that has served many requests holds nothing of them: memory returns to where it was."""

import asyncio
import gc
from typing import Any

from tests.unit.client.fake_scheduler import FakeScheduler

from evenhand.client import AsyncClient, Grant

REQUESTS = 60


async def one(client: AsyncClient, number: int) -> None:
    async with client.acquire(tokens=list(range(40)), max_output_tokens=4, request_id=f"r{number}") as grant:
        grant.record_usage(prompt_tokens=40, output_tokens=1)
        if number % 3 == 1:
            raise RuntimeError("the caller's own fault")
        if number % 3 == 2:
            await asyncio.sleep(60)


async def given_up(client: AsyncClient, number: int) -> None:
    task = asyncio.create_task(one(client, number))
    await asyncio.wait([task], timeout=0.05 if number % 3 == 2 else 10)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def grants_alive() -> int:
    gc.collect()
    return sum(isinstance(thing, Grant) for thing in gc.get_objects())


def tasks_alive() -> int:
    return len(asyncio.all_tasks())


async def test_nothing_is_kept_of_requests_that_are_over(fake: FakeScheduler, connect: Any) -> None:
    async with connect() as client:
        await given_up(client, 0)
        await fake.until(lambda: not fake.open)
        grants, tasks = grants_alive(), tasks_alive()
        await asyncio.gather(*(given_up(client, number) for number in range(REQUESTS)))
        await fake.until(lambda: not fake.open)
        async with asyncio.timeout(5):
            while tasks_alive() > tasks or grants_alive() > grants:
                await asyncio.sleep(0.02)
    assert not fake.queued
