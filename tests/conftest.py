"""Fixtures that tests of every kind may name."""

pytest_plugins = ["tests.fixtures.kafka", "tests.fixtures.logs", "tests.fixtures.postgres"]
