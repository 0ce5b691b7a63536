"""Structured logs: JSON lines on standard error, or readable ones for people.

What is logged is chosen where it is logged: identifiers, counts and durations; never a prompt, a token id, a
salt, a key or another tenant's name.
"""

import io
import logging
import sys
from typing import Any, TextIO, cast

import structlog


class _StandardError(io.TextIOBase):
    """Whatever standard error is when something is logged: loggers live longer than a redirection of it."""

    def write(self, text: str) -> int:
        return sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()


def configure_logs(service: str, log_format: str = "json", level: str = "info") -> None:
    """Set the process's logging up once, at its composition root. ``log_format`` is ``json`` or ``console``."""
    renderer: Any = (
        structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
        if log_format == "console"
        else structlog.processors.JSONRenderer()
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(cast("TextIO", _StandardError())),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(service=service)


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    """A logger named after the part that logs."""
    logger: structlog.stdlib.BoundLogger = structlog.get_logger(part=name)
    return logger
