"""What the daemon counts, for ``/metrics``.

One registry a daemon, no globals. Labels are bounded whatever clients send: reasons come from closed lists, and
only the first ``tenants_max`` configured tenants have a label of their own; all others are ``other``.

Children are looked up once and kept, because ``labels()`` costs more than the increment. Gauges that describe the
present (queues, tickets, map) are read when the page is fetched, not kept up.
"""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

OTHER = "other"
_WAIT_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_STEP_S = (0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1)
_LAG_S = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0)


class SchedulerMetrics:
    """Counters, histograms and gauges of one daemon."""

    def __init__(self, pool_id: str, tenants_max: int) -> None:
        self.registry = CollectorRegistry()
        self._tenants_max = tenants_max
        self._tenant_labels: dict[str, str] = {}
        self._grants_by_tenant: dict[str, Counter] = {}
        registry = self.registry
        self.info = Gauge("evenhand_scheduler_pool", "Always 1; names the pool.", ["pool"], registry=registry)
        self.info.labels(pool_id).set(1)
        self.owner = Gauge("evenhand_scheduler_owner", "1 while this process may grant.", registry=registry)
        self.term = Gauge("evenhand_scheduler_term", "Term of office last held.", registry=registry)
        self.queued = Gauge("evenhand_scheduler_queued", "Requests in queues.", ["tenant"], registry=registry)
        self.tickets_open = Gauge("evenhand_scheduler_tickets_open", "Tickets not yet closed.", registry=registry)
        self.map_blocks = Gauge("evenhand_scheduler_map_blocks", "Copies in the live map.", registry=registry)
        self.workers = Gauge("evenhand_scheduler_workers", "Workers known.", registry=registry)
        self.grants = Counter("evenhand_scheduler_grants", "Tickets granted.", ["tenant"], registry=registry)
        self.refusals = Counter("evenhand_scheduler_refusals", "Calls refused.", ["reason"], registry=registry)
        self.legs_ended = Counter(
            "evenhand_scheduler_legs_ended", "Tickets closed.", ["outcome"], registry=registry
        )
        self.adopted = Counter(
            "evenhand_scheduler_tickets_adopted", "Tickets of earlier terms.", registry=registry
        )
        self.wait = Histogram(
            "evenhand_scheduler_wait_seconds",
            "Queue time of granted requests.",
            buckets=_WAIT_S,
            registry=registry,
        )
        self.step = Histogram(
            "evenhand_scheduler_decision_seconds",
            "Time one submitted request took in the core.",
            buckets=_STEP_S,
            registry=registry,
        )
        self.lag = Histogram(
            "evenhand_scheduler_event_lag_seconds",
            "From the engine's event to visible here.",
            buckets=_LAG_S,
            registry=registry,
        )
        self.messages = Counter(
            "evenhand_scheduler_messages", "Records of the event log read.", ["outcome"], registry=registry
        )
        self.workers_refused = Counter(
            "evenhand_scheduler_workers_refused", "Announcements that do not fit the pool.", registry=registry
        )
        self.control = Counter(
            "evenhand_scheduler_control_messages", "Wishes to worker edges.", ["outcome"], registry=registry
        )
        self.faults = Counter(
            "evenhand_scheduler_faults", "Faults in background tasks.", ["task"], registry=registry
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
        label = self._tenant_labels.get(tenant_id, OTHER)
        child = self._grants_by_tenant.get(label)
        if child is None:
            child = self._grants_by_tenant[label] = self.grants.labels(label)
        child.inc()
        self.wait.observe(wait_ms / 1000)

    def page(self) -> bytes:
        """The metrics page in Prometheus' text format."""
        return generate_latest(self.registry)
