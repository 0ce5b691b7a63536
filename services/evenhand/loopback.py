"""Which hosts are this machine alone: what is asked for there need not be secret on the way.

The standard library only, so that every part may ask, the SDK's small install included.
"""

import ipaddress


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the host; a name other than localhost counts as reachable."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
