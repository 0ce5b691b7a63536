"""Checkpoints as bytes: they come back whole, bounded, or are refused."""

from dataclasses import replace

import msgspec
import pytest

from evenhand.core.cache_map import CacheMap
from evenhand.core.checkpoint import SchedulerCheckpoint, TicketHeld
from evenhand.core.errors import SchemaMismatch
from evenhand.core.estimator import OutputLearned
from evenhand.core.facts import RateLimits, Request, SchedulerConfig, TenantSpec, TenantState, Ticket
from evenhand.core.ids import Epoch, PoolId, RequestId, TenantId, TicketId, WorkerId
from evenhand.core.limits import Limits
from evenhand.core.presence import Presence
from evenhand.core.scheduler import PoolScheduler
from evenhand.core.steps import TenantChanged
from evenhand.scheduler.checkpoint_codec import KEYS_MAX, decode_checkpoint, encode_checkpoint


def checkpoint() -> SchedulerCheckpoint:
    scheduler = PoolScheduler(SchedulerConfig(PoolId("p")), Presence(CacheMap()), 7)
    scheduler.step(TenantChanged(TenantSpec(TenantId("a"), weight=1 / 3, state=TenantState.DRAINING)), 0)
    return scheduler.checkpoint()


def held(number: int, keys: int) -> TicketHeld:
    ticket_id, request_id = TicketId(f"t{number}"), RequestId(f"r{number}")
    ticket = Ticket(
        ticket_id, request_id, TenantId("a"), WorkerId("w"), Epoch(1), 1, 7, 0.1 + 0.2, 1 / 3, 9, 0, 1, 1, 5
    )
    return TicketHeld(ticket, 0.1 + 0.2, tuple(range(2**64 - keys, 2**64)))


def test_it_comes_back_to_the_bit() -> None:
    taken = replace(checkpoint(), tickets=(held(1, 3),))
    saved = decode_checkpoint(encode_checkpoint(taken, 1_234))
    assert saved.checkpoint == taken
    assert saved.saved_wall_ms == 1_234


def test_limits_per_minute_and_what_was_learned_come_back_however_large_the_debt() -> None:
    limits = Limits()
    wide = RateLimits(10**12, 10**12, 1, 10**12)
    limits.change(TenantSpec(TenantId("a"), rate_limits=wide, user_rate_limits=wide), 0)
    for number in range(3):
        prompt = Request(RequestId(f"r{number}"), TenantId("a"), (), 2**31 - 1, 1, user=f"u{number}")
        limits.take(prompt, 2**31 - 1, 7)
    limits.use(TenantId("a"), RequestId("r0"), 10**13, 7)
    taken = limits.taken(TenantId("a"), RequestId("r0"))
    open_ticket = replace(held(0, 1), taken=taken)
    learned = (OutputLearned(TenantId("a"), 1 / 3, (1, 2**31 - 1)), OutputLearned(TenantId("b"), 7.0))
    levels = limits.levels(7 + 10**9, {(TenantId("a"), RequestId(f"r{number}")) for number in range(3)})
    assert min(each.whole for level in levels for each in level.buckets) < -(10**12)
    saved = replace(checkpoint(), tickets=(open_ticket,), output_learned=learned, limits=levels)
    assert decode_checkpoint(encode_checkpoint(saved, 1)).checkpoint == saved


def test_keys_are_bounded_and_tickets_are_not_lost() -> None:
    taken = replace(checkpoint(), tickets=tuple(held(number, KEYS_MAX // 3) for number in range(9)))
    payload = encode_checkpoint(taken, 1)
    saved = decode_checkpoint(payload).checkpoint
    assert [len(each.block_keys) > 0 for each in saved.tickets] == [True] * 3 + [False] * 6
    assert [each.ticket for each in saved.tickets] == [each.ticket for each in taken.tickets]
    assert len(payload) < KEYS_MAX * 10


@pytest.mark.parametrize("payload", [b"", b"nonsense", msgspec.msgpack.encode({"version": 1})])
def test_what_is_no_checkpoint_is_refused(payload: bytes) -> None:
    with pytest.raises(SchemaMismatch, match="not one that this build can read"):
        decode_checkpoint(payload)


def test_another_version_is_refused() -> None:
    raw = msgspec.msgpack.decode(encode_checkpoint(checkpoint(), 1))
    with pytest.raises(SchemaMismatch, match="version 9"):
        decode_checkpoint(msgspec.msgpack.encode({**raw, "version": 9}))
