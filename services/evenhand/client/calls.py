"""Calls that survive a scheduler's absence: the same question again, paced, within its deadline.

Asking twice is safe: a request id names one open ticket, renewing and cancelling change nothing the second time,
and a second settle is answered as already closed.

What is tried again: errors whose ``retried`` is true. After each failure the next address is used; after a round
of all addresses the pause is drawn below ``backoff_ms_base · 2^round``, at least what the scheduler asked for.
Bounds: the deadline and ``attempts_max``; whichever comes first, the last error is raised.
"""

import asyncio
import random
from typing import cast

from evenhand.client.errors import ClientError
from evenhand.client.settings import RetryPolicy
from evenhand.client.transport import Question, Reply, Transport
from evenhand.wire.generated import scheduler_pb2 as pb


class Calls:
    """The five calls of the scheduler, typed. Deadlines are in the loop's time."""

    def __init__(self, transport: Transport, retry: RetryPolicy, addresses: int) -> None:
        self._transport = transport
        self._retry = retry
        self._addresses = addresses
        self._random = random.Random()  # noqa: S311  # spreads clients, guards nothing

    async def resolve(self, question: pb.ResolveRequest, deadline: float) -> pb.ResolveResponse:
        return cast("pb.ResolveResponse", await self._ask(question, deadline))

    async def acquire(self, question: pb.AcquireRequest, deadline: float) -> pb.AcquireResponse:
        return cast("pb.AcquireResponse", await self._ask(question, deadline))

    async def renew(self, question: pb.RenewRequest, deadline: float) -> pb.RenewResponse:
        return cast("pb.RenewResponse", await self._ask(question, deadline))

    async def settle(self, question: pb.SettleRequest, deadline: float) -> pb.SettleResponse:
        return cast("pb.SettleResponse", await self._ask(question, deadline))

    async def cancel(self, question: pb.CancelRequest, deadline: float) -> pb.CancelResponse:
        return cast("pb.CancelResponse", await self._ask(question, deadline))

    async def _ask(self, question: Question, deadline: float) -> Reply:
        loop = asyncio.get_running_loop()
        for attempt in range(1, self._retry.attempts_max + 1):
            if isinstance(question, pb.AcquireRequest):
                question.timeout_ms = max(1, int((deadline - loop.time()) * 1000))
            place = self._transport.place
            try:
                return await self._transport.exchange(question, deadline)
            except ClientError as error:
                pause_s = self._pause_s(error, attempt)
                if not error.retried or attempt == self._retry.attempts_max or loop.time() + pause_s >= deadline:
                    error.attempt = attempt
                    raise
            self._transport.move_on(place)
            await asyncio.sleep(pause_s)
        raise AssertionError("attempts_max is at least 1")

    def _pause_s(self, error: ClientError, attempt: int) -> float:
        if attempt % self._addresses:
            return 0.0
        rounds = min(attempt // self._addresses - 1, 16)
        ceiling_ms = min(self._retry.backoff_ms_max, self._retry.backoff_ms_base * 2.0**rounds)
        return max(error.retry_after_s or 0.0, self._random.uniform(0.2, 1.0) * ceiling_ms / 1000)
