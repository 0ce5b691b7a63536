"""Fold and look-up of the cache map, beside ``dynamo.llm.RadixTree`` of ``ai-dynamo-runtime`` on the same input.

    python -m tests.benchmarks.bench_fold [--rival-python PATH] [--blocks N] [--runs N] [--no-rival]

The rival runs in its own environment: ``--rival-python`` names a Python that has the wheel, otherwise one is made
in a temporary folder with pip. Both sides get decoded input made beforehand (batches here, JSON there), run one
after the other on this machine, several runs each, and the best run of each counts. Their answers to the look-ups
must agree, or there is no figure.
"""

import argparse
import gc
import json
import struct
import subprocess
import sys
import tempfile
import time
import venv
from dataclasses import dataclass
from pathlib import Path

from tests.benchmarks.fold_load import FoldLoad, mixed_load, store_load

from evenhand.core.block_key import pack_keys, unpack_keys
from evenhand.core.cache_map import CacheMap
from evenhand.core.fold import fold
from evenhand.core.ids import WorkerId

RIVAL = Path(__file__).with_name("rival_radix_tree.py")
RIVAL_TIMEOUT_S = 600
PASSER_BY = WorkerId("passer-by")


@dataclass(frozen=True, slots=True)
class Figures:
    """Seconds of one run, and the answers of one round of look-ups."""

    fold_s: float
    match_s: float
    fold_cpu_s: float
    """Time of the process on any core: what a busy machine distorts less."""
    match_cpu_s: float
    answers: list[list[list[int]]]
    first_match_s: float = 0.0
    """Look-ups whose masks were not asked for before; not measured of the rival, which remembers nothing."""


def ours(load: FoldLoad, keys: list[tuple[int, ...]], rounds: int) -> Figures:
    cache_map = CacheMap()
    # As after decoding: equal keys are different objects.
    keys = [unpack_keys(pack_keys(query)) for query in keys]
    gc.collect()
    gc.freeze()
    begun, begun_cpu = time.perf_counter(), time.process_time()
    for batch in load.batches:
        fold(cache_map, batch)
    folded, folded_cpu = time.perf_counter(), time.process_time()
    for _ in range(rounds):
        for query in keys:
            cache_map.match(query)
    looked_up, looked_up_cpu = time.perf_counter(), time.process_time()
    first_s = 0.0
    for _ in range(rounds):
        # A worker that comes and goes ends what was remembered.
        cache_map.slots.acquire(PASSER_BY)
        cache_map.slots.release(PASSER_BY)
        again = time.perf_counter()
        for query in keys:
            cache_map.match(query)
        first_s += time.perf_counter() - again
    answers = [sorted([int(m.worker_id[1:]), m.blocks] for m in cache_map.match(query)) for query in keys]
    gc.unfreeze()
    return Figures(
        folded - begun, looked_up - folded, folded_cpu - begun_cpu, looked_up_cpu - folded_cpu, answers, first_s
    )


def warm_start(blocks: int) -> tuple[int, float]:
    """Blocks restored on 64 workers, and the seconds that took."""
    stored = CacheMap()
    for batch in store_load(1, blocks).batches:
        fold(stored, batch)
    workers = [
        (worker_id, stored.position(worker_id), stored.packed(worker_id)) for worker_id in stored.worker_ids()
    ]
    gc.collect()
    begun = time.perf_counter()
    restored = CacheMap()
    for worker_id, position, held in workers:
        assert position is not None
        restored.restore(worker_id, position, held)
    return restored.copy_count, time.perf_counter() - begun


def theirs(python: str, folder: Path) -> Figures:
    command = [python, str(RIVAL), str(folder / "events"), str(folder / "queries")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=RIVAL_TIMEOUT_S, check=False)
    if run.returncode:
        sys.exit(f"The rival failed: {run.stderr.strip()[-500:]}")
    return Figures(**json.loads(run.stdout))


def write_rival_input(folder: Path, load: FoldLoad, keys: list[tuple[int, ...]], rounds: int) -> None:
    with (folder / "events").open("wb") as file:
        for worker, event in load.rival_events():
            file.write(struct.pack("<II", worker, len(event)) + event)
    (folder / "queries").write_text(json.dumps({"rounds": rounds, "keys": keys}))


def rival_python(folder: Path) -> str:
    """A fresh environment with the rival's wheel."""
    venv.create(folder / "venv", with_pip=True)
    python = str(folder / "venv" / "bin" / "python")
    subprocess.run(
        [python, "-m", "pip", "install", "-q", "ai-dynamo-runtime"], check=True, timeout=RIVAL_TIMEOUT_S
    )
    return python


def row(name: str, unit: str, mine: float, rival: float | None) -> str:
    other = f"{rival:12.3f} {mine / rival:8.2f}" if rival else f"{'-':>12} {'-':>8}"
    return f"{name:<44} {unit:<12} {mine:12.3f} {other}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Fold and look-up beside the rival's tree.")
    parser.add_argument("--rival-python", default="", help="a Python that can import dynamo.llm")
    parser.add_argument("--no-rival", action="store_true")
    parser.add_argument("--blocks", type=int, default=600_000)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=100, help="rounds of 64 look-ups")
    parser.add_argument("--warm-blocks", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    mixed = mixed_load(options.seed, options.blocks, capacity=5_000)
    plain = store_load(options.seed, options.blocks)
    print(f"seed {options.seed}, {mixed.blocks} blocks in {len(mixed.batches)} mixed batches, 64 workers")
    print(f"{'what':<44} {'unit':<12} {'evenhand':>12} {'RadixTree':>12} {'ratio':>8}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        python = "" if options.no_rival else options.rival_python or rival_python(folder)
        loads = [("fold, 1-64 blocks, evictions, shared", mixed, list(mixed.prefixes))]
        loads.append(("fold, 64-block stores", plain, []))
        for name, load, queries in loads:
            if python:
                write_rival_input(folder, load, queries, options.rounds)
            mine, rival = [], []
            for _ in range(options.runs):
                mine.append(ours(load, queries, options.rounds))
                if python:
                    rival.append(theirs(python, folder))
            if any(figures.answers != mine[0].answers for figures in rival):
                sys.exit("The two maps disagree; there is no figure.")
            report(name, load, queries, options.rounds, mine, rival)
    count, seconds = warm_start(options.warm_blocks)
    print(row(f"warm start, {count} blocks, 64 workers", "s", seconds, None))


def report(
    name: str,
    load: FoldLoad,
    queries: list[tuple[int, ...]],
    rounds: int,
    mine: list[Figures],
    rival: list[Figures],
) -> None:
    millions = load.blocks / 1e6
    best = min(figures.fold_s for figures in mine)
    other = min((figures.fold_s for figures in rival), default=None)
    print(row(name, "M blocks/s", millions / best, millions / other if other else None))
    best = min(figures.fold_cpu_s for figures in mine)
    other = min((figures.fold_cpu_s for figures in rival), default=None)
    print(row(name, "M/CPU s", millions / best, millions / other if other else None))
    if queries:
        holders = [len(answer) for answer in mine[0].answers]
        thousands = len(queries) * rounds / 1e3
        other = min((figures.match_s for figures in rival), default=None)
        theirs_rate = thousands / other if other else None
        what = f"look-up, 64 keys, {min(holders)}-{max(holders)} holders"
        best = min(figures.match_s for figures in mine)
        print(row(what + ", again", "k/s", thousands / best, theirs_rate))
        best = min(figures.match_cpu_s for figures in mine)
        other = min((figures.match_cpu_s for figures in rival), default=None)
        print(row(what + ", again", "k/CPU s", thousands / best, thousands / other if other else None))
        best = min(figures.first_match_s for figures in mine)
        print(row(what + ", first", "k/s", thousands / best, theirs_rate))


if __name__ == "__main__":
    main()
