"""``evenhand simulate experiment`` and ``vtc``: one sentence for what is wrong, before anything is computed."""

from pathlib import Path

import pytest

from evenhand.cli import main as evenhand
from evenhand.simulation.experiments.experiment import Page
from evenhand.simulation.experiments.page import Provenance, markdown
from evenhand.simulation.vtc.experiment import VTC


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["experiment"], "NAME"),
        (["experiment", "lottery"], "'lottery'"),
        (["experiment", "hot", "--seeds", "0"], "--seeds is 0"),
        (["experiment", "hot", "--seeds", "5000"], "--seeds is 5000"),
        (["experiment", "hot", "--seeds", "nan"], "'nan'"),
        (["experiment", "hot", "--first-seed", "-1"], "'-1'"),
        (["experiment", "hot", "--jobs", "0"], "--jobs is 0"),
        (["experiment", "hot", "--bogus"], "--bogus"),
        (["vtc", "--seeds", "0"], "--seeds is 0"),
        (["vtc", "--seeds", "x"], "'x'"),
        (["vtc", "--first-seed", "-1"], "'-1'"),
        (["vtc", "--jobs", "0"], "--jobs is 0"),
        (["vtc", "--bogus"], "--bogus"),
    ],
)
def test_what_is_wrong_is_one_sentence(
    arguments: list[str], names: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evenhand(["simulate", *arguments]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert names in told.err
    assert told.err.count("\n") == 1
    assert told.err.rstrip().endswith(".")


@pytest.mark.parametrize(
    "arguments", [["experiment", "hot", "--out"], ["experiment", "hot", "--scratch"], ["vtc", "--out"]]
)
def test_a_folder_that_cannot_be_written_is_told_before_the_run(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.touch()
    folder = str(file / "folder")
    assert evenhand(["simulate", *arguments, folder]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert f"{arguments[-1]} is {folder}, which cannot be written to: " in told


def test_the_page_of_vtc_has_its_own_title() -> None:
    page = markdown(VTC, Page(), Provenance((1,), "evenhand simulate vtc", "0"))
    assert page.startswith("# VTC's published measurements\n")
