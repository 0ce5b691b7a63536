"""An engine's ``/metrics`` page under vLLM's names, so that whatever reads a real engine reads this one.

One registry an engine life: a restart in place begins a fresh one, so counters start at zero and
``process_start_time_seconds`` changes, as they do when a process restarts.
"""

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from evenhand.engine.batching import Engine

_SECONDS = (0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_TTFT_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, *_SECONDS, 160.0, 640.0, 2560.0)
_TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, *_SECONDS)
_MINUTES = (10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0)
_REQUEST_BUCKETS = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, *_MINUTES)

FINISH_REASONS = ("stop", "length", "abort", "error")


class EngineMetrics:
    """Counters of one engine life. ``start_time_s`` is Unix time."""

    def __init__(self, model: str, engine_index: int, engine: Engine, start_time_s: float) -> None:
        self.registry = CollectorRegistry()
        self._labels = {"model_name": model, "engine": str(engine_index)}
        self._engine = engine
        Gauge("process_start_time_seconds", "Unix time this life began.", registry=self.registry).set(start_time_s)
        self._running = self._gauge("vllm:num_requests_running", "Requests in the batch.")
        self._waiting = self._gauge("vllm:num_requests_waiting", "Requests queued for the batch.")
        self._usage = self._gauge("vllm:kv_cache_usage_perc", "Share of KV blocks held, 0 to 1.")
        self.prefix_queries = self._counter("vllm:prefix_cache_queries", "Prompt tokens looked up.")
        self.prefix_hits = self._counter("vllm:prefix_cache_hits", "Prompt tokens found cached.")
        self.prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens of requests prefilled.")
        self.prompt_tokens_cached = self._counter("vllm:prompt_tokens_cached", "Prompt tokens reused.")
        self.generation_tokens = self._counter("vllm:generation_tokens", "Output tokens produced.")
        self.preemptions = self._counter("vllm:num_preemptions", "Requests that lost their blocks.")
        self.first_token_s = self._histogram(
            "vllm:time_to_first_token_seconds", "Arrival to token 1.", _TTFT_BUCKETS
        )
        self.inter_token_s = self._histogram("vllm:inter_token_latency_seconds", "Token to token.", _TOKEN_BUCKETS)
        self.request_s = self._histogram("vllm:e2e_request_latency_seconds", "Arrival to end.", _REQUEST_BUCKETS)
        success = Counter(
            "vllm:request_success",
            "Requests ended, by reason.",
            ["model_name", "engine", "finished_reason"],
            registry=self.registry,
        )
        self.success = {
            reason: success.labels(**self._labels, finished_reason=reason) for reason in FINISH_REASONS
        }
        limits = engine.limits
        cache = {
            "block_size": str(limits.block_size),
            "num_gpu_blocks": str(limits.blocks),
            "enable_prefix_caching": "True",
            "kv_cache_size_tokens": str(limits.blocks * limits.block_size),
            "engine": str(engine_index),
        }
        Gauge(
            "vllm:cache_config_info", "Configuration of the KV cache.", list(cache), registry=self.registry
        ).labels(**cache).set(1)

    def page(self) -> bytes:
        """The page in Prometheus text format."""
        self._running.set(self._engine.running)
        self._waiting.set(len(self._engine.waiting))
        self._usage.set(self._engine.pool.usage)
        return generate_latest(self.registry)

    def _gauge(self, name: str, about: str) -> Gauge:
        return Gauge(name, about, list(self._labels), registry=self.registry).labels(**self._labels)

    def _counter(self, name: str, about: str) -> Counter:
        return Counter(name, about, list(self._labels), registry=self.registry).labels(**self._labels)

    def _histogram(self, name: str, about: str, buckets: Sequence[float]) -> Histogram:
        family = Histogram(name, about, list(self._labels), registry=self.registry, buckets=buckets)
        return family.labels(**self._labels)
