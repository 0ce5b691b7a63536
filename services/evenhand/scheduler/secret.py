"""The master secret: made once, kept in one file that only its owner may read, and never shown.

Salts of cache domains and the key that signs tickets are derived from it, so every scheduler of a pool, standbys
too, must be given the same file. It is 32 random bytes in hex. It appears in no log, record, metric or error; an
error names the file alone.
"""

import hashlib
import hmac
import os
import secrets
import stat
from pathlib import Path

from evenhand.core.block_key import domain_salt
from evenhand.core.errors import InvalidConfig
from evenhand.core.facts import TenantSpec
from evenhand.ports import PoolSpec

SECRET_BYTES = 32
FILE_MODE = 0o600


class MasterSecret:
    """The secret in memory; its representation does not show it."""

    __slots__ = ("_secret",)

    def __init__(self, secret: bytes) -> None:
        if len(secret) < SECRET_BYTES:
            raise InvalidConfig(f"The master secret must be at least {SECRET_BYTES} bytes long.")
        self._secret = secret

    def __repr__(self) -> str:
        return "MasterSecret(…)"

    def salt(self, pool: PoolSpec, domain: str) -> str:
        """Salt of one cache domain in a pool: what the SDK hashes with and sends as ``cache_salt``."""
        return domain_salt(self._secret, pool.pool_id, domain, pool.salt_generation)

    def ticket_key(self, pool_id: str) -> bytes:
        """Key that signs the tickets of one pool."""
        return hmac.digest(self._secret, b"evenhand.ticket.v1\0" + pool_id.encode(), hashlib.sha256)


def cache_domain(tenant: TenantSpec) -> str:
    """The domain a tenant's cache lies in: itself alone, or the group it was put into.

    The prefixes keep a group from ever having the same name as a tenant.
    """
    return f"group:{tenant.cache_domain}" if tenant.cache_domain else f"tenant:{tenant.tenant_id}"


def load_master_secret(path: Path) -> MasterSecret:
    """Read the secret, making it at the first start.

    Raises ``InvalidConfig`` if others may read the file, if it holds no secret, or if it cannot be made. Two first
    starts at once agree: the file appears complete or not at all, and only one of them can link it.
    """
    try:
        if not path.exists():
            _create(path)
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            raise InvalidConfig(f"The master secret {path} is no regular file.")
        if stat.S_IMODE(mode) & 0o077:
            raise InvalidConfig(
                f"The master secret {path} may be read by others (mode {stat.S_IMODE(mode):04o}): run chmod 600."
            )
        return MasterSecret(bytes.fromhex(path.read_text("ascii").strip()))
    except OSError as error:
        raise InvalidConfig(f"The master secret {path} cannot be used: {error.strerror}.") from error
    except ValueError as error:
        raise InvalidConfig(f"The master secret {path} is not {SECRET_BYTES} bytes in hex.") from error


def _create(path: Path) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    scratch = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, FILE_MODE)
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(secrets.token_hex(SECRET_BYTES) + "\n")
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(scratch, path)
        except FileExistsError:
            return  # another start was first; its secret is the one
    finally:
        os.unlink(scratch)
