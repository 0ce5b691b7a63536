"""Simulated engine and worker edge against each other: what the edge holds is what the engine can hit.

Every step's events are encoded, translated and compared with the pool itself, in each wire layout. The keys
expected are computed here from the requests' tokens, not from the events.
"""

import pytest
from tests.golden.scheduler_plan import BLOCK_SIZE, TOKENS_MAX, plan_of

from evenhand.core.block_key import block_keys, root_hash
from evenhand.core.ids import Seq
from evenhand.core.kv import Tier
from evenhand.engine.batching import Engine
from evenhand.engine.content import HashForm, TokenContent
from evenhand.engine.events import EngineHash
from evenhand.engine.kv_events import EventEncoder, EventForm
from evenhand.engine.limits import EngineLimits, StepTime
from evenhand.engine.request import EngineRequest
from evenhand.worker.translator import Translator, TranslatorConfig

MODEL = "tiny"


@pytest.mark.parametrize("hash_form", list(HashForm))
@pytest.mark.parametrize("seed", [1, 4])
def test_the_edge_holds_exactly_what_the_engine_can_hit_after_every_step(seed: int, hash_form: HashForm) -> None:
    plan = plan_of(seed)
    engine = Engine(
        EngineLimits(BLOCK_SIZE, plan.blocks, plan.sequences_max, plan.batched_tokens_max, TOKENS_MAX), StepTime()
    )
    encoder = EventEncoder(EventForm.MAP)
    translator = Translator(TranslatorConfig(MODEL, BLOCK_SIZE, plan.blocks - 1))
    key_of: dict[EngineHash, int] = {}
    calls = plan.calls()
    requests: dict[int, EngineRequest] = {}
    step = compared = 0
    while calls or engine.has_work:
        while calls and (calls[0][0] <= step or not engine.has_work):
            _step, kind, index = calls.pop(0)
            if kind == 1:
                engine.cancel(requests[index])
                continue
            planned = plan.requests[index]
            content = TokenContent(
                planned.prompt,
                block_size=BLOCK_SIZE,
                hash_form=hash_form,
                cache_salt=planned.salt,
                output_token_ids=planned.output,
            )
            keys = block_keys(
                planned.prompt + planned.output, BLOCK_SIZE, root_hash(MODEL, "", planned.salt or "")
            )
            key_of.update(zip(content.names(len(keys)), keys, strict=False))
            requests[index] = EngineRequest(str(index), content, len(planned.prompt), len(planned.output))
            engine.submit(requests[index])
        events = engine.step().events
        step += 1
        if events:
            compared += 1
            translator.translate(encoder.batch(float(step), events, 0), step, Seq(compared))
            expected = {key_of[name] for name in engine.pool.findable()}
            assert set(translator.held(Tier.DEVICE)) == expected, f"step {step}"
    assert compared > 200


@pytest.mark.parametrize("event_form", list(EventForm))
def test_older_layouts_translate_to_the_same_keys(event_form: EventForm) -> None:
    limits = EngineLimits(BLOCK_SIZE, 18, 4, 512, TOKENS_MAX)
    engine, encoder = Engine(limits, StepTime()), EventEncoder(event_form)
    translator = Translator(TranslatorConfig(MODEL, BLOCK_SIZE, 17))
    for index in range(6):
        prompt = list(range(index * 1000, index * 1000 + 200))
        engine.submit(EngineRequest(str(index), TokenContent(prompt, block_size=BLOCK_SIZE), 200, 4))
    batches = 0
    while engine.has_work:
        events = engine.step().events
        if events:
            batches += 1
            translator.translate(encoder.batch(1.0, events, 0), 1, Seq(batches))
    last = block_keys(list(range(5000, 5200)), BLOCK_SIZE, root_hash(MODEL))
    held = set(translator.held(Tier.DEVICE))
    assert set(last) <= held
    assert len(held) == engine.pool.cached_names
