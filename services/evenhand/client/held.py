"""Tickets a client holds, and everything it tells the scheduler of them in the background.

::

    hold ──▶ renewals, every ``renew_after_ms`` ──▶ settle ──▶ told, or given up when the ticket has run out
                ├── at the first token: the worker has room for another prefill
                ├── when the output has grown by what matters, looked at every ``USAGE_LOOK_S``
                └── connection lost: all renewed at once, so that the next session takes them up

Why in the background: whoever leaves a block may be cancelled while it leaves, and the scheduler has to be told
all the same. ``drain`` waits for what is left.

Always: a ticket is settled once, by one task; at most one renewal of a ticket is under way; every call has a
deadline. It decides nothing about outcomes: the caller names them.
"""

import asyncio
import logging
from collections.abc import Coroutine, Iterable
from typing import Any

from evenhand.client.calls import Calls
from evenhand.client.errors import ClientError, TicketClosed, UnknownTicket
from evenhand.client.grant import (
    Grant,
    Outcome,
    Settlement,
    TicketState,
    nobody,
    usage_message,
    usage_so_far,
)
from evenhand.wire.generated import scheduler_pb2 as pb

LEAVE_S = 10.0
"""How long the background tries to tell the scheduler that a request was given up."""
RENEW_S_MIN = 0.05
RENEW_AGAIN_S = 1.0
"""Pause after a renewal that failed, while the ticket may still live."""
SETTLE_S_MIN = 1.0
USAGE_LOOK_S = 1.0
USAGE_GROWTH_MIN = 0.05
"""Output is told again between renewals once it has grown by so many tokens for each cost token charged: what a
leg turns out to cost beyond its charge counts while it runs, and a stream that is still costs no message."""

_log = logging.getLogger("evenhand.client")
_log.addHandler(logging.NullHandler())


class HeldTickets:
    """The open grants of one client. ``renews`` is false where the session renews by itself."""

    def __init__(self, calls: Calls, renews: bool) -> None:
        self._calls = calls
        self._renews = renews
        self._loop = asyncio.get_running_loop()
        self._grants: dict[str, Grant] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._closed = False

    def __len__(self) -> int:
        return len(self._grants)

    @property
    def busy(self) -> bool:
        """Whether something is being told in the background."""
        return bool(self._background)

    def hold(self, grant: Grant) -> None:
        """Keep the ticket alive until it is settled or ends by itself."""
        grant._alive_until_s = self._loop.time() + grant.ttl_ms / 1000
        self._grants[grant.ticket] = grant
        grant._tell_first_token = lambda: self._first_token_is_here(grant)
        self._plan_renewal(grant)

    def settle(self, grant: Grant, outcome: Outcome) -> "asyncio.Task[None]":
        """Start telling the scheduler how the leg ended. Only once for a grant."""
        self._grants.pop(grant.ticket, None)
        grant._tell_first_token = nobody
        if grant._timer is not None:
            grant._timer.cancel()
        return self._in_background(self._settle(grant, outcome), "settle")

    def leave(self, question: pb.AcquireRequest, grant: Grant | None) -> None:
        """Start telling the scheduler that the request, waiting or granted, is given up.

        Not where another block of this client holds a ticket of the same request: it goes on.
        """
        if self._closed or not any(held.request_id == question.request_id for held in self._grants.values()):
            self._in_background(self._leave(question, grant), "cancel")

    async def drain(self, waiting: Iterable[pb.AcquireRequest], wait_s: float) -> None:
        """Settle what is open as cancelled, give up what waits, and wait until all of it is told, bounded."""
        self._closed = True
        for question in waiting:
            self.leave(question, None)
        for grant in tuple(self._grants.values()):
            self.settle(grant, Outcome.CANCELLED)
        deadline = self._loop.time() + wait_s
        try:
            # The end of one task may start another (a settled leg whose request is given up), so look again.
            while self._background and (left_s := deadline - self._loop.time()) > 0:
                await asyncio.wait(self._background, timeout=left_s)
                await asyncio.sleep(0)
        finally:
            for task in tuple(self._background):
                task.cancel()

    def ticket_ended(self, ended: pb.TicketEnded) -> None:
        """The scheduler says so, unasked."""
        grant = self._grants.get(ended.ticket)
        if grant is not None:
            lost = ended.state == pb.TICKET_STATE_WORKER_LOST
            grant._end(TicketState.WORKER_LOST if lost else TicketState.CLOSED, ended.sentence)

    def connection_lost(self, error: ClientError) -> None:
        """The session that kept the tickets alive is gone: renew each, over whichever comes next."""
        if self._grants:
            _log.info("The session broke with %d open tickets: %s", len(self._grants), error)
        for grant in tuple(self._grants.values()):
            grant._alive_until_s = self._loop.time() + grant.ttl_ms / 1000
            self._renew_in_background(grant)

    async def _settle(self, grant: Grant, outcome: Outcome) -> None:
        if grant.state is TicketState.WORKER_LOST:
            sentence = f"The leg was over before: {grant.end_sentence}"
            grant._settlement = Settlement(Outcome.WORKER_LOST, False, sentence, request_continues=True)
            return
        question = pb.SettleRequest(
            ticket=grant.ticket, outcome=outcome.value, usage=usage_message(grant.usage), ttft_ms=grant._ttft_ms
        )
        try:
            reply = await self._calls.settle(question, self._loop.time() + max(SETTLE_S_MIN, grant.ttl_ms / 1000))
        except ClientError as error:
            # An earlier try of this very settlement may have arrived although its answer was lost.
            delivered = isinstance(error, TicketClosed) and error.attempt > 1
            grant._settlement = Settlement(outcome, delivered, "" if delivered else str(error))
            if not delivered:
                _log.warning("The ticket of request %s was not settled: %s", grant.request_id, error)
        else:
            grant._settlement = Settlement(
                outcome, True, "", reply.correction, reply.attained_cost, reply.request_continues
            )
        grant._end(TicketState.CLOSED, "")

    async def _leave(self, question: pb.AcquireRequest, grant: Grant | None) -> None:
        cancel = pb.CancelRequest(
            pool=question.pool,
            tenant=question.tenant,
            request_id=question.request_id,
            usage=usage_message(grant.usage) if grant is not None else None,
        )
        try:
            await self._calls.cancel(cancel, self._loop.time() + LEAVE_S)
        except ClientError as error:
            _log.warning("Request %s was given up, and the scheduler not told: %s", question.request_id, error)

    def _plan_renewal(self, grant: Grant, after_s: float | None = None) -> None:
        if after_s is not None:
            grant._timer = self._loop.call_later(after_s, self._renew_in_background, grant)
            return
        after_s = max(RENEW_S_MIN, (grant._response.renew_after_ms or grant.ttl_ms / 3) / 1000)
        grant._renew_at_s = self._loop.time() + after_s
        self._look_later(grant)

    def _look_later(self, grant: Grant) -> None:
        look_at_s = min(grant._renew_at_s, self._loop.time() + USAGE_LOOK_S)
        grant._timer = self._loop.call_at(look_at_s, self._look, grant)

    def _look(self, grant: Grant) -> None:
        is_due = self._loop.time() >= grant._renew_at_s
        # Over a live session the scheduler renews by itself; what was used is news to it all the same.
        if _output_grew(grant) or (is_due and (self._renews or grant.usage != grant._usage_told)):
            self._renew_in_background(grant)
        elif grant.state is TicketState.OPEN and not self._closed:
            if is_due:
                self._plan_renewal(grant)
            else:
                self._look_later(grant)

    def _first_token_is_here(self, grant: Grant) -> None:
        """Called in any thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._renew_if_held, grant)

    def _renew_if_held(self, grant: Grant) -> None:
        if grant.ticket in self._grants:
            self._renew_in_background(grant)

    def _renew_in_background(self, grant: Grant) -> None:
        if grant._timer is not None:
            grant._timer.cancel()
        if grant._renewing:
            grant._renew_again = True
        elif grant.state is TicketState.OPEN and not self._closed:
            grant._renewing = True
            self._in_background(self._renew(grant), "renew")

    async def _renew(self, grant: Grant) -> None:
        again_s: float | None = None
        try:
            while True:
                grant._renew_again = False
                usage = grant.usage
                question = pb.RenewRequest(ticket=grant.ticket, usage=usage_so_far(grant))
                reply = await self._calls.renew(question, grant._alive_until_s)
                if reply.state == pb.TICKET_STATE_WORKER_LOST:
                    grant._end(TicketState.WORKER_LOST, "the scheduler said so when the ticket was renewed.")
                    return
                if reply.state == pb.TICKET_STATE_CLOSED:
                    grant._end(TicketState.CLOSED, "The ticket had ended when it was renewed.")
                    return
                grant._usage_told = usage
                grant._alive_until_s = self._loop.time() + grant.ttl_ms / 1000
                if not grant._renew_again:
                    break
        except (UnknownTicket, TicketClosed) as error:
            if grant.ticket in self._grants:
                grant._end(TicketState.CLOSED, str(error))
            return
        except ClientError as error:
            _log.warning("The ticket of request %s was not renewed: %s", grant.request_id, error)
            left_s = grant._alive_until_s - self._loop.time()
            if left_s <= RENEW_S_MIN:
                grant._end(TicketState.CLOSED, f"The ticket could not be renewed in its time to live: {error}")
                return
            again_s = min(left_s, RENEW_AGAIN_S)
        finally:
            grant._renewing = False
        if grant.ticket in self._grants:
            self._plan_renewal(grant, again_s)

    def _in_background(self, work: Coroutine[Any, Any, None], name: str) -> "asyncio.Task[None]":
        task = self._loop.create_task(work, name=f"evenhand {name}")
        self._background.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: "asyncio.Task[None]") -> None:
        self._background.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _log.error("A background task failed: %s", task.get_name(), exc_info=task.exception())


def _output_grew(grant: Grant) -> bool:
    """Has the recorded output grown by what matters since it was told last?"""
    usage, told = grant.usage, grant._usage_told
    if usage is None:
        return False
    grown = usage.output_tokens - (told.output_tokens if told is not None else 0)
    return grown > USAGE_GROWTH_MIN * grant.charged_cost
