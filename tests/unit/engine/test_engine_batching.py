"""Continuous batching: limits hold, hits are as promised, skipping ahead changes nothing."""

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenhand.core.errors import InvalidConfig, InvalidRequest
from evenhand.engine.batching import Engine, StepResult
from evenhand.engine.content import BlockContent, TokenContent
from evenhand.engine.events import BlockStored, KvEvent
from evenhand.engine.limits import EngineLimits, StepTime
from evenhand.engine.request import EngineRequest, RequestState
from evenhand.engine.waiting import Fcfs, LongestPrefixFirst

LIMITS = EngineLimits(block_size=4, blocks=17, sequences_max=4, batched_tokens_max=16, model_tokens_max=64)
TIME = StepTime(base_ns=1000, prefill_token_ns=10, running_sequence_ns=1)


def state_of(request: EngineRequest) -> RequestState:
    return request.state


def request_of(name: str, prompt: list[int], output_tokens: int, **more: bool) -> EngineRequest:
    return EngineRequest(name, TokenContent(prompt, block_size=4), len(prompt), output_tokens, **more)


def drain(engine: Engine) -> list[StepResult]:
    results = []
    while engine.has_work:
        results.append(engine.step())
        assert len(results) < 10_000
    return results


def test_step_time_is_base_plus_prefill_plus_running() -> None:
    engine = Engine(LIMITS, TIME)
    engine.submit(request_of("a", [1] * 10, 3))
    engine.submit(request_of("b", [2] * 5, 2))
    assert [r.duration_ns for r in drain(engine)] == [1000 + 150 + 2, 1000 + 2, 1000 + 1]


def test_an_idle_engine_takes_no_time_and_keeps_the_clear_for_the_next_step() -> None:
    engine = Engine(LIMITS, TIME)
    assert engine.reset_prefix_cache()
    idle = engine.step()
    assert (idle.duration_ns, idle.steps, idle.events) == (0, 0, ())
    engine.submit(request_of("a", [1] * 4, 1))
    assert len(engine.step().events) == 2


def test_a_long_prompt_is_computed_in_chunks_and_decodes_go_on_meanwhile() -> None:
    engine = Engine(LIMITS, TIME)
    engine.submit(request_of("a", [1, 2], 9))
    engine.step()
    long = request_of("b", list(range(40)), 1)
    engine.submit(long)
    results = [engine.step() for _ in range(3)]
    assert [r.prefill_tokens for r in results] == [15, 15, 10]
    assert results[2].finished == (long,)
    assert [r.output_tokens for r in results] == [1, 1, 2]


def test_a_wholly_cached_prompt_recomputes_its_last_block() -> None:
    engine = Engine(LIMITS, TIME)
    prompt = list(range(12))
    first, second, longer = (
        request_of("a", prompt, 1),
        request_of("b", prompt, 1),
        request_of("c", [*prompt, 99], 1),
    )
    for request in (first, second, longer):
        engine.submit(request)
        drain(engine)
    assert [r.cached_tokens for r in (first, second, longer)] == [0, 8, 12]
    assert engine.pool.findable()[TokenContent(prompt, block_size=4).names(3)[2]] == 2


def test_identical_prompts_of_one_step_share() -> None:
    engine = Engine(LIMITS, TIME)
    requests = [request_of(name, list(range(6)), 2) for name in "abc"]
    for request in requests:
        engine.submit(request)
    engine.step()
    assert [r.cached_tokens for r in requests] == [0, 4, 4]
    assert engine.pool.held_blocks == 4


def test_output_blocks_are_cached_and_hit_by_the_next_turn() -> None:
    engine = Engine(LIMITS, TIME)
    content = TokenContent([1, 2, 3, 4, 5], block_size=4)
    engine.submit(EngineRequest("a", content, 5, 8))
    drain(engine)
    turn = [*content.token_ids(0, 13), 7, 8]
    again = request_of("b", turn, 1)
    engine.submit(again)
    engine.step()
    assert again.cached_tokens == 12


def test_the_latest_admitted_is_preempted_and_still_ends_with_all_its_tokens() -> None:
    limits = EngineLimits(block_size=4, blocks=9, sequences_max=4, batched_tokens_max=32, model_tokens_max=32)
    engine = Engine(limits, TIME)
    old, young = request_of("old", [1] * 12, 16), request_of("young", [2] * 12, 16)
    engine.submit(old)
    engine.submit(young)
    results = drain(engine)
    preempted = [r for result in results for r in result.preempted]
    assert preempted == [young]
    assert (old.preemptions, young.preemptions) == (0, 1)
    assert [r.output_tokens for r in (old, young)] == [16, 16]
    assert sum(result.output_tokens for result in results) == 32
    assert sum(len(result.first_tokens) for result in results) == 2
    assert engine.pool.held_blocks == 0


def test_nothing_is_admitted_unless_its_whole_prompt_fits() -> None:
    engine = Engine(LIMITS, TIME)
    big, other = request_of("big", list(range(40)), 20), request_of("other", list(range(100, 130)), 2)
    engine.submit(big)
    engine.submit(other)
    for _ in range(3):
        engine.step()
    assert state_of(other) is RequestState.WAITING
    drain(engine)
    assert state_of(other) is RequestState.FINISHED


def test_cancel_frees_at_once_whatever_the_state() -> None:
    engine = Engine(LIMITS, TIME)
    waiting, prefill, decode = (
        request_of("w", [1] * 4, 5),
        request_of("p", list(range(50)), 5),
        request_of("d", [3] * 4, 5),
    )
    engine.submit(decode)
    engine.step()
    engine.submit(prefill)
    engine.submit(waiting)
    engine.step()
    states = [RequestState.WAITING, RequestState.PREFILL, RequestState.DECODE]
    assert [r.state for r in (waiting, prefill, decode)] == states
    for request in (decode, prefill, waiting):
        assert engine.cancel(request)
        assert not engine.cancel(request)
    assert engine.pool.held_blocks == 0
    assert not engine.has_work
    assert engine.output_tokens(decode) == 2


def test_full_report_repeats_the_stores_of_what_was_hit() -> None:
    engine = Engine(LIMITS, TIME)
    engine.submit(request_of("a", list(range(9)), 1))
    drain(engine)
    engine.submit(request_of("b", list(range(9)), 1, full_report=True))
    (event,) = engine.step().events
    assert isinstance(event, BlockStored)
    assert len(event.block_hashes) == 2
    assert set(engine.pool.findable().values()) == {1}


def test_longest_prefix_first_lets_the_cached_one_pass() -> None:
    limits = EngineLimits(block_size=4, blocks=17, sequences_max=1, batched_tokens_max=16, model_tokens_max=64)
    for order, expected in ((Fcfs(), ["cold", "warm"]), (LongestPrefixFirst(), ["warm", "cold"])):
        engine = Engine(limits, TIME, order=order)
        engine.submit(request_of("first", [1] * 9, 1))
        drain(engine)
        engine.submit(request_of("cold", [2] * 9, 1))
        engine.submit(request_of("warm", [1] * 9, 1))
        assert [r.request_id for result in drain(engine) for r in result.finished] == expected


def test_an_arrival_that_fits_passes_a_blocked_one_where_the_order_says_so() -> None:
    limits = EngineLimits(block_size=4, blocks=9, sequences_max=4, batched_tokens_max=32, model_tokens_max=32)
    engine = Engine(limits, TIME, order=LongestPrefixFirst())
    engine.submit(request_of("first", [1] * 20, 12))
    engine.step()
    blocked, fits = request_of("blocked", [2] * 20, 1), request_of("fits", [1] * 21, 1)
    engine.submit(blocked)
    engine.step()
    engine.submit(fits)
    assert engine.step().admitted == (fits,)
    assert blocked.state is RequestState.WAITING


def test_skipping_ahead_admits_in_the_step_in_which_a_decode_makes_a_prompt_fit() -> None:
    def ended(*, skip: bool) -> list[tuple[int, str]]:
        limits = EngineLimits(block_size=4, blocks=9, sequences_max=4, batched_tokens_max=32, model_tokens_max=32)
        engine = Engine(limits, TIME)
        other, content = request_of("other", [9] * 12, 5), TokenContent([1, 2, 3, 4, 5], block_size=4)
        engine.submit(other)
        engine.submit(EngineRequest("talks", content, 5, 8))
        now = engine.step().duration_ns
        # Needs three blocks beside its one hit, of which two are free, until "talks" fills its second.
        engine.submit(EngineRequest("waits", TokenContent(content.token_ids(0, 16), block_size=4), 16, 2))
        times = []
        while engine.has_work:
            result = engine.advance(1_000_000) if skip else engine.step()
            now += result.duration_ns
            times += [(now, request.request_id) for request in (*result.admitted, *result.finished)]
        return times

    stepped = ended(skip=False)
    assert ended(skip=True) == stepped
    assert stepped[0][1] == "waits", "admitted while both others still run"


@pytest.mark.parametrize(
    ("prompt_tokens", "output_tokens", "words"),
    [(60, 5, "maximum context length is 64"), (0, 5, "prompt is empty"), (5, 0, "max_tokens is 0")],
)
def test_what_can_never_run_is_refused_at_once(prompt_tokens: int, output_tokens: int, words: str) -> None:
    engine = Engine(LIMITS, TIME)
    with pytest.raises(InvalidRequest, match=words):
        engine.submit(request_of("a", [1] * prompt_tokens, output_tokens))
    assert not engine.has_work


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"block_size": 0}, "block_size is 0"),
        ({"sequences_max": 10, "batched_tokens_max": 9}, "batched_tokens_max .9. must be at least"),
        ({"blocks": 4}, "need 1025 blocks"),
    ],
)
def test_impossible_limits_are_named(limits: dict[str, int], words: str) -> None:
    with pytest.raises(InvalidConfig, match=words):
        EngineLimits(**limits)


@dataclass(frozen=True)
class Arrival:
    at_ns: int
    path: tuple[int, ...]
    tail_tokens: int
    output_tokens: int
    cancel_after: int | None
    tokens: bool


arrivals = st.lists(
    st.builds(
        Arrival,
        at_ns=st.integers(0, 30_000),
        path=st.lists(st.integers(0, 1), max_size=6).map(tuple),
        tail_tokens=st.integers(1, 5),
        output_tokens=st.integers(1, 30),
        cancel_after=st.none() | st.integers(0, 20_000),
        tokens=st.booleans(),
    ),
    max_size=14,
)


def make(index: int, arrival: Arrival) -> EngineRequest:
    prompt = [value for depth, step in enumerate(arrival.path) for value in [depth * 2 + step] * 4]
    tokens = len(prompt) + arrival.tail_tokens
    if arrival.tokens:
        content = TokenContent(prompt + [50] * arrival.tail_tokens, block_size=4)
        return EngineRequest(f"r{index}", content, tokens, arrival.output_tokens)
    names = [hash((depth, arrival.path[: depth + 1])) for depth in range(len(arrival.path))]
    if tokens % 4 == 0:
        names.append(hash((arrival.path, arrival.tail_tokens)))
    return EngineRequest(f"r{index}", BlockContent(names, block_size=4), tokens, arrival.output_tokens)


@dataclass(frozen=True)
class Trace:
    finished: list[tuple[int, str, int, int]]
    events: list[KvEvent]
    eviction_order: tuple[int, ...]
    time_ns: int
    output_tokens: int


def simulate(engine: Engine, plan: list[Arrival], *, skip: bool) -> Trace:
    """Run a plan on a virtual clock; arrivals and cancels happen between steps, as soon as they are due."""
    calls = [(a.at_ns, 0, i) for i, a in enumerate(plan)]
    calls += [(a.at_ns + a.cancel_after, 1, i) for i, a in enumerate(plan) if a.cancel_after is not None]
    calls.sort()
    requests: dict[int, EngineRequest] = {}
    finished: list[tuple[int, str, int, int]] = []
    events: list[KvEvent] = []
    now = output_tokens = 0
    while calls or engine.has_work:
        if not engine.has_work:
            now = max(now, calls[0][0])
        while calls and calls[0][0] <= now:
            _at, kind, index = calls.pop(0)
            if kind == 0:
                requests[index] = make(index, plan[index])
                engine.submit(requests[index])
            else:
                engine.cancel(requests[index])
        until = calls[0][0] - now if calls else 1_000_000_000
        result = engine.advance(until) if skip else engine.step()
        now += result.duration_ns
        output_tokens += result.output_tokens
        finished += [(now, r.request_id, r.cached_tokens, r.preemptions) for r in result.finished]
        events += result.events
        check(engine, result)
    return Trace(finished, events, engine.pool.eviction_order(), now, output_tokens)


def check(engine: Engine, result: StepResult) -> None:
    limits = engine.limits
    assert engine.running <= limits.sequences_max
    assert result.steps != 1 or result.prefill_tokens + result.output_tokens <= (
        limits.batched_tokens_max + limits.sequences_max
    )
    assert result.prefill_tokens <= limits.batched_tokens_max
    running = engine.running_requests()
    held = {block for request in running for block in request.block_ids}
    assert engine.pool.held_blocks == len(held)
    unfinished = [r for r in running if r.state is RequestState.PREFILL]
    assert unfinished in ([], list(running[-1:]))
    for request in running:
        tokens = request.prompt_tokens + engine.output_tokens(request)
        assert engine.output_tokens(request) < request.output_tokens_max
        if request.state is RequestState.DECODE:
            assert len(request.block_ids) in (-(-(tokens - 1) // 4), -(-tokens // 4))
    if not running:
        assert engine.pool.held_blocks == 0


@settings(max_examples=150, deadline=None)
@given(arrivals, st.sampled_from([17, 20, 40]), st.integers(1, 5))
def test_skipping_ahead_equals_stepping_to_the_block(plan: list[Arrival], blocks: int, seqs: int) -> None:
    limits = EngineLimits(
        block_size=4, blocks=blocks, sequences_max=seqs, batched_tokens_max=16, model_tokens_max=64
    )
    stepped = simulate(Engine(limits, TIME), plan, skip=False)
    skipped = simulate(Engine(limits, TIME), plan, skip=True)
    assert stepped == skipped
    cancelled = sum(a.cancel_after is not None for a in plan)
    assert len(plan) - cancelled <= len(stepped.finished) <= len(plan)
