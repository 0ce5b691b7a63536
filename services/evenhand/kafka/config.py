"""How to reach Kafka, and what it can do: one frozen object a process.

Two profiles. ``production`` is Apache Kafka (or what keeps its promises): the producer is idempotent, so a retry
is never written twice. ``embedded`` is the broker that ``evenhand up`` starts: memory only, no idempotence, no
retention. Everything else is one code path, so that what runs on a laptop is what runs in a cluster.

How to be let in comes from the environment alone (``of_environment``): no password stands on a command line.

===============================  =========================================================================
``EVENHAND_KAFKA_SECURITY``      ``PLAINTEXT`` (default), ``SSL``, ``SASL_PLAINTEXT`` or ``SASL_SSL``
``EVENHAND_KAFKA_CA_FILE``       PEM file of the authority that signed the brokers' certificates
``EVENHAND_KAFKA_MECHANISM``     of SASL; ``SCRAM-SHA-512`` if unset
``EVENHAND_KAFKA_USERNAME``      for SASL
``EVENHAND_KAFKA_PASSWORD``      for SASL
===============================  =========================================================================
"""

import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Self

from evenhand.core.errors import InvalidConfig
from evenhand.loopback import is_loopback
from evenhand.ports import CONTROL_TOPIC, KV_TOPIC

EMBEDDED_PARTITIONS = 4
"""What the embedded broker gives a topic that a client merely mentions. Clients mention topics as soon as a
restarted broker answers, before anyone could create them, so another count would not survive a restart."""

PARTITIONS_MAX = 1_000
RETENTION_MS = {KV_TOPIC: 24 * 3_600_000, CONTROL_TOPIC: 3_600_000}
"""How long Kafka keeps a topic; a reader that stayed away longer starts over with snapshots."""
RETENTION_DEFAULT_MS = 3_600_000
SASL_MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")


class Profile(Enum):
    PRODUCTION = "production"
    EMBEDDED = "embedded"


class SecurityProtocol(Enum):
    PLAINTEXT = "PLAINTEXT"
    SSL = "SSL"
    SASL_PLAINTEXT = "SASL_PLAINTEXT"
    SASL_SSL = "SASL_SSL"


@dataclass(frozen=True, slots=True)
class KafkaConfig:
    """Where Kafka is and how to treat it. Use ``production`` or ``embedded``, then override by keyword."""

    bootstrap: str
    """``HOST:PORT``, several separated by commas."""
    profile: Profile = Profile.PRODUCTION
    partitions: int = 8
    """Partitions of a topic that is created here; a topic that exists keeps its own."""
    replication_factor: int = -1
    """Copies of a topic that is created here; −1: the cluster's default."""
    fetch_wait_ms_max: int = 100
    """A fetch waits so long at the broker for something to arrive."""
    fetch_partition_bytes_max: int = 1024 * 1024
    """Bytes buffered for each partition; a larger record still passes."""
    read_records_max: int = 2_000
    """Records in one batch of a reader."""
    linger_ms: int = 0
    """A producer waits so long for company; records that come while a request is out travel together anyway."""
    publish_timeout_ms: int = 5_000
    """A publish that is not confirmed by then raises ``Unavailable``."""
    request_timeout_ms: int = 5_000
    verify_silence_ms: int = 3_000
    """A broker that answers, but for so long twice does not show the record before a position, lost it."""
    probe_idle_ms: int = 10_000
    """A partition that shows nothing for so long is asked again for the record before its position."""
    reconnect_wait_ms_min: int = 100
    reconnect_wait_ms_max: int = 1_000
    security_protocol: SecurityProtocol = SecurityProtocol.PLAINTEXT
    ca_file: Path | None = None
    """Certificate authority for the SSL protocols; None: the system's."""
    sasl_mechanism: str = "SCRAM-SHA-512"
    sasl_username: str = ""
    sasl_password: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        for address in self.bootstrap.split(","):
            host, _, port = address.strip().rpartition(":")
            if not host or not port.isdecimal() or not 0 < int(port) < 65_536:
                raise InvalidConfig(f"The Kafka address {address!r} is not HOST:PORT.")
        if not 1 <= self.partitions <= PARTITIONS_MAX:
            raise InvalidConfig(f"A topic can have 1 to {PARTITIONS_MAX} partitions, not {self.partitions}.")
        if self.profile is Profile.EMBEDDED and self.partitions != EMBEDDED_PARTITIONS:
            raise InvalidConfig(f"Topics of the embedded broker have {EMBEDDED_PARTITIONS} partitions.")
        for name in ("fetch_wait_ms_max", "publish_timeout_ms", "request_timeout_ms", "read_records_max",
                     "verify_silence_ms", "probe_idle_ms", "reconnect_wait_ms_min"):  # fmt: skip
            if getattr(self, name) < 1:
                raise InvalidConfig(f"The Kafka setting {name} must be at least 1, not {getattr(self, name)}.")
        if self.replication_factor != -1 and self.replication_factor < 1:
            raise InvalidConfig(
                f"The Kafka setting replication_factor must be −1 or at least 1, not {self.replication_factor}."
            )
        if self.reconnect_wait_ms_max < self.reconnect_wait_ms_min:
            raise InvalidConfig("The Kafka setting reconnect_wait_ms_max must not be below reconnect_wait_ms_min.")
        if self.fetch_wait_ms_max >= self.request_timeout_ms:
            raise InvalidConfig("The Kafka setting fetch_wait_ms_max must be below request_timeout_ms.")
        if self.sasl_mechanism not in SASL_MECHANISMS:
            raise InvalidConfig(
                f"The SASL mechanism {self.sasl_mechanism!r} of Kafka is none of {', '.join(SASL_MECHANISMS)}."
            )
        if self.ca_file is not None and not self.security_protocol.value.endswith("SSL"):
            raise InvalidConfig(f"A CA file of Kafka has no effect with {self.security_protocol.value}.")
        if self.security_protocol.value.startswith("SASL") and not (self.sasl_username and self.sasl_password):
            raise InvalidConfig(f"{self.security_protocol.value} to Kafka needs a user name and a password.")

    @classmethod
    def production(cls, bootstrap: str, **changed: Any) -> Self:
        """For Apache Kafka."""
        return cls(bootstrap, **changed)

    @classmethod
    def embedded(cls, bootstrap: str, **changed: Any) -> Self:
        """For the embedded broker, which is on loopback and quick, and whose restarts are frequent.

        It answers within milliseconds, but a machine that stalls for a second must not make it another log.
        """
        quick = {
            "fetch_wait_ms_max": 20,
            "verify_silence_ms": 2_000,
            "probe_idle_ms": 5_000,
            "replication_factor": 1,
        }
        return cls(bootstrap, Profile.EMBEDDED, EMBEDDED_PARTITIONS, **{**quick, **changed})

    @classmethod
    def of(cls, profile: str, bootstrap: str, **changed: Any) -> Self:
        """By the profile's name; raises ``InvalidConfig`` for an unknown one."""
        if profile == Profile.EMBEDDED.value:
            return cls.embedded(bootstrap, **changed)
        if profile == Profile.PRODUCTION.value:
            return cls.production(bootstrap, **changed)
        raise InvalidConfig(f"The Kafka profile {profile!r} is neither production nor embedded.")

    @classmethod
    def of_environment(cls, profile: str, bootstrap: str, environment: Mapping[str, str]) -> Self:
        """As ``of``, with what the environment says of security; the embedded broker asks for none.

        Raises ``InvalidConfig`` for what cannot be, a CA file that cannot be used included.
        """
        if profile != Profile.PRODUCTION.value:
            return cls.of(profile, bootstrap)
        changed: dict[str, Any] = {
            field_name: environment[variable]
            for field_name, variable in (
                ("sasl_mechanism", "EVENHAND_KAFKA_MECHANISM"),
                ("sasl_username", "EVENHAND_KAFKA_USERNAME"),
                ("sasl_password", "EVENHAND_KAFKA_PASSWORD"),
            )
            if environment.get(variable)
        }
        if ca_file := environment.get("EVENHAND_KAFKA_CA_FILE"):
            changed["ca_file"] = Path(ca_file)
        if security := environment.get("EVENHAND_KAFKA_SECURITY"):
            if security not in SecurityProtocol.__members__:
                named = ", ".join(SecurityProtocol.__members__)
                raise InvalidConfig(f"EVENHAND_KAFKA_SECURITY is {security!r}, which is none of {named}.")
            changed["security_protocol"] = SecurityProtocol[security]
        config = cls.production(bootstrap, **changed)
        config.client_arguments()
        return config

    @property
    def idempotent(self) -> bool:
        return self.profile is Profile.PRODUCTION

    @property
    def plaintext_hosts(self) -> tuple[str, ...]:
        """Brokers beyond this machine that are reached without TLS."""
        if self.security_protocol.value.endswith("SSL"):
            return ()
        hosts = (address.strip().rpartition(":")[0].strip("[]") for address in self.bootstrap.split(","))
        return tuple(host for host in hosts if not is_loopback(host))

    def client_arguments(self) -> dict[str, Any]:
        """What every aiokafka client takes; raises ``InvalidConfig`` for a CA file that cannot be read."""
        arguments: dict[str, Any] = {
            "bootstrap_servers": self.bootstrap,
            "request_timeout_ms": self.request_timeout_ms,
            "security_protocol": self.security_protocol.value,
        }
        if self.security_protocol in (SecurityProtocol.SSL, SecurityProtocol.SASL_SSL):
            try:
                arguments["ssl_context"] = ssl.create_default_context(cafile=self.ca_file)
            except OSError as error:
                raise InvalidConfig(f"The CA file {self.ca_file} of Kafka cannot be used: {error}.") from error
        if self.security_protocol.value.startswith("SASL"):
            arguments["sasl_mechanism"] = self.sasl_mechanism
            arguments["sasl_plain_username"] = self.sasl_username
            arguments["sasl_plain_password"] = self.sasl_password
        return arguments
