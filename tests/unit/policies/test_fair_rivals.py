"""VTC, DLPM, D²LPM and strict priority: their published rules and bounds, and what they share."""

import pytest
from tests.unit.policies.fleet import arrival, holds, join, send, worker_id

from evenhand.core.facts import CostWeights, Usage
from evenhand.core.ids import TenantId
from evenhand.engine.limits import EngineLimits
from evenhand.policies.deficit import Deficits
from evenhand.policies.policy import Arrival
from evenhand.policies.table import make_policy
from evenhand.simulation.trials.measures import VTC_COST, service_difference
from evenhand.simulation.trials.settings import TrialSettings
from evenhand.simulation.trials.trial import run_trial
from evenhand.simulation.trials.workload import TenantPlan, Workload, in_order

S = 1_000_000_000
DONE = Usage(100, 0, 10)
LENGTH = 256
SLOTS = 16
IN_FLIGHT_TOKENS = SLOTS * 2 * LENGTH
"""M of the bounds: tokens of a full batch."""


def overload(weight: float = 1.0, prefix: int = 0) -> Workload:
    """Two clients that both ask for more than there is, one twice as often: 256 tokens in and out."""
    arrivals: list[Arrival] = []
    for tenant, gap_ns, phi in (("slow", 120_000_000, 1.0), ("fast", 60_000_000, weight)):
        for at_ns in range(0, 12 * S, gap_ns):
            names = tuple(range(prefix)) if tenant == "fast" else ()
            number = len(arrivals)
            arrivals.append(Arrival(number, at_ns, tenant, names, LENGTH, LENGTH, LENGTH, weight=phi))
    tenants = (TenantPlan("slow"), TenantPlan("fast", weight))
    limits = EngineLimits(sequences_max=SLOTS, model_tokens_max=4_096)
    return Workload("overload", tenants, in_order(arrivals), limits)


@pytest.mark.parametrize("name", ["vtc", "vtc-affine"])
def test_vtc_keeps_its_bound_where_first_come_first_served_does_not(name: str) -> None:
    """OSDI 2024: backlogged clients differ by 2·max(w_in·L_input, w_out·M) at most."""
    bound = 2 * max(1.0 * LENGTH, 2.0 * IN_FLIGHT_TOKENS)
    settings = TrialSettings(workers=1, sample_ns=100_000_000)
    fair = service_difference(run_trial(make_policy(name), overload(), settings), VTC_COST).whole
    unfair = service_difference(run_trial(make_policy("fcfs-least-load"), overload(), settings), VTC_COST).whole
    assert 0 < fair <= bound / 2
    assert unfair > 3 * fair


def test_vtc_serves_by_weight() -> None:
    settings = TrialSettings(workers=1, sample_ns=100_000_000, until_ns=20 * S)
    result = run_trial(make_policy("vtc"), overload(weight=2.0), settings)
    slow, fast = result.series["slow"], result.series["fast"]
    assert fast.output_tokens == pytest.approx(2 * slow.output_tokens, rel=0.1)


@pytest.mark.parametrize("prediction", ["none", "oracle", "noisy"])
def test_predictions_are_charged_in_advance_and_settled(prediction: str) -> None:
    """Whatever was predicted, 100 in and 40 out have cost 180 in the end."""
    policy = make_policy("vtc", {"prediction": prediction}, seed=2)
    join(policy, 1)
    one = arrival(1, "a", prompt=100, output=40)
    send(policy, one)
    charged = policy.counters.counter(TenantId("a"))  # type: ignore[attr-defined]
    assert {"none": charged == 100, "oracle": charged == 180, "noisy": 140 <= charged <= 220}[prediction]
    policy.progress(worker_id(0), [(one, 1)], 1)
    policy.progress(worker_id(0), [(one, 39)], 2)
    policy.finished(one, worker_id(0), Usage(100, 0, 40), 2)
    assert policy.counters.counter(TenantId("a")) == pytest.approx(180)  # type: ignore[attr-defined]


def test_vtc_lifts_a_client_that_was_idle() -> None:
    """While b was idle a was served; b may not take all that time back at once."""
    policy = make_policy("vtc", {"slots_max": 1})
    join(policy, 1)
    for number in range(10):
        policy.submit(arrival(number, "a", prompt=100), 0)
    for number in range(5):
        (placed,) = policy.place(number)
        policy.finished(placed.arrival, placed.worker_id, DONE, number)
    for number in range(20, 30):
        policy.submit(arrival(number, "b", prompt=100), 10)
    order = []
    for number in range(8):
        (placed,) = policy.place(20 + number)
        order.append(placed.arrival.tenant)
        policy.finished(placed.arrival, placed.worker_id, DONE, 20 + number)
    assert abs(order.count("a") - order.count("b")) <= 1, order


def test_vtc_affine_takes_the_worker_that_holds_the_prompt_and_vtc_the_least_loaded() -> None:
    for name, chosen in (("vtc-affine", 1), ("vtc", 0)):
        policy = make_policy(name)
        join(policy, 2)
        holds(policy, 1, (1, 2, 3))
        assert send(policy, arrival(1, blocks=(1, 2, 3, 4))) == worker_id(chosen)


def test_room_is_slots_memory_and_pending_prefill() -> None:
    policy = make_policy("vtc", {"kv_reserved": "max"})
    join(policy, 1, slots=3, kv_blocks=500)
    big, small = arrival(1, prompt=2_000, output_max=20), arrival(2, prompt=100, output_max=20)
    send(policy, big)
    policy.submit(small, 0)
    policy.submit(arrival(3, prompt=5_900, output_max=200), 0)
    policy.submit(arrival(4, prompt=10), 0)
    assert [placed.arrival.arrival_id for placed in policy.place(0)] == [2], "2,100 pending tokens are enough"
    policy.first_token(big, worker_id(0), 0, 1)
    policy.first_token(small, worker_id(0), 0, 1)
    assert not policy.place(1), "8,000 tokens of memory cannot hold 2,140 and 6,100"
    policy.finished(big, worker_id(0), DONE, 2)
    assert [placed.arrival.arrival_id for placed in policy.place(2)] == [3]


def test_refill_gives_as_many_rounds_as_the_first_needs() -> None:
    deficits = Deficits(100.0)
    deficits.charge("a", 250.0)
    deficits.charge("b", 990.0)
    deficits.refill([("a", 1.0), ("b", 2.0)])
    assert (deficits.left("a"), deficits.left("b")) == (50.0, -390.0)
    fresh = Deficits(100.0)
    fresh.refill([("a", 1.0)])
    assert fresh.left("a") == 100.0


def test_dlpm_goes_by_match_while_a_client_has_deficit_and_then_by_fairness() -> None:
    policy = make_policy("dlpm", {"quantum": 50.0, "slots_max": 1})
    join(policy, 1)
    holds(policy, 0, (1, 2, 3))
    policy.submit(arrival(1, "cold", prompt=48), 0)
    for number in range(2, 9):
        policy.submit(arrival(number, "warm", blocks=(1, 2, 3, 90 + number)), 0)
    order = []
    for number in range(8):
        (placed,) = policy.place(number)
        order.append(placed.arrival.tenant)
        policy.progress(worker_id(0), [(placed.arrival, 10)], number)
        policy.finished(placed.arrival, placed.worker_id, DONE, number)
    # Each warm one costs 16 of input and 20 of output: two of them use up 50, then cold has the turn.
    assert order == ["warm", "warm", "cold", *["warm"] * 5]


def test_dlpm_keeps_its_bound() -> None:
    """arXiv 2501.14312: 2(U + Q), U = w_in·L + w_out·M; in its own cost, where cached input is free."""
    quantum = 2_000.0
    bound = 2 * (LENGTH + 2 * IN_FLIGHT_TOKENS + quantum)
    settings = TrialSettings(workers=1, sample_ns=100_000_000)
    result = run_trial(make_policy("dlpm", {"quantum": quantum}), overload(prefix=15), settings)
    assert 0 < service_difference(result, CostWeights(1.0, 0.0, 2.0, 0.0)).whole <= bound


def test_d2lpm_leaves_the_best_match_when_its_deficit_there_is_gone() -> None:
    policy = make_policy("d2lpm", {"worker_quantum": 100.0})
    join(policy, 2)
    holds(policy, 1, (1, 2, 3))
    sent = [send(policy, arrival(number, blocks=(1, 2, 3, 50 + number))) for number in range(3)]
    assert sent == [worker_id(1), worker_id(1), worker_id(0)], "64 each: after 128 of 100, the other worker"


def test_d2lpm_goes_nowhere_without_deficit_though_the_match_is_there() -> None:
    policy = make_policy("d2lpm", {"worker_quantum": 100.0})
    join(policy, 2)
    holds(policy, 1, (1, 2, 3))
    long_one, other = arrival(1, blocks=(1, 2, 3)), arrival(2, prompt=200)
    assert send(policy, long_one) == worker_id(1)
    policy.finished(long_one, worker_id(1), Usage(48, 0, 1_000), 1)
    assert send(policy, other) == worker_id(0)
    # −1,948 and −100: the refill stops as soon as worker 0 may take something, which worker 1 may not.
    assert send(policy, arrival(3, blocks=(1, 2, 3))) == worker_id(0)


def test_dlpm_inside_an_engine_charges_what_had_to_be_computed() -> None:
    """One at a time, one token out: equal uncached prompts alternate, though all of a came first."""
    first = [Arrival(n, 0, "a", tuple(range(100 * n, 100 * n + 20)), 321, 1, 1) for n in range(6)]
    then = [Arrival(n, 0, "b", tuple(range(100 * n, 100 * n + 20)), 321, 1, 1) for n in range(10, 16)]
    limits = EngineLimits(sequences_max=1, model_tokens_max=4_096)
    workload = Workload("queue", (TenantPlan("a"), TenantPlan("b")), in_order(first + then), limits)
    result = run_trial(make_policy("d2lpm", {"user_quantum": 300.0}), workload, TrialSettings(workers=1))
    order = [one.arrival.tenant for one in sorted(result.outcomes, key=lambda outcome: outcome.finished_ns)]
    assert order == ["a", "b"] * 6


def test_d2lpm_inside_its_engines_starves_nobody() -> None:
    """One engine, all at once: greedy serves all the warm first, the deficits interleave."""
    blocks = tuple(range(1, 33))
    warm = [Arrival(n, 0, "warm", (*blocks, 100 + n), 33 * 16, 64, 64) for n in range(60)]
    cold = [Arrival(100 + n, 0, "cold", (500 + n,), 300, 64, 64) for n in range(6)]
    limits = EngineLimits(sequences_max=4, model_tokens_max=4_096)
    tenants = (TenantPlan("warm"), TenantPlan("cold"))
    workload = Workload("burst", tenants, in_order(warm + cold), limits)
    result = run_trial(make_policy("d2lpm", {"user_quantum": 500.0}), workload, TrialSettings(workers=1))
    ends = sorted(outcome.finished_ns for outcome in result.outcomes if outcome.arrival.tenant == "cold")
    assert ends[-1] < 0.6 * result.ended_ns


def test_strict_priority_lets_no_hog_pass() -> None:
    policy = make_policy("strict-priority", {"slots_max": 1})
    join(policy, 1)
    for number in range(4):
        policy.submit(arrival(number, "hog", prompt=10, well_behaved=False), 0)
    policy.submit(arrival(9, "calm", prompt=10), 0)
    (placed,) = policy.place(0)
    assert placed.arrival.tenant == "calm"
    policy.finished(placed.arrival, placed.worker_id, DONE, 1)
    assert [placed.arrival.arrival_id for placed in policy.place(1)] == [0]
