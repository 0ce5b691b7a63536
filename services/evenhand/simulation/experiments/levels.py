"""Whether every level gives what it says: weights, bands, users, guarantees, limits, and changes while running.

In each case everybody asks for more than is due to it, all the time. Shares are of the cost of requests that ended
in a stretch of the run: early, before anything is changed, and late, well after it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from evenhand.core.facts import CostWeights, RateLimits, TenantSpec
from evenhand.core.ids import TenantId
from evenhand.core.steps import BandsChanged
from evenhand.policies.evenhand import QUEUE_LENGTH_MAX, Evenhand
from evenhand.policies.policy import Policy
from evenhand.simulation.experiments.cases import NS_PER_S, Settings, TrialCase, figures, run_case
from evenhand.simulation.experiments.experiment import Cell, Claim, Experiment, Measured, Page, Results, Table
from evenhand.simulation.experiments.figure import Axis, Figure, Point, Series
from evenhand.simulation.experiments.isolation import SLOW
from evenhand.simulation.experiments.page import number, plan_line, told
from evenhand.simulation.experiments.scenes import Crowd, Stream, scene
from evenhand.simulation.trials.record import TrialResult
from evenhand.simulation.trials.settings import Intervention

OURS = "evenhand"
CHANGE_S = 40.0
EARLY_S, LATE_S = (10.0, 40.0), (50.0, 80.0)
UNTIL_S = 80.0
OFF_MAX = 0.04
"""How far a share may be from what is due."""
COST = CostWeights()


@dataclass(frozen=True, slots=True)
class LevelCase:
    """One case: who is there, what is said of them at the start and later, and what each is due."""

    name: str
    streams: tuple[Stream, ...]
    early: tuple[TenantSpec, ...]
    due_early: tuple[tuple[str, float], ...]
    """By tenant, or ``tenant/user``."""
    later: tuple[TenantSpec, ...] = ()
    due_late: tuple[tuple[str, float], ...] = ()
    bands: tuple[tuple[str, float], ...] = ()
    bands_later: tuple[tuple[str, float], ...] = ()
    at_least: bool = False
    """What is due is a floor, not a share."""
    requests_per_minute: tuple[tuple[str, float], ...] = ()
    """Tenants whose admitted requests may be no more than that, with a tenth more for the burst."""


def _spec(name: str, **more: object) -> TenantSpec:
    return TenantSpec(TenantId(name), queue_length_max=QUEUE_LENGTH_MAX, **more)  # type: ignore[arg-type]


def _streams(*names: str, per_second: float = 20.0) -> tuple[Stream, ...]:
    return tuple(Stream(name, per_second, prompt_tokens=600, well_behaved=False) for name in names)


LEVELS = (
    LevelCase(
        "weights 1, 2 and 4",
        _streams("one", "two", "four"),
        (_spec("one"), _spec("two", weight=2.0), _spec("four", weight=4.0)),
        (("one", 1 / 7), ("two", 2 / 7), ("four", 4 / 7)),
    ),
    LevelCase(
        "a weight becomes 4 while running",
        _streams("a", "b", "c"),
        (_spec("a"), _spec("b"), _spec("c")),
        (("a", 1 / 3), ("b", 1 / 3), ("c", 1 / 3)),
        (_spec("a", weight=4.0),),
        (("a", 4 / 6), ("b", 1 / 6), ("c", 1 / 6)),
    ),
    LevelCase(
        "bands 3 and 1, two and three tenants",
        _streams("gold-a", "gold-b", "plain-a", "plain-b", "plain-c"),
        (
            *(_spec(name, band="gold") for name in ("gold-a", "gold-b")),
            *(_spec(name, band="default") for name in ("plain-a", "plain-b", "plain-c")),
        ),
        (("gold-a", 3 / 8), ("gold-b", 3 / 8), ("plain-a", 1 / 12), ("plain-b", 1 / 12), ("plain-c", 1 / 12)),
        (),
        (("gold-a", 1 / 4), ("gold-b", 1 / 4), ("plain-a", 1 / 6), ("plain-b", 1 / 6), ("plain-c", 1 / 6)),
        bands=(("gold", 3.0), ("default", 1.0)),
        bands_later=(("gold", 1.0), ("default", 1.0)),
    ),
    LevelCase(
        "users with weights 1 and 3 beside another tenant",
        (
            Stream("team", 40.0, prompt_tokens=600, users=2, well_behaved=False),
            *_streams("other"),
        ),
        (_spec("team", user_weights=(("user-1", 3.0),)), _spec("other")),
        (("team/user-0", 1 / 8), ("team/user-1", 3 / 8), ("other", 1 / 2)),
    ),
    LevelCase(
        "a guarantee of half beside five",
        _streams("sure", "a", "b", "c", "d", "e", per_second=15.0),
        (_spec("sure", guaranteed_share=0.5), *(_spec(name) for name in "abcde")),
        (),
        (),
        (("sure", 0.5),),
        at_least=True,
    ),
    LevelCase(
        "60 requests a minute from the middle on",
        _streams("limited", "a", "b"),
        (_spec("limited"), _spec("a"), _spec("b")),
        (("limited", 1 / 3), ("a", 1 / 3), ("b", 1 / 3)),
        (_spec("limited", rate_limits=RateLimits(requests_per_minute=60)),),
        requests_per_minute=(("limited", 60.0),),
    ),
)


def cells() -> tuple[Cell, ...]:
    """One a case."""
    return tuple(Cell(case.name, case, (OURS,)) for case in LEVELS)


def _trial(case: LevelCase) -> TrialCase:
    settings: Settings = (("bands", case.bands),) if case.bands else ()
    plan = Crowd(case.streams, duration_s=UNTIL_S, step_time=SLOW)
    return TrialCase(OURS, scene(case.name, plan), settings, until_s=UNTIL_S)


def measure_levels(case: LevelCase, seed: int) -> Measured:
    """Share of each part, early and late, and requests a minute."""

    def at_first(policy: Policy, now_ns: int) -> None:
        assert isinstance(policy, Evenhand), "levels are ours"
        for spec in case.early:
            policy.tenant_changed(spec, now_ns)

    def later(policy: Policy, now_ns: int) -> None:
        assert isinstance(policy, Evenhand), "levels are ours"
        if case.bands_later:
            policy.step(BandsChanged(case.bands_later), now_ns)
        for spec in case.later:
            policy.tenant_changed(spec, now_ns)

    acts = [Intervention(0, at_first), Intervention(int(CHANGE_S * NS_PER_S), later)]
    result = run_case(_trial(case), seed, acts)
    told_of = figures(result)
    for when, stretch in (("early", EARLY_S), ("late", LATE_S)):
        costs = _costs(result, stretch)
        total = sum(cost for part, cost in costs.items() if "/" not in part) or 1.0
        for part, cost in costs.items():
            told_of[f"{when} {part}"] = cost / total
    for tenant, _ in case.requests_per_minute:
        told_of[f"per_minute {tenant}"] = _per_minute(result, tenant)
    return told_of


def _costs(result: TrialResult, stretch_s: tuple[float, float]) -> Mapping[str, float]:
    """Cost of what ended within a stretch, by tenant and by ``tenant/user``."""
    costs: dict[str, float] = {}
    begin_ns, end_ns = (int(at_s * NS_PER_S) for at_s in stretch_s)
    for outcome in result.outcomes:
        if not outcome.served or not begin_ns <= outcome.finished_ns < end_ns:
            continue
        arrival = outcome.arrival
        cost = COST.cost(
            arrival.prompt_tokens - outcome.cached_tokens, outcome.cached_tokens, outcome.output_tokens
        )
        parts = [arrival.tenant, *([f"{arrival.tenant}/{arrival.user}"] if arrival.user else [])]
        for part in parts:
            costs[part] = costs.get(part, 0.0) + cost
    return costs


def _per_minute(result: TrialResult, tenant: str) -> float:
    """Requests of a tenant admitted a minute, late."""
    begin_ns, end_ns = (int(at_s * NS_PER_S) for at_s in LATE_S)
    admitted = sum(
        outcome.arrival.tenant == tenant and not outcome.refused and begin_ns <= outcome.arrival.at_ns < end_ns
        for outcome in result.outcomes
    )
    return admitted * 60.0 / (LATE_S[1] - LATE_S[0])


def page(results: Results) -> Page:
    """What was due and what was got, part by part."""
    claims: list[Claim] = []
    rows = []
    points = []
    for case in LEVELS:
        for when, due in (("early", case.due_early), ("late", case.due_late)):
            for part, share in due:
                got = results.spread(case.name, f"{when} {part}")
                close = got.median >= share - OFF_MAX if case.at_least else abs(got.median - share) <= OFF_MAX
                bound = f"at least {number(share)}" if case.at_least else number(share)
                rows.append((f"{case.name}, {when}: {part}", bound, told(got), "yes" if close else "**no**"))
                points.append(Point(share, got.median, y_bar=(got.least, got.most)))
        for tenant, most in case.requests_per_minute:
            seen = results.spread(case.name, f"per_minute {tenant}")
            kept = seen.most <= most * 1.1
            name = f"{case.name}, late: {tenant}, admitted a minute"
            rows.append((name, f"at most {number(most)}", told(seen), "yes" if kept else "**no**"))
        mine = [row for row in rows if row[0].startswith(case.name)]
        wrong = [row[0] for row in mine if row[3] != "yes"]
        text = f"{case.name}: each part within {OFF_MAX} of what is due"
        claims.append(Claim(text, f"{len(mine) - len(wrong)} of {len(mine)}", not wrong))
    table = Table("Shares", ("part", "due", "got", "as due"), tuple(rows))
    diagonal = (Point(0.0, 0.0), Point(0.7, 0.7))
    figure = Figure(
        "Share due and share got",
        Axis("share due", least=0.0),
        Axis("share got", least=0.0),
        (Series("parts", tuple(points), line=False, strong=True), Series("as due", diagonal, dashed=True)),
    )
    parameters = (
        *(plan_line(case.streams, (f"`{case.early!r}`", f"later `{case.later!r}`")) for case in LEVELS),
        f"4 workers; changes at {CHANGE_S:.0f} s; early is {EARLY_S} s, late is {LATE_S} s.",
    )
    return Page(tuple(claims), (table,), (("", figure),), parameters)


LEVELS_EXPERIMENT = Experiment(
    "levels",
    "Do weights, bands, users, guarantees and limits give what they say, and after a change too?",
    cells,
    measure_levels,
    page,
)
