"""The one interface of every placement policy, and the facts it decides upon.

A policy is told of arrivals and of all that becomes of them, and is asked after each event what can go now::

    submit ─▶ (waits in the policy) ──place──▶ on a worker ──first_token──▶ ──finished──▶
                       ▲                             │
                       └────────── worker_lost ──────┘        cancelled: at any time, once

What always holds, on the caller's side: times never go backwards; each arrival is submitted once and ends in
exactly one of ``finished``, ``cancelled`` and ``take_refused``; between the two it is placed once for each time
it was submitted or came back through ``worker_lost``; callbacks of one instant come before the one ``place`` of
that instant, which is called while something is unplaced and when the policy asked to be woken. On the policy's
side: ``place`` names only workers that have joined and are not lost; equal calls give equal answers.

A plain router sends at once, and what it sends waits in the engine's own queue. A policy with a central queue
keeps the backlog and answers ``place`` with what a worker has room for. The caller need not know which is which,
but for ``holds_backlog``, by which a simulation knows how far an engine may run ahead.

Fields of ``Arrival`` marked hidden are the truth of a simulation: only oracles read them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from evenhand.core.errors import InvalidInput
from evenhand.core.facts import Usage
from evenhand.core.ids import WorkerId
from evenhand.core.kv import KvBatch, SnapshotPart


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request, as a workload plans it."""

    arrival_id: int
    """Unique within a workload, and its order: smaller is not later."""
    at_ns: int
    tenant: str
    block_names: tuple[int, ...]
    """64-bit keys of all whole blocks of the prompt, chained: equal names mean equal prefixes."""
    prompt_tokens: int
    output_tokens_max: int
    """What the client asks for at most."""
    output_tokens: int
    """Hidden: what the engine will produce, 1 … ``output_tokens_max``."""
    user: str = ""
    session: str = ""
    """Conversation or application; empty: none is known."""
    weight: float = 1.0
    """The tenant's."""
    well_behaved: bool = True
    """Hidden but for strict priority: its tenant asks for no more than its share."""
    output_block_names: tuple[int, ...] = ()
    """Hidden: keys of the blocks that the output fills, after those of the prompt; later turns begin with them."""
    cancel_after_ns: int | None = None
    """Hidden: its client gives up so long after the arrival."""
    output_tokens_expected: int | None = None
    """The client's own estimate, if it gives one."""


@dataclass(frozen=True, slots=True)
class FleetWorker:
    """What a router knows of a worker when it joins."""

    worker_id: WorkerId
    slots: int
    """Sequences the engine runs at once."""
    kv_blocks: int
    block_size: int
    batched_tokens_max: int = 2_048
    """Prompt tokens the engine computes in one step at most."""
    epoch: int = 1
    """Grows with each life of the worker's cache."""

    @property
    def kv_tokens(self) -> int:
        return self.kv_blocks * self.block_size


@dataclass(frozen=True, slots=True)
class Placed:
    """Send this arrival to this worker now."""

    arrival: Arrival
    worker_id: WorkerId


class EngineOrder(Enum):
    """In which order the engines behind a policy admit what waits in them."""

    FCFS = "fcfs"
    """First come, first served: vLLM's default."""
    LONGEST_PREFIX = "longest_prefix"
    """Most cached first: SGLang's default."""
    DEFICIT_LONGEST_PREFIX = "deficit_longest_prefix"
    """DLPM within the engine: most cached first among tenants with deficit left."""


def check_least(settings: object, least: float, *names: str) -> None:
    """``InvalidInput`` that names the first of these parameters that is below ``least`` or is no number."""
    for name in names:
        value = getattr(settings, name)
        if not value >= least:
            raise InvalidInput(f"The parameter {name!r} is {value}, but must be at least {least}.")


class Policy(Protocol):
    """Decides which arrival goes where, and when. One caller; see the module for the order of calls."""

    name: str
    holds_backlog: bool
    """True: arrivals may wait here for room. False: ``place`` empties what was submitted, at once."""
    wants_map: bool
    """Whether ``map_changed`` is to be called."""
    wants_progress: bool
    """Whether ``progress`` is to be called."""
    refuses: bool
    """Whether ``take_refused`` is to be called."""
    engine_order: EngineOrder

    def worker_joined(self, worker: FleetWorker, now_ns: int) -> None:
        """A worker is ready; a later epoch of a lost one comes with an empty cache."""

    def worker_lost(self, worker_id: WorkerId, returned: Sequence[Arrival], now_ns: int) -> None:
        """A worker is gone. ``returned``, by arrival id, were placed there and not ended: they wait here again."""

    def submit(self, arrival: Arrival, now_ns: int) -> None:
        """A request has come."""

    def place(self, now_ns: int) -> Sequence[Placed]:
        """All that goes now, in order; each is from here on with its worker. Empty if nothing goes."""

    def take_refused(self) -> Sequence[Arrival]:
        """Those refused since the last call: over a limit, too large, or a queue was full. They end here."""

    def first_token(self, arrival: Arrival, worker_id: WorkerId, cached_tokens: int, now_ns: int) -> None:
        """Its prefill is over; ``cached_tokens`` of its prompt were not computed."""

    def progress(self, worker_id: WorkerId, produced: Sequence[tuple[Arrival, int]], now_ns: int) -> None:
        """Output tokens produced since the last call, by arrival; the first token counts. Before ``finished``."""

    def finished(self, arrival: Arrival, worker_id: WorkerId, usage: Usage, now_ns: int) -> None:
        """Its last token is out."""

    def cancelled(self, arrival: Arrival, worker_id: WorkerId | None, usage: Usage, now_ns: int) -> None:
        """Its client gave up. ``worker_id`` None: it waited here. ``usage``: what was done for it."""

    def map_changed(self, message: KvBatch | SnapshotPart, now_ns: int) -> None:
        """What a worker's cache did, as the worker's edge publishes it; it may lag, be lost or come twice."""

    def wake_at_ns(self) -> int | None:
        """When ``place`` has more to give though nothing else happens; None: never."""
