"""The client for asyncio.

::

    async with AsyncClient(pool="llama") as client:
        async with client.acquire(tokens=prompt, max_output_tokens=128) as grant:
            …  call the worker at grant.base_url with grant.cache_salt
            grant.record_usage(response.usage)

Always, whatever happens in the block or around it:

- leaving a block settles its ticket once, with what was recorded; an exception or a cancellation settles it as
  failed or cancelled and passes on unchanged;
- who is cancelled while waiting leaves the queue, and a place granted in that moment is given back;
- a broken connection is repaired within the deadlines: waiting requests are asked for again under the same id,
  open tickets are renewed over the next connection; what cannot be repaired is raised, or stands in
  ``grant.settlement`` and ``grant.state`` and in the log ``evenhand.client``;
- leaving waits at most ``settle_wait_s``, closing at most ``close_wait_s``; a ticket that could not be settled by
  then runs out by itself and keeps its charge.

It does not speak to workers: that is the caller's client library.
"""

import asyncio
import logging
import os
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from evenhand.client.calls import Calls
from evenhand.client.errors import (
    ClientClosed,
    ClientError,
    InvalidRequest,
    TicketClosed,
    UnknownTicket,
    WorkerLost,
)
from evenhand.client.grant import (
    Grant,
    Outcome,
    Settlement,
    TicketState,
    usage_message,
)
from evenhand.client.pool_view import PoolView, PoolViews, view_of
from evenhand.client.prompt import Prompt, acquire_request, prompt_of
from evenhand.client.session import SessionTransport
from evenhand.client.settings import Mode, RetryPolicy, Settings, check_seconds, settings
from evenhand.client.transport import Transport, UnaryTransport, Watch
from evenhand.client.worker_loss import is_worker_loss
from evenhand.wire.generated import scheduler_pb2 as pb

T = TypeVar("T")

LEAVE_S = 10.0
"""How long the background tries to tell the scheduler that a request was given up."""
RENEW_S_MIN = 0.05
PROMPT_TOKENS_MAX = 2**32 - 1

_log = logging.getLogger("evenhand.client")
_log.addHandler(logging.NullHandler())


class AsyncClient:
    """A client of one pool. Make it in a running loop, use it in that loop, and close it."""

    def __init__(
        self,
        address: str | Sequence[str] | None = None,
        *,
        pool: str,
        api_key: str | None = None,
        tenant: str | None = None,
        ca_file: str | os.PathLike[str] | None = None,
        tls: bool | None = None,
        tls_server_name: str = "",
        mode: Mode = "session",
        retry: RetryPolicy | None = None,
        settle_wait_s: float = 2.0,
        close_wait_s: float = 5.0,
        heartbeat_s: float = 10.0,
    ) -> None:
        """Connects when it is first used.

        ``address``: ``host:port``, several as a list or separated by commas (the owner of the pool and its
        standby); default ``EVENHAND_ADDRESS``, then ``127.0.0.1:7077``. ``api_key``: default ``EVENHAND_API_KEY``.
        ``tenant``: for a gateway's key, which may act for others; a tenant's own key needs none.
        ``ca_file``: default ``EVENHAND_CA_FILE``; ``tls``: by default on with a CA file and beyond this machine.
        ``mode``: ``session`` carries all calls over one stream, ``unary`` makes each call for itself.
        Raises ``InvalidConfig``.
        """
        self._settings: Settings = settings(
            address,
            pool=pool,
            api_key=api_key,
            tenant=tenant,
            ca_file=ca_file,
            tls=tls,
            tls_server_name=tls_server_name,
            mode=mode,
            retry=retry,
            settle_wait_s=settle_wait_s,
            close_wait_s=close_wait_s,
            heartbeat_s=heartbeat_s,
        )
        self._loop = asyncio.get_running_loop()
        self._grants: dict[str, Grant] = {}
        self._waiting: dict[int, pb.AcquireRequest] = {}
        self._background: set[asyncio.Task[Any]] = set()
        self._views = PoolViews()
        self._closed = False
        watch = Watch(self._ticket_ended, self._connection_lost, lambda: bool(self._grants))
        self._transport: Transport = (
            SessionTransport(self._settings, watch) if mode == "session" else UnaryTransport(self._settings)
        )
        self._calls = Calls(self._transport, self._settings.retry, len(self._settings.addresses))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def pool(self) -> str:
        return self._settings.pool

    async def resolve(self, *, tenant: str | None = None, timeout: float = 10.0) -> PoolView:  # noqa: ASYNC109
        """What the scheduler says of the pool, asked afresh."""
        check_seconds("timeout", timeout, InvalidRequest)
        return await self._resolve(self._tenant(tenant), self._loop.time() + timeout)

    def acquire(
        self,
        *,
        tokens: Sequence[int] | None = None,
        block_keys: Sequence[int] | bytes | None = None,
        prompt_tokens: int | None = None,
        max_output_tokens: int,
        expected_output_tokens: int = 0,
        lora: str = "",
        request_id: str | None = None,
        tenant: str | None = None,
        user: str = "",
        traceparent: str = "",
        excluded_workers: Sequence[str] = (),
        explain: bool = False,
        timeout: float = 30.0,
    ) -> "Acquisition":
        """A place on a worker, to be used with ``async with``.

        The prompt is given as ``tokens`` (ids; keys are computed here and token ids never leave this process), as
        ``block_keys`` with ``prompt_tokens``, or as ``prompt_tokens`` alone, which is scheduled without affinity.
        ``lora``: the adapter's name, as the engine knows it. ``request_id``: chosen if absent; the same id while
        it is open means the same ticket. ``explain``: the explanation lists the candidates too. ``timeout``:
        longest wait for the place, in seconds, retries included.
        Raises ``InvalidRequest`` at once; entering raises any other ``ClientError``.
        """
        prompt = prompt_of(tokens, block_keys, prompt_tokens)
        question = acquire_request(
            prompt,
            pool=self._settings.pool,
            tenant=self._tenant(tenant),
            request_id=request_id,
            max_output_tokens=max_output_tokens,
            expected_output_tokens=expected_output_tokens,
            user=user,
            traceparent=traceparent,
            excluded_workers=excluded_workers,
            explain=explain,
            timeout_s=timeout,
        )
        return Acquisition(self, question, prompt, lora, timeout)

    async def run(
        self,
        call: Callable[[Grant], Awaitable[T]],
        *,
        legs_max: int = 3,
        lost_on: tuple[type[BaseException], ...] = (),
        **request: Any,
    ) -> T:
        """Acquire, call the worker, settle; after a lost worker, again on another one.

        ``call`` gets the grant, speaks to the worker and records the usage. It is tried again, with a new grant of
        the same request, where it raises ``WorkerLost``, one of ``lost_on`` or what ``is_worker_loss`` takes for a
        broken connection, or where the scheduler says that the worker is gone (``call`` is then cancelled). At
        most ``legs_max`` legs; the last one's exception is raised, or ``WorkerLost``. Whatever ``call`` has handed
        on by then, it hands on again. ``request`` is what ``acquire`` takes; its ``timeout`` is for each leg.
        """
        if legs_max < 1:
            raise InvalidRequest(f"legs_max must be at least 1, not {legs_max}.")
        legs = Legs(request, legs_max)
        while True:
            acquisition = self.acquire(**legs.request)
            acquisition.keeps_request = not legs.is_last
            try:
                async with acquisition as grant:
                    return await self._one_leg(call, grant, lost_on)
            except BaseException as error:
                if not legs.another(acquisition.grant, error):
                    acquisition.give_up()
                    raise

    async def close(self) -> None:
        """Settle what is open as cancelled, fail what waits with ``ClientClosed``, and disconnect. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for question in tuple(self._waiting.values()):
            self.leave_in_background(question, None)
        for grant in tuple(self._grants.values()):
            self.settle_in_background(grant, Outcome.CANCELLED)
        deadline = self._loop.time() + self._settings.close_wait_s
        try:
            # The end of one task may start another (a settled leg whose request is given up), so look again.
            while self._background and (left_s := deadline - self._loop.time()) > 0:
                await asyncio.wait(self._background, timeout=left_s)
                await asyncio.sleep(0)
        finally:
            for task in tuple(self._background):
                task.cancel()
            await self._transport.close()

    # What Acquisition needs of its client.

    async def grant_for(self, question: pb.AcquireRequest, prompt: Prompt, lora: str, timeout_s: float) -> Grant:
        """Wait for a place; whoever leaves early leaves nothing behind."""
        if self._closed:
            raise ClientClosed("The client is closed.")
        deadline = self._loop.time() + timeout_s
        if prompt.tokens is not None:
            view = self._views.get(question.tenant) or await self._resolve(question.tenant, deadline)
            question.block_keys = view.packed_keys(prompt.tokens, lora)
        self._waiting[id(question)] = question
        try:
            response = await self._calls.acquire(question, deadline)
        except BaseException as error:
            if isinstance(error, InvalidRequest):
                self._views.forget(question.tenant)
            if self._has_closed() and isinstance(error, ClientError):
                raise ClientClosed("The client was closed while a request waited.") from error
            if not (isinstance(error, ClientError) and error.answered):
                self.leave_in_background(question, None)
            raise
        finally:
            del self._waiting[id(question)]
        grant = Grant(response)
        if self._has_closed():
            self.leave_in_background(question, None)
            raise ClientClosed("The client was closed while a request waited.")
        self._views.seen_generation(question.tenant, response.salt_generation)
        self._grants[grant.ticket] = grant
        self._plan_renewal(grant)
        return grant

    def settle_in_background(self, grant: Grant, outcome: Outcome) -> "asyncio.Task[None]":
        """Start telling the scheduler how the leg ended. Only once for a grant."""
        self._grants.pop(grant.ticket, None)
        if grant._timer is not None:
            grant._timer.cancel()
        return self._in_background(self._settle(grant, outcome), "settle")

    def leave_in_background(self, question: pb.AcquireRequest, grant: Grant | None) -> None:
        """Start telling the scheduler that the request, waiting or granted, is given up."""
        self._in_background(self._leave(question, grant), "cancel")

    # Its own.

    def _has_closed(self) -> bool:
        return self._closed

    def _tenant(self, tenant: str | None) -> str:
        return self._settings.tenant if tenant is None else tenant

    async def _resolve(self, tenant: str, deadline: float) -> PoolView:
        question = pb.ResolveRequest(pool=self._settings.pool, tenant=tenant)
        view = view_of(await self._calls.resolve(question, deadline))
        self._views.put(tenant, view)
        return view

    async def _one_leg(
        self, call: Callable[[Grant], Awaitable[T]], grant: Grant, lost_on: tuple[type[BaseException], ...]
    ) -> T:
        async def called() -> T:
            return await call(grant)

        calling = self._loop.create_task(called(), name="evenhand call")
        ended = self._loop.create_task(grant.wait_ended(), name="evenhand ended")
        try:
            await asyncio.wait((calling, ended), return_when=asyncio.FIRST_COMPLETED)
            if not calling.done() and grant.state is TicketState.WORKER_LOST:
                raise WorkerLost(f"Worker {grant.worker_id} was lost: {grant.end_sentence}")
            return await calling
        except BaseException as error:
            if isinstance(error, (WorkerLost, *lost_on)) or is_worker_loss(error):
                grant.worker_failed()
            raise
        finally:
            ended.cancel()
            if not calling.done():
                calling.cancel()
                await asyncio.wait((calling,), timeout=self._settings.settle_wait_s)
            if calling.done() and not calling.cancelled():
                calling.exception()  # the reason this leg ends is raised already

    async def _settle(self, grant: Grant, outcome: Outcome) -> None:
        if grant.state is TicketState.WORKER_LOST:
            sentence = f"The leg was over before: {grant.end_sentence}"
            grant._settlement = Settlement(Outcome.WORKER_LOST, False, sentence, request_continues=True)
            return
        question = pb.SettleRequest(
            ticket=grant.ticket, outcome=outcome.value, usage=usage_message(grant.usage), ttft_ms=grant._ttft_ms
        )
        try:
            reply = await self._calls.settle(question, self._loop.time() + max(1.0, grant.ttl_ms / 1000))
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

    def _plan_renewal(self, grant: Grant) -> None:
        after_s = max(RENEW_S_MIN, (grant._response.renew_after_ms or grant.ttl_ms / 3) / 1000)
        grant._timer = self._loop.call_later(after_s, self._renewal_due, grant)

    def _renewal_due(self, grant: Grant) -> None:
        # Over a live session the scheduler renews by itself; what was used is news to it all the same.
        if self._settings.mode == "unary" or grant.usage != grant._usage_told:
            self._renew_in_background(grant)
        elif grant.state is TicketState.OPEN and not self._closed:
            self._plan_renewal(grant)

    def _renew_in_background(self, grant: Grant) -> None:
        if grant._timer is not None:
            grant._timer.cancel()
        if grant._renewing:
            grant._renew_again = True
        elif grant.state is TicketState.OPEN and not self._closed:
            grant._renewing = True
            self._in_background(self._renew(grant), "renew")

    async def _renew(self, grant: Grant) -> None:
        try:
            while True:
                grant._renew_again = False
                usage = grant.usage
                question = pb.RenewRequest(ticket=grant.ticket, usage=usage_message(usage))
                reply = await self._calls.renew(question, self._loop.time() + max(1.0, grant.ttl_ms / 1000))
                if reply.state == pb.TICKET_STATE_WORKER_LOST:
                    grant._end(TicketState.WORKER_LOST, "the scheduler said so when the ticket was renewed.")
                    return
                if reply.state == pb.TICKET_STATE_CLOSED:
                    grant._end(TicketState.CLOSED, "The ticket had ended when it was renewed.")
                    return
                grant._usage_told = usage
                if not grant._renew_again:
                    break
        except (UnknownTicket, TicketClosed) as error:
            if grant.ticket in self._grants:
                grant._end(TicketState.CLOSED, str(error))
            return
        except ClientError as error:
            _log.warning("The ticket of request %s was not renewed: %s", grant.request_id, error)
            if error.retried:
                grant._end(TicketState.CLOSED, f"The ticket could not be renewed in its time to live: {error}")
                return
        finally:
            grant._renewing = False
        if grant.ticket in self._grants:
            self._plan_renewal(grant)

    def _ticket_ended(self, ended: pb.TicketEnded) -> None:
        grant = self._grants.get(ended.ticket)
        if grant is not None:
            lost = ended.state == pb.TICKET_STATE_WORKER_LOST
            grant._end(TicketState.WORKER_LOST if lost else TicketState.CLOSED, ended.sentence)

    def _connection_lost(self, error: ClientError) -> None:
        _log.info("The session broke with %d open tickets: %s", len(self._grants), error)
        for grant in tuple(self._grants.values()):
            self._renew_in_background(grant)

    def _in_background(self, work: Coroutine[Any, Any, None], name: str) -> "asyncio.Task[None]":
        task = self._loop.create_task(work, name=f"evenhand {name}")
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task


class Acquisition:
    """The block of one request on one worker. Use it once, with ``async with``."""

    def __init__(
        self,
        client: AsyncClient,
        question: pb.AcquireRequest,
        prompt: Prompt,
        lora: str,
        timeout_s: float,
    ) -> None:
        self._client = client
        self._question = question
        self._prompt = prompt
        self._lora = lora
        self._timeout_s = timeout_s
        self._entered = False
        self._left = False
        self.grant: Grant | None = None
        self.keeps_request = False
        """True: after a lost worker the request stays with the scheduler, for another acquire with its id."""

    @property
    def request_id(self) -> str:
        return self._question.request_id

    async def __aenter__(self) -> Grant:
        if self._entered:
            raise ClientClosed("An acquisition is entered once; call acquire again.")
        self._entered = True
        self.grant = await self._client.grant_for(self._question, self._prompt, self._lora, self._timeout_s)
        return self.grant

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        settling = self._leave(error)
        if settling is not None:
            await asyncio.wait((settling,), timeout=self._client._settings.settle_wait_s)

    def abandon(self) -> None:
        """Give the place back without waiting; harmless if there is none or the block was left."""
        self._leave(asyncio.CancelledError())

    def give_up(self) -> None:
        """No other leg will follow: a request that still waits for one is cancelled."""
        if self.keeps_request:
            self.keeps_request = False
            if self.grant is not None:
                self._after_settling(self.grant)

    def _leave(self, error: BaseException | None) -> "asyncio.Task[None] | None":
        grant = self.grant
        if grant is None or self._left or self._client._closed:
            return None
        self._left = True
        settling = self._client.settle_in_background(grant, outcome_of(grant, error))
        settling.add_done_callback(lambda _: self._after_settling(grant))
        return settling

    def _after_settling(self, grant: Grant) -> None:
        settlement = grant.settlement
        if settlement is not None and settlement.request_continues and not self.keeps_request:
            self._client.leave_in_background(self._question, grant)


class Legs:
    """The legs of one request in ``run``: what to ask for next, and whether to ask at all."""

    def __init__(self, request: dict[str, Any], legs_max: int) -> None:
        self.request = {"request_id": uuid.uuid4().hex, **request}
        self._left = legs_max - 1

    @property
    def is_last(self) -> bool:
        return self._left == 0

    def another(self, grant: Grant | None, error: BaseException) -> bool:
        """Whether the leg that ended in ``error`` is followed by another one."""
        lost = grant is not None and (grant._worker_failed or grant.state is TicketState.WORKER_LOST)
        if grant is None or not lost or self.is_last or not isinstance(error, Exception):
            return False
        self._left -= 1
        excluded = (*self.request.get("excluded_workers", ()), grant.worker_id)
        self.request = {**self.request, "excluded_workers": excluded}
        return True


def outcome_of(grant: Grant, error: BaseException | None) -> Outcome:
    """How a leg ended whose block was left with ``error``."""
    if grant._worker_failed:
        return Outcome.WORKER_LOST
    if error is None:
        return Outcome.COMPLETED
    return Outcome.FAILED if isinstance(error, Exception) else Outcome.CANCELLED
