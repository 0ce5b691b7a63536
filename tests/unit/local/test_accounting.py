"""What tenants are due, and percentiles of what they waited."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenhand.core.facts import CostWeights
from evenhand.local.accounting import Ledger, fair_shares, percentile


def test_equal_weights_share_equally_when_all_ask_for_more() -> None:
    assert fair_shares({"a": 100, "b": 50}, {"a": 1, "b": 1}, 60) == {"a": 30, "b": 30}


def test_what_a_content_tenant_leaves_goes_to_the_others_by_weight() -> None:
    due = fair_shares({"a": 10, "b": 900, "c": 900}, {"a": 1, "b": 1, "c": 2}, 100)
    assert due == pytest.approx({"a": 10, "b": 30, "c": 60})


@given(
    st.dictionaries(st.sampled_from("abcdef"), st.floats(0, 1e6), min_size=1),
    st.lists(st.floats(0.1, 50), min_size=6, max_size=6),
    st.floats(0, 1e6),
)
def test_shares_are_max_min_fair(asked: dict[str, float], weights_drawn: list[float], total: float) -> None:
    weights = dict(zip("abcdef", weights_drawn, strict=True))
    due = fair_shares(asked, weights, total)
    assert sum(due.values()) == pytest.approx(min(total, sum(asked.values())), abs=1e-3)
    for tenant, share in due.items():
        assert -1e-9 <= share <= asked[tenant] + 1e-6
        for other in due:
            hungry = share < asked[tenant] - 1e-3
            assert not hungry or due[other] / weights[other] <= share / weights[tenant] + 1e-3


def test_percentiles_are_nearest_rank() -> None:
    assert percentile([3, 1, 2], 0.5) == 2
    assert percentile(range(1, 101), 0.99) == 99
    assert percentile([7], 0.99) == 7
    assert math.isnan(percentile([], 0.5))


def test_demand_is_priced_as_the_finished_requests_were() -> None:
    ledger = Ledger({"a": 1.0}, CostWeights())
    account = ledger.accounts["a"]
    account.arrived, account.planned_cost = 4, 4_000.0
    assert account.asked_cost() == 4_000
    account.finished, account.finished_cost, account.got_cost = 2, 300.0, 320.0
    assert account.asked_cost() == 320 + 2 * 150
