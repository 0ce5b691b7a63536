"""``/health``, ``/ready`` and ``/metrics`` of an edge, on loopback.

``/health`` answers while the event loop turns. ``/ready`` answers 200 once the broker has the announcement and
takes messages, and 503 with the reason before that. ``/metrics`` is Prometheus' text format: every total of the
edge as ``evenhand_edge_NAME_total``, labelled with the worker alone.
"""

from aiohttp import web

from evenhand.core.errors import InvalidConfig
from evenhand.core.kv import Tier
from evenhand.worker.edge import WorkerEdge

HOST = "127.0.0.1"
METRICS_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class EdgePages:
    """A small HTTP server; ``port`` is known once it has started."""

    def __init__(self, edge: WorkerEdge, port: int) -> None:
        self.port = port
        self._edge = edge
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        """Listen on loopback; port 0 takes a free one. Raises ``InvalidConfig`` if the port is taken."""
        application = web.Application()
        application.router.add_get("/health", self._health)
        application.router.add_get("/ready", self._ready)
        application.router.add_get("/metrics", self._metrics)
        runner = web.AppRunner(application, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        try:
            await web.TCPSite(runner, HOST, self.port).start()
        except OSError as error:
            await runner.cleanup()
            raise InvalidConfig(f"The pages cannot be served on {HOST}:{self.port}: {error.strerror}.") from error
        self._runner = runner
        self.port = runner.addresses[0][1]

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _ready(self, _: web.Request) -> web.Response:
        if not self._edge.announced.is_set():
            return web.Response(status=503, text="The worker is not announced yet.\n")
        if not self._edge.publishing:
            return web.Response(status=503, text="The broker does not take messages.\n")
        return web.Response(text="ready\n")

    async def _metrics(self, _: web.Request) -> web.Response:
        body = metrics_page(self._edge).encode()
        return web.Response(body=body, headers={"Content-Type": METRICS_CONTENT_TYPE})


def metrics_page(edge: WorkerEdge) -> str:
    """All totals and gauges of one edge."""
    state = edge.state
    if state is None:
        return ""
    worker = edge.config.worker_id.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    label = f'{{worker_id="{worker}"}}'
    lines = [f"evenhand_edge_{name}_total{label} {value}" for name, value in state.all_counters().items()]
    gauges = {
        "epoch": state.outbox.epoch,
        "batch_number": state.outbox.seq,
        "keys_held_device": len(state.translator.held(Tier.DEVICE)),
        "phantoms_at_most": state.translator.phantoms_max,
        "stores_waiting_now": state.translator.stores_waiting,
        "settled": int(state.continuity.settled),
        "silent_with_traffic": int(state.alarmed),
    }
    lines += [f"evenhand_edge_{name}{label} {value}" for name, value in gauges.items()]
    return "\n".join(lines) + "\n"
