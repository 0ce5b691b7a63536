"""``evenhand simulate vtc``: repeat VTC's published measurements, print them beside ours, write the page."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from evenhand.core.errors import EvenhandError
from evenhand.simulation.experiments.page import Provenance, plain, write_page
from evenhand.simulation.experiments.runs import JOBS_MAX, code_of_all, run_grid
from evenhand.simulation.options import SEEDS_MAX, SentenceParser, check_folder, check_within, whole
from evenhand.simulation.vtc.experiment import VTC


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0 if order and factors are as published, 1 if not, 2 for a wrong command."""
    try:
        return _run(_parser().parse_args(argv))
    except EvenhandError as error:
        print(f"evenhand simulate vtc: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = SentenceParser(prog="evenhand simulate vtc", description=VTC.question)
    parser.add_argument("--first-seed", type=whole, default=1, help="the first of consecutive seeds (default 1)")
    parser.add_argument("--seeds", type=whole, default=VTC.seeds, help=f"how many (default {VTC.seeds})")
    parser.add_argument("--jobs", type=whole, default=1, help="processes at once (default 1)")
    parser.add_argument(
        "--out", type=Path, default=Path("docs/results"), help="folder of the page and its figures"
    )
    parser.add_argument("--quiet", action="store_true", help="no line for each run")
    return parser


def _run(arguments: argparse.Namespace) -> int:
    check_within("--seeds", arguments.seeds, 1, SEEDS_MAX)
    check_within("--jobs", arguments.jobs, 1, JOBS_MAX)
    check_folder("--out", arguments.out)
    seeds = tuple(range(arguments.first_seed, arguments.first_seed + arguments.seeds))

    def progress(done: int, of: int, what: str) -> None:
        if not arguments.quiet:
            print(f"{done}/{of}: {what}", file=sys.stderr, flush=True)

    page = VTC.page(run_grid(VTC, seeds, None, arguments.jobs, progress))
    print(plain(VTC, page))
    command = f"evenhand simulate vtc --first-seed {seeds[0]} --seeds {len(seeds)}"
    for path in write_page(VTC, page, Provenance(seeds, command, code_of_all(VTC)), arguments.out):
        print(path, file=sys.stderr)
    return 0 if all(claim.met for claim in page.claims) else 1
