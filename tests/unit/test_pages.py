"""One server for every service's pages."""

import asyncio

import aiohttp
import pytest

from evenhand.core.errors import InvalidConfig
from evenhand.pages import Pages, usual_pages


async def test_the_usual_pages_say_what_they_are_told() -> None:
    reasons = ["The map is loading.", ""]
    pages = Pages(usual_pages(lambda: b"total 1\n", lambda: reasons.pop(0)), 0)
    await pages.start()
    try:
        async with aiohttp.ClientSession(f"http://{pages.address}") as session:
            seen = []
            for path in ("/health", "/ready", "/ready", "/metrics", "/other"):
                async with session.get(path) as response:
                    seen.append((response.status, await response.text()))
                    if path == "/metrics":
                        assert response.content_type == "text/plain"
    finally:
        await pages.stop()
    assert seen[:4] == [(200, "ok\n"), (503, "The map is loading.\n"), (200, "ready\n"), (200, "total 1\n")]
    assert seen[4][0] == 404


async def test_a_port_in_use_is_told_in_one_sentence() -> None:
    taken = await asyncio.start_server(lambda _reader, writer: writer.close(), "127.0.0.1", 0)
    port = taken.sockets[0].getsockname()[1]
    pages = Pages(usual_pages(lambda: b"", lambda: ""), port)
    async with taken:
        with pytest.raises(InvalidConfig) as told:
            await pages.start()
    assert str(told.value) == f"The pages cannot be served on 127.0.0.1:{port}: the address is in use."
    await pages.stop()
