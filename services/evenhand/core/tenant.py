"""A tenant in one pool: its queue, its clock, and the requests that wait.

A queue is always in order of age: a request that lost its worker goes back to where its age puts it, which is
the front but for older ones that it had overtaken. Only the first H requests (``heads``) are ever looked at.

This module keeps state and orders it; it decides nothing.
"""

from collections import OrderedDict
from itertools import islice
from typing import TYPE_CHECKING

from evenhand.core.estimator import ServiceRate
from evenhand.core.facts import Request, TenantSpec, TenantState
from evenhand.core.ids import RequestId, WorkerId

if TYPE_CHECKING:
    from evenhand.core.tickets import OpenTicket

NO_MATCHES: dict[WorkerId, int] = {}


class Queued:
    """One admitted request while it waits, and again while its leg runs (for the next leg)."""

    __slots__ = (
        "age",
        "cached",
        "cached_best",
        "enqueued_at_ns",
        "excluded",
        "leg",
        "map_version",
        "output_tokens_estimated",
        "overtaken",
        "prompt_tokens",
        "request",
        "tokens_total",
    )

    def __init__(self, request: Request, age: int, enqueued_at_ns: int, output_tokens_estimated: int) -> None:
        self.request = request
        self.age = age
        """Order of admission in the pool; smaller is older."""
        self.enqueued_at_ns = enqueued_at_ns
        self.output_tokens_estimated = output_tokens_estimated
        self.prompt_tokens = request.prompt_tokens
        self.tokens_total = request.prompt_tokens + request.output_tokens_max
        """What a worker must be able to hold to ever run this."""
        self.excluded: tuple[WorkerId, ...] = request.excluded_workers
        self.leg = 1
        self.overtaken = 0
        self.cached = NO_MATCHES
        """Usable cached tokens by worker, as of ``map_version``; absent: 0."""
        self.cached_best = 0
        self.map_version = -1

    @property
    def is_taken_over(self) -> bool:
        """Known from a ticket of an earlier term: its age is below any of this one."""
        return self.age < 0


class BestHead:
    """A tenant's head with the largest cached share at one worker, regardless of room; and the smallest need."""

    __slots__ = ("blocks", "blocks_max", "blocks_min", "plain", "queued", "share", "tokens", "uniform")

    def __init__(self, queued: Queued, tokens: int, share: float, blocks: int, plain: bool) -> None:
        self.queued = queued
        self.tokens = tokens
        """Cached tokens there."""
        self.share = share
        self.blocks = blocks
        """KV blocks it needs there."""
        self.blocks_min = blocks
        self.blocks_max = blocks
        """The least and the most that any of the heads needs there."""
        self.uniform = False
        """No head is excluded anywhere or too large for any worker: all workers that hold no part are alike."""
        self.plain = plain
        """Neither excluded there, nor too large, nor possibly declined: room is all it needs."""


class Tenant:
    """Mutable state of a tenant. Its clock ``v`` and its place in A are written by ``FairQueue`` alone."""

    __slots__ = (
        "_heads",
        "backlogged_from_ns",
        "backlogged_ns",
        "best",
        "cold",
        "cost_due",
        "cost_due_mark",
        "cost_got",
        "forgotten",
        "granted",
        "in_a",
        "matched_at_ns",
        "matched_version",
        "outstanding",
        "queue",
        "queue_bytes",
        "reach_tokens",
        "service",
        "spec",
        "v",
        "warm_workers",
    )

    def __init__(self, spec: TenantSpec) -> None:
        self.spec = spec
        self.queue: OrderedDict[RequestId, Queued] = OrderedDict()
        self.queue_bytes = 0
        self.v = 0.0
        self.in_a = False
        self.reach_tokens = 0
        """The smallest ``tokens_total`` of its first H: workers that hold as much are its F. 0 outside A."""
        self.granted: dict[RequestId, OpenTicket] = {}
        """Its open tickets, by request."""
        self.outstanding = 0.0
        """Cost booked for its open tickets."""
        self.service = ServiceRate()
        self.forgotten = False
        self.cost_got = 0.0
        self.cost_due = 0.0
        self.cost_due_mark = 0.0
        self.backlogged_ns = 0
        self.backlogged_from_ns = 0
        self._heads: tuple[Queued, ...] | None = None
        self.best: dict[WorkerId, BestHead] = {}
        """What placement worked out per worker, until a head, its look-up or a worker's size changes."""
        self.cold: BestHead | None = None
        """The same for any worker that holds no part of any head."""
        self.warm_workers: set[WorkerId] | None = None
        """Workers that hold a part of a head; None: not worked out. Never iterated."""
        self.matched_at_ns = 0
        self.matched_version = -1

    @property
    def may_run(self) -> bool:
        """Has a queue and is inside its own limits."""
        limit = self.spec.concurrency_max
        return (
            bool(self.queue)
            and (limit == 0 or len(self.granted) < limit)
            and self.spec.state is not TenantState.SUSPENDED
        )

    def enqueue(self, queued: Queued) -> None:
        """Add the youngest request."""
        self.queue[queued.request.request_id] = queued
        self.queue_bytes += queued.request.size_bytes
        if self._heads is None or len(self.queue) <= len(self._heads) + 1:
            self.heads_changed()

    def put_back(self, queued: Queued) -> None:
        """Return a request to the place of its age; O(requests older than it that still wait)."""
        older = self._older(queued.age)
        self.queue[queued.request.request_id] = queued
        self.queue.move_to_end(queued.request.request_id, last=False)
        for before in reversed(older):
            self.queue.move_to_end(before.request.request_id, last=False)
        self.queue_bytes += queued.request.size_bytes
        self.heads_changed()

    def remove(self, request_id: RequestId) -> Queued:
        """Take a waiting request out, wherever it stands."""
        queued = self.queue.pop(request_id)
        self.queue_bytes -= queued.request.size_bytes
        self.heads_changed()
        return queued

    def heads(self, count: int) -> tuple[Queued, ...]:
        """The first ``count`` waiting requests, oldest first; ``count`` is the same at every call."""
        if self._heads is None:
            self._heads = tuple(islice(self.queue.values(), count))
        return self._heads

    def heads_changed(self) -> None:
        """Forget what was derived from the first H requests."""
        self._heads = None
        self.forget_best()

    def forget_best(self) -> None:
        """Forget what placement worked out per worker."""
        self.best.clear()
        self.cold = self.warm_workers = None

    def _older(self, age: int) -> list[Queued]:
        older: list[Queued] = []
        for queued in self.queue.values():
            if queued.age > age:
                break
            older.append(queued)
        return older
