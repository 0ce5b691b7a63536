"""``evenhand simulate system``: run seeds of the whole system and print what each came to.

The exit code is 0 where every seed held, 1 where one did not; each that did not is printed with the command that
runs it again.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TextIO

from evenhand.core.errors import InvalidInput
from evenhand.simulation.options import SentenceParser, whole
from evenhand.simulation.system.faults import ALL, Fault, parse_faults
from evenhand.simulation.system.system import Options, Result, simulate
from evenhand.simulation.system.workload import WORKLOADS

REQUESTS: Final = 150


@dataclass(frozen=True, slots=True)
class Arguments:
    """What the command line says."""

    seeds: range
    requests: int
    faults: frozenset[Fault]
    faults_text: str
    workload: str
    trace: Path | None
    last: int


def parse(argv: Sequence[str]) -> Arguments:
    """Arguments of the command line; raises ``InvalidInput`` in one sentence that names what is wrong."""
    parser = SentenceParser(
        prog="evenhand simulate system",
        description="Run the whole system on a virtual clock, under faults, and check what must hold.",
        epilog=f"Faults: {', '.join(fault.value for fault in ALL)}.",
    )
    parser.add_argument("--seed", type=_seed, help="run this one seed (default: 1)")
    parser.add_argument("--seeds", type=_seeds, metavar="N..M", help="run seeds N to M, both included")
    parser.add_argument("--requests", type=whole, default=REQUESTS, help=f"requests of a run (default {REQUESTS})")
    parser.add_argument("--faults", default="all", metavar="NAMES", help="all (default), none, or NAME,NAME,…")
    parser.add_argument(
        "--workload", default="mixed", help=f"{', '.join(WORKLOADS)}, or a file of requests in JSON lines"
    )
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="write every event of a single seed to this file"
    )
    parser.add_argument("--last", type=whole, default=40, help="events shown before a violation (default 40)")
    arguments = parser.parse_args(argv)
    if arguments.seed is not None and arguments.seeds is not None:
        raise InvalidInput("Either --seed or --seeds may be given, not both.")
    seeds = arguments.seeds
    if seeds is None:
        seed = 1 if arguments.seed is None else arguments.seed
        seeds = range(seed, seed + 1)
    if arguments.trace is not None and len(seeds) > 1:
        raise InvalidInput("A trace is of one seed: give --seed beside --trace.")
    return Arguments(
        seeds=seeds,
        requests=arguments.requests,
        faults=parse_faults(arguments.faults),
        faults_text=arguments.faults,
        workload=arguments.workload,
        trace=arguments.trace,
        last=arguments.last,
    )


def _seed(text: str) -> int:
    return whole(text)


def _seeds(text: str) -> range:
    first, dots, last = text.partition("..")
    if not dots:
        raise argparse.ArgumentTypeError(f"{text!r} is no range of seeds such as 1..200")
    seeds = range(_seed(first), _seed(last) + 1)
    if not seeds:
        raise argparse.ArgumentTypeError(f"the range of seeds {text} has none in it")
    return seeds


def replay_command(result: Result, faults_text: str) -> str:
    """The command that runs a seed again."""
    options = result.options
    parts = ["evenhand simulate", f"--seed {options.seed}", f"--requests {options.requests}"]
    if faults_text != "all":
        parts.append(f"--faults {faults_text}")
    if options.workload != "mixed":
        parts.append(f"--workload {options.workload}")
    return " ".join(parts)


def main(argv: Sequence[str]) -> int:
    """Run the seeds; 0 if all held."""
    arguments = parse(argv)
    failed = requests = 0
    began_s = time.process_time()
    with ExitStack() as stack:
        file: TextIO | None = None
        if arguments.trace is not None:
            try:
                file = stack.enter_context(arguments.trace.open("w", encoding="utf-8"))
            except OSError as error:
                sentence = f"The trace cannot be written to {arguments.trace}: {error.strerror}."
                raise InvalidInput(sentence) from error
        for seed in arguments.seeds:
            result = simulate(Options(seed, arguments.requests, arguments.faults, arguments.workload), file)
            requests += result.requests
            print(line_of(result))
            if result.violations:
                failed += 1
                tell_failure(result, arguments)
    seconds = time.process_time() - began_s
    print(
        f"{len(arguments.seeds)} seeds, {failed} failed; {requests} requests in {seconds:.1f} s "
        f"of a core, {requests / seconds:.0f} a second"
    )
    return 1 if failed else 0


def line_of(result: Result) -> str:
    """One seed in one line."""
    outcomes = ", ".join(f"{count} {name}" for name, count in sorted(result.outcomes.items()))
    state = "VIOLATED" if result.violations else "held"
    return (
        f"seed {result.options.seed} {state} {result.digest} {result.events} events in {result.virtual_s:.1f} s: "
        f"{outcomes}; {result.totals.terms} terms, {sum(result.struck.values())} faults"
    )


def tell_failure(result: Result, arguments: Arguments) -> None:
    """What was violated, what happened before, and how to see it again."""
    for event in result.last_events[-arguments.last :] if arguments.last else ():
        print(f"    {event}")
    for sentence in result.violations:
        print(f"  violated: {sentence}")
    print(f"  again: {replay_command(result, arguments.faults_text)}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
