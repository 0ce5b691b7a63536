"""The numbers of a running pool that ``bounds`` asks for; O(tenants in A + open tickets), for the status page."""

from evenhand.core.bounds import BandSiblings, Sibling, WorstWait, worst_wait
from evenhand.core.estimator import NS_PER_MS
from evenhand.core.ids import TenantId
from evenhand.core.legs import Legs
from evenhand.core.tenant import Band, Tenant
from evenhand.core.tickets import OpenTicket


def pool_worst_wait(legs: Legs, now_ns: int) -> WorstWait:
    """Worst-case waits as the pool stands."""
    under: dict[TenantId, float] = {}
    residual_ms = 0.0
    for held in legs.book.all_open():
        tenant_id = held.ticket.tenant_id
        under[tenant_id] = under.get(tenant_id, 0.0) + _under(legs, held)
        residual_ms = max(residual_ms, _residual_ms(legs, held, now_ns))
    rate = legs.cost_rate.per_s
    bands = tuple(_siblings(legs, band, under) for _, _, band in legs.fair.pool.in_order())
    burst_s = legs.config.guarantee_burst_ms / 1000.0
    guaranteed = [t for t in legs.outstanding.tenants.values() if t.guaranteed_units]
    share = min(sum(legs.guarantees.share(t) for t in guaranteed), 1.0)
    return worst_wait(
        bands,
        legs.fair.window_of_bands(rate),
        max((legs.fair.pool.virtual_time(worker_id) for worker_id in legs.fair.members), default=0.0),
        rate,
        share,
        share * rate * burst_s + sum(t.charge_max * t.weight for t in guaranteed),
        residual_ms + _cold_wait_ms(legs),
    )


def _cold_wait_ms(legs: Legs) -> float:
    """How long a request whose turn it is may wait on for a warmer worker than the one that is free."""
    config = legs.config
    return float(config.cold_wait_ms_max) if config.cold_wait_factor > 0.0 and len(legs.fair.members) > 1 else 0.0


def _siblings(legs: Legs, band: Band, under: dict[TenantId, float]) -> BandSiblings:
    tenants = [tenant for _, _, tenant in band.tenants.in_order()]
    known = [tenant for tenant in band.tenants_known.values() if tenant.granted or tenant.in_a]
    return BandSiblings(
        Sibling(
            band.v,
            band.weight,
            max((t.charge_max * t.weight for t in tenants), default=0.0) / band.weight,
            sum(t.outstanding for t in known) / band.weight,
            sum(under.get(t.spec.tenant_id, 0.0) for t in known) / band.weight,
        ),
        tuple(_sibling(tenant, under) for tenant in tenants),
        legs.fair.window_of_tenants(band, legs.cost_rate.per_s),
        max((band.tenants.virtual_time(worker_id) for worker_id in legs.fair.members), default=0.0),
    )


def _sibling(tenant: Tenant, under: dict[TenantId, float]) -> Sibling:
    """Whatever it has outstanding may come back to it, and its legs may yet cost as much as was granted."""
    weight = tenant.weight
    undercharge = under.get(tenant.spec.tenant_id, 0.0)
    return Sibling(tenant.v, weight, tenant.charge_max, tenant.outstanding / weight, undercharge / weight)


def _under(legs: Legs, held: OpenTicket) -> float:
    """By how much a running leg may cost more than is booked: nothing was cached, and its output is the limit."""
    ticket = held.ticket
    return max(0.0, legs.config.cost.cost(ticket.prompt_tokens, 0, ticket.output_tokens_max) - held.booked)


def _residual_ms(legs: Legs, held: OpenTicket, now_ns: int) -> float:
    """How long a leg may still hold its room, by the learned rates and its output limit."""
    worker = legs.rooms.workers.get(held.ticket.worker_id)
    if worker is None:
        return 0.0
    prefill_ms = max(0, held.prefill_end_ns - now_ns) / NS_PER_MS
    output_ms = held.ticket.output_tokens_max * worker.output_token_ms
    return prefill_ms + output_ms
