"""What a map that lags, loses or repeats costs, and what a scheduler that fails over in mid-run does to fairness.

The map's faults are tried on the hot tenant's workload. A lost batch is healed by a snapshot a second later, as an
edge sends one. With the approximate map workers publish nothing, and the scheduler assumes what it sent.

For the failover all tenants ask for more than their share, so that service can be compared throughout. A successor
restores a checkpoint that is one second old, adopts the tickets granted since, and is asked again for all that
waited. One bound is the window and two largest charges, in cost tokens.
"""

from dataclasses import dataclass, field

from evenhand.core.checkpoint import SchedulerCheckpoint
from evenhand.policies.evenhand import Evenhand
from evenhand.policies.policy import Policy
from evenhand.simulation.experiments.cases import (
    NS_PER_S,
    Scene,
    Settings,
    TrialCase,
    figures,
    run_case,
)
from evenhand.simulation.experiments.experiment import Cell, Claim, Experiment, Measured, Page, Results, Table
from evenhand.simulation.experiments.figure import Axis, Figure, Point, Series
from evenhand.simulation.experiments.isolation import SLOW
from evenhand.simulation.experiments.page import number, plan_line, told
from evenhand.simulation.experiments.scenes import Crowd, Stream, scene
from evenhand.simulation.trials.settings import Intervention, MapFaults
from evenhand.simulation.trials.workloads import WORKLOADS

OURS = "evenhand"
HOT = WORKLOADS["hot-tenant"]
HOT_SCENE = Scene(HOT.name, HOT.make, HOT.settings(**HOT.given))
LAGS_S = (0.0, 0.1, 0.5, 1.0, 2.0, 5.0)
LAGGED = (OURS, "longest-prefix", "vtc-affine")

CROWDED = scene(
    "all over their share",
    Crowd(
        tuple(
            Stream(f"tenant-{index}", 4.0, prompt_tokens=400, prefix_tokens=1_024, well_behaved=False)
            for index in range(6)
        ),
        duration_s=60.0,
        step_time=SLOW,
    ),
)
CHARGE_MAX = 1_024 + 600 + 2 * 200
FAILS_AT_S = (20.0, 35.0, 50.0)
CHECKPOINT_AGE_S = 1.0


@dataclass(frozen=True, slots=True)
class StaleCase:
    """A trial, and whether the scheduler fails over in it."""

    trial: TrialCase
    fails_at_s: tuple[float, ...] = ()


@dataclass(slots=True)
class Failover:
    """Takes checkpoints, and makes a successor of the last one."""

    checkpoint: SchedulerCheckpoint | None = None
    taken_at_ns: int = 0
    window: float = 0.0
    checkpoints: int = field(default=0)

    def take(self, policy: Policy, now_ns: int) -> None:
        """What a running scheduler writes every second."""
        assert isinstance(policy, Evenhand), "only ours is checkpointed"
        self.checkpoint, self.taken_at_ns = policy.scheduler.checkpoint(now_ns), now_ns
        self.window = max(self.window, *(band.window for band in policy.scheduler.status(now_ns).bands))

    def fail_over(self, policy: Policy, now_ns: int) -> None:
        """The process is gone; another one takes over."""
        assert isinstance(policy, Evenhand), "only ours fails over"
        assert self.checkpoint is not None, "a checkpoint comes first"
        policy.fail_over(self.checkpoint, now_ns - self.taken_at_ns, now_ns)


def _cell(label: str, policy: str, faults: MapFaults, settings: Settings = ()) -> Cell:
    return Cell(label, StaleCase(TrialCase(policy, HOT_SCENE, settings, map_faults=faults)), (policy,))


def lag_label(policy: str, lag_s: float) -> str:
    """Of a cell."""
    return f"{policy}: events {lag_s} s late"


FAULTS: tuple[tuple[str, MapFaults, Settings], ...] = (
    ("exact map", MapFaults(), ()),
    ("1 % of batches lost", MapFaults(lost=0.01), ()),
    ("10 % of batches lost", MapFaults(lost=0.1), ()),
    ("20 % of batches doubled", MapFaults(doubled=0.2), ()),
    (
        "0.5 s late, 10 % lost, 20 % doubled",
        MapFaults(lag_ns=NS_PER_S // 2, lost=0.1, doubled=0.2),
        (),
    ),
    ("approximate map, no events", MapFaults(), (("sends_events", False),)),
)


def cells() -> tuple[Cell, ...]:
    """Lags for three policies; other faults and failovers for ours."""
    crowded = TrialCase(OURS, CROWDED, until_s=60.0)
    return (
        *(
            _cell(lag_label(policy, lag), policy, MapFaults(int(lag * NS_PER_S)))
            for policy in LAGGED
            for lag in LAGS_S
        ),
        *(_cell(name, OURS, faults, settings) for name, faults, settings in FAULTS),
        Cell("no failover", StaleCase(crowded), (OURS,)),
        Cell("one failover", StaleCase(crowded, FAILS_AT_S[:1]), (OURS,)),
        Cell("three failovers", StaleCase(crowded, FAILS_AT_S), (OURS,)),
    )


def measure_stale(case: StaleCase, seed: int) -> Measured:
    """The usual figures, and the largest window in force where checkpoints are taken."""
    failover = Failover()
    acts = []
    if case.trial.scene == CROWDED:
        for at_s in FAILS_AT_S:
            acts.append(Intervention(int((at_s - CHECKPOINT_AGE_S) * NS_PER_S), failover.take))
            if at_s in case.fails_at_s:
                acts.append(Intervention(int(at_s * NS_PER_S), failover.fail_over))
    result = run_case(case.trial, seed, acts)
    return figures(result) | {"window": failover.window}


def page(results: Results) -> Page:
    """What staleness costs, and what a failover adds."""
    fresh, late = lag_label(OURS, 0.0), lag_label(OURS, LAGS_S[-1])
    kept = results.ratio(late, fresh, "requests_per_s")
    wait = results.ratio(late, lag_label("vtc-affine", LAGS_S[-1]), "well_behaved_p99_s")
    approximate = results.ratio("approximate map, no events", "exact map", "requests_per_s")
    bound = results.spread("no failover", "window").median + 2 * CHARGE_MAX
    claims = [
        Claim("requests/s with events 5 s late ÷ with none late ≥ 0.8", told(kept), kept.median >= 0.8),
        Claim("well-behaved P99 TTFT with events 5 s late ÷ VTC's ≤ 1.25", told(wait), wait.median <= 1.25),
        Claim(
            "requests/s with the approximate map ÷ the exact one ≥ 0.8",
            told(approximate),
            approximate.median >= 0.8,
        ),
    ]
    for name in ("one failover", "three failovers"):
        pairs = zip(
            results.each(name, "cost_difference"), results.each("no failover", "cost_difference"), strict=True
        )
        added = sorted(with_one - without for with_one, without in pairs)
        median = added[len(added) // 2]
        text = f"{name}: service difference added ≤ one bound, T + two charges = {number(bound)}"
        claims.append(Claim(text, f"{number(median)} ({number(added[0])}–{number(added[-1])})", median <= bound))
    return Page(
        tuple(claims),
        (
            _table(
                results, "Events that come late", [lag_label(policy, lag) for policy in LAGGED for lag in LAGS_S]
            ),
            _table(results, "Other faults of the map", [name for name, _, _ in FAULTS]),
            _table(results, "Failover", ["no failover", "one failover", "three failovers"]),
        ),
        (("", _figure(results)),),
        (
            plan_line(HOT_SCENE.plan, ("4 workers",)),
            plan_line(CROWDED.plan, ("4 workers", "ends after 60 s")),
        ),
    )


COLUMNS = (
    ("requests/s", "requests_per_s"),
    ("tokens/s", "tokens_per_s"),
    ("hit rate", "hit_rate"),
    ("well-behaved P99 TTFT (s)", "well_behaved_p99_s"),
    ("difference (cost)", "cost_difference"),
)


def _table(results: Results, title: str, labels: list[str]) -> Table:
    rows = tuple((label, *(told(results.spread(label, column)) for _, column in COLUMNS)) for label in labels)
    return Table(title, ("case", *(name for name, _ in COLUMNS)), rows)


def _figure(results: Results) -> Figure:
    series = []
    for policy in LAGGED:
        points = []
        for lag in LAGS_S:
            seen = results.spread(lag_label(policy, lag), "requests_per_s")
            points.append(Point(lag, seen.median, y_bar=(seen.least, seen.most)))
        series.append(Series(policy, tuple(points), strong=policy == OURS))
    return Figure(
        "Throughput with a map that lags",
        Axis("lag of cache events (s)", least=0.0),
        Axis("throughput (requests/s)", least=0.0),
        tuple(series),
    )


STALE = Experiment(
    "stale",
    "What does a stale map cost, and what does a failover add to unfairness?",
    cells,
    measure_stale,
    page,
)
