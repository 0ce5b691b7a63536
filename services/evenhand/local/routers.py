"""Ways to place the demo's requests, behind one interface: Evenhand, and policies that everybody knows.

Round robin and cache-greedy send at once to a worker, as a plain router does; what they send waits in the
engine's own queue, which knows no tenants. They are the classes of ``evenhand.policies``, which the simulations
compare. Evenhand holds the backlog itself.
"""

import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from evenhand.client import AsyncClient
from evenhand.core.block_key import block_keys, root_hash
from evenhand.core.errors import InvalidConfig
from evenhand.core.facts import Usage, WorkerSpec
from evenhand.local.workload import Arrival
from evenhand.policies import policy as policies
from evenhand.policies.policy import FleetWorker, Policy


@dataclass(slots=True)
class Placement:
    """Where to send a request; what was used is written back into it."""

    address: str
    cache_salt: str = ""
    predicted_cached_tokens: int | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    first_token: Callable[[], None] = lambda: None
    """To be called when the first token is here."""


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
            placement = Placement(
                grant.address, grant.cache_salt, grant.predicted_cached_tokens, first_token=grant.first_token
            )
            try:
                yield placement
            finally:
                grant.record_usage(
                    prompt_tokens=placement.prompt_tokens,
                    cached_tokens=placement.cached_tokens,
                    output_tokens=placement.output_tokens,
                )


class PolicyRouter:
    """A policy that sends at once, in front of live engines: the very class that simulations run.

    ``specs`` are the workers it may choose from, ``salts`` the tenants' cache salts. A policy that wants events is
    told none, so it must be one that assumes what it sent. Raises ``InvalidConfig`` for one that holds requests
    back: nobody here would tell it what engines do in between.
    """

    def __init__(
        self, policy: Policy, specs: Sequence[WorkerSpec], salts: dict[str, str], model: str, name: str = ""
    ) -> None:
        if policy.holds_backlog or policy.wants_map or policy.wants_progress:
            raise InvalidConfig(f"The policy {policy.name!r} cannot stand before live engines here.")
        self.name = name or policy.name
        self._policy = policy
        self._addresses = {spec.worker_id: spec.address for spec in specs}
        self._salts = salts
        self._model = model
        self._block_size = specs[0].block_size_tokens
        self._arrived = 0
        for spec in specs:
            worker = FleetWorker(spec.worker_id, spec.slots, spec.kv_blocks, spec.block_size_tokens)
            policy.worker_joined(worker, time.monotonic_ns())

    @asynccontextmanager
    async def place(self, arrival: Arrival) -> AsyncIterator[Placement]:
        salt = self._salts[arrival.tenant]
        now_ns = time.monotonic_ns()
        keys = block_keys(arrival.prompt, self._block_size, root_hash(self._model, salt=salt))
        output_tokens = arrival.output_tokens
        asked = policies.Arrival(
            self._arrived, now_ns, arrival.tenant, tuple(keys), len(arrival.prompt), output_tokens, output_tokens
        )
        self._arrived += 1
        self._policy.submit(asked, now_ns)
        (placed,) = self._policy.place(now_ns)
        placement = Placement(self._addresses[placed.worker_id], salt)
        try:
            yield placement
        finally:
            now_ns = time.monotonic_ns()
            usage = Usage(placement.prompt_tokens, placement.cached_tokens, placement.output_tokens)
            if placement.output_tokens:
                self._policy.first_token(asked, placed.worker_id, placement.cached_tokens, now_ns)
            if placement.output_tokens == output_tokens:
                self._policy.finished(asked, placed.worker_id, usage, now_ns)
            else:
                self._policy.cancelled(asked, placed.worker_id, usage, now_ns)
