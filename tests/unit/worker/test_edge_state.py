"""The edge's decisions, without a socket: epochs, snapshots, floors, alarms, and what goes out in which order."""

from dataclasses import replace

import pytest
from tests.unit.worker.engine_frames import frame, keys, removed, stored, tokens

from evenhand.core.cache_map import CacheMap
from evenhand.core.fold import FoldOutcome, fold
from evenhand.core.ids import Epoch, PoolId, Seq, WorkerId
from evenhand.core.kv import (
    EpochFloor,
    KeysRefuted,
    KvBatch,
    KvMessage,
    SnapshotPart,
    SnapshotRequested,
    Tier,
    WorkerAnnounced,
    WorkerLoadReported,
)
from evenhand.worker import outbox
from evenhand.worker.config import EdgeConfig
from evenhand.worker.edge_state import SEQ_RESERVE, EdgeState, EngineFacts
from evenhand.worker.engine_metrics import EngineMetrics
from evenhand.worker.load import EngineModel, EnginePolled
from evenhand.worker.source import FrameReceived, FrameReplayed, ReplayEnded, SourceConnected

WORKER = WorkerId("w")
CONFIG = EdgeConfig(WORKER, PoolId("p"), "http://h:1", snapshot_interval_ms=1_000, silence_alarm_ms=5_000)
FACTS = EngineFacts("m", 4, 100, 1_000)
T0 = 1_000_000


def state(replays: bool = False, checkpoint: object = None, now_ms: int = T0) -> EdgeState:
    return EdgeState(CONFIG, FACTS, now_ms, replays, checkpoint)  # type: ignore[arg-type]


def drain(subject: EdgeState, now_ms: int = T0) -> list[KvMessage]:
    return list(iter(lambda: subject.next_message(now_ms), None))


def kinds(messages: list[KvMessage]) -> list[str]:
    return [type(message).__name__ for message in messages]


def feed(subject: EdgeState, seq: int, *events: object, now_ms: int = T0) -> None:
    subject.source_event(FrameReceived(seq, frame(*events)), now_ms)


def polled(**numbers: int) -> EnginePolled:
    return EnginePolled(
        True, EngineMetrics(block_size_tokens=4, kv_blocks=100, **numbers), EngineModel("m", 1_000)
    )


def test_a_start_is_an_announcement_and_a_snapshot_then_batches() -> None:
    subject = state()
    assert kinds(drain(subject)) == ["WorkerAnnounced", "SnapshotPart"]
    feed(subject, 0, stored([1], tokens(0, 1)))
    (batch,) = drain(subject)
    assert isinstance(batch, KvBatch)
    assert (batch.epoch, batch.seq) == (T0, 2)
    assert kinds(drain(subject, T0 + CONFIG.announce_interval_ms)) == ["WorkerAnnounced"]


def test_nothing_but_the_announcement_is_told_until_the_life_is_proven() -> None:
    subject = state(replays=True)
    subject.start(T0)
    feed(subject, 0, stored([1], tokens(0, 1)))
    assert kinds(drain(subject)) == ["WorkerAnnounced"]
    assert subject.source_event(ReplayEnded(subject.last_replay_ask - 1), T0) == []
    assert kinds(drain(subject)) == [], "the end of a replay that was given up"
    subject.source_event(ReplayEnded(subject.last_replay_ask), T0)
    (part,) = drain(subject)
    assert isinstance(part, SnapshotPart)
    assert tuple(part.keys) == keys(tokens(0, 1))


def test_answers_to_a_replay_that_was_given_up_are_void() -> None:
    subject = state(replays=True)
    subject.start(T0)
    first = subject.last_replay_ask
    subject.source_event(SourceConnected(), T0)
    subject.source_event(FrameReplayed(first, 0, frame(stored([1], tokens(0, 1)))), T0)
    assert subject.continuity.last is None


def test_a_restart_begins_an_epoch_by_the_clock_and_never_below_the_known() -> None:
    subject = state()
    feed(subject, 0, stored([1], tokens(0, 1)))
    drain(subject)
    feed(subject, 0, stored([2], tokens(50, 1)), now_ms=T0 - 500)
    assert subject.outbox.epoch == T0 + 1
    messages = drain(subject)
    assert kinds(messages) == ["WorkerAnnounced", "SnapshotPart"]
    assert isinstance(messages[1], SnapshotPart)
    assert tuple(messages[1].keys) == keys(tokens(50, 1))
    feed(subject, 0, stored([3], tokens(90, 1)), now_ms=T0 + 9_000)
    assert subject.outbox.epoch == T0 + 9_000


def test_a_checkpoint_goes_on_above_all_numbers_ever_used_and_readers_heal_without_a_gap() -> None:
    cache_map = CacheMap()
    subject = state()
    feed(subject, 0, stored([1], tokens(0, 1)))
    saved = subject.checkpoint()
    assert saved is not None
    assert saved.seq_reserved == SEQ_RESERVE
    feed(subject, 1, stored([2], tokens(50, 1)))
    for message in drain(subject):
        fold(cache_map, message)
    assert subject.checkpoint() is not None
    assert subject.checkpoint() is None, "nothing has changed since"
    again = EdgeState(CONFIG, FACTS, T0 + 60_000, True, saved)
    again.start(T0)
    assert kinds(drain(again, T0 + 60_000)) == ["WorkerAnnounced"]
    ask = again.last_replay_ask
    again.source_event(FrameReplayed(ask, 0, frame(stored([1], tokens(0, 1)))), T0)
    again.source_event(FrameReplayed(ask, 1, frame(stored([2], tokens(50, 1)))), T0)
    again.source_event(ReplayEnded(ask), T0)
    outcomes = [fold(cache_map, message).outcome for message in drain(again, T0 + 60_000)]
    assert outcomes == [FoldOutcome.SNAPSHOT_APPLIED]
    feed(again, 2, removed(1))
    outcomes = [fold(cache_map, message).outcome for message in drain(again, T0 + 60_000)]
    assert outcomes == [FoldOutcome.APPLIED]
    assert again.outbox.epoch == T0
    assert cache_map.block_count(WORKER) == 1


def test_snapshots_on_request_keep_their_interval() -> None:
    subject = state()
    drain(subject)
    for _ in range(3):
        subject.control(SnapshotRequested(WORKER, "x"), T0)
    assert drain(subject, T0 + 999) == []
    assert kinds(drain(subject, T0 + 1_000)) == ["SnapshotPart"]
    assert "SnapshotPart" not in kinds(drain(subject, T0 + 9_000))
    subject.control(SnapshotRequested(WorkerId("another"), "x"), T0 + 9_000)
    assert "SnapshotPart" not in kinds(drain(subject, T0 + 9_000))
    assert subject.counters.control_ignored == 1


def test_an_overflow_is_told_by_a_snapshot_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "BATCH_KEYS_MAX", 2)
    monkeypatch.setattr(outbox, "BUFFER_BATCHES_MAX", 2)
    cache_map = CacheMap()
    subject = state()
    for message in drain(subject):
        fold(cache_map, message)
    for seq in range(50):
        feed(subject, seq, stored([seq], tokens(seq * 10, 1)))
    messages = drain(subject)
    assert kinds(messages) == ["SnapshotPart"]
    outcomes = [fold(cache_map, message).outcome for message in messages]
    assert outcomes == [FoldOutcome.SNAPSHOT_APPLIED]
    assert cache_map.block_count(WORKER) == 50
    feed(subject, 50, removed(0))
    assert [fold(cache_map, message).outcome for message in drain(subject)] == [FoldOutcome.APPLIED]


def test_a_floor_above_the_epoch_lifts_it_and_one_below_does_nothing() -> None:
    subject = state()
    feed(subject, 0, stored([1], tokens(0, 1)))
    drain(subject)
    subject.control(EpochFloor(WORKER, Epoch(T0 - 1)), T0)
    assert drain(subject) == []
    subject.control(EpochFloor(WORKER, Epoch(T0 + 5_000)), T0)
    messages = drain(subject)
    assert [message.epoch for message in messages] == [T0 + 5_001] * 2
    part = messages[1]
    assert isinstance(part, SnapshotPart)
    assert (part.seq, tuple(part.keys)) == (1, keys(tokens(0, 1)))
    subject.control(EpochFloor(WORKER, Epoch(T0 + 5_000)), T0)
    assert drain(subject) == []
    held = keys(tokens(0, 1))
    subject.control(KeysRefuted(WORKER, Epoch(T0 + 5_001), Seq(1), held), T0)
    assert kinds(drain(subject)) == ["KvBatch"], "refuting works with the numbers of the later epoch"


def test_refutations_of_another_epoch_or_of_later_stores_do_nothing() -> None:
    subject = state()
    drain(subject)
    feed(subject, 0, stored([1], tokens(0, 1)))
    (batch,) = drain(subject)
    assert isinstance(batch, KvBatch)
    held = keys(tokens(0, 1))
    subject.control(KeysRefuted(WORKER, Epoch(T0 - 1), batch.seq, held), T0)
    subject.control(KeysRefuted(WORKER, batch.epoch, Seq(batch.seq - 1), held), T0)
    subject.control(KeysRefuted(WORKER, batch.epoch, batch.seq, held, Tier.HOST), T0)
    assert drain(subject) == []
    subject.control(KeysRefuted(WORKER, batch.epoch, batch.seq, held), T0)
    assert kinds(drain(subject)) == ["KvBatch"]
    subject.control(KeysRefuted(WORKER, batch.epoch, batch.seq, held), T0)
    assert drain(subject) == []


def test_load_is_told_with_the_epoch_in_force_and_only_the_latest() -> None:
    subject = state()
    drain(subject)
    subject.polled(polled(running=1), T0)
    subject.polled(polled(running=2), T0)
    (load,) = drain(subject)
    assert isinstance(load, WorkerLoadReported)
    assert (load.running, load.healthy, load.epoch) == (2, True, T0)
    subject.polled(EnginePolled(False, None, None), T0)
    (load,) = drain(subject)
    assert isinstance(load, WorkerLoadReported)
    assert not load.healthy


def alarmed(subject: EdgeState) -> bool:
    return subject.alarmed


def test_traffic_without_events_is_alarmed_once_until_the_next_event() -> None:
    subject = state()
    subject.polled(polled(prompt_tokens_total=10), T0)
    subject.polled(polled(prompt_tokens_total=100_000), T0 + 4_999)
    assert not alarmed(subject)
    subject.polled(polled(prompt_tokens_total=200_000), T0 + 5_000)
    subject.polled(polled(prompt_tokens_total=300_000), T0 + 9_000)
    assert alarmed(subject)
    assert subject.counters.silence_alarms == 1
    feed(subject, 0, stored([1], tokens(0, 1)), now_ms=T0 + 9_001)
    assert not alarmed(subject)
    subject.polled(polled(prompt_tokens_total=300_900, cached_tokens_total=800), T0 + 60_000)
    assert not alarmed(subject), "a whole-cached prompt stores nothing"


def test_an_engine_that_becomes_another_model_begins_an_epoch() -> None:
    subject = state()
    feed(subject, 0, stored([1], tokens(0, 1)))
    drain(subject)
    other = replace(polled(), model=EngineModel("other", 500))
    subject.polled(other, T0 + 5)
    messages = drain(subject, T0 + 5)
    announced = messages[0]
    assert isinstance(announced, WorkerAnnounced)
    assert (announced.model, announced.model_length_max_tokens) == ("other", 500)
    assert subject.outbox.epoch > T0
    assert subject.translator.counters.frames == 1


def test_what_need_not_be_tried_again_is_void() -> None:
    subject = state()
    announced, part = drain(subject)
    assert subject.is_void(announced)
    assert not subject.is_void(part)
    subject.begin_epoch_anew(T0)
    assert subject.is_void(part)
