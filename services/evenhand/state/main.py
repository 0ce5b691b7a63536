"""``evenhand state``: the state service as a process.

The composition root: settings from options, one object of each kind, signals to ``stop``. The schema is checked
before anything is read; a database without it, or with one this build does not know, ends the start. ``evenhand``
exits with 0 after SIGTERM or SIGINT and with 1 for a fault, told in one sentence on standard error.
"""

import argparse
import asyncio
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass

import uvloop

from evenhand.kafka import KafkaConfig, KafkaLogReader, KafkaLogWriter
from evenhand.logs import configure_logs, get_logger
from evenhand.options import add_dsn, add_kafka, add_metrics_port, require_given
from evenhand.pages import Pages, usual_pages
from evenhand.plaintext import warn_of_plaintext
from evenhand.postgres.database import Database, DatabaseConfig, plaintext_hosts
from evenhand.postgres.directory import PostgresDirectory
from evenhand.postgres.map_store import PostgresMapStore
from evenhand.state.config import StateConfig
from evenhand.state.fault import FaultPoint
from evenhand.state.metrics import StateMetrics
from evenhand.state.service import StateService

_log = get_logger("state")


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line says."""

    database: DatabaseConfig
    kafka: KafkaConfig
    state: StateConfig
    metrics_port: int | None
    log_format: str
    log_level: str


def parse(argv: Sequence[str]) -> Options:
    """Options of the command line; ends the process with usage and code 2 where they make no sense."""
    defaults = StateConfig()
    parser = argparse.ArgumentParser(
        prog="evenhand state", description="Fold cache events from Kafka into the map in Postgres, exactly once."
    )
    add_dsn(parser)
    add_kafka(parser)
    add_metrics_port(parser, "/health, /ready and /metrics")
    parser.add_argument("--group-ms", type=int, default=defaults.group_ms_max, help="longest wait of a change")
    parser.add_argument("--start-ms", type=int, default=defaults.start_ms_max, help="longest wait at the start")
    parser.add_argument("--log-format", choices=("json", "console"), default="json")
    parser.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    arguments = parser.parse_args(argv)
    require_given(parser, arguments, "dsn", "kafka")
    return Options(
        database=DatabaseConfig(arguments.dsn, "state"),
        kafka=KafkaConfig.of_environment(arguments.kafka_profile, arguments.kafka, os.environ),
        state=StateConfig(group_ms_max=arguments.group_ms, start_ms_max=arguments.start_ms),
        metrics_port=arguments.metrics_port,
        log_format=arguments.log_format,
        log_level=arguments.log_level,
    )


async def serve(options: Options) -> None:
    """Run until SIGTERM or SIGINT; raises what ends the service."""
    fault_point = FaultPoint(os.environ)
    metrics = StateMetrics()
    reader, writer = KafkaLogReader(options.kafka), KafkaLogWriter(options.kafka)
    async with await Database.open(options.database) as database:
        service = StateService(
            options.state,
            lambda partition_count: PostgresMapStore(database, partition_count, fault_point=fault_point),
            PostgresDirectory(database),
            reader,
            writer,
            metrics,
        )
        pages = None
        if options.metrics_port is not None:
            pages = Pages(usual_pages(service.metrics_page, service.not_ready), options.metrics_port)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, service.stop)
        try:
            if pages is not None:
                await pages.start()
                _log.info("pages are served", address=pages.address)
            await service.run()
        finally:
            await reader.close()
            await writer.close()
            if pages is not None:
                await pages.stop()


def main(argv: Sequence[str]) -> int:
    """``evenhand state …``; faults with a name are told by the caller in one sentence."""
    options = parse(argv)
    configure_logs("state", options.log_format, options.log_level)
    warn_of_plaintext(options.kafka.plaintext_hosts, plaintext_hosts(options.database.dsn, os.environ))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(options))
    return 0
