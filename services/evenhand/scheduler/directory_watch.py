"""What the scheduler knows of tenants, pools and credentials: the directory, looked at twice a second.

One task polls ``Directory.revision``; when it grows, tenants and pools are read again, what changed is told to the
actor, and every cached credential is forgotten, so that a revoked key is refused within a second. While the
database is away, what was known goes on, and a key that is not cached cannot be checked: the caller is told so.

The cache is bounded and holds SHA-256 digests of keys, never keys. Unknown keys are remembered too, in a space of
their own, so that guesses push out no principal; and at most ``LOOKUPS_MAX`` keys are looked up at once, so that a
flood of guesses neither piles up nor takes the database from whoever needs it more.
"""

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

from evenhand.core.errors import Unavailable
from evenhand.core.facts import TenantSpec
from evenhand.core.ids import PoolId, TenantId
from evenhand.core.steps import Input, TenantChanged, TenantForgotten
from evenhand.logs import get_logger
from evenhand.ports import Directory, PoolSpec, Principal

PRINCIPALS_CACHED_MAX = 4_096
UNKNOWN_KEYS_CACHED_MAX = 1_024
LOOKUPS_MAX = 256

Kept = TypeVar("Kept")

log = get_logger("scheduler.directory")


class DirectoryWatch:
    """Tenants and pool as last read, and principals by the digest of their key."""

    def __init__(
        self, directory: Directory, pool_id: PoolId, poll_ms: int, tell: Callable[[Input], object]
    ) -> None:
        self._directory = directory
        self._pool_id = pool_id
        self._poll_s = poll_ms / 1000
        self._tell = tell
        self._principals: dict[bytes, Principal] = {}
        self._unknown: dict[bytes, None] = {}
        self._lookups = 0
        self.tenants: dict[TenantId, TenantSpec] = {}
        self.pool: PoolSpec | None = None
        self.revision = -1
        """Of what is known here; changes whenever credentials may have."""
        self.away = False
        """True while the directory did not answer the last poll."""

    async def refresh(self) -> bool:
        """Read again if the revision grew; True if it did. Raises ``Unavailable``."""
        revision = await self._directory.revision()
        if revision == self.revision:
            return False
        tenants = {spec.tenant_id: spec for spec in await self._directory.tenants()}
        pools = {pool.pool_id: pool for pool in await self._directory.pools()}
        self._principals.clear()
        self._unknown.clear()
        before, self.tenants = self.tenants, tenants
        self.pool = pools.get(self._pool_id, self.pool)
        self.revision = revision
        for tenant_id, spec in tenants.items():
            if before.get(tenant_id) != spec:
                self._tell(TenantChanged(spec))
        for tenant_id in before:
            if tenant_id not in tenants:
                self._tell(TenantForgotten(tenant_id))
        return True

    async def run(self) -> None:
        """Poll until cancelled."""
        while True:
            await asyncio.sleep(self._poll_s)
            try:
                await self.refresh()
            except Unavailable as error:
                if not self.away:
                    log.warning("directory_away", error=str(error))
                self.away = True
            else:
                self.away = False

    async def define_pool(self, pool: PoolSpec) -> PoolSpec:
        """The pool as stored, adding it if it is unknown. Raises ``Unavailable``."""
        if self.pool is None:
            self.pool = await self._directory.register_pool(pool)
        return self.pool

    def cached_principal(self, key_sha256: bytes) -> Principal | None:
        """The principal of a key that has been looked up since the last change and has not expired."""
        principal = self._principals.get(key_sha256)
        if principal is None or expired(principal):
            return None
        return principal

    async def principal_of(self, key_sha256: bytes) -> Principal | None:
        """The principal of a live key; None if there is none. Raises ``Unavailable``; also if too many ask."""
        principal = self.cached_principal(key_sha256)
        if principal is not None:
            return principal
        if key_sha256 in self._unknown:
            return None
        if self._lookups >= LOOKUPS_MAX:
            raise Unavailable(f"{LOOKUPS_MAX} keys are being looked up already.")
        revision = self.revision
        self._lookups += 1
        try:
            principal = await self._directory.principal_of(key_sha256)
        finally:
            self._lookups -= 1
        if principal is not None and expired(principal):
            principal = None
        if revision == self.revision:  # an answer from before a change is used once, not kept
            if principal is None:
                _keep(self._unknown, key_sha256, None, UNKNOWN_KEYS_CACHED_MAX)
            else:
                _keep(self._principals, key_sha256, principal, PRINCIPALS_CACHED_MAX)
        return principal


def expired(principal: Principal) -> bool:
    """Whether the time of a principal's key is over, by the wall clock."""
    return principal.expires_at_ms is not None and principal.expires_at_ms <= time.time() * 1000


def _keep(cache: dict[bytes, Kept], key: bytes, value: Kept, size_max: int) -> None:
    """Remember a value, forgetting the oldest beyond the bound."""
    while len(cache) >= size_max:
        del cache[next(iter(cache))]
    cache[key] = value
