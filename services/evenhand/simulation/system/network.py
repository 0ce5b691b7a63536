"""Calls between clients and schedulers: real messages as bytes, delayed, broken and lost as networks do it.

A call goes to the scheduler that answered last, and to the next one when that fails. It breaks when either side
dies; a server learns that its client is gone a moment later, and withdraws what it asked for.
"""

import asyncio
from typing import Any

from evenhand.simulation.system.faults import Fault, Weather
from evenhand.simulation.system.hosts import Aborted, CallContext, SchedulerHost
from evenhand.simulation.system.process import Process
from evenhand.wire.generated import scheduler_pb2 as pb
from evenhand.wire.status import Code, WireError, decode_trailers

WIRE_S = 0.002
BROKEN_S = 0.05
"""How long it takes to find that nobody answers."""

_REQUESTS: dict[str, Any] = {
    "Resolve": (pb.ResolveRequest, pb.ResolveResponse),
    "Acquire": (pb.AcquireRequest, pb.AcquireResponse),
    "Renew": (pb.RenewRequest, pb.RenewResponse),
    "Settle": (pb.SettleRequest, pb.SettleResponse),
    "Cancel": (pb.CancelRequest, pb.CancelResponse),
}


class CallFailed(Exception):
    """A call ended with an error; an empty reason is a broken connection."""

    def __init__(self, error: WireError) -> None:
        super().__init__(error.sentence)
        self.error = error


def broken(sentence: str) -> CallFailed:
    """The connection broke, or there is none."""
    return CallFailed(WireError("", sentence, Code.UNAVAILABLE))


class Network:
    """The addresses of the pool's schedulers, and the way there."""

    def __init__(self, weather: Weather) -> None:
        self.schedulers: list[SchedulerHost] = []
        self.preferred = 0
        """The address that clients try first: the one that last answered as the owner."""
        self._weather = weather

    async def call(self, client: Process, method: str, wire: Any, timeout_s: float) -> Any:
        """The answer; raises ``CallFailed``. The whole call takes no longer than ``timeout_s``."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._call(client, method, wire, timeout_s)
        except TimeoutError:
            raise broken("The call took too long.") from None
        except CallFailed as failed:
            if failed.error.code is Code.UNAVAILABLE and self.schedulers:
                self.preferred = (self.preferred + 1) % len(self.schedulers)
            raise

    async def _call(self, client: Process, method: str, wire: Any, timeout_s: float) -> Any:
        weather = self._weather
        await client.pause(weather.delay_s(WIRE_S))
        host = self.schedulers[self.preferred] if self.schedulers else None
        if host is None or not host.serving or not host.process.alive or weather.strikes(Fault.CALLS_LOST):
            await client.pause(BROKEN_S)
            raise broken("Nobody answers.")
        call = Call(client, host, method, wire.SerializeToString(), timeout_s, weather)
        try:
            return await call.answer
        finally:
            call.hang_up()


class Call:
    """One call under way."""

    def __init__(
        self, client: Process, host: SchedulerHost, method: str, request: bytes, timeout_s: float, weather: Weather
    ) -> None:
        self.answer: asyncio.Future[Any] = client.loop.create_future()
        self._client = client
        self._host = host
        self._weather = weather
        self._method = method
        host.ended.append(self._server_died)
        self._task = host.process.start(self._serve(request, timeout_s))

    def hang_up(self) -> None:
        """The client has its answer, or waits no more."""
        if self._server_died in self._host.ended:
            self._host.ended.remove(self._server_died)
        if not self._task.done():
            delay_s = self._weather.delay_s(WIRE_S)
            self._host.process.later(delay_s, self._task.cancel)

    async def _serve(self, request: bytes, timeout_s: float) -> None:
        of_request, _ = _REQUESTS[self._method]
        context = CallContext(timeout_s)
        try:
            answer = await getattr(self._host.servicer, self._method)(of_request.FromString(request), context)
        except Aborted as aborted:
            error = decode_trailers(aborted.code, aborted.sentence, aborted.trailers)
            self._reply(None, CallFailed(error))
            return
        self._reply(answer.SerializeToString(), None)

    def _reply(self, answer: bytes | None, failed: CallFailed | None) -> None:
        if self._weather.strikes(Fault.ANSWERS_LOST):
            answer, failed = None, broken("The connection broke before the answer came.")
        self._client.later(self._weather.delay_s(WIRE_S), self._arrive, answer, failed)

    def _arrive(self, answer: bytes | None, failed: CallFailed | None) -> None:
        if self.answer.done():
            return
        if answer is None:
            assert failed is not None, "there is an answer or an error"
            self.answer.set_exception(failed)
            return
        _, of_answer = _REQUESTS[self._method]
        self.answer.set_result(of_answer.FromString(answer))

    def _server_died(self) -> None:
        self._client.later(self._weather.delay_s(BROKEN_S), self._arrive, None, broken("The connection broke."))
