"""Reading an engine's metrics page."""

import json
import time

import pytest
from tests.golden.recordings import CAPTURES

from evenhand.core.ids import Epoch, WorkerId
from evenhand.core.kv import WorkerLoadReported
from evenhand.wire.kv_codec import encode_kv_message
from evenhand.worker.engine_metrics import EngineMetrics, read_metrics
from evenhand.worker.load import EngineModel, base_model


def test_a_recorded_page_of_a_real_engine() -> None:
    found = read_metrics((CAPTURES / "e0.metrics.txt").read_text())
    assert found == EngineMetrics(
        running=0,
        waiting=0,
        kv_used_fraction=0.0,
        prompt_tokens_total=7198,
        cached_tokens_total=1760,
        output_tokens_total=360,
        process_started_at_ms=1795956790820,
        block_size_tokens=32,
        kv_blocks=39,
    )


def test_each_rank_has_its_own_samples() -> None:
    page = "\n".join(
        f'vllm:num_requests_running{{engine="{rank}",model_name="m"}} {rank + 1}.0' for rank in range(3)
    )
    assert [read_metrics(page, rank).running for rank in range(4)] == [1, 2, 3, 0]


def test_names_of_older_versions_and_lines_that_make_no_sense() -> None:
    page = """
# HELP vllm:num_requests_running x
vllm:gpu_cache_usage_perc{model_name="a}b"} 0.25
vllm:num_requests_waiting{model_name="m"} NaN
vllm:num_requests_running{model_name="m"} -4
vllm:prompt_tokens_total{model_name="m"
vllm:generation_tokens_total{model_name="m"} twelve
vllm:prefix_cache_hits_total{model_name="a \\"quoted\\" name"} 1e3 1795956944
vllm:cache_config_info{block_size="None",num_gpu_blocks="None"} 1.0
process_start_time_seconds 12.5
"""
    assert read_metrics(page) == EngineMetrics(
        kv_used_fraction=0.25, cached_tokens_total=1000, process_started_at_ms=12500
    )
    assert read_metrics("") == EngineMetrics()


@pytest.mark.parametrize("number", ["1e12", "1e30", "1e306", "1.7e308"])
def test_numbers_of_any_size_can_be_reported(number: str) -> None:
    names = (
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:prompt_tokens_total",
        "vllm:prefix_cache_hits_total",
        "vllm:generation_tokens_total",
        "process_start_time_seconds",
    )
    found = read_metrics("\n".join(f"{name} {number}" for name in names * 2))
    report = WorkerLoadReported(
        WorkerId("w"),
        Epoch(1),
        found.running,
        found.waiting,
        found.kv_used_fraction,
        found.prompt_tokens_total,
        found.cached_tokens_total,
        found.output_tokens_total,
        found.process_started_at_ms,
        healthy=True,
    )
    assert encode_kv_message(report)


def test_a_page_costs_time_in_proportion_to_its_size() -> None:
    page = "vllm:x{" + "a" * 500_000 + "} 1\nvllm:num_requests_running 3"
    began = time.process_time()
    assert read_metrics(page).running == 3
    assert time.process_time() - began < 5.0, "half a megabyte of letters takes minutes where each is tried"


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        ({"data": [{"id": "lora", "parent": "m"}, {"id": "m", "max_model_len": 4096}]}, EngineModel("m", 4096)),
        ({"data": [{"id": "m", "max_model_len": 2**32}]}, EngineModel("m", 0)),
        ({"data": [{"id": "m", "max_model_len": True}]}, EngineModel("m", 0)),
        ({"data": [{"id": "m\ud800"}]}, None),
        ({"data": [{"id": "m" * 1_001}]}, None),
        ({"data": [{"id": "m\0"}]}, None),
        ({"data": [{"id": ""}]}, None),
        ({"data": 5}, None),
    ],
)
def test_a_model_is_taken_only_where_it_can_be_announced(page: object, expected: EngineModel | None) -> None:
    assert base_model(json.dumps(page)) == expected


def test_a_page_nested_without_end_is_no_model() -> None:
    assert base_model("[" * 200_000) is None
