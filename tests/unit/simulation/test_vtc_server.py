"""The engine's clock, the order of its queue, and who stands before it."""

import pytest

from evenhand.core.ids import TenantId
from evenhand.engine.block_pool import BlockPool
from evenhand.policies.vtc import PREDICTION_ERROR, Prediction
from evenhand.simulation.vtc.experiment import front_of
from evenhand.simulation.vtc.fronts import InEngine
from evenhand.simulation.vtc.orders import VtcOrder
from evenhand.simulation.vtc.published import Rule
from evenhand.simulation.vtc.server import ADMISSION, STEP_TIME, engine_request, serve
from evenhand.simulation.vtc.workloads import NS_PER_S, TOKENS_ADDED, Ask

A, B = TenantId("a"), TenantId("b")
POOL = BlockPool(2)


def asks_of(*clients: TenantId, prompt: int = 256, output: int = 256) -> list[Ask]:
    return [Ask(number, 0, client, prompt, output) for number, client in enumerate(clients)]


def test_one_request_takes_its_prompt_and_then_a_step_a_token() -> None:
    ask = Ask(0, 5 * NS_PER_S, A, 256, 3)
    (one,) = serve([ask], InEngine())
    prefill_ns = STEP_TIME.prefill_token_ns * (256 + TOKENS_ADDED)
    decode_ns = STEP_TIME.base_ns + STEP_TIME.running_sequence_ns
    assert (one.ask, one.first_token_ns) == (ask, 5 * NS_PER_S + prefill_ns)
    assert one.end_ns == one.first_token_ns + 2 * decode_ns


def test_who_comes_during_a_step_waits_for_the_cadence() -> None:
    first, second = serve([Ask(0, 0, A, 256, 100), Ask(1, NS_PER_S // 100, A, 256, 100)], InEngine())
    decode_ns = STEP_TIME.base_ns + STEP_TIME.running_sequence_ns
    prefill_ns = STEP_TIME.prefill_token_ns * (256 + TOKENS_ADDED)
    assert second.first_token_ns - first.first_token_ns == ADMISSION.decode_steps_min * decode_ns + prefill_ns


@pytest.mark.parametrize("rule", list(Rule))
def test_everybody_is_served_once_and_a_run_repeats(rule: Rule) -> None:
    asks = asks_of(*[A, B, A, A] * 15)
    served = serve(asks, front_of(rule, 1))
    assert sorted(one.ask.ask_id for one in served) == list(range(60))
    assert all(0 < one.first_token_ns < one.end_ns for one in served)
    assert served == serve(asks, front_of(rule, 1))


def order_with(prediction: Prediction, *asks: Ask) -> VtcOrder:
    order = VtcOrder(prediction, seed=1)
    for ask in asks:
        order.push(engine_request(ask))
    return order


def test_the_least_served_clients_oldest_request_is_the_head() -> None:
    order = order_with(Prediction.NONE, *asks_of(A, A, B))
    head = order.head(POOL)
    assert head is not None
    assert (head.request_id, len(order)) == ("0", 3)
    order.remove(head)
    other = order.head(POOL)
    assert other is not None
    assert other.request_id == "2", "a has paid for its input"
    order.remove(other)
    order.produced(other)
    last = order.head(POOL)
    assert last is not None
    assert last.request_id == "1"
    order.remove(last)
    assert (order.head(POOL), len(order)) == (None, 0)


@pytest.mark.parametrize(("prediction", "least", "most"), [
    (Prediction.NONE, 0.0, 0.0),
    (Prediction.ORACLE, 1.0, 1.0),
    (Prediction.NOISY, 1 - PREDICTION_ERROR, 1 + PREDICTION_ERROR),
])  # fmt: skip
def test_what_is_charged_at_admission_and_in_the_end(prediction: Prediction, least: float, most: float) -> None:
    order = order_with(prediction, *asks_of(*[A] * 50, output=200))
    charges = []
    while (head := order.head(POOL)) is not None:
        before = order.counters.counter(A)
        order.remove(head)
        charges.append((order.counters.counter(A) - before - (256 + TOKENS_ADDED)) / 2)
        for _token in range(200):
            order.produced(head)
        order.ended(head)
        assert order.counters.counter(A) - before == pytest.approx(256 + TOKENS_ADDED + 2 * 200)
    assert all(200 * least <= charge <= 200 * most for charge in charges)
    assert (len(set(charges)) > 40) == (prediction is Prediction.NOISY)
