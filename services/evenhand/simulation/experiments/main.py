"""``evenhand simulate experiment NAME``: run one experiment, or all of them, and write the pages.

What is measured is kept, so a command that was stopped goes on where it was when it is given again; with ``all``,
an experiment whose figures are all there costs seconds.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from evenhand.core.errors import EvenhandError, InvalidInput
from evenhand.simulation.experiments.experiment import Experiment
from evenhand.simulation.experiments.page import Provenance, plain, write_page
from evenhand.simulation.experiments.runs import JOBS_MAX, code_of_all, run_grid
from evenhand.simulation.experiments.table import EXPERIMENTS
from evenhand.simulation.options import SEEDS_MAX, SentenceParser, check_folder, check_within, whole

ALL = "all"


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0 if everything that must be shown is shown, 1 if something is missed, 2 if something failed."""
    code = 0
    try:
        arguments = _parser().parse_args(argv)
        _check(arguments)
    except EvenhandError as error:
        return _told(error)
    for name in list(EXPERIMENTS) if arguments.name == ALL else [arguments.name]:
        try:
            missed = _one(EXPERIMENTS[name], arguments)
        except EvenhandError as error:
            code = _told(error)
        else:
            code = max(code, 1 if missed else 0)
    return code


def _told(error: EvenhandError) -> int:
    print(f"evenhand simulate experiment: {error}", file=sys.stderr)
    return 2


def _parser() -> argparse.ArgumentParser:
    width = max(len(name) for name in EXPERIMENTS)
    listed = [f"  {name:<{width}}  {experiment.question}" for name, experiment in EXPERIMENTS.items()]
    parser = SentenceParser(
        prog="evenhand simulate experiment",
        description="Run an experiment over several seeds; print its answer and write its page.",
        epilog="\n".join(["experiments:", *listed, f"  {ALL:<{width}}  every one of them, in this order"]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", metavar="NAME", help="one of the experiments below, or all")
    parser.add_argument("--first-seed", type=whole, default=1, help="the first of consecutive seeds (default 1)")
    parser.add_argument("--seeds", type=whole, help="how many (default 5, or as the experiment says)")
    parser.add_argument("--jobs", type=whole, default=1, help="processes at once (default 1)")
    parser.add_argument("--out", type=Path, help="folder of the pages (default docs/results; checks only print)")
    parser.add_argument("--scratch", type=Path, help="folder that keeps what was measured")
    parser.add_argument("--quiet", action="store_true", help="no line for each cell")
    return parser


def _check(arguments: argparse.Namespace) -> None:
    if arguments.name != ALL and arguments.name not in EXPERIMENTS:
        raise InvalidInput(
            f"There is no experiment {arguments.name!r}; there are {', '.join(EXPERIMENTS)} and {ALL}."
        )
    if arguments.seeds is not None:
        check_within("--seeds", arguments.seeds, 1, SEEDS_MAX)
    check_within("--jobs", arguments.jobs, 1, JOBS_MAX)
    for option, folder in (("--out", arguments.out), ("--scratch", arguments.scratch)):
        if folder is not None:
            check_folder(option, folder)


def _one(experiment: Experiment, arguments: argparse.Namespace) -> int:
    """Run and tell one experiment; returns how many claims are missed."""
    count = arguments.seeds or experiment.seeds
    seeds = tuple(range(arguments.first_seed, arguments.first_seed + count))
    scratch = arguments.scratch or Path(tempfile.gettempdir()) / "evenhand-experiments"

    def progress(done: int, of: int, what: str) -> None:
        if not arguments.quiet:
            print(f"{experiment.name} {done}/{of}: {what}", file=sys.stderr, flush=True)

    jobs = 1 if experiment.timed else arguments.jobs
    results = run_grid(experiment, seeds, scratch / f"{experiment.name}.jsonl", jobs, progress)
    page = experiment.page(results)
    print(plain(experiment, page), end="\n\n", flush=True)
    folder = arguments.out
    if folder is None and (not experiment.prints or arguments.name == ALL):
        folder = Path("docs/results")
    if folder is not None:
        command = f"evenhand simulate experiment {experiment.name} --first-seed {seeds[0]} --seeds {count}"
        command += " --out docs/results" if experiment.prints else ""
        for path in write_page(experiment, page, Provenance(seeds, command, code_of_all(experiment)), folder):
            print(path, file=sys.stderr)
    return sum(not claim.met for claim in page.claims)
