"""``evenhand simulate``: what it prints, and one sentence for what cannot be."""

import json
from pathlib import Path

import pytest

from evenhand.cli import main as evenhand


def simulate(*arguments: str) -> int:
    return evenhand(["simulate", *arguments])


def test_a_seed_that_holds(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate("--seed", "5", "--requests", "30") == 0
    shown = capsys.readouterr().out
    assert "seed 5 held" in shown
    assert "1 seeds, 0 failed; 30 requests" in shown


def test_a_range_of_seeds_without_faults(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate("system", "--seeds", "1..3", "--requests", "10", "--faults", "none") == 0
    shown = capsys.readouterr().out
    assert [line.split()[:3] for line in shown.splitlines()[:3]] == [["seed", str(n), "held"] for n in (1, 2, 3)]
    assert shown.count("30 finished") + shown.count("10 finished") == 3
    assert ", 0 faults" in shown


def test_the_trace_is_what_the_hash_is_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace"
    assert simulate("--seed", "4", "--requests", "10", "--trace", str(path)) == 0
    lines = path.read_text().splitlines()
    assert f"{len(lines)} events" in capsys.readouterr().out
    times = [int(line.split()[0]) for line in lines]
    assert times == sorted(times)


def test_a_workload_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "requests.jsonl"
    entries = [
        {"at_ms": 10 * n, "tenant": "ab"[n % 2], "prompt_tokens": 300, "output_tokens": 4, "prefix": "p",
         "prefix_tokens": 256}
        for n in range(12)
    ]  # fmt: skip
    path.write_text("\n".join(map(json.dumps, entries)))
    assert simulate("--workload", str(path), "--faults", "none") == 0
    assert "12 finished" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["--faults", "earthquake"], "'earthquake'"),
        (["--faults", "frames-lost,,"], "no fault ''"),
        (["--seeds", "9..2"], "9..2"),
        (["--seeds", "9"], "'9'"),
        (["--seed", "-1"], "--seed"),
        (["--seed", "x"], "'x'"),
        (["--seed", "1", "--seeds", "1..2"], "--seeds"),
        (["--requests", "0"], "not 0"),
        (["--requests", "many"], "'many'"),
        (["--workload", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--bogus"], "--bogus"),
        (["--seeds", "1..2", "--trace", "t"], "--seed"),
        (["--trace", "/nowhere/at/all"], "/nowhere/at/all"),
        (["earthquakes"], "'earthquakes'"),
        (["policies", "--policy", "lottery"], "'lottery'"),
        (["policies", "--workers", "nan"], "--workers"),
        (["policies", "--workload", "nowhere.jsonl"], "nowhere.jsonl"),
    ],
)
def test_bad_input_is_one_sentence_that_names_it(
    arguments: list[str], names: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulate(*arguments) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert names in told.err
    assert told.err.count("\n") == 1
    assert told.err.rstrip().endswith(".")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "is no JSON: "),
        ("[1]", "is no JSON object"),
        ('{"at_ms": 0, "tenant": "a", "prompt_tokens": 5, "output_tokens": 5, "speed": 9}', "'speed'"),
        ("[" * 100_000, "is nested too deep"),
        ('{"at_ms": 0, "prompt_tokens": 5, "output_tokens": 5}', "names no tenant"),
        ('{"at_ms": 0, "tenant": "\\ud800", "prompt_tokens": 5, "output_tokens": 5}', "names no tenant"),
        ('{"at_ms": 0, "tenant": "a", "prompt_tokens": 5, "output_tokens": 5, "prefix": "\\ud800"}', "no text"),
        ('{"at_ms": NaN, "tenant": "a", "prompt_tokens": 5, "output_tokens": 5}', "at_ms"),
        ('{"at_ms": -1, "tenant": "a", "prompt_tokens": 5, "output_tokens": 5}', "at_ms"),
        ('{"at_ms": 0, "tenant": "a", "prompt_tokens": "x", "output_tokens": 5}', "prompt_tokens"),
        ('{"at_ms": 0, "tenant": "a", "prompt_tokens": 5, "output_tokens": 0}', "impossible"),
        ('{"at_ms": 0, "tenant": "a", "prompt_tokens": 5, "output_tokens": 1, "prefix_tokens": 5}', "impossible"),
        ('{"at_ms": 0, "tenant": "a", "prompt_tokens": 9000, "output_tokens": 1}', "9001 tokens"),
    ],
)
def test_a_broken_line_of_a_workload_is_named(
    line: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text('{"at_ms": 0, "tenant": "a", "prompt_tokens": 5, "output_tokens": 5}\n\n' + line + "\n")
    assert simulate("--workload", str(path)) == 2
    told = capsys.readouterr().err
    assert f"Line 3 of {path}" in told
    assert says in told
    assert told.count("\n") == 1


def test_help_of_both_levels(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate("--help") == 0
    assert "policies" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        simulate("system", "--help")
    assert ended.value.code == 0
    assert "frames-lost" in capsys.readouterr().out
