"""One limit per minute: buckets that refill without steps, in whole numbers, and wait times that are exact.

One request or token is 60·10⁹ units, so a rate per minute refills exactly its number of units each nanosecond, and
nothing is lost or gained by rounding, however often a bucket is looked at::

    level(t) = min(burst, level(t₀) + rate · (t − t₀))
    amount is to be had when  level ≥ min(amount, burst);   taking it:  level −= amount

What is larger than the burst is had from a full bucket and leaves a debt, rather than never.

A bucket that is not kept is as full as any can be (``_rest``); so a full one is dropped without a trace, and users
cost memory only while they have spent something.
"""

import heapq

UNITS = 60_000_000_000
"""Units of one request or token: the nanoseconds of a minute."""

USERS_MAX = 10_000
"""Users of one tenant with buckets that are not full, beyond whom no other is admitted until one is full. What
open requests turn out to have used may add as many as there are open requests."""

FULL_TIMES_MIN = 64
FULL_TIMES_PER_BUCKET_MAX = 4
"""Times kept at which buckets will be full, for each bucket, before outdated ones are swept out."""

TENANT_REQUESTS = "tenant_requests_per_minute"
TENANT_TOKENS = "tenant_tokens_per_minute"
USER_REQUESTS = "user_requests_per_minute"
USER_TOKENS = "user_tokens_per_minute"

WHOLE = ""
"""Key of the one bucket of a limit of the tenant as a whole."""


class Bucket:
    """A level in units as of a time; the time may lie back, for what is not touched refills by itself."""

    __slots__ = ("at_ns", "level")

    def __init__(self, level: int, at_ns: int) -> None:
        self.level = level
        self.at_ns = at_ns


class RateLimit:
    """One limit: a bucket for each key (user), or the one bucket of the tenant."""

    __slots__ = (
        "_buckets",
        "_burst_units",
        "_full_times",
        "_rest",
        "burst",
        "counts_tokens",
        "name",
        "per_minute",
        "per_user",
    )

    def __init__(self, name: str, per_minute: int, burst: int, now_ns: int) -> None:
        self.name = name
        self.counts_tokens = name in (TENANT_TOKENS, USER_TOKENS)
        self.per_user = name in (USER_REQUESTS, USER_TOKENS)
        self.per_minute = per_minute
        self.burst = burst
        self._burst_units = burst * UNITS
        self._rest = Bucket(self._burst_units, now_ns)
        """Every bucket that is not kept."""
        self._buckets: dict[str, Bucket] = {}
        self._full_times: list[tuple[int, str]] = []
        """A heap with at least one time for each user's bucket, at or before which it is not yet full."""

    def __len__(self) -> int:
        return len(self._buckets)

    def remaining(self, key: str, now_ns: int) -> int:
        """Whole requests or tokens left; negative where some are owed."""
        return self._level(self._buckets.get(key, self._rest), now_ns) // UNITS

    def wait_ns(self, key: str, amount: int, now_ns: int) -> int:
        """After how long ``amount`` would be admitted if nothing else were taken; 0: at once."""
        bucket, room_ns = self._buckets.get(key), 0
        if bucket is None:
            bucket = self._rest
            room_ns = self.room_wait_ns(now_ns)
        missing = min(amount * UNITS, self._burst_units) - self._level(bucket, now_ns)
        return max(room_ns, -(-missing // self.per_minute), 0)

    def lacks_room(self, key: str, now_ns: int) -> bool:
        """Is it the number of users alone that keeps this one out?"""
        return key not in self._buckets and self.room_wait_ns(now_ns) > 0

    def room_wait_ns(self, now_ns: int) -> int:
        """After how long one more user can be kept."""
        if len(self._buckets) < USERS_MAX:
            return 0
        self._drop_full(now_ns)
        return self._soonest_full_ns() - now_ns if len(self._buckets) >= USERS_MAX else 0

    def move(self, key: str, amount: int, now_ns: int) -> None:
        """Add ``amount`` requests or tokens to a bucket, up to the burst; or take them (negative), into debt."""
        if self.per_user:
            self._drop_full(now_ns)
        bucket = self._buckets.get(key)
        is_kept = bucket is not None
        if bucket is None:
            bucket = Bucket(self._rest.level, self._rest.at_ns)
        level = self._level(bucket, now_ns)
        bucket.level, bucket.at_ns = min(self._burst_units, level + amount * UNITS), now_ns
        if not is_kept and bucket.level == level:
            return
        self._buckets[key] = bucket
        if self.per_user and (not is_kept or amount > 0):
            self._note_full(key, bucket)

    def change(self, per_minute: int, burst: int, now_ns: int) -> None:
        """Go on with another rate and burst: each level stays, clipped to the burst. O(buckets)."""
        for bucket in (self._rest, *self._buckets.values()):
            bucket.level, bucket.at_ns = min(self._level(bucket, now_ns), burst * UNITS), now_ns
        self.per_minute, self.burst, self._burst_units = per_minute, burst, burst * UNITS
        self._note_all_full()

    def levels(self, now_ns: int) -> dict[str, int]:
        """Units in each bucket that is not full."""
        self._drop_full(now_ns)
        return {key: self._level(bucket, now_ns) for key, bucket in self._buckets.items()}

    def rest_level(self, now_ns: int) -> int:
        """Units in every other one."""
        return self._level(self._rest, now_ns)

    def restore(self, rest: int, levels: dict[str, int], at_ns: int) -> None:
        """Take up levels as they were at a time, which may lie back."""
        self._rest = Bucket(min(rest, self._burst_units), at_ns)
        self._buckets = {key: Bucket(min(level, self._burst_units), at_ns) for key, level in levels.items()}
        self._note_all_full()

    def _level(self, bucket: Bucket, now_ns: int) -> int:
        return min(self._burst_units, bucket.level + self.per_minute * (now_ns - bucket.at_ns))

    def _full_at_ns(self, bucket: Bucket) -> int:
        missing = self._burst_units - bucket.level
        return bucket.at_ns - (-missing // self.per_minute)

    def _dropped_at_ns(self, bucket: Bucket) -> int:
        """When the bucket will be as full as those that are not kept, and they are full themselves."""
        return max(self._full_at_ns(bucket), self._full_at_ns(self._rest))

    def _note_full(self, key: str, bucket: Bucket) -> None:
        heapq.heappush(self._full_times, (self._dropped_at_ns(bucket), key))
        if len(self._full_times) > FULL_TIMES_MIN + FULL_TIMES_PER_BUCKET_MAX * len(self._buckets):
            self._note_all_full()

    def _note_all_full(self) -> None:
        self._full_times = [(self._dropped_at_ns(each), key) for key, each in self._buckets.items()]
        heapq.heapify(self._full_times)

    def _drop_full(self, now_ns: int) -> None:
        """Drop the buckets that are as full as those not kept; the times of the others become right again."""
        while self._full_times and self._full_times[0][0] <= now_ns:
            _, key = heapq.heappop(self._full_times)
            bucket = self._buckets.get(key)
            if bucket is None:
                continue
            if self._dropped_at_ns(bucket) <= now_ns:
                del self._buckets[key]
            else:
                self._note_full(key, bucket)

    def _soonest_full_ns(self) -> int:
        """When the first of the buckets will be full."""
        while True:
            at_ns, key = self._full_times[0]
            bucket = self._buckets.get(key)
            full_at_ns = self._dropped_at_ns(bucket) if bucket is not None else None
            if full_at_ns == at_ns:
                return at_ns
            if full_at_ns is None or full_at_ns < at_ns:  # outdated: there is none, or a sooner time stands below
                heapq.heappop(self._full_times)
            else:
                heapq.heapreplace(self._full_times, (full_at_ns, key))
