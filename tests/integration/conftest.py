"""A scheduler daemon over memory ports, its surroundings and a client; a module that needs others has its own."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.fixtures.scheduler_daemon import Client, World, connected

from evenhand.scheduler.daemon import SchedulerDaemon


@pytest.fixture
def world(tmp_path: Path) -> World:
    """Two tenants, two workers."""
    return World(tmp_path).populated(("a", "b"), ("w1", "w2"))


@pytest.fixture
async def daemon(world: World) -> AsyncIterator[SchedulerDaemon]:
    async with world.daemon() as daemon:
        yield daemon


@pytest.fixture
async def client(daemon: SchedulerDaemon) -> AsyncIterator[Client]:
    async with connected(daemon) as client:
        yield client
