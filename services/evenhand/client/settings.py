"""Settings of a client: where the schedulers are, who is asking, and every bound it keeps.

What is not given is read, once and when the client is made, from the environment:

===================  =================================================================================
``EVENHAND_ADDRESS``  ``host:port`` of the scheduler, several separated by commas; ``127.0.0.1:7077`` if unset
``EVENHAND_API_KEY``  the API key; none is sent if unset
``EVENHAND_TENANT``   the tenant a gateway's key acts for; a tenant's own key needs none
``EVENHAND_CA_FILE``  PEM file of the authority that signed the scheduler's certificate; switches TLS on
===================  =================================================================================

Always: a key travels in the clear only to this machine, unless the caller says ``tls=False`` in so many words.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import grpc

from evenhand.client.errors import InvalidConfig
from evenhand.loopback import is_loopback

ADDRESS_DEFAULT = "127.0.0.1:7077"
TIMEOUT_S_MAX = 24 * 3600.0

Mode = Literal["session", "unary"]


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How a call is tried again while a scheduler is away. The call's deadline ends it in any case."""

    attempts_max: int = 64
    """Tries of one call, the first included; 1 means never again."""
    backoff_ms_base: float = 50.0
    """Longest pause after the first round of all addresses; doubles each round. The pause is drawn below it."""
    backoff_ms_max: float = 2_000.0
    """The doubling ends here. A pause the scheduler asks for is kept even where it is longer."""

    def __post_init__(self) -> None:
        if self.attempts_max < 1:
            raise InvalidConfig(f"attempts_max must be at least 1, not {self.attempts_max}.")
        if not 0 < self.backoff_ms_base <= self.backoff_ms_max:
            raise InvalidConfig("backoff_ms_base must be above 0 and at most backoff_ms_max.")


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything a client is told, checked. Made by ``settings``."""

    addresses: tuple[str, ...]
    pool: str
    tenant: str
    api_key: str = field(repr=False)
    root_certificates: bytes | None = field(repr=False)
    """PEM bytes; None with ``tls``: the system's."""
    tls: bool
    tls_server_name: str
    mode: Mode
    retry: RetryPolicy
    settle_wait_s: float
    """How long leaving a grant waits for the settlement; it goes on in the background after that."""
    close_wait_s: float
    """How long closing the client waits for what goes on in the background."""
    heartbeat_s: float
    """A stream with something open that stays silent this long is asked whether it lives."""

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Metadata of each call."""
        return (("authorization", f"Bearer {self.api_key}"),) if self.api_key else ()

    def channel(self, address: str) -> grpc.aio.Channel:
        """A channel to one address; connects by itself when it is used."""
        # The channel's own back-off would outlast a restarted scheduler; the retry policy paces the calls instead.
        options: list[tuple[str, str | int]] = [
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.min_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 1_000),
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.enable_http_proxy", 0 if stays_here(address) else 1),
        ]
        if not self.tls:
            return grpc.aio.insecure_channel(address, options=options)
        if self.tls_server_name:
            options.append(("grpc.ssl_target_name_override", self.tls_server_name))
        credentials = grpc.ssl_channel_credentials(root_certificates=self.root_certificates)
        return grpc.aio.secure_channel(address, credentials, options=options)


def settings(
    address: str | Sequence[str] | None,
    *,
    pool: str,
    api_key: str | None = None,
    tenant: str | None = None,
    ca_file: str | os.PathLike[str] | None = None,
    tls: bool | None = None,
    tls_server_name: str = "",
    mode: Mode = "session",
    retry: RetryPolicy | None = None,
    settle_wait_s: float = 2.0,
    close_wait_s: float = 5.0,
    heartbeat_s: float = 10.0,
) -> Settings:
    """Check what the caller said and fill in the environment's defaults; raises ``InvalidConfig``."""
    given = address if address is not None else os.environ.get("EVENHAND_ADDRESS") or ADDRESS_DEFAULT
    parts = given.split(",") if isinstance(given, str) else given
    addresses = tuple(dict.fromkeys(part.strip() for part in parts if part.strip()))
    if not addresses:
        raise InvalidConfig("The scheduler's address is empty.")
    for one in addresses:
        _check_address(one)
    if not pool:
        raise InvalidConfig("The pool's name is empty.")
    if mode not in ("session", "unary"):
        raise InvalidConfig(f"The mode must be session or unary, not {mode!r}.")
    limits = {"settle_wait_s": settle_wait_s, "close_wait_s": close_wait_s, "heartbeat_s": heartbeat_s}
    for name, seconds in limits.items():
        check_seconds(name, seconds, InvalidConfig)
    authority = ca_file if ca_file is not None else os.environ.get("EVENHAND_CA_FILE") or None
    roots = _read_authority(authority) if authority is not None and tls is not False else None
    secure = tls if tls is not None else roots is not None or not all(map(stays_here, addresses))
    key = api_key if api_key is not None else os.environ.get("EVENHAND_API_KEY", "")
    if not key.isascii() or not (key.isprintable()):
        raise InvalidConfig("The API key holds characters that cannot be sent; it must be printable ASCII.")
    return Settings(
        addresses=addresses,
        pool=pool,
        tenant=tenant if tenant is not None else os.environ.get("EVENHAND_TENANT", ""),
        api_key=key,
        root_certificates=roots,
        tls=secure,
        tls_server_name=tls_server_name,
        mode=mode,
        retry=retry or RetryPolicy(),
        settle_wait_s=settle_wait_s,
        close_wait_s=close_wait_s,
        heartbeat_s=heartbeat_s,
    )


def check_seconds(name: str, seconds: float, kind: type[Exception]) -> None:
    """Raise ``kind`` unless ``seconds`` is a positive finite number of at most a day."""
    if not 0 < seconds <= TIMEOUT_S_MAX:
        raise kind(f"{name} must be a number of seconds above 0 and at most {TIMEOUT_S_MAX:.0f}, not {seconds!r}.")


def stays_here(address: str) -> bool:
    """Whether what is sent to an address (``host:port``, ``unix:path``) cannot leave this machine."""
    return address.startswith("unix:") or is_loopback(address.rpartition(":")[0].strip("[]"))


def _check_address(address: str) -> None:
    if address.startswith("unix:"):
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65_536 or "/" in host:
        raise InvalidConfig(f"The scheduler's address must be host:port, not {address!r}.")


def _read_authority(path: str | os.PathLike[str]) -> bytes:
    try:
        pem = Path(path).read_bytes()
    except OSError as error:
        raise InvalidConfig(f"The CA file {os.fspath(path)} cannot be read: {error.strerror}.") from error
    if b"-----BEGIN CERTIFICATE-----" not in pem:
        raise InvalidConfig(f"The CA file {os.fspath(path)} holds no PEM certificate.")
    return pem
