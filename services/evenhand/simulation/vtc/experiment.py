"""VTC's published measurements as one experiment: published, ours, and their ratio, with Evenhand's core beside.

What it is for: a simulated engine is believed where it repeats what was measured on a real one.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import assert_never

from evenhand.core.ids import WorkerId
from evenhand.policies.policy import FleetWorker
from evenhand.policies.table import make_policy
from evenhand.policies.vtc import Prediction
from evenhand.simulation.experiments.experiment import (
    Cell,
    Claim,
    Experiment,
    Measured,
    Page,
    Results,
    Table,
    spread,
)
from evenhand.simulation.experiments.figure import Axis, Figure, Point, Series
from evenhand.simulation.experiments.page import number, told
from evenhand.simulation.vtc.fronts import Behind, Front, InEngine
from evenhand.simulation.vtc.measures import (
    MOMENTS,
    accumulated_differences,
    first_token_p99_s,
    moments_s,
    tokens_per_s,
    windowed_differences,
)
from evenhand.simulation.vtc.orders import VtcOrder
from evenhand.simulation.vtc.published import MEASUREMENTS, Measure, Measurement, Rule
from evenhand.simulation.vtc.remarks import REMARKS
from evenhand.simulation.vtc.server import ADMISSION, KV_TOKENS, LIMITS, SEQUENCES_MAX, STEP_TIME, serve
from evenhand.simulation.vtc.workloads import LATE_MS_MAX, NS_PER_S, clients_of

RATIO_LEAST, RATIO_MOST = 0.75, 1.25
RENEWED_AFTER_MS = 10_000


@dataclass(frozen=True, slots=True)
class Case:
    """One measurement under one rule."""

    measurement: Measurement
    rule: Rule


def label_of(measurement: Measurement, rule: Rule) -> str:
    """Of a cell."""
    return f"{measurement.name}/{rule.value}"


def cells() -> tuple[Cell, ...]:
    """Each measurement under each rule that has a published figure there, and under ours."""
    return tuple(
        Cell(label_of(measurement, rule), Case(measurement, rule))
        for measurement in MEASUREMENTS
        for rule in measurement.rules()
    )


def front_of(rule: Rule, seed: int) -> Front:
    """A fresh front for one run."""
    match rule:
        case Rule.FCFS:
            return InEngine()
        case Rule.VTC:
            return InEngine(VtcOrder(Prediction.NONE, seed))
        case Rule.VTC_NOISY:
            return InEngine(VtcOrder(Prediction.NOISY, seed))
        case Rule.VTC_ORACLE:
            return InEngine(VtcOrder(Prediction.ORACLE, seed))
        case Rule.EVENHAND:
            return _evenhand({}, seed)
        case Rule.EVENHAND_T0:
            return _evenhand({"window_delay_ms": 0.0}, seed)
        case _ as never:
            assert_never(never)


def measure(case: Case, seed: int) -> Measured:
    """One run: the measured figure, throughput, length, and the figure's curve."""
    asks = case.measurement.asks(case.rule, seed)
    served = serve(asks, front_of(case.rule, seed))
    curve: list[float] = []
    match case.measurement.measure:
        case Measure.ACCUMULATED:
            curve = accumulated_differences(served)
            figure = max(curve)
        case Measure.WINDOWED:
            curve = windowed_differences(served)
            figure = max(curve)
        case Measure.FIRST_WAIT:
            figure = first_token_p99_s(served, clients_of(asks)[0])
        case _ as never:
            assert_never(never)
    return {
        "figure": figure,
        "tokens_per_s": tokens_per_s(served),
        "length_s": served[-1].end_ns / NS_PER_S,
        **{f"moment_{index}": value for index, value in enumerate(curve)},
    }


def page(results: Results) -> Page:
    """Published, ours, ratio; throughput; one figure for each kind of difference."""
    return Page(
        claims=tuple(_claims(results)),
        tables=(*(_table(results, measurement) for measurement in MEASUREMENTS), _throughput(results)),
        figures=(
            ("overload", _figure(results, MEASUREMENTS[0], logarithmic=True)),
            ("arena", _figure(results, MEASUREMENTS[-1], logarithmic=False)),
        ),
        parameters=PARAMETERS,
        remarks=(REMARKS.strip(),),
    )


def _evenhand(changes: Mapping[str, object], seed: int) -> Behind:
    settings = {"sends_events": False, "renewed_after_ms": RENEWED_AFTER_MS, **changes}
    # One token a block: the engine here reserves tokens, not blocks.
    worker = FleetWorker(WorkerId("a10g"), SEQUENCES_MAX, KV_TOKENS, 1, LIMITS.batched_tokens_max)
    return Behind(make_policy("evenhand", settings, seed), worker)


def _claims(results: Results) -> list[Claim]:
    ratios: dict[str, float] = {}
    ordered = True
    for measurement in MEASUREMENTS:
        ours = [results.spread(label_of(measurement, rule), "figure").median for rule, _ in measurement.published]
        ordered = ordered and all(more > less for more, less in pairwise(ours))
        for (rule, published), figure in zip(measurement.published, ours, strict=True):
            ratios[f"{measurement.name}, {rule.value}"] = figure / published
    near = {name: ratio for name, ratio in ratios.items() if RATIO_LEAST <= ratio <= RATIO_MOST}
    off = "; off: " + ", ".join(f"{name} {number(ratios[name])}" for name in ratios if name not in near)
    return [
        Claim("rules in the published order in every measurement (medians)", "yes" if ordered else "no", ordered),
        Claim(
            "most published figures met within a quarter (medians)",
            f"{len(near)} of {len(ratios)}" + (off if len(near) < len(ratios) else ""),
            len(near) > len(ratios) / 2,
        ),
    ]


def _table(results: Results, measurement: Measurement) -> Table:
    published = dict(measurement.published)
    rows = []
    for rule in measurement.rules():
        ours = results.spread(label_of(measurement, rule), "figure")
        known = published.get(rule)
        ratio = number(ours.median / known) if known is not None else "–"
        rows.append((rule.value, number(known) if known is not None else "–", told(ours), ratio))
    title = f"{measurement.name.capitalize()}: {measurement.measure.value}"
    workload = f"{measurement.told[0].upper()}{measurement.told[1:]}."
    return Table(title, ("rule", "published", "ours", "ratio"), tuple(rows), note=workload)


def _throughput(results: Results) -> Table:
    rows = []
    for rule in Rule:
        row = [rule.value]
        for measurement in MEASUREMENTS:
            label = label_of(measurement, rule)
            row.append(told(results.spread(label, "tokens_per_s")) if label in results else "–")
        rows.append(tuple(row))
    columns = ("rule", *(measurement.name for measurement in MEASUREMENTS))
    return Table("Throughput (tokens/s, the drain included)", columns, tuple(rows), note=RECORDED)


def _figure(results: Results, measurement: Measurement, *, logarithmic: bool) -> Figure:
    series = []
    for rule in measurement.rules():
        label = label_of(measurement, rule)
        curve = [spread(results.each(label, f"moment_{index}")).median for index in range(MOMENTS - 1)]
        points = tuple(Point(30 + x, y) for x, y in zip(moments_s(), curve, strict=True))
        series.append(Series(rule.value, points, strong=rule is Rule.EVENHAND))
    kind = "accumulated since 30 s" if measurement.measure is Measure.ACCUMULATED else "in the 60 s around"
    unit = "cost tokens" if measurement.measure is Measure.ACCUMULATED else "cost tokens/s"
    return Figure(
        f"{measurement.name.capitalize()}: service difference (median over seeds)",
        Axis("time (s)", least=0.0),
        Axis(f"difference {kind} ({unit})", logarithmic=logarithmic, least=1.0 if logarithmic else 0.0),
        tuple(series),
    )


RECORDED = (
    "The recorded runs: overload 876 (FCFS) and 893 (VTC), eight clients 875, on-off 875 and 877, proportional "
    "856 and 883, arena 777 and 779 tokens/s. Two runs of one kind differ by up to 3 % there."
)

PARAMETERS = (
    f"Engine: {KV_TOKENS:,} KV tokens; prompts apart from decoding, at most {LIMITS.batched_tokens_max:,} prompt "
    f"tokens at once, {ADMISSION.decode_steps_min} decode steps between admissions, every output reserved; "
    f"{ADMISSION.adapter_tokens} tokens for each client in the batch, as that server takes them for adapters.",
    f"Times: `{STEP_TIME!r}`.",
    f"Arena trace: each arrival up to {LATE_MS_MAX} ms late, drawn by the seed; elsewhere it draws phases.",
)

VTC = Experiment(
    "vtc",
    "Does the simulated engine repeat what VTC's authors measured on a real one?",
    cells,
    measure,
    page,
    title="VTC's published measurements",
    seeds=7,
    also=("evenhand.policies.table",),
)
