"""Records what vLLM's own scheduler does with each plan. Run inside an environment that has vLLM:

    python -m tests.golden.record_scheduler MODEL_DIR

MODEL_DIR is any small model's directory; no model is run, sampled tokens come from the plan. Synchronous
scheduling, default policies. Writes ``scheduler_traces/seed_N.json``; read the diff before you keep it.
"""

import json
import sys
from pathlib import Path
from typing import Any

from tests.golden.scheduler_plan import BLOCK_SIZE, SEEDS, TOKENS_MAX, EventNamer, Plan, plan_of

TRACES = Path(__file__).parent / "scheduler_traces"


def scheduler_of(plan: Plan, model_dir: str) -> Any:
    """A real scheduler with the plan's limits, and a list its event batches are appended to."""
    import torch
    from vllm.config.kv_events import KVEventsConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    config = EngineArgs(
        model=model_dir,
        dtype="float32",
        enforce_eager=True,
        max_model_len=TOKENS_MAX,
        max_num_seqs=plan.sequences_max,
        max_num_batched_tokens=plan.batched_tokens_max,
        block_size=BLOCK_SIZE,
        enable_prefix_caching=True,
        async_scheduling=False,
        kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
    ).create_engine_config()
    config.cache_config.num_gpu_blocks = plan.blocks
    layer = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32)
    cache = KVCacheConfig(
        num_blocks=plan.blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], layer)]
    )
    scheduler = Scheduler(
        vllm_config=config,
        kv_cache_config=cache,
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_SIZE,
        log_stats=True,
    )
    batches: list[Any] = []
    scheduler.kv_event_publisher.publish = batches.append
    return scheduler, batches


def event_fields(event: Any) -> dict[str, Any]:
    """A real event as the fields that are compared."""
    fields: dict[str, Any] = {"type": type(event).__name__}
    if fields["type"] != "AllBlocksCleared":
        fields["block_hashes"] = event.block_hashes
    if fields["type"] == "BlockStored":
        fields["parent_block_hash"] = event.parent_block_hash
        fields["token_ids"] = list(event.token_ids)
        fields["extra_keys"] = [None if keys is None else list(keys) for keys in event.extra_keys]
    return fields


def record(plan: Plan, model_dir: str) -> dict[str, Any]:
    """Drive the real scheduler through a plan."""
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request, RequestStatus

    init_none_hash(sha256)
    scheduler, batches = scheduler_of(plan, model_dir)
    hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
    namer, calls = EventNamer(), plan.calls()
    requests: dict[int, Any] = {}
    cached: dict[int, int] = {}
    steps: list[list[Any]] = []
    step = 0
    while calls or scheduler.has_requests():
        while calls and (calls[0][0] <= step or not scheduler.has_requests()):
            _step, kind, index = calls.pop(0)
            if kind == 1:
                scheduler.finish_requests(str(index), RequestStatus.FINISHED_ABORTED)
                continue
            planned = plan.requests[index]
            requests[index] = Request(
                request_id=str(index),
                prompt_token_ids=planned.prompt,
                sampling_params=SamplingParams(max_tokens=len(planned.output), ignore_eos=True),
                pooling_params=None,
                block_hasher=hasher,
                cache_salt=planned.salt,
            )
            scheduler.add_request(requests[index])
        output = scheduler.schedule()
        for admitted in output.scheduled_new_reqs:
            cached.setdefault(int(admitted.req_id), admitted.num_computed_tokens)
        names = list(output.num_scheduled_tokens)
        sampled = [
            [plan.requests[int(name)].output[request.num_output_tokens]]
            if request.num_computed_tokens >= request.num_tokens
            else []
            for name, request in ((name, requests[int(name)]) for name in names)
        ]
        positions = {name: position for position, name in enumerate(names)}
        answer = ModelRunnerOutput(req_ids=names, req_id_to_index=positions, sampled_token_ids=sampled)
        scheduler.update_from_output(output, answer)
        events = [event_fields(event) for batch in batches for event in batch.events]
        batches.clear()
        if events:
            steps.append([step, len(scheduler.running), len(scheduler.waiting), namer.digest(events)])
        step += 1
    preemptions = {index: r.num_preemptions for index, r in requests.items() if r.num_preemptions}
    return {"plan": plan.digest(), "cached": cached, "preemptions": preemptions, "steps": steps}


if __name__ == "__main__":
    for seed in SEEDS:
        trace = record(plan_of(seed), sys.argv[1])
        rows = ",\n".join(json.dumps(row) for row in trace.pop("steps"))
        head = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in trace.items())
        (TRACES / f"seed_{seed}.json").write_text(f'{{\n{head},\n"steps": [\n{rows}\n]\n}}\n')
