"""The SDK: ask a scheduler for a place on a worker, call the worker, tell what it cost.

``AsyncClient`` for asyncio, ``Client`` for threads, ``Tokenizer`` for prompts that are text; the errors are drawn
in ``evenhand.client.errors``.
"""

from evenhand.client.asynchronous import Acquisition, AsyncClient
from evenhand.client.errors import (
    ClientClosed,
    ClientError,
    DeadlineExceeded,
    InvalidConfig,
    InvalidRequest,
    NotTheOwner,
    NoWorker,
    PermissionDenied,
    QueueFull,
    RateLimited,
    RequestCancelled,
    RequestIdReused,
    RequestTooLarge,
    SchedulerShuttingDown,
    SchedulerUnreachable,
    TicketClosed,
    Unauthenticated,
    Unavailable,
    UnexpectedAnswer,
    UnknownPool,
    UnknownTicket,
    WorkerLost,
)
from evenhand.client.grant import Candidate, Explanation, Grant, Outcome, Settlement, TicketState
from evenhand.client.openai_worker import openai_kwargs
from evenhand.client.pool_view import PoolView
from evenhand.client.settings import RetryPolicy
from evenhand.client.synchronous import Client
from evenhand.client.tokenizer import Tokenizer
from evenhand.client.usage import Usage
from evenhand.client.worker_loss import is_worker_loss

__all__ = [
    "Acquisition",
    "AsyncClient",
    "Candidate",
    "Client",
    "ClientClosed",
    "ClientError",
    "DeadlineExceeded",
    "Explanation",
    "Grant",
    "InvalidConfig",
    "InvalidRequest",
    "NoWorker",
    "NotTheOwner",
    "Outcome",
    "PermissionDenied",
    "PoolView",
    "QueueFull",
    "RateLimited",
    "RequestCancelled",
    "RequestIdReused",
    "RequestTooLarge",
    "RetryPolicy",
    "SchedulerShuttingDown",
    "SchedulerUnreachable",
    "Settlement",
    "TicketClosed",
    "TicketState",
    "Tokenizer",
    "Unauthenticated",
    "Unavailable",
    "UnexpectedAnswer",
    "UnknownPool",
    "UnknownTicket",
    "Usage",
    "WorkerLost",
    "is_worker_loss",
    "openai_kwargs",
]
