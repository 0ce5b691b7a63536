"""Workloads: seeded, what they say they are, and the same after a trip through a file."""

import json
from collections import Counter
from pathlib import Path

import pytest

from evenhand.core.errors import InvalidInput
from evenhand.simulation.trials.trace_file import read_workload, write_workload
from evenhand.simulation.trials.workload import Workload
from evenhand.simulation.trials.workloads import KINDS, WORKLOADS, DlpmMix, dlpm_mix, make_workload

SHORT = {"duration_s": "10"}


@pytest.mark.parametrize("name", sorted(WORKLOADS))
def test_a_seed_is_a_workload_and_another_seed_another(name: str) -> None:
    first, again, other = (make_workload(name, seed, SHORT) for seed in (1, 1, 2))
    assert first == again
    assert first.arrivals != other.arrivals
    assert {tenant.well_behaved for tenant in first.tenants} == {True, False}


@pytest.mark.parametrize("name", sorted(WORKLOADS))
def test_equal_blocks_are_equal_prefixes_of_one_tenant(name: str) -> None:
    workload = make_workload(name, 3, SHORT)
    before: dict[int, tuple[int, str]] = {}
    shared = 0
    for arrival in workload.arrivals:
        assert len(arrival.block_names) == arrival.prompt_tokens // workload.limits.block_size
        assert all(0 <= block < 1 << 64 for block in arrival.block_names)
        parent = 0
        for block in arrival.block_names:
            known = before.setdefault(block, (parent, arrival.tenant))
            shared += known != (parent, arrival.tenant) and pytest.fail(f"block {block} has two parents")
            parent = block
    repeated = sum(len(arrival.block_names) for arrival in workload.arrivals) - len(before)
    assert repeated > 0


def test_the_hot_tenant_asks_for_several_times_its_share() -> None:
    workload = make_workload("hot-tenant", 1)
    tokens: Counter[str] = Counter()
    for arrival in workload.arrivals:
        tokens[arrival.tenant] += arrival.prompt_tokens + 2 * arrival.output_tokens
    assert tokens["hot"] > 3 * sum(tokens.values()) / len(tokens)


def test_dlpm_mix_has_the_published_means() -> None:
    workload = dlpm_mix(DlpmMix(duration_s=600.0, hot_factor=4.0), 1)
    for kind in KINDS:
        outputs = [a.output_tokens for a in workload.arrivals if a.tenant.startswith(kind.name)]
        assert sum(outputs) / len(outputs) == pytest.approx(kind.output_tokens, rel=0.1)


@pytest.mark.parametrize("name", ["hot-tenant", "servegen-agents"])
def test_a_written_workload_is_read_back_equal(name: str, tmp_path: Path) -> None:
    workload = make_workload(name, 4, SHORT)
    write_workload(workload, tmp_path / "trace.jsonl")
    assert read_workload(tmp_path / "trace.jsonl") == workload


def broken(workload: Workload, path: Path, number: int, line: str) -> Path:
    write_workload(workload, path)
    lines = path.read_text().splitlines()
    lines[number - 1] = line
    path.write_text("\n".join(lines))
    return path


@pytest.mark.parametrize(
    ("number", "line", "words"),
    [
        (1, "{}", "Line 1 of the trace .* does not say that its form"),
        (3, "{not json", "Line 3 of the trace .* is no JSON"),
        (3, "[1]", "Line 3 of the trace .* is no JSON object"),
        (4, '{"arrival_id":2}', "Line 4 of the trace .* lacks"),
        (4, '{"arrival_id":"two"}', "Line 4 of the trace .* 'arrival_id' has an impossible value"),
        (5, '{"colour":1}', "Line 5 of the trace .* 'colour' is no field"),
        (5, '{"block_names":[-1]}', "Line 5 of the trace .* 'block_names' has an impossible value"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, number: int, line: str, words: str) -> None:
    path = broken(make_workload("hot-tenant", 1, SHORT), tmp_path / "trace.jsonl", number, line)
    with pytest.raises(InvalidInput, match=words):
        read_workload(path)


def test_an_arrival_that_no_engine_could_run_is_named(tmp_path: Path) -> None:
    workload = make_workload("hot-tenant", 1, SHORT)
    fields = {"arrival_id": 0, "at_ns": 0, "tenant": "hot", "block_names": [], "prompt_tokens": 99_999}
    line = json.dumps({**fields, "output_tokens_max": 1, "output_tokens": 1})
    with pytest.raises(InvalidInput, match="Arrival 0 of hot-tenant may have 100000 tokens"):
        read_workload(broken(workload, tmp_path / "trace.jsonl", 2, line))


@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        ("cold-tenant", {}, "no workload 'cold-tenant', and no file of that name; there are dlpm-mix"),
        ("hot-tenant", {"colour": "1"}, "'hot-tenant' has no parameter 'colour'"),
        ("hot-tenant", {"slots": "many"}, "'slots' of the workload 'hot-tenant' is 'many', but must be a whole"),
        ("hot-tenant", {"slots": "0"}, "impossible: sequences_max is 0"),
        ("hot-tenant", {"duration_s": "0"}, "no arrival at all"),
        ("servegen-agents", {"duration_s": "900"}, "cannot be taken for 900.0 s"),
        ("servegen-mooncake", {"block_size": "64"}, "blocks of 512 tokens"),
    ],
)
def test_an_impossible_workload_is_named(name: str, shape: dict[str, str], words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        make_workload(name, 1, shape)
