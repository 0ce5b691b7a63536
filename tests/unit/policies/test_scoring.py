"""Routers that add up scores, against their authors' examples."""

import pytest
from tests.unit.policies.fleet import arrival, join, send, worker_id

from evenhand.policies.scoring import VtcBasic, VtcBasicSettings, WeightedScorers, WeightedScorersSettings
from evenhand.policies.table import make_policy

S = 1_000_000_000


def test_vtc_basic_charges_as_its_own_test_says() -> None:
    """Its authors' test: 3 input tokens, 5 guessed, both weighing 1, are 8."""
    policy = VtcBasic(VtcBasicSettings(output_weight=1.0), 0)
    assert policy.charge("user1", 3, 0) == 8.0


def test_vtc_basic_sends_heavy_users_along_the_list_and_forgets_in_five_minutes() -> None:
    policy = make_policy("vtc-basic")
    join(policy, 4)
    assert send(policy, arrival(1, "light", prompt=100)) == worker_id(0), "nobody has tokens yet: n = 0"
    for number in range(2, 9):
        send(policy, arrival(number, "heavy", prompt=10_000))
    # 280,000 tokens against 400: bucket 140,200, n = 2.0; running adds 0.07 at most, chance 0.1.
    assert policy.place_of("heavy") == pytest.approx(1.997, abs=0.01)  # type: ignore[attr-defined]
    assert send(policy, arrival(9, "heavy", prompt=10)) == worker_id(2)
    assert send(policy, arrival(10, "light", prompt=10)) == worker_id(0)
    assert send(policy, arrival(11, "heavy", prompt=10), 301 * S) == worker_id(0)


def test_llm_d_scores_as_published() -> None:
    """A run its users published: prefix 2, load 1 at one half, memory 1: 3.5 where cached, 1.5 elsewhere."""
    policy = WeightedScorers(WeightedScorersSettings(), 0)
    assert policy.score(prefix=1.0, queue=0.5, kv_free=1.0) == 3.5
    assert policy.score(prefix=0.0, queue=0.5, kv_free=1.0) == 1.5


def test_llm_d_leaves_a_warm_worker_when_queue_and_memory_outweigh_the_match() -> None:
    policy = make_policy("llm-d-scorers")
    join(policy, 2, slots=1, kv_blocks=100)
    first = send(policy, arrival(1, blocks=(1, 2, 3, 4)))
    assert send(policy, arrival(2, blocks=(1, 2, 3, 4))) == first, "2 · 1 + 1 against 1 + 1"
    for _ in range(3):
        policy.known.sent((9,), first)  # type: ignore[attr-defined]
        policy.by_id[first].in_flight += 1  # type: ignore[attr-defined]
    other = send(policy, arrival(9, blocks=(1, 21, 22, 23)))
    assert other != first, "a quarter of a match, 0.5, is less than the queue's 1"


def test_e2_exploits_a_match_longer_than_the_rest_and_explores_otherwise() -> None:
    policy = make_policy("preble-e2", {"rebalance": 1e9})
    join(policy, 2)
    assert send(policy, arrival(1, blocks=tuple(range(100, 140)))) == worker_id(0)
    assert send(policy, arrival(2, blocks=(1, 2, 3))) == worker_id(1), "the lighter one"
    warm = (*range(100, 140), 7)
    assert send(policy, arrival(3, blocks=warm)) == worker_id(0), "matched 640 of 656 tokens"
    cold = tuple(range(100, 120)) + tuple(range(300, 340))
    assert send(policy, arrival(4, blocks=cold)) == worker_id(1), "matched 320 of 960: explore"


def test_e2_spares_a_worker_that_carries_half_as_much_again() -> None:
    policy = make_policy("preble-e2")
    join(policy, 2)
    blocks = tuple(range(100, 140))
    assert send(policy, arrival(1, blocks=blocks)) == worker_id(0)
    assert send(policy, arrival(2, blocks=blocks)) == worker_id(1), "660 against nothing is more than 1.5"


def test_e2_forgets_load_after_three_minutes() -> None:
    policy = make_policy("preble-e2")
    join(policy, 2)
    send(policy, arrival(1, blocks=(1, 2)), 0)
    assert policy._loads[worker_id(0)] > 0  # type: ignore[attr-defined]
    send(policy, arrival(2, blocks=(3, 4)), 181 * S)
    assert policy._loads[worker_id(1)] == 0  # type: ignore[attr-defined]
    assert policy._loads[worker_id(0)] == 32 + 2 * 10  # type: ignore[attr-defined]
