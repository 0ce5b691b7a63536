"""All chance of a run: streams of random numbers, each named, each a function of the seed and its name alone.

A fault draws from a stream of its own, so switching one off leaves what the others draw as it was. That is what
makes a failing seed easy to reduce.
"""

import hashlib
from random import Random


class Chance:
    """Streams by name."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._streams: dict[str, Random] = {}

    def stream(self, name: str) -> Random:
        """The stream of this name; the same object each time."""
        stream = self._streams.get(name)
        if stream is None:
            digest = hashlib.sha256(f"{self.seed}/{name}".encode()).digest()
            stream = self._streams[name] = Random(int.from_bytes(digest[:8], "big"))  # noqa: S311 - no secret
        return stream
