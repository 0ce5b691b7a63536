"""Streams recorded from a real engine, through translator and fold, against a fold written for this test alone."""

import base64
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from tests.golden.recordings import (
    BLOCK_SIZE,
    CAPTURES,
    KV_BLOCKS,
    MODEL,
    OracleFold,
    RecordedFrame,
    frames,
    lines,
)

from evenhand.core.block_key import block_keys, root_hash, unpack_keys, usable_blocks
from evenhand.core.cache_map import CacheMap
from evenhand.core.fold import fold
from evenhand.core.ids import Epoch, Seq, WorkerId
from evenhand.core.kv import KvBatch, KvOperation, Removed, Tier
from evenhand.worker.translator import Translator, TranslatorConfig

WORKER = WorkerId("e0")


@dataclass
class Path:
    """Translator, numbering and fold, as a frame travels through them."""

    kv_blocks: int = KV_BLOCKS
    translator: Translator = field(init=False)
    cache_map: CacheMap = field(default_factory=CacheMap)
    seq: int = 0

    def __post_init__(self) -> None:
        self.translator = Translator(TranslatorConfig(MODEL, BLOCK_SIZE, self.kv_blocks))

    def feed(self, payload: bytes) -> tuple[KvOperation, ...]:
        operations = self.translator.translate(payload, 0, Seq(self.seq + 1)).operations
        self.publish(operations)
        return operations

    def publish(self, operations: tuple[KvOperation, ...]) -> None:
        if operations:
            self.seq += 1
            result = fold(self.cache_map, KvBatch(WORKER, Epoch(1), Seq(self.seq), operations))
            assert result.position is not None
            assert result.position.complete

    def held(self) -> set[int]:
        return {key for _, packed in self.cache_map.packed(WORKER) for key in unpack_keys(packed)}


def walk(name: str) -> Iterator[tuple[Path, RecordedFrame, OracleFold, OracleFold]]:
    """After each frame: the path, the frame, the fold by counts and the fold of what the engine truly holds."""
    # The hybrid engine's size was not recorded.
    path = Path(0 if name == "hybrid.jsonl" else KV_BLOCKS)
    counted, true = OracleFold(), OracleFold(skips_reports=True)
    for frame in frames(name):
        path.feed(frame.payload)
        counted.fold(frame.events)
        true.fold(frame.events)
        yield path, frame, counted, true


@pytest.mark.parametrize("name", ["e0.dup_abort.jsonl", "hybrid.jsonl", "dp2.0.jsonl", "dp2.1.jsonl"])
def test_the_map_is_exactly_what_the_engine_holds_after_every_batch(name: str) -> None:
    compared = 0
    for path, frame, counted, true in walk(name):
        assert path.held() == counted.held() == true.held(), frame.seq
        assert set(path.translator.held(Tier.DEVICE)) == path.held()
        compared += len(true.held())
    assert compared > 50
    assert path.translator.counters.events_malformed == 0
    assert path.translator.counters.removals_unknown_blocks == 0


def test_the_map_holds_all_the_engine_holds_and_phantoms_of_full_reports_are_bounded() -> None:
    excess_at_most = 0
    for path, frame, counted, true in walk("e0.live.jsonl"):
        held = path.held()
        assert true.held() <= held <= counted.held(), frame.seq
        phantoms = held - true.held()
        assert phantoms <= true.reported_again, "outside full-report mode nothing else is held"
        assert len(phantoms) <= path.translator.phantoms_max
        assert len(held) <= KV_BLOCKS, "no more keys than blocks, whatever is reported"
        excess_at_most = max(excess_at_most, len(counted.held()) - len(held))
    assert excess_at_most == 3, "the recording's four re-reported blocks were to exceed the engine's size"
    assert path.translator.counters.keys_phantom_dropped == 3


def test_phantoms_are_gone_once_refuted_and_a_later_store_stands() -> None:
    path, frame, true = next(
        (path, frame, true) for path, frame, _, true in walk("e0.live.jsonl") if path.held() > true.held()
    )
    phantoms = sorted(path.held() - true.held())
    operations = path.translator.refute(phantoms, Tier.DEVICE, Seq(path.seq))
    path.publish(operations)
    assert operations == (Removed(tuple(phantoms), Tier.DEVICE),)
    assert path.held() == true.held()
    assert path.translator.refute(phantoms, Tier.DEVICE, Seq(path.seq)) == (), "refuting twice changes nothing"
    for later in frames("e0.live.jsonl"):
        if later.seq > frame.seq:
            path.feed(later.payload)
            true.fold(later.events)
            assert path.held() == true.held(), later.seq
    stored = sorted(true.held())
    assert path.translator.refute(stored, Tier.DEVICE, Seq(path.seq - 1)) == (), "stored in the batch after"
    assert path.held() == true.held()


def test_a_replay_from_the_start_gives_the_same_map_as_the_live_stream() -> None:
    live, replayed = Path(), Path()
    for frame in frames("e0.live.jsonl"):
        live.feed(frame.payload)
    items = list(replayed_payloads())
    for payload in items:
        replayed.feed(payload)
    assert len(items) == 25
    assert replayed.held() == live.held() != set()


def replayed_payloads() -> Iterator[bytes]:
    for item in json.loads((CAPTURES / "e0.replay_from0.json").read_text()):
        if "payload_b64" in item:
            yield base64.b64decode(item["payload_b64"])


def test_ranks_of_one_engine_are_told_apart() -> None:
    translator = Translator(TranslatorConfig(MODEL, BLOCK_SIZE, KV_BLOCKS, data_parallel_rank=1))
    for frame in frames("dp2.0.jsonl"):
        assert translator.translate(frame.payload, 0, Seq(1)).operations == ()
    assert translator.counters.frames_of_other_rank == 4
    for frame in frames("dp2.1.jsonl"):
        assert translator.translate(frame.payload, 0, Seq(1)).operations


def test_a_window_group_is_no_prefix_and_its_removals_touch_no_other_group() -> None:
    for path, _, _, true in walk("hybrid.jsonl"):
        assert path.held() == true.held()
    assert path.translator.counters.events_not_prefix > 8
    assert path.translator.counters.removals_unknown_blocks == 0


# -- predictions


def started_at_s(action: dict[str, Any], previous_ended_at_s: float) -> float:
    """When a request began: chats carry it in their id, completions ran one after another."""
    if "req_id" in action:
        return int(action["req_id"].rsplit("-", 1)[1]) / 1e9
    return previous_ended_at_s


def predicted_tokens(path: Path, prompt: list[int], salt: str) -> int:
    keys = block_keys(prompt, BLOCK_SIZE, root_hash(MODEL, "", salt))
    matches = {match.worker_id: match.blocks for match in path.cache_map.match(keys)}
    return min(matches.get(WORKER, 0), usable_blocks(len(prompt), BLOCK_SIZE)) * BLOCK_SIZE


@pytest.mark.parametrize(
    ("events", "actions", "engine", "exact"),
    [("e0.live.jsonl", "actions.jsonl", "e0", 23), ("hybrid.jsonl", "hybrid.actions.jsonl", "x", 7)],
)
def test_predicted_hits_are_the_engines_own_cached_tokens(
    events: str, actions: str, engine: str, exact: int
) -> None:
    path = Path(KV_BLOCKS if engine == "e0" else 0)
    pending = frames(events)
    equal, excepted = 0, 0
    previous_ended_at_s = 0.0
    phase_began_at_s = 0.0
    phase = ""
    in_phase: list[tuple[list[int], str]] = []
    told = list(lines(actions))
    if engine == "x":
        # Before the last request the idle engine was reset; it tells so only with that request's own step.
        told.pop()
    for action in told:
        if action["kind"] == "phase":
            phase, phase_began_at_s, in_phase = action["name"], action["ts"], []
            previous_ended_at_s = max(previous_ended_at_s, phase_began_at_s)
            continue
        if action["engine"] != engine:
            continue
        concurrent = phase == "concurrent_identical"
        began_at_s = phase_began_at_s if concurrent else started_at_s(action, previous_ended_at_s)
        while pending and pending[0].received_at_s <= began_at_s:
            path.feed(pending.pop(0).payload)
        salt = action.get("cache_salt") or action.get("extra", {}).get("cache_salt", "")
        prompt = action["prompt_token_ids"]
        cached = action["usage"]["prompt_tokens_details"]["cached_tokens"]
        if concurrent and (prompt, salt) in in_phase:
            excepted += 1
        else:
            assert predicted_tokens(path, prompt, salt) == cached, action["ts"]
            equal += 1
        in_phase.append((prompt, salt))
        previous_ended_at_s = action["ts"]
    assert (equal, excepted) == (exact, 3 if engine == "e0" else 0)
