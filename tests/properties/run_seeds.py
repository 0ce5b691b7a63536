"""Run many seeds of the properties, in chunks that can be stopped and taken up again.

::

    python -m tests.properties.run_seeds --from 0 --count 100000 --jobs 1

After each chunk a state file says which seeds were run against which core (a digest of what it does), with how
many grants and violations; seeds that stand there for the core and the checker at hand are not run again. A seed
that fails is printed with the command that replays it and goes to ``kept_seeds.json``, whose seeds the test
suite runs for ever.

The exit code is 0 only if no seed failed.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.code_digest import code_digest
from tests.properties.adversary import play

import evenhand.core

HERE = Path(__file__).parent
CORE = Path(evenhand.core.__file__).parent
STATE = HERE / "seeds_run.json"
KEPT = HERE / "kept_seeds.json"
CHUNK = 100
CHECKER = (
    "adversary.py",
    "broken.py",
    "clock_book.py",
    "clock_bounds.py",
    "clock_nodes.py",
    "fairness_oracle.py",
    "grant_check.py",
    "guarantee_book.py",
    "held_up.py",
    "idleness.py",
    "kept_check.py",
    "scheduler_check.py",
    "standing.py",
    "tenant_book.py",
)


@dataclass
class Stretch:
    """Seeds ``first`` to ``last``, both included, run against one core by one checker."""

    core: str
    checker: str
    first: int
    last: int
    grants: int
    violations: int
    seconds: float


@dataclass
class Outcome:
    seed: int
    grants: int
    broken: str | None


def core_digest() -> str:
    return code_digest(CORE.glob("*.py"), CORE)


def checker_digest() -> str:
    return code_digest((HERE / name for name in CHECKER), HERE)


def run_one(seed: int) -> Outcome:
    """One seed; what is wrong with it, if anything."""
    try:
        adversary = play(seed)
    except Exception as error:  # the one place where a run's fault is recorded
        return Outcome(seed, 0, f"{type(error).__name__}: {error}")
    return Outcome(seed, adversary.oracle.grants, None)


def run_chunk(first: int, last: int) -> list[Outcome]:
    return [run_one(seed) for seed in range(first, last + 1)]


def load(path: Path) -> list[Stretch]:
    return [Stretch(**each) for each in json.loads(path.read_text())["runs"]] if path.exists() else []


def save(path: Path, stretches: list[Stretch]) -> None:
    """Whole or not at all; neighbours of one core and checker are one stretch."""
    merged: list[Stretch] = []
    for each in sorted(stretches, key=lambda s: (s.core, s.checker, s.first)):
        before = merged[-1] if merged else None
        if before is not None and (before.core, before.checker, before.last + 1) == (
            each.core,
            each.checker,
            each.first,
        ):
            before.last, before.grants = each.last, before.grants + each.grants
            before.violations, before.seconds = (
                before.violations + each.violations,
                before.seconds + each.seconds,
            )
        else:
            merged.append(Stretch(**asdict(each)))
    runs = [{**asdict(each), "seconds": round(each.seconds, 1)} for each in merged]
    whole = json.dumps({"runs": runs}, indent=1) + "\n"
    fresh = path.with_suffix(".fresh")
    fresh.write_text(whole)
    fresh.replace(path)


def chunks_left(first: int, count: int, done: list[Stretch]) -> Iterator[tuple[int, int]]:
    """The seeds asked for that are not done, in chunks."""
    begin: int | None = None
    for seed in range(first, first + count + 1):
        is_due = seed < first + count and not any(each.first <= seed <= each.last for each in done)
        if is_due and begin is None:
            begin = seed
        if begin is not None and (not is_due or seed - begin == CHUNK):
            yield begin, seed - 1
            begin = seed if is_due else None


def keep(path: Path, seeds: list[int]) -> None:
    """A seed that failed once is run for ever."""
    kept = json.loads(path.read_text())["seeds"] if path.exists() else []
    path.write_text(json.dumps({"seeds": sorted({*kept, *seeds})}) + "\n")


def kept_seeds() -> list[int]:
    seeds: list[int] = json.loads(KEPT.read_text())["seeds"]
    return seeds


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.properties.run_seeds", description=__doc__)
    parser.add_argument("--from", dest="first", type=int, required=True, help="the first seed")
    parser.add_argument("--count", type=int, required=True, help="how many seeds")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--state", type=Path, default=STATE, help="where it is recorded what was run")
    parser.add_argument("--kept", type=Path, default=KEPT, help="where seeds that failed are kept")
    parser.add_argument("--again", action="store_true", help="run seeds that were run before; record nothing")
    options = parser.parse_args(arguments)
    core, checker = core_digest(), checker_digest()
    stretches = [] if options.again else load(options.state)
    done = [each for each in stretches if (each.core, each.checker) == (core, checker)]
    left = list(chunks_left(options.first, options.count, done))
    print(f"core {core}, checker {checker}: {sum(b - a + 1 for a, b in left)} seeds of {options.count} left")
    began, recorded, seeds, grants, failed = time.perf_counter(), 0.0, 0, 0, 0
    for outcomes in in_chunks(left, options.jobs):
        seconds = time.perf_counter() - began
        broken = [outcome for outcome in outcomes if outcome.broken is not None]
        for outcome in broken:
            print(f"seed {outcome.seed} fails: {outcome.broken}")
            print(f"  python -m tests.properties.run_seeds --from {outcome.seed} --count 1 --again")
        seeds, failed = seeds + len(outcomes), failed + len(broken)
        grants += sum(outcome.grants for outcome in outcomes)
        if not options.again:
            first, last = outcomes[0].seed, outcomes[-1].seed
            mine = sum(outcome.grants for outcome in outcomes)
            stretch = Stretch(core, checker, first, last, mine, len(broken), seconds - recorded)
            recorded = seconds
            stretches.append(stretch)
            save(options.state, stretches)
            if broken:
                keep(options.kept, [outcome.seed for outcome in broken])
        print(f"{seeds} seeds, {grants} grants, {failed} failed, {seeds / seconds:.1f} seeds/s", flush=True)
    return 1 if failed else 0


def in_chunks(left: list[tuple[int, int]], jobs: int) -> Iterator[list[Outcome]]:
    if jobs == 1:
        for first, last in left:
            yield run_chunk(first, last)
        return
    with ProcessPoolExecutor(jobs) as pool:
        yield from pool.map(run_chunk, [first for first, _ in left], [last for _, last in left])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
