"""The whole system around two real vLLM engines: what is predicted is what the engine then reports.

Interleaved conversations of three tenants outgrow both engines' caches, so blocks are evicted all the time. Every
turn asks Evenhand for a place, calls the engine it names, and compares the predicted cached tokens with the
engine's own ``cached_tokens``. Then one engine is killed with ``kill -9`` and comes back as another life.
"""

import asyncio
import os
import random
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import asyncpg
import pytest
from tests.e2e.real_engine import MODEL, make_engine, make_model, running

from evenhand.client import AsyncClient, Grant
from evenhand.local.stack import Stack, StackConfig, keys_by_principal
from evenhand.local.stack_file import StackWorker
from evenhand.postgres.seed import SeedApiKey, SeedFile, SeedTenant

PYTHON = os.environ.get("EVENHAND_TEST_VLLM_PYTHON", "")
TENANTS = ("red", "green", "blue")
CONVERSATIONS = 9
TURNS = 72
FRESH_ROUNDS = 5
"""Turns of each new conversation after the return: with one of each old one, enough for a share of 95 %."""
KV_BLOCKS = 40
ANSWER_TOKENS = 16
THINK_SECONDS = 0.1
"""Between an answer and the next question. An eviction is visible to decisions within 50 ms (p99), and these
rounds return to exactly what the question before them evicted."""
READY_SECONDS_MAX = 60.0
AGREEMENT_MIN = 0.95
"""Share of turns whose prediction equals what the engine reports."""

pytestmark = [
    pytest.mark.real_engine,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not PYTHON, reason="EVENHAND_TEST_VLLM_PYTHON names no interpreter that has vLLM"),
]


@dataclass(slots=True)
class Conversation:
    tenant: str
    tokens: list[int]
    workers: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Turn:
    tenant: str
    worker_id: str
    prompt_tokens: int
    predicted: int
    cached: int


class Talk:
    """Conversations over the SDK and the engines' own HTTP."""

    def __init__(self, clients: dict[str, AsyncClient], http: aiohttp.ClientSession, seed: int) -> None:
        self._clients = clients
        self._http = http
        self._random = random.Random(seed)
        self.turns: list[Turn] = []

    def conversation(self, number: int) -> Conversation:
        return Conversation(TENANTS[number % len(TENANTS)], [1, *self._words(70)])

    def _words(self, count: int) -> list[int]:
        return self._random.choices(range(10, 2_000), k=count)

    async def turn(self, conversation: Conversation) -> Turn:
        """One question and its answer; the conversation grows by both."""
        await asyncio.sleep(THINK_SECONDS)
        prompt = conversation.tokens + self._words(24)

        async def call(grant: Grant) -> list[int]:
            body = {
                "model": MODEL, "prompt": prompt, "max_tokens": ANSWER_TOKENS, "ignore_eos": True, "seed": 1,
                "temperature": 0.0, "cache_salt": grant.cache_salt, "return_token_ids": True,
            }  # fmt: skip
            async with self._http.post(f"{grant.address}/v1/completions", json=body) as response:
                response.raise_for_status()
                answer = await response.json()
            usage = answer["usage"]
            grant.record_usage(usage)
            cached = (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0
            conversation.workers.append(grant.worker_id)
            self.turns.append(
                Turn(conversation.tenant, grant.worker_id, len(prompt), grant.predicted_cached_tokens, cached)
            )
            return list(answer["choices"][0]["token_ids"])

        answer = await self._clients[conversation.tenant].run(
            call, tokens=prompt, max_output_tokens=ANSWER_TOKENS, timeout=60
        )
        conversation.tokens = prompt + answer
        return self.turns[-1]


async def copies_in_postgres(dsn: str) -> dict[str, int]:
    """Rows of the cache map by worker, as any SQL user sees them."""
    connection = await asyncpg.connect(dsn)
    try:
        rows = await connection.fetch("select worker_id, count(*) from evenhand.cache_map group by worker_id")
    finally:
        await connection.close()
    return {row[0]: row[1] for row in rows}


async def map_epoch(dsn: str, worker_id: str) -> int:
    connection = await asyncpg.connect(dsn)
    try:
        epoch = await connection.fetchval("select epoch from evenhand.kv_worker where worker_id = $1", worker_id)
    finally:
        await connection.close()
    return int(epoch)


async def workers_ready(stack: Stack, count: int) -> None:
    """Return once so many workers take requests."""
    async with asyncio.timeout(READY_SECONDS_MAX):
        while True:
            pool = (await stack.status())["pool"]
            if isinstance(pool, dict) and [w["state"] for w in pool["workers"]].count("ready") == count:
                return
            await asyncio.sleep(0.1)


def agreement(turns: list[Turn]) -> float:
    return sum(turn.predicted == turn.cached for turn in turns) / len(turns)


async def test_predictions_hold_and_a_killed_engine_comes_back(tmp_path: Path) -> None:
    python, engines = Path(PYTHON), [make_engine(f"vllm-{number}", tmp_path, KV_BLOCKS) for number in range(2)]
    model = await make_model(python, tmp_path)
    workers = tuple(
        StackWorker(
            address=engine.address, kv_events=engine.kv_events, replay=engine.replay, worker_id=engine.name
        )
        for engine in engines
    )
    seed = SeedFile(
        tenants=[SeedTenant(tenant_id=tenant) for tenant in TENANTS],
        api_keys=[SeedApiKey(principal=tenant, tenants=[tenant]) for tenant in TENANTS],
    )
    async with AsyncExitStack() as exit_stack:
        await exit_stack.enter_async_context(running(*engines, python=python, model=model))
        config = StackConfig(tmp_path / "stack", "real", seed, workers, durable=False)
        stack = await exit_stack.enter_async_context(Stack(config))
        http = await exit_stack.enter_async_context(aiohttp.ClientSession())
        keys = keys_by_principal(stack.generated_keys)
        clients = {
            tenant: await exit_stack.enter_async_context(
                AsyncClient(stack.scheduler_address, pool="real", api_key=keys[tenant])
            )
            for tenant in TENANTS
        }
        await workers_ready(stack, 2)
        talk = Talk(clients, http, seed=7)
        conversations = [talk.conversation(number) for number in range(CONVERSATIONS)]

        for turn in range(TURNS):
            await talk.turn(conversations[turn % CONVERSATIONS])
        report(talk.turns)
        assert agreement(talk.turns) >= AGREEMENT_MIN
        later = talk.turns[CONVERSATIONS:]
        assert sum(turn.cached > 0 for turn in later) > len(later) / 2, "conversations return to their engine"
        assert {turn.worker_id for turn in talk.turns} == {engine.name for engine in engines}
        assert sum(turn.prompt_tokens for turn in talk.turns[-CONVERSATIONS:]) > 2 * KV_BLOCKS * 32, "they evict"
        copies = await copies_in_postgres(stack.database.dsn)
        assert all(0 < copies[engine.name] <= KV_BLOCKS for engine in engines), copies

        killed, survivor = engines
        epoch_before = await map_epoch(stack.database.dsn, killed.name)
        await killed.kill()
        before = len(talk.turns)
        for conversation in conversations:
            await talk.turn(conversation)
        assert {turn.worker_id for turn in talk.turns[before:]} == {survivor.name}, "every request was answered"

        await killed.start(python, model)
        await workers_ready(stack, 2)
        before = len(talk.turns)
        fresh = [talk.conversation(number) for number in range(CONVERSATIONS)]
        for conversation in (*conversations, *fresh * FRESH_ROUNDS):
            await talk.turn(conversation)
        back = talk.turns[before:]
        report(back)
        assert killed.name in {turn.worker_id for turn in back}, "the returned engine gets work"
        assert agreement(back) >= AGREEMENT_MIN, "nothing of its earlier life is believed"
        assert await map_epoch(stack.database.dsn, killed.name) > epoch_before


def report(turns: list[Turn]) -> None:
    """For people who read the run's output."""
    wrong = [turn for turn in turns if turn.predicted != turn.cached]
    print(f"\n{len(turns)} turns, {agreement(turns):.1%} predicted exactly; the others: {wrong}")
