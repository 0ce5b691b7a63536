"""Fixtures of the client's tests."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from tests.unit.client.fake_scheduler import FakeScheduler

from evenhand.client import AsyncClient, RetryPolicy

QUICK = RetryPolicy(attempts_max=64, backoff_ms_base=5, backoff_ms_max=50)


@pytest.fixture
async def fake() -> AsyncIterator[FakeScheduler]:
    scheduler = FakeScheduler()
    await scheduler.start()
    yield scheduler
    await scheduler.stop()


@pytest.fixture(params=["session", "unary"])
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def connect(fake: FakeScheduler, mode: str) -> Any:
    @asynccontextmanager
    async def make(**settings: Any) -> AsyncIterator[AsyncClient]:
        given = {"pool": "llama", "api_key": "k", "mode": mode, "retry": QUICK, **settings}
        async with AsyncClient(given.pop("address", fake.address), **given) as client:
            yield client

    return make
