"""Which tickets of earlier terms may still be taken up, though the restored checkpoint does not hold them.

A checkpoint holds every open ticket of its own term that was granted before it: one that it lacks has ended. Of
the terms before that it holds only what their holders made known meanwhile, and a term may be too short for that.
So each checkpoint carries on, by term, when that term's state was last kept; and which tickets of earlier terms
have ended since, so that none of them is taken up, and paid for, once more.

Bounded: the latest ``TERMS_KEPT_MAX`` terms; of ended tickets those that are young enough to be taken up at all.
"""

from dataclasses import dataclass

from evenhand.core.facts import Ticket
from evenhand.core.ids import TicketId

TERMS_KEPT_MAX = 64
ENDED_KEPT_MAX = 10_000


@dataclass(frozen=True, slots=True)
class EarlierTerms:
    """What a checkpoint says of the terms before its own; times are wall-clock milliseconds."""

    kept_at_ms: tuple[tuple[int, int], ...] = ()
    """By term: when the checkpoint that its successor restored was taken."""
    ended: tuple[tuple[TicketId, int], ...] = ()
    """Tickets of these terms that ended later, and when."""


NO_TERMS = EarlierTerms()


class Adoption:
    """What a term of office knows of those before it. One writer, the actor."""

    def __init__(self, earlier: EarlierTerms = NO_TERMS, term: int = 0, saved_wall_ms: int = 0) -> None:
        """``term`` and ``saved_wall_ms`` are the restored checkpoint's own; 0: none was restored."""
        self._kept_at_ms = dict(earlier.kept_at_ms)
        if term:
            self._kept_at_ms[term] = saved_wall_ms
        self._ended = dict(earlier.ended)

    def may(self, ticket: Ticket, granted_wall_ms: int) -> bool:
        """Whether a ticket that is not open here may be: false means that it has ended."""
        if ticket.ticket_id in self._ended:
            return False
        kept_at_ms = self._kept_at_ms.get(ticket.term)
        return kept_at_ms is None or granted_wall_ms > kept_at_ms

    def ended(self, ticket_id: TicketId, wall_ms: int) -> None:
        """A ticket of an earlier term has ended in this one."""
        self._ended[ticket_id] = wall_ms
        if len(self._ended) > ENDED_KEPT_MAX:
            del self._ended[next(iter(self._ended))]

    def state(self, wall_ms: int, ttl_ms: int) -> EarlierTerms:
        """For the next checkpoint; whoever ended longer ago than a ticket lives is left out."""
        self._ended = {ticket_id: at_ms for ticket_id, at_ms in self._ended.items() if wall_ms - at_ms <= ttl_ms}
        kept = sorted(self._kept_at_ms.items())[-TERMS_KEPT_MAX:]
        return EarlierTerms(tuple(kept), tuple(self._ended.items()))
