"""Batch and pool against traces of vLLM's own scheduler: eviction, chunks, preemption, cancels, step by step.

Recorded from vLLM 0.32.0 by ``record_scheduler.py``. Each step that said anything must say exactly the same
here, with as many requests running and waiting.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.golden.scheduler_plan import BLOCK_SIZE, SEEDS, TOKENS_MAX, EventNamer, Plan, plan_of

from evenhand.engine.batching import Engine
from evenhand.engine.content import TokenContent
from evenhand.engine.events import BlockRemoved, BlockStored, KvEvent
from evenhand.engine.limits import EngineLimits, StepTime
from evenhand.engine.request import EngineRequest

TRACES = Path(__file__).parent / "scheduler_traces"


def event_fields(event: KvEvent) -> dict[str, Any]:
    fields: dict[str, Any] = {"type": type(event).__name__}
    if isinstance(event, BlockStored | BlockRemoved):
        fields["block_hashes"] = event.block_hashes
    if isinstance(event, BlockStored):
        fields["parent_block_hash"] = event.parent_block_hash
        fields["token_ids"] = list(event.token_ids)
        fields["extra_keys"] = [None if keys is None else list(keys) for keys in event.extra_keys or ()]
    return fields


def run(plan: Plan) -> dict[str, Any]:
    engine = Engine(
        EngineLimits(
            block_size=BLOCK_SIZE,
            blocks=plan.blocks,
            sequences_max=plan.sequences_max,
            batched_tokens_max=plan.batched_tokens_max,
            model_tokens_max=TOKENS_MAX,
        ),
        StepTime(),
    )
    namer, calls = EventNamer(), plan.calls()
    requests: dict[int, EngineRequest] = {}
    steps: list[list[Any]] = []
    step = 0
    while calls or engine.has_work:
        while calls and (calls[0][0] <= step or not engine.has_work):
            _step, kind, index = calls.pop(0)
            if kind == 1:
                engine.cancel(requests[index])
                continue
            planned = plan.requests[index]
            content = TokenContent(
                planned.prompt,
                block_size=BLOCK_SIZE,
                output_token_ids=planned.output,
                cache_salt=planned.salt,
            )
            requests[index] = EngineRequest(str(index), content, len(planned.prompt), len(planned.output))
            engine.submit(requests[index])
        events = [event_fields(event) for event in engine.step().events]
        if events:
            steps.append([step, engine.running, len(engine.waiting), namer.digest(events)])
        step += 1
    cached = {str(i): r.cached_tokens for i, r in requests.items() if r.cached_tokens >= 0}
    preemptions = {str(i): r.preemptions for i, r in requests.items() if r.preemptions}
    return {"plan": plan.digest(), "cached": cached, "preemptions": preemptions, "steps": steps}


@pytest.mark.parametrize("seed", SEEDS)
def test_every_step_is_the_real_schedulers(seed: int) -> None:
    recorded = json.loads((TRACES / f"seed_{seed}.json").read_text())
    trace = run(plan_of(seed))
    assert trace["plan"] == recorded["plan"], "the plan changed: record the traces again"
    for ours, real in zip(trace["steps"], recorded["steps"], strict=False):
        assert ours == real
    assert trace == recorded


def test_the_traces_contain_what_they_are_for() -> None:
    traces = [json.loads((TRACES / f"seed_{seed}.json").read_text()) for seed in SEEDS]
    assert sum(len(trace["steps"]) for trace in traces) > 2_000
    assert sum(sum(trace["preemptions"].values()) for trace in traces) > 50
    assert sum(sum(trace["cached"].values()) for trace in traces) > 10_000
