"""The same seed is the same run: in any process, whatever its string hashes and the addresses of its objects."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from evenhand.simulation.system.faults import ALL
from evenhand.simulation.system.system import Options, simulate

ROOT = Path(__file__).parents[2]
RUN = """
from evenhand.simulation.system.system import Options, simulate
result = simulate(Options({seed}, 80))
print(result.digest, result.events, result.violations)
"""


def run_elsewhere(seed: int, hash_seed: str) -> str:
    environment = os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT / "services")}
    command = [sys.executable, "-c", RUN.format(seed=seed)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("seed", [1, 9])
def test_two_processes_with_other_string_hashes_agree(seed: int) -> None:
    first, second = run_elsewhere(seed, "1"), run_elsewhere(seed, "4242")
    assert first == second
    here = simulate(Options(seed, 80))
    assert first.split()[0] == here.digest


def test_another_seed_is_another_run() -> None:
    assert simulate(Options(1, 20)).digest != simulate(Options(2, 20)).digest


def test_a_fault_switched_off_is_another_run_and_never_strikes() -> None:
    everything = simulate(Options(3, 60))
    assert everything.struck
    for fault in ALL[:4]:
        without = simulate(Options(3, 60, frozenset(ALL) - {fault}))
        assert fault.value not in without.struck
