"""The translator against a plain model of what it is told, on random streams and on rubbish."""

from collections import Counter
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.worker.engine_frames import CLEARED, MODEL, SIZE, frame, removed, stored, tokens, translator

from evenhand.core.block_key import block_keys, root_hash
from evenhand.core.ids import Seq
from evenhand.core.kv import Cleared, Stored, Tier
from evenhand.worker.translator import Translator, TranslatorConfig

PROMPTS = 3
DEPTH = 5
NAMES = {(prompt, index): 1 + prompt * DEPTH + index for prompt in range(PROMPTS) for index in range(DEPTH)}
KEYS = {
    (prompt, index): key
    for prompt in range(PROMPTS)
    for index, key in enumerate(block_keys(tokens(prompt * 1_000, DEPTH), SIZE, root_hash(MODEL)))
}

block = st.tuples(st.integers(0, PROMPTS - 1), st.integers(0, DEPTH - 1))
step = st.one_of(
    st.tuples(st.just("store"), block, st.integers(1, DEPTH), st.sampled_from(["GPU", "CPU"])),
    st.tuples(st.just("remove"), block, st.just(1), st.sampled_from(["GPU", "CPU"])),
    st.tuples(st.just("clear"), st.just((0, 0)), st.just(1), st.just("GPU")),
)


def store_event(prompt: int, first: int, count: int, medium: str) -> dict[str, Any]:
    count = min(count, DEPTH - first)
    token_ids = tokens(prompt * 1_000, DEPTH)[first * SIZE : (first + count) * SIZE]
    parent = NAMES[prompt, first - 1] if first else None
    return stored([NAMES[prompt, first + i] for i in range(count)], token_ids, parent, medium=medium)


class Model:
    """Counts by tier and block. A store whose parent is not known waits for it and is counted then."""

    def __init__(self) -> None:
        self.copies: Counter[tuple[str, int, int]] = Counter()
        self.waiting: list[tuple[int, int, int, str, set[tuple[int, int]]]] = []

    def known(self, prompt: int, index: int) -> bool:
        return any(self.copies[medium, prompt, index] for medium in ("GPU", "CPU"))

    def apply(self, kind: str, at: tuple[int, int], count: int, medium: str) -> None:
        prompt, first = at
        if kind == "clear":
            self.copies.clear()
            self.waiting.clear()
        elif kind == "remove":
            if self.copies[medium, prompt, first]:
                self.copies[medium, prompt, first] -= 1
                return
            for store in reversed(self.waiting):
                covered = store[0] == prompt and store[1] <= first < store[1] + store[2] and store[3] == medium
                if covered and at not in store[4]:
                    store[4].add(at)
                    return
        else:
            store = (prompt, first, min(count, DEPTH - first), medium, set[tuple[int, int]]())
            if first and not self.known(prompt, first - 1):
                self.waiting.append(store)
            else:
                self.count(store)

    def count(self, store: tuple[int, int, int, str, set[tuple[int, int]]]) -> None:
        pending = [store]
        while pending:
            prompt, first, count, medium, gone = pending.pop()
            for index in range(first, first + count):
                if (prompt, index) not in gone:
                    self.copies[medium, prompt, index] += 1
            for waiter in [w for w in self.waiting if w[0] == prompt and first <= w[1] - 1 < first + count]:
                self.waiting.remove(waiter)
                pending.append(waiter)

    def held(self, medium: str) -> set[int]:
        return {KEYS[prompt, index] for (where, prompt, index), n in self.copies.items() if n and where == medium}


@settings(max_examples=300, deadline=None)
@given(st.lists(st.lists(step, max_size=6), max_size=15), st.integers(0, 14))
def test_the_map_is_what_a_plain_count_says_whatever_the_order(
    batches: list[list[tuple[str, tuple[int, int], int, str]]], restored_at: int
) -> None:
    subject, model = translator(), Model()
    told: dict[Tier, set[int]] = {tier: set() for tier in Tier}
    for number, batch in enumerate(batches):
        events = []
        for kind, at, count, medium in batch:
            model.apply(kind, at, count, medium)
            if kind == "clear":
                events.append(CLEARED)
            elif kind == "remove":
                events.append(removed(NAMES[at], medium=medium))
            else:
                events.append(store_event(*at, count, medium))
        for operation in subject.translate(frame(*events), 0, Seq(number + 1)).operations:
            if isinstance(operation, Cleared):
                told = {tier: set() for tier in Tier}
            elif isinstance(operation, Stored):
                assert not told[operation.tier] & set(operation.keys), "stored only while it is not held"
                told[operation.tier] |= set(operation.keys)
            else:
                assert set(operation.keys) <= told[operation.tier], "removed only while it is held"
                told[operation.tier] -= set(operation.keys)
        assert told[Tier.DEVICE] == set(subject.held(Tier.DEVICE)) == model.held("GPU")
        assert told[Tier.HOST] == set(subject.held(Tier.HOST)) == model.held("CPU")
        if number == restored_at and not subject.stores_waiting:
            subject = Translator(TranslatorConfig(MODEL, SIZE), subject.state(), Seq(number + 1))
    counters = subject.counters
    assert counters.events_malformed == counters.name_conflicts == counters.frames_malformed == 0


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_no_bytes_can_break_it(payload: bytes) -> None:
    subject = translator()
    subject.translate(frame(stored([1], tokens(0, 1))), 0, Seq(1))
    held = subject.held(Tier.DEVICE)
    assert subject.translate(payload, 0, Seq(2)).operations == ()
    assert subject.held(Tier.DEVICE) == held


json_like = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
mangled = st.builds(
    lambda event, changes: event | changes,
    st.sampled_from([stored([2], tokens(4, 1), 1), removed(1), CLEARED]),
    st.dictionaries(
        st.sampled_from(["block_hashes", "parent_block_hash", "token_ids", "block_size", "extra_keys", "medium",
                         "group_idx", "lora_name", "kv_cache_spec_kind", "locality", "type"]),
        json_like,
        min_size=1,
    ),
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.lists(mangled | json_like, max_size=5))
def test_mangled_events_spoil_themselves_only(events: list[Any]) -> None:
    subject = translator()
    payload = msgspec.msgpack.encode([1.0, [*events, stored([77], tokens(900, 1))], 0])
    subject.translate(payload, 0, Seq(1))
    assert block_keys(tokens(900, 1), SIZE, root_hash(MODEL))[0] in subject.held(Tier.DEVICE) or (
        subject.counters.name_conflicts
        or subject.counters.stores_of_other_block_size
        or subject.counters.events_not_prefix
    )
    genuine = sum(isinstance(event, dict) and event.get("type") == "AllBlocksCleared" for event in events)
    assert subject.counters.clears <= genuine
