"""The same arrivals through every router: ``python -m tests.benchmarks.alive [--seconds 45] [--routes a,b] …``

Runs each route at each factor on a fresh fleet of four simulated engines, prints a line as it goes and the
tables at the end, and writes them to ``--report`` (``docs/results/alive.md``; empty: nowhere). It ends with 0 if
every figure that was wanted is met, with 1 if one is missed. Nothing is left running; the routers' wheels stay
installed in the user's cache folder.
"""

import argparse
import asyncio
import dataclasses
import json
import sys
import time
from pathlib import Path

from tests.benchmarks.alive.figures import figures
from tests.benchmarks.alive.measure import Row, RunConfig, run_row
from tests.benchmarks.alive.report import line, page
from tests.benchmarks.alive.routes import KINDS

from evenhand.core.errors import EvenhandError
from evenhand.logs import configure_logs

REPORT = Path(__file__).resolve().parents[3] / "docs" / "results" / "alive.md"


def options() -> argparse.Namespace:
    names = [kind.name for kind in KINDS]
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.alive", description=__doc__)
    parser.add_argument("--seconds", type=float, default=45.0, help="the window of each row")
    parser.add_argument("--drain", type=float, default=30.0, help="longest drain after it")
    parser.add_argument("--factors", default="1,4,16", help="the hot tenant's multiples of its share")
    parser.add_argument("--routes", default=",".join(names), help="which, separated by commas")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--report", default=str(REPORT), help="where the page is written; empty: nowhere")
    parser.add_argument("--json", default="", help="where all figures are written, for later comparison")
    given = parser.parse_args()
    for name in given.routes.split(","):
        if name not in names:
            parser.error(f"there is no route {name!r}; the routes are {', '.join(names)}")
    return given


async def measure(given: argparse.Namespace, config: RunConfig) -> list[Row]:
    rows = []
    for factor in map(float, given.factors.split(",")):
        for kind in KINDS:
            if kind.name in given.routes.split(","):
                rows.append(await run_row(kind, factor, config))
                print(line(rows[-1]), flush=True)
    return rows


def main() -> int:
    given = options()
    configure_logs("alive", "console", "error")
    config = RunConfig(seconds=given.seconds, drain_s_max=given.drain, seed=given.seed)
    started_s = time.monotonic()
    print(f"seed {config.seed}, {config.seconds:g} s a row", flush=True)
    try:
        rows = asyncio.run(measure(given, config))
    except EvenhandError as error:
        print(f"alive: {error}", file=sys.stderr)
        return 2
    text = page(rows, config, time.monotonic() - started_s)
    print("\n" + text)
    if given.report:
        path = Path(given.report)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    if given.json:
        Path(given.json).write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=1))
    return 0 if all(figure.held is not False for figure in figures(rows)) else 1


if __name__ == "__main__":
    sys.exit(main())
