"""Settings of the state service: one frozen object, validated once at start.

An impossible value stops the start with one sentence that names it.
"""

from dataclasses import dataclass

from evenhand.core.errors import InvalidConfig


@dataclass(frozen=True, slots=True)
class StateConfig:
    """How the service groups, bounds and waits. Every field is explained below it."""

    group_ms_max: int = 20
    """A change waits at most this long for others before its commit begins."""
    group_key_changes_max: int = 20_000
    """A group this large is committed at once."""
    idle_commit_ms: int = 1_000
    """Positions that moved over heartbeats and load alone are committed this often."""
    lag_key_changes_max: int = 1_000_000
    """Reading pauses while this many changes are folded and cannot be committed."""
    lag_records_max: int = 1_000_000
    """Reading pauses while this many records are read and cannot be committed."""
    slice_records_max: int = 256
    """Records folded in one go; in between, commits and pages get their turn."""
    retry_ms_min: int = 50
    """First wait after the database was found away; doubles up to ``retry_ms_max``."""
    retry_ms_max: int = 1_000
    start_ms_max: int = 60_000
    """Database and log must be there within this time of the start."""
    stop_ms_max: int = 5_000
    """At a stop, what is folded is committed if that takes no longer."""
    worker_forgotten_after_ms: int = 3_600_000
    """A worker of which nothing was read for so long, while others spoke, counts as left. One that was only cut
    off is told the epoch floor when it speaks again, and comes back with a snapshot."""
    malformed_logged_per_minute_max: int = 60
    """Malformed records beyond this are counted, not logged."""

    def __post_init__(self) -> None:
        """Raise ``InvalidConfig`` for a value that cannot work."""
        for name in self.__slots__:
            if getattr(self, name) < 1:
                raise InvalidConfig(f"The setting {name} must be at least 1, not {getattr(self, name)}.")
        if self.retry_ms_max < self.retry_ms_min:
            raise InvalidConfig("The setting retry_ms_max must not be below retry_ms_min.")
        if self.lag_key_changes_max < self.group_key_changes_max:
            raise InvalidConfig("The setting lag_key_changes_max must not be below group_key_changes_max.")
