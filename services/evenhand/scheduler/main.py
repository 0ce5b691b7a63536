"""``evenhand scheduler``: the daemon of one pool over Kafka and Postgres, as a process.

A fault at the start (a wrong setting, a port in use, no broker, a database without migrations) ends in one
sentence and exit code 1. SIGTERM and SIGINT drain and stop; a second one stops at once.
"""

import argparse
import asyncio
import gc
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import uvloop

from evenhand.core.errors import EvenhandError, Unavailable
from evenhand.core.facts import OutputEstimatorKind, SchedulerConfig
from evenhand.core.ids import PoolId
from evenhand.kafka.config import KafkaConfig
from evenhand.kafka.reader import KafkaLogReader
from evenhand.kafka.writer import KafkaLogWriter
from evenhand.logs import configure_logs
from evenhand.options import add_dsn, add_kafka, add_metrics_port, require_given
from evenhand.plaintext import warn_of_plaintext
from evenhand.ports import KV_TOPIC
from evenhand.postgres.database import Database, DatabaseConfig, plaintext_hosts
from evenhand.postgres.directory import PostgresDirectory
from evenhand.postgres.lease_store import PostgresLeaseStore
from evenhand.postgres.map_store import PostgresMapStore
from evenhand.postgres.migrate import require_schema
from evenhand.scheduler.config import DaemonConfig, TlsConfig
from evenhand.scheduler.daemon import START_TIMEOUT_S, DaemonPorts, SchedulerDaemon

EXIT_FAULT = 1
EXIT_STOPPED_HARD = 130
LISTEN_DEFAULT = "127.0.0.1:7077"
"""Where the SDK looks, too."""
SECRET_FILE_DEFAULT = Path("~/.local/state/evenhand/master.secret")
DATABASE_CONNECTIONS = 4
LEASE_CONNECTIONS = 2
"""Of their own, for renewals and checkpoints: whatever else is asked of the database must not cost the lease."""


def parser() -> argparse.ArgumentParser:
    """The command line; every option is explained by --help."""
    options = argparse.ArgumentParser(prog="evenhand scheduler", description="Schedule the requests of one pool.")
    options.add_argument("--pool", required=True, help="the pool to schedule")
    options.add_argument(
        "--listen", default=LISTEN_DEFAULT, help="HOST:PORT of the gRPC service (default: %(default)s)"
    )
    add_kafka(options)
    add_dsn(options)
    add_metrics_port(options, "/metrics, /status and /healthz")
    options.add_argument(
        "--secret-file", type=Path, default=SECRET_FILE_DEFAULT, help="the master secret, mode 0600"
    )
    options.add_argument("--tls-certificate", type=Path, help="PEM file of the server's certificate chain")
    options.add_argument("--tls-key", type=Path, help="PEM file of the certificate's key")
    options.add_argument("--tls-ca", type=Path, help="PEM file: clients must show a certificate of this authority")
    options.add_argument(
        "--insecure-loopback", action="store_true", help="development: serve calls without an API key on loopback"
    )
    options.add_argument("--reflection", action="store_true", help="serve gRPC reflection")
    options.add_argument(
        "--lease-ttl-ms", type=int, default=5_000, help="a successor waits so long for a dead owner"
    )
    options.add_argument(
        "--ticket-ttl-ms", type=int, default=30_000, help="a ticket ends so long after its renewal"
    )
    options.add_argument("--window-delay-ms", type=float, default=750.0, help="how far affinity may reach")
    options.add_argument(
        "--output-estimator",
        choices=[kind.value for kind in OutputEstimatorKind],
        default=OutputEstimatorKind.MEAN.value,
        help="what stands for the output length of a request that does not tell it (default: %(default)s)",
    )
    options.add_argument("--log-format", choices=("json", "console"), default="json")
    options.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    return options


def config_of(arguments: argparse.Namespace) -> DaemonConfig:
    """The settings in a parsed command line; raises ``InvalidConfig``."""
    tls = None
    if arguments.tls_certificate or arguments.tls_key or arguments.tls_ca:
        tls = TlsConfig.of(arguments.tls_certificate, arguments.tls_key, arguments.tls_ca)
    return DaemonConfig(
        core=SchedulerConfig(
            pool_id=PoolId(arguments.pool),
            ticket_ttl_ms=arguments.ticket_ttl_ms,
            window_delay_ms=arguments.window_delay_ms,
            output_estimator=OutputEstimatorKind(arguments.output_estimator),
        ),
        secret_file=arguments.secret_file.expanduser(),
        listen=arguments.listen,
        metrics_listen=f"127.0.0.1:{arguments.metrics_port}" if arguments.metrics_port is not None else None,
        tls=tls,
        insecure_loopback=arguments.insecure_loopback,
        reflection=arguments.reflection,
        lease_ttl_ms=arguments.lease_ttl_ms,
    )


@asynccontextmanager
async def real_ports(kafka: KafkaConfig, dsn: str) -> AsyncIterator[DaemonPorts]:
    """Kafka and Postgres; raises ``InvalidConfig``, ``SchemaMismatch`` or ``Unavailable`` with one sentence."""
    async with (
        await Database.open(DatabaseConfig(dsn, "scheduler", DATABASE_CONNECTIONS)) as database,
        await Database.open(DatabaseConfig(dsn, "scheduler-lease", LEASE_CONNECTIONS)) as lease_database,
    ):
        async with database.connection() as connection:
            await require_schema(connection)
        reader, writer = KafkaLogReader(kafka), KafkaLogWriter(kafka)
        try:
            yield DaemonPorts(
                reader=reader,
                writer=writer,
                map_store=PostgresMapStore(database, await _partition_count(reader)),
                leases=PostgresLeaseStore(lease_database),
                directory=PostgresDirectory(database),
            )
        finally:
            await reader.close()
            await writer.close()


async def _partition_count(reader: KafkaLogReader) -> int:
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            return await reader.partition_count(KV_TOPIC)
    except TimeoutError as error:
        raise Unavailable(f"Kafka did not answer within {START_TIMEOUT_S:.0f} s.") from error


async def serve(config: DaemonConfig, kafka: KafkaConfig, dsn: str) -> None:
    """Run until SIGTERM or SIGINT."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _stop_or_exit, stop)
    async with real_ports(kafka, dsn) as ports, SchedulerDaemon(config, ports) as daemon:
        await _first_of(daemon.live_map.caught_up, stop)
        if stop.is_set():
            return
        gc.collect()
        gc.freeze()  # the loaded map is permanent: a collection need not look at it
        pages = daemon.metrics_address or "no port"
        print(f"evenhand scheduler: pool {config.pool_id} on {daemon.address}, pages on {pages}", flush=True)
        await stop.wait()


async def _first_of(*events: asyncio.Event) -> None:
    """Return once one of the events is set."""
    waits = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


def _stop_or_exit(stop: asyncio.Event) -> None:
    if stop.is_set():
        sys.exit(EXIT_STOPPED_HARD)
    stop.set()


def main(argv: Sequence[str]) -> int:
    """Entry of ``evenhand scheduler``."""
    options = parser()
    arguments = options.parse_args(argv)
    require_given(options, arguments, "dsn", "kafka")
    configure_logs("scheduler", arguments.log_format, arguments.log_level)
    try:
        config = config_of(arguments)
        kafka = KafkaConfig.of_environment(arguments.kafka_profile, arguments.kafka, os.environ)
        warn_of_plaintext(kafka.plaintext_hosts, plaintext_hosts(arguments.dsn, os.environ))
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(config, kafka, arguments.dsn))
    except EvenhandError as error:
        print(f"evenhand scheduler: {error}", file=sys.stderr)
        return EXIT_FAULT
    return 0
