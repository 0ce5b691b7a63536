"""Settings of one scheduler daemon: one frozen object, validated once at start.

An impossible value stops the start with one sentence that names it. What the core decides by is in
``core.facts.SchedulerConfig``; here is what its surroundings need.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from evenhand.core.errors import InvalidConfig
from evenhand.core.facts import SchedulerConfig
from evenhand.core.ids import PoolId
from evenhand.loopback import is_loopback


@dataclass(frozen=True, slots=True)
class TlsConfig:
    """PEM files of the server's certificate and key; with ``ca_file``, clients must show a certificate of it."""

    certificate_file: Path
    key_file: Path
    ca_file: Path | None = None

    @classmethod
    def of(cls, certificate_file: Path | None, key_file: Path | None, ca_file: Path | None) -> Self:
        """Of what was given on a command line; raises ``InvalidConfig`` if certificate or key is missing."""
        if certificate_file is None or key_file is None:
            raise InvalidConfig("TLS needs both a certificate file and a key file.")
        return cls(certificate_file, key_file, ca_file)


@dataclass(frozen=True, slots=True)
class DaemonConfig:
    """Everything the daemon is told. Every field is explained below it."""

    core: SchedulerConfig
    """The pool, and how its scheduler decides."""
    secret_file: Path
    """Where the master secret lies; made at the first start, mode 0600."""
    listen: str = "127.0.0.1:0"
    """HOST:PORT of the gRPC service; port 0 takes a free one."""
    metrics_listen: str | None = None
    """HOST:PORT of /metrics, /status and /healthz; None: not served."""
    tls: TlsConfig | None = None
    """Needed beyond loopback, and there together with API keys."""
    insecure_loopback: bool = False
    """Development: on loopback, calls without a key are served and may name their tenant."""
    reflection: bool = False
    """Serve gRPC reflection."""
    lease_ttl_ms: int = 5_000
    """How long ownership lasts without a renewal; a successor waits this long for a dead owner."""
    checkpoint_interval_ms: int = 1_000
    """How often clocks and open tickets are written."""
    directory_poll_ms: int = 500
    """How often tenants and keys are looked at; a revoked key is refused within twice this."""
    acquire_timeout_default_ms: int = 60_000
    """Longest wait of an Acquire that states none."""
    acquire_timeout_max_ms: int = 600_000
    """Longest wait of an Acquire that states a longer one."""
    calls_pending_max: int = 100_000
    """Acquires waiting at once, all sessions and calls together."""
    session_calls_max: int = 4_096
    """Answers one Session may owe; its next message is read when one has gone out."""
    metric_tenants_max: int = 50
    """Tenants with a label of their own in metrics; all others are counted as ``other``."""
    drain_timeout_ms: int = 2_000
    """How long a graceful stop waits for open tickets; those left over go to the successor."""

    def __post_init__(self) -> None:
        """Raise ``InvalidConfig`` for a value that cannot work."""
        for name in (
            "lease_ttl_ms",
            "checkpoint_interval_ms",
            "directory_poll_ms",
            "acquire_timeout_default_ms",
            "acquire_timeout_max_ms",
            "calls_pending_max",
            "session_calls_max",
            "drain_timeout_ms",
        ):
            if getattr(self, name) < 1:
                raise InvalidConfig(f"{name} must be at least 1, not {getattr(self, name)}.")
        if self.metric_tenants_max < 0:
            raise InvalidConfig(f"metric_tenants_max must not be negative, but is {self.metric_tenants_max}.")
        if not self.core.pool_id:
            raise InvalidConfig("The scheduler must be told its pool.")
        host, _ = split_address(self.listen, "listen")
        if self.metrics_listen is not None:
            metrics_host, _ = split_address(self.metrics_listen, "metrics_listen")
            if not is_loopback(metrics_host):
                raise InvalidConfig(
                    f"Metrics and status name tenants and are served on loopback only, not on "
                    f"{self.metrics_listen}."
                )
        if not is_loopback(host):
            if self.insecure_loopback:
                raise InvalidConfig(f"Calls without a key are served on loopback only, not on {self.listen}.")
            if self.tls is None:
                raise InvalidConfig(f"Listening on {self.listen}, beyond loopback, needs TLS and API keys.")

    @property
    def pool_id(self) -> PoolId:
        return self.core.pool_id


def split_address(address: str, name: str) -> tuple[str, int]:
    """Host and port of ``HOST:PORT`` or ``[IPv6]:PORT``; raises ``InvalidConfig``."""
    host, separator, port = address.rpartition(":")
    if not separator or not host or not (port.isascii() and port.isdigit()) or int(port) > 65_535:
        raise InvalidConfig(f"{name} must be HOST:PORT, not {address!r}.")
    return host.removeprefix("[").removesuffix("]"), int(port)
