"""What is remembered of credentials is bounded, and guesses push out nobody."""

import asyncio

import pytest

from evenhand.core.errors import Unavailable
from evenhand.core.ids import PoolId, TenantId
from evenhand.core.steps import Input
from evenhand.memory import MemoryDirectory
from evenhand.ports import Principal
from evenhand.scheduler import directory_watch
from evenhand.scheduler.directory_watch import DirectoryWatch


@pytest.fixture
def directory() -> MemoryDirectory:
    return MemoryDirectory()


@pytest.fixture
async def watch(directory: MemoryDirectory, monkeypatch: pytest.MonkeyPatch) -> DirectoryWatch:
    monkeypatch.setattr(directory_watch, "PRINCIPALS_CACHED_MAX", 3)
    monkeypatch.setattr(directory_watch, "UNKNOWN_KEYS_CACHED_MAX", 5)
    told: list[Input] = []
    watch = DirectoryWatch(directory, PoolId("p"), 500, told.append)
    for number in range(6):
        principal = Principal(f"p{number}", "service", (TenantId("a"),), False)
        directory.set_principal(bytes([number]) * 32, principal)
    await watch.refresh()
    return watch


async def test_guesses_are_bounded_and_push_out_no_principal(watch: DirectoryWatch) -> None:
    await watch.principal_of(bytes(32))
    for number in range(100, 150):
        assert await watch.principal_of(bytes([number]) * 32) is None
    assert watch.cached_principal(bytes(32)) is not None
    assert len(watch._unknown) == 5


async def test_principals_are_bounded_the_oldest_go(watch: DirectoryWatch) -> None:
    for number in range(6):
        assert await watch.principal_of(bytes([number]) * 32) is not None
    known = [number for number in range(6) if watch.cached_principal(bytes([number]) * 32)]
    assert known == [3, 4, 5]


async def test_a_change_of_the_directory_forgets_every_credential(
    directory: MemoryDirectory, watch: DirectoryWatch
) -> None:
    await watch.principal_of(bytes(32))
    await watch.principal_of(b"\xff" * 32)
    directory.revoke(bytes(32))
    assert await watch.refresh()
    assert watch.cached_principal(bytes(32)) is None
    assert not watch._unknown
    assert await watch.principal_of(bytes(32)) is None


async def test_a_flood_of_guesses_is_looked_up_a_few_at_a_time(
    directory: MemoryDirectory, watch: DirectoryWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory_watch, "LOOKUPS_MAX", 2)
    await watch.principal_of(bytes(32))
    answers, found = asyncio.Event(), directory.principal_of

    async def slowly(key_sha256: bytes) -> Principal | None:
        await answers.wait()
        return await found(key_sha256)

    monkeypatch.setattr(directory, "principal_of", slowly)
    asked = [asyncio.create_task(watch.principal_of(bytes([number]) * 32)) for number in (1, 200)]
    await asyncio.sleep(0)
    with pytest.raises(Unavailable, match="2 keys are being looked up"):
        await watch.principal_of(bytes([201]) * 32)
    assert await watch.principal_of(bytes(32)) is not None, "what is cached needs no look-up"
    answers.set()
    known, unknown = await asyncio.gather(*asked)
    assert (known is not None, unknown) == (True, None)
    assert await watch.principal_of(bytes([201]) * 32) is None
