"""The client for threads: ``AsyncClient`` in a loop of its own, in a thread of its own.

::

    with Client(pool="llama") as client:
        with client.acquire(tokens=prompt, max_output_tokens=128) as grant:
            …

Any number of threads may use one client. Make it after a fork, not before: threads do not survive one.

Always: no wait is without an end, and an interrupt (Ctrl-C) while waiting gives the place back.
"""

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Callable, Coroutine, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from evenhand.client.asynchronous import Acquisition, AsyncClient
from evenhand.client.errors import ClientClosed, DeadlineExceeded, WorkerLost
from evenhand.client.grant import Grant
from evenhand.client.legs import Legs
from evenhand.client.pool_view import PoolView
from evenhand.client.settings import Mode, RetryPolicy
from evenhand.client.worker_loss import is_worker_loss

T = TypeVar("T")

SLACK_S = 5.0
"""A call that should have ended by its own deadline is given up this much later: its loop hangs."""


class Client:
    """A client of one pool, for threads. Takes what ``AsyncClient`` takes."""

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
        """See ``AsyncClient``. Raises ``InvalidConfig``."""
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(_on_loop_error)
        self._thread = threading.Thread(target=_run_loop, args=(self._loop,), name="evenhand client", daemon=True)
        self._thread.start()
        self._closing = threading.Lock()
        self._closed = False
        self._close_wait_s = close_wait_s
        self._settle_wait_s = settle_wait_s

        async def make() -> AsyncClient:
            return AsyncClient(
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

        try:
            self._client = self._wait(make(), SLACK_S)
        except BaseException:
            self._closed = True
            self._stop_loop()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pool(self) -> str:
        return self._client.pool

    def resolve(self, *, tenant: str | None = None, timeout: float = 10.0) -> PoolView:
        """What the scheduler says of the pool, asked afresh."""
        return self._wait(self._client.resolve(tenant=tenant, timeout=timeout), timeout + SLACK_S)

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
    ) -> "BlockingAcquisition":
        """A place on a worker, to be used with ``with``. See ``AsyncClient.acquire``."""
        acquisition = self._client.acquire(
            tokens=tokens,
            block_keys=block_keys,
            prompt_tokens=prompt_tokens,
            max_output_tokens=max_output_tokens,
            expected_output_tokens=expected_output_tokens,
            lora=lora,
            request_id=request_id,
            tenant=tenant,
            user=user,
            traceparent=traceparent,
            excluded_workers=excluded_workers,
            explain=explain,
            timeout=timeout,
        )
        return BlockingAcquisition(self, acquisition, timeout)

    def run(
        self,
        call: Callable[[Grant], T],
        *,
        legs_max: int = 3,
        lost_on: tuple[type[BaseException], ...] = (),
        **request: Any,
    ) -> T:
        """Acquire, call the worker in this thread, settle; after a lost worker, again on another one.

        See ``AsyncClient.run``; here ``call`` is not interrupted where only the scheduler knows of the loss.
        """
        legs = Legs(request, legs_max)
        while True:
            block = self.acquire(**legs.request)
            block.acquisition.keeps_request = not legs.is_last
            try:
                with block as grant:
                    try:
                        return call(grant)
                    except BaseException as error:
                        if isinstance(error, (WorkerLost, *lost_on)) or is_worker_loss(error):
                            grant.worker_failed()
                        raise
            except BaseException as error:
                if not legs.another(block.acquisition.grant, error):
                    self._tell(block.acquisition.give_up)
                    raise

    def close(self) -> None:
        """Settle what is open as cancelled, fail what waits with ``ClientClosed``, disconnect. Idempotent."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
            try:
                closing = asyncio.run_coroutine_threadsafe(self._client.close(), self._loop)
                closing.result(self._close_wait_s + SLACK_S)
            finally:
                self._stop_loop()

    def _wait(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Run in the client's loop and wait; an interrupt cancels the work."""
        if self._closed:
            work.close()
            raise ClientClosed("The client is closed.")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(timeout_s)
        except concurrent.futures.CancelledError as error:
            raise ClientClosed("The client was closed while a call was under way.") from error
        except TimeoutError as error:
            if not future.done():
                raise DeadlineExceeded("The client's own loop did not end a call in time.") from error
            raise
        finally:
            future.cancel()

    def _tell(self, what: Callable[[], object]) -> None:
        """Run in the client's loop without waiting; after closing there is nothing left to be told."""
        if not self._closed:
            self._loop.call_soon_threadsafe(what)

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(SLACK_S)


class BlockingAcquisition:
    """The block of one request on one worker. Use it once, with ``with``."""

    def __init__(self, client: Client, acquisition: Acquisition, timeout_s: float) -> None:
        self._client = client
        self._timeout_s = timeout_s
        self.acquisition = acquisition

    @property
    def request_id(self) -> str:
        return self.acquisition.request_id

    def __enter__(self) -> Grant:
        try:
            return self._client._wait(self.acquisition.__aenter__(), self._timeout_s + SLACK_S)
        except BaseException:
            # An interrupt may come in the very moment of the grant.
            self._client._tell(self.acquisition.abandon)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            leaving = self.acquisition.__aexit__(kind, error, traceback)
            self._client._wait(leaving, self._client._settle_wait_s + SLACK_S)
        except (ClientClosed, DeadlineExceeded):
            return  # closing settles what is open; neither may mask what the block raised


def _on_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    # Where several loops of one process use gRPC, its poller wakes all of them and finds nothing for most.
    if isinstance(context.get("exception"), BlockingIOError):
        return
    loop.default_exception_handler(context)


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    """The client's thread: run until stopped, then end what is left and close."""
    loop.run_forever()

    async def end_tasks() -> None:
        left = asyncio.all_tasks(loop) - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    loop.run_until_complete(end_tasks())
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()
