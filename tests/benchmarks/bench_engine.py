"""How fast a policy simulation can drive the simulated engine: requests a second of CPU time, one core.

    python -m tests.benchmarks.bench_engine

One engine under open arrivals near its capacity; 200 conversations that keep 60 % of their blocks from turn
to turn; opaque block names, events on, the caller skipping ahead to the next arrival. CPU time, so that
other load on the machine does not count; the requests are made beforehand.
"""

import gc
import random
import time
from dataclasses import dataclass

from evenhand.engine.batching import Engine
from evenhand.engine.content import BlockContent
from evenhand.engine.limits import EngineLimits, StepTime
from evenhand.engine.request import EngineRequest


@dataclass(frozen=True)
class Case:
    block_size: int
    blocks: int
    sequences: int
    prompt_tokens: int
    output_tokens: int
    interval_ns: float
    named_output: bool = True


CASES = (
    Case(512, 2_000, 64, 8_000, 200, 450e6),
    Case(64, 4_000, 32, 1_000, 200, 80e6),
    Case(16, 20_000, 64, 500, 100, 30e6),
    Case(16, 20_000, 64, 1_000, 100, 60e6),
    Case(16, 20_000, 64, 1_000, 100, 60e6, named_output=False),
    Case(16, 4_000, 64, 1_000, 200, 60e6),
)


def requests_of(case: Case, count: int) -> list[tuple[int, EngineRequest]]:
    """(arrival ns, request), by arrival."""
    chance = random.Random(1)
    conversations: list[list[int]] = [[] for _ in range(200)]
    made: list[tuple[int, EngineRequest]] = []
    now, fresh = 0.0, 1
    for index in range(count):
        prompt = int(case.prompt_tokens * chance.uniform(0.5, 1.5))
        output = int(case.output_tokens * chance.uniform(0.5, 1.5))
        blocks = (prompt + output if case.named_output else prompt) // case.block_size
        turn = chance.randrange(len(conversations))
        kept = conversations[turn][: int(blocks * 0.6)]
        names = kept + list(range(fresh, fresh + blocks - len(kept)))
        fresh += blocks
        conversations[turn] = names
        now += chance.expovariate(1 / case.interval_ns)
        content = BlockContent(names, block_size=case.block_size)
        made.append((int(now), EngineRequest(str(index), content, prompt, output)))
    return made


def run(case: Case, count: int) -> str:
    """One row of the table."""
    longest = 2 * (case.prompt_tokens + case.output_tokens)
    limits = EngineLimits(case.block_size, case.blocks, case.sequences, 8_192, longest)
    engine = Engine(limits, StepTime(), coalesce_removals=True)
    arrivals = requests_of(case, count)
    gc.collect()
    gc.freeze()
    started = time.process_time()
    now = position = calls = steps = cached = prompts = preempted = 0
    while position < count or engine.has_work:
        if not engine.has_work:
            now = max(now, arrivals[position][0])
        while position < count and arrivals[position][0] <= now:
            engine.submit(arrivals[position][1])
            position += 1
        result = engine.advance(arrivals[position][0] - now if position < count else 10**12)
        now += result.duration_ns
        calls += 1
        steps += result.steps
        preempted += len(result.preempted)
        for request in result.finished:
            cached += request.cached_tokens
            prompts += request.prompt_tokens
    rate = count / (time.process_time() - started)
    gc.unfreeze()
    named = "yes" if case.named_output else "no"
    shape = f"{case.block_size:>5} {case.prompt_tokens:>7} {case.output_tokens:>7} {named:>6}"
    return f"{shape} {rate:>9.0f} {steps / calls:>11.1f} {cached / prompts:>7.2f} {preempted / count:>10.2f}"


if __name__ == "__main__":
    print("block  prompt  output  named  requests/s  steps/call  cached  preempted")
    for case in CASES:
        print(run(case, 10_000))
