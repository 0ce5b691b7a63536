"""An experiment's page as Markdown, and as text for a terminal.

Everything on it comes from the run itself: seeds, parameters, the command that repeats it, and the digest of the
code behind the numbers. Nothing names a machine or a moment.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from evenhand.simulation.experiments.experiment import Experiment, Page, Spread, Table
from evenhand.simulation.experiments.figure import svg

SPREADS = "Figures are medians over the seeds; in brackets the least and the most of them."


@dataclass(frozen=True, slots=True)
class Provenance:
    """How the numbers came about."""

    seeds: tuple[int, ...]
    command: str
    code: str
    """Digest of all code behind the numbers."""


def number(value: float) -> str:
    """Three significant digits, thousands apart."""
    if value != value:
        return "–"
    if value in (float("inf"), float("-inf")):
        return "∞" if value > 0 else "−∞"
    if abs(value) >= 1_000:
        return f"{value:,.0f}"
    if abs(value) >= 100:
        return f"{value:.0f}"
    if abs(value) >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if abs(value) >= 0.995 or value == 0 else f"{value:.3f}"


def told(spread: Spread) -> str:
    """Median, and in brackets least and most where there is more than one seed."""
    if spread.seeds == 1 or spread.least == spread.most:
        return number(spread.median)
    return f"{number(spread.median)} ({number(spread.least)}–{number(spread.most)})"


def markdown_table(table: Table) -> str:
    """With its title as a heading."""
    lines = [f"## {table.title}", "", "| " + " | ".join(table.columns) + " |"]
    lines.append("|---|" + "---:|" * (len(table.columns) - 1))
    lines += ["| " + " | ".join(row) + " |" for row in table.rows]
    return "\n".join([*lines, *(["", table.note] if table.note else [])])


def plain_table(table: Table) -> str:
    """For a terminal: columns in line."""
    rows = [table.columns, *table.rows]
    widths = [max(len(row[at]) for row in rows) for at in range(len(table.columns))]
    lines = [table.title]
    for row in rows:
        cells = [row[0].ljust(widths[0])] + [c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True)]
        lines.append("  " + "  ".join(cells).rstrip())
    return "\n".join(lines)


def claims_table(page: Page) -> Table:
    """What must be shown, and whether it is."""
    rows = tuple((claim.text, claim.got, "met" if claim.met else "**missed**") for claim in page.claims)
    return Table("What it must show", ("claim", "got", ""), rows)


def plain(experiment: Experiment, page: Page) -> str:
    """The whole answer for a terminal."""
    tables = [*([claims_table(page)] if page.claims else []), *page.tables]
    return "\n\n".join([experiment.question, *(plain_table(table).replace("**", "") for table in tables)])


def markdown(experiment: Experiment, page: Page, provenance: Provenance) -> str:
    """The whole page."""
    parts = [f"# {experiment.title or experiment.name.capitalize()}", experiment.question]
    if page.claims:
        parts.append(markdown_table(claims_table(page)))
    parts += [f"![{figure.title}]({_file(experiment, ending)})" for ending, figure in page.figures]
    parts += [markdown_table(table) for table in page.tables]
    parts += list(page.remarks)
    parts.append("## How it was made")
    seeds = provenance.seeds
    consecutive = seeds == tuple(range(seeds[0], seeds[0] + len(seeds)))
    listed = f"{seeds[0]} … {seeds[-1]}" if consecutive and len(seeds) > 1 else ", ".join(map(str, seeds))
    lines = [
        f"- Command: `{provenance.command}`",
        f"- Seeds: {listed}. {SPREADS}" if len(seeds) > 1 else f"- Seed: {listed}.",
        f"- Digest of the code behind the numbers: `{provenance.code}`",
        *(f"- {line}" for line in page.parameters),
    ]
    parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def write_page(experiment: Experiment, page: Page, provenance: Provenance, folder: Path) -> list[Path]:
    """Markdown and figures into a folder; returns what was written.

    Every text is there before the first is written, and each file is replaced in one step: what breaks off leaves
    no file cut short. Raises ``OSError`` where a file cannot be written.
    """
    texts = {folder / f"{experiment.name}.md": markdown(experiment, page, provenance)}
    for ending, figure in page.figures:
        texts[folder / _file(experiment, ending)] = svg(figure)
    folder.mkdir(parents=True, exist_ok=True)
    for path, text in texts.items():
        _replace(path, text)
    return list(texts)


def _replace(path: Path, text: str) -> None:
    """Another text for a file; the old one stays until the whole of it is there."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def _file(experiment: Experiment, ending: str) -> str:
    ending = re.sub(r"[^a-z0-9-]+", "-", ending.lower()).strip("-")
    return f"{experiment.name}-{ending}.svg" if ending else f"{experiment.name}.svg"


def plan_line(plan: object, more: Sequence[str] = ()) -> str:
    """One workload with all its parameters, as a line of a page."""
    return "Workload " + "; ".join([f"`{plan!r}`", *more])
