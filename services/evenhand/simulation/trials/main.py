"""``evenhand simulate policies``: scheduling policies side by side on one workload, as a table.

Each figure is the median over the seeds; a seed is a fresh workload of the same kind, the same for all policies.
The exit code is 0; what is wrong with the command line is one sentence.
"""

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final

from evenhand.core.errors import InvalidInput
from evenhand.policies.table import POLICIES, make_policy, policy_entry
from evenhand.simulation.options import SEEDS_MAX, SentenceParser, check_within, whole
from evenhand.simulation.trials.measures import Measures, measure
from evenhand.simulation.trials.settings import MapFaults, TrialSettings
from evenhand.simulation.trials.trace_file import read_workload, write_workload
from evenhand.simulation.trials.trial import run_trial
from evenhand.simulation.trials.workload import Workload
from evenhand.simulation.trials.workloads import WORKLOADS, make_workload

WORKERS_MAX: Final = 10_000
NS_PER_MS = 1_000_000


@dataclass(frozen=True, slots=True)
class Column:
    """One column of the table."""

    title: str
    value: Callable[[Measures], float]
    places: int


COLUMNS: Final = (
    Column("requests/s", lambda m: m.requests_per_s, 2),
    Column("tokens/s", lambda m: m.tokens_per_s, 0),
    Column("hits", lambda m: m.hit_rate, 3),
    Column("difference", lambda m: m.cost_difference.whole, 0),
    Column("P50 s", lambda m: m.well_behaved.p50_s, 2),
    Column("P99 s", lambda m: m.well_behaved.p99_s, 2),
    Column("all P99 s", lambda m: m.everyone.p99_s, 2),
)
LEGEND: Final = (
    "difference: widest service difference of two backlogged tenants, in cost tokens; "
    "P50, P99: time to first token of the well-behaved, from arrival."
)


def _parser() -> argparse.ArgumentParser:
    parser = SentenceParser(
        prog="evenhand simulate policies",
        description="Run scheduling policies side by side on one workload, on simulated engines.",
        epilog=f"Policies: {', '.join(POLICIES)}. Workloads: {', '.join(WORKLOADS)}.",
    )
    parser.add_argument("--policy", default="all", metavar="NAMES", help="all (default), or NAME,NAME,…")
    parser.add_argument(
        "--workload",
        default="hot-tenant",
        metavar="NAME",
        help="a workload's name, or a trace of one in JSON lines",
    )
    parser.add_argument("--workers", type=whole, default=4, help="simulated engines (default 4)")
    parser.add_argument("--seeds", type=whole, default=5, help="how many seeds, from --first-seed on (default 5)")
    parser.add_argument("--first-seed", type=whole, default=1, help="the first of them (default 1)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="a parameter of every policy that has it"
    )
    parser.add_argument(
        "--shape", action="append", default=[], metavar="KEY=VALUE", help="a parameter of the workload"
    )
    parser.add_argument("--map-lag-ms", type=_number, default=0.0, help="how far maps lag behind (default 0)")
    parser.add_argument("--map-lost", type=_number, default=0.0, help="share of map messages lost (default 0)")
    parser.add_argument(
        "--map-doubled", type=_number, default=0.0, help="share of them that come twice (default 0)"
    )
    parser.add_argument(
        "--write", type=Path, metavar="FILE", help="write the first seed's workload, and run nothing"
    )
    return parser


def main(argv: Sequence[str]) -> int:
    """Print the table; raises ``InvalidInput`` in one sentence that names what is wrong."""
    arguments = _parser().parse_args(list(argv))
    names = list(POLICIES) if arguments.policy == "all" else arguments.policy.split(",")
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InvalidInput(f"The policy {twice!r} is named twice.")
    settings = _pairs("--set", arguments.set)
    shape = _pairs("--shape", arguments.shape)
    chosen = [(name, _own(name, settings)) for name in names]
    for key in settings:
        if not any(key in own for _, own in chosen):
            raise InvalidInput(f"None of the policies {', '.join(names)} has a parameter {key!r}.")
    check_within("--seeds", arguments.seeds, 1, SEEDS_MAX)
    check_within("--workers", arguments.workers, 1, WORKERS_MAX)
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    if arguments.write is not None:
        write_workload(_workload(arguments.workload, seeds[0], shape), arguments.write)
        return 0
    faults = MapFaults(int(arguments.map_lag_ms * NS_PER_MS), arguments.map_lost, arguments.map_doubled)
    began_s = time.monotonic()
    rows: dict[str, list[Measures]] = {name: [] for name in names}
    for seed in seeds:
        workload = _workload(arguments.workload, seed, shape)
        trial = TrialSettings(workers=arguments.workers, seed=seed, map_faults=faults)
        for name, own in chosen:
            rows[name].append(measure(run_trial(make_policy(name, own, seed), workload, trial)))
    print(f"{arguments.workload}, {arguments.workers} workers, {len(seeds)} seeds from {seeds[0]}, medians")
    print_table(rows)
    print(LEGEND)
    print(f"{time.monotonic() - began_s:.1f} s", file=sys.stderr)
    return 0


def print_table(rows: dict[str, list[Measures]]) -> None:
    """One line a policy, each figure the median over its trials; – where there is none."""
    width = max(len("policy"), *(len(name) for name in rows))
    print(f"{'policy':<{width}}  " + "  ".join(f"{column.title:>10}" for column in COLUMNS))
    for name, trials in rows.items():
        cells = []
        for column in COLUMNS:
            values = [value for trial in trials if not math.isnan(value := column.value(trial))]
            cells.append(f"{statistics.median(values):>10,.{column.places}f}" if values else f"{'–':>10}")
        print(f"{name:<{width}}  " + "  ".join(cells))


def _workload(name: str, seed: int, shape: dict[str, str]) -> Workload:
    if name in WORKLOADS or not Path(name).exists():
        return make_workload(name, seed, shape)
    if shape:
        raise InvalidInput(f"The workload {name} is a trace, which --shape cannot change.")
    return read_workload(Path(name))


def _own(name: str, settings: dict[str, str]) -> dict[str, str]:
    """Those of the settings that a policy has; checks name and values."""
    known = {field.name for field in fields(policy_entry(name).settings)}
    own = {key: value for key, value in settings.items() if key in known}
    make_policy(name, own)
    return own


def _pairs(option: str, texts: Sequence[str]) -> dict[str, str]:
    pairs = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise InvalidInput(f"{option} {text} is not of the form KEY=VALUE.")
        pairs[key] = value
    return pairs


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not 0.0 <= value < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 1e9")
    return value


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
