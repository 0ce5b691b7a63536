"""Impossible settings stop the start with one sentence."""

from pathlib import Path

import pytest

from evenhand.core.errors import InvalidConfig
from evenhand.kafka import EMBEDDED_PARTITIONS, KafkaConfig, Profile, SecurityProtocol


def test_the_profiles_differ_in_what_the_broker_can_do() -> None:
    production, embedded = KafkaConfig.of("production", "k:9092"), KafkaConfig.of("embedded", "k:9092")
    assert (production.profile, production.idempotent, production.partitions) == (Profile.PRODUCTION, True, 8)
    assert (embedded.profile, embedded.idempotent) == (Profile.EMBEDDED, False)
    assert embedded.partitions == EMBEDDED_PARTITIONS
    assert KafkaConfig.embedded("k:9092", fetch_wait_ms_max=5).fetch_wait_ms_max == 5


@pytest.mark.parametrize(
    "bootstrap", ["", "kafka", ":9092", "kafka:", "kafka:0", "kafka:x", "kafka:70000", "a:1,b"]
)
def test_an_address_must_be_host_and_port(bootstrap: str) -> None:
    with pytest.raises(InvalidConfig, match="not HOST:PORT"):
        KafkaConfig.production(bootstrap)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"partitions": 0}, "1 to 1000 partitions"),
        ({"publish_timeout_ms": 0}, "publish_timeout_ms must be at least 1"),
        ({"fetch_wait_ms_max": 9_000}, "below request_timeout_ms"),
        ({"security_protocol": SecurityProtocol.SASL_SSL}, "SASL_SSL to Kafka needs a user name and a password"),
        ({"sasl_mechanism": "GSSAPI"}, "'GSSAPI' of Kafka is none of PLAIN"),
        ({"ca_file": Path("ca.pem")}, "CA file of Kafka has no effect with PLAINTEXT"),
        ({"reconnect_wait_ms_max": 10}, "reconnect_wait_ms_max"),
        ({"replication_factor": 0}, "replication_factor"),
    ],
)
def test_an_impossible_setting_is_named(changed: dict[str, object], sentence: str) -> None:
    with pytest.raises(InvalidConfig, match=sentence):
        KafkaConfig.production("k:9092", **changed)


def test_the_embedded_broker_has_its_own_partition_count() -> None:
    with pytest.raises(InvalidConfig, match="have 4 partitions"):
        KafkaConfig("k:9092", Profile.EMBEDDED, partitions=8)


def test_an_unknown_profile_is_named() -> None:
    with pytest.raises(InvalidConfig, match="'cloud' is neither"):
        KafkaConfig.of("cloud", "k:9092")


def test_a_missing_ca_file_is_named(tmp_path: Path) -> None:
    config = KafkaConfig.production(
        "k:9092", security_protocol=SecurityProtocol.SSL, ca_file=tmp_path / "absent.pem"
    )
    with pytest.raises(InvalidConfig, match=r"absent\.pem"):
        config.client_arguments()


def test_a_password_is_not_shown() -> None:
    config = KafkaConfig.production(
        "k:9092", security_protocol=SecurityProtocol.SASL_SSL, sasl_username="u", sasl_password="hidden"
    )
    assert "hidden" not in repr(config)
    assert config.client_arguments()["sasl_plain_password"] == "hidden"


def test_the_environment_says_how_to_be_let_in(tmp_path: Path) -> None:
    environment = {
        "EVENHAND_KAFKA_SECURITY": "SASL_SSL",
        "EVENHAND_KAFKA_MECHANISM": "PLAIN",
        "EVENHAND_KAFKA_USERNAME": "u",
        "EVENHAND_KAFKA_PASSWORD": "hidden",
    }
    config = KafkaConfig.of_environment("production", "k:9092", environment)
    arguments = config.client_arguments()
    assert arguments["security_protocol"] == "SASL_SSL"
    assert (arguments["sasl_mechanism"], arguments["sasl_plain_username"]) == ("PLAIN", "u")
    assert arguments["sasl_plain_password"] == "hidden"
    assert "hidden" not in repr(config)
    assert KafkaConfig.of_environment("production", "k:9092", {}) == KafkaConfig.production("k:9092")
    assert KafkaConfig.of_environment("embedded", "k:9092", environment) == KafkaConfig.embedded("k:9092")
    for changed, sentence in (
        ({"EVENHAND_KAFKA_SECURITY": "TLS"}, "EVENHAND_KAFKA_SECURITY is 'TLS', which is none of PLAINTEXT, SSL"),
        ({"EVENHAND_KAFKA_PASSWORD": ""}, "needs a user name and a password"),
        ({"EVENHAND_KAFKA_CA_FILE": str(tmp_path / "none.pem")}, "cannot be used"),
    ):
        with pytest.raises(InvalidConfig, match=sentence):
            KafkaConfig.of_environment("production", "k:9092", environment | changed)
