"""The published figures come out: order and factors of two measurements, and the page says what is off."""

from pathlib import Path

import pytest

from evenhand.simulation import main as simulate
from evenhand.simulation.experiments.experiment import Results
from evenhand.simulation.experiments.page import plain
from evenhand.simulation.vtc import main as command
from evenhand.simulation.vtc.experiment import RATIO_LEAST, RATIO_MOST, VTC, Case, cells, measure
from evenhand.simulation.vtc.published import MEASUREMENTS, Measurement, Rule

SEED = 7
OVERLOAD, _EIGHT, ON_OFF, _PROPORTIONAL, _ARENA = MEASUREMENTS


def ratios(measurement: Measurement) -> tuple[list[float], list[float]]:
    """Our figures in the published order, and each ÷ the published one."""
    figures = [measure(Case(measurement, rule), SEED)["figure"] for rule, _figure in measurement.published]
    published = [figure for _rule, figure in measurement.published]
    return figures, [ours / theirs for ours, theirs in zip(figures, published, strict=True)]


@pytest.mark.parametrize("measurement", [OVERLOAD, ON_OFF], ids=lambda measurement: measurement.name)
def test_published_order_and_factors_come_out(measurement: Measurement) -> None:
    figures, factors = ratios(measurement)
    assert figures == sorted(figures, reverse=True), f"seed {SEED}"
    if measurement is OVERLOAD:
        assert all(RATIO_LEAST <= factor <= RATIO_MOST for factor in factors), f"seed {SEED}: {factors}"
    else:
        assert factors[1] == pytest.approx(1, abs=0.25), f"seed {SEED}: {factors}"
        assert factors[0] == pytest.approx(1, abs=0.25), f"seed {SEED}: {factors}"


def test_evenhands_core_is_no_less_fair_than_vtc_where_both_overload() -> None:
    ours = measure(Case(OVERLOAD, Rule.EVENHAND), SEED)
    vtc = measure(Case(OVERLOAD, Rule.VTC), SEED)
    assert ours["figure"] < vtc["figure"] / 10
    assert ours["tokens_per_s"] > 0.88 * vtc["tokens_per_s"]


def results(changed: dict[str, float]) -> Results:
    """As if every figure came out as published, but for those changed."""
    values: dict[str, dict[int, dict[str, float]]] = {}
    for cell in cells():
        known: float = dict(cell.case.measurement.published).get(cell.case.rule, 1.0)
        figure = changed.get(cell.label, known)
        moments = {f"moment_{index}": float(index + 1) for index in range(19)}
        values[cell.label] = {1: {"figure": figure, "tokens_per_s": 890.0, **moments}}
    return Results(values)


def test_a_page_claims_what_its_numbers_show() -> None:
    good = VTC.page(results({}))
    assert [claim.met for claim in good.claims] == [True, True]
    assert "15 of 15" in good.claims[1].got
    swapped = VTC.page(results({"overload/VTC": 300_000.0}))
    assert [claim.met for claim in swapped.claims] == [False, True]
    assert "off: overload, VTC 33.1" in swapped.claims[1].got
    far = VTC.page(results({cell.label: 1e-3 for cell in cells()}))
    assert [claim.met for claim in far.claims] == [False, False]
    assert "237,738" in plain(VTC, good)


def test_the_command_writes_its_page_and_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "run_grid", lambda *_arguments: results({}))
    assert simulate.main(["vtc", "--seeds", "1", "--out", str(tmp_path)]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["vtc-arena.svg", "vtc-overload.svg", "vtc.md"]
    text = (tmp_path / "vtc.md").read_text(encoding="utf-8")
    assert "`evenhand simulate vtc --first-seed 1 --seeds 1`" in text
    assert "9,050" in capsys.readouterr().out
    monkeypatch.setattr(command, "run_grid", lambda *_arguments: results({"overload/VTC": 300_000.0}))
    assert command.main(["--out", str(tmp_path)]) == 1


@pytest.mark.parametrize(("argv", "named"), [
    (["--seeds", "0"], "seeds"),
    (["--seeds", "1001"], "1001"),
    (["--first-seed", "-1"], "-1"),
    (["--jobs", "0"], "jobs"),
])  # fmt: skip
def test_impossible_options_are_named(argv: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(argv) == 2
    assert named in capsys.readouterr().err
