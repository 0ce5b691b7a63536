"""An engine's ``/metrics`` page, read for the few numbers an edge needs.

vLLM's names, older ones too. Where one server runs several data-parallel ranks, each rank's samples carry its
number in the label ``engine``; samples of other ranks are left out. Only lines that begin with a wanted name are
looked at: the page has hundreds, and it is read several times a second. Whatever the page holds, reading it takes
time in proportion to its size, and every number found fits the messages that carry it.
"""

import math
import re
from dataclasses import dataclass
from typing import Final

_LABEL: Final = re.compile(r'(?<![a-zA-Z0-9_])([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')
"""A name is looked for at its first character only: otherwise a long one without a value costs its square."""
REQUESTS_MAX: Final = 2**31 - 1
TOTAL_MAX: Final = 2**53
"""Largest total and time in ms that is told; what is beyond is no count of anything."""

PROCESS_STARTED: Final = "process_start_time_seconds"
CACHE_CONFIG: Final = "vllm:cache_config_info"
_NUMBERS: Final = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:kv_cache_usage_perc": "kv_used_fraction",
    "vllm:gpu_cache_usage_perc": "kv_used_fraction",
    "vllm:prompt_tokens_total": "prompt_tokens_total",
    "vllm:prefix_cache_hits_total": "cached_tokens_total",
    "vllm:gpu_prefix_cache_hits_total": "cached_tokens_total",
    "vllm:generation_tokens_total": "output_tokens_total",
}


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """What one page says of one rank; 0 where it says nothing."""

    running: int = 0
    waiting: int = 0
    kv_used_fraction: float = 0.0
    prompt_tokens_total: int = 0
    cached_tokens_total: int = 0
    output_tokens_total: int = 0
    process_started_at_ms: int = 0
    block_size_tokens: int = 0
    kv_blocks: int = 0
    """The null block left out."""


def read_metrics(page: str, data_parallel_rank: int = 0) -> EngineMetrics:
    """Read a page in Prometheus' text format; lines that make no sense are passed over."""
    sums: dict[str, float] = {}
    block_size = kv_blocks = 0
    for line in page.splitlines():
        if not line.startswith(("vllm:", PROCESS_STARTED)):
            continue
        name, labels, value = _sample(line)
        if value is None:
            continue
        if name == PROCESS_STARTED:
            sums["process_started_at_ms"] = value * 1000
        elif labels.get("engine", str(data_parallel_rank)) != str(data_parallel_rank):
            continue
        elif name == CACHE_CONFIG:
            block_size = _whole(labels.get("block_size"))
            kv_blocks = max(0, _whole(labels.get("num_gpu_blocks")) - 1)
        elif name in _NUMBERS:
            field = _NUMBERS[name]
            sums[field] = sums.get(field, 0.0) + value
    return EngineMetrics(
        running=_count(sums, "running", REQUESTS_MAX),
        waiting=_count(sums, "waiting", REQUESTS_MAX),
        kv_used_fraction=min(1.0, max(0.0, sums.get("kv_used_fraction", 0.0))),
        prompt_tokens_total=_count(sums, "prompt_tokens_total", TOTAL_MAX),
        cached_tokens_total=_count(sums, "cached_tokens_total", TOTAL_MAX),
        output_tokens_total=_count(sums, "output_tokens_total", TOTAL_MAX),
        process_started_at_ms=round(min(TOTAL_MAX, sums.get("process_started_at_ms", 0))),
        block_size_tokens=block_size,
        kv_blocks=kv_blocks,
    )


def _sample(line: str) -> tuple[str, dict[str, str], float | None]:
    """Name, labels and value of one line; no value where it is not a finite, non-negative number."""
    name, brace, rest = line.partition("{")
    labels: dict[str, str] = {}
    if brace:
        inside, _, tail = rest.rpartition("}")
        labels = dict(_LABEL.findall(inside))
    else:
        name, _, tail = line.partition(" ")
    try:
        value = float(tail.split()[0])
    except (ValueError, IndexError):
        return name, labels, None
    return name.strip(), labels, value if math.isfinite(value) and value >= 0 else None


def _count(sums: dict[str, float], field: str, most: int) -> int:
    """A sum as a whole number; sums of finite samples may be infinite."""
    return int(min(most, sums.get(field, 0.0)))


def _whole(text: str | None) -> int:
    return int(text) if text is not None and text.isdecimal() and len(text) < 10 else 0
