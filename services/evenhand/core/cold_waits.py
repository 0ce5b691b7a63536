"""How long what is declined waits for a warmer worker, and who waits beside an idle one.

A request waits for as long as that may be the cheaper way (``Fitting.cold_wait_ns``), counted from when it was
first declined, or from when its user began to wait, if that was before: so a user whose requests all come to the
one warm worker in time, one after another, has another worker warmed all the same. A user waits beside an idle
worker while each look finds it waiting there; from ``window_delay_ms`` on it may be passed anywhere.

One look at what may run is between ``begin`` and ``end``. Written here: since when requests and users wait.
"""

from evenhand.core.estimator import NS_PER_MS
from evenhand.core.facts import SchedulerConfig
from evenhand.core.fitting import Fitting
from evenhand.core.queued import Queued
from evenhand.core.tenant import User

NEVER_NS = 1 << 63


class ColdWaits:
    """Who waits for a warmer worker, since when, and until when."""

    def __init__(self, config: SchedulerConfig, fitting: Fitting) -> None:
        self._fitting = fitting
        self._long_ns = round(config.window_delay_ms * NS_PER_MS)
        self.at_ns = NEVER_NS
        """When the first declined pair may be taken that the looks since the last ``begin`` found to wait; after
        ``end``, or others may pass those that wait."""
        self._waiting: dict[User, None] = {}
        """Users that wait beside an idle worker, as of the last ``end``."""
        self._found: dict[User, None] = {}
        """… as of the looks since the last ``begin``."""

    def begin(self) -> None:
        """Forget what earlier looks found to wait."""
        self.at_ns = NEVER_NS
        self._found = {}

    def end(self, now_ns: int) -> None:
        """Nothing more is chosen: who waits beside an idle worker waits since now, or since it began to."""
        for user in self._waiting:
            if user not in self._found:
                user.waits_since_ns = None
        for user in self._found:
            if user.waits_since_ns is None:
                user.waits_since_ns = now_ns
            if not self.is_long(user, now_ns):
                self.at_ns = min(self.at_ns, user.waits_since_ns + self._long_ns)
        self._waiting = self._found

    def note(self, user: User, until_ns: int) -> None:
        """A user is found to wait beside an idle worker, until then at most."""
        self.at_ns = min(self.at_ns, until_ns)
        self._found[user] = None

    def is_found(self, user: User) -> bool:
        """Has a look since the last ``begin`` found it to wait?"""
        return user in self._found

    def is_brief(self, user: User, now_ns: int) -> bool:
        """Is it found to wait, and may nobody pass it for that yet?"""
        return user in self._found and not self.is_long(user, now_ns)

    def is_long(self, user: User, now_ns: int) -> bool:
        """Has it waited beside an idle worker for as long as others may be delayed by affinity?"""
        since_ns = user.waits_since_ns
        return since_ns is not None and now_ns - since_ns >= self._long_ns

    def until_ns(self, queued: Queued, tokens: int, now_ns: int) -> int:
        """Until when a request that is declined where so many of its tokens are waits for a warmer worker."""
        if queued.declined_since_ns is None:
            queued.declined_since_ns = now_ns
        since_ns, user = queued.declined_since_ns, queued.user
        if user is not None and user.waits_since_ns is not None:
            since_ns = min(since_ns, user.waits_since_ns)
        return since_ns + self._fitting.cold_wait_ns(queued, tokens)
