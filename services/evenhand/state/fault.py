"""Named places where a test may kill this process, to show that nothing is lost or done twice there.

``EVENHAND_FAULT_POINT=name[:nth]`` makes the process send itself SIGKILL the nth time (from 1) it comes to that
place; no cleanup of any kind runs. Without the variable a place is one comparison.
"""

import os
import signal
from collections.abc import Mapping

from evenhand.core.errors import InvalidConfig

VARIABLE = "EVENHAND_FAULT_POINT"
FAULT_POINTS = (
    "before-begin",
    "inside-compaction",
    "after-deltas",
    "before-commit",
    "after-commit",
)
"""In the order of one commit: before its transaction, three times inside it, after it."""


class FaultPoint:
    """One armed place, or none."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Raises ``InvalidConfig`` for a place that does not exist."""
        name, _, nth = environment.get(VARIABLE, "").partition(":")
        if name and name not in FAULT_POINTS:
            raise InvalidConfig(f"{VARIABLE} names {name!r}, which is none of {', '.join(FAULT_POINTS)}.")
        if nth and not (nth.isdecimal() and int(nth) > 0):
            raise InvalidConfig(f"{VARIABLE} counts {nth!r}, which is no number from 1.")
        self._name = name
        self._left = int(nth) if nth else 1

    def __call__(self, name: str) -> None:
        """The process is at this place."""
        if name != self._name:
            return
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
