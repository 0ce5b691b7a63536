"""``evenhand simulate policies``: a table, the same in every process, and one sentence for what is wrong."""

import json
import math
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
        (["--workers", "x"], "'x' is no whole number from 0"),
        (["--policy", "vtc,vtc"], "'vtc' is named twice"),
        (["--policy", "dlpm", "--set", "quantum=nan"], "'quantum' .* is 'nan'"),
        (["--policy", "dlpm", "--set", "quantum=1e-320"], "'quantum' is 1e-320, but must be at least 1"),
        (["--policy", "dlpm", "--set", "output_cost=1e308"], "'output_cost' .* is '1e308'"),
        (["--policy", "session-hash", "--set", "points=0"], "'points' is 0"),
        (["--policy", "session-hash", "--set", "points=20000"], "'points' is 20000"),
        (["--policy", "vtc-basic", "--set", "load_max=0"], "'load_max' is 0.0"),
        (["--policy", "preble-e2", "--set", "window_s=1e300"], "'window_s' .* is '1e300'"),
        (["--shape", "speed=1"], "no parameter 'speed'"),
        (["--shape", "slots=-1"], "'slots' .* is '-1', but must lie between"),
        (["--shape", "duration_s=nan"], "'duration_s' .* is 'nan'"),
        (["--shape", "duration_s=1e6"], "at most 2,000,000 arrivals"),
        (["--shape", "others=1000000"], "at most 2,000,000 arrivals"),
        (["--shape", "hot_prefixes=1000000"], "at most 20,000,000 different blocks"),
        (["--shape", "block_size=0"], "block_size is 0"),
        (["--workload", "dlpm-mix", "--shape", "open_prefixes=0"], "open_prefixes is 0"),
        (["--workload", "servegen-agents", "--shape", "open_conversations=5000"], "open_conversations is 5000"),
        (["--map-lag-ms", "nan"], "'nan' is not a number"),
        (["--write", "/nowhere/at/all"], "/nowhere/at/all cannot be written"),
        (["--nonsense"], "nonsense"),
        (["--map-lost", "2", "--policy", "dlpm", *SHORT], "lost is 2.0"),
    ],
)
def test_what_is_wrong_is_one_sentence(arguments: list[str], words: str) -> None:
    with pytest.raises(InvalidInput, match=words) as caught:
        main(arguments)
    assert "\n" not in str(caught.value)


ARRIVAL = {"arrival_id": 0, "at_ns": 0, "tenant": "hot", "block_names": [1], "prompt_tokens": 100,
           "output_tokens_max": 5, "output_tokens": 5}  # fmt: skip


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "Line 2 of the trace .* is no JSON"),
        ("[]", "Line 2 of the trace .* is no JSON object"),
        ("[" * 100_000, "Line 2 of the trace .* is nested too deep"),
        (json.dumps(ARRIVAL) + "\n" + json.dumps(ARRIVAL | {"at_ns": 9}), "Arrival 0 .* comes twice"),
        (json.dumps(ARRIVAL | {"at_ns": 1 << 60}), "Arrival 0 .* has an impossible time"),
        (json.dumps({"at_ns": 0}), "Line 2 of the trace .* lacks 'arrival_id'"),
        (json.dumps(ARRIVAL | {"speed": 1}), "'speed' is no field"),
        (json.dumps(ARRIVAL | {"block_names": [-1]}), "'block_names' has an impossible value"),
        (json.dumps(ARRIVAL | {"at_ns": -1}), "Arrival 0 .* has an impossible time"),
        (json.dumps(ARRIVAL | {"at_ns": 1 << 80}), "Arrival 0 .* has an impossible time"),
        (json.dumps(ARRIVAL | {"cancel_after_ns": -1}), "Arrival 0 .* has an impossible time"),
        (json.dumps(ARRIVAL | {"weight": math.nan}), "Arrival 0 .* has weight nan"),
        (json.dumps(ARRIVAL | {"weight": 0}), "Arrival 0 .* has weight 0"),
        (json.dumps(ARRIVAL | {"output_tokens": 6}), "Arrival 0 .* has impossible token counts"),
        (json.dumps(ARRIVAL | {"output_tokens_expected": -1}), "expects -1 output tokens"),
        (json.dumps(ARRIVAL | {"block_names": [1, 2]}), "names more blocks than its prompt fills"),
        (json.dumps(ARRIVAL | {"prompt_tokens": 20_000}), "20005 tokens, more than the engines'"),
        (json.dumps(ARRIVAL | {"tenant": "nobody"}), "no tenant 'nobody'"),
    ],
)
def test_a_broken_line_of_a_trace_is_named(line: str, words: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    main([*SHORT, "--write", str(trace)])
    trace.write_text(trace.read_text().splitlines()[0] + "\n" + line + "\n")
    with pytest.raises(InvalidInput, match=words) as caught:
        main(["--policy", "vtc", "--workload", str(trace), "--workers", "1", "--seeds", "1"])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"form": "v9"}, "does not say that its form"),
        ({"limits": {"block_size": 0}}, "block_size is 0"),
        ({"limits": []}, "are not what they should be"),
        ({"step_time": {"base_ns": -4}}, "base_ns is -4"),
        ({"step_time": {"base_ns": 0, "prefill_token_ns": 0}}, "must take some time"),
        ({"tenants": [{"name": "a", "weight": 0}]}, "Tenant a has weight 0"),
        ({"step_time": {"base_ns": 10**30}}, "base_ns is 1000000000000000000000000000000, but may be"),
        ({"limits": {"blocks": 10**13}}, "blocks is 10000000000000, but may be"),
        ({"limits": {"sequences_max": 2.5}}, "sequences_max is 2.5, but must be a whole number"),
        ({"limits": {"sequences_max": True}}, "sequences_max is True, but must be a whole number"),
        ({"tenants": [{"name": 5}]}, "name is 5, but must be text"),
        ({"tenants": [{"name": "a", "well_behaved": "no"}]}, "well_behaved is 'no', but must be true or false"),
        ({"tenants": [{"name": "a", "speed": 1}]}, "are not what they should be"),
        ({"name": [1]}, r"name is \[1\], but must be text"),
        ({"speed": 1}, "'speed' is none of its fields"),
        ({}, "has no arrival in it"),
    ],
)
def test_a_broken_first_line_of_a_trace_is_named(changes: dict[str, object], words: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    main([*SHORT, "--write", str(trace)])
    head = json.loads(trace.read_text().splitlines()[0])
    trace.write_text(json.dumps(head | changes) + "\n")
    with pytest.raises(InvalidInput, match=words) as caught:
        main(["--policy", "vtc", "--workload", str(trace)])
    assert str(trace) in str(caught.value)


def test_a_tenant_of_a_trace_that_is_named_twice_is_refused(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    main([*SHORT, "--write", str(trace)])
    head = json.loads(trace.read_text().splitlines()[0])
    head["tenants"].append(head["tenants"][0])
    trace.write_text(json.dumps(head) + "\n" + json.dumps(ARRIVAL) + "\n")
    with pytest.raises(InvalidInput, match="A tenant of hot-tenant is named twice"):
        main(["--policy", "vtc", "--workload", str(trace)])


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
