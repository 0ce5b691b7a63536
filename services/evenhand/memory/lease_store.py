"""Fenced leases and their checkpoints, in memory, on a clock that the caller gives."""

from collections.abc import Callable
from dataclasses import dataclass

from evenhand.core.errors import Fenced, Unavailable
from evenhand.core.ids import PoolId
from evenhand.ports import Checkpoint, Lease, LeaseStore


@dataclass(slots=True)
class _Held:
    lease: Lease
    expires_at_ms: int


class MemoryLeaseStore(LeaseStore):
    """``LeaseStore`` in memory. Terms of a pool only grow, whoever asks."""

    def __init__(self, now_ms: Callable[[], int]) -> None:
        self.available = True
        """False: every call raises ``Unavailable`` and changes nothing."""
        self._now_ms = now_ms
        self._held: dict[PoolId, _Held] = {}
        self._checkpoints: dict[PoolId, Checkpoint] = {}

    async def acquire(self, pool_id: PoolId, holder: str, ttl_ms: int) -> Lease | None:
        self._require_available()
        held = self._held.get(pool_id)
        if held and held.lease.holder != holder and self._now_ms() < held.expires_at_ms:
            return None
        return self._grant(pool_id, holder, ttl_ms)

    async def renew(self, lease: Lease) -> None:
        self._require_available()
        held = self._current(lease)
        if self._now_ms() >= held.expires_at_ms:
            raise Fenced(f"The lease of pool {lease.pool_id} has run out.")
        held.expires_at_ms = self._now_ms() + lease.ttl_ms

    async def release(self, lease: Lease) -> None:
        self._require_available()
        held = self._held.get(lease.pool_id)
        if held and held.lease.term == lease.term:
            held.expires_at_ms = self._now_ms()

    async def save_checkpoint(self, lease: Lease, payload: bytes) -> None:
        self._require_available()
        self._current(lease)
        self._checkpoints[lease.pool_id] = Checkpoint(lease.pool_id, lease.term, payload)

    async def load_checkpoint(self, pool_id: PoolId) -> Checkpoint | None:
        self._require_available()
        return self._checkpoints.get(pool_id)

    def take_over(self, pool_id: PoolId, holder: str, ttl_ms: int) -> Lease:
        """Do as another scheduler would after the lease ran out: everyone else is fenced from here on."""
        return self._grant(pool_id, holder, ttl_ms)

    def _grant(self, pool_id: PoolId, holder: str, ttl_ms: int) -> Lease:
        held = self._held.get(pool_id)
        lease = Lease(pool_id, holder, held.lease.term + 1 if held else 1, ttl_ms)
        self._held[pool_id] = _Held(lease, self._now_ms() + ttl_ms)
        return lease

    def _current(self, lease: Lease) -> _Held:
        held = self._held.get(lease.pool_id)
        if held is None or held.lease.term != lease.term:
            raise Fenced(f"Term {lease.term} of pool {lease.pool_id} is over: another scheduler owns it.")
        return held

    def _require_available(self) -> None:
        if not self.available:
            raise Unavailable("The lease store is away.")
