"""Every policy by its name, with its parameters and their published defaults.

``make_policy(name, settings, seed)`` is what a command line, an experiment and a live demo call. A settings class
is a frozen dataclass; the text of an option becomes a field by the field's type. An unknown policy, an unknown
parameter and an impossible value end in ``InvalidInput``: one sentence that names it and what there is.
"""

import dataclasses
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from evenhand.core.errors import InvalidInput
from evenhand.policies.affinity import (
    CacheAware,
    CacheAwareSettings,
    LoadAwarePrefix,
    LoadAwarePrefixSettings,
    LongestPrefix,
    LongestPrefixSettings,
    PrefixCache,
    PrefixCacheSettings,
    SessionHash,
    SessionHashSettings,
)
from evenhand.policies.central import RoomSettings
from evenhand.policies.deficit import Dlpm, DlpmSettings, DoubleDeficit, DoubleDeficitSettings
from evenhand.policies.dynamo import DynamoClasses, DynamoClassesSettings, DynamoCost, DynamoCostSettings
from evenhand.policies.evenhand import SIMULATED, Evenhand, EvenhandSettings
from evenhand.policies.policy import Policy
from evenhand.policies.scoring import (
    ExploitExplore,
    ExploitExploreSettings,
    VtcBasic,
    VtcBasicSettings,
    WeightedScorers,
    WeightedScorersSettings,
)
from evenhand.policies.spreading import LeastLoad, NoSettings, RoundRobin
from evenhand.policies.strict import StrictPriority
from evenhand.policies.vtc import Vtc, VtcAffine, VtcSettings

NUMBER_MAX = 10**12
"""Largest number that a parameter takes as text: beyond it sums of costs and times lose their meaning."""


@dataclass(frozen=True, slots=True)
class PolicyEntry:
    """One row of the table."""

    name: str
    settings: type[Any]
    """A frozen dataclass whose defaults are the published ones."""
    make: Callable[[Any, int], Policy]
    """From settings and a seed."""
    summary: str
    given: Mapping[str, object] = field(default_factory=dict)
    """Settings that differ from the class's own defaults, or have none."""


_ROWS: tuple[PolicyEntry, ...] = (
    PolicyEntry("fcfs-round-robin", NoSettings, RoundRobin, "the next worker in turn"),
    PolicyEntry("fcfs-least-load", NoSettings, LeastLoad, "the worker with the fewest requests in flight"),
    PolicyEntry("session-hash", SessionHashSettings, SessionHash, "consistent hash of the conversation"),
    PolicyEntry("longest-prefix", LongestPrefixSettings, LongestPrefix, "greedy: who holds most of the prompt"),
    PolicyEntry("load-aware-prefix", LoadAwarePrefixSettings, LoadAwarePrefix, "match less β times excess load"),
    PolicyEntry("cache-aware", CacheAwareSettings, CacheAware, "match above a threshold, unless loads are apart"),
    PolicyEntry(
        "prefix-cache", PrefixCacheSettings, PrefixCache, "match unless loaded a deviation above the mean"
    ),
    PolicyEntry("preble-e2", ExploitExploreSettings, ExploitExplore, "exploit a long match, else explore"),
    PolicyEntry("dynamo-cost", DynamoCostSettings, DynamoCost, "least blocks to prefill and decode"),
    PolicyEntry("dynamo-classes", DynamoClassesSettings, DynamoClasses, "deficit round robin by uncached input"),
    PolicyEntry("llm-d-scorers", WeightedScorersSettings, WeightedScorers, "weighted prefix, queue and KV scores"),
    PolicyEntry("vtc-basic", VtcBasicSettings, VtcBasic, "a user's tokens choose the worker"),
    PolicyEntry("vtc", VtcSettings, Vtc, "virtual token counter, least loaded worker"),
    PolicyEntry("vtc-affine", VtcSettings, VtcAffine, "virtual token counter, best cached worker"),
    PolicyEntry("dlpm", DlpmSettings, Dlpm, "deficit longest prefix match at the router"),
    PolicyEntry("d2lpm", DoubleDeficitSettings, DoubleDeficit, "deficits at the router and in each engine"),
    PolicyEntry("strict-priority", RoomSettings, StrictPriority, "the well-behaved first: a limit, no policy"),
    PolicyEntry("evenhand", EvenhandSettings, Evenhand, "windowed fair queuing with affinity", SIMULATED),
)

POLICIES: Mapping[str, PolicyEntry] = {row.name: row for row in _ROWS}


def policy_entry(name: str) -> PolicyEntry:
    """The row of a policy; ``InvalidInput`` if there is none."""
    entry = POLICIES.get(name)
    if entry is None:
        raise InvalidInput(f"There is no policy {name!r}; there are {', '.join(sorted(POLICIES))}.")
    return entry


def make_policy(name: str, settings: Mapping[str, object] | None = None, seed: int = 0) -> Policy:
    """A fresh policy. Values of ``settings`` may be of the field's type or text, as from a command line."""
    entry = policy_entry(name)
    given = settings or {}
    fields = {field.name for field in dataclasses.fields(entry.settings)}
    hints = typing.get_type_hints(entry.settings)
    values: dict[str, object] = dict(entry.given)
    for key, value in given.items():
        if key not in fields:
            known = f"it has {', '.join(sorted(fields))}" if fields else "it has none"
            raise InvalidInput(f"The policy {name!r} has no parameter {key!r}; {known}.")
        values[key] = _parsed(name, key, hints[key], value) if isinstance(value, str) else value
    return entry.make(entry.settings(**values), seed)


def _parsed(name: str, key: str, hint: Any, text: str) -> object:
    """A field's value from text, by its type: bool, int, float, str, an enum, or one of these or None."""
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    wanted = []
    for kind in kinds:
        if kind is types.NoneType:
            wanted.append("none")
            if text.lower() == "none":
                return None
        elif kind is bool:
            wanted.append("true or false")
            if text.lower() in ("true", "false"):
                return text.lower() == "true"
        elif isinstance(kind, type) and issubclass(kind, Enum):
            wanted.append(" or ".join(member.value for member in kind))
            if text in [member.value for member in kind]:
                return kind(text)
        elif kind in (int, float):
            wanted.append(f"a {'whole ' if kind is int else ''}number from 0 to {NUMBER_MAX:,}")
            try:
                number: float = kind(text)
            except ValueError:
                continue
            if 0 <= number <= NUMBER_MAX:
                return number
        elif kind is str:
            return text
    if not wanted:
        raise InvalidInput(f"The parameter {key!r} of the policy {name!r} cannot be set as text.")
    must = " or ".join(wanted)
    raise InvalidInput(f"The parameter {key!r} of the policy {name!r} is {text!r}, but must be {must}.")
