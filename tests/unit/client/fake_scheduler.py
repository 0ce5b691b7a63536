"""A scripted scheduler on loopback: keeps books like the real one and misbehaves on demand."""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.rpc import status_pb2

from evenhand.core.block_key import KEY_SCHEME
from evenhand.wire.generated import scheduler_pb2 as pb
from evenhand.wire.generated import scheduler_pb2_grpc as pb_grpc
from evenhand.wire.status import STATUS_METADATA_KEY, WireError, encode_status, wire_error

SALT = "5a17"


class Refusal(Exception):
    """What the script answers instead of a result."""

    def __init__(self, status: status_pb2.Status) -> None:
        super().__init__(status.message)
        self.status = status


@dataclass
class OpenTicket:
    request_id: str
    worker_id: str
    leg: int
    stream: object | None


@dataclass
class FakeScheduler(pb_grpc.SchedulerServicer):
    """Books: ``queued`` and ``open`` must be empty when a client has gone."""

    workers: Mapping[str, str] = field(
        default_factory=lambda: {"w0": "127.0.0.1:8000", "w1": "http://127.0.0.1:8001/"}
    )
    required_key: str = ""
    holding: bool = False
    """Acquires wait until ``release``."""
    mute: bool = False
    """Nothing is answered."""
    ttl_ms: int = 30_000
    renew_after_ms: int = 10_000
    charged_cost: float = 0.0
    salt_generation: int = 1
    block_size: int = 4
    key_scheme: str = KEY_SCHEME

    def __post_init__(self) -> None:
        self.errors: dict[str, deque[WireError | status_pb2.Status]] = {}
        self.queued: dict[str, asyncio.Event] = {}
        self.open: dict[str, OpenTicket] = {}
        self.settled: list[pb.SettleRequest] = []
        self.cancelled: list[pb.CancelRequest] = []
        self.renewed: list[pb.RenewRequest] = []
        self.acquired: list[pb.AcquireRequest] = []
        self.resolved = 0
        self.streams: dict[object, asyncio.Queue[pb.SessionResponse | None]] = {}
        self.streams_opened = 0
        self.ended: dict[str, str] = {}
        self.legs: dict[str, int] = {}
        self.lose_next_answer: set[str] = set()
        """Methods whose next result is worked out but never sent: the connection breaks instead."""
        self.gates: dict[str, asyncio.Event] = {}
        """Methods whose results are worked out, and sent once the event is set."""
        self._changed = asyncio.Event()
        self.server: grpc.aio.Server | None = None
        self.port = 0

    # ── script ──────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self, credentials: grpc.ServerCredentials | None = None, port: int = 0) -> None:
        self.server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        pb_grpc.add_SchedulerServicer_to_server(self, self.server)
        address = f"127.0.0.1:{port}"
        if credentials is None:
            self.port = self.server.add_insecure_port(address)
        else:
            self.port = self.server.add_secure_port(address, credentials)
        await self.server.start()

    async def stop(self) -> None:
        if self.server is not None:
            await self.server.stop(None)
            self.server = None

    def fail(self, method: str, *errors: WireError | status_pb2.Status) -> None:
        self.errors.setdefault(method, deque()).extend(errors)

    def release(self) -> None:
        self.holding = False
        for event in self.queued.values():
            event.set()

    def drop_streams(self) -> None:
        for outbox in self.streams.values():
            outbox.put_nowait(None)

    def lose_worker(self, ticket: str, state: "pb.TicketState.ValueType" = pb.TICKET_STATE_WORKER_LOST) -> None:
        """End a ticket unasked and tell its stream."""
        lost = self.open.pop(ticket)
        if state == pb.TICKET_STATE_WORKER_LOST:
            self.queued[lost.request_id] = asyncio.Event()
        self.ended[ticket] = "lost"
        said = pb.TicketEnded(
            ticket=ticket, request_id=lost.request_id, state=state, sentence="The worker does not answer."
        )
        if lost.stream is not None:
            self.streams[lost.stream].put_nowait(pb.SessionResponse(ticket_ended=said))

    async def until(self, condition: Callable[[], object], within_s: float = 5.0) -> None:
        async with asyncio.timeout(within_s):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    # ── books ───────────────────────────────────────────────────────────────────────────────────────────────

    async def handle(self, request: Any, stream: object | None) -> Any:
        method = type(request).__name__.removesuffix("Request").lower()
        self._changed.set()
        while self.mute:
            await asyncio.sleep(3600)
        if self.errors.get(method):
            error = self.errors[method].popleft()
            raise Refusal(encode_status(error) if isinstance(error, WireError) else error)
        try:
            result = await getattr(self, f"_{method}")(request, stream)
        finally:
            self._changed.set()
        if method in self.gates:
            await self.gates[method].wait()
        if method in self.lose_next_answer:
            self.lose_next_answer.discard(method)
            if stream is not None:
                self.streams[stream].put_nowait(None)
            raise Refusal(status_pb2.Status(code=14, message="Socket closed"))
        return result

    async def _resolve(self, request: pb.ResolveRequest, stream: object | None) -> pb.ResolveResponse:
        self.resolved += 1
        return pb.ResolveResponse(
            pool=request.pool,
            model="m",
            block_size_tokens=self.block_size,
            key_scheme=self.key_scheme,
            cache_domain="d",
            salt_generation=self.salt_generation,
            cache_salt=SALT,
            tenant=request.tenant or "acme",
        )

    async def _acquire(self, request: pb.AcquireRequest, stream: object | None) -> pb.AcquireResponse:
        self.acquired.append(request)
        if (known := self._known(request, stream)) is not None:
            return known
        if self.holding:
            event = self.queued.setdefault(request.request_id, asyncio.Event())
            self._changed.set()
            try:
                async with asyncio.timeout(request.timeout_ms / 1000):
                    await event.wait()
            except TimeoutError:
                raise Refusal(encode_status(wire_error("DEADLINE_PASSED", "The deadline passed."))) from None
            finally:
                if self.queued.get(request.request_id) is event:
                    del self.queued[request.request_id]
            if request.request_id in {cancel.request_id for cancel in self.cancelled}:
                raise Refusal(encode_status(wire_error("CANCELLED_BY_CLIENT", "The request was cancelled.")))
            if (known := self._known(request, stream)) is not None:
                return known
        self.queued.pop(request.request_id, None)
        candidates = [worker for worker in self.workers if worker not in request.excluded_workers]
        leg = self.legs[request.request_id] = self.legs.get(request.request_id, 0) + 1
        opened = OpenTicket(request.request_id, (candidates or list(self.workers))[0], leg, stream)
        ticket = f"t-{request.request_id}-{leg}"
        self.open[ticket] = opened
        return self._response(ticket, opened)

    def _known(self, request: pb.AcquireRequest, stream: object | None) -> pb.AcquireResponse | None:
        for ticket, known in self.open.items():
            if known.request_id == request.request_id:
                known.stream = stream
                return self._response(ticket, known)
        return None

    def _response(self, ticket: str, opened: OpenTicket) -> pb.AcquireResponse:
        return pb.AcquireResponse(
            ticket=ticket,
            request_id=opened.request_id,
            worker=pb.WorkerRef(worker_id=opened.worker_id, address=self.workers[opened.worker_id]),
            cache_salt=SALT,
            salt_generation=self.salt_generation,
            predicted_cached_tokens=8,
            ttl_ms=self.ttl_ms,
            renew_after_ms=self.renew_after_ms,
            leg=opened.leg,
            charged_cost=self.charged_cost,
            explanation=pb.Explanation(reason="affinity", sentence="It holds the prefix.", wait_ms=1.5),
        )

    async def _renew(self, request: pb.RenewRequest, stream: object | None) -> pb.RenewResponse:
        self.renewed.append(request)
        if request.ticket in self.open:
            self.open[request.ticket].stream = stream
            return pb.RenewResponse(state=pb.TICKET_STATE_OPEN, ttl_ms=self.ttl_ms)
        if self.ended.get(request.ticket) == "lost":
            return pb.RenewResponse(state=pb.TICKET_STATE_WORKER_LOST)
        raise Refusal(encode_status(wire_error("UNKNOWN_TICKET", "No such ticket.")))

    async def _settle(self, request: pb.SettleRequest, stream: object | None) -> pb.SettleResponse:
        opened = self.open.pop(request.ticket, None)
        if opened is None:
            reason = "TICKET_ALREADY_CLOSED" if request.ticket in self.ended else "UNKNOWN_TICKET"
            raise Refusal(encode_status(wire_error(reason, "The ticket is closed.")))
        self.ended[request.ticket] = "settled"
        self.settled.append(request)
        again = request.outcome == pb.OUTCOME_WORKER_LOST
        if again:
            self.queued[opened.request_id] = asyncio.Event()
        return pb.SettleResponse(correction=-3.0, attained_cost=7.0, request_continues=again)

    async def _cancel(self, request: pb.CancelRequest, stream: object | None) -> pb.CancelResponse:
        self.cancelled.append(request)
        event = self.queued.pop(request.request_id, None)
        if event is not None:
            event.set()
        tickets = [ticket for ticket, known in self.open.items() if known.request_id == request.request_id]
        for ticket in tickets:
            del self.open[ticket]
        return pb.CancelResponse(was_open=event is not None or bool(tickets))

    # ── wire ────────────────────────────────────────────────────────────────────────────────────────────────

    async def _check_key(self, context: "grpc.aio.ServicerContext[Any, Any]") -> None:
        shown = dict(context.invocation_metadata() or ()).get("authorization")
        if self.required_key and shown != f"Bearer {self.required_key}":
            await abort(context, encode_status(wire_error("CREDENTIAL_UNKNOWN", "The API key is unknown.")))

    async def _unary(self, request: Any, context: "grpc.aio.ServicerContext[Any, Any]") -> Any:
        await self._check_key(context)
        try:
            return await self.handle(request, None)
        except Refusal as refusal:
            await abort(context, refusal.status)

    Resolve = Acquire = Renew = Settle = Cancel = _unary

    async def Session(  # type: ignore[override]  # the stubs know generators alone
        self, requests: Any, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> None:
        await self._check_key(context)
        stream = object()
        self.streams_opened += 1
        outbox = self.streams[stream] = asyncio.Queue()
        answers: set[asyncio.Task[None]] = set()

        async def answer(request: pb.SessionRequest) -> None:
            kind = request.WhichOneof("call")
            assert kind is not None
            try:
                result = await self.handle(getattr(request, kind), stream)
                outbox.put_nowait(pb.SessionResponse(call_id=request.call_id, **{kind: result}))
            except Refusal as refusal:
                outbox.put_nowait(pb.SessionResponse(call_id=request.call_id, error=refusal.status))

        async def write() -> None:
            while (message := await outbox.get()) is not None:
                await context.write(message)

        async def read() -> None:
            async for request in requests:
                task = asyncio.create_task(answer(request))
                answers.add(task)
                task.add_done_callback(answers.discard)

        parts = (asyncio.create_task(write()), asyncio.create_task(read()))
        try:
            await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
        finally:
            del self.streams[stream]
            for task in (*parts, *answers):
                task.cancel()
            await asyncio.gather(*parts, *answers, return_exceptions=True)
            self._changed.set()
        if not parts[0].cancelled():  # a scripted break, without a word of Evenhand's
            await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")


async def abort(context: "grpc.aio.ServicerContext[Any, Any]", status: status_pb2.Status) -> None:
    trailers: tuple[tuple[str, bytes], ...] = ()
    if status.details:
        trailers = ((STATUS_METADATA_KEY, status.SerializeToString()),)
    code = next(code for code in grpc.StatusCode if code.value[0] == status.code)
    await context.abort(code, status.message, trailers)
