"""What a worker edge is told at start: parsed once, validated once, frozen."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from evenhand.core.errors import InvalidConfig
from evenhand.core.ids import PoolId, WorkerId

ID_CHARACTERS_MAX: Final = 200
RANK_MAX: Final = 65_535
SLOTS_MAX: Final = 1_000_000
_ENDPOINT: Final = re.compile(r"tcp://(\[[0-9a-fA-F:.]+\]|[^\s\[\]:/*]+):(\d{1,5})")


@dataclass(frozen=True, slots=True)
class EdgeConfig:
    """Settings of one worker's edge. An impossible value raises ``InvalidConfig`` and names it."""

    worker_id: WorkerId
    """Names the worker everywhere; unique over all pools, and the same after each restart."""
    pool_id: PoolId
    """Workers of one pool serve the same model with the same block size."""
    address: str
    """Where clients call the engine: ``http://HOST:PORT``, a DNS name or an address."""
    kv_events: str = ""
    """The engine's event socket, ``tcp://HOST:PORT`` or ``ipc://FILE``; empty for an engine that sends none (or
    runs the plugin)."""
    replay: str = ""
    """The engine's replay socket, likewise. Without it every gap empties the worker's map."""
    topic: str = ""
    """Take events only of topics that begin so; all by default."""
    sends_events: bool = True
    """False: the pool's map of this worker is approximate."""
    model: str = ""
    """The base model's served name; by default what the engine says first."""
    block_size_tokens: int = 0
    """Tokens a block; 0 takes what the engine says."""
    kv_blocks: int = 0
    """Blocks the engine's cache holds, its null block left out; 0 takes what the engine says."""
    slots: int = 64
    """Sequences the engine runs at once (its ``--max-num-seqs``); engines do not tell it."""
    data_parallel_rank: int = 0
    """Rank within a data-parallel engine; its sockets are the engine's ports plus the rank."""
    salt_generation: int = 1
    """Generation of the cache salts that the pool uses."""
    checkpoint: Path | None = None
    """File that carries the edge over its own restart; without it each start empties the worker's map."""
    load_interval_ms: int = 250
    """Between two load reports."""
    announce_interval_ms: int = 2_000
    """Between two announcements, which are also heartbeats."""
    snapshot_interval_ms: int = 5_000
    """At most one snapshot in this time, however often one is asked for."""
    checkpoint_interval_ms: int = 5_000
    """Between two checkpoints while anything changes."""
    silence_alarm_ms: int = 30_000
    """Traffic without an event for so long is an alarm."""

    def __post_init__(self) -> None:
        for name in ("worker_id", "pool_id"):
            value = getattr(self, name)
            if not value or len(value) > ID_CHARACTERS_MAX or "\0" in value:
                raise InvalidConfig(f"The {name} must have 1 to {ID_CHARACTERS_MAX} characters and no zero byte.")
        _check_address(self.address)
        for name in ("kv_events", "replay"):
            if getattr(self, name):
                _check_endpoint(name, getattr(self, name))
        if self.replay and not self.kv_events:
            raise InvalidConfig("A replay socket makes sense only beside an event socket (kv_events).")
        if self.kv_events and not self.sends_events:
            raise InvalidConfig("The engine cannot both have an event socket (kv_events) and send no events.")
        for name, least, most in (
            ("block_size_tokens", 0, 1_000_000),
            ("kv_blocks", 0, 2**31 - 1),
            ("slots", 1, SLOTS_MAX),
            ("data_parallel_rank", 0, RANK_MAX),
            ("salt_generation", 1, 2**31 - 1),
            ("load_interval_ms", 20, 60_000),
            ("announce_interval_ms", 100, 60_000),
            ("snapshot_interval_ms", 0, 3_600_000),
            ("checkpoint_interval_ms", 100, 3_600_000),
            ("silence_alarm_ms", 100, 3_600_000),
        ):
            value = getattr(self, name)
            if not least <= value <= most:
                raise InvalidConfig(f"The setting {name} is {value}, but must lie between {least} and {most}.")


def _check_address(address: str) -> None:
    try:
        parts = urlsplit(address)
        fine = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        fine = False
    if not fine:
        raise InvalidConfig(f"The worker's address {address!r} is not http://HOST:PORT.")


def _check_endpoint(name: str, endpoint: str) -> None:
    if endpoint.startswith("ipc://") and len(endpoint) > len("ipc://"):
        return
    match = _ENDPOINT.fullmatch(endpoint)
    if match is None or not 0 < int(match[2]) < 65_536:
        raise InvalidConfig(f"The {name} endpoint {endpoint!r} is not tcp://HOST:PORT or ipc://FILE.")
