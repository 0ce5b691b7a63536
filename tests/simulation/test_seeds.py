"""Every seed that ever failed, and a few hundred others: whatever goes wrong, what must hold does.

More of them: ``python -m tests.simulation.run_seeds --from N --count M``.
"""

import json
from pathlib import Path

import pytest

from evenhand.simulation.system.main import replay_command
from evenhand.simulation.system.system import Options, Result, simulate

KEPT = json.loads((Path(__file__).parent / "kept_seeds.json").read_text())
FIRST, CHUNKS, CHUNK_SEEDS = 1_000, 10, 20
REQUESTS = 40
"""Of each seed; with 200 seeds and the kept ones about a minute of one core."""


def told(result: Result) -> str:
    return "\n".join([*result.last_events[-20:], *result.violations, replay_command(result, "all")])


@pytest.mark.parametrize("kept", KEPT, ids=lambda kept: str(kept["seed"]))
def test_a_seed_that_once_failed_holds(kept: dict[str, object]) -> None:
    result = simulate(Options(int(str(kept["seed"])), int(str(kept["requests"]))))
    assert not result.violations, told(result)


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_seeds_hold(chunk: int) -> None:
    for seed in range(FIRST + chunk * CHUNK_SEEDS, FIRST + (chunk + 1) * CHUNK_SEEDS):
        result = simulate(Options(seed, REQUESTS))
        assert not result.violations, told(result)
