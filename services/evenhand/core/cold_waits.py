"""How long what is declined waits for a warmer worker, and who waits beside an idle one.

A request waits for as long as that may be the cheaper way (``Fitting.cold_wait_ns``), counted from when it was
first declined, or from when its user began to wait, if that was before: so a user whose requests all come to the
one warm worker in time, one after another, has another worker warmed all the same. A user waits beside an idle
worker while each look finds it waiting there; from ``window_delay_ms`` on it may be passed anywhere. The same goes
for whom headroom alone holds back.

One look at what may run is between ``begin`` and ``end``. Written here: since when requests and users wait.
"""

from evenhand.core.estimator import NS_PER_MS
from evenhand.core.facts import SchedulerConfig
from evenhand.core.fitting import Fitting
from evenhand.core.queued import Queued
from evenhand.core.tenant import Tenant, User

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
        self._stuck_since: dict[Tenant, int] = {}
        """Tenants of which each look that asked who is held up has found users to wait, or held back by headroom
        alone; since when. Of tenants, or each further user would delay the others anew."""
        self._barred: dict[User, None] | None = None
        """Those that headroom alone holds back, as of the looks since the last ``begin``; None: none has asked."""

    def begin(self) -> None:
        """Forget what earlier looks found to wait."""
        self.at_ns = NEVER_NS
        self._found = {}
        self._barred = None

    def end(self, now_ns: int) -> None:
        """Nothing more is chosen: who waits beside an idle worker waits since now, or since it began to."""
        for user in self._waiting:
            if user not in self._found:
                user.waits_since_ns = None
        for user in self._found:
            if user.waits_since_ns is None:
                user.waits_since_ns = now_ns
        self._waiting = self._found
        if self._barred is None:
            return
        since = self._stuck_since
        stuck = dict.fromkeys(user.tenant for user in (*self._found, *self._barred))
        self._stuck_since = {tenant: since.get(tenant, now_ns) for tenant in stuck}
        for since_ns in self._stuck_since.values():
            if since_ns + self._long_ns > now_ns:
                self.at_ns = min(self.at_ns, since_ns + self._long_ns)

    def taken_cold(self, user: User) -> None:
        """Something of it that waited is dispatched where its prefix is not: it begins to wait anew."""
        user.waits_since_ns = None
        self._stuck_since.pop(user.tenant, None)

    def note(self, user: User, until_ns: int) -> None:
        """A user is found to wait beside an idle worker, until then at most."""
        self.at_ns = min(self.at_ns, until_ns)
        self._found[user] = None

    def ask_barred(self) -> None:
        """A look is about to ask who is held up."""
        if self._barred is None:
            self._barred = {}

    def note_barred(self, user: User) -> None:
        """Headroom alone holds a user back."""
        if self._barred is not None:
            self._barred[user] = None

    def is_found(self, user: User) -> bool:
        """Has a look since the last ``begin`` found it to wait?"""
        return user in self._found

    def is_brief(self, user: User, now_ns: int) -> bool:
        """Is it found to wait, and may nobody pass it for that yet?"""
        return user in self._found and not self.is_long(user, now_ns)

    def is_long(self, user: User, now_ns: int) -> bool:
        """Has its tenant been stuck beside an idle worker for as long as others may be delayed by affinity?"""
        since_ns = self._stuck_since.get(user.tenant)
        return since_ns is not None and now_ns - since_ns >= self._long_ns

    def until_ns(self, queued: Queued, tokens: int, now_ns: int) -> int:
        """Until when a request that is declined where so many of its tokens are waits for a warmer worker."""
        if queued.declined_since_ns is None:
            queued.declined_since_ns = now_ns
        since_ns, user = queued.declined_since_ns, queued.user
        if user is not None and user.waits_since_ns is not None:
            since_ns = min(since_ns, user.waits_since_ns)
        return since_ns + self._fitting.cold_wait_ns(queued, tokens)
