"""A guarantee is a debt in cost: neither an hour alone nor a slow one, nor one that ended in a loss, voids it."""

import math
from collections.abc import Sequence

import pytest
from tests.unit.core.scheduler_world import MS, World, config, ticket, tickets

from evenhand.core.facts import Ticket, Usage, WorkerLoad
from evenhand.core.ids import TenantId, WorkerId
from evenhand.core.scheduler import PoolScheduler
from evenhand.core.steps import Effect, Renew, Settle, WorkerGone, WorkerHeard

LONG_MS = 10**9
LEG_MS = 500
QUEUED = 20
OTHERS = tuple(f"x{index}" for index in range(9))
CROWD = ("g", *OTHERS)


@pytest.fixture
def world() -> World:
    world = World()
    world.tenants("g", guaranteed_share=0.5)
    world.tenants(*OTHERS)
    world.workers("w1", "w2")
    return world


def beat(world: World) -> None:
    for worker in world.scheduler.status(world.now_ns).workers:
        world.step(WorkerHeard(worker.worker_id, WorkerLoad(0, 0, 0.0, world.now_ns)))


class Crowd:
    """Tenants that keep requests waiting for some time, on workers whose legs all take as long."""

    def __init__(self, world: World, names: Sequence[str]) -> None:
        self.world, self.names = world, names
        self.waiting = dict.fromkeys(names, 0)
        self.running: list[tuple[int, Ticket]] = []

    def take(self, effects: Sequence[Effect]) -> None:
        for held in tickets(effects):
            self.waiting[held.tenant_id] -= 1
            self.running.append((self.world.now_ns + LEG_MS * MS, held))

    def fill(self) -> None:
        for name in self.names:
            while self.waiting[name] < QUEUED:
                self.waiting[name] += 1
                self.take(self.world.submit(name, prompt=500, output=50))

    def costs(self) -> dict[str, float]:
        tenants = self.world.scheduler.status(self.world.now_ns).tenants
        return {t.tenant_id: t.cost_got for t in tenants if t.tenant_id in self.waiting}

    def shares(self, seconds: int) -> dict[str, float]:
        """What part of the cost each got; nothing of them is left behind."""
        world = self.world
        end_ns, beat_ns = world.now_ns + seconds * 1_000 * MS, 0
        before = self.costs()
        self.fill()
        while self.running[0][0] < end_ns:
            world.now_ns, held = self.running.pop(0)
            self.take(world.settle(held, Usage(500, 0, 50)))
            if world.now_ns - beat_ns > 1_000 * MS:
                beat_ns = world.now_ns
                beat(world)
            self.fill()
        after = self.costs()
        for tenant in self.names:
            for request_id in tuple(world.scheduler._legs.outstanding.tenants[TenantId(tenant)].waiting_ids()):
                world.cancel(tenant, request_id)
        for _, held in self.running:
            world.settle(held)
        total = sum(after.values()) - sum(before.values())
        return {name: (after[name] - before[name]) / total for name in self.names}


def behind_ms(world: World, tenant: str = "g") -> float:
    return next(
        t.guarantee_behind_ms for t in world.scheduler.status(world.now_ns).tenants if t.tenant_id == tenant
    )


def hold_alone(world: World, seconds: int) -> Ticket:
    """One leg of another tenant runs alone for so long: the pool delivers next to nothing."""
    lonely = ticket(world.submit("x0", prompt=100, output=1_000))
    for _ in range(seconds // 5):
        world.step(Renew(lonely.ticket_id), 5_000)
        beat(world)
    return lonely


def test_not_lost_by_having_had_an_idle_pool_to_oneself(world: World) -> None:
    Crowd(world, CROWD).shares(20)
    Crowd(world, ["g"]).shares(60)
    assert behind_ms(world) >= -2_000.0, "paid ahead for little more than the burst"
    assert Crowd(world, CROWD).shares(30)["g"] > 0.4


def test_not_lost_by_a_slow_hour(world: World) -> None:
    world.settle(hold_alone(world, 600), Usage(100, 0, 500))
    for _ in range(20):
        for held in tickets(world.submit("g", prompt=500, output=20)):
            world.settle(held, after_ms=50)
    assert Crowd(world, CROWD).shares(60)["g"] > 0.4


@pytest.mark.parametrize("lost_after_s", [300, 7_150])
def test_not_lost_by_a_lonely_leg_that_is_lost_with_its_worker(world: World, lost_after_s: int) -> None:
    """While it runs R falls to its least, and a lost leg adds nothing to it."""
    lonely = hold_alone(world, lost_after_s)
    world.step(WorkerGone(WorkerId(lonely.worker_id), "gone"))
    world.workers("w3")
    for held in tickets(world.effects)[-1:]:
        world.settle(held)
    for _ in range(24):
        for held in tickets(world.submit("g", prompt=100, output=1)):
            world.settle(held, after_ms=1)
    world.tick(1_000)
    assert math.isfinite(behind_ms(world))
    assert Crowd(world, CROWD).shares(60)["g"] > 0.4


def quiet(**changes: object) -> World:
    world = World(
        config(worker_stale_after_ms=LONG_MS, worker_lost_after_ms=LONG_MS, window_fixed=50.0, **changes)
    )
    world.tenants("sure", weight=0.01, guaranteed_share=0.5)
    world.tenants("a")
    world.workers("w1", slots=1, kv_blocks=100_000)
    return world


@pytest.mark.parametrize("burst_ms", [0.0, 500.0])
def test_a_leg_by_its_turn_pays_no_further_ahead_than_the_burst(burst_ms: float) -> None:
    world = quiet(guarantee_burst_ms=burst_ms)
    turn = ticket(world.submit("sure", prompt=50_000))
    assert not turn.guaranteed
    assert behind_ms(world, "sure") == pytest.approx(-burst_ms)


def ahead(world: World) -> float:
    """How far its guarantee is paid ahead, in cost of the pool."""
    legs = world.scheduler._legs
    return legs.outstanding.tenants[TenantId("sure")].guarantee_tag - legs.guarantees.clock


def test_a_leg_by_its_turn_gives_back_no_more_than_it_moved() -> None:
    world = quiet(guarantee_burst_ms=500.0)
    begun = ahead(world)
    turn = ticket(world.submit("sure", prompt=50_000, request_id="r"))
    moved = ahead(world) - begun
    assert 0.0 < moved < turn.charge / 0.5
    world.step(Settle(turn.ticket_id, Usage(turn.prompt_tokens, 0, 1)))
    assert ahead(world) - begun == pytest.approx(moved), "it still cost more than it moved"
    world.submit("sure", prompt=50_000, request_id="s")
    world.cancel("sure", "s", Usage(100, 0, 1))
    assert ahead(world) - begun >= moved - 1e-6, "what a leg has not moved it does not give back"


def guaranteed_leg(world: World, **changes: object) -> Ticket:
    """A leg of the tenant with the guarantee, outside the windows; others have had nothing but legs of 100."""
    for count in range(4):
        world.submit("a", prompt=100, output=1, request_id=f"a{count}")
    world.submit("sure", **changes)  # type: ignore[arg-type]
    for _ in range(5):
        (held,) = world.scheduler._legs.book.all_open()
        if held.ticket.tenant_id == "sure":
            break
        world.settle(held.ticket)
    assert held.ticket.guaranteed
    return held.ticket


def change_share(world: World, share: float) -> None:
    world.tenants("sure", weight=0.01, guaranteed_share=share)


def test_what_is_owed_is_a_cost_whatever_becomes_of_the_share() -> None:
    world = quiet(guarantee_burst_ms=500.0)
    change_share(world, 0.001)
    world.settle(ticket(world.submit("sure", prompt=2_000, output=1)))
    world.tick(60_000)
    world.settle(guaranteed_leg(world, prompt=10_000, output=1))
    owed = ahead(world) * 0.001
    assert owed > 9_000.0
    change_share(world, 0.5)
    assert ahead(world) * 0.5 == pytest.approx(owed)
    change_share(world, 0.001)
    assert ahead(world) * 0.001 == pytest.approx(owed)


@pytest.mark.parametrize("changed_to", [0.01, 0.9])
def test_a_leg_that_runs_while_the_share_changes_is_corrected_at_the_share_of_now(changed_to: float) -> None:
    ends = []
    for share in (changed_to, 0.5):
        world = quiet(guarantee_burst_ms=500.0)
        world.settle(ticket(world.submit("sure", prompt=2_000, output=1)))
        world.tick(60_000)
        leg = guaranteed_leg(world, prompt=100, output=10_000, output_tokens_expected=10_000)
        begun = ahead(world) * 0.5
        change_share(world, share)
        world.settle(leg, Usage(100, 0, 1))
        ends.append(begun - ahead(world) * share)
    assert ends[0] == pytest.approx(ends[1])
    assert ends[1] == pytest.approx(leg.charge - 102.0)


def test_who_asks_for_nothing_is_not_behind_and_nobody_by_more_than_is_kept() -> None:
    world = quiet(guarantee_burst_ms=500.0)
    world.tick(3_600_000)
    world.tenants("late", guaranteed_share=0.1)
    assert behind_ms(world, "late") == behind_ms(world, "sure") == 0.0
    world.submit("a", prompt=100)
    world.submit("sure", prompt=100)
    assert behind_ms(world, "sure") == 500.0


@pytest.mark.parametrize("guaranteed", [False, True])
def test_a_leg_of_an_earlier_term_gives_back_what_it_did_not_cost(guaranteed: bool) -> None:
    ends = []
    for takes_over in (False, True):
        world = quiet(guarantee_burst_ms=500.0)
        world.settle(ticket(world.submit("sure", prompt=2_000, output=1)))
        world.tick(60_000)
        tokens = 10_000 if guaranteed else 1_000
        expected = {"prompt": 100, "output": tokens, "output_tokens_expected": tokens}
        turn = world.submit("sure", **expected) if not guaranteed else ()  # type: ignore[arg-type]
        leg = ticket(turn) if turn else guaranteed_leg(world, **expected)
        if takes_over:
            checkpoint, begun = world.scheduler.checkpoint(world.now_ns), ahead(world)
            world.scheduler = PoolScheduler(world.scheduler.config, world.presence, 2)
            world.scheduler.restore(checkpoint, world.now_ns, 0)
            world.workers("w1", slots=1, kv_blocks=100_000)
            assert ahead(world) == pytest.approx(begun)
        world.step(Settle(leg.ticket_id, Usage(100, 0, 1)))
        ends.append(ahead(world))
    assert ends[0] == pytest.approx(ends[1])


@pytest.mark.parametrize("clock", [0.0, 1e13])
def test_when_a_guarantee_falls_due_is_said_to_the_nanosecond_as_far_as_floats_tell_it(clock: float) -> None:
    world = quiet()
    world.submit("sure", prompt=200)
    world.submit("sure", prompt=200)
    guarantees = world.scheduler._legs.guarantees
    tenant = world.scheduler._legs.outstanding.tenants[TenantId("sure")]
    guarantees.clock = guarantees._rate_clock = clock
    guarantees.restore(tenant, 123.4, 0)
    assert not guarantees.due()
    due_ns = guarantees.next_due_ns(0)
    assert due_ns is not None
    assert due_ns == pytest.approx(123.4 / 10_000.0 * 1e9, rel=0.01)
    guarantees.pass_time(due_ns - round(0.01 * due_ns))
    assert not guarantees.due()
    now_ns, looks = due_ns, 0
    while not guarantees.due():
        guarantees.pass_time(now_ns)
        now_ns, looks = guarantees.next_due_ns(now_ns) or now_ns, looks + 1
        assert looks < 10
