"""A request while it waits, and what placement knows of the first of a queue at one worker.

This module keeps state; it decides nothing.
"""

from typing import TYPE_CHECKING

from evenhand.core.facts import Request
from evenhand.core.ids import WorkerId

if TYPE_CHECKING:
    from evenhand.core.tenant import User
    from evenhand.core.worker import Worker

NO_MATCHES: dict[WorkerId, int] = {}


class Queued:
    """One admitted request while it waits, and again while its leg runs (for the next leg)."""

    __slots__ = (
        "age",
        "cached",
        "cached_best",
        "declined_since_ns",
        "enqueued_at_ns",
        "excluded",
        "first_key",
        "has_others",
        "has_others_version",
        "idled",
        "leg",
        "map_version",
        "matched_at_ns",
        "output_tokens_estimated",
        "overtaken",
        "prompt_tokens",
        "request",
        "tokens_total",
        "user",
    )

    def __init__(self, request: Request, age: int, enqueued_at_ns: int, output_tokens_estimated: int) -> None:
        self.request = request
        self.first_key = request.block_keys[0] if request.block_keys else None
        """None of a prompt shorter than a block."""
        self.age = age
        """Order of admission in the pool; smaller is older."""
        self.enqueued_at_ns = enqueued_at_ns
        self.output_tokens_estimated = output_tokens_estimated
        self.prompt_tokens = request.prompt_tokens
        self.tokens_total = request.prompt_tokens + request.output_tokens_max
        """What a worker must be able to hold to ever run this."""
        self.excluded = frozenset(request.excluded_workers)
        self.has_others = False
        """Some worker that is not excluded could take it some day; as of ``has_others_version``."""
        self.has_others_version = -1
        self.leg = 1
        self.idled = 0.0
        """Cost that others missed while a worker was kept for this request."""
        self.overtaken = 0
        self.declined_since_ns: int | None = None
        """When a place for it was first declined for want of its prefix there; None: not yet."""
        self.cached = NO_MATCHES
        """Usable cached tokens by worker, as of ``map_version``; absent: 0."""
        self.cached_best = 0
        self.map_version = -1
        self.matched_at_ns = 0
        """When it was last looked up again because its look-up had become old; 0: not yet."""
        self.user: User | None = None
        """Whose queue it waits in; set when it is enqueued."""

    def exclude(self, worker_id: WorkerId) -> None:
        """It does not go back there as long as there is another."""
        self.excluded |= {worker_id}
        self.has_others_version = -1

    @property
    def is_taken_over(self) -> bool:
        """Known from a ticket of an earlier term: its age is below any of this one."""
        return self.age < 0


class BestHead:
    """A user's head with the largest cached share at one worker, regardless of room; and the smallest need."""

    __slots__ = (
        "blocks",
        "blocks_max",
        "blocks_min",
        "declined_pass",
        "plain",
        "queued",
        "share",
        "tokens",
        "uniform",
        "waits_until_ns",
        "warmer",
    )

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
        self.warmer: tuple[Worker, ...] = ()
        """For each of the heads a worker that made it be declined there; empty: not all were. As long as each of
        them has no room, all are declined again."""
        self.plain = plain
        """Neither excluded there, nor too large, nor possibly declined: room is all it needs."""
        self.declined_pass = 0
        """The pass over the workers with room that last found ``is_declined``: it holds for the whole of it."""
        self.waits_until_ns = 0
        """Until when none of the heads declined there is to be taken, as of ``warmer``; past: look in full."""

    def is_declined(self) -> bool:
        """All heads were declined there, and are again: what made them be still has no room."""
        for worker in self.warmer:
            if worker.closed is None or worker.stale:
                return False
        return bool(self.warmer)
