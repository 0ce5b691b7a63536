"""Who is calling, and for which tenant.

The tenant comes from the credential: ``authorization: Bearer KEY`` names a principal, and an ordinary one has
one tenant. Only a gateway names tenants, among those it is allowed (``*`` allows all). What a client writes into a
request can narrow this, never widen it. Usage is believed from principals of role ``service`` alone.

Without ``insecure_loopback`` a call without a key is refused. With it (development, loopback) such a call acts
as a gateway for all tenants; a key that is shown all the same is checked as ever.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from evenhand.core.errors import Unavailable
from evenhand.core.ids import TenantId
from evenhand.ports import ALL_TENANTS, Principal
from evenhand.scheduler.directory_watch import DirectoryWatch, expired
from evenhand.wire.status import (
    CREDENTIAL_MISSING,
    CREDENTIAL_UNKNOWN,
    DIRECTORY_AWAY,
    TENANT_NOT_ALLOWED,
    WireError,
    wire_error,
)

KEY_CHARACTERS_MAX = 512
DIRECTORY_RETRY_MS = 1_000
LOOPBACK_DEVELOPER = Principal(name="loopback", role="service", tenants=(ALL_TENANTS,), gateway=True)
"""Who calls without a key under ``insecure_loopback``."""


@dataclass(frozen=True, slots=True)
class Caller:
    """A principal and the digest of the key it showed; empty for one that showed none."""

    principal: Principal
    key_sha256: bytes = b""

    @property
    def usage_believed(self) -> bool:
        return self.principal.role == "service"

    @property
    def expired(self) -> bool:
        """The key was good when it was shown, and is so no more."""
        return expired(self.principal)


class CallRefused(Exception):
    """The call ends here; ``error`` says why."""

    def __init__(self, error: WireError) -> None:
        super().__init__(error.sentence)
        self.error = error


class Identity:
    """Turns the metadata of a call into its caller."""

    def __init__(self, watch: DirectoryWatch, insecure_loopback: bool) -> None:
        self._watch = watch
        self._insecure_loopback = insecure_loopback

    @property
    def revision(self) -> int:
        """Changes when a caller has to be looked up again."""
        return self._watch.revision

    async def caller_of(self, metadata: Iterable[tuple[str, str | bytes]] | None) -> Caller:
        """The caller a call's metadata names; raises ``CallRefused``."""
        key = _bearer_key(metadata or ())
        if key is None:
            if self._insecure_loopback:
                return Caller(LOOPBACK_DEVELOPER)
            raise CallRefused(
                wire_error(CREDENTIAL_MISSING, "The call shows no API key (authorization: Bearer …).")
            )
        digest = hashlib.sha256(key.encode()).digest()
        principal = self._watch.cached_principal(digest)
        return Caller(principal, digest) if principal is not None else await self._looked_up(digest)

    async def still(self, caller: Caller) -> Caller:
        """The caller as of the present directory, for streams that outlive a change; raises ``CallRefused``."""
        return await self._looked_up(caller.key_sha256) if caller.key_sha256 else caller

    async def _looked_up(self, digest: bytes) -> Caller:
        try:
            principal = await self._watch.principal_of(digest)
        except Unavailable as error:
            sentence = "The API key cannot be checked now: the directory is away or busy."
            raise CallRefused(wire_error(DIRECTORY_AWAY, sentence, DIRECTORY_RETRY_MS)) from error
        if principal is None:
            raise CallRefused(wire_error(CREDENTIAL_UNKNOWN, "The API key is unknown, revoked or expired."))
        return Caller(principal, digest)


def tenant_for(caller: Caller, named: str) -> TenantId:
    """The tenant a caller acts for, given the one its request names (empty: none); raises ``CallRefused``."""
    principal = caller.principal
    if principal.role == "auditor":
        raise _not_allowed(f"Principal {principal.name} may look, not ask for places.")
    if principal.gateway:
        if not named:
            raise _not_allowed(f"Gateway {principal.name} must name the tenant it acts for.")
        if ALL_TENANTS in principal.tenants or named in principal.tenants:
            return TenantId(named)
        raise _not_allowed(f"Gateway {principal.name} may not act for the tenant it named.")
    if len(principal.tenants) != 1:
        raise _not_allowed(f"Principal {principal.name} must have one tenant, or be a gateway.")
    own = principal.tenants[0]
    if own == ALL_TENANTS or named not in ("", own):
        raise _not_allowed(f"Principal {principal.name} acts for its own tenant only.")
    return own


def may_use_tenant(caller: Caller, tenant_id: TenantId) -> bool:
    """Whether a caller may renew or settle a ticket of this tenant."""
    principal = caller.principal
    if principal.role == "auditor":
        return False
    return tenant_id in principal.tenants or (principal.gateway and ALL_TENANTS in principal.tenants)


def _not_allowed(sentence: str) -> CallRefused:
    return CallRefused(wire_error(TENANT_NOT_ALLOWED, sentence))


def _bearer_key(metadata: Iterable[tuple[str, str | bytes]]) -> str | None:
    for name, value in metadata:
        if name == "authorization" and isinstance(value, str) and value[:7].lower() == "bearer ":
            key = value[7:].strip()
            return key if key and len(key) <= KEY_CHARACTERS_MAX else None
    return None
