"""Policies by name: what exists is made, what does not is named in one sentence."""

import pytest

from evenhand.core.errors import InvalidInput
from evenhand.policies.table import POLICIES, make_policy


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_every_policy_bears_the_name_it_is_listed_by(name: str) -> None:
    assert make_policy(name).name == name


def test_an_unknown_policy_is_named_with_those_that_exist() -> None:
    with pytest.raises(InvalidInput, match=r"no policy 'lottery'; there are .*fcfs-least-load"):
        make_policy("lottery")


def test_an_unknown_parameter_is_named() -> None:
    with pytest.raises(InvalidInput, match=r"'fcfs-round-robin' has no parameter 'beta'"):
        make_policy("fcfs-round-robin", {"beta": "1"})
