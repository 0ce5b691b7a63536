"""Runs a grid over processes, and keeps what was measured in a file of JSON lines.

A line is written as soon as a cell is measured, so a run that was stopped goes on where it was. A line's key tells
the experiment, the cell, the seed and a digest of the code behind it (``sources``): other code, other key. Lines
that are cut short, as by a full disk, are passed over.
"""

import hashlib
import json
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evenhand.core.errors import EvenhandError, InvalidInput
from evenhand.policies.table import policy_entry
from evenhand.simulation.experiments.experiment import Cell, Experiment, Measured, Results
from evenhand.simulation.experiments.sources import digest_of

TRIALS = ("evenhand.simulation.trials.trial", "evenhand.simulation.trials.workloads")
"""What every cell runs on."""
JOBS_MAX = 256


@dataclass(frozen=True, slots=True)
class Run:
    """A cell and a seed that are not measured so far."""

    key: str
    cell: Cell
    seed: int


class CellsFailed(EvenhandError):
    """Some cells could not be measured; the others are kept."""


Progress = Callable[[int, int, str], None]
"""Told after each: how many are done, of how many, and which."""


def code_behind(experiment: Experiment, cell: Cell) -> str:
    """Digest of the code that a cell's numbers depend on."""
    makers = [policy_entry(name).make.__module__ for name in cell.policies]
    return digest_of([*TRIALS, experiment.measure.__module__, *experiment.also, *makers])


def code_of_all(experiment: Experiment) -> str:
    """Digest of the code behind all numbers of an experiment."""
    cells = experiment.cells()
    policies = sorted({name for cell in cells for name in cell.policies})
    return code_behind(experiment, Cell("", None, tuple(policies)))


def key_of(experiment: Experiment, cell: Cell, seed: int) -> str:
    """What a kept number is found by."""
    code = code_behind(experiment, cell)
    told = "\n".join([experiment.name, cell.label, repr(cell.case), str(seed), code])
    return hashlib.sha256(told.encode()).hexdigest()[:24]


def run_grid(
    experiment: Experiment,
    seeds: Sequence[int],
    kept_at: Path | None,
    jobs: int = 1,
    progress: Progress | None = None,
    cells: Sequence[Cell] | None = None,
) -> Results:
    """Measure what is not kept so far; ``kept_at`` None: nothing is kept. ``CellsFailed`` if some could not be."""
    if not 1 <= jobs <= JOBS_MAX:
        raise InvalidInput(f"There can be 1 to {JOBS_MAX} jobs, not {jobs}.")
    grid = tuple(cells if cells is not None else experiment.cells())
    labels = [cell.label for cell in grid]
    assert len(set(labels)) == len(labels), "labels are unique within an experiment"
    kept = _read(kept_at) if kept_at is not None else {}
    values: dict[str, dict[int, Measured]] = {label: {} for label in labels}
    left: list[Run] = []
    for seed in seeds:
        for cell in grid:
            key = key_of(experiment, cell, seed)
            if key in kept:
                values[cell.label][seed] = kept[key]
            else:
                left.append(Run(key, cell, seed))
    done = len(grid) * len(seeds) - len(left)
    failed: dict[str, str] = {}
    for run, measured in _measured(experiment, left, jobs):
        if isinstance(measured, Exception):
            failed[run.key] = f"{run.cell.label} with seed {run.seed}: {measured}"
            continue
        values[run.cell.label][run.seed] = measured
        if kept_at is not None:
            _append(kept_at, run, measured)
        done += 1
        if progress is not None:
            progress(done, len(grid) * len(seeds), f"{run.cell.label} seed {run.seed}")
    if failed:
        # The first of the grid, in whatever order they ended.
        first = next(failed[run.key] for run in left if run.key in failed)
        raise CellsFailed(f"{len(failed)} cells of {experiment.name} failed; the first was {first}")
    return Results(values)


def _measured(
    experiment: Experiment, left: Sequence[Run], jobs: int
) -> Iterator[tuple[Run, Measured | Exception]]:
    """Each run with what it measured, or with what went wrong in it: one broken cell does not stop the others."""
    if jobs == 1 and not experiment.timed:
        for run in left:
            yield run, attempt(experiment.measure, run.cell.case, run.seed)
        return
    if not left:
        return
    # Fresh interpreters: what a cell measures cannot depend on what this process did before.
    context = multiprocessing.get_context("spawn")
    each = 1 if experiment.timed else None
    with ProcessPoolExecutor(min(jobs, len(left)), context, max_tasks_per_child=each) as pool:
        futures = {pool.submit(attempt, experiment.measure, run.cell.case, run.seed): run for run in left}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def attempt(measure: Callable[[Any, int], Measured], case: object, seed: int) -> Measured | Exception:
    """What a cell measures, or what went wrong in it."""
    try:
        return dict(measure(case, seed))
    except Exception as error:
        return RuntimeError(f"{type(error).__name__}: {error}")


def _read(path: Path) -> dict[str, Measured]:
    kept: dict[str, Measured] = {}
    if not path.exists():
        return kept
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            try:
                row = json.loads(line)
                kept[row["key"]] = {str(name): float(value) for name, value in row["values"].items()}
            except (ValueError, KeyError, TypeError, AttributeError):
                continue
    return kept


def _append(path: Path, run: Run, measured: Measured) -> None:
    row = {"key": run.key, "cell": run.cell.label, "seed": run.seed, "values": dict(measured)}
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
