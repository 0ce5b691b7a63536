"""Fixtures that tests of every kind may name; and what cannot be tested of a compiled core."""

import pytest

from evenhand import core_form

pytest_plugins = ["tests.fixtures.kafka", "tests.fixtures.logs", "tests.fixtures.postgres"]

OF_PURE_CORE = (
    "tests/unit/core/test_fair_queue.py",
    "tests/unit/core/test_keeping.py::test_griefing_through_the_kept_worker_costs_the_griefer_its_share",
)
"""They subclass a class of the core or replace a method of it, which a compiled core does not let them."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip them where the package under test is one with a compiled core."""
    if core_form() == "pure":
        return
    for item in items:
        if item.nodeid.startswith(OF_PURE_CORE):
            item.add_marker(pytest.mark.skip(reason="replaces a part of the core, which is compiled here"))
