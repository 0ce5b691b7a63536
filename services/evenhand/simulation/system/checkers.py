"""What must hold once a run is quiet: maps, the ledger, and nothing left behind anywhere."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from evenhand.core.block_key import unpack_keys
from evenhand.core.facts import LegOutcome
from evenhand.core.ids import WorkerId
from evenhand.core.kv import Tier
from evenhand.scheduler.secret import MasterSecret
from evenhand.scheduler.tickets import TicketSigner
from evenhand.simulation.system.client import Outcome
from evenhand.simulation.system.clock import SKEW_MS_MAX
from evenhand.simulation.system.faults import Fault
from evenhand.simulation.system.hosts import SECRET

if TYPE_CHECKING:
    from evenhand.simulation.system.hosts import EdgeHost
    from evenhand.simulation.system.system import System


EVERYTHING = 1 << 62
"""More keys than any engine holds."""


ADOPTION_MS = 100
"""A ticket so near the end of its time to live may be too old by the time its holder is heard."""


async def differences(system: "System") -> list[str]:
    """Where maps, presence or readers are not yet where they must come to; empty: all agree."""
    found: list[str] = []
    stored = await system.database.map.load()
    rows = {row.worker_id: row for row in stored.workers}
    owner = next((host for host in system.network.schedulers if host.granting), None)
    if owner is None:
        return ["No scheduler is in office."]
    if system.state is None:
        return ["There is no state service."]
    for name, engine in system.engines.items():
        worker_id = WorkerId(name)
        holds = engine.findable_keys()
        edge = system.edges[name]
        if edge is None or edge.edge.state is None:
            found.append(f"The edge of {name} is not at work.")
            continue
        unknown = system.unknown.get(name, 0) + unknown_max(edge)
        told = frozenset(edge.edge.state.translator.held(Tier.DEVICE))
        found += _compare(f"the edge of {name}", told, holds, unknown)
        row = rows.get(worker_id)
        maps = {
            "the stored map": _unpacked(row.held) if row is not None else frozenset(),
            "the state service": _unpacked(system.state.service.cache_map.packed(worker_id)),
        }
        for host in system.network.schedulers:
            maps[host.process.name] = _unpacked(host.live_map.cache_map.packed(worker_id))
        for who, held in maps.items():
            found += _compare(f"{who} for {name}", held, holds, unknown)
        for who, position in (
            ("The stored map", row.position if row is not None else None),
            (owner.process.name, owner.live_map.cache_map.position(worker_id)),
        ):
            if position is None or not position.complete or position.left:
                found.append(f"{who} has {name} at {position}.")
        if worker_id not in owner.live_map.workers:
            found.append(f"{owner.process.name} does not know {name}.")
    return found + list(_left_over(system))


def _compare(who: str, held: frozenset[int], holds: frozenset[int], unknown: int) -> Iterator[str]:
    """Nothing more than the engine holds, ever; nothing less, unless the edge has said that it cannot know."""
    more, less = held - holds, holds - held
    if more:
        yield f"{who} has {len(more)} keys that the engine does not hold, such as {min(more):x}."
    if less and len(less) > unknown:
        yield f"{who} lacks {len(less)} of {len(holds)} keys that the engine holds, such as {min(less):x}."


def unknown_max(edge: "EdgeHost") -> int:
    """Keys that an edge has declared unknown: refuted, or lost with frames that no replay could bring."""
    if edge.edge.state is None:
        return 0
    if edge.counted("gaps_unrecovered") or edge.counted("stores_waiting"):
        return EVERYTHING
    return edge.counted("keys_refuted") + edge.counted("keys_capacity_dropped")


def _unpacked(held: tuple[tuple[Tier, bytes], ...]) -> frozenset[int]:
    return frozenset(key for _, packed in held for key in unpack_keys(packed))


def _left_over(system: "System") -> Iterator[str]:
    """What a drained system may not hold any more."""
    for name, engine in system.engines.items():
        if engine.legs or engine.engine.running or len(engine.engine.waiting) or engine.engine.pool.held_blocks:
            held = engine.engine.pool.held_blocks
            yield f"{name} still runs {len(engine.legs)} requests and holds {held} blocks."
    for host in system.network.schedulers:
        status = host.status()
        if status is None:
            continue
        who = host.process.name
        if status.queued_total or status.tickets_open or host.actor.open or host.actor.by_token:
            yield f"{who} has {status.queued_total} requests queued and {status.tickets_open} tickets open."
        if abs(status.cost_outstanding) > 1e-6:
            yield f"{who} has {status.cost_outstanding} cost outstanding."
        for worker in status.workers:
            if worker.slots_used or worker.kv_blocks_reserved:
                kept = f"{worker.slots_used} slots and {worker.kv_blocks_reserved} blocks"
                yield f"{who} keeps {kept} of {worker.worker_id}."
        for tenant in status.tenants:
            if tenant.queue_length or tenant.tickets_open or tenant.in_a or abs(tenant.cost_outstanding) > 1e-6:
                yield f"{who} keeps {tenant.queue_length} requests of {tenant.tenant_id}."
        presence = host.office.presence
        if presence is not None:
            assumed = sum(presence.assumed_count(WorkerId(name)) for name in system.engines)
            if presence.ticket_count or assumed:
                yield f"{who} still presumes {assumed} keys for {presence.ticket_count} tickets."


def final_check(system: "System") -> None:
    """The checks that need no waiting: what was settled is booked, the ledger, faults that services recorded.

    That every request has its outcome, and every ticket its end, is what a run waits for before it comes here;
    that none has two of them the book sees at once.
    """
    for sentence in (
        *_unknown(system),
        *_ledger(system),
        *_recorded(system),
    ):
        system.violated(sentence)


def _unknown(system: "System") -> Iterator[str]:
    """A ticket that its holder settled in time is booked, under whichever scheduler.

    But for one whose request has a later leg: the request pays for that one. And but for one of a tenant that was
    deleted: a successor has nobody to book it to.
    """
    legs: dict[str, list[int]] = {}
    for ticket in system.book.tickets.values():
        legs.setdefault(ticket.request_id, []).append(ticket.leg)
    signer = TicketSigner(MasterSecret(SECRET).ticket_key(system.config.pool_id))
    skew_ms = 2 * SKEW_MS_MAX if Fault.CLOCK_SKEW in system.weather.faults else 0
    for client in system.clients:
        for token, at_ns in client.unknown:
            ticket = signer.verify(token).ticket
            ticket_id = ticket.ticket_id
            if max(legs[ticket.request_id]) > ticket.leg or ticket.tenant_id in system.deleted:
                continue
            age_ms = (at_ns - system.book.granted_at_ns[ticket_id]) / 1e6
            if ticket_id not in system.book.ends and age_ms < system.config.ticket_ttl_ms - skew_ms - ADOPTION_MS:
                yield f"Ticket {ticket_id} of {client.request_id} was settled and never booked."


def _ledger(system: "System") -> Iterator[str]:
    """P5: what was attained is the true cost, by the engines' own counts."""
    totals = system.book.totals
    if abs(totals.charged - totals.attained + totals.corrected) > 1e-6 * max(1.0, totals.charged) and (
        totals.terms == 1
    ):
        yield f"P5: charges {totals.charged} + corrections {totals.corrected} are not {totals.attained}."
    legs = {token: leg for engine in system.engines.values() for token, leg in engine.counted.items()}
    for client in system.clients:
        for token, told in client.settled:
            leg = legs.get(token)
            if leg is None:
                yield f"P5: request {client.request_id} settled a ticket that no engine saw."
                continue
            usage = told.usage
            if (usage.prompt_tokens, usage.cached_tokens, usage.output_tokens) != (
                leg.prompt_tokens,
                leg.cached_tokens,
                leg.output_tokens,
            ):
                yield f"P5: request {client.request_id} told {usage}, its engine counted otherwise."
    yield from _attained(system)


def _attained(system: "System") -> Iterator[str]:
    counted = {client.request_id: client for client in system.clients if client.outcome is Outcome.FINISHED}
    for ends in system.book.ends.values():
        for end in ends:
            client = counted.get(end.ticket.request_id)
            if end.outcome is not LegOutcome.SETTLED or client is None or end.usage is None:
                continue
            told = client.settled[-1][1].usage
            true = system.config.cost.cost(
                told.prompt_tokens - told.cached_tokens, told.cached_tokens, told.output_tokens
            )
            if abs(true - end.attained) > 1e-6 * max(1.0, true):
                yield f"P5: ticket {end.ticket.ticket_id} attained {end.attained}, by its engine's count {true}."


def _recorded(system: "System") -> Iterator[str]:
    for host in system.network.schedulers:
        for family in host.metrics.faults.collect():
            for sample in family.samples:
                yield f"{host.process.name} recorded a fault of its own: {sample.labels}."
