"""Every option of every command reaches what the command runs: another value, another thing run.

The options are taken from ``--help``, so one that is added without a row here fails. What a command runs is caught
at the call that would run it: its settings as objects, not as text of the command line.
"""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from evenhand.cli import COMMANDS
from evenhand.local import demo, up
from evenhand.postgres import migrate, seed
from evenhand.scheduler import main as scheduler
from evenhand.state import main as state
from evenhand.worker import main as worker_edge

Catch = Callable[[pytest.MonkeyPatch, list[str]], None]

DSN = ["--dsn", "postgresql://u@127.0.0.1:1/one"]
KAFKA = ["--kafka", "127.0.0.1:1"]
SHARED = {"--log-format": ["console"], "--log-level": ["debug"], "--metrics-port": ["7"]}
ON_KAFKA = {"--kafka": ["127.0.0.1:2"], "--kafka-profile": ["embedded"]}
ON_DATABASE = {"--dsn": ["postgresql://u@127.0.0.1:1/other"]}
WORKER = ["--worker", "http://127.0.0.1:1"]

BASE: dict[str, list[str]] = {
    "scheduler": ["--pool", "p", *KAFKA, *DSN, "--tls-certificate", "c", "--tls-key", "k"],
    "state": [*KAFKA, *DSN],
    "worker-edge": ["--worker-id=w", "--pool=p", "--address=http://h:1", "--kv-events=tcp://h:2", *KAFKA],
    "migrate": DSN,
    "seed": [*DSN, "seed.yaml"],
    "up": WORKER,
    "demo": [],
}
OPTIONS: dict[str, dict[str, list[str]]] = {
    "scheduler": SHARED | ON_KAFKA | ON_DATABASE | {
        "--pool": ["q"], "--listen": ["127.0.0.1:2"], "--secret-file": ["other.secret"],
        "--tls-certificate": ["c2"], "--tls-key": ["k2"], "--tls-ca": ["a2"], "--insecure-loopback": [],
        "--reflection": [], "--lease-ttl-ms": ["1234"], "--ticket-ttl-ms": ["1234"], "--window-delay-ms": ["9.5"],
        "--output-estimator": ["p75"],
    },
    "state": SHARED | ON_KAFKA | ON_DATABASE | {"--group-ms": ["3"], "--start-ms": ["77"]},
    "worker-edge": SHARED | ON_KAFKA | {
        "--worker-id": ["w2"], "--pool": ["q"], "--address": ["http://h:9"], "--kv-events": ["tcp://h:9"],
        "--replay": ["tcp://h:8"], "--topic": ["kv@"], "--checkpoint": ["w.checkpoint"], "--model": ["m"],
        "--block-size": ["32"], "--kv-blocks": ["99"], "--slots": ["5"], "--data-parallel-rank": ["1"],
        "--salt-generation": ["2"], "--load-interval-ms": ["500"], "--announce-interval-ms": ["4000"],
        "--leave": [],
    },
    "migrate": ON_DATABASE,
    "seed": ON_DATABASE,
    "up": {
        "--worker": ["http://127.0.0.1:3"], "--kv-events": ["tcp://127.0.0.1:4"], "--replay": ["tcp://127.0.0.1:5"],
        "--slots": ["6"], "--file": ["stack.yaml"], "--pool": ["q"], "--listen": ["127.0.0.1:2"],
        "--data-dir": ["elsewhere"],
    },
    "demo": {
        "--seconds": ["2"], "--seed": ["5"], "--workload": ["mooncake"], "--policies": ["round-robin"],
        "--chart": ["other.png"],
    },
}  # fmt: skip
INSTEAD = {
    ("scheduler", "--insecure-loopback"): ["--pool", "p", *KAFKA, *DSN],
    ("up", "--file"): [],
    ("up", "--kv-events"): WORKER,
    ("up", "--replay"): [*WORKER, "--kv-events", "tcp://127.0.0.1:4"],
}
"""Where an option cannot stand beside the usual ones."""


def catch(module: Any, name: str, caught: list[Any], patch: pytest.MonkeyPatch) -> None:
    async def instead(*arguments: object) -> None:
        caught.append(arguments)

    patch.setattr(module, name, instead)


def run(command: str, argv: Sequence[str], patch: pytest.MonkeyPatch) -> tuple[list[Any], list[Any]]:
    """What the command would run, and how it would log."""
    caught: list[Any] = []
    logs: list[Any] = []
    module: Any = {
        "scheduler": scheduler, "state": state, "worker-edge": worker_edge, "migrate": migrate, "seed": seed,
        "up": up, "demo": demo,
    }[command]  # fmt: skip
    if hasattr(module, "configure_logs"):
        patch.setattr(module, "configure_logs", lambda *arguments: logs.append(arguments))
    match command:
        case "scheduler" | "state":
            catch(module, "serve", caught, patch)
        case "worker-edge":
            catch(module, "_run_until_signal", caught, patch)
        case "up":
            catch(module, "_serve", caught, patch)
            patch.setattr(module, "Console", FakeConsole)
        case "demo":
            catch(module, "run", caught, patch)
            patch.setattr(module, "Console", FakeConsole)
        case "migrate" | "seed":
            catch(module, "migrate" if command == "migrate" else "_seed", caught, patch)
            patch.setattr(seed, "read_seed", lambda path: path)
    try:
        module.main(list(argv))
    except (TypeError, AttributeError):  # what was caught gave no result to report on
        assert command in ("migrate", "seed", "demo")
    assert caught
    return caught, logs


class FakeConsole:
    """Says nothing and looks the same each time."""

    is_terminal = True

    def print(self, *words: object) -> None:
        pass

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FakeConsole)

    __hash__ = None  # type: ignore[assignment]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "stack.yaml").write_text("pool: filed\nworkers:\n  - address: http://127.0.0.1:9\n")
    monkeypatch.setattr(up, "require_free", lambda _: None)


@pytest.mark.parametrize("command", OPTIONS)
def test_every_option_of_the_help_page_is_tested(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    module: Any = {each.name: each for each in COMMANDS}[command].module
    with pytest.raises(SystemExit):
        __import__(module, fromlist=["main"]).main(["--help"])
    shown = set(re.findall(r"^  (?:-\w, )?(--[a-z-]+)", capsys.readouterr().out, re.MULTILINE)) - {"--help"}
    assert shown == set(OPTIONS[command]) | ({"--no-events"} if command == "worker-edge" else set())


@pytest.mark.parametrize(("command", "option"), [(name, each) for name in OPTIONS for each in OPTIONS[name]])
def test_every_option_reaches_what_is_run(command: str, option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    base = INSTEAD.get((command, option), BASE[command])
    usual = run(command, base or BASE[command], monkeypatch)
    assert run(command, [*base, option, *OPTIONS[command][option]], monkeypatch) != usual


def test_an_engine_without_events_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    caught, _ = run("worker-edge", [*BASE["worker-edge"][:3], *KAFKA, "--no-events"], monkeypatch)
    assert caught[0][0].edge.sends_events is False


def test_every_command_is_tested() -> None:
    # tests/unit/engine/test_engine_config.py: every field is an option of its name;
    # tests/simulation/test_command.py and tests/unit/trials/test_main.py: the simulations'.
    tested_elsewhere = {"engine", "simulate"}
    assert set(OPTIONS) | tested_elsewhere == {command.name for command in COMMANDS}


def test_a_command_run_twice_alike_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the comparison above would hold for an option that does nothing."""
    for command, argv in BASE.items():
        assert run(command, argv, monkeypatch) == run(command, argv, monkeypatch), command
