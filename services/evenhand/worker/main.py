"""``evenhand worker-edge``: the edge of one worker as a process.

The composition root: settings from options, one object of each kind, signals to ``stop``. Exits with 0 after
SIGTERM or SIGINT, with 2 for a command line that cannot be read, and with 1 for any other fault; each is told in
one sentence.
"""

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

import uvloop

from evenhand.core.errors import EvenhandError
from evenhand.core.ids import PoolId, WorkerId
from evenhand.kafka import KafkaConfig, KafkaLogReader, KafkaLogWriter
from evenhand.logs import configure_logs
from evenhand.options import add_kafka, add_metrics_port, require_given
from evenhand.pages import Pages
from evenhand.plaintext import warn_of_plaintext
from evenhand.worker.config import EdgeConfig
from evenhand.worker.edge import WorkerEdge
from evenhand.worker.load import EnginePoller
from evenhand.worker.pages import edge_pages
from evenhand.worker.zmq_source import ZmqSource

EXIT_FAULT = 1
EXIT_USAGE = 2
CONTROL_FETCH_WAIT_MS = 200
"""An edge reads wishes alone; they are rare and in no hurry, and a fetch that finds none costs the broker time."""


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line says."""

    edge: EdgeConfig
    kafka: KafkaConfig
    metrics_port: int | None
    leave: bool
    log_format: str
    log_level: str


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"{self.prog}: {message[:1].upper()}{message[1:]}.\n")


def parse(argv: Sequence[str]) -> Options:
    """Options of the command line.

    One that cannot be read ends the process with code 2; raises ``InvalidConfig`` for a value that cannot work.
    """
    parser = _parser()
    arguments = parser.parse_args(argv)
    require_given(parser, arguments, "kafka")
    if bool(arguments.kv_events) == arguments.no_events:
        parser.error("give either --kv-events tcp://HOST:PORT or --no-events")
    edge = EdgeConfig(
        worker_id=WorkerId(arguments.worker_id),
        pool_id=PoolId(arguments.pool),
        address=arguments.address,
        kv_events=arguments.kv_events or "",
        replay=arguments.replay or "",
        topic=arguments.topic,
        sends_events=not arguments.no_events,
        model=arguments.model,
        block_size_tokens=arguments.block_size,
        kv_blocks=arguments.kv_blocks,
        slots=arguments.slots,
        data_parallel_rank=arguments.data_parallel_rank,
        salt_generation=arguments.salt_generation,
        checkpoint=None if arguments.checkpoint is None else Path(arguments.checkpoint),
        load_interval_ms=arguments.load_interval_ms,
        announce_interval_ms=arguments.announce_interval_ms,
    )
    kafka = KafkaConfig.of_environment(arguments.kafka_profile, arguments.kafka, os.environ)
    return Options(edge, kafka, arguments.metrics_port, arguments.leave, arguments.log_format, arguments.log_level)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="evenhand worker-edge",
        description="Publish one engine's cache events, load and liveness to Kafka.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--worker-id", required=True, help="names the worker everywhere, also after a restart")
    add("--pool", required=True, help="the pool it belongs to")
    add("--address", required=True, help="where clients call the engine, http://HOST:PORT")
    add("--kv-events", help="the engine's event socket, tcp://HOST:PORT")
    add("--replay", help="the engine's replay socket; without it every gap empties the worker's map")
    add("--no-events", action="store_true", help="the engine sends no events: the map is approximate")
    add("--topic", default="", help="take events of topics that begin so; default: all")
    add_kafka(parser)
    add("--checkpoint", help="file that carries the edge over its own restart")
    add("--model", default="", help="the base model's served name; default: what the engine says first")
    add("--block-size", type=int, default=0, help="tokens a block; default: what the engine says")
    add("--kv-blocks", type=int, default=0, help="blocks of the engine's cache; default: what the engine says")
    add("--slots", type=int, default=64, help="sequences the engine runs at once (its --max-num-seqs); default 64")
    add("--data-parallel-rank", type=int, default=0, help="rank within a data-parallel engine; default 0")
    add("--salt-generation", type=int, default=1, help="generation of the pool's cache salts; default 1")
    add("--load-interval-ms", type=int, default=250, help="between two load reports; default 250")
    add("--announce-interval-ms", type=int, default=2_000, help="between two announcements; default 2000")
    add_metrics_port(parser, "/health, /ready and /metrics")
    add("--leave", action="store_true", help="when stopped, say that the worker is gone for good")
    add("--log-format", choices=("json", "console"), default="json")
    add("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    return parser


async def run_edge(options: Options, stop: asyncio.Event) -> None:
    """Run one edge until ``stop``."""
    config = options.edge
    source = ZmqSource(config.kv_events, config.replay or None, config.topic) if config.kv_events else None
    writer = KafkaLogWriter(options.kafka)
    reader = KafkaLogReader(replace(options.kafka, fetch_wait_ms_max=CONTROL_FETCH_WAIT_MS))
    pages: Pages | None = None
    try:
        async with EnginePoller(config.address, config.data_parallel_rank) as poller:
            edge = WorkerEdge(config, source, writer, reader, poller)
            if options.metrics_port is not None:
                pages = edge_pages(edge, options.metrics_port)
                await pages.start()
            await edge.run(stop, options.leave)
    finally:
        if pages is not None:
            await pages.stop()
        await reader.close()
        await writer.close()


async def _run_until_signal(options: Options) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await run_edge(options, stop)


def main(argv: Sequence[str] | None = None) -> int:
    """The command's entry."""
    try:
        options = parse(sys.argv[1:] if argv is None else argv)
        configure_logs("worker-edge", options.log_format, options.log_level)
        warn_of_plaintext(options.kafka.plaintext_hosts)
        uvloop.run(_run_until_signal(options))
    except EvenhandError as error:
        print(f"evenhand worker-edge: {error}", file=sys.stderr)
        return EXIT_FAULT
    return 0
