"""Wishes to worker edges, published on the control topic: bounded in number, bounded in rate.

Snapshot requests, epoch floors and refutations are idempotent, and the state service asks for the first two as
well, so a wish that is dropped because too many wait, or because the broker is away, is made again by what caused
it. The queue keeps one wish of a kind for a worker, the latest; refutations are all different and are all kept.
"""

import asyncio
from typing import assert_never

from evenhand.core.errors import Unavailable
from evenhand.core.kv import ControlMessage, EpochFloor, KeysRefuted, SnapshotRequested
from evenhand.ports import CONTROL_TOPIC, LogWriter
from evenhand.scheduler.metrics import SchedulerMetrics
from evenhand.wire.kv_codec import encode_control_message

CONTROL_PENDING_MAX = 1_024
CONTROL_INTERVAL_S = 0.005
"""At least this long between two wishes: 200 a second."""


class ControlPublisher:
    """Queues wishes without waiting; one task publishes them."""

    def __init__(self, writer: LogWriter, metrics: SchedulerMetrics) -> None:
        self._writer = writer
        self._metrics = metrics
        self._pending: dict[object, ControlMessage] = {}
        self._arrived = asyncio.Event()
        self._refutations = 0

    def wish(self, message: ControlMessage) -> None:
        """Publish soon; the oldest waiting wish gives way where too many wait."""
        key: object
        match message:
            case SnapshotRequested(worker_id=worker_id):
                key = ("snapshot", worker_id)
            case EpochFloor(worker_id=worker_id):
                key = ("floor", worker_id)
            case KeysRefuted():
                self._refutations += 1
                key = self._refutations
            case _:
                assert_never(message)
        self._pending.pop(key, None)
        if len(self._pending) >= CONTROL_PENDING_MAX:
            del self._pending[next(iter(self._pending))]
            self._metrics.control.add("dropped")
        self._pending[key] = message
        self._arrived.set()

    async def run(self) -> None:
        """Publish until cancelled."""
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            while self._pending:
                message = self._pending.pop(next(iter(self._pending)))
                try:
                    await self._writer.publish(
                        CONTROL_TOPIC, message.worker_id.encode(), encode_control_message(message)
                    )
                except Unavailable:
                    self._metrics.control.add("failed")
                else:
                    self._metrics.control.add("published")
                await asyncio.sleep(CONTROL_INTERVAL_S)
