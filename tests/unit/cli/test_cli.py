"""The one door: help, unknown commands, and that every command's module has a main."""

import importlib

import pytest

from evenhand import cli


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(command.name in out for command in cli.COMMANDS)


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
