"""The worker edge inside vLLM, as its event publisher.

vLLM loads entry points of ``vllm.general_plugins`` in each of its processes. ``register`` replaces the publisher
that vLLM calls ``zmq`` by one that hands event batches to an edge on a thread of its own, in the same process: no
event socket, no replay, nothing to lose between engine and edge. The engine's loop only appends to a bounded deque
(see ``plugin_source``). vLLM needs ``--kv-events-config '{"enable_kv_cache_events": true, "publisher": "zmq"}'``
for events at all; endpoints and topic in it are then without effect.

Inactive, and vLLM unchanged, unless ``EVENHAND_KAFKA`` and ``EVENHAND_WORKER_ID`` are set:

=========================  =====================================================================================
variable                   meaning
=========================  =====================================================================================
EVENHAND_KAFKA             HOST:PORT of Kafka
EVENHAND_KAFKA_PROFILE     production (default) or embedded
EVENHAND_WORKER_ID         the worker's id; where the engine has several data-parallel ranks, ``{rank}`` in it
                           stands for the rank, and without it rank 1 and above append ``-RANK``
EVENHAND_POOL              the pool
EVENHAND_ADDRESS           where clients and the load poller call this engine, http://HOST:PORT
EVENHAND_MODEL             served name of the base model; default: what the engine says
EVENHAND_BLOCK_SIZE        tokens a block; default: what the engine says
EVENHAND_KV_BLOCKS         blocks of the cache, the null block left out; default: what the engine says
EVENHAND_SLOTS             the engine's --max-num-seqs; default 64
EVENHAND_SALT_GENERATION   generation of the pool's cache salts; default 1
=========================  =====================================================================================

A wrong value stops vLLM's start with one sentence. A fault of the edge later never reaches the engine: it is
logged, and the edge starts again with a new epoch.
"""

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from evenhand.core.errors import InvalidConfig
from evenhand.core.ids import PoolId, WorkerId
from evenhand.kafka import KafkaConfig, KafkaLogReader, KafkaLogWriter
from evenhand.logs import get_logger
from evenhand.worker.config import EdgeConfig
from evenhand.worker.edge import WorkerEdge
from evenhand.worker.load import EnginePoller
from evenhand.worker.plugin_source import PluginSource

REPLACED_PUBLISHER = "zmq"
SHUTDOWN_S_MAX = 5.0
RESTART_PAUSE_S = 1.0

_log = get_logger("vllm-plugin")


@dataclass(frozen=True, slots=True)
class PluginConfig:
    """What the environment says."""

    edge: EdgeConfig
    kafka: KafkaConfig


def read_environment(environment: Mapping[str, str], data_parallel_rank: int) -> PluginConfig | None:
    """The settings of one rank; None where the plugin is not wanted. Raises ``InvalidConfig``."""
    kafka, worker_id = environment.get("EVENHAND_KAFKA"), environment.get("EVENHAND_WORKER_ID")
    if not kafka or not worker_id:
        return None
    for name in ("EVENHAND_POOL", "EVENHAND_ADDRESS"):
        if not environment.get(name):
            raise InvalidConfig(f"The variable {name} is needed beside EVENHAND_KAFKA and EVENHAND_WORKER_ID.")
    if "{rank}" in worker_id:
        worker_id = worker_id.replace("{rank}", str(data_parallel_rank))
    elif data_parallel_rank:
        worker_id = f"{worker_id}-{data_parallel_rank}"
    edge = EdgeConfig(
        worker_id=WorkerId(worker_id),
        pool_id=PoolId(environment["EVENHAND_POOL"]),
        address=environment["EVENHAND_ADDRESS"],
        model=environment.get("EVENHAND_MODEL", ""),
        block_size_tokens=_whole(environment, "EVENHAND_BLOCK_SIZE", 0),
        kv_blocks=_whole(environment, "EVENHAND_KV_BLOCKS", 0),
        slots=_whole(environment, "EVENHAND_SLOTS", 64),
        salt_generation=_whole(environment, "EVENHAND_SALT_GENERATION", 1),
        data_parallel_rank=data_parallel_rank,
    )
    profile = environment.get("EVENHAND_KAFKA_PROFILE", "production")
    return PluginConfig(edge, KafkaConfig.of_environment(profile, kafka, environment))


def _whole(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name, "")
    if not text:
        return default
    if not text.isdecimal():
        raise InvalidConfig(f"The variable {name} is {text!r}, which is no whole number.")
    return int(text)


RunEdge = Callable[[PluginSource, asyncio.Event], Coroutine[Any, Any, None]]


class EdgeThread:
    """An edge on a thread and loop of its own. ``offer`` never waits; ``stop`` waits for a bounded time."""

    def __init__(self, run_edge: RunEdge, name: str) -> None:
        """``run_edge`` runs an edge on the source until the event is set."""
        self.source = PluginSource()
        self._run_edge = run_edge
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def offer(self, batch: Any) -> None:
        self.source.offer(batch)

    def stop(self) -> None:
        """End the edge; what it could not publish in ``SHUTDOWN_S_MAX`` is lost with the process."""
        self._stopping.set()
        loop, stop = self._loop, self._stop
        if loop is not None and stop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(stop.set)
        self._thread.join(SHUTDOWN_S_MAX)

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        while not self._stopping.is_set():
            try:
                await self._run_edge(self.source, self._stop)
            except Exception as error:
                _log.error("the edge failed and starts again", reason=repr(error))
                await asyncio.sleep(RESTART_PAUSE_S)


def edge_runner(config: PluginConfig) -> RunEdge:
    """Runs a real edge: Kafka and the engine's own pages."""

    async def run_edge(source: PluginSource, stop: asyncio.Event) -> None:
        writer, reader = KafkaLogWriter(config.kafka), KafkaLogReader(config.kafka)
        try:
            async with EnginePoller(config.edge.address, config.edge.data_parallel_rank) as poller:
                await WorkerEdge(config.edge, source, writer, reader, poller).run(stop)
        finally:
            await reader.close()
            await writer.close()

    return run_edge


def publisher_class(
    base: type[Any], environment: Mapping[str, str], runner: Callable[[PluginConfig], RunEdge]
) -> type[Any]:
    """A publisher for vLLM's factory, derived from its ``EventPublisher``."""

    class EvenhandPublisher(base):  # type: ignore[misc]
        """Hands batches to an edge in this process."""

        def __init__(self, data_parallel_rank: int = 0, **_: Any) -> None:
            super().__init__(data_parallel_rank)
            config = read_environment(environment, data_parallel_rank)
            assert config is not None, "the publisher is registered only where the environment asks for it"
            self.edge = EdgeThread(runner(config), f"evenhand-edge-{data_parallel_rank}")

        def publish(self, events: Any) -> None:
            """Called in the engine's scheduling loop."""
            if events.data_parallel_rank is None:
                events.data_parallel_rank = self._data_parallel_rank
            self.edge.offer(events)

        def shutdown(self) -> None:
            self.edge.stop()

    return EvenhandPublisher


def register(
    environment: Mapping[str, str] = os.environ, runner: Callable[[PluginConfig], RunEdge] = edge_runner
) -> bool:
    """vLLM's entry point; True if the publisher was replaced. Safe to call more than once."""
    if read_environment(environment, 0) is None:
        return False
    from vllm.distributed import kv_events

    registry = kv_events.EventPublisherFactory._registry
    registry[REPLACED_PUBLISHER] = publisher_class(kv_events.EventPublisher, environment, runner)
    return True
