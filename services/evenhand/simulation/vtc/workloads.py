"""The workloads of VTC's published measurements: who asks for what, when.

Evenly spaced arrivals with a phase of its own for each client, all prompts and outputs 256 tokens; and the trace
of a chat arena, real arrival times and lengths of 27 clients. Rates and durations are the published ones.

The seed makes two runs of one experiment differ, as little as runs of a real one do: it draws the phases, and for
the trace, which has none, how late each arrival is, up to ``LATE_MS_MAX``, as no sender is punctual.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from random import Random

from evenhand.core.errors import InvalidInput
from evenhand.core.ids import TenantId

NS_PER_S = 1_000_000_000
NS_PER_MS = 1_000_000
LATE_MS_MAX = 20
TOKENS = 256
"""Prompt and output of every synthetic request."""
TOKENS_ADDED = 2
"""What the published client's tokenizer adds to a prompt of n words: a begin token, and one for its last space."""
TRACE = "vtc_arena_real_trace.csv"
_HEADER = "req_time_s,client,prompt_len,output_len"


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. ``prompt_tokens`` is what it is accounted with; the engine computes ``TOKENS_ADDED`` more."""

    ask_id: int
    at_ns: int
    client: TenantId
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Client:
    """Sends ``rate_per_s`` evenly; with ``on_s`` > 0 only in every second span of so many seconds, from 0 on."""

    name: TenantId
    rate_per_s: float
    on_s: float = 0.0


def evenly(clients: Sequence[Client], duration_s: float, seed: int) -> list[Ask]:
    """Arrivals by time, then client. The first of each client is between one and two of its intervals in."""
    random = Random(seed)  # noqa: S311  a seeded workload
    asks: list[tuple[int, TenantId]] = []
    for client in clients:
        phase = random.random()
        for number in range(1, int(client.rate_per_s * duration_s) + 1):
            at_s = (phase + number) / client.rate_per_s
            if not client.on_s or int(at_s // client.on_s) % 2 == 0:
                asks.append((round(at_s * NS_PER_S), client.name))
    return [Ask(ask_id, at_ns, name, TOKENS, TOKENS) for ask_id, (at_ns, name) in enumerate(sorted(asks))]


def numbered(rates_per_s: Sequence[float], *, first_on_s: float = 0.0) -> list[Client]:
    """Clients 1 … n with these rates; ``first_on_s`` makes the first one come and go."""
    return [
        Client(TenantId(f"client-{number}"), rate, first_on_s if number == 1 else 0.0)
        for number, rate in enumerate(rates_per_s, start=1)
    ]


def arena(seed: int) -> list[Ask]:
    """The trace that comes with the package, each arrival a little late."""
    text = (files("evenhand.simulation.vtc") / "data" / TRACE).read_text(encoding="utf-8")
    random = Random(seed)  # noqa: S311  a seeded workload
    trace = read_trace(text, TRACE)
    late = [replace(ask, at_ns=ask.at_ns + random.randrange(LATE_MS_MAX * NS_PER_MS)) for ask in trace]
    late.sort(key=lambda ask: ask.at_ns)
    return [replace(ask, ask_id=ask_id) for ask_id, ask in enumerate(late)]


def read_trace(text: str, name: str) -> list[Ask]:
    """Requests of a trace, by time. InvalidInput names the first line that is wrong."""
    lines = text.splitlines()
    if not lines or lines[0].strip() != _HEADER:
        raise InvalidInput(f"{name}: the first line must be {_HEADER!r}.")
    rows: list[tuple[int, TenantId, int, int]] = []
    for number, line in enumerate(lines[1:], start=2):
        try:
            at_s, client, prompt_tokens, output_tokens = line.split(",")
            row = (round(float(at_s) * NS_PER_S), TenantId(client), int(prompt_tokens), int(output_tokens))
        except (ValueError, OverflowError) as error:
            raise InvalidInput(f"{name}, line {number}: {line!r} is not {_HEADER}.") from error
        if row[0] < 0 or not client or row[2] < 1 or row[3] < 1:
            raise InvalidInput(f"{name}, line {number}: time must be 0 or more, lengths 1 or more, client named.")
        rows.append(row)
    rows.sort(key=lambda row: row[0])
    return [Ask(ask_id, *row) for ask_id, row in enumerate(rows)]


def clients_of(asks: Iterable[Ask]) -> list[TenantId]:
    """All clients, by name."""
    return sorted({ask.client for ask in asks})
