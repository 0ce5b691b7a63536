"""The command's options: one sentence and exit code 2 for what makes no sense."""

import pytest

from evenhand.worker.main import main, parse

GOOD = [
    "--worker-id=w", "--pool=p", "--address=http://engine.example:8000", "--kv-events=tcp://engine.example:5557",
    "--replay=tcp://[::1]:5657", "--kafka=127.0.0.1:9092",
]  # fmt: skip


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
    ("changed", "named"),
    [
        (["--address=engine:8000"], "address"),
        (["--address=http://"], "address"),
        (["--kv-events=http://h:1"], "kv_events"),
        (["--kv-events=tcp://*:5557"], "kv_events"),
        (["--kv-events=tcp://h:99999"], "kv_events"),
        (["--replay=h:1"], "replay"),
        (["--kafka=nowhere"], "Kafka"),
        (["--kafka-profile=magic"], "profile"),
        (["--worker-id="], "worker_id"),
        (["--pool=" + "x" * 300], "pool_id"),
        (["--slots=0"], "slots"),
        (["--slots=many"], "slots"),
        (["--load-interval-ms=1"], "load_interval_ms"),
        (["--metrics-port=70000"], "metrics port"),
        (["--no-events"], "--no-events"),
        (["--unheard-of"], "unheard-of"),
    ],
)
def test_a_bad_value_is_one_sentence_that_names_it(
    changed: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*GOOD, *changed]) == 2
    told = capsys.readouterr().err
    assert named in told
    assert told.count("\n") == 1
    assert told.startswith("evenhand worker-edge: ")


def test_what_is_needed_is_asked_for(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("EVENHAND_KAFKA", raising=False)
    assert main([]) == 2
    assert main(GOOD[:-1]) == 2
    assert "EVENHAND_KAFKA" in capsys.readouterr().err
    monkeypatch.setenv("EVENHAND_KAFKA", "broker:9092")
    assert parse(GOOD[:-1]).kafka.bootstrap == "broker:9092"
