"""Ways to place the demo's requests, behind one interface: Evenhand, and two that everybody knows.

Round robin and cache-greedy send at once to a worker, as a plain router does; what they send waits in the
engine's own queue, which knows no tenants. Evenhand holds the backlog itself.
"""

import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

from evenhand.client import AsyncClient
from evenhand.core.block_key import block_keys, root_hash
from evenhand.core.cache_map import CacheMap
from evenhand.core.facts import WorkerSpec
from evenhand.core.ids import TicketId, WorkerId
from evenhand.core.presence import Presence
from evenhand.local.workload import Arrival


@dataclass(slots=True)
class Placement:
    """Where to send a request; what was used is written back into it."""

    address: str
    cache_salt: str = ""
    predicted_cached_tokens: int | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


class Router(Protocol):
    """Decides where a request goes. Leaving the block ends the request's claim on its worker."""

    name: str

    def place(self, arrival: Arrival) -> AbstractAsyncContextManager[Placement]: ...


class EvenhandRouter:
    """Through the SDK: acquire, call, settle. One client a tenant, each with its own key."""

    name = "evenhand"

    def __init__(self, clients: dict[str, AsyncClient], wait_s_max: float) -> None:
        self._clients = clients
        self._wait_s_max = wait_s_max

    @asynccontextmanager
    async def place(self, arrival: Arrival) -> AsyncIterator[Placement]:
        client = self._clients[arrival.tenant]
        async with client.acquire(
            tokens=arrival.prompt, max_output_tokens=arrival.output_tokens, timeout=self._wait_s_max
        ) as grant:
            placement = Placement(grant.address, grant.cache_salt, grant.predicted_cached_tokens)
            try:
                yield placement
            finally:
                grant.record_usage(
                    prompt_tokens=placement.prompt_tokens,
                    cached_tokens=placement.cached_tokens,
                    output_tokens=placement.output_tokens,
                )


class RoundRobinRouter:
    """The next worker, whatever it holds and whatever it does."""

    name = "round-robin"

    def __init__(self, addresses: Sequence[str], salts: dict[str, str]) -> None:
        self._next = itertools.cycle(addresses)
        self._salts = salts

    @asynccontextmanager
    async def place(self, arrival: Arrival) -> AsyncIterator[Placement]:
        yield Placement(next(self._next), self._salts[arrival.tenant])


@dataclass(slots=True)
class _GreedyWorker:
    spec: WorkerSpec
    in_flight: int = 0


@dataclass(slots=True)
class CacheGreedyRouter:
    """The worker that was sent the longest prefix of this prompt before; among equals the least in flight.

    What a worker holds is assumed from what it was sent, bounded by its capacity, as prefix-aware routers do.
    """

    specs: Sequence[WorkerSpec]
    salts: dict[str, str]
    model: str
    name: str = "cache-greedy"
    _workers: dict[WorkerId, _GreedyWorker] = field(default_factory=dict)
    _presence: Presence = field(default_factory=lambda: Presence(CacheMap()))
    _placed: int = 0

    def __post_init__(self) -> None:
        for spec in self.specs:
            self._workers[spec.worker_id] = _GreedyWorker(spec)
            self._presence.worker_joined(spec)

    @asynccontextmanager
    async def place(self, arrival: Arrival) -> AsyncIterator[Placement]:
        salt = self.salts[arrival.tenant]
        block_size = self.specs[0].block_size_tokens
        keys = block_keys(arrival.prompt, block_size, root_hash(self.model, salt=salt))
        held = {match.worker_id: match.blocks for match in self._presence.match(keys)}
        chosen = min(
            self._workers.values(),
            key=lambda worker: (-held.get(worker.spec.worker_id, 0), worker.in_flight, worker.spec.worker_id),
        )
        self._placed += 1
        self._presence.presume(TicketId(str(self._placed)), chosen.spec.worker_id, keys, 0)
        chosen.in_flight += 1
        try:
            yield Placement(chosen.spec.address, salt)
        finally:
            chosen.in_flight -= 1
