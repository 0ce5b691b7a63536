"""Who asks for what, and when: the same plan for every route.

Six equal tenants: ``hot`` with a prefix of 1,600 tokens that all its requests share, four in conversations whose
every turn begins with all turns before, and ``cold`` whose prompts nobody has seen. Poisson arrivals, open loop:
an arrival does not wait for an earlier answer. Only the hot tenant's rate grows with the factor; the others' plans
are the same at every factor, to the token.

A tenant's *share* is a sixth of ``busy`` × what the fleet can do, counted in engine time with every prefix cached:

    engine time of a request = output · (step + slots · sequence) / slots + uncached prompt · prefill

Prompts are made of words that the simulated engine's tokenizer holds as one token each, so a plan can be sent as
token ids and as text and is the same prompt in both; routers that match prefixes of text need the text.
"""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from evenhand.engine import tokenizer
from evenhand.engine.content import FIRST_OUTPUT_TOKEN, VOCABULARY_SIZE
from evenhand.local.engines import FleetConfig

HOT, COLD = "hot", "cold"
CHATS = ("chat-1", "chat-2", "chat-3", "chat-4")
TENANTS = (HOT, *CHATS, COLD)
WELL_BEHAVED = (*CHATS, COLD)

FLEET = FleetConfig(
    engines=4, kv_blocks=1_280, slots=16, step_base_ms=24.0, prefill_token_us=150.0, running_sequence_us=1_000.0
)
"""Slow engines: what is waited for is the engines' time, not the two cores that all of this shares."""


@dataclass(frozen=True, slots=True)
class Load:
    """Lengths in tokens."""

    busy: float = 0.55
    """Part of the fleet that six tenants at their share keep busy."""
    modesty: float = 0.75
    """Part of its share that each well-behaved tenant asks for."""
    shared_tokens: int = 1_600
    suffix_tokens: int = 64
    hot_output: int = 24
    system_tokens: int = 256
    turn_tokens: int = 96
    chat_output: int = 32
    conversations: int = 6
    turns_max: int = 8
    cold_tokens: int = 900
    cold_output: int = 24


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request. ``at_ms`` counts from the start of the load; both bodies lack their first brace and model."""

    at_ms: float
    tenant: str
    prompt: tuple[int, ...]
    output_tokens: int
    ids_body: bytes
    text_body: bytes


def engine_ms(fleet: FleetConfig, uncached_tokens: int, output_tokens: int) -> float:
    """Time of one engine that a request takes while all slots are full."""
    step_ms = fleet.step_base_ms + fleet.slots * fleet.running_sequence_us / 1_000
    return output_tokens * step_ms / fleet.slots + uncached_tokens * fleet.prefill_token_us / 1_000


def share_rates(fleet: FleetConfig, load: Load) -> dict[str, float]:
    """Requests per second with which each tenant takes exactly its share."""
    per_request_ms = {
        HOT: engine_ms(fleet, load.suffix_tokens, load.hot_output),
        COLD: engine_ms(fleet, load.cold_tokens, load.cold_output),
    } | {chat: engine_ms(fleet, load.turn_tokens + load.chat_output, load.chat_output) for chat in CHATS}
    share_ms_per_s = load.busy * fleet.engines * 1_000 / len(TENANTS)
    return {tenant: share_ms_per_s / per_request_ms[tenant] for tenant in TENANTS}


def _words(generator: random.Random, count: int) -> tuple[int, ...]:
    return tuple(generator.choices(range(FIRST_OUTPUT_TOKEN, VOCABULARY_SIZE), k=count))


def _hot(load: Load, generator: random.Random) -> Callable[[], tuple[int, ...]]:
    shared = _words(generator, load.shared_tokens)
    return lambda: shared + _words(generator, load.suffix_tokens)


def _cold(load: Load, generator: random.Random) -> Callable[[], tuple[int, ...]]:
    return lambda: _words(generator, load.cold_tokens)


def _chat(load: Load, generator: random.Random) -> Callable[[], tuple[int, ...]]:
    system = _words(generator, load.system_tokens)
    histories = [system] * load.conversations
    turns = iter(range(1 << 30))

    def turn() -> tuple[int, ...]:
        number = next(turns)
        conversation = number % load.conversations
        if number % (load.conversations * load.turns_max) < load.conversations:
            histories[conversation] = system
        prompt = histories[conversation] + _words(generator, load.turn_tokens)
        histories[conversation] = prompt + _words(generator, load.chat_output)
        return prompt

    return turn


def _times(generator: random.Random, per_second: float, duration_ms: float) -> Iterator[float]:
    at_ms = generator.expovariate(per_second) * 1_000
    while at_ms < duration_ms:
        yield at_ms
        at_ms += generator.expovariate(per_second) * 1_000


def _bodies(words: tuple[int, ...], output_tokens: int) -> tuple[tuple[int, ...], bytes, bytes]:
    """The prompt as the engine sees it, and both request bodies."""
    text = tokenizer.decode(words)
    prompt = (tokenizer.BEGIN, *words)
    rest = json.dumps(
        {
            "max_tokens": output_tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )[1:]
    ids, quoted = json.dumps(prompt, separators=(",", ":")), json.dumps(text)
    return prompt, f'"prompt":{ids},{rest}'.encode(), f'"prompt":{quoted},{rest}'.encode()


def plan(load: Load, fleet: FleetConfig, factor: float, duration_ms: float, seed: int) -> list[Arrival]:
    """All arrivals in time order, the hot tenant at ``factor`` times its share."""
    rates = share_rates(fleet, load)
    outputs = {HOT: load.hot_output, COLD: load.cold_output} | dict.fromkeys(CHATS, load.chat_output)
    arrivals = []
    for tenant in TENANTS:
        prompts_of = {HOT: _hot, COLD: _cold}.get(tenant, _chat)
        prompt_of = prompts_of(load, random.Random(f"{seed}/{tenant}/prompts"))
        rate = rates[tenant] * (factor if tenant == HOT else load.modesty)
        for at_ms in _times(random.Random(f"{seed}/{tenant}/times"), rate, duration_ms):
            prompt, ids_body, text_body = _bodies(prompt_of(), outputs[tenant])
            arrivals.append(Arrival(at_ms, tenant, prompt, outputs[tenant], ids_body, text_body))
    return sorted(arrivals, key=lambda arrival: (arrival.at_ms, arrival.tenant))
