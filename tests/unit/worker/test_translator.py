"""The translator, one special case after another."""

from typing import Any

import msgspec
import pytest
from tests.unit.worker.engine_frames import (
    CLEARED,
    MODEL,
    SIZE,
    feed,
    frame,
    keys,
    removed,
    removes,
    stored,
    stores,
    tokens,
    translator,
)

from evenhand.core.block_key import KEY_BYTES, child_key, root_hash
from evenhand.core.ids import Seq
from evenhand.core.kv import Cleared, Tier
from evenhand.worker import waiting
from evenhand.worker.translator import Translator, TranslatorConfig

PROMPT = tokens(100, 3)
A, B, C = keys(PROMPT)


def test_blocks_of_one_store_chain_one_after_another_and_a_store_chains_to_its_parent() -> None:
    subject = translator()
    assert feed(subject, stored([1, 2], PROMPT[:8])) == (stores(A, B),)
    assert feed(subject, stored([3], PROMPT[8:], parent=2)) == (stores(C),)
    assert feed(subject, removed(3), removed(2)) == (removes(C, B),)
    assert subject.held(Tier.DEVICE) == (A,)


@pytest.mark.parametrize("form", ["map", "array", "array_short"])
@pytest.mark.parametrize("naming", ["unsigned", "signed", "bytes"])
def test_every_form_of_event_and_hash_decodes(form: str, naming: str) -> None:
    names: list[Any] = [2**64 - 1 - index for index in range(3)]
    if naming == "signed":
        names = [name - 2**64 for name in names]
    if naming == "bytes":
        names = [bytes([index]) * 32 for index in range(3)]
    if form == "map":
        first, second = stored(names[:2], PROMPT[:8]), stored(names[2:], PROMPT[8:], parent=names[1])
        gone: Any = removed(names[2])
        cleared: Any = CLEARED
    else:
        first = ["BlockStored", names[:2], None, PROMPT[:8], SIZE, None]  # type: ignore[assignment]
        second = ["BlockStored", names[2:], names[1], PROMPT[8:], SIZE, None]  # type: ignore[assignment]
        gone, cleared = ["BlockRemoved", [names[2]]], ["AllBlocksCleared"]
        if form == "array":
            first += ["GPU", None, [None, None], 0, "full_attention"]  # type: ignore[operator]
            gone += ["GPU", 0]
    subject = translator()
    assert feed(subject, first) == (stores(A, B),)
    assert feed(subject, second) == (stores(C),)
    assert feed(subject, gone) == (removes(C),)
    assert feed(subject, cleared) == (Cleared(),)
    assert subject.names_total == 0
    assert subject.counters.events_malformed == subject.counters.events_with_unknown_fields == 0


def test_signed_and_unsigned_names_are_the_same_name() -> None:
    subject = translator()
    feed(subject, stored([2**64 - 5], PROMPT[:4]))
    assert feed(subject, stored([7], PROMPT[4:8], parent=-5)) == (stores(B),)
    assert feed(subject, removed(-5)) == (removes(A),)


def test_what_is_unknown_is_counted_and_left_alone() -> None:
    subject = translator()
    operations = feed(
        subject,
        {"type": "BlockMoved", "block_hashes": [1]},
        ["SomethingElse", 5],
        stored([1], PROMPT[:4], future_field=[1, 2]),
        ["BlockStored", [2], 1, PROMPT[4:8], SIZE, None, "GPU", *[None] * 8, "more than this build knows"],
    )
    assert operations == (stores(A, B),)
    assert subject.counters.events_of_unknown_type == 2
    assert subject.counters.events_with_unknown_fields == 2
    assert subject.counters.events_malformed == 0


@pytest.mark.parametrize(
    "bad",
    [
        {"type": "BlockStored"},
        {"type": "AllBlocksClear", "type2": "AllBlocksCleared"},
        {"block_hashes": [1]},
        {"type": 5},
        {},
        [],
        ["AllBlocksCleared" * 2],
        [["AllBlocksCleared"]],
        "AllBlocksCleared",
        None,
        17,
        stored([9], [1, 2, 3]),
        stored([9], [1, 2, 3, -4]),
        stored([9], [1, 2, 3, 2**32]),
        stored([9], [1, 2, 3, "4"]),
        stored([9, 10], PROMPT[:4]),
        stored(["nine"], PROMPT[:4]),
        stored([9], PROMPT[:4], extra_keys=[None, None]),
        stored([9], PROMPT[:4], extra_keys="salt"),
        {"type": "BlockStored", "block_hashes": 9},
        removed("x"),
        {"type": "BlockRemoved"},
    ],
)
def test_one_bad_event_spoils_itself_only_and_never_becomes_a_clear(bad: Any) -> None:
    subject = translator()
    operations = feed(subject, stored([1], PROMPT[:4]), bad, stored([2], PROMPT[4:8], parent=1))
    assert operations == (stores(A, B),)
    assert subject.counters.clears == 0
    assert subject.counters.events_malformed + subject.counters.events_of_unknown_type == 1


@pytest.mark.parametrize(
    "payload", [b"", b"\xc1", b"\x93", frame(stored([1], PROMPT[:4]))[:-9], b"\x80", b"\x91\x01"]
)
def test_a_frame_that_cannot_be_split_changes_nothing(payload: bytes) -> None:
    subject = translator()
    feed(subject, stored([1], PROMPT[:4]))
    assert subject.translate(payload, 0, Seq(1)).operations == ()
    assert subject.counters.frames_malformed == 1
    assert subject.held(Tier.DEVICE) == (A,)


def test_a_frame_without_rank_or_with_a_strange_time_counts() -> None:
    subject = translator()
    payload = msgspec.msgpack.encode(["yesterday", [stored([1], PROMPT[:4])]])
    assert subject.translate(payload, 0, Seq(1)).emitted_at_ms == 0
    assert subject.held(Tier.DEVICE) == (A,)


def test_the_same_block_stored_twice_and_removed_once_is_still_there() -> None:
    subject = translator()
    assert feed(subject, stored([1], PROMPT[:4]), stored([1], PROMPT[:4])) == (stores(A),)
    assert feed(subject, removed(1)) == ()
    assert subject.held(Tier.DEVICE) == (A,)
    assert feed(subject, removed(1)) == (removes(A),)


def test_removing_an_unknown_block_changes_nothing_and_stops_nothing() -> None:
    subject = translator()
    assert feed(subject, removed(77), stored([1], PROMPT[:4]), removed(78, 1, 79)) == (stores(A), removes(A))
    assert subject.counters.removals_unknown_blocks == 3


def test_groups_and_tiers_are_counted_apart() -> None:
    subject = translator()
    full = {"kv_cache_spec_kind": "full_attention"}
    feed(subject, stored([1], PROMPT[:4], group_idx=1, **full))
    assert feed(subject, stored([1], PROMPT[:4], group_idx=2, **full)) == ()
    assert feed(subject, removed(1, group_idx=1)) == ()
    assert feed(subject, stored([1], PROMPT[:4], medium="CPU", group_idx=1)) == (stores(A, tier=Tier.HOST),)
    assert feed(subject, removed(1, group_idx=2)) == (removes(A),)
    assert feed(subject, removed(1, group_idx=2)) == ()
    assert subject.held(Tier.HOST) == (A,)
    assert feed(subject, stored([2], PROMPT[4:8], parent=1)) == (stores(B),), "a parent is known on any tier"
    assert feed(subject, removed(1, medium="CPU", group_idx=1)) == (removes(A, tier=Tier.HOST),)


def test_sliding_windows_and_other_kinds_are_no_prefix() -> None:
    subject = translator()
    for group, kind in enumerate(["sliding_window", "mamba", "chunked_local_attention", "from_the_future"]):
        event = stored([1, 2], PROMPT[:8], group_idx=group, kv_cache_spec_kind=kind)
        assert feed(subject, event) == ()
        assert feed(subject, removed(1, group_idx=group)) == ()
    assert feed(subject, stored([1], PROMPT[:4], group_idx=9, kv_cache_spec_sliding_window=64)) == ()
    assert subject.counters.events_not_prefix == 9
    assert subject.counters.removals_unknown_blocks == 0
    for group, kind in enumerate(["full_attention", "mla_attention", "sink_full_attention"], 20):
        event = stored([group], tokens(group * 100, 1), group_idx=group, kv_cache_spec_kind=kind)
        assert len(feed(subject, event)) == 1


def test_media_that_are_unknown_or_remote_hold_nothing_here() -> None:
    subject = translator()
    assert feed(subject, stored([1], PROMPT[:4], medium="MOON")) == ()
    assert feed(subject, stored([1], PROMPT[:4], locality="REMOTE")) == ()
    assert feed(subject, stored([1], PROMPT[:4], medium="STORAGE")) == (stores(A, tier=Tier.DISK),)
    assert subject.counters.events_of_unknown_medium == subject.counters.events_of_remote_blocks == 1


def test_a_store_without_tokens_gets_its_tier_through_known_names() -> None:
    subject = translator()
    feed(subject, stored([1, 2], PROMPT[:8]))
    placeholder = stored([2, 5], [], medium="CPU", block_size=0)
    assert feed(subject, placeholder) == (stores(B, tier=Tier.HOST),)
    assert feed(subject, {"type": "BlockStored", "block_hashes": [1], "medium": "CPU"}) == (
        stores(A, tier=Tier.HOST),
    )
    assert feed(subject, stored([], [])) == ()
    counters = subject.counters
    assert (counters.stores_without_tokens, counters.blocks_without_tokens_unknown) == (2, 1)
    assert counters.stores_without_hashes == 1
    assert feed(subject, removed(2, medium="CPU")) == (removes(B, tier=Tier.HOST),)


def test_another_block_size_is_counted_and_holds_nothing() -> None:
    subject = translator()
    assert feed(subject, stored([1], PROMPT[:2], block_size=2)) == ()
    assert subject.counters.stores_of_other_block_size == 1
    learner = Translator(TranslatorConfig(MODEL))
    feed(learner, stored([1], PROMPT[:4]))
    assert learner.block_size_tokens == SIZE


def test_salts_and_adapters_never_match_each_other() -> None:
    subject = translator()
    prompts = [
        stored([1], PROMPT[:4]),
        stored([2], PROMPT[:4], extra_keys=[["tenant-a"]]),
        stored([3], PROMPT[:4], extra_keys=[["tenant-b"]]),
        stored([4], PROMPT[:4], lora_name="adapter", extra_keys=[["adapter"]]),
        stored([5], PROMPT[:4], lora_name="adapter", extra_keys=[["adapter", "tenant-a"]]),
        stored([6], PROMPT[:4], lora_id=7),
    ]
    found = [feed(subject, event)[0].keys[0] for event in prompts]  # type: ignore[union-attr]
    assert len(set(found)) == 6
    assert found[0] == A
    assert found[1] == keys(PROMPT, salt="tenant-a")[0]
    assert found[3] == keys(PROMPT, lora="adapter")[0]
    assert found[4] == keys(PROMPT, salt="tenant-a", lora="adapter")[0]


def test_a_salted_chain_goes_on_under_its_own_root() -> None:
    subject = translator()
    salted = keys(PROMPT, salt="s")
    assert feed(subject, stored([1, 2], PROMPT[:8], extra_keys=[["s"], None])) == (stores(*salted[:2]),)
    assert feed(subject, stored([3], PROMPT[8:], parent=2, extra_keys=[None])) == (stores(salted[2]),)


def test_other_extra_keys_go_into_the_block_and_tagged_forms_mean_the_same() -> None:
    subject = translator()
    digest = b"d" * 32
    packed = [bytes(b"".join(token.to_bytes(4, "little") for token in PROMPT[i : i + 4])) for i in (0, 4)]
    first = child_key(root_hash(MODEL, "", "s"), packed[0], (b"image", (-3).to_bytes(8, "big", signed=True)))
    second = child_key(first, packed[1], (digest,))
    expected = tuple(int.from_bytes(key, "big") for key in (first, second))
    plain = stored([1, 2], PROMPT[:8], extra_keys=[[["image", -3], "s"], [digest]])
    tagged = stored(
        [3, 4],
        PROMPT[:8],
        extra_keys=[[["mm", "image", -3], ["cache_salt", "s"]], [["prompt_embeds", digest]]],
    )
    assert feed(subject, plain) == (stores(*expected),)
    assert feed(subject, tagged) == ()
    assert subject.held(Tier.DEVICE) == expected
    assert len(first) == KEY_BYTES


@pytest.mark.parametrize("odd", ["text", 5, None, [], ["a", "b"], ["image", 2**63], {"k": 1}, [1.5, 2]])
def test_a_chain_stops_at_an_extra_key_it_does_not_know(odd: Any) -> None:
    subject = translator()
    event = stored([1, 2, 3], PROMPT, extra_keys=[None, [odd], None])
    assert feed(subject, event) == (stores(A),)
    assert subject.counters.stores_with_unknown_extras == 1
    assert feed(subject, stored([4], PROMPT[:4], extra_keys=[["salt", "another text"]])) == ()


def test_a_child_that_comes_before_its_parent_is_linked_later() -> None:
    subject = translator()
    assert feed(subject, stored([3], PROMPT[8:], parent=2)) == ()
    assert feed(subject, stored([2], PROMPT[4:8], parent=1)) == ()
    assert subject.stores_waiting == 2
    assert feed(subject, stored([1], PROMPT[:4])) == (stores(A, B, C),)
    assert subject.counters.stores_linked == 2
    assert feed(subject, removed(1, 2, 3)) == (removes(A, B, C),)
    assert subject.names_total == subject.stores_waiting == 0


def test_a_block_removed_while_it_waits_does_not_come_back_but_its_children_do() -> None:
    subject = translator()
    feed(subject, stored([2], PROMPT[4:8], parent=1), stored([3], PROMPT[8:], parent=2))
    assert feed(subject, removed(2)) == ()
    assert subject.counters.removals_unknown_blocks == 0
    assert feed(subject, stored([1], PROMPT[:4])) == (stores(A, C),)
    assert subject.held(Tier.DEVICE) == (A, C)


def test_waiting_is_bounded_in_age_and_number(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = translator()
    feed(subject, stored([2], PROMPT[4:8], parent=1), now_ms=0)
    feed(subject, removed(0), now_ms=waiting.WAITING_AGE_MS_MAX)
    assert subject.stores_waiting == 1
    feed(subject, removed(0), now_ms=waiting.WAITING_AGE_MS_MAX + 1)
    assert subject.stores_waiting == 0
    assert feed(subject, stored([1], PROMPT[:4])) == (stores(A),)
    monkeypatch.setattr(waiting, "WAITING_BLOCKS_MAX", 3)
    for name in range(10, 20):
        feed(subject, stored([name], tokens(name, 1), parent=name + 1_000))
    assert subject.stores_waiting == 3
    assert subject.counters.stores_waiting_overflowed == 7


def test_a_clear_clears_every_tier_and_what_waits_and_what_follows_it_stands() -> None:
    subject = translator()
    feed(
        subject, stored([1], PROMPT[:4]), stored([1], PROMPT[:4], medium="CPU"), stored([3], PROMPT[8:], parent=2)
    )
    assert feed(subject, CLEARED, stored([1], PROMPT[:4])) == (Cleared(), stores(A))
    assert subject.held(Tier.HOST) == ()
    assert subject.stores_waiting == 0


def test_one_name_with_two_contents_is_counted_and_the_older_stands() -> None:
    subject = translator()
    feed(subject, stored([1], PROMPT[:4]))
    assert feed(subject, stored([1, 2], PROMPT[4:])) == ()
    assert subject.counters.name_conflicts == 1
    assert feed(subject, removed(1)) == (removes(A),)


def test_a_store_that_names_a_block_twice_ends_there() -> None:
    subject = translator()
    assert feed(subject, stored([1, 2, 1, 3, 4], tokens(0, 5))) == (stores(*keys(tokens(0, 2))),)
    assert subject.counters.name_conflicts == 1


def test_two_names_for_one_content_are_one_key() -> None:
    subject = translator()
    feed(subject, stored([1], PROMPT[:4]))
    assert feed(subject, stored([2], PROMPT[:4])) == ()
    assert feed(subject, removed(1)) == ()
    assert feed(subject, removed(2)) == (removes(A),)


def test_more_keys_than_blocks_are_phantoms_and_the_doubted_go_first() -> None:
    subject = translator(kv_blocks=2)
    feed(subject, stored([1], PROMPT[:4]), stored([1], PROMPT[:4]))
    feed(subject, removed(1))
    assert subject.phantoms_max == 1
    other, third = keys(tokens(500, 1))[0], keys(tokens(600, 1))[0]
    assert feed(subject, stored([5], tokens(500, 1))) == (stores(other),), "it may be real still"
    assert feed(subject, stored([6], tokens(600, 1))) == (stores(third), removes(A))
    assert subject.phantoms_max == 0
    assert subject.counters.keys_phantom_dropped == 1
    assert feed(subject, stored([7], PROMPT[4:8], parent=1), removed(5, 6)) == (
        stores(B),
        removes(other, third),
    ), "the name of a phantom still tells its children's keys"
    assert feed(subject, stored([1], PROMPT[:4])) == (stores(A),), "a later store stands"


def test_lost_removals_cannot_make_the_map_outgrow_the_engine() -> None:
    subject = translator(kv_blocks=3)
    for name in range(50):
        feed(subject, stored([name], tokens(name * 10, 1)))
        assert len(subject.held(Tier.DEVICE)) <= 3
    assert subject.counters.keys_capacity_dropped == 47
    assert subject.held(Tier.DEVICE)[-1] == keys(tokens(490, 1))[0]


def test_refuted_keys_go_out_as_removed_unless_stored_later() -> None:
    subject = translator()
    feed(subject, stored([1, 2], PROMPT[:8]), seq=5)
    feed(subject, stored([3], PROMPT[8:], parent=2), seq=6)
    assert subject.refute((A, C, 99), Tier.DEVICE, Seq(5)) == (removes(A),)
    assert (subject.counters.keys_refuted, subject.counters.keys_refutation_stale) == (1, 2)
    assert subject.refute((A,), Tier.HOST, Seq(9)) == ()
    assert feed(subject, removed(1)) == (), "it went out already"
    assert subject.refute((C, C), Tier.DEVICE, Seq(6)) == (removes(C),)
    assert feed(subject, stored([3], PROMPT[8:], parent=2), seq=7) == (stores(C),)


def test_a_checkpoint_carries_everything_but_tokens() -> None:
    subject = translator(kv_blocks=10)
    feed(
        subject, stored([1, 2], PROMPT[:8]), stored([1], PROMPT[:4]), removed(1), stored([9], PROMPT[8:], parent=8)
    )
    feed(subject, stored([2], PROMPT[4:8], parent=1, medium="CPU"))
    feed(subject, stored([4], tokens(900, 1), group_idx=3, kv_cache_spec_kind="mamba"))
    subject.refute((B,), Tier.DEVICE, Seq(9))
    copy = Translator(TranslatorConfig(MODEL, 0, 10), subject.state(), Seq(40))
    assert copy.held(Tier.DEVICE) == subject.held(Tier.DEVICE) == (A,)
    assert copy.held(Tier.HOST) == (B,)
    assert copy.phantoms_max == subject.phantoms_max == 1
    assert copy.block_size_tokens == SIZE
    assert copy.state() == subject.state()
    assert copy.refute((A,), Tier.DEVICE, Seq(39)) == (), "all of it counts as published by then"
    assert feed(copy, removed(4, group_idx=3)) == ()
    assert copy.counters.events_not_prefix == 1
    assert feed(copy, stored([3], PROMPT[8:], parent=2)) == (stores(C),)
    assert feed(copy, removed(2, medium="CPU")) == (removes(B, tier=Tier.HOST),)


def test_memory_returns_after_churn() -> None:
    subject = translator(kv_blocks=100)
    for round_number in range(20):
        base = round_number * 1_000
        names = list(range(base, base + 50))
        feed(subject, stored(names, tokens(base * 7, 50)), stored(names, tokens(base * 7, 50)))
        feed(subject, stored([base + 500], tokens(1, 1), parent=base + 501), now_ms=round_number * 100_000)
        feed(subject, removed(*names), removed(*names), removed(base + 500), now_ms=round_number * 100_000)
    feed(subject, removed(0), now_ms=10**9)
    assert (subject.names_total, subject.phantoms_max, subject.stores_waiting) == (0, 0, 0)
    assert subject.state().lanes[0].names == ()


def test_a_new_life_forgets_all_and_counts_on() -> None:
    subject = translator()
    feed(subject, stored([1], PROMPT[:4]))
    subject.forget_all()
    assert subject.held(Tier.DEVICE) == ()
    assert feed(subject, stored([1], PROMPT[:4])) == (stores(A),)
    assert subject.counters.frames == 2
