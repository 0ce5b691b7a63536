"""Reading an engine's metrics page."""

from tests.golden.recordings import CAPTURES

from evenhand.worker.engine_metrics import EngineMetrics, read_metrics


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
