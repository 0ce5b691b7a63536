"""What is wanted of the rows of one run, and whether it is met.

- At 1 × and 4 ×, the well-behaved tenants' median and 99th percentile to the first token, and the work delivered
  to them, are no worse than with ``vllm-router --policy kv_aware``, the best router without tenants there.
- At 16 ×, where every router without tenants leaves about half of their demand unserved, all of it is served, the
  99th percentile is at most 0.6 of kvwarden's deficit round robin, and more work is delivered in all.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tests.benchmarks.alive.measure import Row
from tests.benchmarks.alive.routes import KINDS

OURS, BEST_PLAIN, BEST_FAIR = "evenhand", "vllm-kv", "kvwarden"
P99_PART_MAX = 0.6
UNSERVED_PART_MIN = 0.4
"""*About half*."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One wanted figure. ``held`` None: a row that it needs was not measured."""

    wanted: str
    got: str
    held: bool | None


def figures(rows: Sequence[Row]) -> list[Figure]:
    """Every wanted figure that belongs to a factor that was run."""
    found: list[Figure] = []
    for factor in dict.fromkeys(row.factor for row in rows):
        measured = {row.route: row for row in rows if row.factor == factor and not row.skipped}
        if factor in (1.0, 4.0):
            found += _beside_best_plain(measured, factor)
        if factor == 16.0:
            found += _beside_best_fair(measured)
    return found


def _beside_best_plain(rows: dict[str, Row], factor: float) -> Iterator[Figure]:
    if OURS not in rows or BEST_PLAIN not in rows:
        yield Figure(f"{factor:g} ×: no worse than kv_aware", "not measured", None)
        return
    ours, theirs = rows[OURS].well_behaved, rows[BEST_PLAIN].well_behaved
    for name, mine, other in (("P50", ours.p50_ms, theirs.p50_ms), ("P99", ours.p99_ms, theirs.p99_ms)):
        got = f"{mine:.0f} ms, {other:.0f} ms"
        yield Figure(f"{factor:g} ×: well-behaved {name} ≤ kv_aware's", got, mine <= other)
    got = f"{ours.work / 1e3:.1f} k, {theirs.work / 1e3:.1f} k"
    enough = round(ours.work) >= round(theirs.work)
    yield Figure(f"{factor:g} ×: well-behaved work delivered ≥ kv_aware's", got, enough)


def _beside_best_fair(rows: dict[str, Row]) -> Iterator[Figure]:
    for kind in KINDS:
        if kind.plain and kind.name in rows:
            plain = rows[kind.name].well_behaved
            part = plain.unserved / max(1, plain.arrived)
            wanted = f"16 ×: {kind.name} leaves about half of the well-behaved demand unserved"
            yield Figure(wanted, f"{part:.0%}", part >= UNSERVED_PART_MIN)
    if OURS not in rows or BEST_FAIR not in rows:
        yield Figure("16 ×: beside kvwarden's deficit round robin", "not measured", None)
        return
    ours, theirs = rows[OURS], rows[BEST_FAIR]
    mine, other = ours.well_behaved, theirs.well_behaved
    yield Figure("16 ×: all well-behaved demand served", f"{mine.unserved} unserved", mine.unserved == 0)
    part = mine.p99_ms / other.p99_ms
    yield Figure(
        f"16 ×: well-behaved P99 ≤ {P99_PART_MAX:g} × kvwarden's",
        f"{mine.p99_ms:.0f} ms, {other.p99_ms:.0f} ms: {part:.2f} ×",
        part <= P99_PART_MAX,
    )
    yield Figure(
        "16 ×: more work delivered than by kvwarden",
        f"{ours.everybody.work / 1e3:.0f} k, {theirs.everybody.work / 1e3:.0f} k",
        ours.everybody.work > theirs.everybody.work,
    )
