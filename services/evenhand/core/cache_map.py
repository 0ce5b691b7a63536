"""Which worker holds which block keys, on which tier."""

from dataclasses import dataclass

from evenhand.core.ids import WorkerId


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """How many of a prompt's first blocks one worker holds without a hole."""

    worker_id: WorkerId
    blocks: int
