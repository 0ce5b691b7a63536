"""Everything one edge knows and decides, without a socket: frames, polls and wishes in, messages out.

Owned by one task's calls; nothing in it awaits, reads a clock or logs. ``EdgeState`` puts ``Continuity``,
``Translator`` and ``Outbox`` together:

- A life of the engine begins → a new epoch, an empty map, a snapshot owed.
- A snapshot is owed at every start, for readers may have missed anything, and after every overflow. It waits until
  continuity is settled: before that nobody knows what the engine holds.
- A wish for a snapshot is granted at most once an interval, while batches go on.
- A floor above the epoch → a later epoch with the same map, told anew.

Epochs are ``max(clock in ms, highest known + 1)``.
"""

from collections import deque
from dataclasses import dataclass, fields, replace
from typing import assert_never

from evenhand.core.block_key import KEY_SCHEME
from evenhand.core.ids import Epoch, Seq
from evenhand.core.kv import (
    ControlMessage,
    EpochFloor,
    KeysRefuted,
    KvMessage,
    SnapshotPart,
    SnapshotRequested,
    Tier,
    WorkerAnnounced,
    WorkerLeft,
    WorkerLoadReported,
)
from evenhand.worker.checkpoint import EdgeCheckpoint
from evenhand.worker.config import EdgeConfig
from evenhand.worker.continuity import Action, AskReplay, BeginLife, Continuity, Deliver
from evenhand.worker.engine_metrics import EngineMetrics
from evenhand.worker.load import EnginePolled
from evenhand.worker.outbox import Outbox
from evenhand.worker.source import (
    FrameReceived,
    FrameReplayed,
    ReplayEnded,
    ReplayFailed,
    SourceConnected,
    SourceEvent,
)
from evenhand.worker.translator import Translator, TranslatorConfig

SEQ_RESERVE = 1_000_000
"""Batch numbers that a checkpoint reserves; far more than can go out before the next one."""
ALARM_TOKENS_MIN = 1_024
"""Computed prompt tokens that would have made blocks, if the engine told of any."""


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What an engine is: from the settings, else from what it says of itself."""

    model: str
    block_size_tokens: int
    kv_blocks: int
    model_length_max_tokens: int


@dataclass(slots=True)
class EdgeCounters:
    """Totals; they only grow."""

    epochs_begun: int = 0
    snapshots_taken: int = 0
    snapshots_asked: int = 0
    floors_told: int = 0
    control_ignored: int = 0
    silence_alarms: int = 0
    """Times that the engine had traffic and told no event for too long."""
    polls_unanswered: int = 0


def facts_of(config: EdgeConfig, polled: EnginePolled) -> EngineFacts | None:
    """The facts as of one poll; None while model or block size are unknown."""
    metrics = polled.metrics or EngineMetrics()
    model = config.model or (polled.model.name if polled.model else "")
    block_size = config.block_size_tokens or metrics.block_size_tokens
    if not model or not block_size:
        return None
    length = polled.model.model_length_max_tokens if polled.model else 0
    return EngineFacts(model, block_size, config.kv_blocks or metrics.kv_blocks, length)


class EdgeState:
    """One worker's edge between its sockets."""

    def __init__(
        self,
        config: EdgeConfig,
        facts: EngineFacts,
        now_ms: int,
        replays: bool,
        checkpoint: EdgeCheckpoint | None = None,
    ) -> None:
        self.counters = EdgeCounters()
        self.facts = facts
        self.last_replay_ask = 0
        """Number of the replay asked for last; answers to earlier ones are void."""
        self.checkpoint_urgent = False
        """A new epoch must be on disk before its edge can be trusted to have had it."""
        self._config = config
        if checkpoint is None:
            self.continuity = Continuity(replays)
            self.outbox = Outbox(config.worker_id, Epoch(max(1, now_ms)))
            self.translator = Translator(self._translator_config())
        else:
            self.continuity = Continuity(replays, checkpoint.last_frame, checkpoint.process_started_at_ms)
            self.outbox = Outbox(config.worker_id, checkpoint.epoch, checkpoint.seq_reserved)
            self.translator = Translator(self._translator_config(), checkpoint.translator, self.outbox.next_seq)
        self.outbox.owe_snapshot()
        self._parts: deque[SnapshotPart] = deque()
        self._announce_at_ms = now_ms
        self._snapshot_wanted = False
        self._snapshot_at_ms: int | None = None
        self._load: WorkerLoadReported | None = None
        self._frame_at_ms = now_ms
        self._computed_at_frame = 0
        self._computed = 0
        self._alarmed = False
        self._changed = True

    # -- in

    def begin_epoch_anew(self, now_ms: int) -> None:
        """The same map under a later epoch: the numbers of this one cannot be trusted."""
        self._begin_epoch(now_ms, above=self.outbox.epoch)
        self.translator.restamp(self.outbox.next_seq)

    def start(self, now_ms: int) -> list[AskReplay]:
        return self._act(self.continuity.start(), now_ms)

    def source_event(self, event: SourceEvent, now_ms: int) -> list[AskReplay]:
        """Take one event of the source in; the replays to ask for, of which only the last counts."""
        match event:
            case FrameReceived():
                self._frame_at_ms, self._computed_at_frame, self._alarmed = now_ms, self._computed, False
                return self._act(self.continuity.frame(event.seq, event.payload), now_ms)
            case SourceConnected():
                return self._act(self.continuity.connected(), now_ms)
            case FrameReplayed():
                if event.ask != self.last_replay_ask:
                    return []
                return self._act(self.continuity.replayed(event.seq, event.payload), now_ms)
            case ReplayEnded():
                if event.ask != self.last_replay_ask:
                    return []
                return self._act(self.continuity.replay_ended(), now_ms)
            case ReplayFailed():
                if event.ask != self.last_replay_ask:
                    return []
                return self._act(self.continuity.replay_failed(), now_ms)
            case _:
                assert_never(event)

    def polled(self, polled: EnginePolled, now_ms: int) -> list[AskReplay]:
        """Take one poll of the engine in."""
        metrics = polled.metrics
        asks: list[AskReplay] = []
        if metrics is None:
            self.counters.polls_unanswered += 1
        else:
            if metrics.process_started_at_ms:
                asks = self._act(self.continuity.process_started(metrics.process_started_at_ms), now_ms)
            facts = facts_of(self._config, polled)
            if facts is not None and polled.model is not None and facts != self.facts:
                self._learn(facts, now_ms)
            self._mind_silence(metrics, now_ms)
        self._load = self._load_report(polled.healthy, metrics)
        return asks

    def control(self, message: ControlMessage, now_ms: int) -> None:
        """Take one wish in. Wishes are idempotent, and those for others are none of ours."""
        if message.worker_id != self._config.worker_id:
            self.counters.control_ignored += 1
            return
        match message:
            case SnapshotRequested():
                self.counters.snapshots_asked += 1
                self._snapshot_wanted = True
            case EpochFloor():
                if message.epoch >= self.outbox.epoch:
                    self.counters.floors_told += 1
                    self._begin_epoch(now_ms, above=message.epoch)
                    self.translator.restamp(self.outbox.next_seq)
            case KeysRefuted():
                if message.epoch != self.outbox.epoch:
                    self.counters.control_ignored += 1
                    return
                self.outbox.add(self.translator.refute(message.keys, message.tier, message.seq), now_ms)
                self._changed = True
            case _:
                assert_never(message)

    # -- out

    def next_message(self, now_ms: int) -> KvMessage | None:
        """What to publish next; it must have arrived, or be void (``is_void``), before the next is taken."""
        if self._parts:
            return self._parts.popleft()
        if now_ms >= self._announce_at_ms:
            self._announce_at_ms = now_ms + self._config.announce_interval_ms
            return self._announcement()
        if self._snapshot_due(now_ms):
            self._snapshot_wanted = False
            self._snapshot_at_ms = now_ms
            self.counters.snapshots_taken += 1
            held = [(tier, self.translator.held(tier)) for tier in Tier]
            self._parts.extend(self.outbox.take_snapshot(held))
            return self._parts.popleft()
        if self._load is not None:
            load, self._load = self._load, None
            return replace(load, epoch=self.outbox.epoch)
        return self.outbox.take_batch()

    def is_void(self, message: KvMessage) -> bool:
        """Whether to give it up: its epoch is over, or a fresher one of its kind will come."""
        return message.epoch != self.outbox.epoch or isinstance(message, WorkerAnnounced | WorkerLoadReported)

    def announce_soon(self, now_ms: int) -> None:
        """The last announcement was lost."""
        self._announce_at_ms = now_ms

    def farewell(self) -> WorkerLeft:
        return WorkerLeft(self._config.worker_id, self.outbox.epoch)

    def checkpoint(self) -> EdgeCheckpoint | None:
        """What to write to disk; None if nothing has changed since the last one taken."""
        if not self._changed:
            return None
        self._changed = False
        self.checkpoint_urgent = False
        return EdgeCheckpoint(
            worker_id=self._config.worker_id,
            model=self.facts.model,
            epoch=self.outbox.epoch,
            seq_reserved=Seq(self.outbox.seq + SEQ_RESERVE),
            last_frame=self.continuity.last,
            process_started_at_ms=self.continuity.process_started_at_ms,
            translator=self.translator.state(),
        )

    def all_counters(self) -> dict[str, int]:
        """Every total of this edge, by name."""
        totals = self.translator.counters.as_mapping()
        for counters in (self.continuity.counters, self.counters):
            totals |= {field.name: getattr(counters, field.name) for field in fields(counters)}
        return totals | {"outbox_overflows": self.outbox.overflows}

    # -- parts

    def _act(self, actions: list[Action], now_ms: int) -> list[AskReplay]:
        asks: list[AskReplay] = []
        for action in actions:
            match action:
                case Deliver():
                    translated = self.translator.translate(action.payload, now_ms, self.outbox.next_seq)
                    self.outbox.add(translated.operations, translated.emitted_at_ms)
                    self._changed = True
                case BeginLife():
                    self.translator.forget_all()
                    self._begin_epoch(now_ms, above=self.outbox.epoch)
                case AskReplay():
                    self.last_replay_ask += 1
                    asks.append(action)
                case _:
                    assert_never(action)
        return asks

    def _begin_epoch(self, now_ms: int, above: Epoch) -> None:
        self.outbox.begin_epoch(Epoch(max(now_ms, above + 1)))
        self.outbox.owe_snapshot()
        self._parts.clear()
        self._announce_at_ms = now_ms
        self.counters.epochs_begun += 1
        self._changed = self.checkpoint_urgent = True

    def _snapshot_due(self, now_ms: int) -> bool:
        if not self.continuity.settled:
            return False
        if self.outbox.snapshot_owed:
            return True
        interval_over = (
            self._snapshot_at_ms is None or now_ms >= self._snapshot_at_ms + self._config.snapshot_interval_ms
        )
        return self._snapshot_wanted and interval_over

    def _learn(self, facts: EngineFacts, now_ms: int) -> None:
        """The engine says something else of itself than before."""
        before, self.facts = self.facts, facts
        self._announce_at_ms = now_ms
        if (before.model, before.block_size_tokens) == (facts.model, facts.block_size_tokens):
            self.translator.learn_kv_blocks(facts.kv_blocks)
            return
        counters = self.translator.counters
        self.translator = Translator(self._translator_config())
        self.translator.counters_continue(counters)
        self._begin_epoch(now_ms, above=self.outbox.epoch)

    def _mind_silence(self, metrics: EngineMetrics, now_ms: int) -> None:
        computed = max(0, metrics.prompt_tokens_total - metrics.cached_tokens_total)
        if computed < self._computed_at_frame:  # Another process counts from 0.
            self._computed_at_frame = 0
        self._computed = computed
        if not self._config.sends_events or self._alarmed:
            return
        quiet_ms = now_ms - self._frame_at_ms
        if quiet_ms >= self._config.silence_alarm_ms and computed - self._computed_at_frame >= ALARM_TOKENS_MIN:
            self._alarmed = True
            self.counters.silence_alarms += 1

    @property
    def alarmed(self) -> bool:
        """The engine has traffic and tells of no event."""
        return self._alarmed

    def _announcement(self) -> WorkerAnnounced:
        config, facts = self._config, self.facts
        return WorkerAnnounced(
            worker_id=config.worker_id,
            pool_id=config.pool_id,
            epoch=self.outbox.epoch,
            address=config.address,
            model=facts.model,
            block_size_tokens=facts.block_size_tokens,
            key_scheme=KEY_SCHEME,
            kv_blocks=facts.kv_blocks,
            slots=config.slots,
            data_parallel_rank=config.data_parallel_rank,
            sends_events=config.sends_events,
            model_length_max_tokens=facts.model_length_max_tokens,
            salt_generation=config.salt_generation,
            seq=self.outbox.seq if not self.outbox.snapshot_owed else Seq(0),
        )

    def _load_report(self, healthy: bool, metrics: EngineMetrics | None) -> WorkerLoadReported:
        found = metrics or EngineMetrics()
        return WorkerLoadReported(
            worker_id=self._config.worker_id,
            epoch=self.outbox.epoch,
            running=found.running,
            waiting=found.waiting,
            kv_used_fraction=found.kv_used_fraction,
            prompt_tokens_total=found.prompt_tokens_total,
            cached_tokens_total=found.cached_tokens_total,
            output_tokens_total=found.output_tokens_total,
            process_started_at_ms=found.process_started_at_ms,
            healthy=healthy,
        )

    def _translator_config(self) -> TranslatorConfig:
        facts = self.facts
        rank = self._config.data_parallel_rank
        return TranslatorConfig(facts.model, facts.block_size_tokens, facts.kv_blocks, rank)
