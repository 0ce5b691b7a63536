"""In which order an engine admits what waits. The one place where an engine's own policy sits.

``Fcfs`` is vLLM's default. ``LongestPrefixFirst`` is what cache-aware engines do (SGLang's default among
them), and starves whoever has nothing cached; it is here so that a simulation can show that, and it is the
base other orders (deficit-weighted longest prefix) can be put on.

An order answers one question, ``head``: which request to try next. The engine tries only that one; if it
does not fit, admission ends for this step. Preempted requests come back through ``requeue`` and go first.

Holds always: a request pushed or requeued is offered until it is removed.
"""

from collections import OrderedDict, deque
from typing import Protocol

from evenhand.engine.block_pool import BlockPool
from evenhand.engine.request import EngineRequest


class WaitingOrder(Protocol):
    """The waiting requests of one engine."""

    def push(self, request: EngineRequest) -> None:
        """Queue an arrival."""

    def requeue(self, request: EngineRequest) -> None:
        """Queue a preempted request, before everything else."""

    def head(self, pool: BlockPool) -> EngineRequest | None:
        """The request to try next, left in place; None if none waits. ``pool`` is only read."""

    def remove(self, request: EngineRequest) -> None:
        """Take out a queued request: it was admitted or cancelled."""

    def __len__(self) -> int:
        """Requests queued."""


class Fcfs:
    """First come, first served."""

    __slots__ = ("_queue",)

    def __init__(self) -> None:
        self._queue: OrderedDict[str, EngineRequest] = OrderedDict()

    def push(self, request: EngineRequest) -> None:
        self._queue[request.request_id] = request

    def requeue(self, request: EngineRequest) -> None:
        self._queue[request.request_id] = request
        self._queue.move_to_end(request.request_id, last=False)

    def head(self, pool: BlockPool) -> EngineRequest | None:
        for request in self._queue.values():
            return request
        return None

    def remove(self, request: EngineRequest) -> None:
        del self._queue[request.request_id]

    def __len__(self) -> int:
        return len(self._queue)


class LongestPrefixFirst:
    """Most cached blocks first; ties by arrival. Only the first ``scanned_max`` arrivals are compared."""

    __slots__ = ("_arrivals", "_preempted", "scanned_max")

    def __init__(self, scanned_max: int = 256) -> None:
        self.scanned_max = scanned_max
        self._preempted: deque[EngineRequest] = deque()
        self._arrivals: OrderedDict[str, EngineRequest] = OrderedDict()

    def push(self, request: EngineRequest) -> None:
        self._arrivals[request.request_id] = request

    def requeue(self, request: EngineRequest) -> None:
        self._preempted.appendleft(request)

    def head(self, pool: BlockPool) -> EngineRequest | None:
        if self._preempted:
            return self._preempted[0]
        best: EngineRequest | None = None
        best_blocks = -1
        for scanned, request in enumerate(self._arrivals.values()):
            if scanned == self.scanned_max:
                break
            usable = min(
                request.content.nameable_blocks, (request.prompt_tokens - 1) // request.content.block_size
            )
            blocks = len(pool.match(request.content.names(usable), usable))
            if blocks > best_blocks:
                best, best_blocks = request, blocks
        return best

    def remove(self, request: EngineRequest) -> None:
        if self._arrivals.pop(request.request_id, None) is None:
            self._preempted.remove(request)

    def __len__(self) -> int:
        return len(self._arrivals) + len(self._preempted)
