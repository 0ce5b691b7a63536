"""The frame of the experiments: kept numbers, spreads, pages and the command."""

import dataclasses
import errno
import json
from pathlib import Path

import pytest

from evenhand.core.errors import InvalidInput
from evenhand.simulation.experiments import main as command
from evenhand.simulation.experiments import page as pages
from evenhand.simulation.experiments.cases import Scene, TrialCase, built, measure_case, trial_cell
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
from evenhand.simulation.experiments.page import Provenance, markdown, number, told, write_page
from evenhand.simulation.experiments.runs import CellsFailed, key_of, run_grid
from evenhand.simulation.experiments.scenes import Crowd, Stream, scene, with_stream
from evenhand.simulation.experiments.sources import digest_of, modules_behind
from evenhand.simulation.experiments.table import EXPERIMENTS

PLAN = Crowd((Stream("calm", 2.0), Stream("other", 3.0, well_behaved=False)), duration_s=5.0)
SCENE = scene("small", PLAN)


def measure_small(case: TrialCase, seed: int) -> Measured:
    return measure_case(case, seed)


def cells() -> tuple[Cell, ...]:
    return tuple(trial_cell(TrialCase(policy, SCENE, workers=2)) for policy in ("fcfs-least-load", "evenhand"))


def page(results: Results) -> Page:
    label = cells()[0].label
    rows = ((label, told(results.spread(label, "requests_per_s"))),)
    return Page((Claim("something", "1", True),), (Table("Figures", ("cell", "requests/s"), rows),))


SMALL = Experiment("small", "Does it run?", cells, measure_small, page)


def test_a_run_goes_on_where_it_was_and_other_code_counts_as_other(tmp_path: Path) -> None:
    kept = tmp_path / "small.jsonl"
    first = run_grid(SMALL, (1, 2), kept)
    assert len(kept.read_text().splitlines()) == 4
    done: list[str] = []
    kept.write_text("\n".join(kept.read_text().splitlines()[:3]) + '\n{"key": "cut sho')
    again = run_grid(SMALL, (1, 2), kept, progress=lambda at, of, what: done.append(what))
    assert len(done) == 1, "only what was cut off is run again"
    for cell in cells():
        for name in first.names(cell.label):
            assert first.each(cell.label, name) == again.each(cell.label, name)


def test_processes_give_the_same_numbers(tmp_path: Path) -> None:
    alone, together = run_grid(SMALL, (3,), None), run_grid(SMALL, (3,), None, jobs=2)
    for cell in cells():
        assert alone.each(cell.label, "well_behaved_p99_s") == together.each(cell.label, "well_behaved_p99_s")


def test_the_key_tells_case_seed_and_code() -> None:
    cell = cells()[0]
    keys = {
        key_of(SMALL, cell, 1),
        key_of(SMALL, cell, 2),
        key_of(SMALL, dataclasses.replace(cell, case=dataclasses.replace(cell.case, workers=3)), 1),
        key_of(SMALL, dataclasses.replace(cell, policies=("evenhand",)), 1),
    }
    assert len(keys) == 4
    assert " at 0x" not in repr(cell.case), "an address in a key would make every run another one"


def test_a_rivals_numbers_do_not_depend_on_the_scheduler() -> None:
    rival = modules_behind(["evenhand.policies.vtc", "evenhand.simulation.experiments.cases"])
    ours = modules_behind(["evenhand.policies.evenhand"])
    assert "evenhand.core.scheduler" in ours
    assert "evenhand.core.scheduler" not in rival
    assert "evenhand.policies.central" in rival
    assert digest_of(["evenhand.policies.vtc"]) != digest_of(["evenhand.policies.evenhand"])


def test_median_and_range() -> None:
    seen = spread([3.0, 1.0, 2.0, 10.0])
    assert (seen.median, seen.least, seen.most, seen.seeds) == (2.5, 1.0, 10.0, 4)
    assert told(seen) == "2.50 (1.00–10.0)"
    assert [number(x) for x in (0.0, 0.0123, 0.9996, 12.345, 123.4, 12345.6, float("inf"))] == [
        "0.00", "0.012", "1.00", "12.3", "123", "12,346", "∞",
    ]  # fmt: skip


def test_ratios_are_taken_seed_by_seed() -> None:
    results = Results({"a": {1: {"x": 2.0}, 2: {"x": 30.0}}, "b": {1: {"x": 1.0}, 2: {"x": 10.0}}})
    assert results.ratio("a", "b", "x") == spread([2.0, 3.0])


def test_an_adversary_changes_nothing_for_the_others() -> None:
    alone = built(SCENE, 4)
    beside = built(scene("beside", with_stream(PLAN, Stream("adversary", 20.0))), 4)
    asked = [(a.at_ns, a.tenant, a.prompt_tokens, a.output_tokens) for a in alone.arrivals]
    still = [
        (a.at_ns, a.tenant, a.prompt_tokens, a.output_tokens) for a in beside.arrivals if a.tenant != "adversary"
    ]
    assert asked == still
    assert len(beside.arrivals) > len(alone.arrivals)


def test_streams_ask_as_they_say() -> None:
    plan = Crowd(
        (
            Stream("bursts", 50.0, on_s=1.0, off_s=3.0),
            Stream("many", 20.0, identities=3, users=2),
            Stream("liar", 5.0, output_tokens=20, output_tokens_max=8_000, output_tokens_expected=1, spread=False),
            Stream("quits", 10.0, cancel_share=1.0, cancel_after_s=2.0, prefix_tokens=640),
            Stream("together", 0.0, at_once=7, from_s=2.0),
        ),
        duration_s=8.0,
    )
    workload = built(scene("all", plan), 1)
    by = {
        name: [a for a in workload.arrivals if a.tenant == name] for name in {a.tenant for a in workload.arrivals}
    }
    assert all(a.at_ns % 4_000_000_000 < 1_000_000_000 for a in by["bursts"])
    assert {"many-0", "many-1", "many-2"} <= set(by)
    assert {a.user for a in by["many-0"]} == {"user-0", "user-1"}
    assert {(a.output_tokens, a.output_tokens_max, a.output_tokens_expected) for a in by["liar"]} == {
        (20, 8_000, 1)
    }
    assert {a.cancel_after_ns for a in by["quits"]} == {2_000_000_000}
    assert len({a.block_names[:10] for a in by["quits"]}) == 1
    assert len({a.block_names[10:] for a in by["quits"]}) == len(by["quits"])
    assert [a.at_ns for a in by["together"]] == [2_000_000_000] * 7


def test_a_page_says_how_to_make_it_again_and_names_no_machine() -> None:
    results = run_grid(SMALL, (1,), None)
    text = markdown(SMALL, page(results), Provenance((1, 2, 3), "evenhand simulate experiment small", "abc"))
    assert "| something | 1 | met |" in text
    assert "Seeds: 1 … 3" in text
    assert "`abc`" in text


FIGURE = Figure("A figure", Axis("x"), Axis("y"), (Series("one", (Point(1.0, 2.0), Point(2.0, 3.0))),))
PROVENANCE = Provenance((1,), "evenhand simulate experiment small", "abc")


def test_a_page_that_cannot_be_written_whole_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = Page((Claim("old", "1", True),), figures=(("", FIGURE),))
    written = write_page(SMALL, old, PROVENANCE, tmp_path)
    assert [path.name for path in written] == ["small.md", "small.svg"]
    before = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert set(before) == {"small.md", "small.svg"}
    whole = Path.write_text

    def disk_full(path: Path, text: str, encoding: str | None = None) -> int:
        whole(path, text[: len(text) // 2], encoding)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", disk_full)
    with pytest.raises(OSError, match="No space left"):
        write_page(SMALL, Page((Claim("new", "2", False),), figures=(("", FIGURE),)), PROVENANCE, tmp_path)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == before


def test_nothing_is_written_of_a_page_one_of_whose_figures_cannot_be_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_page(SMALL, Page((Claim("old", "1", True),)), PROVENANCE, tmp_path)
    before = {path.name: path.read_text() for path in tmp_path.iterdir()}

    def broken(figure: Figure) -> str:
        raise ValueError(f"{figure.title} has no points")

    monkeypatch.setattr(pages, "svg", broken)
    with pytest.raises(ValueError, match="has no points"):
        write_page(SMALL, Page((Claim("new", "2", True),), figures=(("", FIGURE),)), PROVENANCE, tmp_path)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == before


def test_every_experiment_has_cells_whose_labels_are_unique() -> None:
    for experiment in EXPERIMENTS.values():
        made = experiment.cells()
        assert len({cell.label for cell in made}) == len(made) > 0
        assert experiment.seeds >= 5 or experiment.timed
        for cell in made:
            assert " at 0x" not in repr(cell.case)
            assert key_of(experiment, cell, 1)


def test_the_command_refuses_in_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["nothing"]) == 2
    told_of = capsys.readouterr().err
    assert "There is no experiment 'nothing'" in told_of
    assert told_of.count("\n") == 1
    assert command.main(["hot", "--seeds", "-1"]) == 2
    assert command.main(["hot", "--first-seed", "-1"]) == 2
    assert command.main(["hot", "--jobs", "0"]) == 2
    capsys.readouterr()


def test_the_command_prints_writes_and_tells_what_is_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "EXPERIMENTS", {"small": SMALL})
    options = ["--seeds", "1", "--scratch", str(tmp_path / "kept"), "--out", str(tmp_path / "out"), "--quiet"]
    assert command.main(["small", *options]) == 0
    assert "Does it run?" in capsys.readouterr().out
    assert "# Small" in (tmp_path / "out" / "small.md").read_text()
    assert json.loads((tmp_path / "kept" / "small.jsonl").read_text().splitlines()[0])["seed"] == 1
    missed = dataclasses.replace(SMALL, page=lambda results: Page((Claim("something", "0", False),)))
    monkeypatch.setattr(command, "EXPERIMENTS", {"small": missed})
    assert command.main(["all", *options]) == 1


def test_an_unknown_tenant_is_named() -> None:
    with pytest.raises(InvalidInput, match="has no tenant 'nobody'"):
        measure_case(TrialCase("fcfs-least-load", SCENE, tenants=("nobody",)), 1)


def test_a_wait_without_an_end_counts_as_endless() -> None:
    seen = measure_case(TrialCase("fcfs-least-load", SCENE, workers=1, until_s=0.001), 1)
    assert seen["well_behaved_p99_s"] == float("inf")


def test_a_scene_is_told_without_addresses() -> None:
    assert repr(Scene("x", built, 1)).startswith("x: built(")


def measure_or_fail(case: TrialCase, seed: int) -> Measured:
    if case.policy == "evenhand":
        raise AssertionError("broken on purpose")
    return measure_case(case, seed)


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_cell_that_fails_is_named_and_stops_no_other(tmp_path: Path, jobs: int) -> None:
    kept = tmp_path / "kept.jsonl"
    broken = dataclasses.replace(SMALL, measure=measure_or_fail)
    with pytest.raises(CellsFailed, match="2 cells of small failed; the first was small/evenhand with seed 1"):
        run_grid(broken, (1, 2), kept, jobs)
    assert [json.loads(line)["cell"] for line in kept.read_text().splitlines()] == ["small/fcfs-least-load"] * 2
