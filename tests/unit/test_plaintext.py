"""What leaves the machine in the clear is said once, at the start."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from structlog.testing import capture_logs

from evenhand.kafka import KafkaConfig, SecurityProtocol
from evenhand.postgres.database import plaintext_hosts
from evenhand.scheduler import main as scheduler
from evenhand.state import main as state
from evenhand.worker import main as worker_edge

REMOTE = ("--kafka=broker.example:9092,127.0.0.1:9092", "--dsn=postgresql://u:p@db.example:5432/d")
LOCAL = ("--kafka=127.0.0.1:9092,[::1]:9092", "--dsn=postgresql://u:p@127.0.0.1/d")


@pytest.mark.parametrize(
    ("dsn", "hosts"),
    [
        ("postgresql://u:p@db.example:5432/d", ("db.example",)),
        ("postgresql://u:p@db.example/d?sslmode=prefer", ("db.example",)),
        ("postgresql://u:p@[2001:db8::1]:5432,127.0.0.1:5433/d", ("2001:db8::1",)),
        ("postgresql://u@/d?host=db.example", ("db.example",)),
        ("postgresql://u:p@db.example/d?sslmode=require", ()),
        ("postgresql://u:p@db.example/d?sslmode=verify-full", ()),
        ("postgresql://u:p@localhost:5432/d", ()),
        ("postgresql://u:p@[::1]:5432/d", ()),
        ("postgresql://u@/d?host=%2Frun%2Fpostgres&port=5432", ()),
        ("postgresql://u@%2Frun%2Fpostgres/d", ()),
        ("postgresql:///d", ()),
        ("postgresql://[u", ()),
    ],
)
def test_which_databases_may_be_reached_in_the_clear(dsn: str, hosts: tuple[str, ...]) -> None:
    assert plaintext_hosts(dsn, {}) == hosts


def test_the_environment_fills_what_the_address_leaves_open() -> None:
    assert plaintext_hosts("postgresql:///d", {"PGHOST": "db.example"}) == ("db.example",)
    assert plaintext_hosts("postgresql://db.example/d", {"PGSSLMODE": "verify-full"}) == ()


def test_which_brokers_are_reached_in_the_clear() -> None:
    bootstrap = "a.example:9092,127.0.0.1:9092,[::1]:9092"
    assert KafkaConfig.production(bootstrap).plaintext_hosts == ("a.example",)
    secure = KafkaConfig.production(bootstrap, security_protocol=SecurityProtocol.SSL)
    assert secure.plaintext_hosts == ()


def run_state(argv: Sequence[str]) -> int:
    return state.main(list(argv))


def run_scheduler(argv: Sequence[str]) -> int:
    return scheduler.main(["--pool=p", "--secret-file=/nowhere", *argv])


def run_edge(argv: Sequence[str]) -> int:
    return worker_edge.main(["--worker-id=w", "--pool=p", "--address=http://h:1", "--no-events", argv[0]])


@pytest.mark.parametrize(
    ("run", "module", "serve"),
    [
        (run_state, state, "serve"),
        (run_scheduler, scheduler, "serve"),
        (run_edge, worker_edge, "_run_until_signal"),
    ],
)
def test_a_service_warns_once_at_its_start_and_goes_on(
    run: Callable[[Sequence[str]], int], module: Any, serve: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("PGHOST", "PGSSLMODE", "EVENHAND_KAFKA_SECURITY"):
        monkeypatch.delenv(variable, raising=False)
    served: list[object] = []

    async def instead(*arguments: object) -> None:
        served.append(arguments)

    monkeypatch.setattr(module, serve, instead)
    monkeypatch.setattr(module, "configure_logs", lambda *_: None)
    with capture_logs() as lines:
        assert run(REMOTE) == 0
    (line,) = lines
    assert line["log_level"] == "warning"
    assert line["kafka"] == ["broker.example"]
    assert line["postgres"] == ([] if module is worker_edge else ["db.example"])
    assert "u:p" not in str(line)
    with capture_logs() as lines:
        assert run(LOCAL) == 0
    assert not lines
    assert len(served) == 2
