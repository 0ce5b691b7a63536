"""Ids of decisions: UUIDv7, so that records sort by time.

Within one millisecond a counter in the twelve bits after the time keeps the order; where it is used up, the time
runs ahead by a millisecond. The random half is drawn once a process: uniqueness across processes needs no more,
and one decision costs about a microsecond.
"""

import secrets
import time

_COUNTER_MAX = 0xFFF
_VARIANT = 0x8000_0000_0000_0000


class DecisionIds:
    """Makes ids; each is greater than the one before."""

    def __init__(self) -> None:
        self._tail = _VARIANT | secrets.randbits(62)
        self._last_ms = 0
        self._counter = 0

    def next(self) -> str:
        """A fresh id in the usual hyphenated form."""
        now_ms = time.time_ns() // 1_000_000
        if now_ms > self._last_ms:
            self._last_ms, self._counter = now_ms, 0
        elif self._counter < _COUNTER_MAX:
            self._counter += 1
        else:
            self._last_ms, self._counter = self._last_ms + 1, 0
        text = f"{self._last_ms:012x}7{self._counter:03x}{self._tail:016x}"
        return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"
