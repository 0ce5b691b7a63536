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
import os
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from evenhand.client.calls import Calls
from evenhand.client.errors import ClientClosed, ClientError, InvalidRequest, WorkerLost
from evenhand.client.grant import Grant, TicketState
from evenhand.client.held import HeldTickets
from evenhand.client.legs import Legs, outcome_of
from evenhand.client.pool_view import PoolView, PoolViews, view_of
from evenhand.client.prompt import Prompt, acquire_request, prompt_of
from evenhand.client.session import SessionTransport
from evenhand.client.settings import Mode, RetryPolicy, Settings, check_seconds, settings
from evenhand.client.transport import Transport, UnaryTransport, Watch
from evenhand.client.worker_loss import is_worker_loss
from evenhand.wire.generated import scheduler_pb2 as pb

T = TypeVar("T")


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
        ``tenant``: for a gateway's key, which may act for others, default ``EVENHAND_TENANT``; a tenant's own key
        needs none.
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
        self._waiting: dict[int, pb.AcquireRequest] = {}
        self._views = PoolViews()
        self._closed = False
        watch = Watch(
            ticket_ended=lambda ended: self._held.ticket_ended(ended),
            connection_lost=lambda error: self._held.connection_lost(error),
            anything_open=lambda: len(self._held) > 0,
        )
        self._transport: Transport = (
            SessionTransport(self._settings, watch) if mode == "session" else UnaryTransport(self._settings)
        )
        self._calls = Calls(self._transport, self._settings.retry, len(self._settings.addresses))
        self._held = HeldTickets(self._calls, renews=mode == "unary")

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
        try:
            await self._held.drain(tuple(self._waiting.values()), self._settings.close_wait_s)
        finally:
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
            if not (isinstance(error, ClientError) and error.answered) and not self._waits_elsewhere(question):
                self._held.leave(question, None)
            raise
        finally:
            del self._waiting[id(question)]
        grant = Grant(response)
        if self._has_closed():
            self._held.leave(question, None)
            raise ClientClosed("The client was closed while a request waited.")
        self._views.seen_generation(question.tenant, response.salt_generation)
        self._held.hold(grant)
        return grant

    # Its own.

    def _waits_elsewhere(self, question: pb.AcquireRequest) -> bool:
        """Whether another block of this client waits under the same id; the request is then its own."""
        key = (question.tenant, question.request_id)
        others = (other for other in self._waiting.values() if other is not question)
        return any((other.tenant, other.request_id) == key for other in others)

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
        settling = self._client._held.settle(grant, outcome_of(grant, error))
        settling.add_done_callback(lambda _: self._after_settling(grant))
        return settling

    def _after_settling(self, grant: Grant) -> None:
        settlement = grant.settlement
        if settlement is not None and settlement.request_continues and not self.keeps_request:
            self._client._held.leave(self._question, grant)
