"""What clever and unkind tenants can take from others.

Three calm tenants ask for half of their share, and a busy but honest one for five times its share. Each adversary
joins them in turn. With equal weights an adversary is due no more than the busy tenant gets, however it asks; and
the calm should wait as they do beside any other busy tenant.

The last table is a known case by itself: one tenant whose prompts are all cached, and one whose 512-token prompts
never are, each with a long queue on one worker. Each is due half of the cost.
"""

from dataclasses import dataclass

from evenhand.simulation.experiments.cases import (
    NS_PER_S,
    Scene,
    TrialCase,
    cost_until,
    figures,
    label_of,
    run_case,
    trial_cell,
)
from evenhand.simulation.experiments.experiment import Cell, Claim, Experiment, Measured, Page, Results, Table
from evenhand.simulation.experiments.figure import Axis, Figure, Point, Series
from evenhand.simulation.experiments.isolation import SHARE_PER_S, SLOW
from evenhand.simulation.experiments.page import plan_line, told
from evenhand.simulation.experiments.scenes import Crowd, Stream, scene, with_stream
from evenhand.simulation.trials.record import TrialResult

OURS = "evenhand"
POLICIES = (OURS, "vtc-affine", "dlpm", "dynamo-classes", "longest-prefix")
UNTIL_S = 90.0
MORE_THAN_BUSY_MAX = 1.15
"""What an adversary may get, as a multiple of the busy tenant's service."""
HALF = (0.45, 0.55)

BASE = Crowd(
    (
        *(Stream(f"calm-{number}", SHARE_PER_S / 2) for number in range(3)),
        Stream("busy", 5 * SHARE_PER_S, well_behaved=False),
    ),
    duration_s=60.0,
    step_time=SLOW,
)


@dataclass(frozen=True, slots=True)
class Adversary:
    """One way to ask for more than one's share."""

    name: str
    what: str
    stream: Stream


def _bad(per_second: float, **more: object) -> Stream:
    return Stream("adversary", per_second, well_behaved=False, **more)  # type: ignore[arg-type]


ADVERSARIES = (
    Adversary("honest", "asks plainly for five times its share", _bad(5 * SHARE_PER_S)),
    Adversary("on-off", "bursts for 2 s, silent for 6 s", _bad(40.0, on_s=2.0, off_s=6.0)),
    Adversary(
        "canceller",
        "long outputs, all given up after 3 s",
        _bad(10.0, output_tokens=400, cancel_share=1.0, cancel_after_s=3.0),
    ),
    Adversary(
        "says-one", "says it expects 1 token, takes 400", _bad(8.0, output_tokens=400, output_tokens_expected=1)
    ),
    Adversary(
        "asks-8000", "allows 8,000 output tokens, takes 20", _bad(20.0, output_tokens=20, output_tokens_max=8_000)
    ),
    Adversary(
        "cached", "every prompt wholly cached", _bad(40.0, prompt_tokens=1, prefix_tokens=2_048, spread=False)
    ),
    Adversary("tiny", "100 tiny requests a second", _bad(100.0, prompt_tokens=10, output_tokens=2)),
    Adversary("huge", "prompts of 12,000 tokens", _bad(1.5, prompt_tokens=8_000, output_tokens=200)),
    Adversary(
        "long-outputs", "outputs of 2,000 tokens hold every slot", _bad(5.0, prompt_tokens=50, output_tokens=2_000)
    ),
    Adversary("identities", "one client as eight tenants", _bad(5 * SHARE_PER_S, identities=8)),
)

CACHED_CASE = scene(
    "half each",
    Crowd(
        (
            Stream(
                "cached", 0.0, prompt_tokens=1, prefix_tokens=512, output_tokens=8, spread=False, at_once=12_000
            ),
            Stream("uncached", 0.0, prompt_tokens=512, output_tokens=8, spread=False, at_once=2_000),
        ),
        step_time=SLOW,
    ),
)
CACHED_UNTIL_S = 120.0
CACHED_POLICIES = (OURS, "vtc-affine", "dlpm", "dynamo-classes", "longest-prefix")


def scene_of(adversary: Adversary) -> Scene:
    """The four, and the adversary."""
    return scene(adversary.name, with_stream(BASE, adversary.stream))


ALONE = scene("nobody", BASE)


def cells() -> tuple[Cell, ...]:
    """Every adversary and none, under every policy; then the known case."""
    scenes = [ALONE, *(scene_of(adversary) for adversary in ADVERSARIES)]
    return (
        *(trial_cell(TrialCase(policy, one, until_s=UNTIL_S)) for one in scenes for policy in POLICIES),
        *(
            trial_cell(TrialCase(policy, CACHED_CASE, workers=1, until_s=CACHED_UNTIL_S))
            for policy in CACHED_POLICIES
        ),
    )


def measure_adversary(case: TrialCase, seed: int) -> Measured:
    """The usual figures, and what each side got while anybody still arrived."""
    result = run_case(case, seed)
    told_of = figures(result)
    if case.scene == CACHED_CASE:
        return told_of | _halves(result)
    until_ns = result.arrivals_ended_ns
    adversary = sum(cost_until(result, name, until_ns) for name in result.series if name.startswith("adversary"))
    busy = cost_until(result, "busy", until_ns)
    return told_of | {
        "busy_cost": busy,
        "adversary_cost": adversary,
        "adversary_by_busy": adversary / max(1.0, busy),
    }


def _halves(result: TrialResult) -> dict[str, float]:
    """Cost of both while requests of both waited."""
    cached, uncached = result.series["cached"], result.series["uncached"]
    both = [a and b for a, b in zip(cached.backlogged, uncached.backlogged, strict=True)]
    begin = both.index(1) if 1 in both else len(both)
    seconds = both.index(0, begin) if 0 in both[begin:] else len(both)
    costs = [
        cost_until(result, name, seconds * NS_PER_S) - cost_until(result, name, begin * NS_PER_S)
        for name in ("cached", "uncached")
    ]
    total = max(1.0, sum(costs))
    return {
        "cached_share": costs[0] / total,
        "uncached_cost": costs[1],
        "cached_cost": costs[0],
        "both_s": seconds,
    }


def page(results: Results) -> Page:
    """What the adversary got beside the busy tenant, and how the calm waited."""
    claims = []
    for adversary in ADVERSARIES:
        ratio = results.spread(label_of(adversary.name, OURS), "adversary_by_busy")
        if adversary.stream.identities == 1:
            text = f"{adversary.name}: it gets at most {MORE_THAN_BUSY_MAX} × what the busy, honest tenant gets"
            claims.append(Claim(text, told(ratio), ratio.median <= MORE_THAN_BUSY_MAX))
    half = results.spread(label_of(CACHED_CASE.name, OURS), "cached_share")
    text = f"all cached against 512 uncached tokens: the cached one's part of the cost is {HALF[0]} … {HALF[1]}"
    claims.append(Claim(text, told(half), HALF[0] <= half.median <= HALF[1]))
    return Page(
        tuple(claims),
        (
            _table(results, "well_behaved_p99_s", "P99 time to first token of the calm (s)", with_nobody=True),
            _table(results, "adversary_by_busy", "The adversary's service ÷ the busy tenant's", with_nobody=False),
            _table(results, "busy_cost", "The busy tenant's service (cost tokens)", with_nobody=True),
            _half_table(results),
        ),
        (("", _figure(results)),),
        (
            plan_line(BASE, ("4 workers", f"runs end after {UNTIL_S:.0f} s")),
            *(f"Adversary {one.name}: {one.what}; `{one.stream!r}`" for one in ADVERSARIES),
            plan_line(CACHED_CASE.plan, ("1 worker", f"ends after {CACHED_UNTIL_S:.0f} s")),
        ),
        (
            "One client under eight names is eight tenants and is given eight shares: names are handed out by the "
            "administrator. Users of one tenant share its part instead (see the experiment on levels).",
        ),
    )


def _table(results: Results, column: str, title: str, with_nobody: bool) -> Table:
    names = [*(["nobody"] if with_nobody else []), *(adversary.name for adversary in ADVERSARIES)]
    rows = tuple(
        (name, *(told(results.spread(label_of(name, policy), column)) for policy in POLICIES)) for name in names
    )
    return Table(title, ("adversary", *POLICIES), rows)


def _half_table(results: Results) -> Table:
    columns = ("cached_share", "cached_cost", "uncached_cost", "both_s")
    rows = tuple(
        (policy, *(told(results.spread(label_of(CACHED_CASE.name, policy), column)) for column in columns))
        for policy in CACHED_POLICIES
    )
    title = "One tenant wholly cached, one never, both with long queues on one worker"
    return Table(title, ("policy", "cached one's part", "its cost", "the other's cost", "both waited (s)"), rows)


def _figure(results: Results) -> Figure:
    series = []
    for policy in POLICIES:
        points = []
        for number, adversary in enumerate(ADVERSARIES, 1):
            wait = results.spread(label_of(adversary.name, policy), "well_behaved_p99_s")
            label = adversary.name if policy == OURS else ""
            points.append(Point(number, wait.median, y_bar=(wait.least, wait.most), label=label))
        series.append(Series(policy, tuple(points), line=False, strong=policy == OURS))
    return Figure(
        "How long the calm wait beside each adversary",
        Axis("adversary (number of its row)"),
        Axis("P99 time to first token of the calm (s)", logarithmic=True),
        tuple(series),
    )


ADVERSARIES_EXPERIMENT = Experiment(
    "adversaries",
    "What can a tenant gain, and others lose, by asking cleverly?",
    cells,
    measure_adversary,
    page,
)
