"""Faults by name: what each does, and how often a run meets it.

Each can be switched off alone. ``Weather`` is asked at each place where a fault may strike; while it is calm, none
does. Crashes and absences are planned ahead by ``disasters``.
"""

from collections.abc import Iterable
from enum import Enum
from random import Random
from typing import Final

from evenhand.core.errors import InvalidInput
from evenhand.simulation.system.chance import Chance


class Fault(Enum):
    """Every fault there is; the value is its name on the command line."""

    NETWORK_SLOW = "network-slow"
    """Now and then a call, an answer, a record or a frame takes up to a second."""
    ANSWERS_LOST = "answers-lost"
    """A call breaks after the scheduler has answered it: its client asks again."""
    CALLS_LOST = "calls-lost"
    """A call breaks before the scheduler has heard of it."""
    FRAMES_LOST = "frames-lost"
    """An engine's event frames vanish on the way to its edge."""
    FRAMES_DOUBLED = "frames-doubled"
    FRAMES_REORDERED = "frames-reordered"
    REPLAYS_LOST = "replays-lost"
    """An engine does not answer a request for replay."""
    RECORDS_DOUBLED = "records-doubled"
    """The broker has a record twice."""
    RECORDS_UNACKNOWLEDGED = "records-unacknowledged"
    """The broker has a record and its writer is told that it may not."""
    BROKER_AWAY = "broker-away"
    BROKER_REPLACED = "broker-replaced"
    """The broker comes back empty."""
    ENGINE_CRASH = "engine-crash"
    EDGE_CRASH = "edge-crash"
    """An edge dies and returns from its checkpoint; one in four has lost its disk."""
    STATE_CRASH = "state-crash"
    """The state service dies, at a random moment or just before or after a transaction."""
    SCHEDULER_CRASH = "scheduler-crash"
    SCHEDULER_CUT_OFF = "scheduler-cut-off"
    """A scheduler alone does not reach the database; it lives on beside its successor."""
    DATABASE_SLOW = "database-slow"
    DATABASE_AWAY = "database-away"
    COMMITS_UNACKNOWLEDGED = "commits-unacknowledged"
    """A transaction is committed and its writer does not hear of it."""
    CLOCK_SKEW = "clock-skew"
    """Hosts' wall clocks are off by up to three seconds."""
    CLIENTS_VANISH = "clients-vanish"
    CLIENTS_CANCEL = "clients-cancel"
    CLIENTS_REPEAT = "clients-repeat"
    """A client has two calls open for one request at once."""
    WORKERS_DRAINED = "workers-drained"
    WORKERS_LEAVE = "workers-leave"
    """An edge says that its worker is gone for good; it returns later."""
    LOADS_MISSING = "loads-missing"
    """An engine does not answer its edge's polls for a while."""
    CACHES_RESET = "caches-reset"
    """An engine forgets its prefix cache when idle."""
    TENANTS_CHANGED = "tenants-changed"
    """A tenant gets another weight, band, limit or other weights of its users."""
    TENANTS_SUSPENDED = "tenants-suspended"
    """A tenant is suspended or drained for a while."""
    TENANTS_DELETED = "tenants-deleted"
    """A tenant is deleted, and made anew under its name a little later."""
    BANDS_CHANGED = "bands-changed"
    """The pool's bands weigh otherwise, for the scheduler in office."""


ALL: Final = tuple(Fault)


def parse_faults(text: str) -> frozenset[Fault]:
    """``all``, ``none``, or names separated by commas; raises ``InvalidInput`` naming one that does not exist."""
    if text == "all":
        return frozenset(ALL)
    if text == "none":
        return frozenset()
    by_name = {fault.value: fault for fault in ALL}
    chosen = []
    for name in (part.strip() for part in text.split(",")):
        if name not in by_name:
            raise InvalidInput(f"There is no fault {name!r}; there are all, none, {', '.join(sorted(by_name))}.")
        chosen.append(by_name[name])
    return frozenset(chosen)


def met_faults(faults: frozenset[Fault], random: Random) -> frozenset[Fault]:
    """What one seed meets: of all faults about half, drawn from the seed; of fewer, each."""
    if faults != frozenset(ALL):
        return faults
    return frozenset(fault for fault in ALL if random.random() < 0.5)


CHANCES: Final = {
    Fault.NETWORK_SLOW: 0.02,
    Fault.ANSWERS_LOST: 0.03,
    Fault.CALLS_LOST: 0.03,
    Fault.FRAMES_LOST: 0.03,
    Fault.FRAMES_DOUBLED: 0.03,
    Fault.FRAMES_REORDERED: 0.03,
    Fault.REPLAYS_LOST: 0.2,
    Fault.RECORDS_DOUBLED: 0.02,
    Fault.RECORDS_UNACKNOWLEDGED: 0.02,
    Fault.COMMITS_UNACKNOWLEDGED: 0.05,
    Fault.CLIENTS_VANISH: 0.03,
    Fault.CLIENTS_CANCEL: 0.06,
    Fault.CLIENTS_REPEAT: 0.05,
}
"""How often each small fault strikes where it may."""


class Weather:
    """Which faults strike now."""

    def __init__(self, chance: Chance, faults: Iterable[Fault]) -> None:
        self.faults = frozenset(faults)
        self.calm = False
        """True: nothing strikes any more."""
        self.struck: dict[str, int] = {}
        """Times that each fault has struck."""
        self._streams = {fault: chance.stream(f"fault {fault.value}") for fault in ALL}

    def strikes(self, fault: Fault) -> bool:
        """Whether this fault strikes here and now."""
        if self.calm or fault not in self.faults:
            return False
        if self._streams[fault].random() >= CHANCES[fault]:
            return False
        self.count(fault)
        return True

    def count(self, fault: Fault) -> None:
        """It has struck."""
        self.struck[fault.value] = self.struck.get(fault.value, 0) + 1

    def delay_s(self, usual_s: float) -> float:
        """How long something takes that usually takes about so long."""
        delay_s = usual_s * (0.5 + self._streams[Fault.NETWORK_SLOW].random())
        if self.strikes(Fault.NETWORK_SLOW):
            delay_s += self._streams[Fault.NETWORK_SLOW].random()
        return delay_s
