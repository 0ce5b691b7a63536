"""Loopback ports for servers that are told their port before they start.

Drawn from below the ports that systems lend to outgoing connections. A port from those could be lent to somebody
else between the draw and the server's start; and a client that keeps calling a server that is down could be lent
the server's own port at last, be connected to itself, and keep the server from coming back.
"""

import secrets
import socket

from evenhand.core.errors import Unavailable

HOST = "127.0.0.1"
PORTS = range(20_000, 32_000)
TRIES_MAX = 100


class FreePorts:
    """Draws ports that nothing listens on at that moment, each once."""

    def __init__(self) -> None:
        self._drawn: set[int] = set()

    def draw(self) -> int:
        """A free port; raises ``Unavailable`` if ``TRIES_MAX`` draws find none."""
        for _ in range(TRIES_MAX):
            port = PORTS.start + secrets.randbelow(len(PORTS))
            if port not in self._drawn and bind_fault(port) is None:
                self._drawn.add(port)
                return port
        raise Unavailable(f"No port from {PORTS.start} to {PORTS.stop} is free on {HOST}.")


def bind_fault(port: int, host: str = HOST) -> OSError | None:
    """Why the port cannot be listened on; None if it can."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error
        except OverflowError as error:
            return OSError(str(error))
    return None
