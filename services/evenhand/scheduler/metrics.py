"""What the daemon counts, for ``/metrics``.

One registry a daemon, no globals. Labels are bounded whatever clients send: reasons come from closed lists, and
only the first ``tenants_max`` configured tenants have a label of their own; all others are ``other``.

What is counted for every request is counted in plain integers (``Tally``, ``Distribution``), turned into samples
when the page is fetched: the client library's counters take locks and cost a request several microseconds. Gauges
that describe the present (queues, tickets, map) are read then as well. All of it belongs to the loop's thread.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from evenhand.scheduler.predictions import Predictions

OTHER = "other"
_WAIT_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_STEP_S = (0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1)
_LAG_S = (0.002, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0)


class Tally(Collector):
    """A counter by one label; ``add`` costs a dictionary access."""

    def __init__(self, name: str, help_text: str, label: str, registry: CollectorRegistry) -> None:
        self._name, self._help, self._label = name, help_text, label
        self._counts: dict[str, int] = {}
        registry.register(self)

    def add(self, label: str) -> None:
        self._counts[label] = self._counts.get(label, 0) + 1

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(self._name, self._help, labels=[self._label])
        for label, count in self._counts.items():
            family.add_metric([label], count)
        yield family


class Distribution(Collector):
    """A histogram of seconds; ``add`` costs a bisection."""

    def __init__(
        self, name: str, help_text: str, bounds_s: tuple[float, ...], registry: CollectorRegistry
    ) -> None:
        self._name, self._help, self._bounds_s = name, help_text, bounds_s
        self._counts = [0] * (len(bounds_s) + 1)
        self._sum_s = 0.0
        registry.register(self)

    def add(self, seconds: float) -> None:
        self._counts[bisect_left(self._bounds_s, seconds)] += 1
        self._sum_s += seconds

    def collect(self) -> Iterator[Metric]:
        below, buckets = 0, []
        for bound, count in zip((*map(str, self._bounds_s), "+Inf"), self._counts, strict=True):
            below += count
            buckets.append((bound, below))
        family = HistogramMetricFamily(self._name, self._help)
        family.add_metric([], buckets, self._sum_s)
        yield family


class SchedulerMetrics:
    """Counters, histograms and gauges of one daemon."""

    def __init__(self, pool_id: str, tenants_max: int) -> None:
        registry = self.registry = CollectorRegistry()
        self._tenants_max = tenants_max
        self._tenant_labels: dict[str, str] = {}
        Gauge("evenhand_scheduler_pool", "Always 1; names the pool.", ["pool"], registry=registry).labels(
            pool_id
        ).set(1)
        self.owner = Gauge("evenhand_scheduler_owner", "1 while this process may grant.", registry=registry)
        self.term = Gauge("evenhand_scheduler_term", "Term of office last held.", registry=registry)
        self.queued = Gauge("evenhand_scheduler_queued", "Requests in queues.", ["tenant"], registry=registry)
        self.tickets_open = Gauge("evenhand_scheduler_tickets_open", "Tickets not yet closed.", registry=registry)
        self.map_blocks = Gauge("evenhand_scheduler_map_blocks", "Copies in the live map.", registry=registry)
        self.workers = Gauge("evenhand_scheduler_workers", "Workers known.", registry=registry)
        self.grants = Tally("evenhand_scheduler_grants", "Tickets granted.", "tenant", registry)
        self.refusals = Tally("evenhand_scheduler_refusals", "Requests refused.", "reason", registry)
        self.calls_refused = Tally("evenhand_scheduler_calls_refused", "Calls refused.", "reason", registry)
        self.legs_ended = Tally("evenhand_scheduler_legs_ended", "Tickets closed.", "outcome", registry)
        self.messages = Tally("evenhand_scheduler_messages", "Records of the event log.", "outcome", registry)
        self.control = Tally("evenhand_scheduler_control_messages", "Wishes to edges.", "outcome", registry)
        self.faults = Tally("evenhand_scheduler_faults", "Faults of this process.", "task", registry)
        self.predictions = Predictions(registry)
        self.adopted = Counter(
            "evenhand_scheduler_tickets_adopted", "Tickets of earlier terms.", registry=registry
        )
        self.workers_refused = Counter(
            "evenhand_scheduler_workers_refused", "Announcements that do not fit the pool.", registry=registry
        )
        self.wait = Distribution(
            "evenhand_scheduler_wait_seconds", "Queue time of granted requests.", _WAIT_S, registry
        )
        self.step = Distribution(
            "evenhand_scheduler_decision_seconds", "Time of a submitted request in the core.", _STEP_S, registry
        )
        self.lag = Distribution(
            "evenhand_scheduler_event_lag_seconds", "From the engine's event to visible here.", _LAG_S, registry
        )

    def know_tenants(self, tenant_ids: Iterable[str]) -> None:
        """Give configured tenants their labels, first come, up to the bound; a label once given stays."""
        for tenant_id in tenant_ids:
            if len(self._tenant_labels) >= self._tenants_max:
                return
            self._tenant_labels.setdefault(tenant_id, tenant_id)

    def tenant_label(self, tenant_id: str) -> str:
        return self._tenant_labels.get(tenant_id, OTHER)

    def granted(self, tenant_id: str, wait_ms: float) -> None:
        """Count one grant."""
        self.grants.add(self._tenant_labels.get(tenant_id, OTHER))
        self.wait.add(wait_ms / 1000)

    def page(self) -> bytes:
        """The metrics page in Prometheus' text format."""
        return generate_latest(self.registry)
