"""Inputs and effects of the pool scheduler: ``PoolScheduler.step(input, now_ns) -> tuple[Effect, ...]``.

Both unions are closed; whoever meets them uses ``match`` with ``assert_never``. Effects are listed in the order
in which the shell must obey them: an effect may be told to a client only after those before it have been done.
"""

from dataclasses import dataclass

from evenhand.core.facts import (
    Decision,
    LegOutcome,
    Refusal,
    Request,
    TenantSpec,
    Ticket,
    Usage,
    WorkerLoad,
    WorkerSpec,
)
from evenhand.core.ids import RequestId, TenantId, TicketId, WorkerId
from evenhand.core.kv import KeysRefuted


@dataclass(frozen=True, slots=True)
class Submit:
    """Admit a request. Submitting an id that is queued or granted again attaches to it: same open ticket."""

    request: Request


@dataclass(frozen=True, slots=True)
class Cancel:
    """The client gave up, queued or granted. ``usage`` is what its leg had used, if known."""

    tenant_id: TenantId
    request_id: RequestId
    usage: Usage | None = None


@dataclass(frozen=True, slots=True)
class Renew:
    """The ticket's owner is alive. ``usage`` so far, if known, corrects an undercharge at once.

    The first one with output means that the first token is there: the leg's prefill room at its worker is free
    from then on. Owners that stream send one at that moment; of tenants that never do, prefill is modelled.
    """

    ticket_id: TicketId
    usage: Usage | None = None


@dataclass(frozen=True, slots=True)
class Settle:
    """The leg is over; ``usage`` is the truth, None if it is unknown (at least the charge is kept)."""

    ticket_id: TicketId
    usage: Usage | None
    outcome: LegOutcome = LegOutcome.SETTLED
    """SETTLED, CANCELLED, or WORKER_LOST where the client saw the worker fail: the request gets a new leg."""
    ttft_ms: float | None = None
    """Time from grant to first token as the client saw it; teaches the worker's prefill rate."""


@dataclass(frozen=True, slots=True)
class WorkerJoined:
    """A worker is ready, or its spec or epoch changed. A later epoch of a known worker ends its old legs."""

    spec: WorkerSpec


@dataclass(frozen=True, slots=True)
class WorkerHeard:
    """A worker's edge is alive, and tells its engine's load; ``map_complete`` False: its map has a gap."""

    worker_id: WorkerId
    load: WorkerLoad
    map_complete: bool = True


@dataclass(frozen=True, slots=True)
class WorkerDrained:
    """Take no new request there (True), or take them again (False)."""

    worker_id: WorkerId
    draining: bool


@dataclass(frozen=True, slots=True)
class WorkerGone:
    """A worker is gone for good: its legs end as lost. ``sentence`` says why, for people."""

    worker_id: WorkerId
    sentence: str


@dataclass(frozen=True, slots=True)
class TenantChanged:
    """A tenant is new here, or is from here on as ``spec`` says; one that cannot be raises ``InvalidInput``."""

    spec: TenantSpec


@dataclass(frozen=True, slots=True)
class BandsChanged:
    """The pool's bands and their weights are these from here on.

    A band that tenants stand in cannot go: that, or a weight that cannot be, raises ``InvalidInput``.
    """

    bands: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class TenantForgotten:
    """The tenant is deleted: what is queued is refused, what runs is settled as it ends."""

    tenant_id: TenantId


@dataclass(frozen=True, slots=True)
class MapChanged:
    """The cache map beside this scheduler was folded forward for this worker."""

    worker_id: WorkerId


@dataclass(frozen=True, slots=True)
class TicketAdopted:
    """A valid ticket of an earlier term whose owner has come back; unknown here until now."""

    ticket: Ticket
    block_keys: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed: expire tickets and deadlines, age workers, dispatch."""


@dataclass(frozen=True, slots=True)
class ShutDown:
    """Refuse everything queued and admit nothing more; open tickets go on."""


Input = (
    Submit
    | Cancel
    | Renew
    | Settle
    | WorkerJoined
    | WorkerHeard
    | WorkerDrained
    | WorkerGone
    | TenantChanged
    | BandsChanged
    | TenantForgotten
    | MapChanged
    | TicketAdopted
    | Tick
    | ShutDown
)


@dataclass(frozen=True, slots=True)
class Granted:
    """A request has a place. Sent again, with the same ticket, when the request is submitted again."""

    ticket: Ticket
    decision: Decision


@dataclass(frozen=True, slots=True)
class Refused:
    """A request ends without a grant. With REQUEST_ID_REUSED it is this Submit alone: the open request goes on."""

    tenant_id: TenantId
    request_id: RequestId
    refusal: Refusal


@dataclass(frozen=True, slots=True)
class Renewed:
    """A ticket lives on, by the scheduler's own clock until ``expires_at_ns``."""

    ticket_id: TicketId
    expires_at_ns: int
    ttl_ms: int
    """How much longer it lives, in whole milliseconds: less than a ticket's time where its leg may not."""


@dataclass(frozen=True, slots=True)
class LegEnded:
    """A ticket is released, exactly once. ``correction`` was booked: attained − charged, in cost tokens."""

    ticket: Ticket
    outcome: LegOutcome
    attained: float
    correction: float
    usage: Usage | None
    request_continues: bool
    """True: the request is back in its user's queue, at the place of its age, for another leg."""
    keyed_tokens: int = 0
    """Prompt tokens whose block keys were told, so that a hit could be foreseen; 0 where the worker is gone."""


@dataclass(frozen=True, slots=True)
class TicketUnknown:
    """Renew or Settle named a ticket that is not open here."""

    ticket_id: TicketId
    already: LegOutcome | None
    """How it ended, if that is still remembered; a second settle is answered with this and changes nothing."""


@dataclass(frozen=True, slots=True)
class Refute:
    """Publish on the control topic: predicted from the map, not found by the engine."""

    refuted: KeysRefuted


@dataclass(frozen=True, slots=True)
class IdleCharged:
    """What was left idle is paid for: by a request that is withdrawn while a worker is kept for it, by a leg that
    ends with less than its charge after that, and by one that is broken off for the room that it held.

    ``cost`` is booked at all levels at once, in cost tokens, by the weights of that moment.
    """

    tenant_id: TenantId
    request_id: RequestId
    cost: float
    band: str
    band_weight: float
    weight: float
    user: str
    user_weight: float


@dataclass(frozen=True, slots=True)
class WakeAt:
    """Call again with ``Tick`` at this time at the latest."""

    at_ns: int


Effect = Granted | Refused | Renewed | LegEnded | IdleCharged | TicketUnknown | Refute | WakeAt
