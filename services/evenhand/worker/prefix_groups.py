"""Which events say anything about a prefix held on this worker, and in which lane they count.

An engine keeps blocks in cache groups and on tiers. Only groups of full attention make a prefix: a sliding
window's or a state's blocks alone are none, and in a hybrid model the full-attention group decides. A store tells
what kind its group is, once; a removal names the group only, so kinds are remembered. A group that never told its
kind counts as full attention, as it is with engines that have but one.

What is not ours (other groups, unknown media, blocks of a remote peer) is counted and left alone.
"""

from collections.abc import Sequence
from typing import Final

from evenhand.core.kv import Tier
from evenhand.worker.counters import TranslatorCounters
from evenhand.worker.engine_events import BlockRemoved, BlockStored
from evenhand.worker.holdings import Holdings, Lane

TIERS_BY_MEDIUM: Final[dict[str | None, Tier]] = {
    None: Tier.DEVICE,
    "GPU": Tier.DEVICE,
    "CPU": Tier.HOST,
    "CPU_PINNED": Tier.HOST,
    "CPU_TIER1": Tier.HOST,
    "HOST": Tier.HOST,
    "STORAGE": Tier.DISK,
    "DISK": Tier.DISK,
    "SSD": Tier.DISK,
    "FS": Tier.DISK,
}
"""Other media are counted and left alone: a copy of unknown whereabouts must not count as one on the device."""

PREFIX_KINDS: Final = frozenset({"full_attention", "mla_attention", "sink_full_attention"})
"""Cache kinds whose blocks make a prefix. A kind that is not known counts as none: that costs hits, not truth."""
GROUPS_MAX: Final = 1_024
"""Cache groups are numbered from 0; engines have a handful."""
LANES_MAX: Final = 4_096
"""Sorts of events whose lane is remembered; others are looked up anew."""


class PrefixGroups:
    """Kinds of cache groups, and the lanes of those that count."""

    __slots__ = ("_counters", "_holdings", "_lanes_of_stores", "_prefix")

    def __init__(self, holdings: Holdings, counters: TranslatorCounters) -> None:
        self._holdings = holdings
        self._counters = counters
        self._prefix: dict[int, bool] = {}
        # By all that tells where a store belongs; only lanes of a prefix are remembered.
        self._lanes_of_stores: dict[tuple[str | None, int | None, str | None, str | None, int | None], Lane] = {}

    def known(self) -> tuple[tuple[int, bool], ...]:
        """Groups whose kind was told, and whether they make a prefix."""
        return tuple(self._prefix.items())

    def restore(self, known: Sequence[tuple[int, bool]]) -> None:
        self._prefix.update(known)

    def clear(self) -> None:
        """Nothing was told yet."""
        self._prefix.clear()
        self._lanes_of_stores.clear()

    def lane_of_store(self, event: BlockStored) -> Lane | None:
        """Where the event belongs; it may also tell what kind of cache its group is."""
        sort = (
            event.medium,
            event.group_idx,
            event.locality,
            event.kv_cache_spec_kind,
            event.kv_cache_spec_sliding_window,
        )
        lane = self._lanes_of_stores.get(sort)
        if lane is not None:
            return lane
        kind = event.kv_cache_spec_kind
        if kind is not None or event.kv_cache_spec_sliding_window is not None:
            self._learn(event.group_idx or 0, kind in PREFIX_KINDS)
        lane = self.lane_of(event)
        if lane is not None and len(self._lanes_of_stores) < LANES_MAX:
            self._lanes_of_stores[sort] = lane
        return lane

    def _learn(self, group: int, prefix: bool) -> None:
        if self._prefix.get(group) is not prefix and 0 <= group < GROUPS_MAX:
            self._prefix[group] = prefix
            self._lanes_of_stores.clear()

    def lane_of(self, event: BlockStored | BlockRemoved) -> Lane | None:
        """Where the event belongs; None, counted, if it says nothing about a prefix held here."""
        tier = TIERS_BY_MEDIUM.get(event.medium)
        if tier is None:
            self._counters.events_of_unknown_medium += 1
            return None
        if event.locality == "REMOTE":
            self._counters.events_of_remote_blocks += 1
            return None
        group = event.group_idx or 0
        if not self._prefix.get(group, True) or not 0 <= group < GROUPS_MAX:
            self._counters.events_not_prefix += 1
            return None
        return self._holdings.lane(tier, group)
