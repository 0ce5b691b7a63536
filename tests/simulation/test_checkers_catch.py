"""The checkers are checked: faults put into the product by hand, each of which a run must notice.

Each case breaks one thing, runs a few seeds with the faults of the world that bring it out, and wants a violation
that says so. Unbroken, the same seeds hold: ``test_the_seeds_hold_unbroken``.
"""

from dataclasses import replace
from typing import Any

import pytest
from tests.simulation.hand_faults import Case, check_noticed, run_until_violated

from evenhand.core.cache_map import CacheMap, WorkerCache
from evenhand.core.facts import LegOutcome
from evenhand.core.fair_queue import FairQueue
from evenhand.core.fair_tree import FairTree
from evenhand.core.kv import Removed, Stored, Tier
from evenhand.core.legs import Legs
from evenhand.core.presence import Presence
from evenhand.core.rooms import Rooms
from evenhand.core.worker import Worker
from evenhand.ports import MapCommit
from evenhand.scheduler.actor import PoolActor
from evenhand.scheduler.ownership import Ownership
from evenhand.simulation.system.book import Page
from evenhand.simulation.system.faults import CHANCES, Fault
from evenhand.state.pending import Pending
from evenhand.worker import edge_state
from evenhand.worker.continuity import BeginLife, Continuity, Deliver
from evenhand.worker.outbox import Outbox


def no_fence(patch: pytest.MonkeyPatch) -> None:
    """An engine's next life goes on under the epoch and the map of the last one."""
    real = edge_state.EdgeState._act

    def act(self: Any, actions: list[Any], now_ms: int) -> Any:
        return real(self, [action for action in actions if not isinstance(action, BeginLife)], now_ms)

    patch.setattr(edge_state.EdgeState, "_act", act)


def skipped_removal(patch: pytest.MonkeyPatch) -> None:
    """The fold loses every removal of more than one key."""
    real = CacheMap.remove

    def remove(self: CacheMap, cache: WorkerCache, tier: Any, keys: Any) -> Any:
        return real(self, cache, tier, keys[:1])

    patch.setattr(CacheMap, "remove", remove)


def duplicates_count(patch: pytest.MonkeyPatch) -> None:
    """A frame that comes twice is translated twice."""
    real = Continuity.frame

    def frame(self: Continuity, seq: int, payload: bytes) -> Any:
        again = self.settled and self.last is not None and seq == self.last.seq
        return [self._deliver(Deliver(seq, payload))] if again else real(self, seq, payload)

    patch.setattr(Continuity, "frame", frame)
    patch.setitem(CHANCES, Fault.FRAMES_DOUBLED, 0.3)


def snapshot_merges(patch: pytest.MonkeyPatch) -> None:
    """A snapshot adds to what is held instead of replacing it; gaps leave what was removed in them."""

    def merge(self: CacheMap, cache: WorkerCache, held: Any) -> None:
        for tier, keys in enumerate(held):
            self.store(cache, Tier(tier), tuple(keys))

    patch.setattr(CacheMap, "replace", merge)


def positions_before_rows(patch: pytest.MonkeyPatch) -> None:
    """A commit has the positions of its records, and the keys of the one before it."""
    real = Pending.seal
    kept: dict[tuple[int, str], tuple[Any, ...]] = {}

    def seal(self: Pending, stored: Any) -> MapCommit:
        commit = real(self, stored)
        deltas = []
        for delta in commit.deltas:
            late, kept[id(self), delta.worker_id] = kept.get((id(self), delta.worker_id), ()), delta.operations
            deltas.append(replace(delta, operations=late))
        return replace(commit, deltas=tuple(deltas))

    patch.setattr(Pending, "seal", seal)


def room_kept(patch: pytest.MonkeyPatch) -> None:
    """A ticket lost with its worker's epoch gives nothing back there."""
    real = Worker.release

    def release(self: Worker, ticket: Any, now_ns: int) -> None:
        if ticket.ticket.epoch == self.spec.epoch:
            real(self, ticket, now_ns)

    patch.setattr(Worker, "release", release)


def nothing_adopted(patch: pytest.MonkeyPatch) -> None:
    """A successor knows nothing of tickets that are not in the checkpoint."""
    patch.setattr(PoolActor, "adopt", lambda _self, _signed: False)


def presumed_for_ever(patch: pytest.MonkeyPatch) -> None:
    """What was presumed stays, though the map has caught up or the time is over."""
    patch.setattr(Presence, "expire", lambda _self, _now_ns: None)
    patch.setattr(Presence, "map_changed", lambda _self, _worker_id: None)


def cancel_refunds(patch: pytest.MonkeyPatch) -> None:
    """Whoever cancels gets everything back."""
    real = Legs._attained

    def attained(self: Legs, held: Any, outcome: LegOutcome, usage: Any) -> float:
        return 0.0 if outcome is LegOutcome.CANCELLED else real(self, held, outcome, usage)

    patch.setattr(Legs, "_attained", attained)


def slots_without_end(patch: pytest.MonkeyPatch) -> None:
    """No slot is no reason not to dispatch."""
    real = Rooms._set_closed

    def set_closed(self: Rooms, worker: Worker, reason: str | None, now_ns: int) -> None:
        real(self, worker, None if reason in ("no_slot", "kv_full", "prefill_full") else reason, now_ns)

    patch.setattr(Rooms, "_set_closed", set_closed)


def one_goes_free(patch: pytest.MonkeyPatch) -> None:
    """One tenant's clock stands still."""
    real = Legs.move

    def move(self: Legs, user: Any, now_ns: int, cost: float = 0.0, held: Any = None) -> None:
        free = user.tenant.spec.tenant_id == "tenant-0"
        real(self, user, now_ns, 0.0 if free else cost, held)

    patch.setattr(Legs, "move", move)


def lease_for_ever(patch: pytest.MonkeyPatch) -> None:
    """A scheduler takes its lease for longer than it was given."""
    patch.setattr(Ownership, "_end_of", lambda _self, asked_at_ns: asked_at_ns + 60_000_000_000)


def removes_what_is_there(patch: pytest.MonkeyPatch) -> None:
    """An edge tells of removals that never were."""
    real = Outbox.add

    def add(self: Any, operations: Any, at_ms: int) -> None:
        real(self, operations, at_ms)
        for operation in operations:
            if isinstance(operation, Stored) and operation.keys:
                real(self, (Removed((operation.keys[0],)),), at_ms)

    patch.setattr(Outbox, "add", add)


def window_without_end(patch: pytest.MonkeyPatch) -> None:
    """Whoever has the best score is served, however far it is ahead."""
    inside = FairQueue.first_inside
    patch.setattr(FairQueue, "first_inside", lambda self, worker, _, count: inside(self, worker, 1e18, count))


def window_unseen(patch: pytest.MonkeyPatch) -> None:
    """The same, where no decision shows it: what tenants get tells."""
    window_without_end(patch)
    patch.setattr(Page, "_check_window", lambda _self, _key, _decision: None)


def window_told_as_endless(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FairTree, "_window", lambda _self, _rate, _node: 1e18)


def no_lift(patch: pytest.MonkeyPatch) -> None:
    """Who comes back has saved up all the time it was away."""
    patch.setattr(FairQueue, "_virtual_time_reached", lambda _self, _reach, _before: 0.0)


MORE = "that the engine does not hold"
LATER = "goes on after a later one has begun"
CASES = (
    Case("an edge does not fence by epoch", no_fence, MORE, "engine-crash", seeds=(2,)),
    Case("the fold skips a removal", skipped_removal, MORE, seeds=(2,)),
    Case("a duplicate is applied twice", duplicates_count, MORE, "frames-doubled", seeds=(13, 21, 10)),
    Case("a snapshot merges", snapshot_merges, MORE, "edge-crash,broker-away", workload="cold", seeds=(7,)),
    Case("positions are stored before rows", positions_before_rows, "the stored map", "state-crash", seeds=(1,)),
    Case("a lost worker's ticket is not released", room_kept, "keeps", "engine-crash", seeds=(5,)),
    Case("a successor ignores adopted tickets", nothing_adopted, "never booked", "scheduler-crash", seeds=(6,)),
    Case("presumed keys are never dropped", presumed_for_ever, "still presumes", seeds=(1,)),
    Case("a cancel refunds in full", cancel_refunds, "P5", "clients-cancel", seeds=(6,)),
    Case("slots do not count", slots_without_end, "slots", seeds=(1,)),
    Case("one tenant goes free", one_goes_free, "P4", workload="hot", requests=400, seeds=(16,)),
    Case("a lapsed lease still grants", lease_for_ever, LATER, "scheduler-cut-off", seeds=(3,)),
    Case("a window without end", window_without_end, "past lo + T", workload="hot", requests=200, seeds=(2,)),
    Case("a window without end, unseen", window_unseen, "P4", workload="waves", requests=300, seeds=(3,)),
    Case("a window told as endless", window_told_as_endless, "R allows", seeds=(1,)),
    Case("no lift", no_lift, "P4", workload="waves", requests=300, seeds=(3,)),
    Case("an edge removes what is there", removes_what_is_there, "lacks", seeds=(1,)),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_fault_put_in_by_hand_is_noticed(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    check_noticed(case, monkeypatch)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_seeds_hold_unbroken(case: Case) -> None:
    result = run_until_violated(case)
    assert result is None, result.violations
