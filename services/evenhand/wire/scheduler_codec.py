"""Messages of ``scheduler.proto`` to core types and back.

The one place where a client's bytes become a ``Request`` or a ``Usage``: what decodes is in range, whole and of
bounded size; anything else is ``InvalidRequest`` in one sentence. The other way, a ``Granted`` becomes the answer,
with the reason in words. One Acquire costs a few microseconds here, so each field is looked at once and candidates
are listed only where the client asks for them.

It does not know who asks, nor whether a worker could run the request: that is the servicer's and the core's part.
"""

import struct
from typing import assert_never

from evenhand.core.block_key import KEY_BYTES
from evenhand.core.errors import InvalidRequest
from evenhand.core.facts import (
    ChoiceReason,
    Decision,
    LegOutcome,
    Request,
    Ticket,
    Usage,
    WorkerRole,
    WorkerSpec,
)
from evenhand.core.ids import RequestId, TenantId, WorkerId
from evenhand.core.setting_bounds import WIRE_MAX
from evenhand.wire.generated import scheduler_pb2 as pb

REQUEST_ID_CHARACTERS_MAX = 200
NAME_CHARACTERS_MAX = 200
"""Pool, tenant, user and worker names."""
BLOCK_KEYS_MAX = 262_144
"""Keys of one prompt: 4 million tokens in blocks of 16."""
EXCLUDED_WORKERS_MAX = 64
TOKENS_MAX = 2**31 - 1

_UNPACKERS = tuple(struct.Struct(f">{count}Q").unpack for count in range(257))
"""Ready formats for the lengths that nearly all prompts have."""
_OUTCOMES: dict[int, LegOutcome] = {
    pb.OUTCOME_UNSPECIFIED: LegOutcome.SETTLED,
    pb.OUTCOME_COMPLETED: LegOutcome.SETTLED,
    pb.OUTCOME_CANCELLED: LegOutcome.CANCELLED,
    pb.OUTCOME_FAILED: LegOutcome.SETTLED,
    pb.OUTCOME_WORKER_LOST: LegOutcome.WORKER_LOST,
}
_ROLES = {
    WorkerRole.BOTH: pb.WORKER_ROLE_BOTH,
    WorkerRole.PREFILL: pb.WORKER_ROLE_PREFILL,
    WorkerRole.DECODE: pb.WORKER_ROLE_DECODE,
}


def decode_acquire(
    wire: pb.AcquireRequest, tenant_id: TenantId, deadline_ns: int | None, block_size_tokens: int
) -> Request:
    """The request in an Acquire, for the tenant that the credential names; raises ``InvalidRequest``."""
    request_id = decode_request_id(wire.request_id)
    packed = wire.block_keys
    count, rest = divmod(len(packed), KEY_BYTES)
    prompt_tokens, output_tokens_max = wire.prompt_tokens, wire.max_output_tokens
    if rest or count > BLOCK_KEYS_MAX:
        raise InvalidRequest(
            f"The block keys must be at most {BLOCK_KEYS_MAX} of {KEY_BYTES} bytes each, not {len(packed)} bytes."
        )
    if not 1 <= prompt_tokens <= TOKENS_MAX:
        raise InvalidRequest(f"The prompt must have 1 to {TOKENS_MAX} tokens, not {prompt_tokens}.")
    if not 1 <= output_tokens_max <= TOKENS_MAX:
        raise InvalidRequest(f"The output limit must be 1 to {TOKENS_MAX} tokens, not {output_tokens_max}.")
    if count * block_size_tokens > prompt_tokens:
        raise InvalidRequest(
            f"{count} block keys of {block_size_tokens} tokens are more than {prompt_tokens} prompt tokens fill."
        )
    expected = wire.expected_output_tokens
    excluded: tuple[WorkerId, ...] = ()
    if wire.excluded_workers:
        excluded = tuple([WorkerId(name) for name in wire.excluded_workers])
        if len(excluded) > EXCLUDED_WORKERS_MAX:
            raise InvalidRequest(f"A request may exclude {EXCLUDED_WORKERS_MAX} workers, not {len(excluded)}.")
        if max(map(len, excluded)) > NAME_CHARACTERS_MAX:
            raise InvalidRequest(f"The name of an excluded worker has at most {NAME_CHARACTERS_MAX} characters.")
    if len(wire.user) > NAME_CHARACTERS_MAX:
        raise InvalidRequest(f"The user's name must be at most {NAME_CHARACTERS_MAX} characters long.")
    return Request(
        request_id=request_id,
        tenant_id=tenant_id,
        block_keys=_UNPACKERS[count](packed) if count <= 256 else struct.unpack(f">{count}Q", packed),
        prompt_tokens=prompt_tokens,
        output_tokens_max=output_tokens_max,
        output_tokens_expected=min(expected, output_tokens_max) if expected else None,
        deadline_ns=deadline_ns,
        user=wire.user,
        size_bytes=len(packed) + len(request_id),
        excluded_workers=excluded,
    )


def decode_request_id(text: str) -> RequestId:
    """A request id in bounds; raises ``InvalidRequest``."""
    if not 1 <= len(text) <= REQUEST_ID_CHARACTERS_MAX:
        raise InvalidRequest(
            f"A request id must have 1 to {REQUEST_ID_CHARACTERS_MAX} characters, not {len(text)}."
        )
    return RequestId(text)


def decode_usage(wire: pb.Usage) -> Usage:
    """What a leg used; raises ``InvalidRequest`` for the impossible. The core caps it to what was granted."""
    prompt, cached = wire.prompt_tokens, wire.cached_tokens
    if cached > prompt:
        raise InvalidRequest(f"A prompt of {prompt} tokens cannot have {cached} of them cached.")
    return Usage(prompt, cached, wire.output_tokens, wire.HasField("cached_tokens"))


def decode_outcome(number: int) -> LegOutcome:
    """How the client says a leg ended; raises ``InvalidRequest`` for a number this build does not know."""
    outcome = _OUTCOMES.get(number)
    if outcome is None:
        raise InvalidRequest(f"Outcome {number} is not known here.")
    return outcome


def encode_worker(worker_id: WorkerId, spec: WorkerSpec | None) -> pb.WorkerRef:
    """A worker to call; one that has just gone has no address."""
    if spec is None:
        return pb.WorkerRef(worker_id=worker_id)
    return pb.WorkerRef(
        worker_id=worker_id,
        address=spec.address,
        data_parallel_rank=spec.data_parallel_rank,
        role=_ROLES[spec.role],
    )


def encode_explanation(decision: Decision, ticket: Ticket, decision_id: str, full: bool) -> pb.Explanation:
    """Why this worker and why now; candidates and exclusions only if ``full``."""
    explanation = pb.Explanation(
        decision_id=decision_id,
        reason=decision.reason.value,
        sentence=decision_sentence(decision, ticket),
        wait_ms=decision.wait_ms,
        virtual_time_before=decision.virtual_time_before,
        virtual_time_after=decision.virtual_time_after,
        virtual_time_least=decision.lo,
        window=decision.window,
        fairness_overrode_affinity=decision.fairness_overrode_affinity,
        tenants_considered=decision.tenants_considered,
    )
    if full:
        for candidate in decision.candidates:
            explanation.candidates.add(
                worker_id=candidate.worker_id,
                cached_tokens=candidate.cached_tokens,
                score=candidate.score,
                predicted_ttft_ms=candidate.predicted_ttft_ms,
                slots_used=candidate.slots_used,
                slots=candidate.slots,
                pending_prefill_tokens=min(candidate.pending_prefill_tokens, WIRE_MAX),
            )
        for reason, count in decision.excluded:
            explanation.excluded_workers_by_reason[reason] = count
    return explanation


def decision_sentence(decision: Decision, ticket: Ticket) -> str:
    """The decision in one sentence that names no other tenant."""
    worker, cached, prompt = ticket.worker_id, ticket.predicted_cached_tokens, ticket.prompt_tokens
    waited = f"after {decision.wait_ms:.0f} ms"
    match decision.reason:
        case ChoiceReason.AFFINITY:
            return f"{worker} holds {cached} of the prompt's {prompt} tokens and was given {waited}."
        case ChoiceReason.LOAD:
            return f"No worker holds a useful prefix; {worker} is the least loaded and was given {waited}."
        case ChoiceReason.FAIRNESS:
            return f"It was this tenant's turn: {worker}, holding {cached} of {prompt} tokens, was given {waited}."
        case ChoiceReason.GUARANTEE:
            held = f"holding {cached} of {prompt} tokens"
            return f"The tenant's guaranteed share gave it {worker}, {held}, {waited}."
        case ChoiceReason.OVERTAKE_CAP:
            return f"The request had been overtaken as often as allowed and was given {worker} {waited}."
        case ChoiceReason.ONLY_CANDIDATE:
            return f"{worker} was the only worker that could take the request and was given {waited}."
        case ChoiceReason.ADOPTED:
            return f"An earlier scheduler gave {worker}; its ticket goes on."
        case _:
            assert_never(decision.reason)
