"""Options that several commands share, spelt and read alike in all of them.

Addresses of the database and of Kafka may come from the environment, so that a password need stand on no command
line, where every user of the machine can read it. An option wins over its variable.
"""

import argparse
import os
from typing import Final

DSN_VARIABLE: Final = "EVENHAND_DSN"
KAFKA_VARIABLE: Final = "EVENHAND_KAFKA"
PORT_MAX: Final = 65_535

_VARIABLES: Final = {"dsn": DSN_VARIABLE, "kafka": KAFKA_VARIABLE}


def add_dsn(parser: argparse.ArgumentParser) -> None:
    """``--dsn``, or ``EVENHAND_DSN``."""
    parser.add_argument(
        "--dsn",
        default=os.environ.get(DSN_VARIABLE),
        help=f"postgresql://USER:PASSWORD@HOST:PORT/DATABASE (or {DSN_VARIABLE})",
    )


def add_kafka(parser: argparse.ArgumentParser) -> None:
    """``--kafka``, or ``EVENHAND_KAFKA``; and ``--kafka-profile``."""
    parser.add_argument(
        "--kafka",
        default=os.environ.get(KAFKA_VARIABLE),
        help=f"HOST:PORT of Kafka, several separated by commas (or {KAFKA_VARIABLE})",
    )
    parser.add_argument("--kafka-profile", default="production", help="production (default) or embedded")


def add_metrics_port(parser: argparse.ArgumentParser, pages: str) -> None:
    """``--metrics-port N``; ``pages`` names what is served there."""
    parser.add_argument("--metrics-port", type=_port, help=f"serve {pages} on this loopback port; default: none")


def require_given(parser: argparse.ArgumentParser, arguments: argparse.Namespace, *names: str) -> None:
    """Ends as the parser ends on a fault if ``dsn`` or ``kafka`` came neither as an option nor as a variable."""
    for name in names:
        if not getattr(arguments, name):
            parser.error(f"the option --{name} (or {_VARIABLES[name]}) is needed")


def _port(text: str) -> int:
    if not (text.isascii() and text.isdecimal()) or int(text) > PORT_MAX:
        raise argparse.ArgumentTypeError(f"the metrics port {text} does not lie between 0 and {PORT_MAX}")
    return int(text)
