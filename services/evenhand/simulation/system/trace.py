"""What happened, in order: a running hash of every event, the last of them in memory, all of them in a file.

Two runs of one seed did the same if and only if their hashes agree: each event is hashed with its virtual time.
"""

import hashlib
from collections import deque
from collections.abc import Callable
from typing import TextIO

LAST_EVENTS_MAX = 400


class Trace:
    """One run's events."""

    def __init__(self, now_ns: Callable[[], int], file: TextIO | None = None) -> None:
        self.events = 0
        self.last: deque[str] = deque(maxlen=LAST_EVENTS_MAX)
        self.now_ns = now_ns
        self._file = file
        self._hash = hashlib.blake2b(digest_size=16)

    def add(self, who: str, what: str) -> None:
        """Append one event."""
        line = f"{self.now_ns()} {who} {what}"
        self._hash.update(line.encode())
        self._hash.update(b"\n")
        self.last.append(line)
        self.events += 1
        if self._file is not None:
            self._file.write(line + "\n")

    @property
    def digest(self) -> str:
        """Hash of all events so far, in hex."""
        return self._hash.hexdigest()
