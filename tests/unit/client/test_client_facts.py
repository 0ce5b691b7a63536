"""Usage, errors and lost workers: what is read from others, without a connection."""

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from google.rpc import code_pb2, status_pb2

from evenhand.client import (
    Grant,
    InvalidRequest,
    SchedulerUnreachable,
    Unavailable,
    UnexpectedAnswer,
    Usage,
    WorkerLost,
    errors,
    is_worker_loss,
    openai_kwargs,
)
from evenhand.client.usage import usage_of
from evenhand.core import errors as core
from evenhand.wire.generated import scheduler_pb2 as pb
from evenhand.wire.status import CODE_OF_REASON, encode_status, wire_error

EXPECTED: dict[str, type[errors.ClientError]] = {
    "INVALID_REQUEST": errors.InvalidRequest,
    "REQUEST_TOO_LARGE_FOR_POOL": errors.RequestTooLarge,
    "CREDENTIAL_MISSING": errors.Unauthenticated,
    "CREDENTIAL_UNKNOWN": errors.Unauthenticated,
    "TENANT_NOT_ALLOWED": errors.PermissionDenied,
    "TENANT_NOT_ACTIVE": errors.PermissionDenied,
    "UNKNOWN_TENANT": errors.PermissionDenied,
    "TENANT_QUEUE_FULL": errors.QueueFull,
    "TENANT_RATE_LIMITED": errors.RateLimited,
    "NO_WORKER_IN_POOL": errors.NoWorker,
    "NOT_THE_OWNER": errors.NotTheOwner,
    "DIRECTORY_AWAY": errors.Unavailable,
    "SCHEDULER_SHUTTING_DOWN": errors.SchedulerShuttingDown,
    "DEADLINE_PASSED": errors.DeadlineExceeded,
    "CANCELLED_BY_CLIENT": errors.RequestCancelled,
    "UNKNOWN_TICKET": errors.UnknownTicket,
    "UNKNOWN_POOL": errors.UnknownPool,
    "REQUEST_ID_REUSED": errors.RequestIdReused,
    "TICKET_ALREADY_CLOSED": errors.TicketClosed,
    "INTERNAL_FAULT": errors.UnexpectedAnswer,
}


def test_the_base_install_is_enough() -> None:
    """Nothing of the services' dependencies is imported, and nothing of the services."""
    code = "import sys, evenhand.client; print(*sorted(sys.modules))"
    run = subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, capture_output=True, text=True)
    loaded = {name.split(".")[0] for name in run.stdout.split()}
    assert "grpc" in loaded
    assert not loaded & {
        "structlog",
        "pydantic",
        "aiohttp",
        "msgspec",
        "rich",
        "yaml",
        "zmq",
        "asyncpg",
        "openai",
    }
    inside = {name.split(".")[1] for name in run.stdout.split() if name.startswith("evenhand.")}
    assert inside == {"client", "core", "loopback", "wire"}


class TestErrors:
    @pytest.mark.parametrize("reason", sorted(CODE_OF_REASON))
    def test_each_reason_of_the_wire_has_its_type(self, reason: str) -> None:
        status = encode_status(wire_error(reason, "One sentence.", metadata={"a": "b"}))
        typed = errors.from_status(status, "h:1")
        assert type(typed) is EXPECTED[reason]
        assert str(typed) == "One sentence."
        assert (typed.reason, typed.code, typed.metadata) == (reason, CODE_OF_REASON[reason].name, {"a": "b"})
        assert typed.answered

    def test_every_error_is_in_a_branch_of_the_core(self) -> None:
        for kind in {*EXPECTED.values(), errors.ClientClosed, errors.WorkerLost, errors.InvalidConfig}:
            assert issubclass(kind, core.EvenhandError)
        for kind in (errors.InvalidRequest, errors.UnknownTicket, errors.PermissionDenied, errors.InvalidConfig):
            assert issubclass(kind, core.InvalidInput)
        assert issubclass(errors.Unavailable, core.Unavailable)
        assert issubclass(errors.UnexpectedAnswer, core.PeerError)

    def test_a_later_schedulers_reason_falls_back_to_its_code(self) -> None:
        status = encode_status(wire_error("NO_WORKER_IN_POOL", "One sentence."))
        status.details[0].value = status.details[0].value.replace(b"NO_WORKER_IN_POOL", b"NO_GPU_IN_REGIONS")
        typed = errors.from_status(status, "h:1")
        assert type(typed) is Unavailable
        assert typed.retried
        assert typed.reason == "NO_GPU_IN_REGIONS"

    @pytest.mark.parametrize(
        ("code", "kind"),
        [
            (code_pb2.UNAVAILABLE, SchedulerUnreachable),
            (code_pb2.INTERNAL, SchedulerUnreachable),
            (code_pb2.CANCELLED, SchedulerUnreachable),
            (code_pb2.DEADLINE_EXCEEDED, errors.DeadlineExceeded),
            (code_pb2.UNAUTHENTICATED, errors.Unauthenticated),
            (code_pb2.PERMISSION_DENIED, errors.PermissionDenied),
            (code_pb2.UNIMPLEMENTED, UnexpectedAnswer),
            (code_pb2.NOT_FOUND, UnexpectedAnswer),
            (99, UnexpectedAnswer),
        ],
    )
    def test_who_speaks_without_a_reason_is_no_scheduler(self, code: int, kind: type[Exception]) -> None:
        typed = errors.from_status(status_pb2.Status(code=code, message="nginx"), "h:1")
        assert type(typed) is kind
        assert not typed.answered
        assert "h:1" in str(typed)

    def test_a_fresh_copy_keeps_what_was_said(self) -> None:
        first = errors.from_status(encode_status(wire_error("NOT_THE_OWNER", "No.", 250)), "h:1")
        first.__cause__ = ValueError("x")
        second = first.fresh()
        assert second is not first
        assert (type(second), str(second), second.retry_after_s) == (type(first), "No.", 0.25)
        assert second.__cause__ is first.__cause__


def usage_recorded(grant: Grant) -> Usage | None:
    return grant.usage


class TestUsage:
    @pytest.mark.parametrize(
        "reported",
        [
            {"prompt_tokens": 9, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}},
            {"input_tokens": 9, "output_tokens": 3, "input_tokens_details": {"cached_tokens": 4}},
            {"prompt_tokens": 9, "output_tokens": 3, "cached_tokens": 4},
            SimpleNamespace(
                prompt_tokens=9, completion_tokens=3, prompt_tokens_details=SimpleNamespace(cached_tokens=4)
            ),
            Usage(9, 4, 3),
            openai.types.CompletionUsage.model_validate(
                {
                    "prompt_tokens": 9,
                    "completion_tokens": 3,
                    "total_tokens": 12,
                    "prompt_tokens_details": {"cached_tokens": 4},
                }
            ),
        ],
    )
    def test_is_read_from_what_client_libraries_give(self, reported: object) -> None:
        assert usage_of(reported) == Usage(prompt_tokens=9, cached_tokens=4, output_tokens=3)

    def test_an_engine_that_does_not_tell_what_was_cached_is_not_one_that_cached_nothing(self) -> None:
        silent = usage_of({"prompt_tokens": 9, "completion_tokens": 0, "prompt_tokens_details": None})
        assert silent == Usage(9, None, 0)
        told = usage_of(
            {"prompt_tokens": 9, "completion_tokens": 0, "prompt_tokens_details": {"cached_tokens": 0}}
        )
        assert told == Usage(9, 0, 0)

    @pytest.mark.parametrize(
        ("reported", "sentence"),
        [
            ({}, "dict has neither"),
            (7, "int has neither"),
            ({"prompt_tokens": -1}, "prompt_tokens must be a whole number"),
            ({"prompt_tokens": 1, "completion_tokens": "3"}, "output_tokens must be"),
            ({"prompt_tokens": 3, "cached_tokens": 4}, "cached_tokens must be at most"),
            ({"completion_tokens": 2**32}, "output_tokens must be"),
        ],
    )
    def test_what_cannot_be_is_refused(self, reported: object, sentence: str) -> None:
        with pytest.raises(InvalidRequest, match=sentence):
            usage_of(reported)

    async def test_records_add_up_as_a_stream_goes_on(self) -> None:
        grant = Grant(pb.AcquireResponse(ticket="t"))
        grant.record_usage(None)
        assert usage_recorded(grant) is None
        grant.record_usage(prompt_tokens=9)
        grant.record_usage(output_tokens=1)
        grant.record_usage(None, output_tokens=2, cached_tokens=4)
        assert usage_recorded(grant) == Usage(9, 4, 2)
        with pytest.raises(InvalidRequest):
            grant.record_usage(output_tokens=-1)
        assert usage_recorded(grant) == Usage(9, 4, 2)


class TestGrant:
    @pytest.mark.parametrize(
        ("address", "base_url"),
        [
            ("10.0.0.7:8000", "http://10.0.0.7:8000/v1"),
            ("http://w:8000", "http://w:8000/v1"),
            ("https://w/", "https://w/v1"),
            ("http://w:8000/v1/", "http://w:8000/v1"),
        ],
    )
    async def test_the_base_url_is_ready_for_use(self, address: str, base_url: str) -> None:
        assert Grant(pb.AcquireResponse(worker=pb.WorkerRef(address=address))).base_url == base_url

    async def test_an_openai_call_carries_salt_rank_and_request_id(self) -> None:
        worker = pb.WorkerRef(address="w:1", data_parallel_rank=3)
        grant = Grant(pb.AcquireResponse(request_id="r", worker=worker, cache_salt="s"))
        assert openai_kwargs(grant) == {
            "extra_body": {"cache_salt": "s"},
            "extra_headers": {"X-Request-Id": "r", "X-data-parallel-rank": "3"},
        }

    async def test_no_salt_and_no_ticket_in_its_repr(self) -> None:
        grant = Grant(pb.AcquireResponse(request_id="r", ticket="signed", cache_salt="salty"))
        assert "signed" not in repr(grant)
        assert "salty" not in repr(grant)


class TestWorkerLoss:
    @staticmethod
    def wrapped(inner: BaseException) -> BaseException:
        try:
            raise RuntimeError("the library's own") from inner
        except RuntimeError as error:
            return error

    def test_broken_connections_are_losses(self) -> None:
        request: Any = SimpleNamespace()
        assert is_worker_loss(ConnectionRefusedError())
        assert is_worker_loss(self.wrapped(ConnectionResetError()))
        assert is_worker_loss(openai.APIConnectionError(request=request))

    def test_slow_and_unwilling_workers_are_not(self) -> None:
        request: Any = SimpleNamespace()
        assert not is_worker_loss(openai.APITimeoutError(request=request))
        assert not is_worker_loss(TimeoutError())
        assert not is_worker_loss(ValueError())
        assert not is_worker_loss(WorkerLost("run itself looks for this one"))

    def test_a_chain_without_an_end_is_left(self) -> None:
        first, second = ValueError(), ValueError()
        first.__cause__, second.__cause__ = second, first
        assert not is_worker_loss(first)
