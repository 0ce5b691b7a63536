"""What the metrics page and the live table show of a pool: a copy, taken now and then, that decides nothing."""

from dataclasses import dataclass

from evenhand.core.estimator import NS_PER_MS, NS_PER_S
from evenhand.core.facts import TenantState, WorkerState
from evenhand.core.ids import Epoch, TenantId, WorkerId
from evenhand.core.legs import Legs
from evenhand.core.tenant import Band, Tenant
from evenhand.core.waits import pool_worst_wait
from evenhand.core.worker import Worker


@dataclass(frozen=True, slots=True)
class TenantStatus:
    """One tenant. Costs in cost tokens since the start (or the checkpointed start), corrections included."""

    tenant_id: TenantId
    weight: float
    state: TenantState
    queue_length: int
    queue_bytes: int
    oldest_wait_ms: float
    virtual_time: float
    in_a: bool
    tickets_open: int
    cost_outstanding: float
    cost_got: float
    cost_due: float
    """Its share of what the pool dispatched while it was in A: its band's among bands · its own among tenants."""
    backlogged_s: float
    band: str = "default"
    guaranteed_share: float = 0.0
    cost_guaranteed: float = 0.0
    """The part of ``cost_got`` that its guarantee gave it outside the window, and that is on no clock."""
    cost_backfilled: float = 0.0
    """The part of ``cost_got`` that it got outside the window, while those more behind were held up."""
    cost_idled: float = 0.0
    """Charged for workers and room that its withdrawn requests left idle."""
    guarantee_behind_ms: float = 0.0
    """For how long its guarantee has been due, at the R of now, up to the burst and only while it is in A;
    below 0: it is ahead of its guarantee."""
    users: int = 0
    """Users that are remembered: those with something open, and those at rest that are ahead."""


@dataclass(frozen=True, slots=True)
class BandStatus:
    """One band of the pool. ``window`` is T among its tenants, in virtual time."""

    name: str
    weight: float
    virtual_time: float
    in_a: bool
    tenants: int
    tenants_in_a: int
    window: float


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """One worker, as reserved here; ``running`` … as its engine last said, −1 where it said nothing."""

    worker_id: WorkerId
    epoch: Epoch
    state: WorkerState
    closed: str | None
    """Why it has no room now; None: it has."""
    slots_used: int
    slots: int
    kv_blocks_reserved: int
    kv_blocks: int
    prefill_pending_tokens: float
    prefill_rate_tokens_per_s: float
    virtual_time: float
    """V_w among the bands."""
    running: int
    waiting: int
    heard_age_ms: float


@dataclass(frozen=True, slots=True)
class PoolStatus:
    """One pool at one moment. Costs in cost tokens, clocks and windows in virtual time (cost ÷ weight)."""

    tenants: tuple[TenantStatus, ...]
    workers: tuple[WorkerStatus, ...]
    queued_total: int
    tickets_open: int
    cost_outstanding: float
    cost_dispatched: float
    cost_rate_per_s: float
    """R."""
    window: float
    """T among the tenants of the first band, in virtual time; of the others see ``bands``."""
    tenants_in_a: int
    grants: int
    bands: tuple[BandStatus, ...] = ()
    wait_max_ms: float = 0.0
    """Worst-case wait of a tenant in A, from now on (P3; see ``bounds``)."""
    newcomer_wait_max_ms: float = 0.0
    """Worst-case wait of a tenant that enters A now (P8)."""
    window_of_bands: float = 0.0
    """T among the bands."""


def pool_status(legs: Legs, queued_total: int, now_ns: int) -> PoolStatus:
    """The pool as it stands; ``now_ns`` is not before the last step."""
    bands = tuple(_band_status(legs, band) for band in legs.fair.bands.values())
    worst = pool_worst_wait(legs, now_ns)
    return PoolStatus(
        tenants=tuple(_tenant_status(legs, tenant, now_ns) for tenant in legs.outstanding.tenants.values()),
        workers=tuple(_worker_status(legs, worker, now_ns) for worker in legs.rooms.workers.values()),
        queued_total=queued_total,
        tickets_open=len(legs.book),
        cost_outstanding=legs.outstanding.total,
        cost_dispatched=legs.outstanding.cost_dispatched,
        cost_rate_per_s=legs.cost_rate.per_s,
        window=bands[0].window,
        tenants_in_a=len(legs.fair),
        grants=legs.granted_count,
        bands=bands,
        wait_max_ms=worst.in_a_ms,
        newcomer_wait_max_ms=worst.newcomer_ms,
        window_of_bands=legs.fair.window_of_bands(legs.cost_rate.per_s),
    )


def _band_status(legs: Legs, band: Band) -> BandStatus:
    return BandStatus(
        name=band.node_id,
        weight=band.weight,
        virtual_time=band.v,
        in_a=band.in_a,
        tenants=len(band.tenants_known),
        tenants_in_a=len(band.tenants),
        window=legs.fair.window_of_tenants(band, legs.cost_rate.per_s),
    )


def _tenant_status(legs: Legs, tenant: Tenant, now_ns: int) -> TenantStatus:
    oldest_ns = min((next(iter(u.queue.values())).enqueued_at_ns for u in tenant.users_known.values() if u.queue),
                    default=now_ns)  # fmt: skip
    backlogged_ns = tenant.backlogged_ns + (now_ns - tenant.backlogged_from_ns if tenant.in_a else 0)
    return TenantStatus(
        tenant_id=tenant.spec.tenant_id,
        weight=tenant.spec.weight,
        state=tenant.spec.state,
        queue_length=len(tenant.queue),
        queue_bytes=tenant.queue_bytes,
        oldest_wait_ms=(now_ns - oldest_ns) / NS_PER_MS,
        virtual_time=tenant.v,
        in_a=tenant.in_a,
        tickets_open=len(tenant.granted),
        cost_outstanding=tenant.outstanding,
        cost_got=tenant.cost_got,
        cost_due=legs.outstanding.due(tenant),
        backlogged_s=backlogged_ns / NS_PER_S,
        band=tenant.band.node_id,
        guaranteed_share=tenant.spec.guaranteed_share,
        cost_guaranteed=tenant.cost_guaranteed,
        cost_backfilled=tenant.cost_backfilled,
        cost_idled=tenant.cost_idled,
        guarantee_behind_ms=legs.guarantees.behind_ms(tenant, now_ns),
        users=len(tenant.users_known),
    )


def _worker_status(legs: Legs, worker: Worker, now_ns: int) -> WorkerStatus:
    state = WorkerState.READY
    if worker.draining:
        state = WorkerState.DRAINING
    elif worker.stale:
        state = WorkerState.STALE
    elif not worker.complete:
        state = WorkerState.INCOMPLETE
    return WorkerStatus(
        worker_id=worker.spec.worker_id,
        epoch=worker.spec.epoch,
        state=state,
        closed=worker.closed,
        slots_used=worker.slots_used,
        slots=worker.spec.slots,
        kv_blocks_reserved=worker.kv_reserved_blocks,
        kv_blocks=worker.spec.kv_blocks,
        prefill_pending_tokens=worker.prefill_pending_tokens(now_ns),
        prefill_rate_tokens_per_s=worker.prefill_rate_tokens_per_s,
        virtual_time=legs.fair.pool.virtual_time(worker.spec.worker_id),
        running=worker.load.running if worker.load is not None else -1,
        waiting=worker.load.waiting if worker.load is not None else -1,
        heard_age_ms=(now_ns - worker.heard_at_ns) / NS_PER_MS,
    )
