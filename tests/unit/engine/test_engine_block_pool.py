"""The block pool: counts, LRU order, and events that tell exactly what is findable."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from evenhand.engine.block_pool import BlockPool
from evenhand.engine.content import BlockContent, HashForm, TokenContent
from evenhand.engine.events import AllBlocksCleared, BlockRemoved, BlockStored, EngineHash, KvEvent

BLOCK_SIZE = 4


def content_of(*names: int) -> BlockContent:
    return BlockContent(names, block_size=BLOCK_SIZE)


def removed(*names: int) -> BlockRemoved:
    return BlockRemoved(names, "GPU", 0)


def replay(copies: Counter[EngineHash], events: tuple[KvEvent, ...]) -> None:
    for event in events:
        match event:
            case BlockStored():
                copies.update(event.block_hashes)
            case BlockRemoved():
                copies.subtract(event.block_hashes)
            case AllBlocksCleared():
                copies.clear()


def test_the_last_block_of_a_request_is_evicted_first() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(3)
    pool.store(content_of(1, 2, 3), blocks, 0, 3)
    pool.free(blocks)
    assert pool.eviction_order() == tuple(reversed(blocks))
    pool.take_events()
    pool.allocate(2)
    assert pool.take_events() == (removed(3), removed(2))
    assert pool.match([1, 2, 3], 3) == [blocks[0]]


def test_blocks_without_a_name_are_reused_before_any_cached_one() -> None:
    pool = BlockPool(6)
    blocks = pool.allocate(4)
    pool.store(content_of(1, 2), blocks, 0, 2)
    pool.free(blocks)
    assert pool.eviction_order() == (blocks[3], blocks[2], 5, blocks[1], blocks[0])


def test_a_hit_takes_a_block_out_of_the_queue_and_makes_it_the_latest() -> None:
    pool = BlockPool(4)
    first, second = pool.allocate(1), pool.allocate(1)
    pool.store(content_of(1), first, 0, 1)
    pool.store(content_of(2), second, 0, 1)
    pool.free(first)
    pool.free(second)
    hits = pool.match([1], 1)
    assert hits == first
    assert pool.unheld(hits) == 1
    pool.touch(hits)
    assert pool.free_blocks == 2
    pool.free(hits)
    assert pool.eviction_order() == (3, *second, *first)


def test_two_copies_of_one_name_are_stored_and_removed_twice() -> None:
    pool = BlockPool(3)
    first, second = pool.allocate(1), pool.allocate(1)
    pool.store(content_of(7), first, 0, 1)
    pool.store(content_of(7), second, 0, 1)
    assert pool.findable() == {7: 2}
    assert [type(event) for event in pool.take_events()] == [BlockStored, BlockStored]
    pool.free(first)
    pool.free(second)
    pool.allocate(1)
    assert pool.match([7], 1) == second
    pool.allocate(1)
    assert pool.match([7], 1) == []
    assert pool.take_events() == (removed(7), removed(7))


def test_coalesced_removals_say_the_same_in_one_event() -> None:
    pool = BlockPool(4, coalesce_removals=True)
    blocks = pool.allocate(3)
    pool.store(content_of(1, 2, 3), blocks, 0, 3)
    pool.free(blocks)
    pool.take_events()
    pool.allocate(3)
    assert pool.take_events() == (removed(3, 2, 1),)


def test_reset_is_refused_while_a_block_is_held() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(1)
    pool.store(content_of(1), blocks, 0, 1)
    pool.take_events()
    assert not pool.reset()
    assert pool.take_events() == ()
    assert pool.match([1], 1) == blocks
    pool.free(blocks)
    assert pool.reset()
    assert pool.take_events() == (AllBlocksCleared(),)
    assert pool.match([1], 1) == []
    pool.allocate(2)
    assert pool.take_events() == ()


def test_the_null_block_is_never_handed_out() -> None:
    pool = BlockPool(5)
    assert pool.allocate(4) == [1, 2, 3, 4]
    assert (pool.free_blocks, pool.held_blocks, pool.usage) == (0, 4, 1.0)


@pytest.mark.parametrize("form", list(HashForm))
def test_names_depend_on_everything_before_them_and_on_salt_and_lora(form: HashForm) -> None:
    def names(tokens: list[int], salt: str | None = None, lora: str | None = None) -> list[EngineHash]:
        content = TokenContent(tokens, block_size=2, hash_form=form, cache_salt=salt, lora_name=lora)
        return list(content.names(2))

    base = names([1, 2, 3, 4])
    assert base == names([1, 2, 3, 4])
    assert all(isinstance(name, int if form is HashForm.INT else bytes) for name in base)
    assert names([1, 2, 3, 5])[0] == base[0]
    assert names([1, 2, 3, 5])[1] != base[1]
    for other in (names([9, 2, 3, 4]), names([1, 2, 3, 4], salt="s"), names([1, 2, 3, 4], lora="l")):
        assert not set(other) & set(base)
    assert not set(names([1, 2, 3, 4], salt="x")) & set(names([1, 2, 3, 4], lora="x"))


def test_a_store_carries_tokens_parent_and_the_salt_on_the_first_block_only() -> None:
    content = TokenContent([1, 2, 3, 4], block_size=2, cache_salt="s", lora_name="l", session_id="c")
    names = content.names(2)
    whole = content.stored(0, 2)
    assert whole.block_hashes == tuple(names)
    assert whole.parent_block_hash is None
    assert whole.token_ids == (1, 2, 3, 4)
    assert whole.extra_keys == (("l", "s"), ("l",))
    assert (whole.lora_name, whole.session_id, whole.block_size) == ("l", "c", 2)
    second = content.stored(1, 2)
    assert second.parent_block_hash == names[0]
    assert second.extra_keys == (("l",),)
    assert TokenContent([1, 2], block_size=2).extra_keys(0) is None


@given(st.lists(st.integers(0, 40_000), min_size=1, max_size=30), st.integers(1, 40))
def test_generated_output_is_a_function_of_the_prompt(prompt: list[int], count: int) -> None:
    one, other = TokenContent(prompt, block_size=4), TokenContent(prompt, block_size=8)
    stop = len(prompt) + count
    assert one.token_ids(0, stop) == other.token_ids(0, stop)
    assert one.token_ids(0, len(prompt)) == prompt


class PoolMachine(RuleBasedStateMachine):
    """Random requests over few names against a model that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(9)
        self.requests: list[tuple[BlockContent, list[int], int]] = []
        self.copies: Counter[EngineHash] = Counter()
        self.order: list[int] = list(range(1, 9))

    def take(self) -> None:
        replay(self.copies, self.pool.take_events())

    @rule(path=st.lists(st.integers(0, 1), min_size=1, max_size=4), extra=st.integers(0, 1))
    def admit(self, path: list[int], extra: int) -> None:
        names = [hash((depth, *path[: depth + 1])) for depth in range(len(path))]
        content = BlockContent(names, block_size=BLOCK_SIZE)
        hits = self.pool.match(names, len(names))
        fresh = len(names) + extra - len(hits)
        if fresh + self.pool.unheld(hits) > self.pool.free_blocks:
            return
        self.pool.touch(hits)
        self.order = [block for block in self.order if block not in hits]
        taken = self.pool.allocate(fresh)
        assert taken == self.order[:fresh]
        self.order = self.order[fresh:]
        blocks = hits + taken
        if len(names) > len(hits):
            self.pool.store(content, blocks, len(hits), len(names))
        self.requests.append((content, blocks, len(names)))

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.requests) - 1))
        _content, blocks, named = self.requests.pop(index)
        self.pool.free(blocks)
        held = {block for _c, others, _n in self.requests for block in others}
        self.order = [*reversed(blocks[named:]), *self.order]
        self.order += [block for block in reversed(blocks[:named]) if block not in held]

    @rule()
    def reset(self) -> None:
        assert self.pool.reset() == (not self.requests)

    @invariant()
    def events_tell_what_is_findable(self) -> None:
        self.take()
        assert +self.copies == Counter(self.pool.findable())
        assert all(count >= 0 for count in self.copies.values())

    @invariant()
    def counts_balance(self) -> None:
        held = {block for _content, blocks, _named in self.requests for block in blocks}
        assert self.pool.held_blocks == len(held)
        assert self.pool.free_blocks + self.pool.held_blocks == 8
        assert 0 not in held

    @invariant()
    def eviction_order_is_least_recently_freed(self) -> None:
        assert list(self.pool.eviction_order()) == self.order


TestPoolMachine = PoolMachine.TestCase
