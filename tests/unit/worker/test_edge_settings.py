"""Every setting of an edge has an effect: on what it announces, on when it speaks, or on what it takes in."""

from dataclasses import fields, replace
from pathlib import Path

import pytest
from tests.unit.worker.engine_frames import frame, stored, tokens

from evenhand.core.ids import PoolId, WorkerId
from evenhand.core.kv import KvMessage, WorkerAnnounced
from evenhand.worker.config import EdgeConfig
from evenhand.worker.edge_state import EdgeState, facts_of
from evenhand.worker.engine_metrics import EngineMetrics
from evenhand.worker.load import EngineModel, EnginePolled
from evenhand.worker.source import FrameReceived

ROOT = Path(__file__).parents[3]
T0 = 1_000_000
CONFIG = EdgeConfig(WorkerId("w"), PoolId("p"), "http://h:1", kv_events="tcp://h:2")
POLLED = EnginePolled(True, EngineMetrics(block_size_tokens=4, kv_blocks=100), EngineModel("m", 1_000))

ANNOUNCED = {
    "worker_id": "w2",
    "pool_id": "p2",
    "address": "http://h:9",
    "sends_events": False,
    "model": "another",
    "block_size_tokens": 8,
    "kv_blocks": 77,
    "slots": 5,
    "data_parallel_rank": 3,
    "salt_generation": 2,
}
EDGE = "tests/integration/test_worker_edge.py"
SOURCE = "tests/integration/test_worker_edge_zmq.py"
TIMERS = "tests/integration/test_worker_edge_settings.py"
ELSEWHERE = {
    "kv_events": (SOURCE, "test_frames_arrive_and_malformed_ones_are_counted"),
    "topic": (SOURCE, "test_frames_arrive_and_malformed_ones_are_counted"),
    "replay": (EDGE, "test_without_replay_a_gap_begins_a_new_epoch"),
    "checkpoint": (EDGE, "test_a_torn_checkpoint_is_none"),
    "snapshot_interval_ms": (EDGE, "test_snapshots_are_made_at_most_once_an_interval"),
    "silence_alarm_ms": (EDGE, "test_traffic_without_events_is_an_alarm"),
    "checkpoint_interval_ms": (TIMERS, "test_a_checkpoint_is_written_as_often_as_the_setting_says"),
    "load_interval_ms": (TIMERS, "test_load_is_told_as_often_as_the_setting_says"),
}
"""Settings that show only with sockets, files and timers, and where they are tested."""


def edge(**changed: object) -> EdgeState:
    config = replace(CONFIG, **changed)  # type: ignore[arg-type]
    facts = facts_of(config, POLLED)
    assert facts is not None
    return EdgeState(config, facts, T0, replays=False)


def drain(subject: EdgeState, now_ms: int = T0) -> list[KvMessage]:
    return list(iter(lambda: subject.next_message(now_ms), None))


def announcement(subject: EdgeState) -> WorkerAnnounced:
    (announced,) = [message for message in drain(subject) if isinstance(message, WorkerAnnounced)]
    return announced


@pytest.mark.parametrize("name", ANNOUNCED)
def test_what_is_set_is_announced(name: str) -> None:
    changed: dict[str, object] = {name: ANNOUNCED[name]}
    if name == "sends_events":
        changed |= {"kv_events": "", "replay": ""}
    told, usual = announcement(edge(**changed)), announcement(edge())
    assert getattr(told, name) == ANNOUNCED[name]
    assert replace(told, **{name: getattr(usual, name)}) == usual


def test_events_of_another_rank_are_not_taken_in() -> None:
    for rank, blocks in ((0, 1), (1, 0)):
        subject = edge(data_parallel_rank=rank)
        drain(subject)
        subject.source_event(FrameReceived(0, frame(stored([1], tokens(0, 1)), rank=0)), T0)
        assert subject.translator.names_total == blocks


def test_it_announces_itself_as_often_as_the_setting_says() -> None:
    for interval_ms, told in ((500, 1), (2_000, 0)):
        subject = edge(announce_interval_ms=interval_ms)
        drain(subject)
        assert len([m for m in drain(subject, T0 + 1_000) if isinstance(m, WorkerAnnounced)]) == told


def test_no_setting_is_left_out() -> None:
    tested = set(ANNOUNCED) | set(ELSEWHERE) | {"announce_interval_ms"}
    assert tested == {field.name for field in fields(EdgeConfig)}
    for path, name in ELSEWHERE.values():
        assert f"async def {name}(" in (ROOT / path).read_text()
