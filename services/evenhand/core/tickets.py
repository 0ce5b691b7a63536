"""Open tickets, when they expire, and how the closed ones ended.

::

    granted ──renew──▶ granted
       │
       ├─ settle ───────▶ SETTLED       pays what the engine's usage says; unknown usage keeps the charge
       ├─ cancel ───────▶ CANCELLED     the same: what was produced is paid for
       ├─ ttl runs out ─▶ EXPIRED       keeps at least its charge; renewals prolong a leg to ``leg_ms_max``
       └─ worker lost ──▶ WORKER_LOST   pays nothing; the request goes back to its queue

A ticket leaves the book exactly once; its outcome is remembered, bounded in number, so that a second settle is
answered and changes nothing. Unknown usage never refunds: otherwise saying nothing would be the cheap way out.
"""

import heapq
from collections.abc import Sequence
from typing import NamedTuple

from evenhand.core.facts import CostWeights, Decision, LegOutcome, Ticket, Usage
from evenhand.core.ids import Epoch, RequestId, Seq, TenantId, TicketId
from evenhand.core.queued import Queued
from evenhand.core.tenant import Band, User


class OpenTicket:
    """A ticket while it is held, with what is reserved and booked for it."""

    __slots__ = (
        "awaited_tokens",
        "band",
        "booked",
        "decision",
        "expires_at_ns",
        "first_token_at_ns",
        "guarantee_moved",
        "guarantee_share",
        "has_left_band",
        "kv_blocks",
        "map_cached_blocks",
        "map_position",
        "output_learned_tokens",
        "output_told_tokens",
        "prefill_end_ns",
        "prefill_overdue_ns",
        "prefill_pending_tokens",
        "prefill_start_ns",
        "queued",
        "renewable_until_ns",
        "ticket",
    )

    def __init__(
        self, ticket: Ticket, queued: Queued, kv_blocks: int, expires_at_ns: int, renewable_until_ns: int
    ) -> None:
        self.ticket = ticket
        self.queued = queued
        self.kv_blocks = kv_blocks
        self.expires_at_ns = min(expires_at_ns, renewable_until_ns)
        self.renewable_until_ns = renewable_until_ns
        """It lives up to here at most, however often it is renewed."""
        self.booked = ticket.charge
        """Cost on the tenant's clock for this leg so far: the charge and what usage added."""
        self.band: Band | None = None
        """The band whose clock it is booked on; None: it is gone."""
        self.has_left_band = False
        """Its tenant has changed its band since: the clock that it was charged on there is no more, whether or
        not the tenant has come back."""
        self.decision: Decision | None = None
        self.guarantee_share = 0.0
        """The part of R by which its cost moves its tenant's guarantee tag; 0: it does not."""
        self.guarantee_moved = 0.0
        """How far it has moved that tag."""
        self.prefill_start_ns = 0
        self.prefill_end_ns = 0
        """When its prefill is done, as modelled or told."""
        self.awaited_tokens = 0
        """Uncached tokens of which its worker awaits the first token."""
        self.prefill_overdue_ns = 0
        """From when on they count no more."""
        self.first_token_at_ns: int | None = None
        """When its owner told of its first token; None: not yet."""
        self.output_told_tokens = 0
        """Most output that renewals have told of."""
        self.output_learned_tokens = ticket.output_tokens_estimated
        """Output that its tenant's estimates take for granted, as far as this leg goes."""
        self.prefill_pending_tokens = 0.0
        """Prefill that was ahead of it when it was granted, its own included."""
        self.map_position: tuple[Epoch, Seq] | None = None
        self.map_cached_blocks = 0
        """Usable blocks that the cache map alone, without presumption, predicted."""

    @property
    def user(self) -> User:
        """Whose leg it is."""
        assert self.queued.user is not None, "a leg is of a user"
        return self.queued.user

    def renew(self, expires_at_ns: int) -> None:
        """Let it live until then, as far as renewals may prolong it; never shorter than it would."""
        self.expires_at_ns = max(self.expires_at_ns, min(expires_at_ns, self.renewable_until_ns))

    def cost_of(self, usage: Usage, cost: CostWeights) -> float:
        """Cost tokens of what a leg used."""
        return cost.cost(usage.uncached_tokens, usage.cached_tokens, usage.output_tokens)


class Closed(NamedTuple):
    """How a ticket ended, and of which request it was a leg."""

    outcome: LegOutcome
    tenant_id: TenantId
    request_id: RequestId


class TicketBook:
    """All open tickets of a pool and the outcomes of closed ones."""

    def __init__(self, outcomes_remembered_max: int) -> None:
        self._open: dict[TicketId, OpenTicket] = {}
        self._expiry: list[tuple[int, TicketId]] = []
        self._closed: dict[TicketId, Closed] = {}
        self._closed_max = outcomes_remembered_max

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, ticket_id: TicketId) -> bool:
        return ticket_id in self._open

    def get(self, ticket_id: TicketId) -> OpenTicket | None:
        """An open ticket; None: it is closed, or was never granted here."""
        return self._open.get(ticket_id)

    def all_open(self) -> Sequence[OpenTicket]:
        """Open tickets in the order in which they were opened."""
        return tuple(self._open.values())

    def open(self, ticket: OpenTicket) -> None:
        """Take a ticket in, once."""
        ticket_id = ticket.ticket.ticket_id
        assert ticket_id not in self._open, f"ticket {ticket_id} opened twice"
        self._open[ticket_id] = ticket
        heapq.heappush(self._expiry, (ticket.expires_at_ns, ticket_id))

    def close(self, ticket_id: TicketId, outcome: LegOutcome) -> OpenTicket:
        """Take a ticket out, once."""
        ticket = self._open.pop(ticket_id)
        self._closed[ticket_id] = Closed(outcome, ticket.ticket.tenant_id, ticket.ticket.request_id)
        if len(self._closed) > self._closed_max:
            del self._closed[next(iter(self._closed))]
        if len(self._expiry) > 64 and len(self._expiry) > 4 * len(self._open):
            self._expiry = [(t.expires_at_ns, t.ticket.ticket_id) for t in self._open.values()]
            heapq.heapify(self._expiry)
        return ticket

    def outcome(self, ticket_id: TicketId) -> LegOutcome | None:
        """How a closed ticket ended, while that is remembered."""
        closed = self._closed.get(ticket_id)
        return closed.outcome if closed is not None else None

    def closed(self, ticket_id: TicketId) -> Closed | None:
        """A closed ticket, while it is remembered."""
        return self._closed.get(ticket_id)

    def expired(self, now_ns: int) -> tuple[TicketId, ...]:
        """Tickets whose time has run out, in order of expiry; a renewed one is looked at again later."""
        due: list[TicketId] = []
        heap = self._expiry
        while heap and heap[0][0] <= now_ns:
            _, ticket_id = heapq.heappop(heap)
            ticket = self._open.get(ticket_id)
            if ticket is None:
                continue
            if ticket.expires_at_ns <= now_ns:
                due.append(ticket_id)
            else:
                heapq.heappush(heap, (ticket.expires_at_ns, ticket_id))
        return tuple(due)

    def next_expiry_ns(self) -> int | None:
        """A time by which ``expired`` should be asked again; may be early, is never late."""
        return self._expiry[0][0] if self._expiry else None


def believed_usage(usage: Usage, ticket: Ticket) -> Usage:
    """Usage capped to what was granted, never negative, and consistent.

    Output without a prompt is impossible: the prompt is then taken as granted, with the predicted hit; so is the
    hit of an engine that does not report it.
    """
    output_tokens = min(max(0, usage.output_tokens), ticket.output_tokens_max)
    prompt_tokens = min(max(0, usage.prompt_tokens), ticket.prompt_tokens)
    if output_tokens > 0 and prompt_tokens == 0:
        return Usage(ticket.prompt_tokens, ticket.predicted_cached_tokens, output_tokens, cached_known=False)
    reported_tokens = usage.cached_tokens if usage.cached_known else ticket.predicted_cached_tokens
    cached_tokens = min(max(0, reported_tokens), prompt_tokens)
    return Usage(prompt_tokens, cached_tokens, output_tokens, usage.cached_known)
