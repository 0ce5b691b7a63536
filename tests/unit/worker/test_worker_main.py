"""The command's options and faults: one sentence; exit code 2 for what cannot be read, 1 for what cannot work."""

import asyncio
from typing import cast

import pytest

from evenhand.core.errors import SchemaMismatch
from evenhand.memory import MemoryLog, MemoryLogReader, MemoryLogWriter
from evenhand.worker import main as worker_main
from evenhand.worker.load import EnginePolled
from evenhand.worker.main import main, parse

GOOD = [
    "--worker-id=w", "--pool=p", "--address=http://engine.example:8000", "--kv-events=tcp://engine.example:5557",
    "--replay=tcp://[::1]:5657", "--kafka=127.0.0.1:9092",
]  # fmt: skip


def exit_code(argv: list[str]) -> int:
    """As a shell sees it."""
    try:
        return main(argv)
    except SystemExit as ended:
        return cast("int", ended.code)


def test_good_options_become_one_configuration() -> None:
    options = parse([*GOOD, "--checkpoint=/tmp/x", "--slots=8", "--metrics-port=0", "--leave"])
    assert options.edge.kv_events == "tcp://engine.example:5557"
    assert options.edge.slots == 8
    assert options.leave
    assert parse([*GOOD, "--kv-events=ipc:///run/engine.kv"]).edge.kv_events == "ipc:///run/engine.kv"
    assert (
        parse(
            ["--worker-id=w", "--pool=p", "--address=http://h:1", "--no-events", "--kafka=h:1"]
        ).edge.sends_events
        is False
    )


@pytest.mark.parametrize(
    ("code", "changed", "named"),
    [
        (1, ["--address=engine:8000"], "address"),
        (1, ["--address=http://"], "address"),
        (1, ["--kv-events=http://h:1"], "kv_events"),
        (1, ["--kv-events=tcp://*:5557"], "kv_events"),
        (1, ["--kv-events=tcp://h:99999"], "kv_events"),
        (1, ["--replay=h:1"], "replay"),
        (1, ["--kafka=nowhere"], "Kafka"),
        (1, ["--kafka-profile=magic"], "profile"),
        (1, ["--worker-id="], "worker_id"),
        (1, ["--pool=" + "x" * 300], "pool_id"),
        (1, ["--slots=0"], "slots"),
        (2, ["--slots=many"], "slots"),
        (1, ["--load-interval-ms=1"], "load_interval_ms"),
        (2, ["--metrics-port=70000"], "metrics port"),
        (2, ["--no-events"], "--no-events"),
        (2, ["--unheard-of"], "unheard-of"),
    ],
)
def test_a_bad_value_is_one_sentence_that_names_it(
    code: int, changed: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code([*GOOD, *changed]) == code
    told = capsys.readouterr().err
    assert named in told
    assert told.count("\n") == 1
    assert told.startswith("evenhand worker-edge: ")


def test_what_is_needed_is_asked_for(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("EVENHAND_KAFKA", raising=False)
    assert exit_code([]) == 2
    assert exit_code(GOOD[:-1]) == 2
    assert "EVENHAND_KAFKA" in capsys.readouterr().err
    monkeypatch.setenv("EVENHAND_KAFKA", "broker:9092")
    assert parse(GOOD[:-1]).kafka.bootstrap == "broker:9092"


class Failing:
    """A source that ends with a fault."""

    replays = False

    def __init__(self, *faults: Exception) -> None:
        self.faults = faults

    async def run(self, put: object) -> None:
        await asyncio.sleep(0)
        raise ExceptionGroup("parts", list(self.faults))


class Silent:
    """A poller of an engine that says nothing."""

    async def __aenter__(self) -> "Silent":
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def poll(self) -> EnginePolled:
        return EnginePolled(False, None, None)


def failing_edge(patch: pytest.MonkeyPatch, *faults: Exception) -> list[str]:
    """What starts the command with a source that fails so."""
    log = MemoryLog(partitions=1, now_ms=lambda: 0)
    patch.setattr(worker_main, "ZmqSource", lambda *_: Failing(*faults))
    patch.setattr(worker_main, "EnginePoller", lambda *_: Silent())
    patch.setattr(worker_main, "KafkaLogWriter", lambda _: MemoryLogWriter(log))
    patch.setattr(worker_main, "KafkaLogReader", lambda _: MemoryLogReader(log))
    patch.setattr(worker_main, "configure_logs", lambda *_: None)
    return [*GOOD, "--model=m", "--block-size=16"]


def test_a_fault_with_a_name_in_any_task_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = failing_edge(monkeypatch, SchemaMismatch("The engine speaks version 9."))
    assert exit_code(argv) == 1
    assert capsys.readouterr().err == "evenhand worker-edge: The engine speaks version 9.\n"


def test_a_fault_without_a_name_is_not_hidden_behind_one_with(monkeypatch: pytest.MonkeyPatch) -> None:
    argv = failing_edge(monkeypatch, SchemaMismatch("Named."), KeyError("bug"))
    with pytest.raises(ExceptionGroup) as raised:
        exit_code(argv)
    assert raised.value.split(KeyError)[0] is not None
