"""What the fold wants workers told, published at a bounded rate.

One wish of a kind a worker waits at a time, the latest; the same wish is not repeated to the same worker within
``REPEAT_SECONDS_MIN``; all together stay under ``MESSAGES_PER_SECOND_MAX``. A log that is away makes wishes wait;
past ``WAITING_MAX`` the oldest is dropped, because the fold wishes again at the worker's next heartbeat.
"""

import asyncio
import contextlib
from collections.abc import Callable

from evenhand.core.errors import Unavailable
from evenhand.core.ids import WorkerId
from evenhand.core.kv import ControlMessage
from evenhand.logs import get_logger
from evenhand.ports import CONTROL_TOPIC, LogWriter
from evenhand.wire.kv_codec import encode_control_message

REPEAT_SECONDS_MIN = 1.0
MESSAGES_PER_SECOND_MAX = 200.0
WAITING_MAX = 10_000
RETRY_SECONDS = 0.5

_log = get_logger("control")

_Wish = tuple[WorkerId, type]


class ControlPublisher:
    """``wish`` from the fold's side; ``run`` publishes until it is cancelled."""

    def __init__(self, writer: LogWriter, published: Callable[[ControlMessage], None]) -> None:
        """``published`` is told of each message that the log took."""
        self._writer = writer
        self._published = published
        self._waiting: dict[_Wish, ControlMessage] = {}
        self._last_at: dict[_Wish, float] = {}
        self._arrived = asyncio.Event()
        self._away = False

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def wish(self, message: ControlMessage) -> None:
        """Publish soon."""
        self._waiting[message.worker_id, type(message)] = message
        if len(self._waiting) > WAITING_MAX:
            del self._waiting[next(iter(self._waiting))]
        self._arrived.set()

    async def run(self) -> None:
        """Publish wishes as they come and may."""
        loop = asyncio.get_running_loop()
        while True:
            self._arrived.clear()
            soonest = await self._publish_due(loop)
            if self._away:
                await asyncio.sleep(RETRY_SECONDS)
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(soonest):
                    await self._arrived.wait()

    async def _publish_due(self, loop: asyncio.AbstractEventLoop) -> float | None:
        """Publish what may go out; when the next of the rest may, None if nothing is left."""
        self._last_at = {wish: at for wish, at in self._last_at.items() if loop.time() - at < REPEAT_SECONDS_MIN}
        soonest: float | None = None
        for wish, message in list(self._waiting.items()):
            due_at = self._last_at.get(wish, float("-inf")) + REPEAT_SECONDS_MIN
            if due_at > loop.time():
                soonest = due_at if soonest is None else min(soonest, due_at)
                continue
            try:
                await self._writer.publish(CONTROL_TOPIC, wish[0].encode(), encode_control_message(message))
            except Unavailable as error:
                self._tell(True, str(error))
                return None
            self._tell(False, "")
            self._last_at[wish] = loop.time()
            self._published(message)
            if self._waiting.get(wish) is message:
                del self._waiting[wish]
            await asyncio.sleep(1 / MESSAGES_PER_SECOND_MAX)
        return soonest

    def _tell(self, away: bool, sentence: str) -> None:
        if away is not self._away:
            self._away = away
            if away:
                _log.warning("control messages wait: the log does not take them", error=sentence)
            else:
                _log.info("control messages are published again")
