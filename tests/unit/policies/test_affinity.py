"""Policies that follow the cache, against their authors' rules and examples."""

import pytest
from tests.unit.policies.fleet import arrival, holds, join, send, worker_id

from evenhand.core.facts import Usage
from evenhand.policies.affinity import LoadAwarePrefix, LoadAwarePrefixSettings
from evenhand.policies.policy import Policy
from evenhand.policies.table import make_policy

DONE = Usage(16, 0, 10)


def load(policy: Policy, loads: list[int]) -> None:
    """Put so many requests in flight on each worker, through a policy's own counts."""
    for number, count in enumerate(loads):
        policy.by_id[worker_id(number)].in_flight = count  # type: ignore[attr-defined]


def test_session_hash_keeps_a_conversation_and_moves_only_those_of_a_lost_worker() -> None:
    policy = make_policy("session-hash")
    join(policy, 4)
    before = {f"s{k}": send(policy, arrival(k, session=f"s{k}")) for k in range(400)}
    again = {f"s{k}": send(policy, arrival(1_000 + k, session=f"s{k}")) for k in range(400)}
    assert before == again
    assert all(list(before.values()).count(worker_id(number)) > 40 for number in range(4))
    policy.worker_lost(worker_id(2), [], 0)
    after = {f"s{k}": send(policy, arrival(2_000 + k, session=f"s{k}")) for k in range(400)}
    moved = [session for session in before if before[session] != after[session]]
    assert moved == [session for session in before if before[session] == worker_id(2)]


def test_longest_prefix_follows_the_cache_whatever_the_load() -> None:
    policy = make_policy("longest-prefix")
    join(policy, 3)
    holds(policy, 1, (1, 2, 3))
    holds(policy, 2, (1, 2))
    load(policy, [0, 1_000, 5])
    assert send(policy, arrival(1, blocks=(1, 2, 3, 4))) == worker_id(1)
    assert send(policy, arrival(2, blocks=(9,))) == worker_id(0)


@pytest.mark.parametrize(("beta", "chosen"), [(0.3, 0), (1.0, 1)])
def test_load_aware_prefix_weighs_load_against_the_match(beta: float, chosen: int) -> None:
    """Loads 4 and 2, mean 3: worker 0 scores 0.5 − β/3, worker 1 scores 0 + β/3, so β = 0.75 tips it."""
    policy = make_policy("load-aware-prefix", {"beta": beta})
    join(policy, 2)
    holds(policy, 0, (1, 2))
    load(policy, [4, 2])
    assert send(policy, arrival(1, blocks=(1, 2, 3, 4))) == worker_id(chosen)


def test_load_aware_prefix_is_the_published_formula() -> None:
    policy = LoadAwarePrefix(LoadAwarePrefixSettings(beta=1.0), 0)
    assert policy.score(800, 1_000, 6, 4.0) == pytest.approx(0.8 - 2 / 4)
    assert policy.score(800, 1_000, 1, 0.5) == pytest.approx(0.8 - 0.5), "the mean counts as 1 at least"


@pytest.mark.parametrize(
    ("loads", "chosen"),
    [
        ([64, 0], 0),  # apart by 64, not more: the match
        ([65, 0], 1),  # apart by 65, and 65 > 1.5 · 0: the shortest queue
        ([300, 230], 0),  # apart by 70, but 300 < 1.5 · 230: the match
    ],
)
def test_cache_aware_ignores_the_cache_only_when_both_thresholds_are_passed(loads: list[int], chosen: int) -> None:
    policy = make_policy("cache-aware")
    join(policy, 2)
    assert send(policy, arrival(1, blocks=(1, 2, 3))) == worker_id(0)
    load(policy, loads)
    assert send(policy, arrival(2, blocks=(1, 2, 3, 4))) == worker_id(chosen)


@pytest.mark.parametrize(("blocks", "chosen"), [((1, 2, 3, 4, 8, 9, 10), 0), ((1, 2, 5, 6, 7, 8, 9), 1)])
def test_cache_aware_asks_for_more_than_three_tenths_of_the_prompt(blocks: tuple[int, ...], chosen: int) -> None:
    policy = make_policy("cache-aware")
    join(policy, 2)
    assert send(policy, arrival(1, blocks=(1, 2, 3, 4))) == worker_id(0)
    load(policy, [2, 0])
    assert send(policy, arrival(2, blocks=blocks)) == worker_id(chosen)


def test_prefix_cache_sends_to_the_least_loaded_when_loads_are_far_apart() -> None:
    """The example of its documents: running 1, 2 and 20 are too far apart, so the first worker takes it."""
    policy = make_policy("prefix-cache", {"imbalance_max": 16})
    join(policy, 3)
    load(policy, [5, 5, 0])
    assert send(policy, arrival(1, blocks=(1, 2))) == worker_id(2)
    load(policy, [1, 2, 20])
    assert send(policy, arrival(2, blocks=(1, 2))) == worker_id(0)


@pytest.mark.parametrize(("loads", "chosen"), [([4, 2, 2], 1), ([3, 3, 2], 0)])
def test_prefix_cache_passes_over_a_match_a_deviation_above_the_mean(loads: list[int], chosen: int) -> None:
    """Loads 4, 2, 2: mean 2.67 and σ 0.94, so worker 0 is over; worker 1 holds less of it and is taken."""
    policy = make_policy("prefix-cache")
    join(policy, 3)
    load(policy, [0, 1, 1])
    assert send(policy, arrival(1, blocks=(1, 2, 3))) == worker_id(0)
    load(policy, [1, 0, 1])
    assert send(policy, arrival(2, blocks=(1,))) in (worker_id(0), worker_id(1))
    policy.known.sent((1,), worker_id(1))  # type: ignore[attr-defined]
    load(policy, loads)
    assert send(policy, arrival(3, blocks=(1, 2, 3))) == worker_id(chosen)


def test_counts_come_down_again() -> None:
    policy = make_policy("fcfs-least-load")
    join(policy, 2)
    first = arrival(1)
    assert send(policy, first) == worker_id(0)
    assert send(policy, arrival(2)) == worker_id(1)
    policy.first_token(first, worker_id(0), 0, 1)
    policy.finished(first, worker_id(0), DONE, 2)
    assert send(policy, arrival(3), 2) == worker_id(0)


def test_arrivals_without_a_worker_wait_for_one() -> None:
    policy = make_policy("fcfs-round-robin")
    policy.submit(arrival(1), 0)
    assert not policy.place(0)
    join(policy, 1)
    assert [placed.worker_id for placed in policy.place(1)] == [worker_id(0)]
