"""Dynamo's cost and classes, against the examples in its code and documents."""

import pytest
from tests.unit.policies.fleet import arrival, holds, join, send, worker_id

from evenhand.core.facts import Usage
from evenhand.policies.dynamo import DeficitRing, DynamoCost, DynamoCostSettings
from evenhand.policies.table import make_policy


@pytest.mark.parametrize(
    ("settings", "warm_wins"),
    [
        (DynamoCostSettings(), True),
        (DynamoCostSettings(overlap_credit=0.0), False),
        (DynamoCostSettings(prefill_scale=0.0), False),
    ],
)
def test_cost_of_a_warm_and_a_cold_worker(settings: DynamoCostSettings, warm_wins: bool) -> None:
    """Its own test: four blocks, two of them on a worker that decodes one block more; credit and scale tip it."""
    policy = DynamoCost(settings, 0)
    warm, cold = policy.cost(4, 2, 1, 1), policy.cost(4, 0, 0, 0)
    assert (warm < cold) is warm_wins


def test_cost_never_falls_below_zero_by_overlap() -> None:
    policy = DynamoCost(DynamoCostSettings(overlap_credit=3.0), 0)
    assert policy.cost(4, 4, 2, 0) == 2


def test_active_prefill_counts_until_the_first_token() -> None:
    policy = make_policy("dynamo-cost")
    join(policy, 2)
    holds(policy, 0, (1, 2, 3))
    first = arrival(1, blocks=(1, 2, 3, 4))
    assert send(policy, first) == worker_id(0)
    assert policy.active_prefill_tokens(policy.workers[0]) == 16  # type: ignore[attr-defined]
    policy.first_token(first, worker_id(0), 48, 1)
    assert policy.active_prefill_tokens(policy.workers[0]) == 0  # type: ignore[attr-defined]


def test_ties_are_broken_at_random_by_the_seed() -> None:
    def sequence(seed: int) -> list[str]:
        policy = make_policy("dynamo-cost", seed=seed)
        join(policy, 3)
        sent = []
        for number in range(20):
            one = arrival(number, blocks=(number,))
            sent.append(send(policy, one))
            policy.cancelled(one, sent[-1], Usage(), 0)
        return [str(worker) for worker in sent]

    assert sequence(1) == sequence(1)
    assert len(set(sequence(1))) == 3
    assert sequence(1) != sequence(2)


def test_credit_follows_the_quantum() -> None:
    """Its documents: a class with quantum 4,096 gets four times the tokens of one with 1,024."""
    ring = DeficitRing(1_024)
    ring.know("small", 1.0)
    ring.know("large", 4.0)
    served = {"small": 0, "large": 0}
    for _ in range(500):
        served[ring.next({"small": 256, "large": 256})] += 1
    assert served["large"] == pytest.approx(4 * served["small"], rel=0.05)


def test_a_request_larger_than_many_quanta_gets_whole_rounds_at_once() -> None:
    ring = DeficitRing(10)
    ring.know("a", 1.0)
    ring.know("b", 1.0)
    assert ring.next({"a": 1_000, "b": 1_001}) == "a"
    assert ring.next({"b": 1_001}) == "b"


def test_an_empty_queue_forfeits_its_credit() -> None:
    ring = DeficitRing(100)
    ring.know("a", 1.0)
    ring.know("b", 1.0)
    assert ring.next({"a": 10}) == "a"
    ring.forfeit("a")
    assert ring.next({"a": 150, "b": 150}) == "b", "with the 90 left over a could have paid after one round"


def test_cached_requests_crowd_out_uncached_ones() -> None:
    """Its published weakness: 100 wholly cached requests of A and 512-token ones of B: one turn in a hundred."""
    policy = make_policy("dynamo-classes", {"quantum_tokens": 512, "busy_share": 0.0})
    join(policy, 1, slots=1_000)
    holds(policy, 0, (1, 2))
    blocker = arrival(0, "c", prompt=5_000)
    send(policy, blocker)
    for number in range(1, 101):
        policy.submit(arrival(number, "a", blocks=(1, 2)), 0)
        policy.submit(arrival(1_000 + number, "b", prompt=512), 0)
    assert not policy.place(0), "the one worker is busy with prefill"
    policy.first_token(blocker, worker_id(0), 0, 1)
    order = [placed.arrival.tenant for placed in policy.place(1)]
    assert order.count("a") == 100, "each costs one token of credit"
    assert order.count("b") == 1, "one turn, and then the worker is busy again"


def test_nothing_queues_while_a_worker_is_free_of_prefill() -> None:
    policy = make_policy("dynamo-classes")
    join(policy, 2)
    for number in range(2):
        send(policy, arrival(number, prompt=3_000))
    policy.submit(arrival(2, prompt=10), 0)
    assert not policy.place(0), "both have more than a step's tokens before them"
    assert policy.queues.count == 1  # type: ignore[attr-defined]
