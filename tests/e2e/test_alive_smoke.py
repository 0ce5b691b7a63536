"""The benchmark beside real routers, in small: its harness runs, counts and judges."""

import dataclasses
import math
from typing import Any

import pytest
from tests.benchmarks.alive.figures import figures
from tests.benchmarks.alive.measure import Row, RunConfig, TenantRow, run_row
from tests.benchmarks.alive.plan import TENANTS
from tests.benchmarks.alive.report import line, page
from tests.benchmarks.alive.routes import KINDS

SMALL = RunConfig(seconds=5.0, warm_up_s=0.0, quiet_s=2.0, drain_s_max=10.0)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", ["round-robin", "evenhand"])
async def test_every_arrival_is_answered_and_counted(name: str) -> None:
    kind = next(kind for kind in KINDS if kind.name == name)
    row = await run_row(kind, 1.0, SMALL)
    print(line(row))
    assert not row.skipped
    assert not row.failures, row.failures
    assert row.everybody.arrived > 10
    assert row.everybody.finished == row.everybody.arrived
    assert 0 < row.well_behaved.p50_ms <= row.well_behaved.p99_ms < 10_000
    assert sum(tenant.work for tenant in row.tenants.values()) == pytest.approx(row.everybody.work)
    assert 0.1 < row.hit_rate < 1.0
    assert row.requests_per_s > 0
    assert row.cpu.client > 0
    assert row.cpu.engines > 0
    assert (row.cpu.router > 0) == (name == "evenhand")
    text = page([row], SMALL, 5.0)
    assert all(tenant in text for tenant in TENANTS)
    assert f"| {name}" in text


def _rows(factor: float, evenhand: TenantRow, other: str, theirs: TenantRow) -> list[Row]:
    return [
        Row("evenhand", factor, well_behaved=evenhand, everybody=evenhand),
        Row(other, factor, well_behaved=theirs, everybody=theirs),
    ]


FINE = TenantRow(100, 0, 0, 100, 50.0, 100.0, 1e4, 1e5)


@pytest.mark.parametrize(
    ("factor", "other", "worse"),
    [
        (1.0, "vllm-kv", {"p50_ms": 51.0}),
        (4.0, "vllm-kv", {"p99_ms": 101.0}),
        (4.0, "vllm-kv", {"work": 9e4}),
        (16.0, "kvwarden", {"unserved": 1}),
        (16.0, "kvwarden", {"p99_ms": 121.0}),
        (16.0, "kvwarden", {"work": 1e5 - 1}),
    ],
)
def test_a_missed_figure_is_said(factor: float, other: str, worse: dict[str, Any]) -> None:
    theirs = dataclasses.replace(FINE, p99_ms=200.0, work=9.9e4) if factor == 16.0 else FINE
    if "work" in worse and factor == 16.0:
        theirs = dataclasses.replace(theirs, work=1e5)
        assert not all(
            figure.held for figure in figures(_rows(factor, dataclasses.replace(FINE, **worse), other, theirs))
        )
        return
    assert all(figure.held for figure in figures(_rows(factor, FINE, other, theirs)))
    missed = [f for f in figures(_rows(factor, dataclasses.replace(FINE, **worse), other, theirs)) if not f.held]
    assert len(missed) == 1


def test_a_row_that_cannot_be_had_says_why_and_judges_nothing() -> None:
    tenants = dict.fromkeys(TENANTS, FINE)
    ours = Row("evenhand", 1.0, tenants=tenants, well_behaved=FINE, everybody=FINE)
    rows = [ours, Row("vllm-kv", 1.0, skipped="no such wheel")]
    assert [figure.held for figure in figures(rows)] == [None]
    assert "no such wheel" in page(rows, SMALL, 1.0)
    assert math.isnan(rows[1].well_behaved.p50_ms)
