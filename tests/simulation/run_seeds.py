"""Runs whole-system seeds by the thousand, in chunks that can be stopped and resumed at any moment.

    python -m tests.simulation.run_seeds --from 1 --count 5000

What was run is counted in ``seeds_run.json`` by a digest of what ``services/evenhand`` does: a count says of which
code it is. Each seed that failed is printed with the command that runs it again, and noted there, too. With
``--jobs`` so many processes run chunks side by side; one of them counts, and two commands never count at once.
"""

import argparse
import fcntl
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from multiprocessing import connection, get_context, parent_process
from pathlib import Path
from typing import Any

from tests.code_digest import code_digest

from evenhand.simulation.system.main import line_of, replay_command
from evenhand.simulation.system.system import Options, simulate

HERE = Path(__file__).parent
RECORD = HERE / "seeds_run.json"
SOURCE = HERE.parents[1] / "services" / "evenhand"
CHUNK_SEEDS = 25


def source_digest() -> str:
    return code_digest(SOURCE.rglob("*.py"), SOURCE)


def read_record() -> dict[str, dict[str, Any]]:
    return json.loads(RECORD.read_text()) if RECORD.exists() else {}


@dataclass(frozen=True)
class Chunk:
    """What a chunk of seeds came to."""

    seeds: range
    failed: tuple[int, ...]
    lines: tuple[str, ...]
    """What to print of those that failed."""
    requests: int
    cpu_s: float


def run_chunk(seeds: range, requests: int) -> Chunk:
    began_s, failed, lines, total = time.process_time(), [], [], 0
    for seed in seeds:
        result = simulate(Options(seed, requests))
        total += result.requests
        if result.violations:
            failed.append(seed)
            told = (f"  violated: {sentence}" for sentence in result.violations[:4])
            lines += [line_of(result), *told, f"  again: {replay_command(result, 'all')}"]
    return Chunk(seeds, tuple(failed), tuple(lines), total, time.process_time() - began_s)


@contextmanager
def record_locked() -> Iterator[None]:
    """One process at a time changes the record; the lock ends with whoever holds it."""
    folder = os.open(HERE, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def add_to_record(code: str, requests: int, seeds: range, failed: tuple[int, ...]) -> None:
    """Count a chunk, each seed once, however often it is run; the file is replaced in one step."""
    with record_locked():
        record = read_record()
        entry = record.setdefault(code, {"requests_each": requests, "seeds": 0, "ranges": [], "failed": []})
        merged: list[list[int]] = []
        for first, last in sorted([*entry["ranges"], [seeds[0], seeds[-1]]]):
            if merged and first <= merged[-1][1] + 1:
                merged[-1][1] = max(merged[-1][1], last)
            else:
                merged.append([first, last])
        entry["ranges"] = merged
        entry["seeds"] = sum(last - first + 1 for first, last in merged)
        entry["failed"] = sorted({*entry["failed"], *failed})
        beside = RECORD.with_suffix(f".{os.getpid()}.tmp")
        beside.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
        beside.replace(RECORD)


def done(code: str, seeds: range) -> bool:
    ranges = read_record().get(code, {}).get("ranges", [])
    return all(any(first <= seed <= last for first, last in ranges) for seed in seeds)


def chunks(first: int, count: int) -> Iterator[range]:
    for start in range(first, first + count, CHUNK_SEEDS):
        yield range(start, min(start + CHUNK_SEEDS, first + count))


def die_with_parent() -> None:
    """A worker of a command that was killed ends, too."""
    parent = parent_process()
    assert parent is not None, "a worker has a parent"

    def watch() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def run_all(todo: Iterator[range], requests: int, jobs: int) -> Iterator[Chunk]:
    """Each chunk as it ends; no more than ``jobs`` of them are under way or waiting to be taken."""
    if jobs == 1:
        for seeds in todo:
            yield run_chunk(seeds, requests)
        return
    with ProcessPoolExecutor(jobs, get_context("fork"), die_with_parent) as pool:
        running: set[Future[Chunk]] = set()
        while True:
            for seeds in islice(todo, jobs - len(running)):
                running.add(pool.submit(run_chunk, seeds, requests))
            if not running:
                return
            ended, running = wait(running, return_when=FIRST_COMPLETED)
            for future in ended:
                yield future.result()


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.run_seeds", description=__doc__)
    parser.add_argument("--from", dest="first", type=int, default=1)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--requests", type=int, default=150)
    parser.add_argument("--jobs", type=int, default=1, help="processes that run chunks side by side")
    parser.add_argument("--unrecorded", action="store_true", help="count nothing in the record")
    arguments = parser.parse_args(argv)
    code, seeds_run, failures, requests, cpu_s = source_digest(), 0, 0, 0, 0.0
    todo = (
        seeds
        for seeds in chunks(arguments.first, arguments.count)
        if arguments.unrecorded or not done(code, seeds)
    )
    for chunk in run_all(todo, arguments.requests, max(1, arguments.jobs)):
        for line in chunk.lines:
            print(line, flush=True)
        seeds_run += len(chunk.seeds)
        failures += len(chunk.failed)
        requests += chunk.requests
        cpu_s += chunk.cpu_s
        if not arguments.unrecorded:
            add_to_record(code, arguments.requests, chunk.seeds, chunk.failed)
    rate = f", {requests / cpu_s:.0f} requests a second of CPU" if cpu_s else ""
    skipped = f" ({arguments.count - seeds_run} counted before)" if seeds_run < arguments.count else ""
    print(
        f"code {code}: {seeds_run} seeds run of {arguments.count} from {arguments.first}{skipped}, "
        f"{failures} failed; {requests} requests in {cpu_s:.0f} s{rate}"
    )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
