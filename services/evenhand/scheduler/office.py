"""A term of office: the core's scheduler, made when the lease is won and dropped when it is lost.

At the start of a term the scheduler is restored from the checkpoint, then told all tenants and all living workers;
from then on inputs reach it one by one through the actor. The cache map is the live map's and outlives terms; what
was presumed beside it belongs to one term.
"""

import time
from collections.abc import Mapping
from dataclasses import asdict
from enum import Enum

from evenhand.core.errors import SchemaMismatch
from evenhand.core.facts import SchedulerConfig
from evenhand.core.presence import Presence
from evenhand.core.scheduler import PoolScheduler
from evenhand.core.status import PoolStatus
from evenhand.core.steps import TenantChanged, TenantForgotten, Tick, WorkerHeard, WorkerJoined
from evenhand.logs import get_logger
from evenhand.scheduler.actor import PoolActor
from evenhand.scheduler.adoption import Adoption
from evenhand.scheduler.checkpoint_codec import SavedCheckpoint, decode_checkpoint, encode_checkpoint
from evenhand.scheduler.directory_watch import DirectoryWatch
from evenhand.scheduler.live_map import LiveMap
from evenhand.scheduler.metrics import SchedulerMetrics

log = get_logger("scheduler.office")


class PoolOffice:
    """Makes and drops the pool's scheduler; an ``ownership.Office``."""

    def __init__(
        self,
        config: SchedulerConfig,
        actor: PoolActor,
        live_map: LiveMap,
        watch: DirectoryWatch,
        metrics: SchedulerMetrics,
    ) -> None:
        self._config = config
        self._actor = actor
        self._live_map = live_map
        self._watch = watch
        self._metrics = metrics
        self._scheduler: PoolScheduler | None = None
        self._presence: Presence | None = None
        self._kept = b""

    def take_office(self, term: int, lease_until_ns: int, checkpoint: bytes | None) -> None:
        """Begin to decide."""
        assert self._scheduler is None, "a term begins when the one before has ended"
        live_map, actor = self._live_map, self._actor
        saved = self._read(checkpoint)
        presence = Presence(live_map.cache_map)
        scheduler = PoolScheduler(self._config, presence, term)
        if saved is not None:
            # Between two machines only the wall clock goes on; one that stepped back counts as no time at all.
            elapsed_ms = max(0, time.time_ns() // 1_000_000 - saved.saved_wall_ms)
            scheduler.restore(saved.checkpoint, time.monotonic_ns(), elapsed_ms * 1_000_000)
        self._presence, self._scheduler = presence, scheduler  # not before: a fault so far leaves no office taken
        adoption = Adoption()
        if saved is not None:
            adoption = Adoption(saved.earlier, saved.checkpoint.term, saved.saved_wall_ms)
        actor.begin_term(scheduler, term, lease_until_ns, adoption)
        for tenant in self._watch.tenants.values():
            actor.tell(TenantChanged(tenant))
        for status in scheduler.status(time.monotonic_ns()).tenants:
            if status.tenant_id not in self._watch.tenants:  # deleted while nobody was in office to hear of it
                actor.tell(TenantForgotten(status.tenant_id))
        for worker_id, spec in live_map.workers.items():
            actor.tell(WorkerJoined(spec))
            load = live_map.loads.get(worker_id)
            position = live_map.cache_map.position(worker_id)
            if load is not None:
                actor.tell(WorkerHeard(worker_id, load, position is not None and position.complete))
        actor.tell(Tick())

    def extend(self, lease_until_ns: int) -> None:
        self._actor.extend_lease(lease_until_ns)

    def checkpoint(self) -> bytes:
        """Clocks and open tickets as they are; of the term just ended, as they were."""
        if self._scheduler is None:
            return self._kept
        now_ms = time.time_ns() // 1_000_000
        earlier = self._actor.adoption.state(now_ms, self._config.ticket_ttl_ms)
        return encode_checkpoint(self._scheduler.checkpoint(time.monotonic_ns()), now_ms, earlier)

    def leave_office(self, sentence: str) -> None:
        """Stop deciding at once."""
        if self._scheduler is None:
            return
        self._kept = self.checkpoint()
        self._scheduler = None
        self._actor.end_term(sentence)
        assert self._presence is not None
        for worker_id in tuple(self._live_map.workers):
            self._presence.worker_gone(worker_id)
        self._presence = None

    @property
    def presence(self) -> Presence | None:
        """What the term presumes beside the map; None out of office."""
        return self._presence

    def status(self) -> PoolStatus | None:
        """The pool as the scheduler sees it; None out of office."""
        return self._scheduler.status(time.monotonic_ns()) if self._scheduler is not None else None

    def status_page(self) -> Mapping[str, object]:
        """The pool in plain values, for ``/status``."""
        status, live_map = self.status(), self._live_map
        return {
            "pool_id": self._config.pool_id,
            "owner": self._actor.granting,
            "term": self._actor.term,
            "shutting_down": self._actor.shutting_down,
            "directory_away": self._watch.away,
            "map_blocks": live_map.cache_map.copy_count,
            "map_keys": live_map.cache_map.key_count,
            "map_blocks_by_worker": {
                worker_id: live_map.cache_map.block_count(worker_id) for worker_id in sorted(live_map.workers)
            },
            "workers_known": sorted(live_map.workers),
            "workers_refused": dict(live_map.refused),
            "workers_mispredicted": list(self._metrics.predictions.mispredicted),
            "pool": _plain(asdict(status)) if status is not None else None,
        }

    def refresh_gauges(self) -> None:
        """Bring the gauges that describe the present up to date."""
        metrics, status = self._metrics, self.status()
        metrics.owner.set(1 if self._actor.granting else 0)
        metrics.map_blocks.set(self._live_map.cache_map.copy_count)
        metrics.workers.set(len(self._live_map.workers))
        metrics.tickets_open.set(len(self._actor.open))
        metrics.queued.clear()
        if status is None:
            return
        queued: dict[str, int] = {}
        for tenant in status.tenants:
            label = metrics.tenant_label(tenant.tenant_id)
            queued[label] = queued.get(label, 0) + tenant.queue_length
        for label, count in queued.items():
            metrics.queued.labels(label).set(count)

    def _read(self, payload: bytes | None) -> SavedCheckpoint | None:
        if not payload:
            return None
        try:
            return decode_checkpoint(payload)
        except SchemaMismatch as error:
            log.error("checkpoint_unreadable", error=str(error))
            self._metrics.faults.add("checkpoint")
            return None


def _plain(value: object) -> object:
    """JSON has no infinity and no NaN: they become null."""
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, float):
        return value if value - value == 0.0 else None
    if isinstance(value, Enum):
        return _plain(value.value)
    if value is None or isinstance(value, str | int):
        return value
    return str(value)
