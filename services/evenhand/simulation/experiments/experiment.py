"""What an experiment is: a question, a grid of cells, what is measured in each, and the page that tells the
answer.

A cell is run once for each seed. What it measures is a flat table of numbers, so that it can be kept in a file and
a run that was broken off goes on where it stopped. The page is made from these numbers alone: making it again
costs nothing, and no sentence of it knows an outcome beforehand.

What always holds: equal cell and seed, equal numbers, on every machine; so nothing measured is a time of the wall
clock. The one experiment about time and memory says so with ``timed``.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from evenhand.simulation.experiments.figure import Figure

Measured = Mapping[str, float]
"""Numbers of one cell and seed, by name; units last in names."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One point of a grid."""

    label: str
    """Unique within the experiment, such as ``hot-tenant/evenhand/window_delay_ms=250``."""
    case: Any
    """What is run: a frozen dataclass whose ``repr`` tells it whole, for it is part of the key of what is kept."""
    policies: tuple[str, ...] = ()
    """Policies it runs; what was measured holds as long as their code does."""


@dataclass(frozen=True, slots=True)
class Spread:
    """One number over all seeds."""

    median: float
    least: float
    most: float
    seeds: int

    def times(self, factor: float) -> "Spread":
        """In another unit."""
        return Spread(self.median * factor, self.least * factor, self.most * factor, self.seeds)


@dataclass(frozen=True, slots=True)
class Claim:
    """A figure that the experiment must show, and whether it does."""

    text: str
    """What is claimed, with its bound."""
    got: str
    met: bool


@dataclass(frozen=True, slots=True)
class Table:
    """A Markdown table with a title. The first column is text, the rest are figures."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


@dataclass(frozen=True, slots=True)
class Page:
    """The answer to the question."""

    claims: tuple[Claim, ...] = ()
    tables: tuple[Table, ...] = ()
    figures: tuple[tuple[str, Figure], ...] = ()
    """By the ending of its file's name; empty: the experiment's own name."""
    parameters: tuple[str, ...] = ()
    """Lines that say what was run: workloads with all their parameters."""
    remarks: tuple[str, ...] = ()
    """Paragraphs: how it was measured, what it does not show."""


class Results:
    """What was measured, by cell and seed."""

    def __init__(self, values: Mapping[str, Mapping[int, Measured]]) -> None:
        self._values = values
        """By the cell's label, then by seed."""

    def __contains__(self, label: str) -> bool:
        return label in self._values

    def seeds(self, label: str) -> Sequence[int]:
        """Seeds of a cell, in order."""
        return sorted(self._values[label])

    def each(self, label: str, name: str) -> list[float]:
        """One number of a cell, by seed in order."""
        return [self._values[label][seed][name] for seed in self.seeds(label)]

    def names(self, label: str) -> list[str]:
        """Names of the numbers of a cell, as its first seed measured them."""
        return list(self._values[label][self.seeds(label)[0]])

    def spread(self, label: str, name: str) -> Spread:
        """Median, least and most of a number over the seeds."""
        return spread(self.each(label, name))

    def ratio(self, label: str, other: str, name: str) -> Spread:
        """A cell's number ÷ another cell's, seed by seed: pairs see the same workload."""
        return self.ratio_of((label, name), (other, name))

    def ratio_of(self, one: tuple[str, str], other: tuple[str, str]) -> Spread:
        """A number ÷ another, each of a cell, seed by seed; ÷ 0 is endless, and 0 ÷ 0 is 1."""
        pairs = zip(self.each(*one), self.each(*other), strict=True)
        return spread([above / below if below else (1.0 if not above else float("inf")) for above, below in pairs])


def spread(values: Sequence[float]) -> Spread:
    """Median, least and most; at least one value."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    median = ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
    return Spread(median, ordered[0], ordered[-1], len(ordered))


@dataclass(frozen=True, slots=True)
class Experiment:
    """One row of the table of experiments."""

    name: str
    question: str
    """One sentence."""
    cells: Callable[[], tuple[Cell, ...]]
    measure: Callable[[Any, int], Measured]
    """A module's function of a cell's case and a seed, for it is called in other processes."""
    page: Callable[[Results], Page]
    title: str = ""
    """Of its page; empty: its name with a capital."""
    seeds: int = 5
    """How many, where nothing else is asked for."""
    timed: bool = False
    """It measures this machine's time and memory: run alone, and never taken from what was kept elsewhere."""
    prints: bool = False
    """A check: its page goes to standard output, and into a folder only where one is named."""
    also: tuple[str, ...] = field(default=())
    """Modules beside those of its policies and of ``measure`` whose code its numbers depend on."""
