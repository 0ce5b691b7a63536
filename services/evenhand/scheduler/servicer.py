"""``evenhand.v1.Scheduler`` over grpc.aio: who is calling, the call itself, and its error as gRPC says it.

Nothing is decided here. Each unary call costs one task of grpc.aio; Acquire alone waits, and when its call is
cancelled, or its deadline passes, what it asked for is withdrawn. A fault of ours is recorded and answered as
INTERNAL; it never takes the server down.
"""

import asyncio
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import grpc

from evenhand.logs import get_logger
from evenhand.scheduler.actor import Waiter
from evenhand.scheduler.calls import Calls, deadline_after, usage_in
from evenhand.scheduler.identity import Caller, CallRefused, Identity
from evenhand.scheduler.metrics import SchedulerMetrics
from evenhand.scheduler.session import Session, SessionLimits
from evenhand.wire.generated import scheduler_pb2 as pb
from evenhand.wire.generated.scheduler_pb2_grpc import SchedulerServicer
from evenhand.wire.status import INTERNAL_FAULT, STATUS_METADATA_KEY, WireError, encode_status, wire_error

DEADLINE_MARGIN_S = 0.005
"""The scheduler gives up this long before the call's deadline, so that the reason still reaches the client."""

_CODES = {code.value[0]: code for code in grpc.StatusCode}

Request = TypeVar("Request")
Response = TypeVar("Response")

log = get_logger("scheduler.servicer")


class Servicer(SchedulerServicer):
    """The gRPC face of one pool."""

    def __init__(self, calls: Calls, identity: Identity, metrics: SchedulerMetrics, limits: SessionLimits) -> None:
        self._calls = calls
        self._identity = identity
        self._metrics = metrics
        self._limits = limits

    async def Resolve(self, request: pb.ResolveRequest, context: Any) -> pb.ResolveResponse:  # noqa: N802
        return await self._answer(self._calls.resolve, request, context)

    async def Acquire(self, request: pb.AcquireRequest, context: Any) -> pb.AcquireResponse:  # noqa: N802
        try:
            caller = await self._identity.caller_of(context.invocation_metadata())
            result = await self._acquired(caller, request, self._timeout_s(request, context))
        except CallRefused as refused:
            result = refused.error
        except Exception as error:
            result = self._fault("Acquire", error)
        if isinstance(result, WireError):
            await self._abort(context, result)
        return result

    async def Renew(self, request: pb.RenewRequest, context: Any) -> pb.RenewResponse:  # noqa: N802
        return await self._answer(self._renew, request, context)

    async def Settle(self, request: pb.SettleRequest, context: Any) -> pb.SettleResponse:  # noqa: N802
        return await self._answer(self._calls.settle, request, context)

    async def Cancel(self, request: pb.CancelRequest, context: Any) -> pb.CancelResponse:  # noqa: N802
        return await self._answer(self._calls.cancel, request, context)

    async def Session(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override] # noqa: N802
        try:
            caller = await self._identity.caller_of(context.invocation_metadata())
            count_refusal = self._metrics.calls_refused.add
            await Session(self._calls, self._identity, caller, context, self._limits, count_refusal).run()
            return
        except CallRefused as refused:
            error = refused.error
        except Exception as fault:
            error = self._fault("Session", fault)
        await self._abort(context, error)

    # ---- within ---------------------------------------------------------------------------------------------

    def _renew(self, caller: Caller, request: pb.RenewRequest) -> pb.RenewResponse:
        return self._calls.renew(caller, request.ticket, usage_in(request))

    async def _answer(
        self, call: Callable[[Caller, Request], Response], request: Request, context: Any
    ) -> Response:
        """Run one call that does not wait."""
        try:
            return call(await self._identity.caller_of(context.invocation_metadata()), request)
        except CallRefused as refused:
            error = refused.error
        except Exception as fault:
            error = self._fault(type(request).__name__, fault)
        return await self._abort(context, error)

    async def _acquired(
        self, caller: Caller, request: pb.AcquireRequest, timeout_s: float
    ) -> pb.AcquireResponse | WireError:
        answered: asyncio.Future[pb.AcquireResponse | WireError] = asyncio.get_running_loop().create_future()

        def answer(_: Waiter, result: pb.AcquireResponse | WireError) -> None:
            if not answered.done():
                answered.set_result(result)

        waiter = self._calls.acquire(caller, request, deadline_after(timeout_s), answer)
        if answered.done():
            return answered.result()
        try:
            return await answered
        except asyncio.CancelledError:
            self._calls.withdraw(waiter)
            raise

    def _timeout_s(self, request: pb.AcquireRequest, context: Any) -> float:
        """How long an Acquire may wait: its call's deadline or its own limit, whichever is first."""
        limits = self._limits
        limit_s = min(request.timeout_ms or limits.timeout_default_ms, limits.timeout_max_ms) / 1000
        remaining_s: float | None = context.time_remaining()
        if remaining_s is None:
            return limit_s
        if not request.timeout_ms:
            limit_s = limits.timeout_max_ms / 1000
        return max(0.0, min(limit_s, remaining_s - DEADLINE_MARGIN_S))

    async def _abort(self, context: Any, error: WireError) -> NoReturn:
        """End a call with its error, details in the trailing metadata."""
        self._metrics.calls_refused.add(error.reason)
        trailers = ((STATUS_METADATA_KEY, encode_status(error).SerializeToString()),)
        await context.abort(_CODES[int(error.code)], error.sentence, trailers)
        raise AssertionError("abort raises")

    def _fault(self, call: str, error: Exception) -> WireError:
        """Record a fault of ours."""
        self._metrics.faults.add(call)
        log.error("call_fault", call=call, exc_info=error)
        return wire_error(INTERNAL_FAULT, "The scheduler made a mistake; it has been recorded.")
