"""A worker in one pool: what it can hold and what is reserved there.

Every reservation is made at the moment of decision and given back when the ticket ends, so a burst never piles
up on one worker. Prefill is given back sooner, at the first token. Where clients tell of it, what is pending is
known: the uncached tokens of the tickets *awaited*, those without a first token. One that is silent longer than
its prefill takes (``PREFILL_OVERDUE_FACTOR``) counts no more, and its tenant is modelled until it tells again.

The tickets of tenants that have shown that they do not tell are modelled as one queue served at the worker's
learned rate: each gets a stretch of time ``[start, end)`` behind those before it; what lies ahead of now is
pending.

::

    now        leg 1          leg 2                 prefill_until
     ├──────────┤├──────────────┤├─────── … ─────────┤
     └───────────── pending = that time × rate ──────┘  + uncached tokens awaited
"""

import math
from typing import TYPE_CHECKING
from zlib import crc32

from evenhand.core.estimator import NS_PER_MS, NS_PER_S
from evenhand.core.facts import SchedulerConfig, WorkerLoad, WorkerSpec
from evenhand.core.ids import TenantId, TicketId, WorkerId

if TYPE_CHECKING:
    from evenhand.core.tenant import Tenant
    from evenhand.core.tickets import OpenTicket

MARKS = 1024
"""Bits of a mask of workers, which tells for sure only who is not in it."""

RATE_STEP = 1 / 8
"""Weight of the latest sample of a worker's time per output token."""

RATE_SAMPLES_MAX = 15
"""The prefill rate is the median of so many of the latest samples: steps, batches and queues of the engine make
single ones several times too fast or too slow."""

PREFILL_OVERDUE_FACTOR = 1.5
"""A first token that is not told in so many times what is modelled, and ``PREFILL_OVERDUE_MS`` more, is awaited no
longer: the ticket's prefill is taken to be done. Near the model, because who does not tell closes a worker for all
that time. Where it is told later all the same, the worker has got its next request too soon, once."""

PREFILL_OVERDUE_MS = 1_000
"""For what is no prefill: the network, a step of the engine that is under way."""

PREFILL_SAMPLE_MIN_TOKENS = 64
"""Shorter prefills say more about the step than about the rate."""

SAMPLE_WHOLE_TOKENS = 256
"""A sample of fewer tokens counts in proportion: its fixed costs hide the rate."""


class Worker:
    """Mutable state of a worker. ``is_member`` is written by ``Members`` alone."""

    __slots__ = (
        "_filled_share",
        "_rate_samples",
        "awaited",
        "awaited_tokens",
        "capacity_tokens",
        "closed",
        "complete",
        "draining",
        "filled_blocks",
        "heard_at_ns",
        "is_member",
        "kv_reserved_blocks",
        "load",
        "load_share",
        "mark",
        "open_from_ns",
        "open_ns",
        "output_token_ms",
        "prefill_rate_tokens_per_s",
        "prefill_until_ns",
        "reopens_at_ns",
        "served",
        "spec",
        "stale",
        "tickets",
    )

    def __init__(self, spec: WorkerSpec, now_ns: int, prefill_rate: float, output_token_ms: float) -> None:
        self.spec = spec
        self.capacity_tokens = capacity_tokens(spec)
        self.mark = worker_mark(spec.worker_id)
        self.heard_at_ns = now_ns
        self.load: WorkerLoad | None = None
        self.draining = False
        self.stale = False
        self.complete = True
        self.tickets: dict[TicketId, OpenTicket] = {}
        self.kv_reserved_blocks = 0
        self.prefill_until_ns = 0
        self.awaited: dict[TicketId, OpenTicket] = {}
        """Tickets whose first token will be told, and has not been."""
        self.awaited_tokens = 0
        """Their uncached tokens."""
        self.prefill_rate_tokens_per_s = prefill_rate
        self._rate_samples = [prefill_rate]
        self.output_token_ms = output_token_ms
        self.served: dict[TenantId, Tenant] = {}
        """The last distinct tenants served here, the latest last."""
        self.filled_blocks = 0
        """As of ``fill``."""
        self._filled_share = 0.0
        self.load_share = 0.0
        """How full it is, from 0: the fuller of slots and KV."""
        self.is_member = False
        """Counted in F of the tenants: takes requests at all."""
        self.reopens_at_ns = 0
        """When prefill is expected to leave room again, as last noted; 0: not noted."""
        self.closed: str | None = None
        """Why it has no room now; None: it has."""
        self.open_ns = 0
        """For how long it has had room, up to when it was last closed."""
        self.open_from_ns: int | None = None
        """Since when it has room; None: it has none."""

    def change_spec(self, spec: WorkerSpec) -> None:
        """Take another spec; tickets and what they reserve stay."""
        self.spec = spec
        self.capacity_tokens = capacity_tokens(spec)
        self.fill(self.filled_blocks)
        self._loaded()

    @property
    def slots_used(self) -> int:
        return len(self.tickets)

    def prefill_pending_tokens(self, now_ns: int) -> float:
        """Uncached tokens reserved here whose prefill is not done yet: those awaited, and those modelled."""
        ahead_ns = self.prefill_until_ns - now_ns
        if ahead_ns <= 0:
            return float(self.awaited_tokens)
        return self.awaited_tokens + ahead_ns * self.prefill_rate_tokens_per_s / NS_PER_S

    def open_ns_at(self, now_ns: int) -> int:
        """For how long it has had room so far."""
        return self.open_ns + (now_ns - self.open_from_ns if self.open_from_ns is not None else 0)

    def note_open(self, is_open: bool, now_ns: int) -> None:
        """From here on it has room, or has none."""
        self.open_ns = self.open_ns_at(now_ns)
        self.open_from_ns = now_ns if is_open else None

    def fill(self, blocks: int) -> None:
        """So many blocks of its cache hold something, as the map and what is assumed beside it say."""
        self.filled_blocks = blocks
        self._filled_share = min(1.0, blocks / self.spec.kv_blocks)

    def score_penalty(self, config: SchedulerConfig, now_ns: int) -> float:
        """What load, pending prefill and the filling of its cache take off the score of every pair here."""
        penalty = config.load_penalty * self.load_share
        ahead_ns = self.prefill_until_ns - now_ns
        if ahead_ns > 0 or self.awaited_tokens:
            pending_tokens = float(self.awaited_tokens)
            if ahead_ns > 0:
                pending_tokens += ahead_ns * self.prefill_rate_tokens_per_s / NS_PER_S
            penalty += config.prefill_penalty * (pending_tokens / config.prefill_pending_max_tokens)
        return penalty + config.fill_penalty * self._filled_share

    def ttft_ms(self, uncached_tokens: int, now_ns: int) -> float:
        """Predicted time to first token of a prompt dispatched here now."""
        pending = self.prefill_pending_tokens(now_ns) + uncached_tokens
        return pending / self.prefill_rate_tokens_per_s * 1000.0 + self.output_token_ms

    def blocks_for(self, tokens: int) -> int:
        """KV blocks that hold so many tokens."""
        return -(-tokens // self.spec.block_size_tokens)

    def reserve(self, ticket: "OpenTicket", uncached_tokens: int, now_ns: int) -> None:
        """Take a slot, KV blocks and prefill room for a ticket."""
        rate = self.prefill_rate_tokens_per_s
        if uncached_tokens and ticket.user.tenant.tells_first_token is not False:
            ahead_ns = (self.prefill_pending_tokens(now_ns) + uncached_tokens) / rate * NS_PER_S
            ticket.prefill_start_ns, ticket.prefill_end_ns = now_ns, now_ns + round(ahead_ns)
            overdue_ns = round(PREFILL_OVERDUE_FACTOR * ahead_ns) + PREFILL_OVERDUE_MS * NS_PER_MS
            ticket.prefill_overdue_ns = now_ns + overdue_ns
            ticket.awaited_tokens = uncached_tokens
            self.awaited_tokens += uncached_tokens
            self.awaited[ticket.ticket.ticket_id] = ticket
        else:
            start_ns = max(self.prefill_until_ns, now_ns)
            ticket.prefill_start_ns = start_ns
            ticket.prefill_end_ns = start_ns + round(uncached_tokens / rate * NS_PER_S)
            self.prefill_until_ns = ticket.prefill_end_ns
        self.kv_reserved_blocks += ticket.kv_blocks
        self.tickets[ticket.ticket.ticket_id] = ticket
        self._loaded()

    def release(self, ticket: "OpenTicket", now_ns: int) -> None:
        """Give back all that ``reserve`` took, once."""
        del self.tickets[ticket.ticket.ticket_id]
        self.kv_reserved_blocks -= ticket.kv_blocks
        assert self.kv_reserved_blocks >= 0, "KV reserved below zero"
        self._loaded()
        self.prefilled(ticket, now_ns)
        if not self.tickets:
            self.prefill_until_ns = 0

    def _loaded(self) -> None:
        """Tickets, KV or the spec have changed."""
        self.load_share = max(len(self.tickets) / self.spec.slots, self.kv_reserved_blocks / self.spec.kv_blocks)

    def prefilled(self, ticket: "OpenTicket", now_ns: int) -> None:
        """A ticket's prefill is done, or will not be: give back its prefill room. Once counts."""
        if self.awaited.pop(ticket.ticket.ticket_id, None) is not None:
            self.awaited_tokens -= ticket.awaited_tokens
            ticket.awaited_tokens = 0
        elif ticket.prefill_end_ns > now_ns:
            ahead_ns = ticket.prefill_end_ns - max(ticket.prefill_start_ns, now_ns)
            self.prefill_until_ns = max(now_ns, self.prefill_until_ns - ahead_ns)
        ticket.prefill_end_ns = min(ticket.prefill_end_ns, now_ns)

    def give_up_overdue(self, now_ns: int) -> None:
        """Await the first tokens no more that are not told in the time that their prefill takes.

        Their tenant is taken to tell none, until it does again.
        """
        for ticket in [each for each in self.awaited.values() if each.prefill_overdue_ns <= now_ns]:
            self.prefilled(ticket, now_ns)
            ticket.user.tenant.tells_first_token = False

    def prefill_room_at_ns(self, prefill_pending_max_tokens: int) -> int:
        """When time alone next makes prefill room of a worker that has none, or may: look again then."""
        left_tokens = prefill_pending_max_tokens - self.awaited_tokens
        if left_tokens > 0:
            ahead_ns = left_tokens / self.prefill_rate_tokens_per_s * NS_PER_S
            return self.prefill_until_ns - int(ahead_ns) + 2
        return min(ticket.prefill_overdue_ns for ticket in self.awaited.values())

    def note_served(self, tenant: "Tenant", tenants_max: int) -> None:
        """Remember the tenant as the last one served here."""
        tenant_id = tenant.spec.tenant_id
        self.served.pop(tenant_id, None)
        self.served[tenant_id] = tenant
        if len(self.served) > tenants_max:
            del self.served[next(iter(self.served))]

    def learn_ttft(self, prefill_tokens: float, ttft_ms: float) -> None:
        """Take in an observed time to first token for so many tokens of prefill, those ahead included."""
        if prefill_tokens < PREFILL_SAMPLE_MIN_TOKENS or not 0.1 <= ttft_ms < math.inf:
            return
        prefill_ms = max(ttft_ms - self.output_token_ms, ttft_ms / 4)
        samples = self._rate_samples
        samples.append(prefill_tokens / prefill_ms * 1000.0)
        if len(samples) > RATE_SAMPLES_MAX:
            del samples[0]
        ordered, count = sorted(samples), len(samples)
        self.prefill_rate_tokens_per_s = (ordered[(count - 1) // 2] + ordered[count // 2]) / 2

    def learn_output(self, output_tokens: int, leg_ms: float) -> None:
        """Take in how long a whole leg took per output token."""
        if output_tokens > 0 and leg_ms > 0.0:
            step = RATE_STEP * min(1.0, output_tokens / SAMPLE_WHOLE_TOKENS)
            self.output_token_ms += (leg_ms / output_tokens - self.output_token_ms) * step

    def predicted_end_ns(self, ticket: "OpenTicket", now_ns: int) -> int:
        """When a ticket held here is expected to end, by the learned rates; never before now.

        Of one that is overdue only its age tells anything: it is expected to run as long again as it has so far.
        """
        output_ns = ticket.ticket.output_tokens_estimated * self.output_token_ms * NS_PER_MS
        end_ns = ticket.prefill_end_ns + round(output_ns)
        return end_ns if end_ns > now_ns else now_ns + max(0, now_ns - ticket.prefill_start_ns)


def worker_mark(worker_id: WorkerId) -> int:
    """One bit for a worker, the same for a name at all times; few workers share one."""
    return 1 << (crc32(worker_id.encode()) % MARKS)


def capacity_tokens(spec: WorkerSpec) -> int:
    """Most tokens, prompt and output together, of a request that the worker could ever run."""
    kv_tokens = spec.kv_blocks * spec.block_size_tokens
    if spec.model_length_max_tokens > 0:
        return min(kv_tokens, spec.model_length_max_tokens)
    return kv_tokens
