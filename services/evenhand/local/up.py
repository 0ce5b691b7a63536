"""``evenhand up``: the stack for the user's own engines, until it is stopped.

::

    evenhand up --worker http://gpu-1:8000 --kv-events tcp://gpu-1:5557 \\
                --worker http://gpu-2:8000 --kv-events tcp://gpu-2:5557
    evenhand up --file stack.yaml

Each ``--kv-events``, ``--replay`` and ``--slots`` belongs to the ``--worker`` before it. What is kept lies in
``--data-dir``; each tenant's API key is made at the first start and kept there in ``api_keys.json``, readable by
its owner alone. An engine that does not answer yet is no fault: its edge keeps asking, and the worker joins when
it answers; what becomes of each worker is told as it changes.
"""

import argparse
import asyncio
import functools
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from evenhand.core.errors import InvalidConfig, Unavailable
from evenhand.local.stack import Stack, StackConfig, require_free
from evenhand.local.stack_file import StackFile, StackWorker, load_stack, parse_stack
from evenhand.logs import configure_logs

DATA_DIR_DEFAULT = Path("~/.local/share/evenhand")
LISTEN_DEFAULT = "127.0.0.1:7077"
KEYS_FILE = "api_keys.json"
REPORT_SECONDS = 0.5
PATIENCE_REPORTS = 6
"""A worker that has not joined after so many looks is said not to answer."""


class _AppendWorker(argparse.Action):
    """Begins a worker at ``--worker`` and gives it the endpoints that follow."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, value: Any, option: str | None = None) -> None:  # fmt: skip # noqa: E501
        workers = namespace.workers = list(namespace.workers or [])
        if self.const == "address":
            workers.append({"address": value})
        elif not workers:
            parser.error(f"{option} {value} stands before the --worker that it belongs to")
        else:
            workers[-1] = {**workers[-1], self.const: value}


def parser() -> argparse.ArgumentParser:
    """The command line; every option is explained by --help."""
    options = argparse.ArgumentParser(
        prog="evenhand up", description="Start broker, database and services for your own engines."
    )
    for option, key, text in (
        ("--worker", "address", "http://HOST:PORT of an engine; repeat for each"),
        ("--kv-events", "kv_events", "tcp://HOST:PORT of the events of the --worker before it"),
        ("--replay", "replay", "tcp://HOST:PORT of the replay socket of the --worker before it"),
        ("--slots", "slots", "sequences the --worker before it runs at once, its --max-num-seqs (default: 64)"),
    ):
        options.add_argument(option, dest="workers", action=_AppendWorker, const=key, metavar="VALUE", help=text)
    options.add_argument("--file", type=Path, help="a YAML file in place of --worker: pool, workers, tenants")
    options.add_argument("--pool", default="default", help="the pool's name, with --worker (default: %(default)s)")
    options.add_argument(
        "--listen", default=LISTEN_DEFAULT, help="HOST:PORT of the scheduler (default: %(default)s)"
    )
    options.add_argument(
        "--data-dir", type=Path, default=DATA_DIR_DEFAULT, help="what is kept (default: %(default)s)"
    )
    return options


def stack_of(arguments: argparse.Namespace) -> StackFile:
    """The stack asked for; raises ``InvalidConfig`` with one sentence."""
    if bool(arguments.file) == bool(arguments.workers):
        raise InvalidConfig("Name your engines with --worker, or with --file, but not with both.")
    if arguments.file:
        return load_stack(arguments.file)
    return parse_stack({"pool": arguments.pool, "workers": arguments.workers}, "The command line")


def known_keys(data_dir: Path) -> dict[str, str]:
    """Every tenant's API key made so far; raises ``InvalidConfig`` for a file that holds something else."""
    path = data_dir / KEYS_FILE
    try:
        known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except (OSError, ValueError) as error:
        raise InvalidConfig(f"The file of API keys {path} cannot be read: {error}.") from error
    if not isinstance(known, dict) or not all(isinstance(key, str) for key in known.values()):
        raise InvalidConfig(f"The file of API keys {path} does not map tenants to keys.")
    return known


def remember_keys(data_dir: Path, keys: dict[str, str]) -> None:
    """Keep every tenant's API key in a file of mode 0600: the database has none in clear.

    Raises ``InvalidConfig`` where that cannot be done; the file before stays.
    """
    path = data_dir / KEYS_FILE
    scratch = path.with_suffix(".tmp")
    try:
        with open(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
            json.dump(keys, file, indent=2)
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(path)
    except OSError as error:
        raise InvalidConfig(f"The file of API keys {path} cannot be written: {error.strerror}.") from error


def show_addresses(console: Console, stack: Stack, keys: dict[str, str]) -> None:
    """Everything a user needs to connect."""
    say = _sayer(console)
    say(f"scheduler   {stack.scheduler_address}   pool {stack.config.pool}")
    say(f"status      http://127.0.0.1:{stack.metrics_ports['scheduler']}/status")
    say(f"kafka       {stack.broker.bootstrap}   (embedded, in memory)")
    say(f"postgres    {stack.database.dsn}")
    say(f"logs        {stack.logs}")
    for tenant in (api_key.principal for api_key in stack.config.seed.api_keys):
        key = keys.get(tenant, "(made before, and not kept here)")
        say(f"tenant      {tenant}   EVENHAND_ADDRESS={stack.scheduler_address} EVENHAND_API_KEY={key}")
    say("Ctrl-C stops everything.")


def _sayer(console: Console) -> Callable[[str], None]:
    """Prints lines as they are: addresses are not to be wrapped, coloured or taken for markup."""
    return functools.partial(console.print, soft_wrap=True, markup=False, highlight=False)


async def report_workers(console: Console, stack: Stack) -> None:
    """Say of each worker what becomes of it, whenever that changes."""
    say, told, looks = _sayer(console), dict.fromkeys((worker.name for worker in stack.config.workers), ""), 0
    while True:
        await asyncio.sleep(REPORT_SECONDS)
        try:
            page = await stack.status()
        except Unavailable:
            continue
        looks += 1
        for worker in stack.config.workers:
            words = worker_words(page, worker)
            if words == told[worker.name] or (words.startswith("does not") and looks < PATIENCE_REPORTS):
                continue
            told[worker.name] = words
            if words:
                say(f"worker      {worker.name}   {words}")


def worker_words(page: Mapping[str, Any], worker: StackWorker) -> str:
    """What the scheduler's status page says of a worker; empty for what passes by itself."""
    if refusal := page["workers_refused"].get(worker.name):
        return f"is refused: {refusal}"
    if page["pool"] is None:
        return ""
    states = {row["worker_id"]: row["state"] for row in page["pool"]["workers"]}
    match states.get(worker.name):
        case "ready":
            return f"takes requests at {worker.address}"
        case "stale" | None:
            return f"does not answer at {worker.address}; its edge keeps asking"
        case _:
            return ""


async def run(arguments: argparse.Namespace) -> int:
    """Run until SIGINT or SIGTERM."""
    file = stack_of(arguments)
    require_free(arguments.listen)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    data_dir = arguments.data_dir.expanduser().absolute()
    keys = known_keys(data_dir)

    def keep(fresh: dict[str, str]) -> None:
        keys.update(fresh)
        remember_keys(data_dir, keys)

    config = StackConfig(data_dir, file.pool, file.seed(), file.workers, listen=arguments.listen, keep_keys=keep)
    console = Console()
    console.print("starting …")
    serving = asyncio.create_task(_serve(config, keys, console))
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
    if not serving.done():
        console.print("stopping …")
        serving.cancel()
    stopping.cancel()
    result, _ = await asyncio.gather(serving, stopping, return_exceptions=True)
    if isinstance(result, Exception):
        raise result
    return 0


async def _serve(config: StackConfig, keys: dict[str, str], console: Console) -> None:
    async with Stack(config) as stack:
        show_addresses(console, stack, keys)
        await report_workers(console, stack)


def main(argv: Sequence[str]) -> int:
    """The command's entry; a fault reaches the caller as one sentence."""
    arguments = parser().parse_args(argv)
    configure_logs("up", "console", "warning")
    return asyncio.run(run(arguments))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
