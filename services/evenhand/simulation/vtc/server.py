"""One simulated engine that resembles the one VTC was measured on: S-LoRA with Llama-2-7b on an A10G.

Memory and cadence are that server's settings. The times are fitted to what its authors publish beside the
paper: a profile of the model (a prompt token takes 0.21 to 0.24 ms) and the times of every request (the batch
is so small, and its driver so slow, that a decode step takes 40 ms with one request as with twenty).

The loop adds nothing to the engine but a clock: arrivals are queued at the end of the step in which they come.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from evenhand.engine.batching import Engine
from evenhand.engine.content import BlockContent
from evenhand.engine.limits import EngineLimits, StepTime
from evenhand.engine.prefill_apart import PrefillApart
from evenhand.engine.request import EngineRequest
from evenhand.simulation.vtc.fronts import Front
from evenhand.simulation.vtc.workloads import TOKENS_ADDED, Ask

STEP_TIME = StepTime(base_ns=38_000_000, prefill_token_ns=230_000, running_sequence_ns=150_000)

KV_TOKENS = 10_000
SEQUENCES_MAX = 1_000
_BLOCK = 16
LIMITS = EngineLimits(
    block_size=_BLOCK,
    # The rule below counts tokens, as that server does; a half-filled block a request must not bind before it.
    blocks=KV_TOKENS // _BLOCK + SEQUENCES_MAX,
    sequences_max=SEQUENCES_MAX,
    batched_tokens_max=3_072,
    model_tokens_max=3_072,
)
ADMISSION = PrefillApart(kv_tokens_max=KV_TOKENS, decode_steps_min=10, adapter_tokens=32)


@dataclass(frozen=True, slots=True)
class Served:
    """What became of one request; times since the start of the run."""

    ask: Ask
    first_token_ns: int
    end_ns: int


def engine_request(ask: Ask) -> EngineRequest:
    """A request without a reusable prefix; its label is its client."""
    content = BlockContent((), block_size=LIMITS.block_size)
    prompt_tokens = ask.prompt_tokens + TOKENS_ADDED
    return EngineRequest(str(ask.ask_id), content, prompt_tokens, ask.output_tokens, label=ask.client)


def serve(asks: Sequence[Ask], front: Front) -> list[Served]:
    """Run all requests, in order of arrival, to their end. In order of their ends."""
    engine = Engine(LIMITS, STEP_TIME, order=front.order, prefill_apart=ADMISSION, emit_events=False)
    served: list[Served] = []
    first_ns: dict[str, int] = {}
    decoding: dict[str, EngineRequest] = {}
    now_ns = coming = 0
    while len(served) < len(asks):
        while coming < len(asks) and asks[coming].at_ns <= now_ns:
            front.submit(engine_request(asks[coming]), now_ns)
            coming += 1
        for request in front.place(now_ns):
            engine.submit(request)
        if not engine.has_work:
            assert coming < len(asks), "a front sends what waits to an idle engine"
            now_ns = asks[coming].at_ns
            continue
        result = engine.step()
        now_ns += result.duration_ns
        if result.steps:
            front.produced(tuple(decoding.values()), now_ns)
        for request in result.first_tokens:
            first_ns[request.request_id] = now_ns
            decoding[request.request_id] = request
            front.first_token(request, now_ns)
        for request in result.finished:
            del decoding[request.request_id]
            front.ended(request, now_ns)
            served.append(Served(asks[int(request.request_id)], first_ns[request.request_id], now_ns))
    return served
