"""Plans: seeded, in time order, and with the prefixes that make them worth routing."""

from itertools import pairwise
from pathlib import Path

import pytest

from evenhand.core.errors import InvalidInput
from evenhand.local import workload
from evenhand.local.workload import DemoLoad, plan, plan_from_mooncake

SAMPLE = Path(workload.__file__).parent / "data" / "mooncake_conversation_sample.jsonl"


def test_the_same_seed_plans_the_same_load() -> None:
    assert plan(DemoLoad(), 5_000, seed=3) == plan(DemoLoad(), 5_000, seed=3)
    assert plan(DemoLoad(), 5_000, seed=3) != plan(DemoLoad(), 5_000, seed=4)


def test_arrivals_are_in_time_order_and_within_the_duration() -> None:
    times = [arrival.at_ms for arrival in plan(DemoLoad(), 5_000, seed=1)]
    assert times == sorted(times)
    assert 0 <= times[0] <= times[-1] < 5_000


def test_the_flood_shares_a_prefix_and_the_cold_shares_nothing() -> None:
    load = DemoLoad()
    arrivals = plan(load, 10_000, seed=1)
    flood = {arrival.prompt[: load.shared_prefix_tokens] for arrival in arrivals if arrival.tenant == "flood"}
    cold = [arrival.prompt[:16] for arrival in arrivals if arrival.tenant == "cold"]
    assert len(flood) == load.flood_applications
    assert len(set(cold)) == len(cold) > 1


def test_a_conversation_s_next_turn_begins_with_the_one_before() -> None:
    load = DemoLoad(conversations=1, turns_max=3)
    prompts = [arrival.prompt for arrival in plan(load, 20_000, seed=1) if arrival.tenant == "chat"]
    for first, second in pairwise(prompts[:3]):
        assert second[: len(first)] == first
    assert len(prompts[3]) == len(prompts[0]), "a conversation begins anew after its last turn"


def test_mooncake_rows_share_the_blocks_that_the_trace_shares() -> None:
    arrivals = plan_from_mooncake(SAMPLE, 10_000, speed=6)
    assert {arrival.tenant for arrival in arrivals} == {"red", "green", "blue"}
    assert len({arrival.prompt[:16] for arrival in arrivals}) == 1, "the trace's first block is common to all"


def test_a_broken_trace_line_is_named(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "output_length": 3, "hash_ids": [0, 1]}\n{"timestamp": "soon"}\n')
    with pytest.raises(InvalidInput, match=r"Line 2 of the trace .*trace\.jsonl is no Mooncake row"):
        plan_from_mooncake(trace, 1_000)
