"""Bytes of scheduler.proto to core types: in range or refused, never anything between."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenhand.core.block_key import pack_keys
from evenhand.core.errors import InvalidRequest
from evenhand.core.facts import Candidate, ChoiceReason, Decision, LegOutcome, Ticket, Usage
from evenhand.core.ids import Epoch, RequestId, TenantId, TicketId, WorkerId
from evenhand.wire.generated import scheduler_pb2 as pb
from evenhand.wire.scheduler_codec import (
    decision_sentence,
    decode_acquire,
    decode_outcome,
    decode_usage,
    encode_explanation,
    encode_worker,
)

TENANT = TenantId("t")
TICKET = Ticket(
    TicketId("1"), RequestId("r"), TENANT, WorkerId("w7"), Epoch(1), 1, 1, 10.0, 1.0, 100, 64, 20, 50, 0
)
DECISION = Decision(
    request_id=RequestId("r"),
    tenant_id=TENANT,
    reason=ChoiceReason.AFFINITY,
    candidates=(Candidate(WorkerId("w7"), 64, 0.6, 12.5, 3, 8, 100),),
    excluded=(("no_slot", 2), ("stale", 1)),
    tenants_considered=5,
    virtual_time_before=1.5,
    virtual_time_after=2.5,
    lo=1.25,
    window=3.0,
    wait_ms=42.4,
    fairness_overrode_affinity=False,
)


@given(st.lists(st.integers(0, 2**64 - 1), max_size=300), st.integers(0, 100))
def test_an_acquire_becomes_its_request(keys: list[int], extra_tokens: int) -> None:
    tokens = len(keys) * 16 + extra_tokens + 1
    wire = pb.AcquireRequest(
        request_id="r",
        block_keys=pack_keys(keys),
        prompt_tokens=tokens,
        max_output_tokens=9,
        expected_output_tokens=50,
        user="u",
        excluded_workers=["w1"],
    )
    request = decode_acquire(wire, TENANT, 77, 16)
    assert tuple(request.block_keys) == tuple(keys)
    assert (request.tenant_id, request.request_id, request.deadline_ns) == (TENANT, "r", 77)
    assert (request.prompt_tokens, request.output_tokens_max, request.output_tokens_expected) == (tokens, 9, 9)
    assert request.excluded_workers == ("w1",)
    assert request.size_bytes >= 8 * len(keys)


@given(st.binary(max_size=400))
def test_any_bytes_are_a_request_or_refused(raw: bytes) -> None:
    try:
        wire = pb.AcquireRequest.FromString(raw)
    except Exception:
        return
    try:
        request = decode_acquire(wire, TENANT, None, 16)
    except InvalidRequest:
        return
    assert 1 <= len(request.request_id) <= 200
    assert len(request.block_keys) * 16 <= request.prompt_tokens


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"request_id": "r" * 201}, "1 to 200 characters, not 201"),
        ({"prompt_tokens": 2**31}, "1 to 2147483647 tokens"),
        ({"max_output_tokens": 0}, "output limit must be 1 to"),
        ({"block_keys": bytes(8)}, "1 block keys of 16 tokens are more than 9"),
        ({"block_keys": bytes(7)}, "8 bytes each, not 7 bytes"),
        ({"user": "u" * 201}, "at most 200 characters"),
        ({"excluded_workers": ["w"] * 65}, "exclude 64 workers, not 65"),
        ({"excluded_workers": ["w", "w" * 201]}, "has at most 200 characters"),
    ],
)
def test_what_is_out_of_range_is_refused_in_one_sentence(changed: dict[str, Any], sentence: str) -> None:
    fields: dict[str, Any] = {"request_id": "r", "prompt_tokens": 9, "max_output_tokens": 1, **changed}
    with pytest.raises(InvalidRequest, match=sentence):
        decode_acquire(pb.AcquireRequest(**fields), TENANT, None, 16)


def test_usage() -> None:
    assert decode_usage(pb.Usage(prompt_tokens=5, cached_tokens=5, output_tokens=1)) == Usage(5, 5, 1)
    with pytest.raises(InvalidRequest, match="cannot have 6 of them cached"):
        decode_usage(pb.Usage(prompt_tokens=5, cached_tokens=6))
    with pytest.raises(ValueError, match="out of range"):
        pb.Usage(prompt_tokens=-1)


def test_outcomes() -> None:
    assert [decode_outcome(number) for number in range(5)] == [
        LegOutcome.SETTLED,
        LegOutcome.SETTLED,
        LegOutcome.CANCELLED,
        LegOutcome.SETTLED,
        LegOutcome.WORKER_LOST,
    ]
    with pytest.raises(InvalidRequest, match="Outcome 9"):
        decode_outcome(9)


def test_a_decision_is_explained() -> None:
    short = encode_explanation(DECISION, TICKET, "id", full=False)
    assert (short.decision_id, short.reason, short.wait_ms) == ("id", "affinity", 42.4)
    assert (short.virtual_time_before, short.virtual_time_after, short.virtual_time_least) == (1.5, 2.5, 1.25)
    assert (short.window, short.tenants_considered) == (3.0, 5)
    assert not short.candidates
    full = encode_explanation(DECISION, TICKET, "id", full=True)
    assert full.candidates[0].worker_id == "w7"
    assert dict(full.excluded_workers_by_reason) == {"no_slot": 2, "stale": 1}


@pytest.mark.parametrize("reason", list(ChoiceReason))
def test_every_reason_has_its_own_sentence(reason: ChoiceReason) -> None:
    sentences = {decision_sentence(replace(DECISION, reason=each), TICKET) for each in ChoiceReason}
    assert len(sentences) == len(ChoiceReason)
    sentence = decision_sentence(replace(DECISION, reason=reason), TICKET)
    assert "w7" in sentence
    assert "42 ms" in sentence or reason is ChoiceReason.ADOPTED
    assert sentence.endswith(".")


def test_a_worker_that_is_gone_has_no_address() -> None:
    assert encode_worker(WorkerId("w"), None) == pb.WorkerRef(worker_id="w")


def test_more_prefill_than_its_field_holds_is_told_as_the_most_that_it_holds() -> None:
    endless = replace(DECISION, candidates=(DECISION.candidates[0]._replace(pending_prefill_tokens=1 << 40),))
    (told,) = encode_explanation(endless, TICKET, "id", full=True).candidates
    assert told.pending_prefill_tokens == (1 << 32) - 1
