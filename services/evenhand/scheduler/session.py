"""One Session stream: many calls at once over two directions of messages.

Messages are read in order and each is dealt with before the next is read, without a task of its own; only an
Acquire waits, and its answer goes out when it comes, so answers overtake each other. What goes out is queued and
written by one task.

While the stream lives its tickets are renewed every third of their time to live, and one that ends by itself
(worker lost, time run out) is told as TicketEnded. When the stream breaks, what still waits, and what was granted
but not yet written, is withdrawn; tickets that went out stay open for their time to live, and another stream or
call takes them up by renewing or acquiring again.

Bounds: ``calls_max`` Acquires waiting (one more is refused, so that the Settles behind it are still read), and as
many answers unsent (then reading pauses until the client has read some).
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc

from evenhand.core.facts import LegOutcome, RefusalReason
from evenhand.core.steps import LegEnded
from evenhand.scheduler.actor import OpenTicket, Waiter
from evenhand.scheduler.calls import Calls, deadline_after, usage_in
from evenhand.scheduler.identity import Caller, CallRefused, Identity
from evenhand.wire.generated import scheduler_pb2 as pb
from evenhand.wire.status import UNKNOWN_TICKET, WireError, encode_status, wire_error

BUSY_RETRY_MS = 250
ANSWERS_TOGETHER_MAX = 64
"""Answers in one message, where the client takes several: a write costs far more than an answer."""
RENEWALS_BEFORE_YIELD = 100
"""Tickets renewed before other tasks of the loop have their turn."""


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """Bounds of every session."""

    calls_max: int
    timeout_default_ms: int
    timeout_max_ms: int


@dataclass(slots=True)
class _Outgoing:
    message: pb.SessionResponse
    waiter: Waiter | None
    """Whose grant this is; withdrawn if it cannot be written."""


class Session:
    """The state of one stream; a ``TicketListener`` of the tickets it was given."""

    def __init__(
        self,
        calls: Calls,
        identity: Identity,
        caller: Caller,
        context: Any,
        limits: SessionLimits,
        count_refusal: Callable[[str], None],
    ) -> None:
        self._calls = calls
        self._identity = identity
        self._caller = caller
        self._revision = identity.revision
        self._context = context
        self._limits = limits
        self._count_refusal = count_refusal
        self._waiting: dict[Waiter, int] = {}
        """Acquires without an answer, with their call id."""
        self._outgoing: deque[_Outgoing] = deque()
        self._something_to_write = asyncio.Event()
        self._written = asyncio.Event()
        self._answers_together = False
        self._tickets: dict[str, None] = {}
        """Tokens of tickets that this stream keeps alive."""

    async def run(self) -> None:
        """Serve until the client is done or gone. Raises ``CallRefused`` if its key is revoked or expires."""
        tasks = [asyncio.create_task(part) for part in (self._read(), self._write(), self._renew())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._break_off()

    def ticket_ended(self, entry: OpenTicket, ended: LegEnded) -> None:
        """A ticket of this stream ended. One that a client ended, here or elsewhere, is only forgotten."""
        self._tickets.pop(entry.token, None)
        if ended.outcome not in (LegOutcome.WORKER_LOST, LegOutcome.EXPIRED):
            return
        lost = ended.outcome is LegOutcome.WORKER_LOST
        sentence = (
            f"Worker {entry.ticket.worker_id} was lost; the request waits for another place."
            if lost and ended.request_continues
            else f"The ticket ended: {ended.outcome.value}."
        )
        told = pb.TicketEnded(
            ticket=entry.token,
            request_id=entry.ticket.request_id,
            state=pb.TICKET_STATE_WORKER_LOST if lost else pb.TICKET_STATE_CLOSED,
            sentence=sentence,
        )
        self._send(pb.SessionResponse(ticket_ended=told))

    # ---- reading --------------------------------------------------------------------------------------------

    async def _read(self) -> None:
        """Deal with what the client says, until it has no more to say and has all its answers."""
        read, end = self._context.read, grpc.aio.EOF  # type: ignore[attr-defined]
        while (message := await read()) is not end:
            if self._revision != self._identity.revision or self._caller.expired:
                await self._look_again()
            while len(self._outgoing) >= self._limits.calls_max:
                await self._wait_written()
            try:
                self._deal_with(message)
            except CallRefused as refused:
                self._send_error(message.call_id, refused.error)
        while self._waiting or self._outgoing:
            await self._wait_written()

    def _deal_with(self, message: pb.SessionRequest) -> None:
        if message.answers_together:
            self._answers_together = True
        kind, call_id, caller, calls = message.WhichOneof("call"), message.call_id, self._caller, self._calls
        if kind == "acquire":
            self._acquire(call_id, message.acquire)
        elif kind == "settle":
            settled = calls.settle(caller, message.settle)
            self._tickets.pop(message.settle.ticket, None)
            self._send(pb.SessionResponse(call_id=call_id, settle=settled))
        elif kind == "renew":
            renewed = calls.renew(caller, message.renew.ticket, usage_in(message.renew), self)
            if renewed.state == pb.TICKET_STATE_OPEN:
                self._tickets[message.renew.ticket] = None
            self._send(pb.SessionResponse(call_id=call_id, renew=renewed))
        elif kind == "cancel":
            self._send(pb.SessionResponse(call_id=call_id, cancel=calls.cancel(caller, message.cancel)))
        elif kind == "resolve":
            self._send(pb.SessionResponse(call_id=call_id, resolve=calls.resolve(caller, message.resolve)))
        else:
            raise CallRefused(wire_error(RefusalReason.INVALID.value, "The message holds no call known here."))

    def _acquire(self, call_id: int, wire: pb.AcquireRequest) -> None:
        limits = self._limits
        if len(self._waiting) >= limits.calls_max:
            sentence = f"{limits.calls_max} calls of this session are waiting already."
            raise CallRefused(wire_error(RefusalReason.QUEUE_FULL.value, sentence, BUSY_RETRY_MS, "session"))
        timeout_ms = min(wire.timeout_ms or limits.timeout_default_ms, limits.timeout_max_ms)

        def answer(waiter: Waiter, result: pb.AcquireResponse | WireError) -> None:
            self._waiting.pop(waiter, None)
            if isinstance(result, WireError):
                self._send_error(call_id, result)
                return
            if waiter.placed is not None:
                waiter.placed.listener = self
            self._tickets[result.ticket] = None
            self._send(pb.SessionResponse(call_id=call_id, acquire=result), waiter)

        waiter = self._calls.acquire(self._caller, wire, deadline_after(timeout_ms / 1000), answer)
        if not waiter.answered:
            self._waiting[waiter] = call_id

    async def _look_again(self) -> None:
        """The directory has changed, or the key's time is over: who is calling?"""
        revision = self._identity.revision
        self._caller = await self._identity.still(self._caller)
        self._revision = revision

    # ---- writing --------------------------------------------------------------------------------------------

    def _send(self, message: pb.SessionResponse, waiter: Waiter | None = None) -> None:
        self._outgoing.append(_Outgoing(message, waiter))
        self._something_to_write.set()

    def _send_error(self, call_id: int, error: WireError) -> None:
        self._count_refusal(error.reason)
        self._send(pb.SessionResponse(call_id=call_id, error=encode_status(error)))

    async def _write(self) -> None:
        outgoing, write = self._outgoing, self._context.write
        while True:
            while outgoing:
                count = min(len(outgoing), ANSWERS_TOGETHER_MAX) if self._answers_together else 1
                message = outgoing[0].message
                if count > 1:
                    message.more.extend([outgoing[number].message for number in range(1, count)])
                await write(message)
                for _ in range(count):
                    outgoing.popleft()
                self._written.set()
            self._something_to_write.clear()
            await self._something_to_write.wait()

    async def _wait_written(self) -> None:
        self._written.clear()
        await self._written.wait()

    # ---- tickets --------------------------------------------------------------------------------------------

    async def _renew(self) -> None:
        """Keep the stream's tickets alive, and its credential checked, until cancelled."""
        while True:
            await asyncio.sleep(self._calls.ticket_ttl_ms / 3000)
            if self._revision != self._identity.revision or self._caller.expired:
                await self._look_again()
            for count, token in enumerate(tuple(self._tickets), 1):
                self._renew_one(token)
                if count % RENEWALS_BEFORE_YIELD == 0:
                    await asyncio.sleep(0)

    def _renew_one(self, token: str) -> None:
        if token not in self._tickets:
            return
        listener = self._calls.listener_of(token)
        if listener is not None and listener is not self:
            del self._tickets[token]  # another stream or call has taken it up
            return
        try:
            renewed = self._calls.renew(self._caller, token, None, self)
        except CallRefused as refused:
            if refused.error.reason == UNKNOWN_TICKET:
                del self._tickets[token]
            return
        if renewed.state != pb.TICKET_STATE_OPEN:
            del self._tickets[token]

    def _break_off(self) -> None:
        """Withdraw what waits and what could not be told."""
        unsent = [outgoing.waiter for outgoing in self._outgoing if outgoing.waiter is not None]
        self._outgoing.clear()
        for waiter in (*self._waiting, *unsent):
            self._calls.withdraw(waiter)
        self._waiting.clear()
