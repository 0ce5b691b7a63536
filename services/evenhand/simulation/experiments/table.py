"""Every experiment by its name, in the order in which ``all`` runs them."""

from collections.abc import Mapping

from evenhand.simulation.experiments.experiment import Experiment
from evenhand.simulation.experiments.hot import HOT

_ROWS: tuple[Experiment, ...] = (HOT,)

EXPERIMENTS: Mapping[str, Experiment] = {row.name: row for row in _ROWS}
