"""How one call gets to a scheduler and back: over a stream that carries all calls, or each for itself.

A transport speaks to one address at a time, keeps no call alive and tries nothing twice: that is ``calls``.

Always: a call ends at its deadline; what is raised is a ``ClientError`` (or the caller's own cancellation).
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import grpc

from evenhand.client.errors import (
    ClientClosed,
    ClientError,
    DeadlineExceeded,
    SchedulerUnreachable,
    from_rpc_error,
)
from evenhand.client.settings import Settings
from evenhand.wire.generated import scheduler_pb2 as pb
from evenhand.wire.generated import scheduler_pb2_grpc as pb_grpc

Question = pb.ResolveRequest | pb.AcquireRequest | pb.RenewRequest | pb.SettleRequest | pb.CancelRequest
Reply = pb.ResolveResponse | pb.AcquireResponse | pb.RenewResponse | pb.SettleResponse | pb.CancelResponse

METHOD_OF: dict[type, str] = {
    pb.ResolveRequest: "Resolve",
    pb.AcquireRequest: "Acquire",
    pb.RenewRequest: "Renew",
    pb.SettleRequest: "Settle",
    pb.CancelRequest: "Cancel",
}

# The scheduler ends a wait at the time allowed; its answer may take this much longer to arrive.
DEADLINE_GRACE_S = 0.25


@dataclass(frozen=True, slots=True)
class Watch:
    """What a transport tells and asks its client, unasked."""

    ticket_ended: Callable[[pb.TicketEnded], None]
    connection_lost: Callable[[ClientError], None]
    """The stream that kept tickets alive is gone."""
    anything_open: Callable[[], bool]


class Transport(Protocol):
    """One way of calling: ``UnaryTransport`` or ``session.SessionTransport``."""

    @property
    def place(self) -> int:
        """Counts the moves between addresses; names the address in use."""
        ...

    async def exchange(self, question: Question, deadline: float) -> Reply:
        """Ask once; ``deadline`` is in the loop's time."""
        ...

    def move_on(self, place: int) -> None:
        """Use the next address, if the one of ``place`` is still in use."""
        ...

    async def close(self) -> None: ...


class Peer:
    """The channel to the address in use. Moving on closes it and opens one to the next."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._channel: grpc.aio.Channel | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self.place = 0

    @property
    def address(self) -> str:
        return self._settings.addresses[self.place % len(self._settings.addresses)]

    def stub(self) -> "pb_grpc.SchedulerAsyncStub":
        if self._channel is None:
            self._channel = self._settings.channel(self.address)
        return pb_grpc.SchedulerStub(self._channel)

    def move_on(self, place: int) -> bool:
        """Whether another address is in use now because of this call."""
        if place != self.place or len(self._settings.addresses) == 1:
            return False
        self.place += 1
        if self._channel is not None:
            # Calls still under way on it end as cancelled by the channel and are tried again at the new address.
            task = asyncio.get_running_loop().create_task(self._channel.close(None))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
            self._channel = None
        return True

    async def close(self) -> None:
        for task in tuple(self._closing):
            await task
        if self._channel is not None:
            channel, self._channel = self._channel, None
            await channel.close(None)


class UnaryTransport:
    """Each call for itself; cancelling the caller cancels the call."""

    def __init__(self, settings: Settings) -> None:
        self._peer = Peer(settings)
        self._metadata = settings.metadata()
        self._stub: tuple[int, pb_grpc.SchedulerAsyncStub] | None = None
        self._closed = False

    @property
    def place(self) -> int:
        return self._peer.place

    async def exchange(self, question: Question, deadline: float) -> Reply:
        loop = asyncio.get_running_loop()
        address = self._peer.address
        if self._closed:
            raise ClientClosed("The client is closed.")
        left_s = deadline - loop.time()
        if left_s <= 0:
            raise DeadlineExceeded(f"The time allowed passed before the scheduler at {address} was asked.")
        if self._stub is None or self._stub[0] != self._peer.place:
            self._stub = (self._peer.place, self._peer.stub())
        method: Any = getattr(self._stub[1], METHOD_OF[type(question)])
        call = method(question, timeout=left_s, metadata=self._metadata)
        try:
            reply: Reply = await call
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, address) from error
        except asyncio.CancelledError:
            # A channel that was closed under the call ends it like this; a cancelled caller is cancelling.
            current = asyncio.current_task()
            if current is not None and current.cancelling() == 0:
                raise connection_closed(address) from None
            raise
        return reply

    def move_on(self, place: int) -> None:
        self._peer.move_on(place)

    async def close(self) -> None:
        self._closed = True
        await self._peer.close()


def connection_closed(address: str) -> ClientError:
    """The error of a call whose channel this side gave up."""
    return SchedulerUnreachable(f"The connection to the scheduler at {address} was closed on this side.")
