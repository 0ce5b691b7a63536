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
from dataclasses import dataclass, field
from itertools import islice

from evenhand.core.ids import Seq
from evenhand.core.kv import Tier
from evenhand.worker.counters import TranslatorCounters
from evenhand.worker.engine_events import EngineHash

TIER_KEYS_MAX = 4_194_304
"""Keys held on a tier whose size is unknown."""
SILENT_KEYS_MAX = 65_536
"""Silent keys of a tier; beyond, all are forgotten."""


BULK_BLOCKS_MIN = 4
"""From so many blocks on, looking whether all are ordinary pays: they are then counted without a look at each."""
TIERS = tuple(Tier)


@dataclass(slots=True, eq=False)
class Lane:
    """One cache group on one tier, with its counts. Written by ``Holdings`` alone; compared by identity."""

    tier: Tier
    group: int
    # Of the whole tier, shared by its lanes:
    held: dict[int, Seq]
    silent: dict[int, None]
    shared: dict[int, int]
    # Of this lane alone:
    key_of: dict[EngineHash, int] = field(default_factory=dict)
    """Key of every name with a copy here."""
    more: dict[EngineHash, int] = field(default_factory=dict)
    """Copies beyond the first, where there are any."""
    doubted: dict[EngineHash, None] = field(default_factory=dict)
    """Names reported while held that have lost a copy since, the longest doubted first."""


@dataclass(frozen=True, slots=True)
class LaneRecord:
    """Everything counted in one lane, in columns, for a checkpoint. ``loud[i]`` is False for a silent key."""

    tier: Tier
    group: int
    names: tuple[EngineHash, ...]
    keys: tuple[int, ...]
    copies: tuple[int, ...]
    loud: tuple[bool, ...]
    doubted: tuple[EngineHash, ...]


class Holdings:
    """Copies and keys of one engine life. ``device_blocks`` 0 means that the engine's size is unknown."""

    __slots__ = ("_capacities", "_counters", "_held", "_lanes", "_shared", "_silent")

    def __init__(self, counters: TranslatorCounters, device_blocks: int = 0) -> None:
        self._counters = counters
        self._lanes: list[Lane] = []
        # By tier, from here on.
        self._held: list[dict[int, Seq]] = [{} for _ in TIERS]
        """Keys held, each with the number of the batch that its latest store goes out in."""
        self._silent: list[dict[int, None]] = [{} for _ in TIERS]
        """Keys that have copies by count and are not held."""
        self._shared: list[dict[int, int]] = [{} for _ in TIERS]
        """Entries (lane and name) of a key beyond the first, where there are several: cache groups, mostly."""
        self._capacities = [TIER_KEYS_MAX for _ in TIERS]
        self.set_device_blocks(device_blocks)

    def lane(self, tier: Tier, group: int) -> Lane:
        """The one lane of this tier and group."""
        for lane in self._lanes:
            if lane.tier is tier and lane.group == group:
                return lane
        lane = Lane(tier, group, self._held[tier], self._silent[tier], self._shared[tier])
        self._lanes.append(lane)
        return lane

    def set_device_blocks(self, device_blocks: int) -> None:
        self._capacities[Tier.DEVICE] = device_blocks or TIER_KEYS_MAX

    def clear(self) -> None:
        """Nothing is held or counted any more; the engine's size stands."""
        for lane in self._lanes:
            lane.key_of = {}
            lane.more = {}
            lane.doubted = {}
        for tier in TIERS:
            self._held[tier].clear()
            self._silent[tier].clear()
            self._shared[tier].clear()

    def held(self, tier: Tier) -> dict[int, Seq]:
        """Keys held on a tier, oldest first; for reading only."""
        return self._held[tier]

    def restamp(self, seq: Seq) -> None:
        """All that is held counts as stored in batch ``seq``."""
        for tier in TIERS:
            self._held[tier].update(dict.fromkeys(self._held[tier], seq))

    def doubted_total(self) -> int:
        """Names that could be phantoms: the most phantoms there can be."""
        return sum(len(lane.doubted) for lane in self._lanes)

    def names_total(self) -> int:
        """Names counted, in all lanes."""
        return sum(len(lane.key_of) for lane in self._lanes)

    def key(self, name: EngineHash) -> int | None:
        """Key of a name that is counted in any lane."""
        for lane in self._lanes:
            key = lane.key_of.get(name)
            if key is not None:
                return key
        return None

    def store(self, lane: Lane, names: Sequence[EngineHash], keys: Sequence[int], seq: Seq) -> Sequence[int]:
        """Count one more copy of each; the keys that the tier begins to hold. Stops at a name in conflict."""
        key_of, held, silent = lane.key_of, lane.held, lane.silent
        alone = len(self._lanes) == 1
        if alone and len(names) >= BULK_BLOCKS_MIN and not silent and all_new(key_of, names, held, keys):
            key_of.update(zip(names, keys, strict=True))
            held.update(dict.fromkeys(keys, seq))
            return keys
        begun: list[int] = []
        for name, key in zip(names, keys, strict=False):
            known = key_of.get(name)
            if (known is not None and known != key) or not (alone or self.key(name) in (None, key)):
                self._counters.name_conflicts += 1
                break
            is_held = key in held
            if known is None:
                key_of[name] = key
                if is_held or (silent and key in silent):
                    lane.shared[key] = lane.shared.get(key, 0) + 1
            else:
                lane.more[name] = lane.more.get(name, 0) + 1
                self._counters.blocks_reported_again += 1
            if not is_held:
                begun.append(key)
                if silent:
                    silent.pop(key, None)
            held[key] = seq
        return begun

    def remove(self, lane: Lane, names: Sequence[EngineHash], unknown: list[EngineHash]) -> list[int]:
        """Count one copy less of each; the keys the tier ceases to hold. Names not known go to ``unknown``."""
        key_of, more, doubted = lane.key_of, lane.more, lane.doubted
        held, shared, silent = lane.held, lane.shared, lane.silent
        ended: list[int] = []
        if len(names) >= BULK_BLOCKS_MIN and not (more or doubted or shared or silent):
            found = [key_of.pop(name, None) for name in names]
            ended = [key for key in found if key is not None]
            if len(ended) < len(names):
                unknown.extend([name for name, key in zip(names, found, strict=True) if key is None])
            for gone in ended:
                del held[gone]
            return ended
        for name in names:
            if more and name in more:
                more[name] -= 1
                if not more[name]:
                    del more[name]
                doubted.setdefault(name)
                continue
            key = key_of.pop(name, None)
            if key is None:
                unknown.append(name)
                continue
            if doubted:
                doubted.pop(name, None)
            if shared and key in shared:
                shared[key] -= 1
                if not shared[key]:
                    del shared[key]
            elif held.pop(key, None) is not None:
                ended.append(key)
            elif silent:
                silent.pop(key, None)
        return ended

    def refute(self, tier: Tier, keys: Sequence[int], seq: Seq) -> list[int]:
        """Silence keys whose latest store went out by batch ``seq``; those silenced."""
        held = self._held[tier]
        silenced = [key for key in dict.fromkeys(keys) if key in held and held[key] <= seq]
        self._silence(tier, silenced)
        return silenced

    @property
    def in_excess(self) -> bool:
        """Whether any tier holds more keys, by count, than it can."""
        device, host, disk = self._held
        most = self._capacities
        return len(device) > most[0] or len(host) > most[1] or len(disk) > most[2]

    def silence_excess(self, tier: Tier) -> list[int]:
        """Silence what cannot be real because the tier is too small for it; those silenced."""
        held = self._held[tier]
        excess = len(held) - self._capacities[tier]
        if excess <= 0:
            return []
        suspects: dict[int, None] = {}
        for lane in self._lanes:
            if lane.tier is tier:
                for name in islice(list(lane.doubted), excess - len(suspects)):
                    del lane.doubted[name]
                    if lane.key_of[name] in held:
                        suspects[lane.key_of[name]] = None
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
        if len(self._silent[tier]) > SILENT_KEYS_MAX:
            self._forget_silent(tier)

    def _forget_silent(self, tier: Tier) -> None:
        """Forget names that nothing is told about; what hangs from them is linked no more."""
        silent = self._silent[tier]
        for lane in self._lanes:
            if lane.tier is tier:
                for name in [name for name, key in lane.key_of.items() if key in silent]:
                    del lane.key_of[name]
                    lane.more.pop(name, None)
                    lane.doubted.pop(name, None)
        for key in silent:
            self._shared[tier].pop(key, None)
        silent.clear()

    def export(self) -> tuple[LaneRecord, ...]:
        """Everything counted, lane by lane."""
        return tuple(
            LaneRecord(
                lane.tier,
                lane.group,
                tuple(lane.key_of),
                tuple(lane.key_of.values()),
                tuple(1 + lane.more.get(name, 0) for name in lane.key_of),
                tuple(key in self._held[lane.tier] for key in lane.key_of.values()),
                tuple(lane.doubted),
            )
            for lane in self._lanes
        )

    def restore(self, records: Sequence[LaneRecord], seq: Seq) -> None:
        """Count what a checkpoint says, into empty holdings, as if all of it went out in batch ``seq``."""
        for record in records:
            lane = self.lane(record.tier, record.group)
            assert not lane.key_of, "holdings are restored into empty ones only"
            self.store(lane, record.names, record.keys, seq)
            pairs = zip(record.names, record.copies, strict=True)
            lane.more = {name: copies - 1 for name, copies in pairs if copies > 1}
            lane.doubted = dict.fromkeys(record.doubted)
            held = self._held[lane.tier]
            quiet = [key for key, loud in zip(record.keys, record.loud, strict=True) if not loud and key in held]
            self._silence(lane.tier, list(dict.fromkeys(quiet)))


def all_new(
    key_of: dict[EngineHash, int], names: Sequence[EngineHash], held: dict[int, Seq], keys: Sequence[int]
) -> bool:
    """Whether no name and no key is there already, and no name comes twice. (Keys of one chain never do.)"""
    return (
        key_of.keys().isdisjoint(names)
        and held.keys().isdisjoint(keys)
        and len(set(names)) == len(names) == len(keys)
    )
