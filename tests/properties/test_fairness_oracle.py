"""The oracle is tested too: each fault put in by hand is caught, and the core as it is passes the run."""

from importlib import import_module
from pathlib import Path

import pytest
from tests.properties.adversary import Adversary, Unkindness
from tests.properties.broken import Broken, demand
from tests.properties.faults import BY_NAME, FAULTS, Fault
from tests.properties.run_seeds import CHECKER

SEEDS = 60
"""Runs in which a fault must be caught at least once."""

OWN_CHECKS = {
    "first_k_only": "test_more_tenants_than_k_keep_their_prefixes",
    "tie_by_set_order": "test_ties_by_the_order_of_a_set_are_seen",
}
"""Faults that break a promise of another kind, and the tests that see them."""

CHECKERS = [import_module(f"tests.properties.{name.removesuffix('.py')}") for name in CHECKER]
ASKING = [module for module in CHECKERS if hasattr(module, "demand") and module.__name__ != demand.__module__]
"""Modules that make demands."""

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs/invariants.md"


@pytest.mark.parametrize("fault", [f for f in FAULTS if f.names], ids=lambda fault: fault.name)
def test_a_fault_made_by_hand_is_caught_and_the_core_as_it_is_passes(fault: Fault) -> None:
    for seed in range(SEEDS):
        with pytest.MonkeyPatch.context() as patch:
            fault.install(patch)
            caught = property_broken(seed, fault.unkindness, exact=False)
        if caught is not None:
            assert caught in fault.names
            assert property_broken(seed, fault.unkindness, exact=False) is None
            assert property_broken(seed, fault.unkindness, exact=True) is None
            return
    pytest.fail(f"{fault.name} went unseen in {SEEDS} runs")


@pytest.mark.parametrize("name", ["P1", "P2", "P3", "P4"])
def test_each_bound_sees_a_window_without_end_by_itself(name: str) -> None:
    fault = BY_NAME["window_without_end"]
    caught = []
    for seed in range(20):
        with pytest.MonkeyPatch.context() as patch:
            fault.install(patch)
            for module in ASKING:
                patch.setattr(module, "demand", lambda holds, n, *what: demand(holds or n != name, n, *what))
            caught.append(property_broken(seed, fault.unkindness, exact=False))
    assert set(caught) == {name, None}


def property_broken(seed: int, unkindness: Unkindness, exact: bool) -> str | None:
    """Name of the property that the run of this seed breaks, if any."""
    try:
        Adversary(seed, unkindness, exact).run()
    except Broken as broken:
        return str(broken).split(":")[0]
    return None


def test_every_fault_has_a_test_that_kills_it() -> None:
    assert {fault.name for fault in FAULTS if not fault.names} == set(OWN_CHECKS)
    tests = "".join(path.read_text() for path in sorted(HERE.glob("test_*.py")))
    for name, test in OWN_CHECKS.items():
        assert f"def {test}(" in tests
        assert tests.count(f"{name}") > 1


def test_every_fault_is_on_the_page() -> None:
    listed = PAGE.read_text().split("# Faults put in by hand")[1].split("\n# ")[0]
    for fault in FAULTS:
        test = OWN_CHECKS.get(fault.name, "test_a_fault_made_by_hand_is_caught_and_the_core_as_it_is_passes")
        rows = [row for row in listed.splitlines() if row.startswith(f"| {fault.sentence} (`{fault.name}`) |")]
        assert len(rows) == 1, fault.name
        assert f"::{test}`" in rows[0], fault.name
