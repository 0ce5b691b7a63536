"""What an engine holds: copies by the engine's names, keys by content.

A *lane* is one (tier, cache group). In each lane copies are counted by name, because the same block can be stored
twice and removed once. A key is *held* on a tier from its first copy there to its last; only these two moments are
told to anyone.

Counts are an upper bound. A full report names blocks that are held already and looks exactly like a second copy,
so a removal of the real one can leave a *phantom*. What is known for sure bounds them:

- A key with as many stores as it ever had and no removal yet is real. Only a *doubted* name can be a phantom: one
  that was reported while held and has lost a copy since.
- An engine with B blocks holds at most B keys. More keys than B proves phantoms; as many doubted names as are in
  excess fall silent, the longest doubted first, because engines evict the longest unused first. Where no doubt can
  explain the excess, removals were lost, and the longest held keys fall silent instead.

So at most B keys stand at any time, whatever is reported. A *silent* name keeps its copies and its key, for its
children may still come, but its key is not held; a later store makes it held again. Silent names are bounded too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from evenhand.core.ids import Seq
from evenhand.core.kv import Tier
from evenhand.worker.counters import TranslatorCounters
from evenhand.worker.engine_events import EngineHash

TIER_KEYS_MAX = 4_194_304
"""Keys held on a tier whose size is unknown."""
SILENT_KEYS_MAX = 1_024
"""Silent keys of a tier, or as many as the engine has blocks if that is more; beyond, all are forgotten."""


@dataclass(frozen=True, slots=True)
class Lane:
    """One cache group on one tier."""

    tier: Tier
    group: int


@dataclass(frozen=True, slots=True)
class LaneRecord:
    """Everything counted in one lane, in columns, for a checkpoint. ``loud[i]`` is False for a silent key."""

    lane: Lane
    names: tuple[EngineHash, ...]
    keys: tuple[int, ...]
    copies: tuple[int, ...]
    loud: tuple[bool, ...]
    doubted: tuple[EngineHash, ...]


@dataclass(frozen=True, slots=True)
class RemovedCopies:
    """What removing copies came to."""

    ended: list[int]
    """Keys that the tier held until here."""
    unknown: list[EngineHash]
    """Names that the lane does not know."""


class Holdings:
    """Copies and keys of one engine life. ``device_blocks`` 0 means that the engine's size is unknown."""

    __slots__ = ("_capacities", "_counters", "_doubted", "_held", "_lanes", "_shared", "_silent", "key_of")

    def __init__(self, counters: TranslatorCounters, device_blocks: int = 0) -> None:
        self.key_of: dict[EngineHash, int] = {}
        """Key of every name that is counted in any lane."""
        self._counters = counters
        self._lanes: dict[Lane, dict[EngineHash, int]] = {}
        self._held: dict[Tier, dict[int, Seq]] = {tier: {} for tier in Tier}
        """Keys held, each with the number of the batch that its latest store goes out in."""
        self._silent: dict[Tier, dict[int, None]] = {tier: {} for tier in Tier}
        """Keys that have copies by count and are not held."""
        self._shared: dict[Tier, dict[int, int]] = {tier: {} for tier in Tier}
        """Entries (lane and name) of a key beyond the first, where there are several: cache groups, mostly."""
        self._doubted: dict[Lane, dict[EngineHash, None]] = {}
        self._capacities = dict.fromkeys(Tier, TIER_KEYS_MAX)
        self.set_device_blocks(device_blocks)

    def set_device_blocks(self, device_blocks: int) -> None:
        self._capacities[Tier.DEVICE] = device_blocks or TIER_KEYS_MAX

    def clear(self) -> None:
        """Nothing is held or counted any more; the engine's size stands."""
        self.key_of = {}
        self._lanes.clear()
        self._doubted.clear()
        for tier in Tier:
            self._held[tier] = {}
            self._silent[tier] = {}
            self._shared[tier] = {}

    def held(self, tier: Tier) -> dict[int, Seq]:
        """Keys held on a tier, oldest first; for reading only."""
        return self._held[tier]

    def doubted_total(self) -> int:
        """Names that could be phantoms: the most phantoms there can be."""
        return sum(map(len, self._doubted.values()))

    def silent_total(self) -> int:
        """Keys that are counted and not held."""
        return sum(map(len, self._silent.values()))

    def store(self, lane: Lane, names: Sequence[EngineHash], keys: Sequence[int], seq: Seq) -> list[int]:
        """Count one more copy of each; the keys that the tier begins to hold. Stops at a name in conflict."""
        copies = self._lanes.get(lane)
        if copies is None:
            copies = self._lanes[lane] = {}
        held, silent, key_of = self._held[lane.tier], self._silent[lane.tier], self.key_of
        begun: list[int] = []
        for name, key in zip(names, keys, strict=False):
            known = key_of.get(name)
            if known is None:
                key_of[name] = key
            elif known != key:
                self._counters.name_conflicts += 1
                break
            is_held = key in held
            count = copies.get(name)
            if count is None:
                copies[name] = 1
                if is_held or (silent and key in silent):
                    shared = self._shared[lane.tier]
                    shared[key] = shared.get(key, 0) + 1
            else:
                copies[name] = count + 1
                self._counters.blocks_reported_again += 1
            if not is_held:
                begun.append(key)
                if silent:
                    silent.pop(key, None)
            held[key] = seq
        return begun

    def remove(self, lane: Lane, names: Sequence[EngineHash]) -> RemovedCopies:
        """Count one copy less of each."""
        copies = self._lanes.get(lane)
        if copies is None:
            return RemovedCopies([], list(names))
        ended: list[int] = []
        unknown: list[EngineHash] = []
        doubted = self._doubted.setdefault(lane, {})
        for name in names:
            count = copies.get(name)
            if count is None:
                unknown.append(name)
            elif count > 1:
                copies[name] = count - 1
                doubted.setdefault(name)
            else:
                del copies[name]
                if doubted:
                    doubted.pop(name, None)
                key = self._drop_entry(lane.tier, name)
                if key is not None:
                    ended.append(key)
        return RemovedCopies(ended, unknown)

    def _drop_entry(self, tier: Tier, name: EngineHash) -> int | None:
        """A name has left a lane: its key, if the tier held it and holds it no longer."""
        key = self.key_of[name]
        for copies in self._lanes.values():
            if name in copies:
                break
        else:
            del self.key_of[name]
        shared = self._shared[tier]
        if shared and key in shared:
            shared[key] -= 1
            if not shared[key]:
                del shared[key]
            return None
        if self._held[tier].pop(key, None) is not None:
            return key
        self._silent[tier].pop(key, None)
        return None

    def refute(self, tier: Tier, keys: Sequence[int], seq: Seq) -> list[int]:
        """Silence keys whose latest store went out by batch ``seq``; those silenced."""
        held = self._held[tier]
        silenced = [key for key in dict.fromkeys(keys) if key in held and held[key] <= seq]
        self._silence(tier, silenced)
        return silenced

    def silence_excess(self, tier: Tier) -> list[int]:
        """Silence what cannot be real because the tier is too small for it; those silenced."""
        held = self._held[tier]
        excess = len(held) - self._capacities[tier]
        if excess <= 0:
            return []
        suspects: dict[int, None] = {}
        for lane, doubted in self._doubted.items():
            if lane.tier is tier:
                for name in islice(list(doubted), excess - len(suspects)):
                    del doubted[name]
                    if self.key_of[name] in held:
                        suspects[self.key_of[name]] = None
        phantoms = list(suspects)
        self._silence(tier, phantoms)
        self._counters.keys_phantom_dropped += len(phantoms)
        oldest = list(islice(held, excess - len(phantoms)))
        self._silence(tier, oldest)
        self._counters.keys_capacity_dropped += len(oldest)
        return phantoms + oldest

    def _silence(self, tier: Tier, keys: Sequence[int]) -> None:
        for key in keys:
            del self._held[tier][key]
            self._silent[tier][key] = None
        if len(self._silent[tier]) > max(SILENT_KEYS_MAX, self._capacities[Tier.DEVICE]):
            self._forget_silent(tier)

    def _forget_silent(self, tier: Tier) -> None:
        """Forget names that nothing is told about; what hangs from them is linked no more."""
        silent = self._silent[tier]
        for lane, copies in self._lanes.items():
            if lane.tier is tier:
                for name in [name for name in copies if self.key_of[name] in silent]:
                    del copies[name]
                    self._doubted.get(lane, {}).pop(name, None)
                    self._drop_entry(tier, name)

    def export(self) -> tuple[LaneRecord, ...]:
        """Everything counted, lane by lane."""
        return tuple(
            LaneRecord(
                lane,
                tuple(copies),
                tuple(map(self.key_of.__getitem__, copies)),
                tuple(copies.values()),
                tuple(self.key_of[name] in self._held[lane.tier] for name in copies),
                tuple(self._doubted.get(lane, ())),
            )
            for lane, copies in self._lanes.items()
        )

    def restore(self, records: Sequence[LaneRecord], seq: Seq) -> None:
        """Count what a checkpoint says, into empty holdings, as if all of it went out in batch ``seq``."""
        assert not self.key_of, "holdings are restored into empty ones only"
        for record in records:
            tier = record.lane.tier
            self.store(record.lane, record.names, record.keys, seq)
            self._lanes[record.lane] = dict(zip(record.names, record.copies, strict=True))
            self._doubted[record.lane] = dict.fromkeys(record.doubted)
            quiet = [
                key
                for key, loud in zip(record.keys, record.loud, strict=True)
                if not loud and key in self._held[tier]
            ]
            self._silence(tier, list(dict.fromkeys(quiet)))
