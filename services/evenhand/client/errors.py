"""What can go wrong in a client, by whose doing.

::

    EvenhandError                        evenhand.core.errors
    ├── ClientError                      everything this package raises
    │   ├── InvalidConfig                you broke it: an address, a key file, a time limit of this client
    │   ├── InvalidRequest               you broke it: this call can never succeed as it stands
    │   │   ├── RequestTooLarge          no worker of the pool could ever run it
    │   │   └── RequestIdReused          the request id is open for another request
    │   ├── Unauthenticated              you broke it: no API key, or one nobody knows
    │   ├── PermissionDenied             you broke it: the key may not act for this tenant
    │   ├── UnknownPool                  you broke it: the scheduler has no such pool
    │   ├── UnknownTicket                a ticket was never granted there, or has been forgotten
    │   ├── TicketClosed                 a ticket has had its one outcome already
    │   ├── ClientClosed                 you broke it: the client is closed, or closes
    │   ├── UnexpectedAnswer             the peer broke it: an answer outside the contract
    │   ├── Unavailable                  nobody broke it: the same call may succeed later
    │   │   ├── SchedulerUnreachable     no scheduler answers, or the connection to it broke
    │   │   ├── NotTheOwner              this scheduler does not own the pool at present
    │   │   ├── SchedulerShuttingDown
    │   │   ├── NoWorker                 the pool has no worker at present
    │   │   ├── QueueFull                the tenant's queue is full; ``retry_after_s`` says when to come again
    │   │   ├── RateLimited              a limit per minute is used up; ``retry_after_s`` says when there is more
    │   │   └── WorkerLost               the worker of a grant was lost and no leg is left
    │   ├── DeadlineExceeded             the time allowed passed first; also a ``TimeoutError``
    │   └── RequestCancelled             the request was cancelled by another call of the same tenant

Each is also an instance of its branch in ``evenhand.core.errors`` (``InvalidInput``, ``PeerError``,
``Unavailable``). No exception of gRPC passes out of this package; the original is the ``__cause__``.

Always: the message is one sentence. Errors that a scheduler sent carry ``code``, ``reason``, ``metadata`` and,
where it gave one, ``retry_after_s``. Unavailable errors other than QueueFull, RateLimited and WorkerLost are
retried by the client itself within the deadline (``retried``); they are raised once it gives up.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import grpc
from google.protobuf.message import DecodeError
from google.rpc import code_pb2, status_pb2

from evenhand.core import errors as core
from evenhand.wire.status import STATUS_METADATA_KEY, decode_status


@dataclass(frozen=True, slots=True)
class Answer:
    """What a scheduler said, beyond its sentence. Empty where the error was found on this side."""

    code: str = ""
    """Name of the gRPC code, ``UNAVAILABLE`` for instance."""
    reason: str = ""
    """Reason of the ErrorInfo, as ``scheduler.proto`` lists them; empty where no Evenhand scheduler spoke."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    retry_after_s: float | None = None
    quota_subject: str = ""
    """Whose limit was hit, for QueueFull and RateLimited."""


class ClientError(core.EvenhandError):
    """Root of everything this package raises."""

    retried = False
    """Whether the client tries again by itself within the deadline."""

    def __init__(self, sentence: str, answer: Answer | None = None) -> None:
        super().__init__(sentence)
        self.answer = answer or Answer()
        self.attempt = 1
        """Which try of the call ended in this error, from 1."""

    def fresh(self) -> Self:
        """The same error to be raised in another task: an exception object carries one traceback."""
        copy = type(self)(str(self), self.answer)
        copy.__cause__ = self.__cause__
        return copy

    @property
    def code(self) -> str:
        """Name of the gRPC code, empty where the error was found on this side."""
        return self.answer.code

    @property
    def reason(self) -> str:
        """Reason as listed in ``scheduler.proto``, empty where no scheduler spoke."""
        return self.answer.reason

    @property
    def metadata(self) -> Mapping[str, str]:
        """Facts beside the reason."""
        return self.answer.metadata

    @property
    def retry_after_s(self) -> float | None:
        """Seconds after which trying again is sensible, where the scheduler said so."""
        return self.answer.retry_after_s

    @property
    def answered(self) -> bool:
        """True where a scheduler gave this answer itself, so that it holds nothing for the request any more."""
        return bool(self.answer.reason)


class InvalidConfig(ClientError, core.InvalidConfig):
    """A setting of this client is impossible."""


class InvalidRequest(ClientError, core.InvalidRequest):
    """This call can never succeed as it stands."""


class RequestTooLarge(InvalidRequest):
    """No worker of the pool could ever run the request."""


class RequestIdReused(InvalidRequest):
    """The request id is open for another request."""


class Unauthenticated(ClientError, core.InvalidInput):
    """No API key was sent, or one that nobody knows."""


class PermissionDenied(ClientError, core.InvalidInput):
    """The API key may not act for this tenant, or the tenant is not active."""


class UnknownPool(ClientError, core.InvalidInput):
    """The scheduler has no such pool."""


class UnknownTicket(ClientError, core.UnknownTicket):
    """The ticket was never granted there, or has been forgotten."""


class TicketClosed(ClientError, core.InvalidInput):
    """The ticket has had its one outcome already."""


class ClientClosed(ClientError, core.InvalidInput):
    """The client is closed, or closes."""


class UnexpectedAnswer(ClientError, core.PeerError):
    """The peer answered outside the contract."""


class Unavailable(ClientError, core.Unavailable):
    """A part is away; the same call may succeed later."""

    retried = True


class SchedulerUnreachable(Unavailable):
    """No scheduler answers, or the connection to it broke."""


class NotTheOwner(Unavailable):
    """This scheduler does not own the pool at present."""


class SchedulerShuttingDown(Unavailable):
    """This scheduler admits nothing more."""


class NoWorker(Unavailable):
    """The pool has no worker at present."""


class QueueFull(Unavailable):
    """The tenant's queue is full. Not retried by the client: slow down, or come again after ``retry_after_s``."""

    retried = False


class RateLimited(Unavailable):
    """A limit per minute of the tenant, or of its user, is used up; ``metadata`` names it and what is left.

    Not retried by the client: the same request is admitted after ``retry_after_s`` if nothing else took its place.
    """

    retried = False


class WorkerLost(Unavailable):
    """The worker of a grant was lost and no leg is left. Raise it in ``run`` to say that a worker failed."""

    retried = False


class DeadlineExceeded(ClientError, TimeoutError):
    """The time allowed passed first."""


class RequestCancelled(ClientError):
    """The request was cancelled by another call of the same tenant."""


_BY_REASON: Mapping[str, type[ClientError]] = {
    "INVALID_REQUEST": InvalidRequest,
    "REQUEST_TOO_LARGE_FOR_POOL": RequestTooLarge,
    "CREDENTIAL_MISSING": Unauthenticated,
    "CREDENTIAL_UNKNOWN": Unauthenticated,
    "TENANT_NOT_ALLOWED": PermissionDenied,
    "TENANT_NOT_ACTIVE": PermissionDenied,
    "UNKNOWN_TENANT": PermissionDenied,
    "TENANT_QUEUE_FULL": QueueFull,
    "TENANT_RATE_LIMITED": RateLimited,
    "NO_WORKER_IN_POOL": NoWorker,
    "NOT_THE_OWNER": NotTheOwner,
    "SCHEDULER_SHUTTING_DOWN": SchedulerShuttingDown,
    "DEADLINE_PASSED": DeadlineExceeded,
    "CANCELLED_BY_CLIENT": RequestCancelled,
    "UNKNOWN_TICKET": UnknownTicket,
    "UNKNOWN_POOL": UnknownPool,
    "REQUEST_ID_REUSED": RequestIdReused,
    "TICKET_ALREADY_CLOSED": TicketClosed,
}

# Reasons this build does not know fall back to their code: a later scheduler may name a finer one.
_BY_CODE: Mapping[str, type[ClientError]] = {
    "INVALID_ARGUMENT": InvalidRequest,
    "OUT_OF_RANGE": InvalidRequest,
    "UNAUTHENTICATED": Unauthenticated,
    "PERMISSION_DENIED": PermissionDenied,
    "RESOURCE_EXHAUSTED": QueueFull,
    "UNAVAILABLE": Unavailable,
    "DEADLINE_EXCEEDED": DeadlineExceeded,
    "CANCELLED": RequestCancelled,
    "NOT_FOUND": UnknownTicket,
    "ALREADY_EXISTS": RequestIdReused,
    "FAILED_PRECONDITION": TicketClosed,
}

# Without an ErrorInfo it was not a scheduler that spoke but the way to it: a refused connection, a proxy, a reset.
_CONNECTION_CODES = frozenset({"UNAVAILABLE", "CANCELLED", "INTERNAL", "ABORTED"})


def from_status(status: status_pb2.Status, address: str) -> ClientError:
    """The typed error of a ``google.rpc.Status`` that came from ``address``."""
    read = decode_status(status)
    code = _code_name(status.code)
    answer = Answer(
        code=code,
        reason=read.reason,
        metadata=read.metadata,
        retry_after_s=None if read.retry_after_ms is None else max(0, read.retry_after_ms) / 1000,
        quota_subject=read.quota_subject,
    )
    if answer.reason:
        kind = _BY_REASON.get(answer.reason) or _BY_CODE.get(code) or UnexpectedAnswer
        return kind(status.message or f"The scheduler at {address} answered {code} ({answer.reason}).", answer)
    return _without_reason(code, status.message, address, answer)


def from_rpc_error(error: grpc.aio.AioRpcError, address: str) -> ClientError:
    """The typed error of a failed call to ``address``; its ``__cause__`` is the original."""
    status = _status_of(error)
    if status is None:
        code = error.code().name
        typed = _without_reason(code, error.details() or "", address, Answer(code=code))
    else:
        typed = from_status(status, address)
    typed.__cause__ = error
    return typed


def _status_of(error: grpc.aio.AioRpcError) -> status_pb2.Status | None:
    trailers: Any = error.trailing_metadata()
    for key, value in trailers or ():
        if key == STATUS_METADATA_KEY and isinstance(value, bytes):
            try:
                return status_pb2.Status.FromString(value)
            except DecodeError:
                return None
    return None


def _without_reason(code: str, sentence: str, address: str, answer: Answer) -> ClientError:
    said = sentence.strip().rstrip(".") or "no sentence"
    if code in _CONNECTION_CODES:
        return SchedulerUnreachable(f"No scheduler can be reached at {address}: {said}.", answer)
    if code == "DEADLINE_EXCEEDED":
        return DeadlineExceeded(f"The scheduler at {address} did not answer in the time allowed.", answer)
    if code in ("UNAUTHENTICATED", "PERMISSION_DENIED"):
        return _BY_CODE[code](f"The peer at {address} answered {code}: {said}.", answer)
    return UnexpectedAnswer(f"The peer at {address} answered {code}: {said}.", answer)


def _code_name(number: int) -> str:
    try:
        return str(code_pb2.Code.Name(number))
    except ValueError:
        return "UNKNOWN"
