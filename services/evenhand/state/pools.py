"""Who may speak for a pool: workers that agree with it on model, block size and key scheme.

The first worker to announce itself defines its pool; from then on the directory's word decides. A worker that
disagrees is refused with the reason, and its events are not folded until it announces something else: keys of
another block size or scheme would match nothing, or worse, the wrong thing. Events of a worker that has never
announced itself wait for its announcement in the same way; a snapshot then brings what they said.

One writer, the state service. Bounded: refusals and strangers are remembered up to ``REMEMBERED_MAX``.
"""

from collections.abc import Iterable
from enum import Enum

from evenhand.core.announcement import check_announcement
from evenhand.core.ids import PoolId, WorkerId
from evenhand.core.kv import WorkerAnnounced
from evenhand.ports import Directory, PoolSpec

REMEMBERED_MAX = 4_096


class Standing(Enum):
    """How a worker's events are to be treated."""

    ADMITTED = "admitted"
    REFUSED = "refused"
    """It announced something that its pool is not."""
    UNANNOUNCED = "unannounced"


class PoolGate:
    """Admits or refuses workers at their announcements."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._pools: dict[PoolId, PoolSpec] = {}
        self._admitted: dict[WorkerId, PoolId] = {}
        self._refused: dict[WorkerId, str] = {}

    def restore(self, announced: Iterable[WorkerAnnounced]) -> None:
        """Workers that were admitted before this service started."""
        for worker in announced:
            self._admitted[worker.worker_id] = worker.pool_id

    def standing(self, worker_id: WorkerId) -> Standing:
        if worker_id in self._admitted:
            return Standing.ADMITTED
        return Standing.REFUSED if worker_id in self._refused else Standing.UNANNOUNCED

    def is_admitted(self, worker_id: WorkerId) -> bool:
        return worker_id in self._admitted

    async def decide(self, announced: WorkerAnnounced) -> str | None:
        """Admit (None) or refuse with a sentence; asks the directory about what is new or does not fit.

        Raises ``Unavailable`` if the directory is away; nothing is decided then.
        """
        reason = check_announcement(None, announced)
        if reason is None:
            reason = await self._misfit(announced)
        if reason is None:
            self._refused.pop(announced.worker_id, None)
            self._admitted[announced.worker_id] = announced.pool_id
            return None
        self._admitted.pop(announced.worker_id, None)
        self._refused[announced.worker_id] = reason
        if len(self._refused) > REMEMBERED_MAX:
            del self._refused[next(iter(self._refused))]
        return reason

    async def _misfit(self, announced: WorkerAnnounced) -> str | None:
        """Why the worker does not fit its pool, as the directory knows it; None if it does, or defines it."""
        pool = self._pools.get(announced.pool_id)
        if pool is not None and check_announcement(pool, announced) is None:
            return None
        # An administrator may have changed the pool since it was last asked for.
        mine = PoolSpec(
            announced.pool_id,
            announced.model,
            announced.block_size_tokens,
            announced.key_scheme,
            announced.salt_generation,
        )
        pool = self._pools[announced.pool_id] = await self._directory.register_pool(mine)
        return check_announcement(pool, announced)

    def forget(self, worker_id: WorkerId) -> None:
        """The worker left; whoever comes under its name announces itself first."""
        self._admitted.pop(worker_id, None)
        self._refused.pop(worker_id, None)
