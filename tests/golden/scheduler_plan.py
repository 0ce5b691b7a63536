"""Plans of requests that a real scheduler and the simulated engine are both driven through.

A plan is a function of its seed: shared prefixes, continuations of earlier answers, salts, prompts that are
whole blocks, cancels, and too few KV blocks, so that eviction and preemption are frequent. The traces of the
real one are recorded by ``record_scheduler.py``; ``test_engine_scheduler_traces.py`` compares.
"""

import hashlib
import json
import random
from dataclasses import asdict, dataclass
from typing import Any

BLOCK_SIZE = 32
SEEDS = (1, 2, 3, 4, 5, 6, 7, 8)
REQUESTS = 60
TOKENS_MAX = 512

Event = dict[str, Any]


@dataclass(frozen=True)
class PlannedRequest:
    prompt: list[int]
    output: list[int]
    salt: str | None
    arrives_at_step: int
    cancelled_at_step: int | None


@dataclass(frozen=True)
class Plan:
    blocks: int
    sequences_max: int
    batched_tokens_max: int
    requests: list[PlannedRequest]

    def calls(self) -> list[tuple[int, int, int]]:
        """(step, 0 to submit or 1 to cancel, request index), in the order they are made."""
        calls = [(request.arrives_at_step, 0, index) for index, request in enumerate(self.requests)]
        for index, request in enumerate(self.requests):
            if request.cancelled_at_step is not None:
                calls.append((request.cancelled_at_step, 1, index))
        return sorted(calls)

    def digest(self) -> str:
        """Names the plan, so that a trace of another plan is noticed."""
        return hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()[:16]


def plan_of(seed: int) -> Plan:
    """The plan of a seed; the same in every process and Python version."""
    chance = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [chance.randrange(300, 2000) for _ in range(count)]

    trees = [tokens(TOKENS_MAX) for _ in range(3)]
    requests: list[PlannedRequest] = []
    step = 0
    for _ in range(REQUESTS):
        prompt = chance.choice(trees)[: chance.randrange(256)] + tokens(chance.randrange(1, 64))
        if chance.random() < 0.2:
            prompt = prompt[: max(1, len(prompt) // BLOCK_SIZE) * BLOCK_SIZE]
        if requests and chance.random() < 0.3:
            earlier = chance.choice(requests)
            prompt = (earlier.prompt + earlier.output)[:400] + prompt[-5:]
        output = tokens(chance.randrange(1, min(160, TOKENS_MAX - len(prompt))))
        salt = chance.choice("ab") if chance.random() < 0.2 else None
        step += chance.randrange(chance.choice([3, 30]))
        cancelled = step + chance.randrange(1, 60) if chance.random() < 0.15 else None
        requests.append(PlannedRequest(prompt, output, salt, step, cancelled))
    return Plan(chance.choice([18, 24, 40]), chance.choice([2, 4, 8]), chance.choice([64, 128, 512]), requests)


class EventNamer:
    """Replaces an engine's opaque hashes by what they name, so that two engines' events compare."""

    def __init__(self) -> None:
        self._chains: dict[Any, str] = {None: ""}

    def digest(self, events: list[Event]) -> str:
        """One step's events, in order, as 16 hex digits; empty without events."""
        if not events:
            return ""
        said = [self._said(event) for event in events]
        return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:16]

    def _said(self, event: Event) -> list[str]:
        if event["type"] == "BlockStored":
            chain = self._chains[event["parent_block_hash"]]
            for index, name in enumerate(event["block_hashes"]):
                block = event["token_ids"][index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE]
                said = json.dumps([chain, block, event["extra_keys"][index]])
                chain = self._chains[name] = hashlib.sha256(said.encode()).hexdigest()[:16]
        return [event["type"], *(self._chains[name] for name in event.get("block_hashes", ()))]
