"""What a test sets up in logging ends with it, whatever was logged meanwhile."""

import logging

import pytest
import structlog
from structlog.testing import capture_logs
from tests.fixtures.logs import logging_kept

from evenhand.logs import configure_logs, get_logger

log = get_logger("test")
"""Of a module: it outlives each test."""


def test_what_is_configured_within_is_undone(capsys: pytest.CaptureFixture[str]) -> None:
    before, root = structlog.get_config(), logging.getLogger()
    handler, level = logging.NullHandler(), root.level
    with logging_kept():
        configure_logs("inside", "json", "error")
        root.addHandler(handler)
        root.setLevel(level + 10)
        logging.disable(logging.CRITICAL)
        log.info("unheard")
        log.error("heard")
        told = capsys.readouterr()
        assert '"service": "inside"' in told.err
        assert "unheard" not in told.out + told.err
    assert structlog.get_config() == before
    assert not structlog.is_configured()
    assert structlog.contextvars.get_contextvars() == {}
    assert handler not in root.handlers
    assert (root.level, root.manager.disable) == (level, 0)
    log.info("heard again")
    told = capsys.readouterr()
    assert "heard again" in told.out
    assert "inside" not in told.out
    assert not told.err


@pytest.mark.parametrize("level", ["info", "error"])
def test_a_logger_that_was_used_is_not_bound_to_its_first_test(level: str) -> None:
    with logging_kept():
        configure_logs("one", "json", level)
        log.error("first")
    with capture_logs() as captured:
        log.info("second")
    assert [entry["event"] for entry in captured] == ["second"]


@pytest.mark.parametrize("time", [1, 2])
def test_each_test_finds_nothing_configured(time: int) -> None:
    assert not structlog.is_configured()
    configure_logs(f"test {time}")
