"""The faults a person can ask for are the ones that are documented."""

import re
from pathlib import Path

import pytest

from evenhand.core.errors import InvalidRequest
from evenhand.engine.config import EngineConfig
from evenhand.engine.faults import apply_faults, current_faults
from evenhand.engine.kv_events import EventPublisher
from evenhand.engine.runtime import EngineRuntime

PAGE = Path(__file__).parents[3] / "docs" / "simulated-engine.md"


def runtime() -> EngineRuntime:
    config = EngineConfig()
    return EngineRuntime(config, EventPublisher(config.publisher, lambda: 0.0), lambda: 0.0)


def test_the_documented_faults_are_all_there_are() -> None:
    documented = set(re.findall(r'^\| `\{"(\w+)"', PAGE.read_text(), re.MULTILINE))
    assert documented == {*current_faults(runtime()), "restart"}


def test_one_wrong_setting_changes_nothing() -> None:
    engine = runtime()
    before = current_faults(engine)
    with pytest.raises(InvalidRequest, match="delay_ms"):
        apply_faults(engine, {"silent": True, "drop_next": 2, "delay_ms": -1})
    assert current_faults(engine) == before


def test_settings_that_are_not_named_stay() -> None:
    engine = runtime()
    apply_faults(engine, {"silent": True, "delay_ms": 5})
    apply_faults(engine, {"drop_next": 2})
    faults = current_faults(engine)
    assert (faults["silent"], faults["delay_ms"], faults["drop_next"]) == (True, 5, 2)
    assert not faults["duplicate"]
