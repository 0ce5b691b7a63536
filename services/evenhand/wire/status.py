"""Errors as they travel: ``google.rpc.Status`` with ErrorInfo always, RetryInfo and QuotaFailure where they apply.

One place builds them (the daemon) and takes them apart (the SDK), so that a reason has one spelling and one gRPC
code. The table below is the one in ``scheduler.proto``. On a unary call the status rides in the trailing metadata
``grpc-status-details-bin``; on a Session it is the answer itself.

It raises nothing for bytes it cannot read: an error without details is still an error, with an empty reason.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from evenhand.core.facts import RefusalReason

DOMAIN = "evenhand"
STATUS_METADATA_KEY = "grpc-status-details-bin"


RETRY_AFTER_MS_MAX = 315_576_000_000_000
"""The longest a Duration can hold, ten thousand years; what takes longer is told as that."""


class Code(IntEnum):
    """The gRPC codes in use, by their wire number."""

    CANCELLED = 1
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    INTERNAL = 13
    UNAVAILABLE = 14
    UNAUTHENTICATED = 16


CREDENTIAL_MISSING = "CREDENTIAL_MISSING"
CREDENTIAL_UNKNOWN = "CREDENTIAL_UNKNOWN"
TENANT_NOT_ALLOWED = "TENANT_NOT_ALLOWED"
NOT_THE_OWNER = "NOT_THE_OWNER"
UNKNOWN_TICKET = "UNKNOWN_TICKET"
UNKNOWN_POOL = "UNKNOWN_POOL"
TICKET_ALREADY_CLOSED = "TICKET_ALREADY_CLOSED"
DIRECTORY_AWAY = "DIRECTORY_AWAY"
"""The credential cannot be checked because the database is away, or too many are being checked."""
INTERNAL_FAULT = "INTERNAL_FAULT"

CODE_OF_REASON: Mapping[str, Code] = {
    RefusalReason.INVALID.value: Code.INVALID_ARGUMENT,
    RefusalReason.TOO_LARGE.value: Code.INVALID_ARGUMENT,
    CREDENTIAL_MISSING: Code.UNAUTHENTICATED,
    CREDENTIAL_UNKNOWN: Code.UNAUTHENTICATED,
    TENANT_NOT_ALLOWED: Code.PERMISSION_DENIED,
    RefusalReason.TENANT_SUSPENDED.value: Code.PERMISSION_DENIED,
    RefusalReason.UNKNOWN_TENANT.value: Code.PERMISSION_DENIED,
    RefusalReason.QUEUE_FULL.value: Code.RESOURCE_EXHAUSTED,
    RefusalReason.RATE_LIMITED.value: Code.RESOURCE_EXHAUSTED,
    RefusalReason.NO_WORKER.value: Code.UNAVAILABLE,
    NOT_THE_OWNER: Code.UNAVAILABLE,
    DIRECTORY_AWAY: Code.UNAVAILABLE,
    RefusalReason.SHUTTING_DOWN.value: Code.UNAVAILABLE,
    RefusalReason.DEADLINE.value: Code.DEADLINE_EXCEEDED,
    RefusalReason.CANCELLED.value: Code.CANCELLED,
    UNKNOWN_TICKET: Code.NOT_FOUND,
    UNKNOWN_POOL: Code.NOT_FOUND,
    RefusalReason.REQUEST_ID_REUSED.value: Code.ALREADY_EXISTS,
    TICKET_ALREADY_CLOSED: Code.FAILED_PRECONDITION,
    INTERNAL_FAULT: Code.INTERNAL,
}


@dataclass(frozen=True, slots=True)
class WireError:
    """One error, as built by the daemon and as read by the SDK."""

    reason: str
    """ErrorInfo reason; empty where the peer gave none (a proxy, a broken connection)."""
    sentence: str
    code: Code
    retry_after_ms: int | None = None
    quota_subject: str = ""
    """Whose quota was full, for QuotaFailure; empty: no quota."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """ErrorInfo metadata, such as ``outcome`` of a closed ticket."""


def wire_error(
    reason: str,
    sentence: str,
    retry_after_ms: int | None = None,
    quota_subject: str = "",
    metadata: Mapping[str, str] | None = None,
) -> WireError:
    """An error whose code follows from its reason; ``KeyError`` for a reason outside the table."""
    return WireError(reason, sentence, CODE_OF_REASON[reason], retry_after_ms, quota_subject, metadata or {})


def encode_status(error: WireError) -> status_pb2.Status:
    """The error as ``google.rpc.Status``: ErrorInfo first, then RetryInfo and QuotaFailure where set."""
    status = status_pb2.Status(code=int(error.code), message=error.sentence)
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=dict(error.metadata))
    status.details.add().Pack(info)
    if error.retry_after_ms is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMilliseconds(min(max(0, error.retry_after_ms), RETRY_AFTER_MS_MAX))
        status.details.add().Pack(retry)
    if error.quota_subject:
        violation = error_details_pb2.QuotaFailure.Violation(
            subject=error.quota_subject, description=error.sentence
        )
        status.details.add().Pack(error_details_pb2.QuotaFailure(violations=[violation]))
    return status


def decode_status(status: status_pb2.Status) -> WireError:
    """What a status says; details of other domains or kinds are passed over."""
    reason, metadata = "", {}
    retry_after_ms, quota_subject = None, ""
    for detail in status.details:
        name = detail.type_url.rpartition("/")[2]
        try:
            if name == "google.rpc.ErrorInfo":
                info = error_details_pb2.ErrorInfo.FromString(detail.value)
                if info.domain == DOMAIN:
                    reason, metadata = info.reason, dict(info.metadata)
            elif name == "google.rpc.RetryInfo":
                retry = error_details_pb2.RetryInfo.FromString(detail.value)
                retry_after_ms = retry.retry_delay.ToMilliseconds()
            elif name == "google.rpc.QuotaFailure":
                failure = error_details_pb2.QuotaFailure.FromString(detail.value)
                quota_subject = failure.violations[0].subject if failure.violations else ""
        except DecodeError:
            continue
    return WireError(reason, status.message, _known_code(status.code), retry_after_ms, quota_subject, metadata)


def decode_trailers(
    code: int, message: str, trailing_metadata: Iterable[tuple[str, str | bytes]] | None
) -> WireError:
    """The error of a failed unary call from its code, message and trailing metadata (if there are any)."""
    for key, value in trailing_metadata or ():
        if key == STATUS_METADATA_KEY and isinstance(value, bytes):
            try:
                return decode_status(status_pb2.Status.FromString(value))
            except DecodeError:
                break
    return WireError("", message, _known_code(code))


def _known_code(code: int) -> Code:
    """A code outside the table (a proxy's UNKNOWN, say) counts as INTERNAL."""
    try:
        return Code(code)
    except ValueError:
        return Code.INTERNAL
