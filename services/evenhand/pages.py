"""A service's few pages over HTTP: is it alive, is it ready, what has it counted.

One small server for all services; each says which pages it has and what stands on them. A page is made anew for
each request, on the event loop's thread, and must be quick. There is no authentication: the pages name tenants and
workers, so whoever starts them keeps them on loopback.
"""

import errno
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from aiohttp import web

from evenhand.core.errors import InvalidConfig

HOST: Final = "127.0.0.1"
METRICS_CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
STOP_S: Final = 1.0
"""Requests that are under way at a stop may take so long."""

_REASONS: Final = {
    errno.EADDRINUSE: "the address is in use",
    errno.EADDRNOTAVAIL: "the address is not this machine's",
    errno.EACCES: "permission is denied",
}

Page = Callable[[], web.Response]


def alive() -> web.Response:
    """That the event loop turns."""
    return web.Response(text="ok\n")


def readiness(not_ready: str) -> web.Response:
    """200, or 503 with the reason why the service is not ready."""
    return web.Response(status=503, text=f"{not_ready}\n") if not_ready else web.Response(text="ready\n")


def metrics(body: bytes) -> web.Response:
    """A page in Prometheus' text format."""
    return web.Response(body=body, headers={"Content-Type": METRICS_CONTENT_TYPE})


def usual_pages(body: Callable[[], bytes], not_ready: Callable[[], str]) -> dict[str, Page]:
    """``/health``, ``/ready`` and ``/metrics``; ``not_ready`` says why the service is not ready; empty: it is."""
    return {
        "/health": alive,
        "/ready": lambda: readiness(not_ready()),
        "/metrics": lambda: metrics(body()),
    }


class Pages:
    """Serves pages by their path; ``address`` is known once it has started."""

    def __init__(self, pages: Mapping[str, Page], port: int, host: str = HOST) -> None:
        """Port 0 takes a free one."""
        self._pages = pages
        self._port = port
        self._host = host
        self._runner: web.AppRunner | None = None
        self.address = ""
        """HOST:PORT; empty before the start."""

    async def start(self) -> None:
        """Listen; raises ``InvalidConfig`` if that cannot be, as when the port is taken."""
        application = web.Application()
        for path, page in self._pages.items():
            application.router.add_get(path, _handler(page))
        runner = web.AppRunner(application, access_log=None, shutdown_timeout=STOP_S)
        await runner.setup()
        try:
            await web.TCPSite(runner, self._host, self._port).start()
        except OSError as error:
            await runner.cleanup()
            reason = _REASONS.get(error.errno or 0, error.strerror)
            raise InvalidConfig(f"The pages cannot be served on {self._host}:{self._port}: {reason}.") from error
        self._runner = runner
        self.address = f"{self._host}:{runner.addresses[0][1]}"

    async def stop(self) -> None:
        """Stop listening; nothing happens where it has not begun."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None


def _handler(page: Page) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def handle(_: web.Request) -> web.Response:
        return page()

    return handle
