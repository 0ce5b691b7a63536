"""Every experiment by its name, in the order in which ``all`` runs them."""

from collections.abc import Mapping

from evenhand.simulation.experiments.adversaries import ADVERSARIES_EXPERIMENT
from evenhand.simulation.experiments.experiment import Experiment
from evenhand.simulation.experiments.hot import HOT
from evenhand.simulation.experiments.isolation import ISOLATION
from evenhand.simulation.experiments.levels import LEVELS_EXPERIMENT
from evenhand.simulation.experiments.pareto import PARETO
from evenhand.simulation.experiments.scale import SCALE
from evenhand.simulation.experiments.stale import STALE
from evenhand.simulation.experiments.workers import WORKERS_EXPERIMENT

_ROWS: tuple[Experiment, ...] = (
    HOT,
    PARETO,
    ISOLATION,
    ADVERSARIES_EXPERIMENT,
    WORKERS_EXPERIMENT,
    STALE,
    LEVELS_EXPERIMENT,
    SCALE,
)

EXPERIMENTS: Mapping[str, Experiment] = {row.name: row for row in _ROWS}
