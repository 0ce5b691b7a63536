"""``evenhand simulate``: the whole system, or scheduling policies, on a virtual clock.

One table names what can be simulated; the first argument chooses, and ``system`` is meant where none is named.
"""

import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from evenhand.core.errors import InvalidInput

EXIT_IMPOSSIBLE: Final = 2
"""1 says that something ran, and does not hold."""


@dataclass(frozen=True, slots=True)
class Simulation:
    """One kind of simulation: a module with ``main(argv) -> int``."""

    name: str
    module: str
    summary: str


SIMULATIONS: Final = (
    Simulation("system", "evenhand.simulation.system.main", "all services in one process, under faults (default)"),
    Simulation("policies", "evenhand.simulation.trials.main", "scheduling policies side by side on one workload"),
    Simulation("vtc", "evenhand.simulation.vtc.main", "VTC's published measurements, repeated on our engine"),
    Simulation("experiment", "evenhand.simulation.experiments.main", "an experiment over seeds, with its page"),
)


def usage() -> str:
    """The help page."""
    lines = [f"  {one.name:<10}  {one.summary}" for one in SIMULATIONS]
    return "\n".join(
        [
            "usage: evenhand simulate [KIND] [OPTIONS]",
            "",
            *lines,
            "",
            "evenhand simulate KIND --help explains one.",
        ]
    )


def main(argv: Sequence[str]) -> int:
    """Run one kind of simulation; what cannot be simulated is told in one sentence, and the exit code is 2."""
    arguments = list(argv)
    if arguments and arguments[0] in ("-h", "--help"):
        print(usage())
        return 0
    try:
        return _run(arguments)
    except InvalidInput as error:
        print(f"evenhand simulate: {error}", file=sys.stderr)
        return EXIT_IMPOSSIBLE


def _run(arguments: list[str]) -> int:
    name = arguments.pop(0) if arguments and not arguments[0].startswith("-") else "system"
    simulation = next((one for one in SIMULATIONS if one.name == name), None)
    if simulation is None:
        kinds = ", ".join(one.name for one in SIMULATIONS)
        raise InvalidInput(f"There is no simulation {name!r}; there are {kinds}.")
    code: int = importlib.import_module(simulation.module).main(arguments)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
