"""Throughput against fairness: our window swept, each rival's parameter swept, on four workloads.

A rival is *better on both* than a point of ours if, seed by seed, the median of its requests/s ÷ ours is above 1
and the median of its well-behaved P99 time to first token ÷ ours is below 1. Strict priority is no rival: it is
told which tenants behave, and stands here as the limit of what isolation can reach.
"""

from evenhand.simulation.experiments.cases import (
    Scene,
    Settings,
    TrialCase,
    label_of,
    measure_case,
    row_name,
    trial_cell,
)
from evenhand.simulation.experiments.experiment import Cell, Claim, Experiment, Page, Results, Table
from evenhand.simulation.experiments.figure import Axis, Figure, Point, Series
from evenhand.simulation.experiments.page import plan_line, told
from evenhand.simulation.trials.workloads import WORKLOADS

OURS = "evenhand"
DEFAULT: Settings = ()
WINDOWS_MS = (0.0, 100.0, 250.0, 500.0, 1_000.0, 2_000.0)
"""Beside the default."""
LIMIT = "strict-priority"


def _sweep(key: str, *values: object) -> tuple[Settings, ...]:
    return tuple(((key, value),) for value in values)


RIVALS: tuple[tuple[str, tuple[Settings, ...]], ...] = (
    ("vtc-affine", ((),)),
    ("vtc", ((),)),
    ("dlpm", _sweep("quantum", 2_000.0, 8_000.0, 32_000.0)),
    (
        "d2lpm",
        (
            (("worker_quantum", 2_000.0), ("user_quantum", 500.0)),
            (("worker_quantum", 20_000.0), ("user_quantum", 8_000.0)),
            (("worker_quantum", 100_000.0), ("user_quantum", 32_000.0)),
        ),
    ),
    ("dynamo-classes", _sweep("quantum_tokens", 1_024, 8_192)),
    ("dynamo-cost", ((),)),
    ("preble-e2", _sweep("rebalance", 1.5, 3.0)),
    ("llm-d-scorers", ((),)),
    ("load-aware-prefix", _sweep("beta", 0.3, 1.0, 3.0)),
    (
        "cache-aware",
        (
            (),
            (("cache_threshold", 0.5), ("balance_abs_threshold", 32), ("balance_rel_threshold", 1.1)),
            (("balance_abs_threshold", 8), ("balance_rel_threshold", 1.1)),
        ),
    ),
    ("prefix-cache", _sweep("imbalance_max", 8, 16)),
    ("longest-prefix", ((),)),
    ("vtc-basic", ((),)),
    ("session-hash", ((),)),
    ("fcfs-least-load", ((),)),
    ("fcfs-round-robin", ((),)),
)

SCENES = tuple(
    Scene(entry.name, entry.make, entry.settings(**entry.given))
    for entry in (WORKLOADS[name] for name in ("hot-tenant", "dlpm-mix", "servegen-mooncake", "servegen-agents"))
)


def our_points() -> tuple[Settings, ...]:
    """The default, then the sweep."""
    return (DEFAULT, *_sweep("window_delay_ms", *WINDOWS_MS))


def rival_points() -> list[tuple[str, Settings]]:
    """Every rival with every setting."""
    return [(policy, settings) for policy, sweep in RIVALS for settings in sweep]


def cells() -> tuple[Cell, ...]:
    """All points on all workloads."""
    points = [(OURS, settings) for settings in our_points()] + rival_points() + [(LIMIT, DEFAULT)]
    return tuple(trial_cell(TrialCase(policy, scene, settings)) for scene in SCENES for policy, settings in points)


def better_on_both(results: Results, label: str, ours: str) -> bool:
    """See the module."""
    return faster(results, label, ours) and sooner(results, label, ours)


def faster(results: Results, label: str, ours: str) -> bool:
    """More requests/s, in the median of the seeds."""
    return results.ratio(label, ours, "requests_per_s").median > 1.0


def sooner(results: Results, label: str, ours: str) -> bool:
    """A smaller well-behaved P99 time to first token, in the median of the seeds."""
    return results.ratio(label, ours, "well_behaved_p99_s").median < 1.0


def page(results: Results) -> Page:
    """Verdicts first, then each workload's points."""
    claims = []
    for scene in SCENES:
        ours = label_of(scene.name, OURS)
        both = [
            row_name(policy, settings)
            for policy, settings in rival_points()
            if better_on_both(results, label_of(scene.name, policy, settings), ours)
        ]
        text = f"{scene.name}: no rival better than our default on both requests/s and well-behaved P99 TTFT"
        claims.append(Claim(text, ", ".join(both) or "none is", not both))
    figures = [figure for scene in SCENES for figure in _figures(results, scene)]
    return Page(
        tuple(claims),
        (_verdicts(results), *(_points(results, scene) for scene in SCENES)),
        tuple(figures),
        (*(plan_line(scene.plan) for scene in SCENES), "4 workers; every policy sees the same arrivals."),
        (NOTE,),
    )


NOTE = (
    "Throughput counts from the first arrival to the last answer, the drain included. Service difference is the "
    "widest change of the difference of two tenants' accumulated service while requests of both wait, in cost "
    "tokens (uncached 1, cached 0.1, output 2). Where it is 0, no two tenants waited together for a second. "
    "Settings not named are the published defaults. ServeGen's arrivals are crossed with prefixes of other "
    "traces, as no public trace holds both tenants and prefixes."
)


def _verdicts(results: Results) -> Table:
    """For each workload and rival, its best case against us: on which axis it wins, and against how many
    points."""
    rows = []
    for policy, sweep in RIVALS:
        row = [policy]
        for scene in SCENES:
            ours = label_of(scene.name, OURS)
            verdicts = set()
            for settings in sweep:
                label = label_of(scene.name, policy, settings)
                fast, soon = faster(results, label, ours), sooner(results, label, ours)
                verdicts.add(
                    "**both**" if fast and soon else "requests/s" if fast else "P99" if soon else "neither"
                )
            order = ("**both**", "requests/s", "P99", "neither")
            row.append(" or ".join(verdict for verdict in order if verdict in verdicts))
        rows.append(tuple(row))
    title = "On what each rival is better than our default, over its settings"
    return Table(title, ("rival", *(scene.name for scene in SCENES)), tuple(rows))


COLUMNS = (
    ("requests/s", "requests_per_s"),
    ("tokens/s", "tokens_per_s"),
    ("hit rate", "hit_rate"),
    ("well-behaved P50 TTFT (s)", "well_behaved_p50_s"),
    ("well-behaved P99 TTFT (s)", "well_behaved_p99_s"),
    ("difference (cost)", "cost_difference"),
    ("difference (tokens)", "tokens_difference"),
    ("Jain", "jain"),
)


def _points(results: Results, scene: Scene) -> Table:
    points = [(OURS, settings) for settings in our_points()] + rival_points() + [(LIMIT, DEFAULT)]
    rows = []
    for policy, settings in points:
        label = label_of(scene.name, policy, settings)
        name = row_name(policy, settings)
        rows.append((f"**{name}**" if (policy, settings) == (OURS, DEFAULT) else name,
                     *(told(results.spread(label, column)) for _, column in COLUMNS)))  # fmt: skip
    return Table(scene.name, ("policy", *(title for title, _ in COLUMNS)), tuple(rows))


def _figures(results: Results, scene: Scene) -> list[tuple[str, Figure]]:
    rows = ((OURS, our_points()), *RIVALS, (LIMIT, (DEFAULT,)))
    drawn = []
    for ending, column, axis in (
        ("p99", "well_behaved_p99_s", Axis("well-behaved P99 time to first token (s)", logarithmic=True)),
        (
            "difference",
            "cost_difference",
            Axis("service difference (cost tokens)", logarithmic=True, least=1_000.0),
        ),
    ):
        series = tuple(
            Series(
                policy,
                tuple(
                    _point(results, label_of(scene.name, policy, settings), column) for settings in _line(sweep)
                ),
                line=len(sweep) > 1,
                strong=policy == OURS,
            )
            for policy, sweep in rows
        )
        title = f"{scene.name}: throughput against {'the well-behaved wait' if ending == 'p99' else 'fairness'}"
        drawn.append((f"{scene.name}-{ending}", Figure(title, Axis("throughput (requests/s)"), axis, series)))
    return drawn


def _line(sweep: tuple[Settings, ...]) -> tuple[Settings, ...]:
    """A sweep in order of its values; our default stands in its place among the windows."""
    if DEFAULT not in sweep or len(sweep) < 2 or sweep[0] != DEFAULT or len(sweep[1]) != 1:
        return sweep
    if sweep[1][0][0] != "window_delay_ms":
        return sweep
    later = [settings for settings in sweep[1:] if float(str(settings[0][1])) > DEFAULT_WINDOW_MS]
    sooner_ones = [settings for settings in sweep[1:] if settings not in later]
    return (*sooner_ones, DEFAULT, *later)


DEFAULT_WINDOW_MS = 750.0


def _point(results: Results, label: str, column: str) -> Point:
    x, y = results.spread(label, "requests_per_s"), results.spread(label, column)
    return Point(x.median, y.median, (x.least, x.most), (y.least, y.most))


PARETO = Experiment(
    "pareto",
    "How much throughput does fairness cost, and is any known policy better at both at once?",
    cells,
    measure_case,
    page,
)
