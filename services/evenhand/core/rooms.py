"""Which workers have room now, and why the others have none.

::

    role, draining ── takes no requests at all (not counted in F)
    stale          ── unheard of for ``worker_stale_after_ms``; its tickets go on
    no_slot        ── all slots hold tickets
    kv_full        ── all KV blocks are reserved
    engine_full    ── its engine says that its KV is full, whatever is reserved here (``engine_full_fraction``)
    prefill_full   ── pending uncached tokens at or above ``prefill_pending_max_tokens``
    (open)         ── anything else; whether a given request fits is for ``placement`` to say

Where outputs run far past their estimates an engine is full before the reservations are. What it gets then waits
in its own queue, which knows no tenants; so it gets nothing until a report says otherwise.

A worker is judged again whenever something about it changes, and when time alone changes it: modelled prefill
drains, silence grows. So a decision costs nothing for workers that cannot take part in it.
"""

import heapq

from evenhand.core.estimator import NS_PER_MS
from evenhand.core.facts import SchedulerConfig, WorkerLoad, WorkerRole
from evenhand.core.ids import WorkerId
from evenhand.core.worker import Worker

NEARLY_FULL_PART = 0.9
"""Of ``engine_full_fraction``: so full, an engine that has requests waiting has them waiting for KV."""

REOPEN_KEPT_MIN = 64
REOPEN_PER_WORKER_MAX = 4
"""Times of prefill room kept, for each worker, before those that have been superseded are swept out."""


class Rooms:
    """All workers of a pool. ``open`` is read by placement; every change of a worker is told to ``judge``."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.workers: dict[WorkerId, Worker] = {}
        self.open: dict[WorkerId, Worker] = {}
        self._closed_counts: dict[str, int] = {}
        self._closed_sorted: tuple[tuple[str, int], ...] | None = None
        self._reopen: list[tuple[int, WorkerId]] = []
        self._stale_after_ns = config.worker_stale_after_ms * NS_PER_MS
        self._lost_after_ns = config.worker_lost_after_ms * NS_PER_MS
        self._prefill_max = config.prefill_pending_max_tokens
        self._engine_full_fraction = config.engine_full_fraction
        self._age_at_ns: int | None = None
        self.stale_changes = 0
        """How often a worker has become stale, or ceased to be."""
        self.stirred = False
        """Something changed that may give someone room; whoever has looked sets it back."""

    def add(self, worker: Worker, now_ns: int) -> None:
        worker_id = worker.spec.worker_id
        assert worker_id not in self.workers, f"worker {worker_id} is here already"
        self.workers[worker_id] = worker
        self.open[worker_id] = worker
        worker.note_open(True, now_ns)
        self.judge(worker, now_ns)
        self._age_by(worker.heard_at_ns + self._stale_after_ns)

    def drop(self, worker: Worker, now_ns: int) -> None:
        self._set_closed(worker, None, now_ns)
        worker.note_open(False, now_ns)
        del self.workers[worker.spec.worker_id]
        del self.open[worker.spec.worker_id]

    def heard(self, worker: Worker, now_ns: int) -> None:
        worker.heard_at_ns = now_ns
        if worker.stale:
            worker.stale = False
            self.stale_changes += 1
            self.judge(worker, now_ns)
            self._age_by(now_ns + self._stale_after_ns)

    def told_load(self, worker: Worker, load: WorkerLoad | None, now_ns: int) -> None:
        """A worker's engine tells its load; None: nothing is known of it any more."""
        was_full, worker.load = self.is_engine_full(worker), load
        if self.is_engine_full(worker) is not was_full:
            self.judge(worker, now_ns)

    def judge(self, worker: Worker, now_ns: int) -> None:
        """Decide again whether a worker has room."""
        self.stirred = True
        if worker.awaited:
            worker.give_up_overdue(now_ns)
        reason: str | None = None
        if worker.spec.role is not WorkerRole.BOTH:
            reason = "role"
        elif worker.draining:
            reason = "draining"
        elif worker.stale:
            reason = "stale"
        elif worker.slots_used >= worker.spec.slots:
            reason = "no_slot"
        elif worker.kv_reserved_blocks >= worker.spec.kv_blocks:
            reason = "kv_full"
        elif worker.load is not None and self.is_engine_full(worker):
            reason = "engine_full"
        elif worker.prefill_pending_tokens(now_ns) >= self._prefill_max:
            reason = "prefill_full"
            at_ns = worker.prefill_room_at_ns(self._prefill_max)
            if at_ns != worker.reopens_at_ns:
                worker.reopens_at_ns = at_ns
                heapq.heappush(self._reopen, (at_ns, worker.spec.worker_id))
        self._set_closed(worker, reason, now_ns)
        if len(self._reopen) > REOPEN_KEPT_MIN + REOPEN_PER_WORKER_MAX * len(self.workers):
            self._sweep_reopen()

    def _sweep_reopen(self) -> None:
        """Keep of each worker without prefill room the time last noted, and of the others none."""
        self._reopen = []
        for worker in self.workers.values():
            if worker.closed == "prefill_full":
                self._reopen.append((worker.reopens_at_ns, worker.spec.worker_id))
            else:
                worker.reopens_at_ns = 0
        heapq.heapify(self._reopen)

    def pass_time(self, now_ns: int) -> tuple[Worker, ...]:
        """Reopen workers whose prefill has drained, mark the stale, and return those to be given up as lost."""
        while self._reopen and self._reopen[0][0] <= now_ns:
            worker = self.workers.get(heapq.heappop(self._reopen)[1])
            if worker is not None and worker.closed == "prefill_full":
                worker.reopens_at_ns = 0
                self.judge(worker, now_ns)
        if self._age_at_ns is None or now_ns < self._age_at_ns:
            return ()
        self._age_at_ns = None
        lost: list[Worker] = []
        for worker in self.workers.values():
            silent_ns = now_ns - worker.heard_at_ns
            if silent_ns >= self._lost_after_ns:
                lost.append(worker)
                continue
            if silent_ns >= self._stale_after_ns:
                if not worker.stale:
                    worker.stale = True
                    self.stale_changes += 1
                    self.judge(worker, now_ns)
                self._age_by(worker.heard_at_ns + self._lost_after_ns)
            else:
                self._age_by(worker.heard_at_ns + self._stale_after_ns)
        return tuple(lost)

    def closed_counts(self) -> tuple[tuple[str, int], ...]:
        """How many workers have no room, by reason, sorted by reason."""
        if self._closed_sorted is None:
            self._closed_sorted = tuple(sorted(self._closed_counts.items()))
        return self._closed_sorted

    def next_change_ns(self, waiting: bool) -> int | None:
        """When ``pass_time`` next has something to do; prefill matters only while something waits."""
        at_ns = self._age_at_ns
        if waiting and self._reopen and (at_ns is None or self._reopen[0][0] < at_ns):
            at_ns = self._reopen[0][0]
        return at_ns

    def is_engine_full(self, worker: Worker) -> bool:
        """Does its engine say that its KV is full, as last heard?"""
        load, full = worker.load, self._engine_full_fraction
        if load is None or full <= 0.0:
            return False
        return load.kv_used_fraction >= (full * NEARLY_FULL_PART if load.waiting > 0 else full)

    def _age_by(self, at_ns: int) -> None:
        if self._age_at_ns is None or at_ns < self._age_at_ns:
            self._age_at_ns = at_ns

    def _set_closed(self, worker: Worker, reason: str | None, now_ns: int) -> None:
        if worker.closed == reason:
            return
        worker.note_open(reason is None, now_ns)
        self._closed_sorted = None
        if worker.closed is not None:
            left = self._closed_counts[worker.closed] - 1
            if left:
                self._closed_counts[worker.closed] = left
            else:
                del self._closed_counts[worker.closed]
        worker.closed = reason
        if reason is None:
            self.open[worker.spec.worker_id] = worker
        else:
            self._closed_counts[reason] = self._closed_counts.get(reason, 0) + 1
            self.open.pop(worker.spec.worker_id, None)
