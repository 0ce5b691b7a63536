"""A pair that may be dispatched, and one worker as a pass over the workers with room looks at it."""

from typing import NamedTuple

from evenhand.core.front import Front
from evenhand.core.queued import Queued
from evenhand.core.tenant import Tenant, User
from evenhand.core.worker import Worker


class Choice:
    """A pair that may be dispatched now, and what it was weighed against."""

    __slots__ = (
        "backfilled",
        "cached_tokens",
        "candidates",
        "declined",
        "front",
        "guaranteed",
        "queued",
        "score",
        "user",
        "waits_until_ns",
        "worker",
    )

    def __init__(self, user: User, queued: Queued, worker: Worker, cached_tokens: int, score: float) -> None:
        self.user = user
        self.queued = queued
        self.worker = worker
        self.cached_tokens = cached_tokens
        self.score = score
        self.declined = False
        """Only chosen because every pair was declined."""
        self.waits_until_ns = 0
        """Declined, and not to be taken before: its request waits for a warmer worker."""
        self.guaranteed = False
        """A guarantee gives it this place, outside the window."""
        self.backfilled = False
        """Outside the window, by the leave of those that are held up."""
        self.front: Front | None = None
        self.candidates: list[User] = []
        """C_w as it was looked at."""

    @property
    def tenant(self) -> Tenant:
        return self.user.tenant


class View(NamedTuple):
    """One worker with room, as a pass looks at it."""

    worker: Worker
    front: Front
    users: list[User]
    """C_w; where only headroom is left, those of it that may use headroom."""
    looked: list[User]
    """Those of ``users`` that a look may still find something for: without those known to wait."""
    penalty: float
    free_blocks: int
    plain_blocks: int
    """KV blocks that any of ``users`` may take."""
