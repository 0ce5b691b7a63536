"""``/health``, ``/ready`` and ``/metrics`` over HTTP, on loopback.

``/health`` answers while the event loop turns. ``/ready`` answers 200 once the map is loaded and the log is being
read, and 503 with the reason before that and while commits cannot keep up.
"""

from collections.abc import Callable

from aiohttp import web

from evenhand.core.errors import InvalidConfig

HOST = "127.0.0.1"
METRICS_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Pages:
    """A small HTTP server; ``address`` is known once it has started."""

    def __init__(self, port: int, metrics: Callable[[], bytes], not_ready: Callable[[], str]) -> None:
        """Port 0 takes a free one. ``not_ready`` tells why the service is not ready; empty: it is."""
        self._port = port
        self._metrics = metrics
        self._not_ready = not_ready
        self._runner: web.AppRunner | None = None
        self.address = ""

    async def start(self) -> None:
        """Listen; raises ``InvalidConfig`` if the port is taken."""
        application = web.Application()
        application.router.add_get("/health", self._health)
        application.router.add_get("/ready", self._ready)
        application.router.add_get("/metrics", self._get_metrics)
        runner = web.AppRunner(application, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        try:
            await web.TCPSite(runner, HOST, self._port).start()
        except OSError as error:
            await runner.cleanup()
            raise InvalidConfig(f"The pages cannot be served on {HOST}:{self._port}: {error.strerror}.") from error
        self._runner = runner
        self.address = f"{HOST}:{runner.addresses[0][1]}"

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _ready(self, _: web.Request) -> web.Response:
        reason = self._not_ready()
        return web.Response(status=503, text=f"{reason}\n") if reason else web.Response(text="ready\n")

    async def _get_metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=self._metrics(), headers={"Content-Type": METRICS_CONTENT_TYPE})
