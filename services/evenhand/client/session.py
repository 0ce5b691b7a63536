"""All calls of a client over one stream.

::

    ask ──▶ outbox ──▶ writer task ──▶ stream ──▶ reader task ──▶ the asker's future
                                                       └────────▶ ticket_ended, unasked

Why a writer task of its own: gRPC ends a stream whose writer is cancelled, and callers are cancelled all the
time. A watch task asks a silent stream whether it lives, because a peer that vanished without a word would
otherwise be noticed by nobody.

Always: a broken stream fails every call under way on it with the same typed error, once, and says so to the
client; the next call opens another stream. The outbox is bounded by ``OUTBOX_MAX``.
"""

import asyncio
from typing import Any

import grpc

from evenhand.client.errors import (
    ClientClosed,
    ClientError,
    DeadlineExceeded,
    SchedulerUnreachable,
    Unavailable,
    UnexpectedAnswer,
    from_rpc_error,
    from_status,
)
from evenhand.client.settings import Settings
from evenhand.client.transport import DEADLINE_GRACE_S, METHOD_OF, Peer, Question, Reply, Watch
from evenhand.wire.generated import scheduler_pb2 as pb
from evenhand.wire.generated import scheduler_pb2_grpc as pb_grpc

OUTBOX_MAX = 8_192
HEARTBEAT_ANSWER_S = 5.0

_FIELD_OF: dict[type, str] = {kind: method.lower() for kind, method in METHOD_OF.items()}


class Stream:
    """One life of the stream. Fails once, for good."""

    def __init__(self, stub: "pb_grpc.SchedulerAsyncStub", address: str, settings: Settings, watch: Watch) -> None:
        self._address = address
        self._settings = settings
        self._watch = watch
        self._loop = asyncio.get_running_loop()
        session: Any = stub.Session
        self._call = session(metadata=settings.metadata())
        self._outbox: asyncio.Queue[pb.SessionRequest] = asyncio.Queue(OUTBOX_MAX)
        self._pending: dict[int, asyncio.Future[Reply]] = {}
        self._call_id = 0
        self._heard_at = self._loop.time()
        self.failed: ClientError | None = None
        self._tasks = tuple(
            self._loop.create_task(part, name=f"evenhand session {name}")
            for name, part in (
                ("reader", self._read()),
                ("writer", self._write()),
                ("heartbeat", self._heartbeat()),
            )
        )

    async def ask(self, question: Question, deadline: float) -> Reply:
        """Ask and wait for the answer; raises the answer's error, the stream's, or ``DeadlineExceeded``."""
        if self.failed is not None:
            raise self.failed.fresh()
        self._call_id += 1
        call_id = self._call_id
        request = pb.SessionRequest(call_id=call_id, **{_FIELD_OF[type(question)]: question})  # type: ignore[arg-type]
        request.answers_together = call_id == 1  # said once a stream: one message may bring several answers
        future: asyncio.Future[Reply] = self._loop.create_future()
        self._pending[call_id] = future
        try:
            self._outbox.put_nowait(request)
            async with asyncio.timeout_at(deadline):
                return await future
        except asyncio.QueueFull:
            raise Unavailable(f"More than {OUTBOX_MAX} calls wait to be sent to {self._address}.") from None
        except TimeoutError as error:
            if isinstance(error, ClientError):
                raise
            sentence = f"The scheduler at {self._address} did not answer in the time allowed."
            raise DeadlineExceeded(sentence) from None
        finally:
            del self._pending[call_id]
            if future.done() and not future.cancelled():
                future.exception()  # a caller that left in the same moment must not make the loop complain

    async def _read(self) -> None:
        try:
            async for response in self._call:
                self._heard_at = self._loop.time()
                self._take(response)
                for further in response.more:
                    self._take(further)
        except grpc.aio.AioRpcError as error:
            self.fail(from_rpc_error(error, self._address))
        else:
            self.fail(SchedulerUnreachable(f"The scheduler at {self._address} ended the session."))

    def _take(self, response: pb.SessionResponse) -> None:
        kind = response.WhichOneof("result")
        if kind == "ticket_ended":
            self._watch.ticket_ended(response.ticket_ended)
            return
        if kind == "error" and response.call_id == 0:
            self.fail(from_status(response.error, self._address))
            return
        future = self._pending.get(response.call_id)
        if future is None or future.done():
            return  # its caller has gone
        if kind is None:
            future.set_exception(UnexpectedAnswer(f"The peer at {self._address} sent an answer without a result."))
        elif kind == "error":
            future.set_exception(from_status(response.error, self._address))
        else:
            future.set_result(getattr(response, kind))

    async def _write(self) -> None:
        try:
            while True:
                await self._call.write(await self._outbox.get())
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return  # the reader sees the same end and knows its cause

    async def _heartbeat(self) -> None:
        probe = pb.ResolveRequest(pool=self._settings.pool, tenant=self._settings.tenant)
        while True:
            await asyncio.sleep(self._settings.heartbeat_s)
            silent_s = self._loop.time() - self._heard_at
            if silent_s < self._settings.heartbeat_s or not (self._pending or self._watch.anything_open()):
                continue
            answer_s = min(HEARTBEAT_ANSWER_S, self._settings.heartbeat_s)
            try:
                await self.ask(probe, self._loop.time() + answer_s)
            except DeadlineExceeded:
                sentence = f"The scheduler at {self._address} was silent for {silent_s + answer_s:.1f} s."
                self.fail(SchedulerUnreachable(sentence))
                return
            except ClientError:
                continue  # an error is an answer too; the end of the stream is the reader's to tell

    def fail(self, error: ClientError) -> None:
        """End this stream: fail what is under way on it and tell the client. Only the first reason counts."""
        if self.failed is not None:
            return
        self.failed = error
        for future in self._pending.values():
            if not future.done():
                future.set_exception(error.fresh())
        self._call.cancel()
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()
        self._watch.connection_lost(error)

    async def close(self) -> None:
        """Say goodbye; what is under way fails with ``ClientClosed``."""
        if self.failed is None:
            self.failed = ClientClosed("The client is closed.")
            for future in self._pending.values():
                if not future.done():
                    future.set_exception(self.failed.fresh())
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._call.cancel()


class SessionTransport:
    """Opens a stream when there is something to say, and another when that one broke."""

    def __init__(self, settings: Settings, watch: Watch) -> None:
        self._settings = settings
        self._peer = Peer(settings)
        self._watch = watch
        self._stream: Stream | None = None
        self._closed = False

    @property
    def place(self) -> int:
        return self._peer.place

    async def exchange(self, question: Question, deadline: float) -> Reply:
        if self._closed:
            raise ClientClosed("The client is closed.")
        if self._stream is None or self._stream.failed is not None:
            self._stream = Stream(self._peer.stub(), self._peer.address, self._settings, self._watch)
        wait_until = deadline + DEADLINE_GRACE_S if isinstance(question, pb.AcquireRequest) else deadline
        return await self._stream.ask(question, wait_until)

    def move_on(self, place: int) -> None:
        address = self._peer.address
        if self._peer.move_on(place) and self._stream is not None:
            self._stream.fail(SchedulerUnreachable(f"The client moved on from the scheduler at {address}."))

    async def close(self) -> None:
        self._closed = True
        if self._stream is not None:
            await self._stream.close()
        await self._peer.close()
