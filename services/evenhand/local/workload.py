"""What the demo's tenants ask for, planned in advance from a seed.

A plan is a list of arrivals in time order. It is open loop: an arrival does not wait for an earlier answer, so
the same plan puts the same load on every routing policy, and a slow policy cannot make its own load lighter.

Three tenants stand for the three forces that pull on a router:

=========  ==========================================================================================
``flood``  a few applications with a 1,600-token prefix each, together several times its fair share
``chat``   multi-turn conversations: every turn's prompt begins with all of the turns before
``cold``   prompts that nobody has seen before
=========  ==========================================================================================

Token ids are drawn from seeded generators: no prompt text exists. Alternatively a plan replays rows of the
Mooncake conversation trace (kvcache-ai/Mooncake, FAST25 release, Apache-2.0), scaled in time and length; that
trace names no tenants, so a conversation's root block decides which tenant it belongs to.
"""

import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from evenhand.core.errors import InvalidInput

VOCABULARY = 30_000
"""Token ids are drawn from 1 … this."""

MOONCAKE_BLOCK_TOKENS = 512
"""Tokens behind one ``hash_id`` of the trace."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a plan. ``at_ms`` counts from the start of the load."""

    at_ms: float
    tenant: str
    prompt: tuple[int, ...]
    output_tokens: int


@dataclass(frozen=True, slots=True)
class DemoLoad:
    """Rates and lengths of the three tenants; lengths in tokens."""

    flood_per_second: float = 48.0
    chat_per_second: float = 4.0
    cold_per_second: float = 2.0
    flood_applications: int = 4
    shared_prefix_tokens: int = 1_600
    flood_suffix_tokens: int = 64
    flood_output_tokens: int = 24
    conversations: int = 8
    turn_tokens: int = 96
    turns_max: int = 8
    system_tokens: int = 256
    chat_output_tokens: int = 32
    cold_prompt_tokens: int = 900
    cold_output_tokens: int = 24


def _tokens(generator: random.Random, count: int) -> tuple[int, ...]:
    return tuple(generator.choices(range(1, VOCABULARY), k=count))


def _times(generator: random.Random, per_second: float, duration_ms: float) -> Iterator[float]:
    """Poisson arrivals."""
    at_ms = 0.0
    while per_second > 0:
        at_ms += generator.expovariate(per_second) * 1_000
        if at_ms >= duration_ms:
            return
        yield at_ms


def _flood(load: DemoLoad, generator: random.Random, duration_ms: float) -> Iterator[Arrival]:
    shared = [_tokens(generator, load.shared_prefix_tokens) for _ in range(load.flood_applications)]
    for at_ms in _times(generator, load.flood_per_second, duration_ms):
        prompt = generator.choice(shared) + _tokens(generator, load.flood_suffix_tokens)
        yield Arrival(at_ms, "flood", prompt, load.flood_output_tokens)


def _chat(load: DemoLoad, generator: random.Random, duration_ms: float) -> Iterator[Arrival]:
    system = _tokens(generator, load.system_tokens)
    histories = [system] * load.conversations
    for turn, at_ms in enumerate(_times(generator, load.chat_per_second, duration_ms)):
        conversation = turn % load.conversations
        if turn % (load.conversations * load.turns_max) < load.conversations:
            histories[conversation] = system
        prompt = histories[conversation] + _tokens(generator, load.turn_tokens)
        yield Arrival(at_ms, "chat", prompt, load.chat_output_tokens)
        histories[conversation] = prompt + _tokens(generator, load.chat_output_tokens)


def _cold(load: DemoLoad, generator: random.Random, duration_ms: float) -> Iterator[Arrival]:
    for at_ms in _times(generator, load.cold_per_second, duration_ms):
        prompt = _tokens(generator, load.cold_prompt_tokens)
        yield Arrival(at_ms, "cold", prompt, load.cold_output_tokens)


def plan(load: DemoLoad, duration_ms: float, seed: int) -> list[Arrival]:
    """The three tenants' arrivals over ``duration_ms``, in time order."""
    arrivals = [
        arrival
        for tenant, kind in enumerate((_flood, _chat, _cold))
        for arrival in kind(load, random.Random(f"{seed}/{tenant}"), duration_ms)  # noqa: S311 - no secret
    ]
    return sorted(arrivals, key=lambda arrival: (arrival.at_ms, arrival.tenant))


def _trace_rows(path: Path, duration_ms: float, speed: float) -> Iterable[tuple[float, int, Sequence[int]]]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
                at_ms = float(row["timestamp"]) / speed
                output_tokens = int(row["output_length"])
                blocks = [int(block) for block in row["hash_ids"]]
            except (ValueError, KeyError, TypeError) as error:
                raise InvalidInput(f"Line {number} of the trace {path} is no Mooncake row: {error!r}.") from error
            if at_ms >= duration_ms:
                return
            yield at_ms, output_tokens, blocks


def plan_from_mooncake(
    path: Path,
    duration_ms: float,
    speed: float = 30.0,
    shrink: int = 32,
    tenants: Sequence[str] = ("red", "green", "blue"),
) -> list[Arrival]:
    """Replay the trace ``speed`` times as fast with prompts ``shrink`` times as short, over ``duration_ms``.

    A block of 512 tokens becomes 512 / ``shrink`` tokens drawn from its id alone, so shared blocks stay shared.
    Raises ``InvalidInput`` for a line that is no row of the trace, naming the line.
    """
    per_block = max(1, MOONCAKE_BLOCK_TOKENS // shrink)
    arrivals = []
    for at_ms, output_tokens, blocks in _trace_rows(path, duration_ms, speed):
        prompt = tuple(
            token
            for block in blocks
            for token in _tokens(random.Random(block), per_block)  # noqa: S311 - content by id
        )
        root = blocks[1] if len(blocks) > 1 else blocks[0]
        arrivals.append(Arrival(at_ms, tenants[root % len(tenants)], prompt, max(1, output_tokens // shrink)))
    return arrivals
