"""``/metrics``, ``/status`` and ``/healthz`` over HTTP, on loopback.

``/metrics`` is Prometheus' text format; ``/status`` is the pool as it stands, in JSON, for people and the live
table; ``/healthz`` answers 200 while this process owns the pool or stands by, warm, and 503 before that.
"""

from collections.abc import Callable, Mapping

from aiohttp import web

from evenhand.core.errors import InvalidConfig
from evenhand.scheduler.config import split_address

METRICS_CONTENT_TYPE = "text/plain; version=0.0.4"


class Pages:
    """A small HTTP server; ``address`` is known once it has started."""

    def __init__(
        self,
        listen: str,
        metrics: Callable[[], bytes],
        status: Callable[[], Mapping[str, object]],
        healthy: Callable[[], bool],
    ) -> None:
        self._listen = listen
        self._metrics = metrics
        self._status = status
        self._healthy = healthy
        self._runner: web.AppRunner | None = None
        self.address = ""

    async def start(self) -> None:
        """Listen; raises ``InvalidConfig`` if the port is taken."""
        app = web.Application()
        app.router.add_get("/metrics", self._get_metrics)
        app.router.add_get("/status", self._get_status)
        app.router.add_get("/healthz", self._get_health)
        host, port = split_address(self._listen, "metrics_listen")
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            await runner.cleanup()
            raise InvalidConfig(f"Metrics cannot be served on {self._listen}: {error.strerror}.") from error
        self._runner = runner
        self.address = f"{host}:{runner.addresses[0][1]}"

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _get_metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=self._metrics(), headers={"Content-Type": METRICS_CONTENT_TYPE})

    async def _get_status(self, _: web.Request) -> web.Response:
        return web.json_response(self._status())

    async def _get_health(self, _: web.Request) -> web.Response:
        return web.Response(text="ok\n") if self._healthy() else web.Response(status=503, text="starting\n")
