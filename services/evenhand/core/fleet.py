"""The workers of a pool: who is here, who takes requests, who is given up.

A worker counts in F of the tenants (a *member*) while it is here, has the role ``BOTH`` and is not draining. It is
known by its id; a later epoch of it ends the legs of the one before, an earlier one is ignored. One that is silent
for too long is first stale (no candidate; its tickets go on) and then lost (its legs end, it is forgotten).
"""

from evenhand.core.facts import (
    WorkerRole,
    WorkerSpec,
)
from evenhand.core.ids import WorkerId
from evenhand.core.legs import Legs
from evenhand.core.requests import Requests
from evenhand.core.steps import (
    Effect,
    WorkerHeard,
)
from evenhand.core.tickets import OpenTicket
from evenhand.core.worker import Worker, capacity_tokens


class Fleet:
    """Joins, leaves, drains and silences of workers."""

    def __init__(self, legs: Legs, requests: Requests) -> None:
        self._legs = legs
        self._requests = requests

    def heard(self, heard: WorkerHeard, now_ns: int) -> None:
        """A worker is alive; one that is not known here has to join first."""
        worker = self._legs.rooms.workers.get(heard.worker_id)
        if worker is not None:
            worker.complete = heard.map_complete
            self._legs.rooms.heard(worker, now_ns)
            self._legs.rooms.told_load(worker, heard.load, now_ns)

    def joined(self, spec: WorkerSpec, now_ns: int, effects: list[Effect]) -> None:
        """A worker is here, or has another spec; the same spec again only says that it is alive."""
        worker = self._legs.rooms.workers.get(spec.worker_id)
        if worker is None:
            if not self._acceptable(spec):
                return
            worker = Worker(
                spec,
                now_ns,
                self._legs.config.prefill_rate_default_tokens_per_s,
                self._legs.config.output_token_default_ms,
            )
            self._legs.presence.worker_joined(spec)
            self._legs.rooms.add(worker, now_ns)
            if spec.role is WorkerRole.BOTH:
                self._legs.fair.join(worker)
            self._workers_changed()
        elif spec == worker.spec or spec.epoch < worker.spec.epoch:
            self._legs.rooms.heard(worker, now_ns)
            return
        else:
            if not self._acceptable(spec):
                return
            self._legs.rooms.heard(worker, now_ns)
            lost: tuple[OpenTicket, ...] = ()
            if spec.epoch > worker.spec.epoch:
                lost = tuple(worker.tickets.values())
                self._legs.rooms.told_load(worker, None, now_ns)
            self._change_spec(worker, spec)
            for held in reversed(lost):
                self._requests.lose_leg(held, now_ns, effects)
            self._requests.refuse_stranded(now_ns, effects)
        for held in self._legs.worker_attached(worker, now_ns):
            self._requests.lose_leg(held, now_ns, effects)

    def _change_spec(self, worker: Worker, spec: WorkerSpec) -> None:
        """Another size or role is another place in F; another epoch alone is not."""
        capacity_before = worker.capacity_tokens if worker.is_member else 0
        takes_requests = spec.role is WorkerRole.BOTH and not worker.draining
        if worker.is_member != takes_requests or capacity_tokens(spec) != capacity_before:
            self._legs.fair.leave(worker)
            worker.change_spec(spec)
            if takes_requests:
                self._legs.fair.join(worker, capacity_before)
        else:
            worker.change_spec(spec)
        self._legs.presence.worker_joined(spec)
        self._workers_changed()

    def _workers_changed(self) -> None:
        """What was worked out per worker no longer holds."""
        self._legs.placement.heads.map_version += 1
        for tenant in self._legs.outstanding.tenants.values():
            tenant.forget_best()

    def _acceptable(self, spec: WorkerSpec) -> bool:
        """A worker that can hold nothing, or with another block size than the pool's, is not taken in."""
        if spec.slots < 1 or spec.kv_blocks < 1 or spec.block_size_tokens < 1:
            return False
        return all(
            other.spec.block_size_tokens == spec.block_size_tokens
            for other in self._legs.rooms.workers.values()
            if other.spec.worker_id != spec.worker_id
        )

    def drained(self, worker_id: WorkerId, draining: bool, now_ns: int, effects: list[Effect]) -> None:
        """Take a worker out of F, or back into it; its tickets go on."""
        worker = self._legs.rooms.workers.get(worker_id)
        if worker is None or worker.draining == draining:
            return
        worker.draining = draining
        self._legs.rooms.judge(worker, now_ns)
        if draining:
            self._legs.fair.leave(worker)
            self._requests.refuse_stranded(now_ns, effects)
        elif worker.spec.role is WorkerRole.BOTH:
            self._legs.fair.join(worker)
        self._workers_changed()

    def lose(self, worker: Worker, now_ns: int, effects: list[Effect]) -> None:
        """Forget a worker; its legs end, and their requests go back to their queues."""
        self._legs.fair.leave(worker)
        worker_id = worker.spec.worker_id
        self._legs.fair.forget(worker_id)
        for held in reversed(tuple(worker.tickets.values())):
            self._requests.lose_leg(held, now_ns, effects)
        self._legs.rooms.drop(worker, now_ns)
        self._legs.presence.worker_gone(worker_id)
        self._workers_changed()
        self._requests.refuse_stranded(now_ns, effects)
