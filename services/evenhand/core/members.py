"""The workers that count in F, shared by every node of the tree of clocks.

A node (pool, band, tenant) asks three things of the fleet: who is a member, what the smallest of them can hold,
and who of an earlier term has not come back yet. They are kept once, here; what each node remembers per worker is
its own (``fair_queue``).

Always: ``capacity_min_tokens`` is the least capacity of all members, 0 without any. One writer, ``FairTree``.
"""

from evenhand.core.ids import WorkerId
from evenhand.core.worker import Worker


class Members:
    """Who counts in F now."""

    __slots__ = ("capacity_min_tokens", "inherited", "partial", "stirred", "version", "workers")

    def __init__(self) -> None:
        self.workers: dict[WorkerId, Worker] = {}
        self.capacity_min_tokens = 0
        self.inherited: dict[WorkerId, None] = {}
        """Members of an earlier term that have not joined in this one: their clocks wait for them."""
        self.partial = 0
        """Children in A of all nodes together that do not reach every member."""
        self.version = 0
        """Grows with each change of who is a member, and of what a member can hold."""
        self.stirred = False
        """Something changed that may let someone run; whoever has looked sets it back."""

    def add(self, worker: Worker) -> None:
        """Count a worker in; the nodes are told next."""
        assert not worker.is_member, f"worker {worker.spec.worker_id} joins twice"
        worker.is_member = True
        self.workers[worker.spec.worker_id] = worker
        self._changed()

    def remove(self, worker: Worker) -> None:
        """Count a worker out; the nodes are told next."""
        worker.is_member = False
        del self.workers[worker.spec.worker_id]
        self._changed()

    def _changed(self) -> None:
        capacities = [worker.capacity_tokens for worker in self.workers.values()]
        self.capacity_min_tokens = min(capacities, default=0)
        self.version += 1
        self.stirred = True
