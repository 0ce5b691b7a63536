"""What the state service counts, for ``/metrics``.

One registry a service, no globals. Labels come from closed lists. The record path counts in a plain dictionary and
hands it over once a slice, because a labelled increment costs as much as folding a small batch.
"""

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0)


class StateMetrics:
    """Counters, histograms and gauges of one state service."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        self.records = Counter(
            "evenhand_state_records", "Records read, by what became of them.", ["outcome"], registry=registry
        )
        self.key_changes = Counter(
            "evenhand_state_block_operations", "Blocks stored or removed, as folded.", registry=registry
        )
        self.commits = Counter("evenhand_state_commits", "Transactions committed.", registry=registry)
        self.commit_seconds = Histogram(
            "evenhand_state_commit_seconds", "Time of one commit.", buckets=_SECONDS, registry=registry
        )
        self.lag_seconds = Histogram(
            "evenhand_state_lag_seconds",
            "From the publication of a group's last record to its commit.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.compactions = Counter(
            "evenhand_state_compactions", "Workers rewritten as a whole.", registry=registry
        )
        self.workers_refused = Counter(
            "evenhand_state_workers_refused", "Announcements that do not fit their pool.", registry=registry
        )
        self.logs_replaced = Counter(
            "evenhand_state_logs_replaced", "Times the log was found to be another one.", registry=registry
        )
        self.control = Counter(
            "evenhand_state_control_messages", "Wishes published to worker edges.", ["kind"], registry=registry
        )
        self.pending = Gauge(
            "evenhand_state_pending_block_operations", "Folded and not yet committed.", registry=registry
        )
        self.workers = Gauge("evenhand_state_workers", "Workers in the map.", registry=registry)
        self.blocks = Gauge("evenhand_state_blocks", "Copies in the map.", registry=registry)
        self.paused = Gauge("evenhand_state_paused", "1 while reading waits for commits.", registry=registry)

    def count_records(self, outcomes: Mapping[str, int]) -> None:
        for outcome, count in outcomes.items():
            self.records.labels(outcome).inc(count)

    def page(self) -> bytes:
        """The metrics page in Prometheus' text format."""
        return generate_latest(self.registry)
