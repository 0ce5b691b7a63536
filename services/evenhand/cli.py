"""``evenhand COMMAND …``: one door to every part.

Each command is a module with ``main(argv) -> int``, imported only when it is called, so that the SDK's small
install still has a command line and a command starts as fast as its own imports allow.
"""

import errno
import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from evenhand import __version__, core_form
from evenhand.core.errors import EvenhandError

EXIT_FAULT = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

UNWRITTEN = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EPIPE})
"""What the system says where it takes no more of what is written."""


@dataclass(frozen=True, slots=True)
class Command:
    """One command: where it lives, and what it is for."""

    name: str
    module: str
    summary: str


COMMANDS = (
    Command("demo", "evenhand.local.demo", "run the whole system under load for about a minute and compare"),
    Command("up", "evenhand.local.up", "start broker, database and services for your own engines"),
    Command("migrate", "evenhand.postgres.migrate", "bring a database's schema to this version"),
    Command("seed", "evenhand.postgres.seed", "fill pools, tenants and API keys from a YAML file"),
    Command("state", "evenhand.state.main", "run the state service: events from Kafka, folded into Postgres"),
    Command("scheduler", "evenhand.scheduler.main", "run the scheduler daemon of one pool"),
    Command("worker-edge", "evenhand.worker.main", "run the edge of one worker: engine events to Kafka"),
    Command("engine", "evenhand.engine.main", "run a simulated vLLM engine"),
    Command("simulate", "evenhand.simulation.main", "run the whole system, or policies, on a virtual clock"),
)


def usage() -> str:
    """The help page."""
    width = max(len(command.name) for command in COMMANDS)
    lines = [f"  {command.name:<{width}}  {command.summary}" for command in COMMANDS]
    return "\n".join(
        ["usage: evenhand COMMAND [OPTIONS]", "", *lines, "", "evenhand COMMAND --help explains one."]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit code is ours. A fault with a name ends in one sentence on standard error.

    So does an output that cannot be written, or that nobody reads any more.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        try:
            return _run(arguments)
        finally:
            sys.stdout.flush()
    except OSError as error:
        if error.errno not in UNWRITTEN:
            raise
        name = " ".join(["evenhand", *arguments[:1]])
        print(f"{name}: the output cannot be written: {error.strerror}.", file=sys.stderr)
        _drop_output()
        return EXIT_FAULT


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if arguments else EXIT_USAGE
    if arguments[0] == "--version":
        print(f"evenhand {__version__} (core: {core_form()})")
        return 0
    command = next((command for command in COMMANDS if command.name == arguments[0]), None)
    if command is None:
        print(f"evenhand: there is no command {arguments[0]!r}; evenhand --help lists them.", file=sys.stderr)
        return EXIT_USAGE
    try:
        module = importlib.import_module(command.module)
    except ModuleNotFoundError as error:
        extra = "embedded" if command.name in ("demo", "up") else "server"
        print(f"evenhand {command.name} needs {error.name}: pip install 'evenhand[{extra}]'.", file=sys.stderr)
        return EXIT_FAULT
    try:
        code: int = module.main(arguments[1:])
    except EvenhandError as error:
        print(f"evenhand {command.name}: {error}", file=sys.stderr)
        return EXIT_FAULT
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return code


def _drop_output() -> None:
    """Let nobody try again to write what is left in the buffer."""
    try:
        sys.stdout.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


if __name__ == "__main__":
    sys.exit(main())
