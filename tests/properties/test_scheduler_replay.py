"""The same inputs give the same effects, to the byte, in another process with another hash seed."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.properties.adversary import FEATURES, Adversary, Unkindness, only
from tests.properties.broken import Broken
from tests.properties.faults import BY_NAME

ROOT = Path(__file__).resolve().parents[2]
EVERYTHING = only(*(feature for feature in FEATURES if feature != "restarts"))

MANY_TIES = Unkindness(limits=True, tenants_max=8, grants=60)
"""Who comes back is lifted to the clock of others, and stands level with them."""


def trace(seed: int, unkindness: Unkindness = EVERYTHING) -> str:
    """Digest of all effects of a run, in order."""
    adversary = Adversary(seed, unkindness)
    digest = hashlib.sha256()
    adversary.on_effects = lambda effects: digest.update(repr(effects).encode())
    adversary.run()
    return digest.hexdigest()


def broken_trace(fault: str, seeds: int) -> str:
    """Digest of the runs of the first seeds with a fault put in."""
    with pytest.MonkeyPatch.context() as patch:
        BY_NAME[fault].install(patch)
        traces = []
        for seed in range(seeds):
            try:
                traces.append(trace(seed, MANY_TIES))
            except Broken as broken:  # the oracle orders by id, and may see it too
                traces.append(str(broken))
    return hashlib.sha256("".join(traces).encode()).hexdigest()


def in_other_processes(call: str) -> set[str]:
    """What a call of this module prints in processes that hash strings in different ways."""
    code = f"from tests.properties import test_scheduler_replay as here; print(here.{call})"
    found = set()
    for hash_seed in ("1", "2"):
        path = os.pathsep.join((str(ROOT), str(ROOT / "services")))
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": path}
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True, check=True
        )
        found.add(done.stdout.strip())
    return found


@pytest.mark.parametrize("seed", [3, 11])
def test_a_run_replays_in_another_process(seed: int) -> None:
    assert in_other_processes(f"trace({seed})") == {trace(seed)}


def test_ties_by_the_order_of_a_set_are_seen() -> None:
    assert len(in_other_processes("broken_trace('tie_by_set_order', 24)")) == 2
