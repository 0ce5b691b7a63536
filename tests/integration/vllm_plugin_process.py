"""Run by an interpreter that has vLLM: one engine in this process, with the plugin loaded by its entry point.

    python vllm_plugin_process.py MODEL_DIR BLOCKS SERVICES_DIR PACKAGES_DIR

Reads prompts from standard input, one JSON array of token ids a line, and answers each with a line of JSON: the
engine's own count of cached tokens. The end of input ends it. The two directories are searched last: where this
interpreter's own packages end, the product and what it needs are found.
"""

import json
import os
import sys


def main(model: str, blocks: str, services: str, packages: str) -> None:
    sys.path += [services, packages]
    # vLLM and its libraries write to standard output; answers keep it to themselves.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from vllm import LLM, SamplingParams
    from vllm.config.kv_events import KVEventsConfig
    from vllm.distributed import kv_events

    llm = LLM(
        model=model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=8,
        max_num_batched_tokens=1024,
        block_size=32,
        num_gpu_blocks_override=int(blocks),
        enable_prefix_caching=True,
        kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="zmq"),
    )
    publisher = kv_events.EventPublisherFactory._registry["zmq"].__module__
    print(json.dumps({"ready": publisher}), file=answers, flush=True)
    for line in sys.stdin:
        prompt = {"prompt_token_ids": json.loads(line)}
        (output,) = llm.generate(prompt, SamplingParams(max_tokens=1, temperature=0), use_tqdm=False)
        print(json.dumps({"cached_tokens": output.num_cached_tokens}), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
