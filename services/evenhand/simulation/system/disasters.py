"""Crashes and absences, planned from the seed: when each strikes, what it takes down, when that is back.

At the end of the load everything is brought back, and nothing strikes any more.
"""

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from evenhand.simulation.system.system import System


class Disasters:
    """The disasters of one run."""

    def __init__(self, system: "System") -> None:
        self._system = system
        self._tasks: list[asyncio.Task[None]] = []
        self._ending = False

    def begin(self, seconds: float) -> None:
        """Let the planned faults strike during so much time."""

    async def end(self) -> None:
        """Bring everything back."""
        self._ending = True
