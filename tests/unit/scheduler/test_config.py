"""Settings that stop the start, each in one sentence."""

from collections.abc import Callable
from pathlib import Path

import pytest

from evenhand.core.errors import InvalidConfig
from evenhand.core.facts import OutputEstimatorKind, SchedulerConfig
from evenhand.core.ids import PoolId
from evenhand.scheduler.config import DaemonConfig, TlsConfig
from evenhand.scheduler.main import config_of, main, parser

TLS = TlsConfig(Path("c.pem"), Path("k.pem"))
BASE = ["--pool", "p", "--kafka", "127.0.0.1:1", "--dsn", "postgresql://127.0.0.1:1/x"]


def config(**changed: object) -> DaemonConfig:
    return DaemonConfig(SchedulerConfig(PoolId("p")), Path("secret"), **changed)  # type: ignore[arg-type]


def core(**changed: object) -> DaemonConfig:
    return DaemonConfig(SchedulerConfig(PoolId("p"), **changed), Path("secret"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: config(listen="0.0.0.0:7070"), "beyond loopback, needs TLS"),
        (lambda: config(listen="[::]:7070"), "beyond loopback, needs TLS"),
        (lambda: config(listen="example.org:7070"), "beyond loopback, needs TLS"),
        (lambda: config(listen="0.0.0.0:7070", insecure_loopback=True), "on loopback only"),
        (lambda: config(listen="0.0.0.0:7070", insecure_loopback=True, tls=TLS), "on loopback only"),
        (lambda: config(metrics_listen="0.0.0.0:9"), "served on loopback only"),
        (lambda: config(listen="nowhere"), "listen must be HOST:PORT"),
        (lambda: config(listen=":7070"), "listen must be HOST:PORT"),
        (lambda: config(listen="127.0.0.1:99999"), "listen must be HOST:PORT"),
        (lambda: config(listen="127.0.0.1:x"), "listen must be HOST:PORT"),
        (lambda: config(lease_ttl_ms=0), "lease_ttl_ms must be at least 1"),
        (lambda: config(session_calls_max=-1), "session_calls_max must be at least 1"),
        (lambda: config(metric_tenants_max=-1), "metric_tenants_max must not be negative"),
        (lambda: DaemonConfig(SchedulerConfig(PoolId("")), Path("s")), "must be told its pool"),
        (lambda: core(ticket_ttl_ms=0), "ticket_ttl_ms must be at least 3"),
        (lambda: core(window_delay_ms=-1.0), "window_delay_ms must lie between"),
        (lambda: core(window_delay_ms=float("nan")), "window_delay_ms must lie between"),
        (lambda: core(window_delay_ms=float("inf")), "window_delay_ms must lie between"),
        (lambda: core(worker_stale_after_ms=9, worker_lost_after_ms=8), "worker_stale_after_ms must be at most"),
        (lambda: TlsConfig.of(Path("c"), None, None), "both a certificate file and a key file"),
    ],
)
def test_an_impossible_setting_is_named(build: Callable[[], object], words: str) -> None:
    with pytest.raises(InvalidConfig, match=words) as refused:
        build()
    assert str(refused.value).endswith(".")


def test_what_is_allowed() -> None:
    config(listen="0.0.0.0:7070", tls=TLS)
    config(listen="[::1]:0", insecure_loopback=True)
    config(listen="127.0.0.1:7070")


def test_the_command_line_sets_what_it_says() -> None:
    arguments = [*BASE, "--listen", "127.0.0.1:1", "--metrics-port", "9", "--insecure-loopback", "--reflection"]
    arguments += ["--lease-ttl-ms", "7", "--ticket-ttl-ms", "8", "--window-delay-ms", "9.5"]
    arguments += ["--output-estimator", "decayed_max"]
    settings = config_of(parser().parse_args(arguments))
    assert settings.pool_id == "p"
    assert settings.metrics_listen == "127.0.0.1:9"
    assert (settings.insecure_loopback, settings.reflection) == (True, True)
    assert (settings.lease_ttl_ms, settings.core.ticket_ttl_ms, settings.core.window_delay_ms) == (7, 8, 9.5)
    assert settings.core.output_estimator is OutputEstimatorKind.DECAYED_MAX
    given = config_of(parser().parse_args([*BASE, "--tls-certificate", "c", "--tls-key", "k", "--tls-ca", "a"]))
    assert given.tls == TlsConfig(Path("c"), Path("k"), Path("a"))


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--listen", "0.0.0.0:7070"], "beyond loopback, needs TLS and API keys"),
        (["--tls-key", "k"], "both a certificate file and a key file"),
        (["--kafka", "nonsense"], "Kafka"),
        ([], "database"),
    ],
)
def test_a_fault_at_the_start_is_one_sentence_and_an_exit_code(
    more: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*BASE, *more]) == 1
    told = capsys.readouterr().err.strip().splitlines()
    assert len(told) == 1
    assert told[0].startswith("evenhand scheduler: ")
    assert words in told[0]
