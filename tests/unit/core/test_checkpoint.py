"""Clocks and tickets survive the process; nothing else need."""

from dataclasses import replace

import pytest
from tests.unit.core.scheduler_world import World, chain, config, ended, ticket, tickets

from evenhand.core.facts import LegOutcome, Usage
from evenhand.core.ids import WorkerId
from evenhand.core.steps import Granted, Renew


def worn() -> World:
    """A pool in mid-life: uneven clocks, open tickets, a backlog."""
    world = World(config(worker_stale_after_ms=10**9, worker_lost_after_ms=10**9))
    world.tenants("a", "b", weight=2.0)
    world.tenants("c")
    world.workers("w1", "w2", slots=2)
    for n in range(8):
        world.submit("abc"[n % 3], chain(n, 4), request_id=f"r{n}", output=30)
    first = tickets(world.effects)[0]
    world.settle(first, Usage(first.prompt_tokens, 0, 3))
    return world


def successor_of(world: World) -> World:
    heir = World(world.scheduler.config, term=2)
    heir.scheduler.restore(world.scheduler.checkpoint(), 0)
    return heir


def test_a_checkpoint_brings_back_clocks_tickets_and_rooms() -> None:
    world = worn()
    heir = successor_of(world)
    heir.workers("w1", "w2", slots=2)
    before, after = world.scheduler.status(world.now_ns), heir.scheduler.status(0)
    assert [(t.tenant_id, t.virtual_time) for t in after.tenants] == [
        (t.tenant_id, t.virtual_time) for t in before.tenants
    ]
    assert after.tickets_open == before.tickets_open == 4
    assert after.cost_outstanding == pytest.approx(before.cost_outstanding)
    assert [w.slots_used for w in after.workers] == [w.slots_used for w in before.workers]
    assert [w.kv_blocks_reserved for w in after.workers] == [w.kv_blocks_reserved for w in before.workers]
    assert [w.virtual_time for w in after.workers] == [w.virtual_time for w in before.workers]


def test_a_checkpoint_of_a_checkpoint_is_the_same() -> None:
    heir = successor_of(worn())
    once = heir.scheduler.checkpoint()
    grandchild = World(heir.scheduler.config, term=3)
    grandchild.scheduler.restore(once, 0)
    twice = grandchild.scheduler.checkpoint()
    assert twice == replace(once, term=3)


def test_a_restored_ticket_settles_against_its_charge() -> None:
    world = worn()
    held = tickets(world.effects)[1]
    heir = successor_of(world)
    v = heir.v(held.tenant_id)
    (end,) = ended(heir.settle(held, Usage(held.prompt_tokens, 0, 10)))
    assert end.correction == end.attained - held.charge
    assert heir.v(held.tenant_id) == pytest.approx(v + end.correction / held.weight)


def test_a_client_that_asks_again_finds_its_open_ticket() -> None:
    world = worn()
    held = tickets(world.effects)[1]
    heir = successor_of(world)
    heir.workers("w1", "w2", slots=2)
    number = int(held.request_id[1:])
    effects = heir.submit(held.tenant_id, chain(number, 4), request_id=held.request_id, output=30)
    (granted,) = [e for e in effects if isinstance(e, Granted)]
    assert granted.ticket == held
    assert granted.decision.reason.value == "adopted"


def test_restored_tickets_end_soon_unless_their_holders_are_heard_of() -> None:
    heir = successor_of(worn())
    heir.workers("w1", "w2", slots=2)
    heir.now_ns = 0
    assert not ended(heir.tick(3_000))
    held = heir.scheduler.checkpoint().tickets[0].ticket
    heir.step(Renew(held.ticket_id))
    assert [e.outcome for e in ended(heir.tick(1_001))] == [LegOutcome.EXPIRED] * 3
    assert not ended(heir.tick(28_000))
    assert [e.outcome for e in ended(heir.tick(1_001))] == [LegOutcome.EXPIRED]


def test_tickets_of_a_worker_that_came_back_with_another_epoch_are_lost() -> None:
    heir = successor_of(worn())
    effects = heir.workers("w1", slots=2, epoch=2)
    assert {e.outcome for e in ended(effects)} == {LegOutcome.WORKER_LOST}
    assert len(tickets(effects)) == len(ended(effects))


def test_a_newcomer_after_the_restore_starts_level() -> None:
    world = worn()
    heir = successor_of(world)
    heir.workers("w1", "w2", slots=2)
    heir.tenants("late")
    heir.submit("late")
    stayed = world.scheduler._legs.fair.bands["default"].tenants
    assert heir.v("late") >= max(stayed.virtual_time(WorkerId(name)) for name in ("w1", "w2")) > 0


def test_ticket_ids_never_repeat_across_terms() -> None:
    world = worn()
    heir = successor_of(world)
    heir.workers("w3")
    fresh = ticket(heir.submit("a"))
    assert fresh.ticket_id not in {t.ticket_id for t in tickets(world.effects)}


def test_of_a_long_prompt_only_the_first_keys_are_kept_and_its_client_is_still_known() -> None:
    world = worn()
    world.workers("w9")
    keys = chain(77, 1_000)
    held = ticket(world.submit("a", keys, request_id="long"))
    checkpoint = world.scheduler.checkpoint()
    assert max(len(each.block_keys) for each in checkpoint.tickets) == 256
    heir = successor_of(world)
    heir.workers("w1", "w2", "w9")
    assert ticket(heir.submit("a", keys, request_id="long")) == held
    other = (*keys[:10], 1, *keys[11:])
    assert not tickets(heir.submit("a", other, request_id="long"))
