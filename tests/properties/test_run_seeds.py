"""The runner of seeds: what it skips, what it records, and what it does with a seed that fails."""

import json
import re
from pathlib import Path

import pytest
from tests.properties import run_seeds
from tests.properties.run_seeds import Outcome, Stretch, chunks_left, load, main, save


@pytest.fixture
def only_seed_13_fails(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    ran: list[int] = []

    def one(seed: int) -> Outcome:
        ran.append(seed)
        return Outcome(seed, 200, "Broken: P1: too far" if seed == 13 else None)

    monkeypatch.setattr(run_seeds, "run_one", one)
    monkeypatch.setattr(run_seeds, "CHUNK", 4)
    return ran


def test_it_takes_up_where_it_stopped(tmp_path: Path, only_seed_13_fails: list[int]) -> None:
    files = ["--state", str(tmp_path / "state.json"), "--kept", str(tmp_path / "kept.json")]
    assert main(["--from", "0", "--count", "6", *files]) == 0
    assert main(["--from", "0", "--count", "10", *files]) == 0
    assert only_seed_13_fails == list(range(10))
    (stretch,) = load(tmp_path / "state.json")
    assert (stretch.first, stretch.last, stretch.grants, stretch.violations) == (0, 9, 2_000, 0)
    assert (stretch.core, stretch.checker) == (run_seeds.core_digest(), run_seeds.checker_digest())


def test_a_seed_that_fails_is_told_kept_and_counted(
    tmp_path: Path, only_seed_13_fails: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    files = ["--state", str(tmp_path / "state.json"), "--kept", str(tmp_path / "kept.json")]
    assert main(["--from", "10", "--count", "5", *files]) == 1
    told = capsys.readouterr().out
    assert "seed 13 fails: Broken: P1: too far" in told
    assert "python -m tests.properties.run_seeds --from 13 --count 1 --again" in told
    assert json.loads((tmp_path / "kept.json").read_text()) == {"seeds": [13]}
    assert [stretch.violations for stretch in load(tmp_path / "state.json")] == [1]
    assert main(["--from", "13", "--count", "1", "--again", *files]) == 1


def test_the_digest_is_of_every_module_of_the_checker() -> None:
    found, left = set(), ["adversary"]
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            text = (run_seeds.HERE / f"{name}.py").read_text()
            left += re.findall(r"^ *from tests\.properties\.(\w+) import", text, re.MULTILINE)
    assert {f"{name}.py" for name in found} == set(run_seeds.CHECKER)


def test_another_core_has_run_nothing_yet() -> None:
    done = [Stretch("a", "x", 0, 4, 0, 0, 0.0)]
    assert list(chunks_left(0, 5, done)) == []
    assert list(chunks_left(0, 5, [])) == [(0, 4)]
    assert list(chunks_left(3, 5, done)) == [(5, 7)]


def test_stretches_of_different_cores_are_not_one(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    stretches = [Stretch("a", "x", 0, 4, 5, 0, 1.0), Stretch("b", "x", 5, 9, 5, 1, 1.0)]
    save(path, [*stretches, Stretch("a", "x", 5, 6, 2, 0, 1.0)])
    assert [(s.core, s.first, s.last, s.grants) for s in load(path)] == [("a", 0, 6, 7), ("b", 5, 9, 5)]


def test_a_faulty_run_is_an_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    def play(seed: int) -> None:
        raise KeyError("nobody")

    monkeypatch.setattr(run_seeds, "play", play)
    assert run_seeds.run_one(5) == Outcome(5, 0, "KeyError: 'nobody'")
