"""How long the well-behaved wait as one tenant asks for more and more.

Five tenants ask for about half of what is their share; a sixth, the aggressor, asks for 0 to 50 times its share,
once with prompts that share nothing and once with one shared prefix. Arrivals of the five are the same throughout.
The wait of a request that has no first token half a minute after the last arrival counts as endless.
"""

from evenhand.engine.limits import StepTime
from evenhand.simulation.experiments.cases import Scene, TrialCase, label_of, measure_case, trial_cell
from evenhand.simulation.experiments.experiment import Cell, Claim, Experiment, Page, Results, Table
from evenhand.simulation.experiments.figure import Axis, Figure, Point, Series
from evenhand.simulation.experiments.page import plan_line, told
from evenhand.simulation.experiments.scenes import Crowd, Stream, scene, with_stream

OURS, STRICT = "evenhand", "strict-priority"
POLICIES = (OURS, STRICT, "vtc-affine", "dlpm", "d2lpm", "dynamo-classes", "longest-prefix")
SHARE_PER_S = 1.9
"""Cold requests/s that a sixth of the pool serves."""
TIMES = (0, 1, 2, 5, 10, 20, 50)
KINDS = ("cold", "hot")
WORSE_THAN_AT_5_MAX = 1.25
WORSE_THAN_STRICT_MAX = 2.0

SLOW = StepTime(12_000_000, 240_000, 240_000)
CALM = Crowd(tuple(Stream(f"calm-{number}", 0.9) for number in range(5)), duration_s=90.0, step_time=SLOW)
UNTIL_S = 120.0


def scene_of(kind: str, times: int) -> Scene:
    """The five, and the aggressor at so many times its share."""
    if not times:
        return scene(f"{kind} {times}x", CALM)
    rate = SHARE_PER_S * times
    if kind == "cold":
        aggressor = Stream("aggressor", rate, well_behaved=False)
    else:
        aggressor = Stream("aggressor", rate, prompt_tokens=200, prefix_tokens=6_000, well_behaved=False)
    return scene(f"{kind} {times}x", with_stream(CALM, aggressor))


def cells() -> tuple[Cell, ...]:
    """Every policy, both kinds, all strengths."""
    return tuple(
        trial_cell(TrialCase(policy, scene_of(kind, times), until_s=UNTIL_S))
        for kind in KINDS
        for times in TIMES
        for policy in POLICIES
    )


def label(kind: str, times: int, policy: str) -> str:
    """Of a cell."""
    return label_of(f"{kind} {times}x", policy)


def page(results: Results) -> Page:
    """Both bounds for both kinds, and all waits."""
    name = "well_behaved_p99_s"
    claims = []
    for kind in KINDS:
        ours = label(kind, 50, OURS)
        growth = results.ratio(ours, label(kind, 5, OURS), name)
        strict = results.ratio(ours, label(kind, 50, STRICT), name)
        claims.append(
            Claim(
                f"{kind} aggressor: P99 at 50 × its share ÷ P99 at 5 × ≤ {WORSE_THAN_AT_5_MAX}",
                told(growth),
                growth.median <= WORSE_THAN_AT_5_MAX,
            )
        )
        claims.append(
            Claim(
                f"{kind} aggressor: P99 at 50 × its share ÷ strict priority's ≤ {WORSE_THAN_STRICT_MAX}",
                told(strict),
                strict.median <= WORSE_THAN_STRICT_MAX,
            )
        )
    tables = [_table(results, kind, column, title) for kind in KINDS for column, title in COLUMNS]
    figures = [(kind, _figure(results, kind)) for kind in KINDS]
    parameters = (
        *(plan_line(scene_of(kind, 5).plan, (f"here the {kind} aggressor at 5 × its share",)) for kind in KINDS),
        f"The aggressor's share is {SHARE_PER_S} requests/s; 4 workers; runs end after {UNTIL_S:.0f} s.",
    )
    return Page(tuple(claims), tuple(tables), tuple(figures), parameters)


COLUMNS = (
    ("well_behaved_p99_s", "well-behaved P99 time to first token (s)"),
    ("well_behaved_p50_s", "well-behaved P50 time to first token (s)"),
    ("requests_per_s", "requests/s of all"),
)


def _table(results: Results, kind: str, column: str, title: str) -> Table:
    rows = tuple(
        (policy, *(told(results.spread(label(kind, times, policy), column)) for times in TIMES))
        for policy in POLICIES
    )
    return Table(f"{kind.capitalize()} aggressor: {title}", ("policy", *(f"{times} ×" for times in TIMES)), rows)


def _figure(results: Results, kind: str) -> Figure:
    series = []
    for policy in POLICIES:
        points = []
        for times in TIMES:
            wait = results.spread(label(kind, times, policy), "well_behaved_p99_s")
            points.append(Point(times, wait.median, y_bar=(wait.least, wait.most)))
        series.append(Series(policy, tuple(points), strong=policy == OURS))
    return Figure(
        f"One {kind} tenant asks for more and more",
        Axis("what the aggressor asks for (times its share)", least=0.0),
        Axis("well-behaved P99 time to first token (s)", logarithmic=True),
        tuple(series),
    )


ISOLATION = Experiment(
    "isolation",
    "How long do the well-behaved wait as one tenant asks for up to 50 times its share?",
    cells,
    measure_case,
    page,
    seeds=10,
)
