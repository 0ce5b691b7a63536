"""Presence against a naive model: sets of keys by worker, recomputed from all that has happened."""

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from evenhand.core.cache_map import CacheMap
from evenhand.core.facts import WorkerSpec
from evenhand.core.fold import fold
from evenhand.core.ids import Epoch, PoolId, Seq, TicketId, WorkerId
from evenhand.core.kv import KvBatch, Removed, Stored
from evenhand.core.presence import PrefillOutcome, Presence

PROMPTS = [(1, 2, 3), (1, 2, 3, 4, 5), (1, 2, 6, 7), (8,), (8, 9)]
WITH_EVENTS, WITHOUT_EVENTS = WorkerId("events"), WorkerId("silent")
GRACE_NS, LIFETIME_NS = 50, 200
CAPACITY = 6


@dataclass
class Prompt:
    """One dispatched prompt; ``ended_ns`` is set while it waits for the map."""

    keys: tuple[int, ...]
    ended_ns: int | None = None


@dataclass
class Taken:
    """What the model takes one worker to hold beside the map."""

    epoch: int
    prompts: dict[TicketId, Prompt] = field(default_factory=dict)
    approximate: list[tuple[int, int]] = field(default_factory=list)
    """``(key, end of its lifetime)``, least recently used first."""

    def presumed(self) -> set[int]:
        return {key for prompt in self.prompts.values() for key in prompt.keys}

    def all(self) -> set[int]:
        return self.presumed() | {key for key, _ in self.approximate}

    def shrink(self) -> None:
        while self.approximate and len(self.all()) > CAPACITY:
            del self.approximate[0]
        while len(self.presumed()) > CAPACITY:
            del self.prompts[next(iter(self.prompts))]


class PresenceMachine(RuleBasedStateMachine):
    """Dispatches, ends, events and time, in any order."""

    @initialize()
    def begin(self) -> None:
        self.cache_map = CacheMap()
        self.presence = Presence(self.cache_map, GRACE_NS, LIFETIME_NS)
        self.held: set[int] = set()
        self.now_ns, self.tickets, self.seq = 0, 0, 0
        self.taken = {WITH_EVENTS: Taken(0), WITHOUT_EVENTS: Taken(0)}
        for worker_id in self.taken:
            self.join(worker_id, 1)

    def join(self, worker_id: WorkerId, epoch: int) -> None:
        sends_events = worker_id == WITH_EVENTS
        spec = WorkerSpec(
            worker_id, PoolId("p"), "http://e", Epoch(epoch), 8, CAPACITY, 16, sends_events=sends_events
        )
        self.presence.worker_joined(spec)
        if epoch > self.taken[worker_id].epoch:
            self.taken[worker_id] = Taken(epoch)

    @rule(worker_id=st.sampled_from([WITH_EVENTS, WITHOUT_EVENTS]), keys=st.sampled_from(PROMPTS))
    def dispatch(self, worker_id: WorkerId, keys: tuple[int, ...]) -> None:
        self.tickets += 1
        ticket_id = TicketId(f"t{self.tickets}")
        self.presence.presume(ticket_id, worker_id, keys, self.now_ns)
        self.taken[worker_id].prompts[ticket_id] = Prompt(keys)
        self.taken[worker_id].shrink()

    @rule(number=st.integers(0, 5), outcome=st.sampled_from(PrefillOutcome))
    def end(self, number: int, outcome: PrefillOutcome) -> None:
        """One of the latest tickets ends, or ends again."""
        ticket_id = TicketId(f"t{self.tickets - number}")
        self.presence.ticket_ended(ticket_id, outcome, self.now_ns)
        for worker_id, taken in self.taken.items():
            prompt = taken.prompts.get(ticket_id)
            if prompt is None or prompt.ended_ns is not None:
                continue
            if outcome is PrefillOutcome.PREFILLED and worker_id == WITH_EVENTS:
                prompt.ended_ns = self.now_ns
                self.catch_up()
                continue
            del taken.prompts[ticket_id]
            if outcome is PrefillOutcome.PREFILLED:
                for key in reversed(prompt.keys):
                    taken.approximate = [entry for entry in taken.approximate if entry[0] != key]
                    taken.approximate.append((key, self.now_ns + LIFETIME_NS))

    @rule(stored=st.sampled_from([*PROMPTS, ()]), removed=st.sampled_from([*PROMPTS, ()]))
    def events(self, stored: tuple[int, ...], removed: tuple[int, ...]) -> None:
        self.seq += 1
        epoch = self.taken[WITH_EVENTS].epoch
        fold(self.cache_map, KvBatch(WITH_EVENTS, Epoch(epoch), Seq(self.seq), (Removed(removed), Stored(stored))))
        self.presence.map_changed(WITH_EVENTS)
        self.held = (self.held - set(removed)) | set(stored)
        self.catch_up()

    def catch_up(self) -> None:
        prompts = self.taken[WITH_EVENTS].prompts
        for ticket_id, prompt in list(prompts.items()):
            if prompt.ended_ns is not None and set(prompt.keys) <= self.held:
                del prompts[ticket_id]

    @rule(by_map=st.booleans())
    def restart(self, by_map: bool) -> None:
        """A new life of the worker with events, told by its batch or by its announcement first."""
        epoch, self.seq, self.held = self.taken[WITH_EVENTS].epoch + 1, 1, set()
        if not by_map:
            self.join(WITH_EVENTS, epoch)
        fold(self.cache_map, KvBatch(WITH_EVENTS, Epoch(epoch), Seq(1), ()))
        self.presence.map_changed(WITH_EVENTS)
        self.taken[WITH_EVENTS] = Taken(epoch)
        self.join(WITH_EVENTS, epoch)

    @rule(worker_id=st.sampled_from([WITH_EVENTS, WITHOUT_EVENTS]))
    def leave_and_join(self, worker_id: WorkerId) -> None:
        epoch = self.taken[worker_id].epoch
        self.presence.worker_gone(worker_id)
        self.taken[worker_id] = Taken(0)
        self.join(worker_id, epoch)

    @rule(passed_ns=st.integers(1, 120))
    def time_passes(self, passed_ns: int) -> None:
        self.now_ns += passed_ns
        due_ns = self.presence.next_expiry_ns()
        before = {worker_id: taken.all() for worker_id, taken in self.taken.items()}
        self.presence.expire(self.now_ns)
        for taken in self.taken.values():
            for ticket_id, prompt in list(taken.prompts.items()):
                if prompt.ended_ns is not None and prompt.ended_ns + GRACE_NS <= self.now_ns:
                    del taken.prompts[ticket_id]
            taken.approximate = [entry for entry in taken.approximate if entry[1] > self.now_ns]
        if before != {worker_id: taken.all() for worker_id, taken in self.taken.items()}:
            assert due_ns is not None
            assert due_ns <= self.now_ns

    @invariant()
    def look_ups_are_the_models(self) -> None:
        for prompt in PROMPTS:
            expected = []
            for worker_id, taken in self.taken.items():
                present = taken.all() | (self.held if worker_id == WITH_EVENTS else set())
                blocks = next((n for n, key in enumerate(prompt) if key not in present), len(prompt))
                if blocks:
                    expected.append((-blocks, worker_id))
            found = [(-match.blocks, match.worker_id) for match in self.presence.match(prompt)]
            assert found == sorted(expected)

    @invariant()
    def counts_are_the_models(self) -> None:
        for worker_id, taken in self.taken.items():
            assert self.presence.assumed_count(worker_id) == len(taken.all()) <= CAPACITY
        assert self.presence.ticket_count == sum(len(taken.prompts) for taken in self.taken.values())
        assert len(self.presence._marks) == len({key for taken in self.taken.values() for key in taken.all()})


TestPresenceModel = PresenceMachine.TestCase
TestPresenceModel.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
