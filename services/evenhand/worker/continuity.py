"""Whether frames are in order, and from one life of the engine: a pure state machine over sequence numbers.

An engine numbers its frames from 0 in each of its lives and keeps the latest for replay. Numbers alone prove
little: a restarted engine counts past the old number while nobody listens. So the last frame read is known by its
digest, a replay begins with that very frame, and only the same digest is the same life.

::

    state      input                                    goes to    actions
    FOLLOWING  frame, number = last + 1                 FOLLOWING  Deliver
    FOLLOWING  frame, number ≤ last, same digest        FOLLOWING  (a duplicate; counted)
    FOLLOWING  frame, number ≤ last, another digest     FOLLOWING  BeginLife; then as the first of a life
    FOLLOWING  frame, number > last + 1 (or first > 0)  ASKING     AskReplay(last), the frame is held back
    any        connected                                ASKING     AskReplay(last)
    any        another process start time               ASKING     BeginLife, AskReplay(0)
    ASKING     frame                                    ASKING     held back, bounded
    ASKING     replayed frame, the last, same digest    ASKING     (the same life)
    ASKING     replayed frame, next in order            ASKING     Deliver
    ASKING     replayed frame, anything else            ASKING     BeginLife, AskReplay(0)
    ASKING     end, the last frame was not in it        ASKING     BeginLife, AskReplay(0)
    ASKING     end                                      FOLLOWING  what was held back, as frames
    ASKING     no answer                                ASKING     AskReplay again, REPLAY_TRIES_MAX times
    ASKING     no answer, frames held back              FOLLOWING  as without replay

Without replay a gap cannot be closed, so it begins a life: a map that may hold what the engine dropped meanwhile
is worse than an empty one. What always holds: frames of one life are delivered in order, each once, without a hole
that no BeginLife precedes.
"""

import hashlib
from collections import OrderedDict, deque
from dataclasses import dataclass
from enum import Enum

HELD_FRAMES_MAX = 10_000
HELD_BYTES_MAX = 64 * 1024 * 1024
RECENT_FRAMES_MAX = 4_096
"""Digests remembered to tell a duplicate from a restart."""
REPLAY_TRIES_MAX = 3
"""Replays in a row that may go unanswered, or leave a gap open, before the engine counts as one without replay."""


@dataclass(frozen=True, slots=True)
class FramePosition:
    """A frame by number and content."""

    seq: int
    digest: bytes


@dataclass(slots=True)
class Deliver:
    """Translate this frame next. Treat as frozen; it is made once a frame."""

    seq: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class BeginLife:
    """What was held is void: a new epoch with an empty map."""

    reason: str


@dataclass(frozen=True, slots=True)
class AskReplay:
    """Ask the engine for all frames from this number on; an earlier replay still under way is void."""

    from_seq: int


Action = Deliver | BeginLife | AskReplay


@dataclass(slots=True)
class ContinuityCounters:
    """Totals; they only grow."""

    duplicates: int = 0
    gaps: int = 0
    gaps_unrecovered: int = 0
    """Gaps that began a life because no replay could close them."""
    lives_begun: int = 0
    replays_asked: int = 0
    replays_unanswered: int = 0
    held_overflowed: int = 0


class _State(Enum):
    FOLLOWING = "following"
    ASKING = "asking"


class Continuity:
    """Feed it what the sockets bring; do what it returns, in order."""

    def __init__(
        self, replays: bool, last: FramePosition | None = None, process_started_at_ms: int | None = None
    ) -> None:
        """``last`` and ``process_started_at_ms`` come from a checkpoint."""
        self.counters = ContinuityCounters()
        self.last = last
        self.process_started_at_ms = process_started_at_ms
        self._replays = replays
        self._state = _State.FOLLOWING
        self._unproven = last is not None
        """True: nothing has shown yet that the engine lives the life of ``last``."""
        self._same_process = False
        self._tries = 0
        self._held: deque[Deliver] = deque()
        self._held_bytes = 0
        self._overflowed = False
        self._recent: OrderedDict[int, bytes] = OrderedDict()
        if last is not None:
            self._recent[last.seq] = last.digest

    @property
    def settled(self) -> bool:
        """No replay is under way and the life is proven: what is held can be told to others."""
        return self._state is _State.FOLLOWING and not self._unproven

    def start(self) -> list[Action]:
        """The sockets are open."""
        if self._replays:
            return [self._ask()]
        return []

    def connected(self) -> list[Action]:
        """The engine's event socket is connected, for the first time or again; frames may be missing."""
        if not self._replays:
            return []
        self._drop_held()
        return [self._ask()]

    def process_started(self, at_ms: int) -> list[Action]:
        """The engine's metrics say when its process started."""
        known, self.process_started_at_ms = self.process_started_at_ms, at_ms
        if known is None or known == at_ms:
            self._same_process = known == at_ms
            return []
        actions: list[Action] = [self._begin_life("The engine's process started anew.")]
        self.process_started_at_ms = at_ms
        if self._replays:
            self._drop_held()
            actions.append(self._ask())
        return actions

    def frame(self, seq: int, payload: bytes) -> list[Action]:
        """A frame from the engine's event socket."""
        if self._state is _State.ASKING:
            self._hold_back(Deliver(seq, payload))
            return []
        if self._unproven and not self._prove_without_replay(seq):
            begun = self._begin_life("Nothing shows that the engine lives the life of the last frame read.")
            return [begun, *self._first(Deliver(seq, payload))]
        last = self.last
        if last is None:
            return self._first(Deliver(seq, payload))
        if seq == last.seq + 1:
            return [self._deliver(Deliver(seq, payload))]
        if seq <= last.seq:
            if self._recent.get(seq) == _digest(payload):
                self.counters.duplicates += 1
                return []
            begun = self._begin_life(f"The engine counts from {seq} again after {last.seq}.")
            return [begun, *self._first(Deliver(seq, payload))]
        self.counters.gaps += 1
        if self._replays:
            self._hold_back(Deliver(seq, payload))
            return [self._ask()]
        return self._cross_gap(Deliver(seq, payload))

    def replayed(self, seq: int, payload: bytes) -> list[Action]:
        """A frame from the replay that was asked for last."""
        if self._state is not _State.ASKING:
            return []
        last = self.last
        if last is None:
            self._unproven = False
            if seq > 0:
                self.counters.gaps += 1
                self.counters.gaps_unrecovered += 1
            return [self._deliver(Deliver(seq, payload))]
        if self._unproven:
            if seq == last.seq and _digest(payload) == last.digest:
                self._unproven = False
                return []
            return self._again(f"Frame {last.seq} is not the one that was read before.")
        if seq == last.seq + 1:
            return [self._deliver(Deliver(seq, payload))]
        if seq <= last.seq and self._recent.get(seq) == _digest(payload):
            return []
        return self._again(f"A replay gave frame {seq} after {last.seq}.")

    def replay_ended(self) -> list[Action]:
        """The replay that was asked for last is complete."""
        if self._state is not _State.ASKING:
            return []
        if self._unproven and self.last is not None:
            return self._again(f"The engine does not know frame {self.last.seq}.")
        if self._overflowed:
            self._overflowed = False
            return [self._ask()]
        return self._follow()

    def replay_failed(self) -> list[Action]:
        """No answer in time to the replay that was asked for last."""
        if self._state is not _State.ASKING:
            return []
        self.counters.replays_unanswered += 1
        self._tries += 1
        if self._tries < REPLAY_TRIES_MAX or not self._held:
            return [self._ask()]
        return self._follow()

    # -- parts

    def _follow(self) -> list[Action]:
        """Go on with what was held back."""
        self._state = _State.FOLLOWING
        held, self._held, self._held_bytes = self._held, deque(), 0
        replays = self._replays
        self._replays = replays and self._tries < REPLAY_TRIES_MAX
        actions: list[Action] = []
        while held:
            delivery = held.popleft()
            actions += self.frame(delivery.seq, delivery.payload)
            if self._state is _State.ASKING:  # Another gap: what is left waits behind it.
                self._tries += 1
                for later in held:
                    self._hold_back(later)
                break
        else:
            self._tries = 0
        self._replays = replays
        return actions

    def _first(self, delivery: Deliver) -> list[Action]:
        """The first frame of a life that nothing is known of."""
        if delivery.seq > 0 and self._replays:
            self.counters.gaps += 1
            self._hold_back(delivery)
            return [self._ask()]
        if delivery.seq > 0:
            self.counters.gaps += 1
            self.counters.gaps_unrecovered += 1
        return [self._deliver(delivery)]

    def _cross_gap(self, delivery: Deliver) -> list[Action]:
        self.counters.gaps_unrecovered += 1
        assert self.last is not None
        begun = self._begin_life(f"Frames {self.last.seq + 1} to {delivery.seq - 1} are lost.")
        return [begun, self._deliver(delivery)]

    def _again(self, reason: str) -> list[Action]:
        self._drop_held()
        return [self._begin_life(reason), self._ask()]

    def _prove_without_replay(self, seq: int) -> bool:
        if self._same_process and self.last is not None and seq == self.last.seq + 1:
            self._unproven = False
        return not self._unproven

    def _begin_life(self, reason: str) -> BeginLife:
        self.counters.lives_begun += 1
        self.last = None
        self._unproven = False
        self._recent.clear()
        self.process_started_at_ms = None
        self._same_process = False
        return BeginLife(reason)

    def _ask(self) -> AskReplay:
        self._state = _State.ASKING
        self.counters.replays_asked += 1
        if self.last is None:
            return AskReplay(0)
        self._unproven = True
        return AskReplay(self.last.seq)

    def _deliver(self, delivery: Deliver) -> Deliver:
        digest = _digest(delivery.payload)
        self.last = FramePosition(delivery.seq, digest)
        self._recent[delivery.seq] = digest
        if len(self._recent) > RECENT_FRAMES_MAX:
            self._recent.popitem(last=False)
        return delivery

    def _hold_back(self, delivery: Deliver) -> None:
        self._held.append(delivery)
        self._held_bytes += len(delivery.payload)
        if len(self._held) > HELD_FRAMES_MAX or self._held_bytes > HELD_BYTES_MAX:
            self.counters.held_overflowed += 1
            self._overflowed = True
            self._drop_held()

    def _drop_held(self) -> None:
        """Frames held back may be of a life that is over; a replay asked for from here on has them if not."""
        self._held.clear()
        self._held_bytes = 0


def _digest(payload: bytes) -> bytes:
    return hashlib.sha256(payload).digest()
