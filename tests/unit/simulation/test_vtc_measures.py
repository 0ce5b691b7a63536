"""Measures against hand-made runs."""

import pytest

from evenhand.core.ids import TenantId
from evenhand.simulation.vtc.measures import (
    accumulated_differences,
    first_token_p99_s,
    moments_s,
    service,
    tokens_per_s,
    windowed_differences,
)
from evenhand.simulation.vtc.server import Served
from evenhand.simulation.vtc.workloads import NS_PER_S, Ask

A, B = TenantId("a"), TenantId("b")


def served(client: TenantId, asked_s: float, first_s: float, end_s: float, prompt: int, output: int) -> Served:
    ask = Ask(0, round(asked_s * NS_PER_S), client, prompt, output)
    return Served(ask, round(first_s * NS_PER_S), round(end_s * NS_PER_S))


def test_an_output_token_costs_two() -> None:
    assert service(100, 50) == 200


def test_moments_are_nineteen_and_end_before_the_run_is_over() -> None:
    assert len(moments_s()) == 19
    assert moments_s()[0] == 28.5
    assert moments_s()[-1] == pytest.approx(541.5)


def test_accumulated_service_flows_from_first_token_to_last_and_leaves_the_warm_up_out() -> None:
    run = [served(A, 0, 0, 60, 600, 0), served(B, 0, 30, 130, 0, 50)]
    differences = accumulated_differences(run)
    assert differences[0] == pytest.approx(10 * 28.5 - 28.5), "10 a second against 1, from 30 s on"
    assert differences[1] == pytest.approx(300 - 57), "a has ended at 60 s"
    assert differences[-1] == pytest.approx(300 - 100)


def test_what_is_over_at_once_has_no_flow() -> None:
    assert max(accumulated_differences([served(A, 0, 40, 40, 600, 1), served(B, 0, 40, 40, 1, 1)])) == 0


def test_in_a_window_nobody_is_short_of_more_than_it_asked_for() -> None:
    greedy = [served(A, at, at, at + 10, 100, 0) for at in range(0, 600, 10)]
    modest = [served(B, at, at, at + 10, 10, 0) for at in range(0, 600, 10)]
    assert max(windowed_differences(greedy + modest)) < 0.4, "b got what it asked for, but for the window's edges"
    starved = [served(B, at, 700, 710, 10, 0) for at in range(0, 600, 10)]
    assert max(windowed_differences(greedy + starved)) == pytest.approx(1.0, abs=0.4), "b asked for 1 a second"
    hungry = [served(B, at, 700, 710, 1_000, 0) for at in range(0, 600, 10)]
    assert max(windowed_differences(greedy + hungry)) == pytest.approx(10.0, abs=0.4), "a, the best served, got 10"


def test_p99_is_linear_between_ranks_and_of_one_client() -> None:
    run = [served(A, 0, wait, 500, 1, 1) for wait in range(101)] + [served(B, 0, 400, 500, 1, 1)]
    assert first_token_p99_s(run, A) == pytest.approx(99.0)
    assert first_token_p99_s([served(A, 1, 2, 3, 1, 1), served(A, 1, 4, 5, 1, 1)], A) == pytest.approx(2.98)
    assert first_token_p99_s([served(A, 1, 3, 4, 1, 1)], A) == 2.0


def test_throughput_counts_prompts_outputs_and_the_drain() -> None:
    assert tokens_per_s([served(A, 0, 1, 10, 100, 20), served(B, 0, 1, 5, 60, 20)]) == 20.0
