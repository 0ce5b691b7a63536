"""Tenants, pools and credentials, in memory."""

from collections.abc import Callable

from evenhand.core.errors import Unavailable
from evenhand.core.facts import TenantSpec
from evenhand.core.ids import PoolId, TenantId
from evenhand.ports import Directory, PoolSpec, Principal


class MemoryDirectory(Directory):
    """``Directory`` in memory; ``now_ms`` (wall clock, injected) decides which credentials have expired."""

    def __init__(self, now_ms: Callable[[], int] = lambda: 0) -> None:
        self.available = True
        """False: every call of the port raises ``Unavailable`` and changes nothing."""
        self._now_ms = now_ms
        self._tenants: dict[TenantId, TenantSpec] = {}
        self._pools: dict[PoolId, PoolSpec] = {}
        self._principals: dict[bytes, Principal] = {}
        self._revision = 1

    async def tenants(self) -> tuple[TenantSpec, ...]:
        self._require_available()
        return tuple(self._tenants[tenant_id] for tenant_id in sorted(self._tenants))

    async def pools(self) -> tuple[PoolSpec, ...]:
        self._require_available()
        return tuple(self._pools[pool_id] for pool_id in sorted(self._pools))

    async def register_pool(self, pool: PoolSpec) -> PoolSpec:
        self._require_available()
        if pool.pool_id not in self._pools:
            self._pools[pool.pool_id] = pool
            self._revision += 1
        return self._pools[pool.pool_id]

    async def principal_of(self, key_sha256: bytes) -> Principal | None:
        self._require_available()
        principal = self._principals.get(key_sha256)
        if principal is None or (
            principal.expires_at_ms is not None and principal.expires_at_ms <= self._now_ms()
        ):
            return None
        return principal

    async def revision(self) -> int:
        self._require_available()
        return self._revision

    def set_tenant(self, tenant: TenantSpec) -> None:
        """Add or replace a tenant, as an administrator does."""
        self._tenants[tenant.tenant_id] = tenant
        self._revision += 1

    def remove_tenant(self, tenant_id: TenantId) -> None:
        if self._tenants.pop(tenant_id, None) is not None:
            self._revision += 1

    def set_pool(self, pool: PoolSpec) -> None:
        self._pools[pool.pool_id] = pool
        self._revision += 1

    def set_principal(self, key_sha256: bytes, principal: Principal) -> None:
        """Add or replace the credential whose whole key has this SHA-256 (32 bytes)."""
        self._principals[key_sha256] = principal
        self._revision += 1

    def revoke(self, key_sha256: bytes) -> None:
        if self._principals.pop(key_sha256, None) is not None:
            self._revision += 1

    def _require_available(self) -> None:
        if not self.available:
            raise Unavailable("The directory is away.")
