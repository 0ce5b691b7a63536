"""Arrivals of one public trace crossed with prefix trees of another.

No public trace holds both tenants and block hashes. ServeGen's clients say who asks when; Mooncake's
conversations, or the sessions of an agent, say what prompts share. Each client is a tenant with a cache of its
own. It keeps a few conversations open; an arrival is the next request of one of them, by chance, and a
conversation that ends is replaced by another, drawn from a shuffled pool. Lengths are those of the conversations;
requests longer than the parameters allow are left out.

The arrivals are thinned by chance to the rate asked for, which keeps clients' shares and much of their burstiness.
A tenant is well-behaved if it asks for no more than an equal part of all that is asked for, in cost without cache.

Sources and licences stand beside the data (``simulation/traces/SOURCES.md``).
"""

import gzip
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any

from evenhand.core.errors import InvalidInput
from evenhand.core.facts import CostWeights
from evenhand.engine.limits import EngineLimits, StepTime
from evenhand.policies.policy import Arrival
from evenhand.simulation.trials.workload import TenantPlan, Workload, in_order

NS_PER_MS = 1_000_000
TRACE_S = 600.0
"""Length of the arrivals' trace."""

OPEN_MAX = 1_000
"""Conversations that a tenant may have open at a time."""
CHARACTERS_PER_TOKEN = 4
COST = CostWeights()


@dataclass(frozen=True, slots=True)
class Crossed:
    """Parameters of both crossed workloads."""

    requests_per_second: float = 8.0
    duration_s: float = 240.0
    open_conversations: int = 8
    """That a tenant has at a time."""
    block_size: int = 512
    kv_blocks: int = 400
    slots: int = 32
    model_tokens_max: int = 40_960
    """Of the engines, and of the requests that are taken over."""
    output_tokens_max: int = 2_048
    """Of the requests that are taken over."""

    def __post_init__(self) -> None:
        if not 1 <= self.open_conversations <= OPEN_MAX:
            raise InvalidInput(f"open_conversations is {self.open_conversations}, but must be 1 to {OPEN_MAX}.")


MOONCAKE: Mapping[str, object] = {}
AGENTS: Mapping[str, object] = {
    "block_size": 64,
    "kv_blocks": 512,
    "slots": 16,
    "model_tokens_max": 16_384,
    "requests_per_second": 40.0,
    "duration_s": 90.0,
}
"""Blocks of 256 characters are 64 tokens."""


@dataclass(frozen=True, slots=True)
class Row:
    """One request of a conversation."""

    prompt_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...]


def mooncake(plan: Crossed, seed: int) -> Workload:
    """ServeGen's arrivals, Mooncake's conversations: those that share all but the first block, common to all."""
    conversations: dict[int, list[Row]] = {}
    for fields in trace_rows("mooncake_conversations.jsonl.gz"):
        prompt, output, runs = fields
        ids = _ids(runs)
        conversations.setdefault(ids[1] if len(ids) > 1 else ids[0], []).append(Row(prompt, max(1, output), ids))
    return _crossed("servegen-mooncake", list(conversations.values()), plan, 512, seed)


def agent_sessions(plan: Crossed, seed: int) -> Workload:
    """ServeGen's arrivals, agents' sessions; four characters are a token."""
    sessions: dict[int, list[Row]] = {}
    for fields in trace_rows("agent_sessions.jsonl.gz"):
        session, prompt_characters, output_characters, runs = fields
        prompt, output = prompt_characters // CHARACTERS_PER_TOKEN, output_characters // CHARACTERS_PER_TOKEN
        sessions.setdefault(session, []).append(Row(max(1, prompt), max(1, output), _ids(runs)))
    return _crossed("servegen-agents", list(sessions.values()), plan, 64, seed)


@lru_cache(maxsize=4)
def trace_rows(name: str) -> list[list[Any]]:
    """Rows of a trace that comes with this package; ``InvalidInput`` names a broken line."""
    rows = []
    path = files("evenhand.simulation") / "traces" / name
    for number, line in enumerate(gzip.decompress(path.read_bytes()).splitlines(), 1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise InvalidInput(f"Line {number} of the trace {name} is broken: {error}.") from error
        rows.append(row)
    return rows


def _ids(runs: Sequence[int]) -> tuple[int, ...]:
    pairs = zip(runs[::2], runs[1::2], strict=True)
    return tuple(block for first, count in pairs for block in range(first, first + count))


class _Pool:
    """Conversations in shuffled order, again and again; each time round they are other ones."""

    def __init__(self, conversations: list[list[Row]], chance: random.Random) -> None:
        self._conversations = conversations
        self._order = list(range(len(conversations)))
        chance.shuffle(self._order)
        self._taken = 0

    def take(self) -> "_Conversation":
        around, at = divmod(self._taken, len(self._order))
        self._taken += 1
        number = self._order[at]
        return _Conversation(f"{around}/{number}", around << 32, self._conversations[number])


class _Conversation:
    """One that a tenant has open."""

    def __init__(self, name: str, salt: int, rows: list[Row]) -> None:
        self.name = name
        self.salt = salt
        self._rows = rows
        self._next = 0

    def next(self) -> Row:
        self._next += 1
        return self._rows[self._next - 1]

    @property
    def over(self) -> bool:
        return self._next == len(self._rows)


def _crossed(name: str, conversations: list[list[Row]], plan: Crossed, trace_block: int, seed: int) -> Workload:
    """Cross arrivals with conversations."""
    if plan.block_size != trace_block:
        raise InvalidInput(f"its trace has blocks of {trace_block} tokens, not of {plan.block_size}.")
    conversations = [kept for rows in conversations if (kept := [row for row in rows if _allowed(row, plan)])]
    if not conversations:
        raise InvalidInput("its trace has no request as short as that.")
    chance = random.Random(f"{name}/{seed}")  # noqa: S311 - no secret
    times = _arrivals(plan, chance)
    pool = _Pool(conversations, chance)
    open_ones: dict[int, list[_Conversation]] = {}
    drawn: list[tuple[int, int, _Conversation, Row]] = []
    demand: dict[int, float] = {}
    for at_ns, client in times:
        mine = open_ones.setdefault(client, [])
        while len(mine) < plan.open_conversations:
            mine.append(pool.take())
        at = chance.randrange(len(mine))
        conversation = mine[at]
        row = conversation.next()
        if conversation.over:
            del mine[at]
        drawn.append((at_ns, client, conversation, row))
        demand[client] = demand.get(client, 0.0) + COST.cost(row.prompt_tokens, 0, row.output_tokens)
    even = sum(demand.values()) / max(1, len(demand))
    arrivals = [
        Arrival(
            number,
            at_ns,
            f"client-{client}",
            tuple((client + 1) << 48 | conversation.salt | block for block in _whole(row, plan.block_size)),
            row.prompt_tokens,
            row.output_tokens,
            row.output_tokens,
            session=f"client-{client}/{conversation.name}",
            well_behaved=demand[client] <= even,
        )
        for number, (at_ns, client, conversation, row) in enumerate(drawn)
    ]
    tenants = tuple(TenantPlan(f"client-{client}", 1.0, demand[client] <= even) for client in sorted(demand))
    limits = EngineLimits(plan.block_size, plan.kv_blocks + 1, plan.slots, model_tokens_max=plan.model_tokens_max)
    return Workload(name, tenants, in_order(arrivals), limits, StepTime())


def _allowed(row: Row, plan: Crossed) -> bool:
    total = row.prompt_tokens + row.output_tokens
    return total <= plan.model_tokens_max and row.output_tokens <= plan.output_tokens_max


def _whole(row: Row, block_size: int) -> tuple[int, ...]:
    """Ids of the prompt's whole blocks."""
    return row.block_ids[: row.prompt_tokens // block_size]


def _arrivals(plan: Crossed, chance: random.Random) -> list[tuple[int, int]]:
    """(ns, client), thinned to the rate asked for, from a random stretch of the trace."""
    rows = trace_rows("servegen_arrivals.jsonl.gz")
    if not 0 < plan.duration_s <= TRACE_S:
        raise InvalidInput(f"its arrivals last {TRACE_S:.0f} s, and cannot be taken for {plan.duration_s} s.")
    share = plan.requests_per_second * TRACE_S / len(rows)
    if share > 1.0:
        raise InvalidInput(f"its arrivals come {len(rows) / TRACE_S:.1f} times a second at most.")
    begin_ms = chance.uniform(0.0, (TRACE_S - plan.duration_s) * 1_000)
    end_ms = begin_ms + plan.duration_s * 1_000
    return [
        (int((at_ms - begin_ms) * NS_PER_MS), client)
        for at_ms, client in rows
        if begin_ms <= at_ms < end_ms and chance.random() < share
    ]
