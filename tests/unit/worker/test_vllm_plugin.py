"""The plugin inside a stand-in for vLLM: what it replaces, what it hands over, and that it never waits."""

import asyncio
import sys
import threading
import time
import types
from typing import Any, ClassVar

import msgspec
import pytest
from tests.unit.worker.engine_frames import stored, tokens

from evenhand.core.cache_map import CacheMap
from evenhand.core.errors import InvalidConfig
from evenhand.core.fold import fold
from evenhand.core.kv import WorkerAnnounced
from evenhand.memory.log import MemoryLog, MemoryLogReader, MemoryLogWriter
from evenhand.ports import KV_TOPIC
from evenhand.wire.kv_codec import decode_kv_message
from evenhand.worker.edge import WorkerEdge
from evenhand.worker.load import EnginePoller
from evenhand.worker.plugin_source import PluginSource
from evenhand.worker.source import FrameReceived, SourceEvent
from evenhand.worker.vllm_plugin import EdgeThread, PluginConfig, RunEdge, read_environment, register

ENVIRONMENT = {
    "EVENHAND_KAFKA": "broker:9092",
    "EVENHAND_WORKER_ID": "w",
    "EVENHAND_POOL": "p",
    "EVENHAND_ADDRESS": "http://127.0.0.1:9",
    "EVENHAND_MODEL": "m",
    "EVENHAND_BLOCK_SIZE": "4",
}


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class EventPublisher:
    def __init__(self, data_parallel_rank: int = 0) -> None:
        self._data_parallel_rank = data_parallel_rank


@pytest.fixture
def factory(monkeypatch: pytest.MonkeyPatch) -> type[Any]:
    """A module ``vllm`` with a factory of publishers; returns the factory."""

    class EventPublisherFactory:
        _registry: ClassVar[dict[str, Any]] = {"null": EventPublisher, "zmq": EventPublisher}

    kv_events = types.ModuleType("vllm.distributed.kv_events")
    kv_events.EventPublisher = EventPublisher  # type: ignore[attr-defined]
    kv_events.EventPublisherFactory = EventPublisherFactory  # type: ignore[attr-defined]
    distributed = types.ModuleType("vllm.distributed")
    distributed.kv_events = kv_events  # type: ignore[attr-defined]
    vllm = types.ModuleType("vllm")
    vllm.distributed = distributed  # type: ignore[attr-defined]
    for name, module in (
        ("vllm", vllm),
        ("vllm.distributed", distributed),
        ("vllm.distributed.kv_events", kv_events),
    ):
        monkeypatch.setitem(sys.modules, name, module)
    return EventPublisherFactory


def runner_over(log: MemoryLog) -> Any:
    def runner(config: PluginConfig) -> RunEdge:
        async def run_edge(source: PluginSource, stop: asyncio.Event) -> None:
            async with EnginePoller(config.edge.address) as poller:
                edge = WorkerEdge(config.edge, source, MemoryLogWriter(log), MemoryLogReader(log), poller)
                await edge.run(stop)

        return run_edge

    return runner


def test_it_is_inactive_unless_the_environment_asks_for_it(factory: type[Any]) -> None:
    assert register({}) is False
    assert register({"EVENHAND_KAFKA": "broker:9092"}) is False
    assert factory._registry["zmq"] is EventPublisher
    assert register(ENVIRONMENT) is True
    assert register(ENVIRONMENT) is True
    assert issubclass(factory._registry["zmq"], EventPublisher)
    assert factory._registry["null"] is EventPublisher


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"EVENHAND_POOL": ""}, "EVENHAND_POOL"),
        ({"EVENHAND_ADDRESS": ""}, "EVENHAND_ADDRESS"),
        ({"EVENHAND_ADDRESS": "nowhere"}, "address"),
        ({"EVENHAND_SLOTS": "many"}, "EVENHAND_SLOTS"),
        ({"EVENHAND_KAFKA": "broker"}, "Kafka"),
        ({"EVENHAND_KAFKA_PROFILE": "magic"}, "profile"),
    ],
)
def test_a_wrong_value_stops_the_start(changed: dict[str, str], named: str) -> None:
    with pytest.raises(InvalidConfig, match=named):
        register(ENVIRONMENT | changed)


def test_each_rank_is_a_worker_of_its_own() -> None:
    def worker_id(rank: int, pattern: str = "w") -> str:
        config = read_environment(ENVIRONMENT | {"EVENHAND_WORKER_ID": pattern}, rank)
        assert config is not None
        assert config.edge.data_parallel_rank == rank
        return config.edge.worker_id

    assert [worker_id(rank) for rank in range(3)] == ["w", "w-1", "w-2"]
    assert [worker_id(rank, "host.{rank}") for rank in range(2)] == ["host.0", "host.1"]


def test_batches_of_the_engine_reach_the_log_as_keys(factory: type[Any]) -> None:
    log = MemoryLog(partitions=1)
    register(ENVIRONMENT, runner_over(log))
    publisher = factory._registry["zmq"](data_parallel_rank=1, endpoint="tcp://*:5557", topic="x", hwm=5)
    try:
        publisher.publish(EventBatch(1.0, [stored([1, 2], tokens(0, 2))]))
        publisher.publish(EventBatch(2.0, [stored([3], tokens(8, 1), parent=2)]))
        deadline = time.monotonic() + 10
        held = 0
        while held < 3 and time.monotonic() < deadline:
            cache_map, announced = CacheMap(), []
            for record in log.records(KV_TOPIC):
                message = decode_kv_message(record.key, record.value)
                fold(cache_map, message)
                announced += [message] if isinstance(message, WorkerAnnounced) else []
            held = cache_map.key_count
            threading.Event().wait(0.02)
        assert held == 3
        assert announced[0].worker_id == "w-1"
        assert announced[0].data_parallel_rank == 1
    finally:
        publisher.shutdown()
    assert not publisher.edge._thread.is_alive()


async def test_a_full_deque_drops_and_the_gap_shows() -> None:
    source = PluginSource(batches_max=3)
    assert [source.offer(EventBatch(1.0, [])) for _ in range(5)] == [True, True, True, False, False]
    assert source.dropped == 2
    seen: list[int] = []
    all_there = asyncio.Event()

    async def put(event: SourceEvent) -> None:
        assert isinstance(event, FrameReceived)
        seen.append(event.seq)
        if event.seq == 5:
            all_there.set()

    running = asyncio.create_task(source.run(put))
    while source.waiting:
        await asyncio.sleep(0.001)
    assert source.offer(EventBatch(1.0, []))
    await asyncio.wait_for(all_there.wait(), 5)
    running.cancel()
    assert seen == [0, 1, 2, 5]


def test_publishing_never_waits_even_when_the_edge_hangs() -> None:
    hanging = threading.Event()

    async def run_edge(source: PluginSource, stop: asyncio.Event) -> None:
        hanging.set()
        await stop.wait()

    edge = EdgeThread(run_edge, "hanging")
    assert hanging.wait(5)
    batch = EventBatch(1.0, [stored([1], tokens(0, 1))])
    began = time.perf_counter()
    for _ in range(10_000):
        edge.offer(batch)
    assert (time.perf_counter() - began) / 10_000 < 0.001
    edge.stop()
    assert not edge._thread.is_alive()


def test_an_edge_that_fails_starts_again_and_the_engine_never_hears(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evenhand.worker.vllm_plugin.RESTART_PAUSE_S", 0.001)
    started: list[int] = []
    third = threading.Event()

    async def run_edge(source: PluginSource, stop: asyncio.Event) -> None:
        started.append(1)
        if len(started) < 3:
            raise RuntimeError("broken")
        third.set()
        await stop.wait()

    edge = EdgeThread(run_edge, "failing")
    assert third.wait(5)
    edge.offer(EventBatch(1.0, []))
    edge.stop()
    assert not edge._thread.is_alive()
