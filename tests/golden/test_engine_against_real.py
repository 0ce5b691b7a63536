"""The pool and the batch against recordings of a real engine: same hits, same stores, same evictions.

The requests of a recorded run go through the simulated engine in the order, and side by side where, the
real one got them. Names differ (an engine's hash is opaque), so events are compared by what they name: the
chain of token blocks and extra keys behind each hash.
"""

import json
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from evenhand.engine.batching import Engine
from evenhand.engine.content import TokenContent
from evenhand.engine.events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent
from evenhand.engine.limits import EngineLimits, StepTime
from evenhand.engine.request import EngineRequest

CAPTURES = Path(__file__).parent / "captures"
LIMITS = EngineLimits(block_size=32, blocks=40, sequences_max=8, batched_tokens_max=1024, model_tokens_max=1024)

Line = dict[str, Any]


def lines(name: str) -> list[Line]:
    return [json.loads(line) for line in (CAPTURES / name).read_text().splitlines()]


def real_events(name: str) -> list[Line]:
    return [event for line in lines(name) for event in line["decoded"][1]]


def as_line(event: KvEvent) -> Line:
    match event:
        case BlockStored():
            return {
                "type": "BlockStored",
                "block_hashes": list(event.block_hashes),
                "parent_block_hash": event.parent_block_hash,
                "token_ids": list(event.token_ids),
                "extra_keys": [None if keys is None else list(keys) for keys in event.extra_keys or ()],
                "session_id": event.session_id,
            }
        case BlockRemoved():
            return {"type": "BlockRemoved", "block_hashes": list(event.block_hashes)}
        case AllBlocksCleared():
            return {"type": "AllBlocksCleared"}


def by_content(events: list[Line]) -> Iterator[tuple[Any, ...]]:
    """Events with each hash replaced by the chain of blocks it names."""
    chains: dict[int | None, tuple[Any, ...]] = {None: ()}
    for event in events:
        if event["type"] == "BlockStored":
            parent = event["parent_block_hash"]
            for index, name in enumerate(event["block_hashes"]):
                block = (
                    tuple(event["token_ids"][index * 32 : index * 32 + 32]),
                    tuple(event["extra_keys"][index] or ()),
                )
                chains[name] = (*chains[parent], block)
                parent = name
            names = tuple(chains[name] for name in event["block_hashes"])
            yield ("stored", names, event.get("session_id"))
        elif event["type"] == "BlockRemoved":
            yield ("removed", tuple(chains[name] for name in event["block_hashes"]))
        else:
            yield ("cleared",)


def request_of(index: int, action: Line) -> EngineRequest:
    extra = action.get("extra", {})
    content = TokenContent(
        action["prompt_token_ids"],
        block_size=32,
        output_token_ids=action["output_token_ids"],
        cache_salt=action.get("cache_salt") or extra.get("cache_salt"),
        session_id=action.get("conv"),
    )
    full = extra.get("vllm_xargs", {}).get("kv_cache_report_mode") == "full"
    prompt, output = len(action["prompt_token_ids"]), len(action["output_token_ids"])
    return EngineRequest(f"r{index}", content, prompt, output, full_report=full)


def side_by_side(actions: list[Line]) -> Iterator[list[Line]]:
    """Requests that were sent at once: a round of the conversations, and the identical prompts."""
    for action in actions:
        action["phase"] = None
    phase = ""
    for action in actions:
        phase = action["name"] if action["kind"] == "phase" else phase
        action["phase"] = phase
    rounds = 0
    for position, action in enumerate(actions):
        action["group"] = (action["phase"], position)
        if action["phase"] == "turns" and action["kind"] == "chat":
            action["group"] = ("turns", rounds // 3)
            rounds += 1
        if action["phase"] == "concurrent_identical" and action["kind"] != "phase":
            action["group"] = ("concurrent_identical", 0)
    for _group, members in groupby(actions, key=lambda action: action["group"]):
        yield list(members)


def run(actions: list[Line]) -> tuple[list[tuple[int, int]], list[Line]]:
    """(cached tokens of the real engine, of this one) a request, and this one's events."""
    engine = Engine(LIMITS, StepTime())
    cached: list[tuple[int, int]] = []
    events: list[Line] = []
    for group in side_by_side(actions):
        pairs: list[tuple[Line, EngineRequest]] = []
        for action in group:
            if action["kind"] == "phase":
                if action["name"] == "after_reset_request":
                    assert engine.reset_prefix_cache()
                continue
            pairs.append((action, request_of(len(cached) + len(pairs), action)))
            engine.submit(pairs[-1][1])
        while engine.has_work:
            events += [as_line(event) for event in engine.step().events]
        cached += [(a["usage"]["prompt_tokens_details"]["cached_tokens"], r.cached_tokens) for a, r in pairs]
    return cached, events


def recorded(name: str) -> list[Line]:
    return [action for action in lines(name) if action["kind"] == "phase" or action["engine"] == "e0"]


def test_every_request_finds_as_many_cached_tokens_as_in_the_real_engine() -> None:
    cached, _events = run(recorded("actions.jsonl"))
    assert len(cached) == 26
    assert sum(real for real, _ours in cached) == 1760
    assert [ours for _real, ours in cached] == [real for real, _ours in cached]


def test_the_event_stream_equals_the_real_one_event_by_event() -> None:
    _cached, events = run(recorded("actions.jsonl"))
    ours, real = list(by_content(events)), list(by_content(real_events("e0.live.jsonl")))
    for position, (our, their) in enumerate(zip(ours, real, strict=False)):
        assert our == their, f"event {position}"
    assert len(ours) == len(real)


def test_duplicates_of_one_hash_behave_as_in_the_real_engine() -> None:
    actions = recorded("dup_abort.actions.jsonl")
    names = [action.get("name") for action in actions]
    cut = actions[: names.index("client_disconnect")]
    cached, events = run(cut)
    assert [ours for _real, ours in cached] == [real for real, _ours in cached]
    ours = list(by_content(events))
    real = list(by_content(real_events("e0.dup_abort.jsonl")))[1:]  # a clear left over from the run before
    assert ours == real[: len(ours)]
    assert sum(event[0] == "removed" for event in ours) > 30
