"""The stack file: what is wrong with it is said in one sentence that names file and place."""

from pathlib import Path

import pytest

from evenhand.core.errors import InvalidConfig
from evenhand.local.stack_file import load_stack

GOOD = """
pool: llama
workers:
  - {address: "http://gpu-1.internal:8000", kv_events: "tcp://gpu-1.internal:5557"}
  - {address: "http://10.0.0.7:8000", worker_id: second}
tenants:
  - {tenant_id: search, weight: 3}
"""


def test_a_good_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "stack.yaml"
    path.write_text(GOOD)
    stack = load_stack(path)
    assert [worker.name for worker in stack.workers] == ["gpu-1.internal-8000", "second"]
    assert stack.tenants[0].weight == 3


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("workers: [", "is no YAML"),
        ("workers: []", "workers"),
        ("pool: x", "workers: Field required"),
        ("workers: [{address: 'gpu:8000'}]", "workers.0.address"),
        ("workers: [{address: 'http://a:1', port: 3}]", "workers.0.port"),
        ("workers: [{address: 'http://a:1', replay: 'tcp://a:2'}]", "no kv_events"),
        ("workers: [{address: 'http://a:1', kv_events: 'tcp://*:2'}]", "kv_events endpoint 'tcp://*:2'"),
        ("workers: [{address: 'http://a:1', kv_events: 'tcp://a:99999'}]", "kv_events endpoint 'tcp://a:99999'"),
        ("workers: [{address: 'http://a:1'}, {address: 'http://a:1'}]", "named twice"),
        ("workers: [{address: 'http://a:1'}]\ntenants: [{tenant_id: t, weight: -1}]", "tenants.0.weight"),
        ("- a\n- b", "the document"),
        ("\x00", "is no YAML"),
    ],
)
def test_a_bad_file_stops_the_start(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "stack.yaml"
    path.write_text(text)
    with pytest.raises(InvalidConfig) as refused:
        load_stack(path)
    assert str(path) in str(refused.value)
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"absent\.yaml cannot be read"):
        load_stack(tmp_path / "absent.yaml")
