"""VTC's counters: turns, lifts, predictions, and the bound its paper proves."""

from collections import deque
from random import Random

import pytest

from evenhand.core.ids import TenantId
from evenhand.policies.vtc_counters import VtcCounters, VtcLeg

A, B, C = TenantId("a"), TenantId("b"), TenantId("c")


def test_nobody_waits_nobody_is_named() -> None:
    counters = VtcCounters()
    assert counters.least() is None
    counters.enter(A)
    counters.leave(A)
    assert counters.least() is None


def test_the_least_served_of_those_that_wait_is_next() -> None:
    counters = VtcCounters()
    for client in (A, B, B, A):
        counters.enter(client)
    assert counters.least() == A, "equal counters: the first seen"
    counters.leave(A)
    leg = counters.admit(A, input_tokens=256)
    assert counters.counter(A) == 256
    assert counters.least() == B
    counters.leave(B)
    counters.admit(B, input_tokens=100)
    counters.produce(leg, 3)
    assert counters.counter(A) == 256 + 2 * 3
    assert counters.least() == B, "100 is less than 262"


def test_weights_divide_what_is_charged() -> None:
    counters = VtcCounters(weights={A: 4.0})
    counters.produce(counters.admit(A, input_tokens=100), 10)
    counters.produce(counters.admit(B, input_tokens=100), 10)
    assert (counters.counter(A), counters.counter(B)) == (30, 120)


def test_whoever_comes_back_is_lifted_to_the_least_of_those_that_wait() -> None:
    counters = VtcCounters()
    counters.enter(A)
    counters.admit(A, input_tokens=1_000)
    counters.enter(B)
    assert counters.counter(B) == 1_000, "an idle client has saved nothing up"
    counters.admit(B, input_tokens=500)
    counters.enter(C)
    assert counters.counter(C) == 1_000
    assert counters.counter(B) == 1_500, "and one that is ahead is not lowered"


def test_a_second_request_in_the_queue_does_not_lift() -> None:
    counters = VtcCounters()
    counters.enter(A)
    counters.enter(B)
    counters.admit(B, input_tokens=700)
    counters.enter(A)
    assert counters.counter(A) == 0


def test_where_nobody_waits_the_last_that_left_is_the_floor() -> None:
    counters = VtcCounters()
    for client, tokens in ((A, 900), (B, 300)):
        counters.enter(client)
        counters.leave(client)
        counters.admit(client, input_tokens=tokens)
    assert counters.counter(B) == 1_200, "B was lifted to A's 900 and then paid 300"
    counters.enter(C)
    assert counters.counter(C) == 1_200


@pytest.mark.parametrize(
    ("predicted", "produced"), [(0, 256), (256, 256), (128, 256), (384, 256), (255.5, 256), (9, 0)]
)
def test_whatever_was_predicted_the_truth_is_paid_in_the_end(predicted: float, produced: int) -> None:
    counters = VtcCounters()
    leg = counters.admit(A, input_tokens=256, predicted_output_tokens=predicted)
    assert counters.counter(A) == 256 + 2 * predicted
    for _token in range(produced):
        counters.produce(leg)
    assert counters.counter(A) == 256 + 2 * max(predicted, produced), "below the prediction nothing is added"
    counters.end(leg)
    assert counters.counter(A) == 256 + 2 * produced


def test_a_leg_ends_once_and_then_produces_nothing() -> None:
    counters = VtcCounters()
    leg = counters.admit(A, input_tokens=1)
    counters.end(leg)
    with pytest.raises(AssertionError, match="ends once"):
        counters.end(leg)
    with pytest.raises(AssertionError, match="ended"):
        counters.produce(leg)


def test_only_who_waits_can_leave() -> None:
    with pytest.raises(AssertionError, match="only who waits"):
        VtcCounters().leave(A)


@pytest.mark.parametrize("seed", range(20))
def test_the_papers_bound_holds_between_clients_that_always_wait(seed: int) -> None:
    """Service of two backlogged clients differs by at most 2 · max(input_cost · L, output_cost · M), at all times.

    L is the longest input and M the most tokens the engine holds. The engine here is a token pool that reserves
    whole outputs, as the one the paper measures does.
    """
    random = Random(seed)
    pool_tokens, input_tokens_max = 600, 60
    counters = VtcCounters()
    served = {A: 0.0, B: 0.0, C: 0.0}
    for client in served:
        counters.enter(client)
    heads = {client: (random.randint(1, input_tokens_max), random.randint(1, 200)) for client in served}
    running: deque[tuple[VtcLeg, int, int]] = deque()
    bound = 2 * max(1 * input_tokens_max, 2 * pool_tokens)
    for _step in range(3_000):
        while (turn := counters.least()) is not None:
            tokens, output = heads[turn]
            if sum(held for _leg, held, _left in running) + tokens + output > pool_tokens:
                break
            heads[turn] = (random.randint(1, input_tokens_max), random.randint(1, 200))
            served[turn] += tokens
            running.append((counters.admit(turn, tokens), tokens + output, output))
        for leg, held, left in tuple(running):
            running.popleft()
            counters.produce(leg)
            served[leg.client] += 2
            if left > 1:
                running.append((leg, held, left - 1))
            else:
                counters.end(leg)
        assert max(served.values()) - min(served.values()) <= bound, f"seed {seed}"
    assert min(served.values()) > 2 * bound, f"seed {seed}: too short a run shows nothing"
