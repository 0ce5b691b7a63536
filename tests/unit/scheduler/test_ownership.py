"""What a lease is reckoned on: a machine that was suspended must not grant by a clock that stood still."""

import asyncio
import time
from contextlib import suppress

import pytest

from evenhand.core.facts import Request
from evenhand.core.ids import PoolId, RequestId, TenantId
from evenhand.core.steps import Effect, Input
from evenhand.memory import MemoryLeaseStore
from evenhand.scheduler import lease_clock
from evenhand.scheduler.actor import OpenTicket, PoolActor, Waiter
from evenhand.scheduler.adoption import Adoption
from evenhand.scheduler.lease_clock import lease_now_ns
from evenhand.scheduler.metrics import SchedulerMetrics
from evenhand.scheduler.ownership import Ownership
from evenhand.scheduler.tickets import TicketSigner
from evenhand.wire.status import WireError

TTL_MS = 10_000
HOUR_NS = 3_600 * 10**9


class Clock:
    """A clock far from any of this machine's, moved by hand."""

    def __init__(self) -> None:
        self.ns = 10**18

    def __call__(self) -> int:
        return self.ns


class Office:
    """Remembers until when it may decide."""

    def __init__(self) -> None:
        self.until_ns = 0

    def take_office(self, term: int, lease_until_ns: int, checkpoint: bytes | None) -> None:
        self.until_ns = lease_until_ns

    def extend(self, lease_until_ns: int) -> None:
        self.until_ns = lease_until_ns

    def checkpoint(self) -> bytes:
        return b""

    def leave_office(self, sentence: str) -> None:
        self.until_ns = 0


class Never:
    """A core that decides nothing and notes that it was asked."""

    def __init__(self) -> None:
        self.asked = 0

    def step(self, step_input: Input, now_ns: int, /) -> tuple[Effect, ...]:
        self.asked += 1
        return ()


async def test_a_lease_ends_on_the_clock_that_was_given() -> None:
    clock, office = Clock(), Office()
    store = MemoryLeaseStore(lambda: clock.ns // 1_000_000)
    ownership = Ownership(store, PoolId("p"), "me", TTL_MS, 1_000, office, clock)
    running = asyncio.create_task(ownership.run())
    try:
        await ownership.owning.wait()
        assert office.until_ns == clock.ns + TTL_MS * 900_000
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running


def test_a_machine_resumed_past_its_lease_grants_nothing() -> None:
    clock, core = Clock(), Never()
    actor = PoolActor(TicketSigner(b"k" * 32), SchedulerMetrics("p", 2), lambda _: None, 1_000, 3, clock)
    actor.begin_term(core, 1, clock.ns + HOUR_NS, Adoption())
    assert actor.granting
    clock.ns += HOUR_NS  # the monotonic clock has hardly moved
    heard: list[OpenTicket | WireError] = []
    tenant_id, request_id = TenantId("a"), RequestId("r")
    waiter = Waiter((tenant_id, request_id), lambda _, result: heard.append(result))
    actor.submit(Request(request_id, tenant_id, (), 1, 1), waiter)
    assert [result.reason for result in heard if isinstance(result, WireError)] == ["NOT_THE_OWNER"]
    assert not core.asked


def test_the_lease_clock_counts_suspended_time_where_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_clock, "_BOOTTIME", 7)
    monkeypatch.setattr(time, "clock_gettime_ns", lambda clock: 1_000 + clock)
    assert lease_now_ns() == 1_007
    monkeypatch.setattr(lease_clock, "_BOOTTIME", None)
    monkeypatch.setattr(time, "monotonic_ns", lambda: 5)
    assert lease_now_ns() == 5
