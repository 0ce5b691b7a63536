"""Admission apart from decoding: alone, whole, in its own cadence, and never more than fits to the end."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenhand.core.errors import InvalidConfig
from evenhand.engine.batching import Engine, StepResult
from evenhand.engine.content import BlockContent
from evenhand.engine.limits import EngineLimits, StepTime
from evenhand.engine.prefill_apart import KvNeed, PrefillApart, fullest_tokens
from evenhand.engine.request import EngineRequest, RequestState

LIMITS = EngineLimits(block_size=4, blocks=257, sequences_max=40, batched_tokens_max=40, model_tokens_max=40)
TIME = StepTime(base_ns=1_000, prefill_token_ns=100, running_sequence_ns=1)


def engine_of(kv_tokens_max: int = 100, *, decode_steps_min: int = 3, adapter_tokens: int = 0) -> Engine:
    rule = PrefillApart(kv_tokens_max, decode_steps_min=decode_steps_min, adapter_tokens=adapter_tokens)
    return Engine(LIMITS, TIME, prefill_apart=rule)


def submit(engine: Engine, name: str, prompt: int, output: int, label: str = "") -> EngineRequest:
    request = EngineRequest(name, BlockContent((), block_size=4), prompt, output, label=label)
    engine.submit(request)
    return request


def drain(engine: Engine) -> list[StepResult]:
    results = []
    while engine.has_work:
        results.append(engine.step())
        assert len(results) < 10_000
    return results


def names(requests: tuple[EngineRequest, ...]) -> str:
    return "".join(request.request_id for request in requests)


def test_a_prompt_is_computed_while_nobody_decodes() -> None:
    engine = engine_of()
    first = submit(engine, "a", 20, 8)
    step = engine.step()
    assert (step.steps, step.prefill_tokens, step.output_tokens, step.duration_ns) == (0, 20, 1, 2_000)
    submit(engine, "b", 4, 2)
    steps = [engine.step() for _ in range(4)]
    assert [step.steps for step in steps] == [1, 1, 1, 0], "the queue is looked at after three decode steps"
    assert (names(steps[3].first_tokens), steps[3].duration_ns) == ("b", 1_000), (
        "a short prompt costs a step's base"
    )
    assert engine.output_tokens(first) == 4, "nobody decodes beside a prompt"
    last = drain(engine)
    assert [names(step.finished) for step in last] == ["b", "", "", "a"]
    assert first.state is RequestState.FINISHED


def test_an_empty_engine_admits_at_once_whatever_the_cadence() -> None:
    engine = engine_of(decode_steps_min=1_000)
    submit(engine, "a", 4, 2)
    assert [names(step.finished) for step in drain(engine)] == ["", "a"]
    submit(engine, "b", 4, 1)
    assert [names(step.finished) for step in drain(engine)] == ["b"], "one token needs no decode step"


def test_prompts_of_one_admission_fit_whole_into_the_step() -> None:
    engine = engine_of(200, decode_steps_min=2)
    for name in "abc":
        submit(engine, name, 15, 6)
    steps = drain(engine)
    assert [names(step.admitted) for step in steps] == ["ab", "", "", "c", "", "", "", "", ""], "at the next look"
    assert [step.prefill_tokens for step in steps if step.admitted] == [30, 15]


def test_a_request_waits_until_the_batch_at_its_fullest_has_room() -> None:
    engine = engine_of(61, decode_steps_min=1)
    for name in "abc":
        submit(engine, name, 10, 20)
    steps = drain(engine)
    assert names(steps[0].admitted) == "ab", "two times thirty is the most below 61"
    waited = next(index for index, step in enumerate(steps) if "c" in names(step.admitted))
    assert names(steps[waited - 1].finished) == "ab"
    assert not any(step.preempted for step in steps)


def test_an_adapter_takes_its_memory_once() -> None:
    both = engine_of(66, adapter_tokens=5)
    submit(both, "a", 10, 20, "x")
    submit(both, "b", 10, 20, "x")
    assert names(both.step().admitted) == "ab"
    apart = engine_of(66, adapter_tokens=5)
    submit(apart, "a", 10, 20, "x")
    submit(apart, "b", 10, 20, "y")
    assert names(apart.step().admitted) == "a"


def test_advance_is_a_step() -> None:
    engine = engine_of()
    submit(engine, "a", 20, 8)
    assert [engine.advance(10**9).steps for _ in range(3)] == [0, 1, 1]


@pytest.mark.parametrize(
    ("rule", "limits", "named"),
    [
        (PrefillApart(40), LIMITS, "kv_tokens_max"),
        (PrefillApart(45, adapter_tokens=5), LIMITS, "kv_tokens_max"),
        (
            PrefillApart(100),
            EngineLimits(blocks=64, batched_tokens_max=64, model_tokens_max=65),
            "batched_tokens_max",
        ),
    ],
)
def test_what_could_wait_for_ever_is_refused(rule: PrefillApart, limits: EngineLimits, named: str) -> None:
    with pytest.raises(InvalidConfig, match=named):
        Engine(limits, TIME, prefill_apart=rule)


def test_impossible_rules_are_refused() -> None:
    for name in ("kv_tokens_max", "decode_steps_min", "adapter_tokens"):
        with pytest.raises(InvalidConfig, match=name):
            PrefillApart(**{"kv_tokens_max": 100, name: -1})


def test_the_fullest_moment_of_nobody_is_empty() -> None:
    assert fullest_tokens([]) == 0


NEEDS = st.lists(st.builds(KvNeed, st.integers(1, 50), st.integers(0, 50)), max_size=8)


@given(NEEDS)
def test_the_fullest_moment_is_what_running_it_out_shows(needs: list[KvNeed]) -> None:
    seen = [
        sum(need.held_tokens + at for need in needs if need.left_tokens >= at)
        for at in range(max((need.left_tokens for need in needs), default=0) + 1)
    ]
    assert fullest_tokens(needs) == max(seen)


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=30),
    st.integers(60, 200),
    st.integers(1, 12),
)
def test_tokens_held_stay_below_the_limit_and_everybody_ends(
    shapes: list[tuple[int, int]], kv_tokens_max: int, decode_steps_min: int
) -> None:
    engine = engine_of(kv_tokens_max, decode_steps_min=decode_steps_min)
    requests = [submit(engine, str(number), *shape) for number, shape in enumerate(shapes)]
    since = decode_steps_min
    while engine.has_work:
        idle = not engine.running
        step = engine.step()
        held = sum(request.prompt_tokens + engine.output_tokens(request) for request in engine.running_requests())
        assert held < kv_tokens_max
        assert step.prefill_tokens <= LIMITS.batched_tokens_max
        assert bool(step.prefill_tokens) != bool(step.steps), "prompts or decoding, never both, never neither"
        if step.admitted:
            assert idle or since >= decode_steps_min
            since = 0
        since += step.steps
        assert not step.preempted
    assert all(r.state is RequestState.FINISHED and r.output_tokens == r.output_tokens_max for r in requests)


class Stubborn(Engine):
    """Tries the head again in every step."""

    def _still_blocked(self, request: EngineRequest) -> bool:
        return False


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=30),
    st.integers(60, 200),
    st.integers(1, 5),
)
def test_not_trying_again_in_vain_changes_nothing(
    shapes: list[tuple[int, int]], kv_tokens_max: int, decode_steps_min: int
) -> None:
    rule = PrefillApart(kv_tokens_max, decode_steps_min=decode_steps_min)
    runs = []
    for engine in (Engine(LIMITS, TIME, prefill_apart=rule), Stubborn(LIMITS, TIME, prefill_apart=rule)):
        for number, shape in enumerate(shapes):
            submit(engine, str(number), *shape)
        runs.append([names(step.admitted) for step in drain(engine)])
    assert runs[0] == runs[1]
