"""Errors on the wire: they come back as they went, and anything else does no harm."""

import re
from pathlib import Path

import pytest
from google.rpc import status_pb2
from hypothesis import given
from hypothesis import strategies as st

from evenhand.core.facts import RefusalReason
from evenhand.wire.status import (
    CODE_OF_REASON,
    RETRY_AFTER_MS_MAX,
    STATUS_METADATA_KEY,
    Code,
    WireError,
    decode_status,
    decode_trailers,
    encode_status,
    wire_error,
)

SCHEMA = Path(__file__).parents[3] / "schemas/evenhand/v1/scheduler.proto"


@pytest.mark.parametrize("reason", sorted(CODE_OF_REASON))
@pytest.mark.parametrize("retry_after_ms", [None, 0, 1, 1_234_567])
@pytest.mark.parametrize("quota_subject", ["", "tenant:a"])
def test_an_error_comes_back(reason: str, retry_after_ms: int | None, quota_subject: str) -> None:
    error = wire_error(reason, "What is wrong.", retry_after_ms, quota_subject, {"outcome": "settled"})
    assert decode_status(encode_status(error)) == error
    trailers = (("other", "x"), (STATUS_METADATA_KEY, encode_status(error).SerializeToString()))
    assert decode_trailers(int(error.code), "ignored", trailers) == error


def test_every_refusal_of_the_core_has_a_code() -> None:
    assert {reason.value for reason in RefusalReason} <= CODE_OF_REASON.keys()


def test_the_schema_documents_every_reason_under_its_code() -> None:
    documented = {}
    line = re.compile(r"^//   ([A-Z_]+) {2,}([A-Z_, ]+?)(?: \(.*\))?$", re.MULTILINE)
    for code, reasons in line.findall(SCHEMA.read_text()):
        documented.update(dict.fromkeys(reasons.split(", "), code))
    assert documented == {reason: code.name for reason, code in CODE_OF_REASON.items()}


def test_an_error_without_details_is_still_an_error() -> None:
    assert decode_trailers(14, "connection refused", None) == WireError("", "connection refused", Code.UNAVAILABLE)
    assert decode_trailers(2, "odd", ()).code is Code.INTERNAL
    assert decode_trailers(14, "x", ((STATUS_METADATA_KEY, b"\xff\xff"),)).reason == ""


def test_a_wait_that_no_duration_holds_is_told_as_the_longest() -> None:
    error = decode_status(encode_status(wire_error("TENANT_RATE_LIMITED", "No.", 2**80)))
    assert error.retry_after_ms == RETRY_AFTER_MS_MAX


def test_details_of_others_are_passed_over() -> None:
    status = encode_status(wire_error("NOT_THE_OWNER", "No.", 5))
    status.details[0].value = b"\xff"
    status.details.add(type_url="type.googleapis.com/somebody.Else", value=b"\x01")
    assert decode_status(status) == WireError("", "No.", Code.UNAVAILABLE, 5)


@given(st.binary(max_size=200))
def test_no_bytes_raise(raw: bytes) -> None:
    decode_trailers(3, "x", ((STATUS_METADATA_KEY, raw),))
    status = status_pb2.Status(code=3)
    for kind in ("ErrorInfo", "RetryInfo", "QuotaFailure"):
        status.details.add(type_url=f"type.googleapis.com/google.rpc.{kind}", value=raw)
    decode_status(status)
