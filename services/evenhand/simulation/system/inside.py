"""Who is inside an engine: requests that the scheduler has placed there, and what failures explain beyond them.

At each request's arrival in an engine, every request inside has a ticket that is

- open and of the present term: no more of them than the worker has slots; or
- open and of an earlier term, taken over or adopted: as many as that term left there; or
- of an earlier term that the present one has not heard of, or ended as cancelled, expired or lost with its worker:
  its holder hears of it with its next renewal, so it is inside for ``LINGER_S_MAX`` more at most, not counting
  time in which no scheduler takes a step.

A ticket that is settled has nobody inside.
"""

from collections.abc import Callable
from typing import Final

from evenhand.core.facts import LegOutcome, Ticket
from evenhand.scheduler.tickets import TicketSigner
from evenhand.simulation.system.book import Book
from evenhand.simulation.system.engine import SimulatedEngine

LINGER_S_MAX: Final = 10.0
"""A renewal interval of 2 s, renewals that fail, and the network at its slowest."""
LAST: Final = "last "
"""How the names of the run's own requests begin, which have no ticket."""


class Inside:
    """The check of one run's engines."""

    def __init__(self, book: Book, signer: TicketSigner, slots: int, violated: Callable[[str], None]) -> None:
        self._book = book
        self._signer = signer
        self._slots = slots
        self._violated = violated
        self._tickets: dict[str, Ticket] = {}

    def entered(self, engine: SimulatedEngine) -> None:
        """A request has just come in."""
        page = self._book.page
        if page is None:
            return
        placed = 0
        for token in engine.legs:
            if token.startswith(LAST):
                continue
            ticket = self._ticket(token)
            if ticket.ticket_id in page.open:
                placed += ticket.ticket_id not in page.inherited
                continue
            ended = page.ended.get(ticket.ticket_id)
            since_ns, outcome = ended if ended is not None else (page.began_ns, None)
            lingers_s = (page.last_step_ns - since_ns) / 1e9
            if outcome is LegOutcome.SETTLED or lingers_s > LINGER_S_MAX:
                how = outcome.value if outcome is not None else "unknown"
                self._violated(
                    f"{engine.name} still runs {ticket.request_id}, whose ticket {ticket.ticket_id} is {how} "
                    f"for {lingers_s:.1f} s."
                )
        if placed > self._slots:
            self._violated(f"{engine.name} has {placed} requests of this term inside and {self._slots} slots.")

    def _ticket(self, token: str) -> Ticket:
        ticket = self._tickets.get(token)
        if ticket is None:
            ticket = self._tickets[token] = self._signer.verify(token).ticket
        return ticket
