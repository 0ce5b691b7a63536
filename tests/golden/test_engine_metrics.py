"""The metrics page against a real engine's: same names, same kinds, same labels."""

from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from evenhand.engine.batching import Engine
from evenhand.engine.config import EngineConfig
from evenhand.engine.metrics import EngineMetrics

REAL_PAGE = Path(__file__).parent / "captures" / "e0.metrics.txt"
INFORMATION = "vllm:cache_config_info"


def shape(page: str) -> dict[str, tuple[str, set[str], set[str]]]:
    """By sample name: the family's kind, the names of the labels, the histogram bounds."""
    shapes: dict[str, tuple[str, set[str], set[str]]] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            kind, labels, bounds = shapes.setdefault(sample.name, (family.type, set(), set()))
            labels.update(sample.labels)
            bounds.update([sample.labels["le"]] if "le" in sample.labels else [])
            shapes[sample.name] = (kind, labels, bounds)
    return shapes


def test_every_name_exists_in_a_real_engine_with_the_same_kind_and_labels() -> None:
    config = EngineConfig(model="tiny", block_size=32, kv_blocks=40, max_model_len=1024)
    engine = Engine(config.limits, config.step_time)
    ours = shape(EngineMetrics("tiny", 0, engine, 1e9).page().decode())
    real = shape(REAL_PAGE.read_text())
    assert len(ours) > 20
    for name, (kind, labels, bounds) in ours.items():
        assert name in real
        real_kind, real_labels, real_bounds = real[name]
        assert kind == real_kind, name
        assert bounds == real_bounds, name
        assert labels <= real_labels if name == INFORMATION else labels == real_labels, name


def test_the_cache_is_described_as_a_real_engine_does() -> None:
    def described(page: str) -> dict[str, str]:
        for family in text_string_to_metric_families(page):
            if family.name == INFORMATION:
                return family.samples[0].labels
        raise AssertionError(f"no {INFORMATION}")

    config = EngineConfig(model="tiny", block_size=32, kv_blocks=40, max_model_len=1024)
    page = EngineMetrics("tiny", 0, Engine(config.limits, config.step_time), 1e9).page().decode()
    real = described(REAL_PAGE.read_text())
    assert described(page) == {name: real[name] for name in described(page)}
