"""``evenhand simulate policies``: a table, the same in every process, and one sentence for what is wrong."""

import subprocess
import sys
from pathlib import Path

import pytest

from evenhand.core.errors import InvalidInput
from evenhand.simulation.trials.main import main

SHORT = ["--seeds", "2", "--shape", "duration_s=3", "--shape", "output_tokens=40"]


def test_the_table_has_a_line_for_each_policy(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--policy", "evenhand,vtc-affine", *SHORT]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [
        "hot-tenant,",
        "policy",
        "evenhand",
        "vtc-affine",
        "difference:",
    ]


def test_a_parameter_changes_what_comes_out(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--policy", "load-aware-prefix", *SHORT, "--set", "beta=0"])
    greedy = capsys.readouterr().out
    main(["--policy", "load-aware-prefix", *SHORT, "--set", "beta=3"])
    assert capsys.readouterr().out != greedy


def test_a_written_trace_runs_as_its_seed_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = str(tmp_path / "trace.jsonl")
    main([*SHORT, "--write", trace])
    main(["--policy", "dlpm", "--seeds", "1", "--workload", trace])
    from_file = capsys.readouterr().out.splitlines()[2]
    main(["--policy", "dlpm", "--seeds", "1", *SHORT[2:]])
    assert capsys.readouterr().out.splitlines()[2] == from_file


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--policy", "lottery"], "no policy 'lottery'; there are cache-aware"),
        (["--workload", "nothing"], "no workload 'nothing'"),
        (["--policy", "vtc", "--set", "beta=1"], "None of the policies vtc has a parameter 'beta'"),
        (["--policy", "vtc", "--set", "prediction=magic"], "must be none or oracle or noisy"),
        (["--policy", "evenhand", "--set", "window_delay_ms=-1"], "'window_delay_ms' .* is '-1'"),
        (["--set", "beta"], "--set beta is not of the form KEY=VALUE"),
        (["--seeds", "0"], "--seeds is 0"),
        (["--workers", "x"], "'x' is not a whole number"),
        (["--nonsense"], "nonsense"),
        (["--map-lost", "2", "--policy", "dlpm", *SHORT], "lost is 2.0"),
    ],
)
def test_what_is_wrong_is_one_sentence(arguments: list[str], words: str) -> None:
    with pytest.raises(InvalidInput, match=words) as caught:
        main(arguments)
    assert "\n" not in str(caught.value)


def test_two_processes_agree() -> None:
    """Whatever the hash seed: every policy, on a workload with faults in its map."""
    command = [sys.executable, "-m", "evenhand.simulation.trials.main", "--seeds", "1", *SHORT[2:]]
    command += ["--map-lag-ms", "100", "--map-lost", "0.05", "--map-doubled", "0.05"]
    source = str(Path(__file__).resolve().parents[3] / "services")
    outputs = [
        subprocess.run(
            command, env={"PYTHONPATH": source, "PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("1", "2")
    ]
    assert outputs[0] == outputs[1]
    assert len(outputs[0].splitlines()) > 15
