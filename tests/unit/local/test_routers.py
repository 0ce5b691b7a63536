"""Live routers are the policies of the simulations: they choose alike, and counts come down."""

from contextlib import AsyncExitStack

import pytest

from evenhand.core.errors import InvalidConfig
from evenhand.core.facts import WorkerSpec
from evenhand.core.ids import Epoch, PoolId, WorkerId
from evenhand.local.demo import PLAIN_POLICIES
from evenhand.local.routers import PolicyRouter
from evenhand.local.workload import Arrival
from evenhand.policies.table import make_policy

SPECS = [
    WorkerSpec(WorkerId(f"w{n}"), PoolId("p"), f"http://w{n}", Epoch(1), 8, 1_000, 16, sends_events=False)
    for n in range(3)
]
SALTS = {"a": "salt-a", "b": "salt-b"}


def router(name: str) -> PolicyRouter:
    policy, settings = PLAIN_POLICIES[name]
    return PolicyRouter(make_policy(policy, settings), SPECS, SALTS, "model", name)


def prompt(*blocks: int) -> tuple[int, ...]:
    return tuple(token for block in blocks for token in range(block * 100 + 1, block * 100 + 17))


async def test_round_robin_takes_workers_in_turn() -> None:
    routed = router("round-robin")
    addresses = []
    for _ in range(4):
        async with routed.place(Arrival(0.0, "a", prompt(1), 4)) as placement:
            addresses.append(placement.address)
    assert addresses == ["http://w0", "http://w1", "http://w2", "http://w0"]


async def test_cache_greedy_returns_to_the_worker_it_sent_the_prefix_to_within_one_tenant() -> None:
    routed = router("cache-greedy")
    async with AsyncExitStack() as open_requests:
        first = await open_requests.enter_async_context(routed.place(Arrival(0.0, "a", prompt(1, 2), 4)))
        again = await open_requests.enter_async_context(routed.place(Arrival(0.0, "a", prompt(1, 2, 3), 4)))
        other = await open_requests.enter_async_context(routed.place(Arrival(0.0, "b", prompt(1, 2), 4)))
    assert first.address == again.address == "http://w0"
    assert other.address == "http://w1", "another salt, other keys: the least loaded"
    assert (first.cache_salt, other.cache_salt) == ("salt-a", "salt-b")


@pytest.mark.parametrize("produced", [0, 2, 4])
async def test_a_request_that_ended_whichever_way_is_in_flight_no_more(produced: int) -> None:
    policy = make_policy("fcfs-least-load")
    routed = PolicyRouter(policy, SPECS, SALTS, "model")
    async with routed.place(Arrival(0.0, "a", prompt(1), 4)) as placement:
        placement.output_tokens = produced
    assert [(worker.in_flight, worker.prefilling) for worker in policy.workers] == [(0, 0)] * 3  # type: ignore[attr-defined]


def test_a_policy_that_holds_requests_back_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="'dlpm' cannot stand before live engines"):
        PolicyRouter(make_policy("dlpm"), SPECS, SALTS, "model")
