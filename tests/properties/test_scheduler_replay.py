"""The same inputs give the same effects, to the byte, in another process with another hash seed."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.properties.adversary import Adversary, Unkindness

ROOT = Path(__file__).resolve().parents[2]
EVERYTHING = Unkindness(
    worker_loss=True, worker_sizes=True, weight_changes=True, limits=True, cancels=True, expiry=True
)


def trace(seed: int) -> str:
    """Digest of all effects of a run, in order."""
    adversary = Adversary(seed, EVERYTHING)
    digest = hashlib.sha256()
    adversary.on_effects = lambda effects: digest.update(repr(effects).encode())
    adversary.run()
    return digest.hexdigest()


@pytest.mark.parametrize("seed", [3, 11])
def test_a_run_replays_in_another_process(seed: int) -> None:
    code = f"from tests.properties.test_scheduler_replay import trace; print(trace({seed}))"
    found = set()
    for hash_seed in ("1", "2"):
        path = os.pathsep.join((str(ROOT), str(ROOT / "services")))
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": path}
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True, check=True
        )
        found.add(done.stdout.strip())
    assert found == {trace(seed)}
