"""Acquire, Renew, Settle and Cancel over gRPC against a daemon on memory ports."""

import asyncio
import random
from dataclasses import replace
from functools import partial
from pathlib import Path

import aiohttp
import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from tests.fixtures.scheduler_daemon import (
    USED,
    WAIT_S,
    Client,
    World,
    acquire_request,
    announced,
    connected,
    error_of,
    eventually,
    load,
    queued,
    seed,
    stored,
    tickets_open,
)

from evenhand.core.facts import RateLimits
from evenhand.core.ids import PoolId, TenantId
from evenhand.core.kv import ControlMessage, EpochFloor, SnapshotRequested, WorkerLeft
from evenhand.core.scheduler import PoolScheduler
from evenhand.core.steps import Effect, Input, Submit
from evenhand.ports import CONTROL_TOPIC, KV_TOPIC
from evenhand.scheduler import live_map
from evenhand.scheduler.daemon import SERVICE, SchedulerDaemon
from evenhand.wire.generated import scheduler_pb2 as pb
from evenhand.wire.kv_codec import decode_control_message
from evenhand.wire.status import Code


async def fill_up(client: Client, daemon: SchedulerDaemon) -> list[str]:
    """Take every place there is."""
    tickets: list[str] = []
    while True:
        call = asyncio.ensure_future(_take(client, f"filler-{len(tickets)}"))
        await eventually(partial(_taken_or_queued, call, daemon))
        if not call.done():
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            await eventually(lambda: queued(daemon) == 0)
            return tickets
        tickets.append(call.result())


async def _take(client: Client, request_id: str) -> str:
    return (await client.acquire(request_id)).ticket


def _taken_or_queued(call: asyncio.Future[str], daemon: SchedulerDaemon) -> bool:
    return call.done() or queued(daemon) == 1


async def test_a_request_goes_to_the_worker_that_holds_its_prefix(
    world: World, daemon: SchedulerDaemon, client: Client
) -> None:
    keys = tuple(range(1, 65))
    world.say(stored("w2", keys))
    await eventually(lambda: daemon.live_map.cache_map.key_count == 64)
    granted = await client.acquire("r1", keys, explain=True)
    assert granted.worker.worker_id == "w2"
    assert granted.worker.address == "http://w2:8000"
    assert granted.predicted_cached_tokens == 64 * 16
    assert granted.explanation.reason == "affinity"
    assert "w2 holds 1024 of the prompt's 1025 tokens" in granted.explanation.sentence
    assert {candidate.worker_id for candidate in granted.explanation.candidates} == {"w1", "w2"}
    settled = await client.settle(
        granted.ticket, pb.Usage(prompt_tokens=1025, cached_tokens=1024, output_tokens=10)
    )
    assert settled.attained_cost == pytest.approx(1 + 102.4 + 20)
    again = await error_of(client.settle(granted.ticket))
    assert (again.reason, again.code) == ("TICKET_ALREADY_CLOSED", Code.FAILED_PRECONDITION)
    assert again.metadata == {"outcome": "settled"}
    assert tickets_open(daemon) == 0


async def test_candidates_are_listed_only_where_asked_for(client: Client) -> None:
    granted = await client.acquire("r1")
    assert granted.explanation.sentence
    assert not granted.explanation.candidates


async def test_resolve_tells_what_keys_are_made_of(client: Client) -> None:
    resolved = await client.stub.Resolve(pb.ResolveRequest(pool="llama", tenant="a"), timeout=WAIT_S)
    other = await client.stub.Resolve(pb.ResolveRequest(tenant="b"), timeout=WAIT_S)
    assert (resolved.block_size_tokens, resolved.model, resolved.key_scheme) == (
        16,
        "test-model",
        "evenhand.block.v1",
    )
    assert resolved.cache_domain == "tenant:a"
    assert len(resolved.cache_salt) == 64
    assert resolved.cache_salt != other.cache_salt
    granted = await client.acquire("r1")
    assert granted.cache_salt == resolved.cache_salt


async def test_the_same_request_id_gets_the_same_ticket(daemon: SchedulerDaemon, client: Client) -> None:
    first = await client.acquire("r1")
    again = await client.acquire("r1")
    assert again.ticket == first.ticket
    assert tickets_open(daemon) == 1
    reused = await error_of(client.acquire("r1", (1, 2, 3)))
    assert (reused.reason, reused.code) == ("REQUEST_ID_REUSED", Code.ALREADY_EXISTS)
    assert tickets_open(daemon) == 1


async def test_a_bad_second_request_does_not_end_the_first_ones_wait(
    daemon: SchedulerDaemon, client: Client
) -> None:
    tickets = await fill_up(client, daemon)
    first = asyncio.ensure_future(_take(client, "r1"))
    await eventually(lambda: queued(daemon) == 1)
    assert (await error_of(client.acquire("r1", (1, 2, 3)))).reason == "REQUEST_ID_REUSED"
    await client.settle(tickets[0], USED)
    assert await asyncio.wait_for(first, WAIT_S)


async def test_a_call_cancelled_in_the_queue_leaves_nothing(daemon: SchedulerDaemon, client: Client) -> None:
    await fill_up(client, daemon)
    before = tickets_open(daemon)
    call = client.acquire("r1")
    await eventually(lambda: queued(daemon) == 1)
    call.cancel()
    await eventually(lambda: queued(daemon) == 0)
    assert tickets_open(daemon) == before


async def test_two_calls_of_one_request_and_the_first_goes_away(daemon: SchedulerDaemon, client: Client) -> None:
    tickets = await fill_up(client, daemon)
    first = client.acquire("r1")
    await eventually(lambda: queued(daemon) == 1)
    second = asyncio.ensure_future(_take(client, "r1"))
    await eventually(lambda: sum(map(len, daemon.actor._waiting.values())) == 2)
    first.cancel()
    await eventually(lambda: sum(map(len, daemon.actor._waiting.values())) == 1)
    assert queued(daemon) == 1
    await client.settle(tickets[0], USED)
    assert await asyncio.wait_for(second, WAIT_S)


async def test_cancelling_at_any_point_leaves_nothing(world: World) -> None:
    chance = random.Random(seed())
    core = replace(world.config().core, ticket_ttl_ms=300)
    async with world.daemon(world.config(core)) as daemon, connected(daemon) as client:

        async def one(number: int) -> None:
            call = client.acquire(f"r{number}", range(number % 5))
            try:
                granted = await asyncio.wait_for(call, chance.uniform(0.0001, 0.02))
                await asyncio.sleep(chance.uniform(0, 0.005))
                if chance.random() < 0.5:
                    await client.settle(granted.ticket, USED)
            except (TimeoutError, asyncio.CancelledError):
                call.cancel()

        await asyncio.gather(*(one(number) for number in range(300)))
        await eventually(lambda: queued(daemon) == 0 and tickets_open(daemon) == 0)
        pool = daemon.status()["pool"]
        assert all(worker["slots_used"] == 0 for worker in pool["workers"])  # type: ignore[index]
        assert all(abs(tenant["cost_outstanding"]) < 1e-6 for tenant in pool["tenants"])  # type: ignore[index]
        assert not daemon.actor._waiting
        assert daemon.actor._waiting_count == 0
        assert not daemon.actor.open
        assert not daemon.actor.by_token


async def test_a_deadline_that_passes_in_the_queue_is_told(daemon: SchedulerDaemon, client: Client) -> None:
    await fill_up(client, daemon)
    error = await error_of(client.acquire("late", timeout_ms=50))
    assert (error.reason, error.code) == ("DEADLINE_PASSED", Code.DEADLINE_EXCEEDED)
    assert queued(daemon) == 0


async def test_a_call_whose_time_is_up_already_is_refused(daemon: SchedulerDaemon, client: Client) -> None:
    error = await error_of(client.acquire("late", timeout_s=0.000_001))
    assert error.code is Code.DEADLINE_EXCEEDED
    await eventually(lambda: queued(daemon) == 0 and tickets_open(daemon) == 0)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"request_id": ""}, "INVALID_REQUEST"),
        ({"request_id": "x" * 201}, "INVALID_REQUEST"),
        ({"block_keys": b"1234567"}, "INVALID_REQUEST"),
        ({"block_keys": b"12345678", "prompt_tokens": 15}, "INVALID_REQUEST"),
        ({"prompt_tokens": 0}, "INVALID_REQUEST"),
        ({"max_output_tokens": 0}, "INVALID_REQUEST"),
        ({"prompt_tokens": 2**32 - 1}, "INVALID_REQUEST"),
        ({"user": "u" * 201}, "INVALID_REQUEST"),
        ({"excluded_workers": ["w"] * 65}, "INVALID_REQUEST"),
        ({"prompt_tokens": 1_000_000}, "REQUEST_TOO_LARGE_FOR_POOL"),
        ({"max_output_tokens": 1_000_000}, "REQUEST_TOO_LARGE_FOR_POOL"),
        ({"tenant": "nobody"}, "UNKNOWN_TENANT"),
        ({"tenant": ""}, "TENANT_NOT_ALLOWED"),
        ({"pool": "elsewhere"}, "UNKNOWN_POOL"),
    ],
)
async def test_what_cannot_be_served_is_refused_in_one_sentence(
    daemon: SchedulerDaemon, client: Client, fields: dict[str, object], reason: str
) -> None:
    request = acquire_request("r1")
    error = await error_of(
        client.stub.Acquire(pb.AcquireRequest(**{**_fields(request), **fields}), timeout=WAIT_S)  # type: ignore[arg-type]
    )
    assert error.reason == reason
    assert error.sentence.endswith(".")
    assert error.sentence.count(". ") == 0
    assert queued(daemon) == 0
    assert tickets_open(daemon) == 0


def _fields(request: pb.AcquireRequest) -> dict[str, object]:
    return {field.name: value for field, value in request.ListFields()}


async def test_a_limit_per_minute_says_which_it_was_and_when_to_come_back(world: World) -> None:
    limits = RateLimits(requests_per_minute=6, requests_burst=2)
    world.add_tenants("a", user_rate_limits=limits)
    async with world.daemon() as daemon, connected(daemon) as client:
        await client.acquire("one", user="u")
        await client.acquire("two", user="u")
        error = await error_of(client.acquire("three", user="u"))
        assert (error.reason, error.code) == ("TENANT_RATE_LIMITED", Code.RESOURCE_EXHAUSTED)
        assert (error.quota_subject, error.metadata) == (
            "tenant:a",
            {"limit": "user_requests_per_minute", "remaining": "0"},
        )
        assert error.retry_after_ms is not None
        assert 0 < error.retry_after_ms <= 10_000
        await client.acquire("three", user="v")


async def test_a_limit_per_minute_holds_across_a_restart(world: World) -> None:
    world.add_tenants("a", rate_limits=RateLimits(requests_per_minute=1, tokens_per_minute=60, tokens_burst=10))
    async with world.daemon() as daemon, connected(daemon) as client:
        await client.acquire("one", expected_output_tokens=64)
    async with world.daemon() as daemon, connected(daemon) as client:
        error = await error_of(client.acquire("two"))
        assert error.metadata["limit"] in ("tenant_requests_per_minute", "tenant_tokens_per_minute")
        assert error.retry_after_ms is not None
        assert 0 < error.retry_after_ms <= 65_000
        await client.acquire("one")  # still open: not charged again


async def test_a_full_queue_says_when_to_come_back(world: World) -> None:
    world.add_tenants("a", queue_length_max=2)
    async with world.daemon() as daemon, connected(daemon) as client:
        await fill_up(client, daemon)
        waiting = [client.acquire(f"q{number}") for number in range(2)]
        await eventually(lambda: queued(daemon) == 2)
        error = await error_of(client.acquire("one-too-many"))
        assert (error.reason, error.code) == ("TENANT_QUEUE_FULL", Code.RESOURCE_EXHAUSTED)
        assert error.quota_subject == "tenant:a"
        assert error.retry_after_ms is not None
        assert error.retry_after_ms > 0
        for call in waiting:
            call.cancel()


async def test_a_pool_without_workers_is_unavailable(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.add_tenants("a")
    async with world.daemon() as daemon, connected(daemon) as client:
        for _ in ("unknown pool", "known pool"):
            error = await error_of(client.acquire("r1"))
            assert (error.reason, error.code) == ("NO_WORKER_IN_POOL", Code.UNAVAILABLE)
            assert error.retry_after_ms
            world.add_pool()
            await eventually(lambda: daemon.watch.pool is not None)


async def test_tickets_that_are_not_ours(client: Client) -> None:
    granted = (await client.acquire("r1")).ticket
    other_character = "B" if granted[10] == "A" else "A"
    tampered = granted[:10] + other_character + granted[11:]
    for token in ("", "nonsense", granted[:-1], granted + "A", tampered, "é", "x" * 9_999):
        for call in (client.settle(token, USED), client.renew(token)):
            error = await error_of(call)
            assert (error.reason, error.code) == ("UNKNOWN_TICKET", Code.NOT_FOUND)
    assert (await client.renew(granted)).state == pb.TICKET_STATE_OPEN


async def test_usage_that_cannot_be(daemon: SchedulerDaemon, client: Client) -> None:
    granted = await client.acquire("r1")
    error = await error_of(client.settle(granted.ticket, pb.Usage(prompt_tokens=1, cached_tokens=2)))
    assert error.reason == "INVALID_REQUEST"
    error = await error_of(client.settle(granted.ticket, USED, outcome=pb.Outcome.ValueType(77)))
    assert error.reason == "INVALID_REQUEST"
    error = await error_of(client.stub.Settle(pb.SettleRequest(ticket=granted.ticket, ttft_ms=float("nan"))))
    assert error.reason == "INVALID_REQUEST"
    assert tickets_open(daemon) == 1
    most = pb.Usage(prompt_tokens=2**32 - 1, output_tokens=2**32 - 1)
    settled = await client.settle(granted.ticket, most)
    assert settled.attained_cost == 1 + 2 * 64  # what was granted, no more


async def test_cancel_by_name(daemon: SchedulerDaemon, client: Client) -> None:
    await client.acquire("r1")
    assert (await client.cancel("r1")).was_open
    assert not (await client.cancel("r1")).was_open
    assert tickets_open(daemon) == 0
    await fill_up(client, daemon)
    waiting = client.acquire("r2")
    await eventually(lambda: queued(daemon) == 1)
    assert (await client.cancel("r2")).was_open
    assert (await error_of(waiting)).reason == "CANCELLED_BY_CLIENT"


async def test_a_lost_worker_gives_the_request_another_leg(
    world: World, daemon: SchedulerDaemon, client: Client
) -> None:
    first = await client.acquire("r1")
    world.say(WorkerLeft(announced(first.worker.worker_id).worker_id, announced("w").epoch))
    await eventually(lambda: first.worker.worker_id not in daemon.live_map.workers)
    assert (await client.renew(first.ticket)).state == pb.TICKET_STATE_WORKER_LOST
    second = await client.acquire("r1")
    assert second.leg == 2
    assert second.worker.worker_id != first.worker.worker_id
    assert second.ticket != first.ticket


async def test_a_client_that_saw_its_worker_fail_gets_another_leg(client: Client) -> None:
    first = await client.acquire("r1")
    settled = await client.settle(first.ticket, outcome=pb.OUTCOME_WORKER_LOST)
    assert settled.request_continues
    second = await client.acquire("r1", excluded_workers=[first.worker.worker_id])
    assert second.leg == 2


async def test_a_new_epoch_ends_the_legs_of_the_old(world: World, daemon: SchedulerDaemon, client: Client) -> None:
    first = await client.acquire("r1")
    world.say(announced(first.worker.worker_id, epoch=2))
    await eventually(lambda: tickets_open(daemon) == 1 and first.ticket not in daemon.actor.by_token)
    assert (await client.renew(first.ticket)).state == pb.TICKET_STATE_WORKER_LOST


async def test_a_worker_that_does_not_fit_the_pool_is_refused(world: World, daemon: SchedulerDaemon) -> None:
    world.say(replace(announced("odd"), block_size_tokens=32))
    await eventually(lambda: "odd" in daemon.live_map.refused)
    assert "its block size is 32 tokens" in daemon.live_map.refused[announced("odd").worker_id]
    assert "odd" not in daemon.live_map.workers
    world.say(announced("odd", kv_blocks=0))
    await eventually(lambda: "does not say how many" in daemon.live_map.refused[announced("odd").worker_id])
    world.say(announced("odd"))
    await eventually(lambda: "odd" in daemon.live_map.workers)
    assert not daemon.live_map.refused


async def test_another_pools_workers_are_none_of_ours(world: World, daemon: SchedulerDaemon) -> None:
    other = replace(announced("w9"), pool_id=PoolId("other"))
    world.say(other)
    world.say(stored("w9", range(10)))
    world.say(stored("w1", range(5)))
    await eventually(lambda: daemon.live_map.cache_map.copy_count == 5)
    assert "w9" not in daemon.live_map.workers
    world.say(replace(announced("w1"), pool_id=PoolId("other")))
    await eventually(lambda: "w1" not in daemon.live_map.workers)
    assert daemon.live_map.cache_map.copy_count == 0


async def test_garbage_on_the_log_is_passed_over(world: World, daemon: SchedulerDaemon) -> None:
    chance = random.Random(seed())
    for _ in range(200):
        world.log.append(KV_TOPIC, b"w1", chance.randbytes(chance.randrange(64)))
    world.say(stored("w1", range(5)))
    await eventually(lambda: daemon.live_map.cache_map.copy_count == 5)
    assert b'evenhand_scheduler_messages_total{outcome="malformed"}' in daemon._page()


async def test_a_gap_is_healed_by_asking_the_edge(world: World, daemon: SchedulerDaemon) -> None:
    world.say(stored("w1", range(5), seq=3))
    await eventually(lambda: any(isinstance(wish, SnapshotRequested) for wish in wishes(world)))


async def test_batches_of_a_dead_epoch_are_told_the_floor(world: World, daemon: SchedulerDaemon) -> None:
    world.say(announced("w1", epoch=5))
    for seq in range(1, 5):
        world.say(stored("w1", range(5), seq=seq, epoch=4))
    await eventually(lambda: any(isinstance(wish, EpochFloor) for wish in wishes(world)))
    assert daemon.live_map.cache_map.copy_count == 0


async def test_a_replaced_log_is_read_from_its_beginning(world: World, daemon: SchedulerDaemon) -> None:
    world.say(stored("w1", range(5)))
    await eventually(lambda: daemon.live_map.cache_map.copy_count == 5)
    world.log.replace()
    await eventually(lambda: {wish.worker_id for wish in wishes(world)} == {"w1", "w2"})
    world.say(stored("w1", range(5, 8), seq=2))
    await eventually(lambda: daemon.live_map.cache_map.copy_count == 8)


def wishes(world: World) -> list[ControlMessage]:
    records = world.log.records(CONTROL_TOPIC)
    return [decode_control_message(record.key, record.value) for record in records]


async def test_an_engine_that_fails_its_health_check_goes_stale(world: World) -> None:
    core = replace(world.config().core, worker_stale_after_ms=200, worker_lost_after_ms=60_000)
    async with world.daemon(world.config(core)) as daemon:
        world.say(load("w1"))
        await eventually(lambda: state(daemon, "w1") == "ready")

        async def unhealthy_and_stale() -> bool:
            world.say(load("w1", healthy=False))
            world.say(announced("w1"))  # its edge lives
            world.say(load("w2"))
            await asyncio.sleep(0.02)
            return state(daemon, "w1") == "stale" and state(daemon, "w2") == "ready"

        async with asyncio.timeout(WAIT_S):
            while not await unhealthy_and_stale():
                pass


def state(daemon: SchedulerDaemon, worker_id: str) -> str:
    workers = daemon.status()["pool"]["workers"]  # type: ignore[index]
    return next((str(worker["state"]) for worker in workers if worker["worker_id"] == worker_id), "")


async def test_a_silent_log_is_not_a_dead_fleet(world: World) -> None:
    core = replace(world.config().core, worker_stale_after_ms=200, worker_lost_after_ms=400)
    async with world.daemon(world.config(core)) as daemon, connected(daemon) as client:
        for worker in ("w1", "w2"):
            world.say(load(worker))
        await eventually(lambda: state(daemon, "w1") == "ready")
        ticket = (await client.acquire("r1")).ticket
        world.log.available = False
        await asyncio.sleep(1.0)  # longer than it takes to be lost, several times over
        assert (state(daemon, "w1"), state(daemon, "w2")) == ("ready", "ready")
        assert (await client.renew(ticket)).state == pb.TICKET_STATE_OPEN
        assert (await client.acquire("r2")).ticket
        world.log.available = True


async def test_a_worker_that_falls_silent_alone_is_lost_and_taken_back(world: World) -> None:
    core = replace(world.config().core, worker_stale_after_ms=100, worker_lost_after_ms=200)
    async with world.daemon(world.config(core)) as daemon:
        world.say(load("w1"))
        await eventually(lambda: state(daemon, "w1") == "ready")
        async with asyncio.timeout(WAIT_S):
            while state(daemon, "w1"):
                world.say(load("w2"))
                await asyncio.sleep(0.02)
        assert state(daemon, "w2") == "ready"
        world.say(load("w1"))
        await eventually(lambda: state(daemon, "w1") == "ready")


async def test_a_changing_fleet_leaves_nothing_behind(
    world: World, daemon: SchedulerDaemon, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_map, "FORGOTTEN_AFTER_S", 0.2)
    monkeypatch.setattr(live_map, "FORGET_INTERVAL_S", 0.05)
    for number in range(20):
        worker = f"pod-{number}"
        world.say(announced(worker))
        world.say(stored(worker, range(number * 100, number * 100 + 100)))
    await eventually(lambda: daemon.live_map.cache_map.copy_count == 2_000)
    async with asyncio.timeout(WAIT_S):
        while daemon.live_map.cache_map.copy_count:
            world.say(load("w1"))
            world.say(load("w2"))
            await asyncio.sleep(0.02)
    assert set(daemon.live_map.workers) == {"w1", "w2"}
    assert (
        set(daemon.live_map.loads)
        == set(daemon.live_map._announced)
        == set(daemon.live_map._signs)
        == {"w1", "w2"}
    )
    assert daemon.live_map.cache_map.slots.width <= 32
    world.say(announced("pod-3", seq=1))  # it was only away: it is asked for all it holds
    await eventually(lambda: any(getattr(wish, "worker_id", "") == "pod-3" for wish in wishes(world)))


async def test_churn_of_tenants_and_requests_leaves_nothing_behind(
    world: World, daemon: SchedulerDaemon, client: Client
) -> None:
    for generation in range(3):
        names = [f"t{generation}-{number}" for number in range(20)]
        world.add_tenants(*names)
        await eventually(lambda names=names: names[-1] in daemon.watch.tenants)  # type: ignore[misc]
        for name in names:
            granted = await client.acquire("r", tenant=name)
            await client.settle(granted.ticket, USED)
        for name in names:
            world.directory.remove_tenant(TenantId(name))
        await eventually(lambda names=names: names[0] not in daemon.watch.tenants)  # type: ignore[misc]
    await client.acquire("last")
    assert set(daemon.watch.tenants) == {"a", "b"}
    assert len(daemon._servicer._calls._salts) == 1
    assert len(daemon.status()["pool"]["tenants"]) == 2  # type: ignore[index]
    assert len(daemon.actor.open) == len(daemon.actor.by_token) == 1


async def test_a_tenants_change_counts_within_a_second(
    world: World, daemon: SchedulerDaemon, client: Client
) -> None:
    world.add_tenants("late")
    await eventually(lambda: "late" in daemon.watch.tenants)
    granted = await client.acquire("r1", tenant="late")
    assert granted.worker.worker_id
    world.directory.remove_tenant(announced("late").worker_id)  # type: ignore[arg-type]
    await eventually(lambda: "late" not in daemon.watch.tenants)
    assert (await error_of(client.acquire("r2", tenant="late"))).reason == "UNKNOWN_TENANT"


async def test_health_tells_owner_and_warm(daemon: SchedulerDaemon) -> None:
    async with grpc.aio.insecure_channel(daemon.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)  # type: ignore[no-untyped-call]

        async def serving() -> bool:
            answers = [await stub.Check(health_pb2.HealthCheckRequest(service=name)) for name in ("", SERVICE)]
            return all(answer.status == health_pb2.HealthCheckResponse.SERVING for answer in answers)

        async with asyncio.timeout(WAIT_S):
            while not await serving():
                await asyncio.sleep(0.01)


async def test_pages_show_the_pool_with_bounded_labels(world: World) -> None:
    world.add_tenants(*(f"t{number:03}" for number in range(60)))
    config = world.config(metrics_listen="127.0.0.1:0", metric_tenants_max=5)
    async with world.daemon(config) as daemon, connected(daemon) as client:
        for number in range(60):
            granted = await client.acquire("r", tenant=f"t{number:03}")
            await client.settle(granted.ticket, USED)
        await error_of(client.acquire("", tenant="a"))
        async with aiohttp.ClientSession(f"http://{daemon.metrics_address}") as session:
            page = await (await session.get("/metrics")).text()
            status = await (await session.get("/status")).json()
            assert (await session.get("/healthz")).status == 200
    labels = {
        line.split('"')[1] for line in page.splitlines() if line.startswith("evenhand_scheduler_grants_total{")
    }
    assert len(labels) <= 6
    assert "other" in labels
    assert status["owner"] is True
    assert status["pool"]["grants"] == 60
    assert len(status["pool"]["tenants"]) == 62


async def test_bytes_that_are_no_message_do_no_harm(daemon: SchedulerDaemon, client: Client) -> None:
    chance = random.Random(seed())
    async with grpc.aio.insecure_channel(daemon.address) as channel:
        for method in ("Resolve", "Acquire", "Renew", "Settle", "Cancel", "Nonsense"):
            call = channel.unary_unary(f"/{SERVICE}/{method}", None, None)
            for raw in (b"\xff" * 9, b"\x0a\x01\xff", chance.randbytes(200), b"\x0a\xff\xff\xff\xff\x0f"):
                assert await call(raw, timeout=WAIT_S).code() is not grpc.StatusCode.OK
        session = channel.stream_stream(f"/{SERVICE}/Session", None, None)(None, timeout=WAIT_S)
        await session.write(b"\xff" * 9)
        assert await session.code() is not grpc.StatusCode.OK
        large = pb.AcquireRequest(request_id="r", tenant="a", block_keys=bytes(5 * 1024 * 1024))
        call = channel.unary_unary(f"/{SERVICE}/Acquire", None, None)
        assert await call(large.SerializeToString(), timeout=WAIT_S).code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert (await client.acquire("r1")).ticket
    assert queued(daemon) == 0


async def test_a_fault_of_ours_is_told_recorded_and_survived(
    daemon: SchedulerDaemon, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = PoolScheduler.step

    def broken(scheduler: PoolScheduler, step_input: Input, now_ns: int) -> tuple[Effect, ...]:
        if isinstance(step_input, Submit):
            raise RuntimeError("a bug")
        return whole(scheduler, step_input, now_ns)

    with monkeypatch.context() as patched:
        patched.setattr(PoolScheduler, "step", broken)
        error = await error_of(client.acquire("r1"))
        assert (error.reason, error.code) == ("INTERNAL_FAULT", Code.INTERNAL)
        assert "a bug" not in error.sentence
        session = client.session()
        await session.write(pb.SessionRequest(call_id=1, acquire=acquire_request("r2")))
        assert await session.code() is grpc.StatusCode.INTERNAL
    assert b'evenhand_scheduler_faults_total{task="Acquire"} 1.0' in daemon._page()
    assert not daemon.actor._waiting
    assert (await client.acquire("r1")).ticket


async def test_reflection_is_served_where_it_is_asked_for(world: World) -> None:
    for asked in (False, True):
        async with (
            world.daemon(world.config(reflection=asked)) as daemon,
            grpc.aio.insecure_channel(daemon.address) as channel,
        ):
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)  # type: ignore[no-untyped-call]
            call = stub.ServerReflectionInfo(timeout=WAIT_S)
            await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
            if not asked:
                assert await call.code() is grpc.StatusCode.UNIMPLEMENTED
                continue
            answer = await call.read()
            assert SERVICE in {service.name for service in answer.list_services_response.service}


async def test_a_graceful_stop_refuses_what_waits_and_keeps_what_runs(world: World) -> None:
    async with world.daemon() as daemon, connected(daemon) as client:
        tickets = await fill_up(client, daemon)
        waiting = client.acquire("r1")
        await eventually(lambda: queued(daemon) == 1)
        stopping = asyncio.ensure_future(daemon.stop())
        error = await error_of(waiting)
        assert (error.reason, error.code) == ("SCHEDULER_SHUTTING_DOWN", Code.UNAVAILABLE)
        assert error.retry_after_ms
        await stopping
    async with world.daemon() as daemon, connected(daemon) as client:
        assert tickets_open(daemon) == len(tickets)
        for ticket in tickets:
            await client.settle(ticket, USED)
        assert tickets_open(daemon) == 0
