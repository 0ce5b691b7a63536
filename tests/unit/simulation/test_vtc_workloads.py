"""Who asks for what, when; and a broken trace is named."""

import re
from itertools import pairwise

import pytest

from evenhand.core.errors import InvalidInput
from evenhand.core.ids import TenantId
from evenhand.simulation.vtc.workloads import (
    LATE_MS_MAX,
    NS_PER_MS,
    NS_PER_S,
    TRACE,
    arena,
    clients_of,
    evenly,
    numbered,
    read_trace,
)

HEADER = "req_time_s,client,prompt_len,output_len"
ONE = TenantId("client-1")


def test_evenly_spaced_at_the_rate_of_each() -> None:
    asks = evenly(numbered((1.5, 3.0)), 360, seed=1)
    assert clients_of(asks) == ["client-1", "client-2"]
    for client, rate in (("client-1", 1.5), ("client-2", 3.0)):
        times = [ask.at_ns / NS_PER_S for ask in asks if ask.client == client]
        assert len(times) == rate * 360
        assert 1 / rate <= times[0] < 2 / rate
        assert {round(later - earlier, 6) for earlier, later in pairwise(times)} == {round(1 / rate, 6)}
    assert [ask.ask_id for ask in asks] == list(range(len(asks)))
    assert all(earlier.at_ns <= later.at_ns for earlier, later in pairwise(asks))


def test_whoever_comes_and_goes_asks_in_every_second_span() -> None:
    asks = evenly(numbered((0.5, 2.0), first_on_s=60), 600, seed=1)
    first = [ask.at_ns / NS_PER_S for ask in asks if ask.client == ONE]
    assert {int(at_s // 60) for at_s in first} == {0, 2, 4, 6, 8, 10}
    assert len(asks) - len(first) == 1_200, "the other one never pauses"


def test_a_seed_is_a_run() -> None:
    assert evenly(numbered((1.0,)), 60, seed=1) == evenly(numbered((1.0,)), 60, seed=1)
    assert evenly(numbered((1.0,)), 60, seed=1) != evenly(numbered((1.0,)), 60, seed=2)
    assert arena(1) == arena(1)
    assert arena(1) != arena(2)


def test_the_arena_is_the_published_trace_a_little_late() -> None:
    asks = arena(1)
    assert (len(asks), len(clients_of(asks))) == (1_500, 27)
    assert sum(ask.prompt_tokens + ask.output_tokens for ask in asks) == 588_695
    assert 600 * NS_PER_S <= asks[-1].at_ns < 600 * NS_PER_S + LATE_MS_MAX * NS_PER_MS
    assert [ask.ask_id for ask in asks] == list(range(1_500))


def test_a_trace_is_read_in_order_of_time() -> None:
    asks = read_trace(f"{HEADER}\n2.5,b,3,4\n1.0,a,1,2\n", "t")
    assert [(ask.ask_id, ask.at_ns, ask.client) for ask in asks] == [(0, NS_PER_S, "a"), (1, 2_500_000_000, "b")]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", f"{TRACE}: the first line"),
        ("time,client\n", f"{TRACE}: the first line"),
        (f"{HEADER}\n1.0,a,1\n", "line 2"),
        (f"{HEADER}\n1.0,a,1,2\nsoon,a,1,2\n", "line 3"),
        (f"{HEADER}\ninf,a,1,2\n", "line 2"),
        (f"{HEADER}\n-1,a,1,2\n", "line 2"),
        (f"{HEADER}\n1,,1,2\n", "line 2"),
        (f"{HEADER}\n1,a,0,2\n", "line 2"),
        (f"{HEADER}\n1,a,1,0\n", "line 2"),
    ],
)
def test_a_broken_trace_is_named_by_its_line(text: str, named: str) -> None:
    with pytest.raises(InvalidInput, match=re.escape(named)):
        read_trace(text, TRACE)
