"""Answers (docs/invariants.md): each way not to get a place has its own reason, in one sentence that names it."""

import pytest
from tests.unit.core.scheduler_world import World, chain, config, ended, refusal, ticket, tickets

from evenhand.core.facts import RefusalReason, TenantState, WorkerRole
from evenhand.core.ids import WorkerId
from evenhand.core.steps import Refused, WakeAt, WorkerDrained, WorkerGone


@pytest.fixture
def world() -> World:
    world = World(config(worker_stale_after_ms=10**9, worker_lost_after_ms=10**9))
    world.tenants("a", "b")
    world.workers("w1", slots=1)
    return world


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prompt": 0}, "0 tokens"),
        ({"prompt": -3}, "-3 tokens"),
        ({"output": 0}, "output limit"),
        ({"output_tokens_expected": -1}, "cannot be negative"),
        ({"size_bytes": -1}, "cannot be negative"),
        ({"keys": chain(1, 4), "prompt": 63}, "only 3 whole blocks"),
    ],
)
def test_a_malformed_request_is_invalid_and_says_how(world: World, changes: dict[str, object], words: str) -> None:
    answer = refusal(world.submit("a", **changes))  # type: ignore[arg-type]
    assert answer.reason is RefusalReason.INVALID
    assert words in answer.sentence
    assert world.scheduler.status(0).queued_total == 0


def test_a_missing_identity_is_refused_never_unlimited(world: World) -> None:
    assert refusal(world.submit("")).reason is RefusalReason.UNKNOWN_TENANT
    assert refusal(world.submit("stranger")).reason is RefusalReason.UNKNOWN_TENANT


def test_what_no_worker_could_ever_run_is_refused_at_once(world: World) -> None:
    world.workers("w2", kv_blocks=100, model_length_max_tokens=1_000)
    answer = refusal(world.submit("a", prompt=160_000, output=1))
    assert answer.reason is RefusalReason.TOO_LARGE
    assert "160001" in answer.sentence
    assert "160000" in answer.sentence
    assert not [e for e in world.submit("a", prompt=159_000, output=1_000) if isinstance(e, Refused)]


def test_a_request_only_one_worker_could_hold_goes_there(world: World) -> None:
    world.workers("small", kv_blocks=10)
    assert ticket(world.submit("a", prompt=500)).worker_id == "w1"
    assert ticket(world.submit("a", prompt=100)).worker_id == "small"


def test_a_queue_full_by_length_tells_when_to_come_back() -> None:
    world = World(config(retry_after_default_ms=900, worker_stale_after_ms=10**9, worker_lost_after_ms=10**9))
    world.tenants("a", queue_length_max=2)
    world.workers("w1", slots=1)
    running = ticket(world.submit("a"))
    world.submit("a")
    world.submit("a")
    answer = refusal(world.submit("a"))
    assert (answer.reason, answer.retry_after_ms) == (RefusalReason.QUEUE_FULL, 900)
    for _ in range(6):
        running = ticket(world.settle(running, after_ms=250))
        world.submit("a")
    assert refusal(world.submit("a")).retry_after_ms == 250


def test_a_queue_full_by_bytes(world: World) -> None:
    world.tenants("a", queue_bytes_max=100)
    world.submit("a")
    world.submit("a", size_bytes=60)
    assert refusal(world.submit("a", size_bytes=41)).reason is RefusalReason.QUEUE_FULL
    assert not [e for e in world.submit("a", size_bytes=40) if isinstance(e, Refused)]


def test_one_tenant_cannot_fill_the_queue_for_others(world: World) -> None:
    world.tenants("a", queue_length_max=2)
    for _ in range(5):
        world.submit("a")
    assert not [e for e in world.submit("b") if isinstance(e, Refused)]


def test_all_queues_together_are_bounded() -> None:
    world = World(config(queued_total_max=2))
    world.tenants("a", "b", "c")
    world.workers("w1", slots=1)
    for tenant in "aab":
        assert not [e for e in world.submit(tenant) if isinstance(e, Refused)]
    assert refusal(world.submit("c")).reason is RefusalReason.QUEUE_FULL


def test_a_deadline_in_the_past_is_refused_at_once(world: World) -> None:
    world.tick(10)
    assert refusal(world.submit("a", deadline_ns=world.now_ns)).reason is RefusalReason.DEADLINE


def test_a_deadline_passes_in_the_queue_and_not_on_a_worker(world: World) -> None:
    running = ticket(world.submit("a", deadline_ns=5_000_000))
    world.submit("a", deadline_ns=10_000_000)
    effects = world.tick(10)
    assert refusal(effects).reason is RefusalReason.DEADLINE
    assert "10 ms" in refusal(effects).sentence
    assert not tickets(world.settle(running))


def test_the_shell_is_told_when_to_call_again(world: World) -> None:
    world.submit("a")
    world.submit("a", deadline_ns=7_000_000)
    assert [e.at_ns for e in world.effects if isinstance(e, WakeAt)][-1] == 7_000_000


def test_a_pool_of_draining_workers_is_unavailable_not_busy(world: World) -> None:
    running = ticket(world.submit("a"))
    world.submit("a")
    assert refusal(world.step(WorkerDrained(running.worker_id, True))).reason is RefusalReason.NO_WORKER
    assert refusal(world.submit("a")).reason is RefusalReason.NO_WORKER
    assert ended(world.settle(running))


def test_the_last_worker_gone_ends_what_runs_and_what_waits(world: World) -> None:
    running = ticket(world.submit("a", request_id="runs"))
    world.submit("a", request_id="waits")
    effects = world.step(WorkerGone(running.worker_id, "killed"))
    assert ended(effects)[0].attained == 0.0
    refused = [e for e in effects if isinstance(e, Refused)]
    assert [e.request_id for e in refused] == ["runs", "waits"]
    assert all(e.refusal.reason is RefusalReason.NO_WORKER for e in refused)
    assert all(e.refusal.retry_after_ms for e in refused)


def test_what_waits_for_the_only_worker_that_could_hold_it_is_refused_when_that_leaves(world: World) -> None:
    world.workers("small", kv_blocks=10)
    running = ticket(world.submit("a", prompt=500))
    world.submit("b", prompt=600, request_id="large")
    refused = [e for e in world.step(WorkerGone(running.worker_id, "killed")) if isinstance(e, Refused)]
    assert {e.request_id for e in refused} == {running.request_id, "large"}


def test_a_draining_tenant_admits_nothing_and_finishes(world: World) -> None:
    running = ticket(world.submit("a"))
    world.submit("a", request_id="waits")
    world.tenants("a", state=TenantState.DRAINING)
    assert refusal(world.submit("a")).reason is RefusalReason.TENANT_SUSPENDED
    assert ticket(world.settle(running)).request_id == "waits"


def test_a_limit_of_one_admits_one(world: World) -> None:
    world.workers("w2")
    world.tenants("a", concurrency_max=1)
    first = ticket(world.submit("a"))
    assert not tickets(world.submit("a"))
    assert len(tickets(world.settle(first))) == 1


def test_a_worker_that_cannot_belong_to_the_pool_is_not_taken_in() -> None:
    world = World()
    world.tenants("a")
    world.workers("w1")
    world.workers("odd", block_size_tokens=32)
    world.workers("empty", slots=0)
    world.workers("prefill", role=WorkerRole.PREFILL)
    assert [w.worker_id for w in world.scheduler.status(0).workers] == ["w1", "prefill"]
    for _ in range(8):
        assert ticket(world.submit("a")).worker_id == "w1"
    assert not tickets(world.submit("a"))


def test_no_refusal_names_another_tenant(world: World) -> None:
    world.tenants("secret-competitor")
    for _ in range(3):
        world.submit("secret-competitor")
    world.tenants("a", queue_length_max=1)
    for _ in range(3):
        world.submit("a")
    sentences = [e.refusal.sentence for e in world.effects if isinstance(e, Refused) and e.tenant_id == "a"]
    assert sentences
    assert not [s for s in sentences if "competitor" in s]


def test_what_is_refused_uses_up_nothing(world: World) -> None:
    world.tenants("a", queue_length_max=2, queue_bytes_max=100, concurrency_max=1)
    world.submit("a", size_bytes=10)
    world.submit("a", size_bytes=10, request_id="waits")
    before = world.scheduler.status(world.now_ns)
    refused = [
        refusal(effects).reason
        for effects in (
            world.submit("a", prompt=0),
            world.submit("a", prompt=10**7),
            world.submit("a", size_bytes=91),
            world.submit("a", deadline_ns=world.now_ns),
            world.submit("a", prompt=5, request_id="waits"),
        )
    ]
    assert refused == [
        RefusalReason.INVALID,
        RefusalReason.TOO_LARGE,
        RefusalReason.QUEUE_FULL,
        RefusalReason.DEADLINE,
        RefusalReason.REQUEST_ID_REUSED,
    ]
    assert world.scheduler.status(world.now_ns) == before
    assert not [e for e in world.submit("a", size_bytes=90) if isinstance(e, Refused)]


def test_a_dead_workers_capacity_is_not_counted(world: World) -> None:
    world.workers("large", slots=8, kv_blocks=20_000)
    assert ticket(world.submit("a", prompt=200_000)).worker_id == "large"
    world.step(WorkerGone(WorkerId("large"), "killed"))
    answer = refusal(world.submit("a", prompt=200_000))
    assert answer.reason is RefusalReason.TOO_LARGE
    assert "160000" in answer.sentence
    assert len([t for _ in range(9) for t in tickets(world.submit("b"))]) == 1, "the one slot that is left"
