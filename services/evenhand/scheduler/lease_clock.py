"""The clock that a lease is reckoned on: it goes on while the machine is suspended.

The database's clock goes on then, and the lease may pass to another; Linux' monotonic clock stands still, so a
machine that is resumed would go on granting by it. Only ends of leases are reckoned here, and they are compared
with this clock alone. Tickets and deadlines stay on the monotonic clock: the pool's time is that of its process.
"""

import time
from typing import Final

_BOOTTIME: Final[int | None] = getattr(time, "CLOCK_BOOTTIME", None)


def lease_now_ns() -> int:
    """Nanoseconds since some moment, suspended time included where the system has such a clock (Linux)."""
    return time.monotonic_ns() if _BOOTTIME is None else time.clock_gettime_ns(_BOOTTIME)
