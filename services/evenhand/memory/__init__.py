"""Every port of ``evenhand.ports`` in memory, for tests and simulation.

Each behaves as the real one does where the port promises something, and has switches for the faults the real
one can show: away, replaced by another, written twice, done but not acknowledged, taken over. Nothing here
reads a wall clock or draws chance: time is an argument, and a fault happens when it is told to.
"""

from evenhand.memory.directory import MemoryDirectory
from evenhand.memory.lease_store import MemoryLeaseStore
from evenhand.memory.log import MemoryLog, MemoryLogReader, MemoryLogWriter
from evenhand.memory.map_store import MemoryMapStore

__all__ = [
    "MemoryDirectory",
    "MemoryLeaseStore",
    "MemoryLog",
    "MemoryLogReader",
    "MemoryLogWriter",
    "MemoryMapStore",
]
