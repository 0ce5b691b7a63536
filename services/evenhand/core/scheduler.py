"""The scheduler of one pool: admit → queue → choose → ticket → settle, as one pure state machine.

``step(input, now) -> effects``. One writer calls it, for every input in turn, with a monotonic clock; it does no
I/O and knows no other time. Whatever time alone brings about (tickets and deadlines run out, workers fall
silent, prefill drains) is done first at every step, so ``Tick`` is only needed where nothing else comes, and
``WakeAt`` says when that is.

What always holds is stated in ``docs/fairness.md`` and checked under ``tests/properties``. The parts each own
their state: requests in ``requests``, queues in ``tenant``, clocks in ``fair_queue``, workers in ``fleet``, room
in ``rooms`` and ``worker``, tickets in ``legs`` and ``tickets``; the choice is ``placement``'s.
"""

from typing import assert_never

from evenhand.core.checkpoint import SchedulerCheckpoint, restore_checkpoint, take_checkpoint
from evenhand.core.cold_waits import NEVER_NS
from evenhand.core.errors import InvalidInput
from evenhand.core.estimator import NS_PER_S, CostRate, OutputEstimator
from evenhand.core.explain import Explainer
from evenhand.core.facts import (
    WEIGHT_MAX,
    WEIGHT_MIN,
    LegOutcome,
    RefusalReason,
    SchedulerConfig,
    TenantSpec,
)
from evenhand.core.fair_tree import FairTree
from evenhand.core.fleet import Fleet
from evenhand.core.guarantees import Guarantees
from evenhand.core.ids import RequestId, TenantId, WorkerId
from evenhand.core.legs import Legs
from evenhand.core.limits import check_rates
from evenhand.core.outstanding import Outstanding
from evenhand.core.placement import Placement
from evenhand.core.presence import Presence
from evenhand.core.requests import SHUTTING_DOWN, Requests
from evenhand.core.rooms import Rooms
from evenhand.core.status import PoolStatus, pool_status
from evenhand.core.steps import (
    BandsChanged,
    Cancel,
    Effect,
    Input,
    MapChanged,
    Renew,
    Settle,
    ShutDown,
    Submit,
    TenantChanged,
    TenantForgotten,
    Tick,
    TicketAdopted,
    WakeAt,
    WorkerDrained,
    WorkerGone,
    WorkerHeard,
    WorkerJoined,
)
from evenhand.core.tickets import TicketBook

PRESENCE_EXPIRY_NS = NS_PER_S
"""How often assumed keys whose time is over are dropped."""


class PoolScheduler:
    """Decides for one pool. Not safe for two writers; give every call a ``now_ns`` not before the last."""

    def __init__(self, config: SchedulerConfig, presence: Presence, term: int = 1) -> None:
        self.config = config
        fair, rooms = FairTree(config), Rooms(config)
        outstanding = Outstanding(fair)
        cost_rate = CostRate(config.cost_rate_default_per_s)
        placement = Placement(config, presence, fair, rooms, outstanding, cost_rate)
        self._legs = Legs(
            config=config,
            term=term,
            presence=presence,
            fair=fair,
            rooms=rooms,
            outstanding=outstanding,
            placement=placement,
            explainer=Explainer(config, fair, rooms, placement, cost_rate),
            cost_rate=cost_rate,
            estimator=OutputEstimator(config.output_estimate_default_tokens, config.output_estimator),
            book=TicketBook(config.outcomes_remembered_max),
            guarantees=Guarantees(config, cost_rate),
        )
        self._requests = Requests(self._legs)
        self._fleet = Fleet(self._legs, self._requests)
        self._presence_expiry_at_ns = 0
        self._wake_at_ns = 0
        self._guarantee_at_ns = NEVER_NS
        """When a guarantee next falls due that a worker with room may serve."""
        self._cold_wait_at_ns = NEVER_NS
        """When the first request that waits for a warmer worker need not wait on."""

    def step(self, input: Input, now_ns: int) -> tuple[Effect, ...]:
        """Take one input in; return what the shell must do, in that order.

        Raises ``InvalidInput``, changing nothing, for a tenant or bands that cannot be.
        """
        self._check(input)
        effects: list[Effect] = []
        self._pass_time(now_ns, effects)
        match input:
            case Submit():
                self._requests.submit(input, now_ns, effects)
            case Settle():
                self._requests.settle(input, now_ns, effects)
            case Renew():
                self._requests.renew(input, now_ns, effects)
            case Cancel():
                self._requests.cancel(input, now_ns, effects)
            case MapChanged(worker_id):
                self._legs.map_changed(worker_id)
            case WorkerHeard():
                self._fleet.heard(input, now_ns)
            case WorkerJoined(spec):
                self._fleet.joined(spec, now_ns, effects)
            case WorkerDrained(worker_id, draining):
                self._fleet.drained(worker_id, draining, now_ns, effects)
            case WorkerGone(worker_id):
                worker = self._legs.rooms.workers.get(worker_id)
                if worker is not None:
                    self._fleet.lose(worker, now_ns, effects)
            case TenantChanged():
                self._tenant_changed(input, now_ns)
            case BandsChanged(bands):
                self._legs.fair.change_bands(bands)
                self._legs.outstanding.bands_changed()
            case TenantForgotten(tenant_id):
                self._tenant_forgotten(tenant_id, now_ns, effects)
            case TicketAdopted():
                self._requests.adopt(input, now_ns, effects)
            case ShutDown():
                self._requests.shut_down = True
                self._requests.refuse_queued(RefusalReason.SHUTTING_DOWN, SHUTTING_DOWN, now_ns, effects)
            case Tick():
                self._legs.rooms.stirred = True
            case _:
                assert_never(input)
        self._dispatch(now_ns, effects)
        self._wake(now_ns, effects)
        return tuple(effects)

    def checkpoint(self, now_ns: int = 0) -> SchedulerCheckpoint:
        """Clocks, open tickets and what was learned, as plain data; queues are not in it (clients ask again).

        Levels of limits per minute are as of ``now_ns``, or of the last step that touched them if that is later.
        """
        return take_checkpoint(self._legs, now_ns)

    def restore(self, checkpoint: SchedulerCheckpoint, now_ns: int, elapsed_ns: int = 0) -> None:
        """Take over from an earlier term. Call before the first step; workers and tenants may be told later.

        ``elapsed_ns``: how long ago the checkpoint was taken, as far as known; limits per minute refill meanwhile.
        """
        restore_checkpoint(self._legs, checkpoint, now_ns, elapsed_ns)

    def status(self, now_ns: int) -> PoolStatus:
        """Everything the metrics and the live table show; O(n log n) in tenants, workers and open tickets."""
        return pool_status(self._legs, self._requests.queued_total, now_ns)

    @property
    def kept(self) -> tuple[TenantId, WorkerId] | None:
        """For whose user which worker is kept, as of the last decision; None: none is."""
        kept = self._legs.placement.keeping.kept
        return (kept.user.tenant.spec.tenant_id, kept.worker.spec.worker_id) if kept is not None else None

    def estimate_of(self, tenant_id: TenantId, request_id: RequestId) -> int:
        """Estimated output tokens of a request that waits."""
        return self._legs.outstanding.tenants[tenant_id].queue[request_id].output_tokens_estimated

    # Tenants

    def _check(self, input: Input) -> None:
        """Refuse what cannot be before time has passed: what that brings about could not be told any more."""
        if isinstance(input, TenantChanged):
            check_tenant(input.spec)
            check_rates(input.spec)
            self._legs.fair.band_of(input.spec)
        elif isinstance(input, BandsChanged):
            self._legs.fair.check_bands(input.bands)

    def _tenant_changed(self, changed: TenantChanged, now_ns: int) -> None:
        spec = changed.spec
        self._legs.limits.change(spec, now_ns)
        tenant = self._legs.outstanding.tenants.get(spec.tenant_id)
        if tenant is None:
            tenant = self._legs.outstanding.tenants[spec.tenant_id] = self._legs.fair.add(spec)
            self._legs.guarantees.change(tenant, spec.guaranteed_share)
            return
        if tenant.in_a:
            self._legs.outstanding.left(tenant, now_ns)
        self._legs.outstanding.before_change(tenant)
        self._legs.fair.change(tenant, spec)
        tenant.forgotten = False
        self._legs.fair.refresh(tenant)
        if tenant.in_a:
            self._legs.outstanding.entered(tenant, now_ns)
        self._legs.outstanding.note(tenant)
        self._legs.guarantees.change(tenant, spec.guaranteed_share)

    def _tenant_forgotten(self, tenant_id: TenantId, now_ns: int, effects: list[Effect]) -> None:
        tenant = self._legs.outstanding.tenants.get(tenant_id)
        if tenant is None:
            return
        tenant.forgotten = True
        for request_id in tenant.waiting_ids():
            self._requests.unqueue(tenant, request_id, now_ns)
            self._requests.refuse(
                tenant_id, request_id, RefusalReason.UNKNOWN_TENANT, f"Tenant {tenant_id} was deleted.", effects
            )
        self._requests.drop_if_done(tenant)

    # Time

    def _pass_time(self, now_ns: int, effects: list[Effect]) -> None:
        self._legs.guarantees.pass_time(now_ns)
        expiry_ns = self._legs.book.next_expiry_ns()
        if expiry_ns is not None and expiry_ns <= now_ns:
            for ticket_id in self._legs.book.expired(now_ns):
                held = self._legs.book.get(ticket_id)
                assert held is not None
                self._requests.end(held, LegOutcome.EXPIRED, None, now_ns, effects)
        self._requests.pass_deadlines(now_ns, effects)
        for worker in self._legs.rooms.pass_time(now_ns):
            self._fleet.lose(worker, now_ns, effects)
        if now_ns >= self._presence_expiry_at_ns:
            self._presence_expiry_at_ns = now_ns + PRESENCE_EXPIRY_NS
            self._legs.presence.expire(now_ns)
            self._legs.placement.heads.map_version += 1

    def _dispatch(self, now_ns: int, effects: list[Effect]) -> None:
        """Dispatch while a worker has room and someone may run; each pass grants one request.

        Where neither clocks, queues nor rooms have changed since the last look, there is nothing to find. What a
        changed map alone makes fit is found at the next change or ``Tick``.
        """
        due_at_ns = min(self._guarantee_at_ns, self._cold_wait_at_ns)
        if not (self._legs.fair.stirred or self._legs.rooms.stirred or now_ns >= due_at_ns):
            return
        placement = self._legs.placement
        placement.fitting.backlog(self._legs.cost_rate.backlog_ns(self._legs.outstanding.queued_in_a))
        placement.begin()
        while self._requests.queued_total and self._legs.rooms.open:
            due = self._legs.guarantees.due()
            choice = placement.choose_guaranteed(due, now_ns) if due else None
            self._legs.guarantees.asked(due, choice.user.tenant if choice is not None else None)
            if choice is None:
                choice = placement.choose(now_ns)
            if choice is None:
                break
            placement.begin()
            granted = self._legs.open(choice, now_ns)
            effects.append(granted)
            self._legs.cost_rate.dispatched(granted.ticket.charge)
            self._requests.queued_total -= 1
        self._legs.fair.stirred = self._legs.rooms.stirred = False
        next_due_ns = self._legs.guarantees.next_due_ns(now_ns) if self._legs.rooms.open else None
        self._guarantee_at_ns = next_due_ns if next_due_ns is not None else NEVER_NS
        placement.cold_waits.end(now_ns)
        self._cold_wait_at_ns = placement.cold_waits.at_ns

    def _wake(self, now_ns: int, effects: list[Effect]) -> None:
        """Say when time alone next brings something about, where that is sooner than was said before."""
        at_ns = self._legs.rooms.next_change_ns(self._requests.queued_total > 0)
        expiry_ns = self._legs.book.next_expiry_ns()
        if expiry_ns is not None and (at_ns is None or expiry_ns < at_ns):
            at_ns = expiry_ns
        due_at_ns = min(self._guarantee_at_ns, self._cold_wait_at_ns)
        if due_at_ns < NEVER_NS and (at_ns is None or due_at_ns < at_ns):
            at_ns = due_at_ns
        deadline_ns = self._requests.next_deadline_ns
        if deadline_ns is not None and (at_ns is None or deadline_ns < at_ns):
            at_ns = deadline_ns
        if at_ns is not None and (at_ns < self._wake_at_ns or self._wake_at_ns <= now_ns):
            self._wake_at_ns = at_ns
            effects.append(WakeAt(at_ns))


def check_tenant(spec: TenantSpec) -> None:
    """Raise ``InvalidInput`` for weights that no share can be made of, and bounds that nothing could keep."""
    if not WEIGHT_MIN <= spec.weight <= WEIGHT_MAX:
        raise InvalidInput(
            f"Tenant {spec.tenant_id} has weight {spec.weight}; it must be {WEIGHT_MIN:g} to {WEIGHT_MAX:g}."
        )
    bounds = {
        "concurrency_max": spec.concurrency_max,
        "queue_length_max": spec.queue_length_max,
        "queue_bytes_max": spec.queue_bytes_max,
    }
    for name, value in bounds.items():
        if value < 0:
            raise InvalidInput(f"Tenant {spec.tenant_id} has {name} {value}; it must not be negative.")
    for user, weight in spec.user_weights:
        if not WEIGHT_MIN <= weight <= WEIGHT_MAX:
            raise InvalidInput(
                f"User {user} of tenant {spec.tenant_id} has weight {weight}; "
                f"it must be {WEIGHT_MIN:g} to {WEIGHT_MAX:g}."
            )
    if not 0.0 <= spec.guaranteed_share <= 1.0:
        raise InvalidInput(
            f"Tenant {spec.tenant_id} is guaranteed {spec.guaranteed_share} of the pool; that must be 0 to 1."
        )
