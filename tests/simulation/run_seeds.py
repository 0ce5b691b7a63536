"""Runs whole-system seeds by the thousand, in chunks that can be stopped and resumed at any moment.

    python -m tests.simulation.run_seeds --from 1 --count 5000

What was run is counted in ``seeds_run.json`` by a digest of ``services/evenhand``: a count says of which code it
is. Each seed that failed is printed with the command that runs it again, and noted there, too.
"""

import argparse
import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from evenhand.simulation.system.main import line_of, replay_command
from evenhand.simulation.system.system import Options, simulate

HERE = Path(__file__).parent
RECORD = HERE / "seeds_run.json"
SOURCE = HERE.parents[1] / "services" / "evenhand"
CHUNK_SEEDS = 25


def source_digest() -> str:
    """Digest of every source file of the package: names and contents, in order of name."""
    digest = hashlib.sha256()
    for path in sorted(SOURCE.rglob("*.py")):
        digest.update(str(path.relative_to(SOURCE)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def read_record() -> dict[str, dict[str, Any]]:
    return json.loads(RECORD.read_text()) if RECORD.exists() else {}


def add_to_record(code: str, requests: int, seeds: range, failed: list[int]) -> None:
    """Count a chunk, each seed once, however often it is run; the file is replaced in one step."""
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


def done(code: str, seed: int) -> bool:
    ranges = read_record().get(code, {}).get("ranges", [])
    return any(first <= seed <= last for first, last in ranges)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.run_seeds", description=__doc__)
    parser.add_argument("--from", dest="first", type=int, default=1)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--requests", type=int, default=150)
    parser.add_argument("--unrecorded", action="store_true", help="count nothing in the record")
    arguments = parser.parse_args(argv)
    code, failures = source_digest(), 0
    for start in range(arguments.first, arguments.first + arguments.count, CHUNK_SEEDS):
        seeds = range(start, min(start + CHUNK_SEEDS, arguments.first + arguments.count))
        if not arguments.unrecorded and all(done(code, seed) for seed in seeds):
            continue
        failed = []
        for seed in seeds:
            result = simulate(Options(seed, arguments.requests))
            if result.violations:
                failed.append(seed)
                print(line_of(result))
                for sentence in result.violations[:4]:
                    print(f"  violated: {sentence}")
                print(f"  again: {replay_command(result, 'all')}", flush=True)
        failures += len(failed)
        if not arguments.unrecorded:
            add_to_record(code, arguments.requests, seeds, failed)
    print(f"code {code}: {arguments.count} seeds from {arguments.first}, {failures} failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
