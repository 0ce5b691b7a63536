"""What an edge has met, counted. Every special case of the translator has a counter here; none is silent."""

from dataclasses import dataclass, fields


@dataclass(slots=True)
class TranslatorCounters:
    """Totals since the edge started; they only grow. Each names what happened, per event unless it says blocks."""

    frames: int = 0
    events: int = 0
    blocks_stored: int = 0
    """Blocks reported as stored in prefix groups, re-reports included."""
    blocks_removed: int = 0
    blocks_reported_again: int = 0
    """Blocks stored while they were held: a second copy, or a full report; the two look alike."""
    clears: int = 0

    frames_malformed: int = 0
    frames_of_other_rank: int = 0
    events_malformed: int = 0
    """Spoiled themselves only: wrong types, token counts that do not fit, token ids outside uint32."""
    events_of_unknown_type: int = 0
    events_with_unknown_fields: int = 0
    events_of_unknown_medium: int = 0
    events_of_remote_blocks: int = 0
    events_not_prefix: int = 0
    """Stores and removals of groups that are no prefix: sliding windows, state-space and other kinds."""

    stores_without_hashes: int = 0
    stores_without_tokens: int = 0
    """No token ids, or block size 0; blocks whose name is known get their tier all the same."""
    blocks_without_tokens_unknown: int = 0
    stores_of_other_block_size: int = 0
    stores_with_unknown_extras: int = 0
    """The chain stops at the first block whose extra keys are not understood."""
    name_conflicts: int = 0
    """An engine hash that came back with other content; the chain stops there and the older key stands."""

    stores_waiting: int = 0
    """Stores whose parent was unknown when they came."""
    stores_linked: int = 0
    stores_waiting_expired: int = 0
    stores_waiting_overflowed: int = 0

    removals_unknown_blocks: int = 0
    keys_refuted: int = 0
    keys_refutation_stale: int = 0
    """Refuted, but not held, of another epoch, or stored again since."""
    keys_phantom_dropped: int = 0
    """Dropped because more keys were counted than the engine has blocks."""
    keys_capacity_dropped: int = 0
    """Dropped, oldest first, because no re-report could explain the excess: removals must have been lost."""

    def as_mapping(self) -> dict[str, int]:
        """Name and value of each counter."""
        return {field.name: getattr(self, field.name) for field in fields(self)}
