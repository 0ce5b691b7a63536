"""Free loopback ports for servers that cannot be told to choose one themselves."""

from evenhand.local.ports import FreePorts

_PORTS = FreePorts()


def free_port() -> int:
    """A port that nothing listens on at this moment, and that was not handed out before."""
    return _PORTS.draw()
