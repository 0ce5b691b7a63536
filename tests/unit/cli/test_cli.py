"""The one door: help, unknown commands, and that every command's module has a main."""

import importlib
import os
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

import evenhand
from evenhand import cli


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(command.name in out for command in cli.COMMANDS)


@pytest.mark.parametrize(("name", "form"), [("scheduler.py", "pure"), ("scheduler.cpython-311.so", "compiled")])
def test_the_version_tells_which_core_it_is(
    name: str, form: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(evenhand, "find_spec", lambda module: ModuleSpec(module, None, origin=f"core/{name}"))
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"evenhand {evenhand.__version__} (core: {form})\n"


def test_no_command_is_a_usage_error() -> None:
    assert cli.main([]) == cli.EXIT_USAGE


def test_an_unknown_command_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["fly"]) == cli.EXIT_USAGE
    assert "there is no command 'fly'" in capsys.readouterr().err


@pytest.mark.parametrize("command", cli.COMMANDS, ids=lambda command: command.name)
def test_every_command_can_explain_itself(command: cli.Command, capsys: pytest.CaptureFixture[str]) -> None:
    assert callable(importlib.import_module(command.module).main)
    with pytest.raises(SystemExit) as ended:
        raise SystemExit(cli.main([command.name, "--help"]))
    assert ended.value.code == 0
    assert command.name in capsys.readouterr().out


FULL = Path("/dev/full")
"""A device with no space left."""


@pytest.mark.skipif(not FULL.exists(), reason="there is no /dev/full here")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("arguments", [["--help"], ["simulate", "--help"]])
def test_an_output_that_cannot_be_written_is_one_sentence(arguments: list[str], unbuffered: str) -> None:
    with FULL.open("w") as full:
        ended = _run(arguments, full.fileno(), unbuffered)
    assert ended.returncode == cli.EXIT_FAULT
    assert ended.stderr == f"evenhand {arguments[0]}: the output cannot be written: No space left on device.\n"


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_an_output_that_nobody_reads_is_one_sentence(unbuffered: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        ended = _run(["simulate", "--help"], writing, unbuffered)
    finally:
        os.close(writing)
    assert ended.returncode == cli.EXIT_FAULT
    assert ended.stderr == "evenhand simulate: the output cannot be written: Broken pipe.\n"


def _run(arguments: list[str], output: int, unbuffered: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "evenhand.cli", *arguments],
        stdout=output,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        text=True,
        timeout=60,
        check=False,
    )
