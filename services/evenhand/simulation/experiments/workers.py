"""Whether unfairness grows with the number of workers.

Eight tenants with a prefix each ask for half as much again as the pool serves, on 1 to 64 workers. Every quarter
of a second the clocks v of those tenants that have something waiting are compared. All say truly how long their
outputs are, so the bound on the difference of two clocks is the window T and one largest charge, and what the map
had wrong of what is in flight.

The window is given as time, so that in tokens it grows with the pool's rate, and as a part of a second of the
pool's work it does not. To compare tokens with tokens, ours is also run with a window of a fixed number of them.
"""

from dataclasses import dataclass

from evenhand.policies.evenhand import Evenhand
from evenhand.policies.policy import Policy
from evenhand.simulation.experiments.cases import (
    NS_PER_S,
    Scene,
    Settings,
    TrialCase,
    figures,
    label_of,
    row_name,
    run_case,
    trial_cell,
)
from evenhand.simulation.experiments.experiment import Cell, Claim, Experiment, Measured, Page, Results, Table
from evenhand.simulation.experiments.figure import Axis, Figure, Point, Series
from evenhand.simulation.experiments.isolation import SLOW
from evenhand.simulation.experiments.page import number, plan_line, told
from evenhand.simulation.experiments.scenes import Crowd, Stream, scene
from evenhand.simulation.trials.settings import Intervention

WORKERS = (1, 4, 16, 64)
TENANTS = 8
PREFIX_TOKENS, PROMPT_TOKENS, OUTPUT_TOKENS = 2_048, 200, 100
CHARGE_MAX = PREFIX_TOKENS + PROMPT_TOKENS + 2 * OUTPUT_TOKENS
"""Of a request that finds nothing cached."""
PER_WORKER_PER_S = 13.0
DURATION_S = 12.0
FIXED_WINDOW = 8_000.0
LOOK_EVERY_NS = NS_PER_S // 4

FIXED: Settings = (("window_fixed", FIXED_WINDOW),)
POINTS: tuple[tuple[str, Settings], ...] = (
    ("evenhand", FIXED),
    ("evenhand", ()),
    ("vtc-affine", ()),
    ("dlpm", ()),
    ("d2lpm", ()),
)
D2LPM_QUANTUM = 20_000.0


@dataclass(slots=True)
class Clocks:
    """The widest difference of clocks that was seen."""

    difference: float = 0.0
    seconds: float = 0.0
    """The same ÷ the pool's learned cost rate then."""
    window: float = 0.0
    """The largest T in force."""

    def look(self, policy: Policy, now_ns: int) -> None:
        """Compare the clocks of all that wait."""
        assert isinstance(policy, Evenhand), "only ours has these clocks"
        status = policy.scheduler.status(now_ns)
        waiting = [tenant.virtual_time for tenant in status.tenants if tenant.in_a]
        self.window = max(self.window, *(band.window for band in status.bands))
        if len(waiting) > 1:
            difference = max(waiting) - min(waiting)
            self.difference = max(self.difference, difference)
            self.seconds = max(self.seconds, difference / status.cost_rate_per_s)


def scene_of(workers: int) -> Scene:
    """Demand in proportion to the pool."""
    stream_rate = PER_WORKER_PER_S * workers / TENANTS
    streams = tuple(
        Stream(
            f"tenant-{index}",
            stream_rate,
            prompt_tokens=PROMPT_TOKENS,
            prefix_tokens=PREFIX_TOKENS,
            output_tokens=OUTPUT_TOKENS,
            output_tokens_expected=OUTPUT_TOKENS,
            spread=False,
        )
        for index in range(TENANTS)
    )
    return scene(f"{workers} workers", Crowd(streams, duration_s=DURATION_S, step_time=SLOW))


def cells() -> tuple[Cell, ...]:
    """All sizes of the pool under each policy."""
    return tuple(
        trial_cell(TrialCase(policy, scene_of(workers), settings, workers=workers, until_s=DURATION_S))
        for workers in WORKERS
        for policy, settings in POINTS
    )


def measure_clocks(case: TrialCase, seed: int) -> Measured:
    """The usual figures; of ours also the clocks."""
    clocks = Clocks()
    looks = range(LOOK_EVERY_NS, int(case.until_s * NS_PER_S), LOOK_EVERY_NS)
    ours = case.policy == "evenhand"
    result = run_case(case, seed, [Intervention(at_ns, clocks.look) for at_ns in looks] if ours else ())
    return figures(result) | {
        "v_difference": clocks.difference,
        "v_difference_s": clocks.seconds,
        "window": clocks.window,
        "clock_bound": clocks.window + CHARGE_MAX,
    }


def label(workers: int, policy: str, settings: Settings = ()) -> str:
    """Of a cell."""
    return label_of(f"{workers} workers", policy, settings)


def page(results: Results) -> Page:
    """Bounds, and growth from one worker to 64."""
    claims = []
    bound = FIXED_WINDOW + CHARGE_MAX
    for workers in WORKERS:
        seen = results.spread(label(workers, "evenhand", FIXED), "v_difference")
        text = (
            f"{workers} workers, fixed window: no two clocks further apart than T + one charge = {number(bound)}"
        )
        claims.append(Claim(text, told(seen), seen.most <= bound))
    for workers in WORKERS:
        name = label(workers, "evenhand")
        room = results.ratio_of((name, "v_difference"), (name, "clock_bound"))
        text = f"{workers} workers, window in time: the widest difference ÷ (T + one charge) ≤ 1"
        claims.append(Claim(text, told(room), room.most <= 1.0))
    return Page(
        tuple(claims),
        (_ours(results), _everyone(results)),
        (("", _figure(results)),),
        (plan_line(scene_of(4).plan, ("here for 4 workers; rates grow with them",)),),
        (
            "D²LPM's published bound is 2 · workers · (U + Q), U being the cost of the largest request and Q the "
            f"quantum of a worker ({number(D2LPM_QUANTUM)}). Ours is T + one charge for two clocks, whatever the "
            "number of workers; service differs by at most both sides of that and what is in flight, as "
            "much as the workers hold.",
        ),
    )


def published_bound(workers: int) -> float:
    """Of D²LPM."""
    return 2.0 * workers * (CHARGE_MAX + D2LPM_QUANTUM)


def _ours(results: Results) -> Table:
    rows = []
    for workers in WORKERS:
        fixed, timed = label(workers, "evenhand", FIXED), label(workers, "evenhand")
        window = results.spread(timed, "window")
        rows.append(
            (
                str(workers),
                told(results.spread(fixed, "v_difference")),
                number(FIXED_WINDOW + CHARGE_MAX),
                told(results.spread(timed, "v_difference")),
                number(window.most + CHARGE_MAX),
                told(results.spread(timed, "v_difference_s")),
                number(published_bound(workers)),
            )
        )
    columns = (
        "workers",
        "fixed window: v difference",
        "T + charge",
        "default window: v difference",
        "T + charge",
        "in seconds of the pool's work",
        "D²LPM's published bound",
    )
    return Table("Widest difference of two clocks that both wait (cost tokens)", columns, tuple(rows))


def _everyone(results: Results) -> Table:
    rows = tuple(
        (
            row_name(policy, settings),
            *(told(results.spread(label(workers, policy, settings), "cost_difference")) for workers in WORKERS),
        )
        for policy, settings in POINTS
    )
    title = "Widest service difference of two that both wait (cost tokens)"
    return Table(title, ("policy", *(f"{workers} workers" for workers in WORKERS)), rows)


def _figure(results: Results) -> Figure:
    def line(name: str, policy: str, settings: Settings, column: str, strong: bool) -> Series:
        points = []
        for workers in WORKERS:
            seen = results.spread(label(workers, policy, settings), column)
            points.append(Point(workers, seen.median, y_bar=(seen.least, seen.most)))
        return Series(name, tuple(points), strong=strong)

    flat = tuple(Point(workers, FIXED_WINDOW + CHARGE_MAX) for workers in WORKERS)
    published = tuple(Point(workers, published_bound(workers)) for workers in WORKERS)
    return Figure(
        "Unfairness against the number of workers",
        Axis("workers", logarithmic=True),
        Axis("difference (cost tokens)", logarithmic=True),
        (
            line("ours: clocks", "evenhand", FIXED, "v_difference", True),
            Series("ours: bound", flat, dashed=True),
            line("ours: service", "evenhand", FIXED, "cost_difference", False),
            line("D²LPM: service", "d2lpm", (), "cost_difference", False),
            Series("D²LPM: bound", published, dashed=True),
            line("VTC affine: service", "vtc-affine", (), "cost_difference", False),
        ),
    )


WORKERS_EXPERIMENT = Experiment(
    "workers",
    "Does the bound on unfairness grow with the number of workers?",
    cells,
    measure_clocks,
    page,
)
