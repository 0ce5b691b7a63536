"""What outlives a scheduler's process: clocks, open tickets, what was learned. Plain data, no wall clock.

Times are durations from the moment of the checkpoint, as the next process counts its own monotonic time. Queues
are not kept: clients ask again and find their open ticket or a place in the queue.

An open ticket has ``ticket_confirm_ms`` from the restore on, as its owner could renew it with nobody meanwhile;
once its owner is heard of it has a whole time to live again. It cannot have that from the start: what was settled
after the checkpoint is open in it, and a busy pool of short requests would be full of such tickets.

A ticket granted after the last checkpoint is unknown to the successor; its owner's signed ticket makes it known
(``TicketAdopted``), and its charge goes onto the clock then.
"""

from dataclasses import dataclass

from evenhand.core.estimator import OutputLearned
from evenhand.core.facts import TenantSpec, Ticket
from evenhand.core.ids import WorkerId
from evenhand.core.legs import Legs
from evenhand.core.limits import LimitLevels, TokensTaken
from evenhand.core.tenant import Tenant, User

WORKERS_MAX = 4_096
"""Workers whose clocks are in a checkpoint: members first, then those of an earlier term that have not joined."""

KEYS_KEPT_MAX = 256
"""First block keys kept of each open ticket: a checkpoint a second must not cost what a long prompt does."""


@dataclass(frozen=True, slots=True)
class NodeClocks:
    """V_w at one node: of most workers, and of each worker that has another."""

    floor: float = 0.0
    others: tuple[tuple[WorkerId, float], ...] = ()


@dataclass(frozen=True, slots=True)
class TenantClock:
    """A tenant's clock, its spec as it stood, and the clocks of its users that are not level with the rest."""

    spec: TenantSpec
    v: float
    cost_got: float = 0.0
    cost_due: float = 0.0
    users: tuple[tuple[str, float], ...] = ()
    workers: NodeClocks = NodeClocks()
    cost_guaranteed: float = 0.0
    cost_idled: float = 0.0
    cost_backfilled: float = 0.0
    guarantee_ahead: float = 0.0
    """How far its guarantee was paid ahead at the moment of the checkpoint, in cost of the pool."""


@dataclass(frozen=True, slots=True)
class BandClock:
    """A band's weight and clock, and V_w among its tenants."""

    name: str
    weight: float
    v: float
    workers: NodeClocks


@dataclass(frozen=True, slots=True)
class TicketHeld:
    """An open ticket and what is booked for it; its first keys keep a lost leg's request its affinity."""

    ticket: Ticket
    booked: float
    block_keys: tuple[int, ...] = ()
    taken: TokensTaken | None = None
    """Of the tenant's limits per minute."""
    guarantee_share: float = 0.0
    """The part of R by which its cost moves its tenant's guarantee; 0: it does not, or its writer knew none."""
    guarantee_moved: float = 0.0
    """By so much of the pool's work it has."""


@dataclass(frozen=True, slots=True)
class SchedulerCheckpoint:
    """All of it, tickets in order of age. ``term`` is the term that wrote it; the reader's is a later one."""

    term: int
    tenants: tuple[TenantClock, ...]
    bands: tuple[BandClock, ...]
    worker_ids: tuple[WorkerId, ...]
    """Those that the floors of all nodes speak of."""
    workers: NodeClocks
    """V_w among bands."""
    tickets: tuple[TicketHeld, ...]
    cost_rate_cost: float
    cost_rate_busy_s: float
    output_learned: tuple[OutputLearned, ...] = ()
    limits: tuple[LimitLevels, ...] = ()
    """Of the limits per minute, as of the moment of the checkpoint."""


def take_checkpoint(legs: Legs, now_ns: int = 0) -> SchedulerCheckpoint:
    """Copy the state out; O(n log n) in tenants and remembered users, workers, open tickets, limits' buckets."""
    return SchedulerCheckpoint(
        term=legs.term,
        tenants=tuple(
            TenantClock(
                tenant.spec,
                tenant.v,
                tenant.cost_got,
                legs.outstanding.due(tenant),
                _user_clocks(tenant),
                NodeClocks(*tenant.users.clocks()),
                tenant.cost_guaranteed,
                tenant.cost_idled,
                tenant.cost_backfilled,
                tenant.guarantee_tag - legs.guarantees.clock_at(now_ns) if tenant.guaranteed_units else 0.0,
            )
            for tenant in legs.outstanding.tenants.values()
            if not tenant.forgotten or tenant.granted
        ),
        bands=tuple(
            BandClock(name, band.weight, band.v, NodeClocks(*band.tenants.clocks()))
            for name, band in legs.fair.bands.items()
        ),
        worker_ids=legs.fair.worker_ids[:WORKERS_MAX],
        workers=NodeClocks(*legs.fair.pool.clocks()),
        tickets=tuple(
            TicketHeld(
                held.ticket,
                held.booked,
                tuple(held.queued.request.block_keys[:KEYS_KEPT_MAX]),
                legs.limits.taken(held.ticket.tenant_id, held.ticket.request_id),
                held.guarantee_share,
                held.guarantee_moved,
            )
            for held in sorted(legs.book.all_open(), key=lambda held: held.queued.age)
        ),
        output_learned=legs.estimator.learned(),
        cost_rate_cost=legs.cost_rate.cost,
        cost_rate_busy_s=legs.cost_rate.busy_s,
        limits=legs.limits.levels(
            now_ns, {(held.ticket.tenant_id, held.ticket.request_id) for held in legs.book.all_open()}
        ),
    )


def restore_checkpoint(legs: Legs, checkpoint: SchedulerCheckpoint, now_ns: int, elapsed_ns: int = 0) -> None:
    """Fill an empty scheduler from a checkpoint of an earlier term."""
    assert not legs.outstanding.tenants, "restore into a scheduler that has begun"
    assert legs.term > checkpoint.term, "a checkpoint is restored under a later term"
    legs.cost_rate.cost, legs.cost_rate.busy_s = checkpoint.cost_rate_cost, checkpoint.cost_rate_busy_s
    legs.guarantees.pass_time(now_ns)
    _restore_bands(legs, checkpoint)
    for clock in checkpoint.tenants:
        tenant = legs.fair.add(clock.spec)
        legs.outstanding.tenants[clock.spec.tenant_id] = tenant
        tenant.cost_got, tenant.cost_due = clock.cost_got, clock.cost_due
        tenant.band.tenants.place(tenant, clock.v, None)
        tenant.cost_guaranteed, tenant.cost_idled = clock.cost_guaranteed, clock.cost_idled
        tenant.cost_backfilled = clock.cost_backfilled
        legs.guarantees.change(tenant, clock.spec.guaranteed_share)
        legs.guarantees.restore(tenant, clock.guarantee_ahead, elapsed_ns)
        tenant.users.restore(clock.workers.floor, clock.workers.others)
        for name, v in clock.users:
            tenant.users.place(tenant.user(name), v, None)
        legs.limits.change(clock.spec, now_ns)
    legs.limits.restore(checkpoint.limits, now_ns - elapsed_ns)
    legs.estimator.restore(checkpoint.output_learned)
    ttl_ns = min(legs.config.ticket_ttl_ms, legs.config.ticket_confirm_ms) * 1_000_000
    for held in checkpoint.tickets:
        taken_over = legs.take_over(held.ticket, held.block_keys, held.booked, ttl_ns, now_ns)
        taken_over.guarantee_share = held.guarantee_share
        taken_over.guarantee_moved = held.guarantee_moved
        if held.taken is not None:
            legs.limits.restore_taken(held.ticket, held.taken)


def _user_clocks(tenant: Tenant) -> tuple[tuple[str, float], ...]:
    """Clocks that are above what their user would be lifted to anyway, or that an open ticket may still move."""
    least = tenant.users.virtual_time_min

    def matters(user: User) -> bool:
        return user.v > least or bool(user.tickets_open)

    return tuple((name, user.v) for name, user in tenant.users_known.items() if matters(user))


def _restore_bands(legs: Legs, checkpoint: SchedulerCheckpoint) -> None:
    """Clocks of the bands. Which bands there are is the settings' to say, but for those that tenants stand in."""
    standing = {clock.spec.band for clock in checkpoint.tenants}
    weights = {name: band.weight for name, band in legs.fair.bands.items()}
    for clock in checkpoint.bands:
        if clock.name in standing:
            weights.setdefault(clock.name, clock.weight)
    legs.fair.change_bands(weights.items())
    for clock in checkpoint.bands:
        band = legs.fair.bands.get(clock.name)
        if band is not None:
            legs.fair.pool.place(band, clock.v, None)
            band.tenants.restore(clock.workers.floor, clock.workers.others)
    legs.fair.pool.restore(checkpoint.workers.floor, checkpoint.workers.others)
    legs.fair.inherit(checkpoint.worker_ids)
