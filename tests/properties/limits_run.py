"""Seeded runs of a pool under limits per minute, and a book of them that is kept from inputs and effects alone.

The book counts in another way than the core: not levels that rise, but the time at which a bucket will be full
(virtual scheduling), in fractions of a nanosecond. At each step both must agree on every bucket to the nanosecond,
on who is admitted, and on the wait that a refusal tells.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

from evenhand.core.cache_map import CacheMap
from evenhand.core.facts import (
    LegOutcome,
    OutputEstimatorKind,
    RateLimits,
    RefusalReason,
    Request,
    SchedulerConfig,
    TenantSpec,
    Ticket,
    Usage,
    WorkerSpec,
)
from evenhand.core.ids import Epoch, PoolId, RequestId, TenantId, WorkerId
from evenhand.core.presence import Presence
from evenhand.core.scheduler import PoolScheduler
from evenhand.core.steps import (
    Cancel,
    Effect,
    Granted,
    Input,
    LegEnded,
    Refused,
    Renew,
    Settle,
    Submit,
    TenantChanged,
    Tick,
    WorkerGone,
    WorkerJoined,
)

POOL = PoolId("p")
TENANT = TenantId("a")
USERS = ("", "u", "v", "w")
MINUTE_NS = 60 * 10**9
MS = 10**6


@dataclass
class Meter:
    """One limit in the book: when each of its buckets will be full."""

    name: str
    per_minute: int
    burst: int
    full_at: dict[str, Fraction] = field(default_factory=dict)

    def key(self, user: str) -> str:
        return user if self.name.startswith("user") else ""

    def amount(self, tokens: int) -> int:
        return tokens if "tokens" in self.name else 1

    @property
    def each(self) -> Fraction:
        """Nanoseconds of one request or token."""
        return Fraction(MINUTE_NS, self.per_minute)

    def level(self, user: str, now_ns: int) -> Fraction:
        full_at = self.full_at.get(self.key(user), Fraction(0))
        return self.burst - max(Fraction(0), full_at - now_ns) / self.each

    def wait_ns(self, user: str, tokens: int, now_ns: int) -> int:
        needed = min(self.amount(tokens), self.burst)
        return math.ceil(max(Fraction(0), (needed - self.level(user, now_ns)) * self.each))

    def add(self, user: str, amount: int, now_ns: int) -> None:
        full_at = max(Fraction(now_ns), self.full_at.get(self.key(user), Fraction(0)))
        self.full_at[self.key(user)] = max(Fraction(now_ns), full_at - amount * self.each)

    def change(self, per_minute: int, burst: int, now_ns: int) -> None:
        levels = {user: min(Fraction(burst), self.level(user, now_ns)) for user in USERS}
        self.per_minute, self.burst = per_minute, burst
        self.full_at = {self.key(user): now_ns + (burst - level) * self.each for user, level in levels.items()}


@dataclass
class Taken:
    user: str
    tokens: int
    meters: list[Meter]


class Book:
    """What must be left in each bucket, from inputs and effects."""

    def __init__(self) -> None:
        self.meters: list[Meter] = []
        self.open: dict[RequestId, Taken] = {}

    def change(self, spec: TenantSpec, now_ns: int) -> None:
        known = {meter.name: meter for meter in self.meters}
        self.meters = []
        for scope, limits in (("tenant", spec.rate_limits), ("user", spec.user_rate_limits)):
            for kind in ("requests", "tokens"):
                per_minute = getattr(limits, f"{kind}_per_minute")
                burst = getattr(limits, f"{kind}_burst") or max(1, per_minute // 60)
                name = f"{scope}_{kind}_per_minute"
                if not per_minute:
                    continue
                meter = known.get(name)
                if meter is None:
                    meter = Meter(name, per_minute, burst)
                else:
                    meter.change(per_minute, burst, now_ns)
                self.meters.append(meter)

    def wait_ns(self, user: str, tokens: int, now_ns: int) -> int:
        return max((meter.wait_ns(user, tokens, now_ns) for meter in self.meters), default=0)

    def take(self, request: Request, tokens: int, now_ns: int) -> None:
        self.open[request.request_id] = Taken(request.user, tokens, list(self.meters))
        for meter in self.meters:
            meter.add(request.user, -meter.amount(tokens), now_ns)

    def settle(self, request_id: RequestId, tokens: int, now_ns: int) -> None:
        taken = self.open[request_id]
        for meter in taken.meters:
            if "tokens" in meter.name:
                meter.add(taken.user, taken.tokens - tokens, now_ns)
        taken.tokens = tokens

    def end(self, request_id: RequestId, tokens: int | None, whole: bool, now_ns: int) -> None:
        """The request is over; ``whole``: the request itself comes back too."""
        if tokens is not None:
            self.settle(request_id, tokens, now_ns)
        taken = self.open.pop(request_id)
        for meter in taken.meters:
            if whole and "requests" in meter.name:
                meter.add(taken.user, 1, now_ns)


class LimitsRun:
    """One tenant, a small pool, and everything that can become of a request."""

    def __init__(self, seed: int, steps: int = 250) -> None:
        self.rng = random.Random(seed)
        self.seed = seed
        self.steps = steps
        self.book = Book()
        self.now_ns = self.rng.randrange(10**12)
        self.term = 1
        self.count = 0
        self.requests: dict[RequestId, Request] = {}
        self.tickets: dict[RequestId, Ticket] = {}
        self.lost: list[Ticket] = []
        self.config = SchedulerConfig(
            POOL,
            ticket_ttl_ms=4_000,
            ticket_confirm_ms=4_000,
            worker_stale_after_ms=10**9,
            worker_lost_after_ms=10**9,
            legs_max=2,
            output_estimator=OutputEstimatorKind.ZERO,  # what is taken is what the client says
        )
        self.spec = TenantSpec(TENANT, queue_length_max=6)
        self.scheduler = PoolScheduler(self.config, Presence(CacheMap()), self.term)
        self.admitted = self.limited = 0

    def run(self) -> None:
        try:
            self.change()
            self.join()
            for _ in range(self.steps):
                self.pass_time()
                self.one_step()
            self.drain()
        except AssertionError as fault:
            raise AssertionError(f"seed {self.seed}: {fault}") from fault

    def one_step(self) -> None:
        draw = self.rng.random()
        if draw < 0.5:
            self.submit()
        elif draw < 0.72:
            self.settle()
        elif draw < 0.8:
            self.cancel()
        elif draw < 0.88:
            self.renew()
        elif draw < 0.94:
            self.change()
        elif draw < 0.955:
            self.step(WorkerGone(WorkerId(self.rng.choice("xy")), "gone"))
        elif draw < 0.97:
            self.join()
        else:
            self.restart()

    def pass_time(self) -> None:
        self.now_ns += self.rng.choice([0, 1, self.rng.randrange(10**8), self.rng.randrange(3 * 10**9)])
        self.step(Tick())

    # What is done

    def submit(self) -> None:
        rng = self.rng
        if self.book.open and rng.random() < 0.15:
            again = self.requests[rng.choice(sorted(self.book.open))]
            self.step(Submit(again))
            return
        self.count += 1
        output_max = rng.choice([1, 20, 400])
        request = Request(
            RequestId(f"r{self.count}"),
            TENANT,
            (),
            rng.choice([1, 30, 300, 3_000]),
            output_max,
            rng.randrange(output_max + 30),
            deadline_ns=self.now_ns + rng.randrange(3 * 10**9) if rng.random() < 0.3 else None,
            user=rng.choice(USERS),
        )
        tokens = request.prompt_tokens + max(1, min(request.output_tokens_expected or 0, output_max))
        wait_ns = self.book.wait_ns(request.user, tokens, self.now_ns)
        effects = self.scheduler.step(Submit(request), self.now_ns)
        mine = [each for each in effects if isinstance(each, Refused) and each.request_id == request.request_id]
        if mine and mine[0].refusal.reason is RefusalReason.RATE_LIMITED:
            assert wait_ns > 0, f"{request} is refused and there is enough"
            assert mine[0].refusal.retry_after_ms == -(-wait_ns // MS), (
                f"{mine[0].refusal} and the wait is {wait_ns} ns"
            )
            self.limited += 1
        elif not mine:
            assert wait_ns == 0, f"{request} is admitted {wait_ns} ns too early"
            self.admitted += 1
            self.requests[request.request_id] = request
            self.book.take(request, tokens, self.now_ns)
        self.hear([each for each in effects if each not in mine])
        self.compare()

    def settle(self) -> None:
        rng = self.rng
        if self.lost and rng.random() < 0.1:
            self.step(Settle(self.lost.pop().ticket_id, Usage(1, 0, 1)))
        elif self.tickets:
            ticket = self.tickets[rng.choice(sorted(self.tickets))]
            outcome = rng.choice([LegOutcome.SETTLED] * 4 + [LegOutcome.CANCELLED, LegOutcome.WORKER_LOST])
            usage = Usage(ticket.prompt_tokens, 0, rng.randrange(500)) if rng.random() < 0.8 else None
            self.step(Settle(ticket.ticket_id, usage, outcome))

    def cancel(self) -> None:
        if self.book.open:
            usage = Usage(1, 0, 3) if self.rng.random() < 0.3 else None
            self.step(Cancel(TENANT, RequestId(self.rng.choice(sorted(self.book.open))), usage))

    def renew(self) -> None:
        if self.tickets:
            ticket = self.tickets[self.rng.choice(sorted(self.tickets))]
            output_tokens = self.rng.randrange(1 + ticket.output_tokens_max)
            used = ticket.prompt_tokens + output_tokens
            if used > self.book.open[ticket.request_id].tokens:
                self.book.settle(ticket.request_id, used, self.now_ns)
            self.step(Renew(ticket.ticket_id, Usage(ticket.prompt_tokens, 0, output_tokens)))

    def change(self) -> None:
        rng = self.rng

        def limits() -> RateLimits:
            return RateLimits(
                rng.choice([0, 0, 10, 97, 1_200]),
                rng.choice([0, 1, 5]),
                rng.choice([0, 0, 599, 60_000, 1_000_003]),
                rng.choice([0, 1, 3_500, 50_000]),
            )

        self.spec = replace(self.spec, rate_limits=limits(), user_rate_limits=limits())
        self.book.change(self.spec, self.now_ns)
        self.step(TenantChanged(self.spec))

    def join(self) -> None:
        for name in "xy":
            self.step(WorkerJoined(WorkerSpec(WorkerId(name), POOL, "http://w", Epoch(self.count), 2, 10_000, 16)))

    def restart(self) -> None:
        """Another term takes over on another clock; what waited is gone, and charged anew if it comes back."""
        checkpoint = self.scheduler.checkpoint(self.now_ns)
        self.term += 1
        self.scheduler = PoolScheduler(self.config, Presence(CacheMap()), self.term)
        elapsed_ns = self.rng.randrange(10**9)
        clock_ns = self.rng.randrange(10**12)
        for request_id in sorted(self.book.open.keys() - self.tickets.keys()):
            self.book.end(request_id, 0, True, self.now_ns)
        shift = clock_ns - elapsed_ns - self.now_ns
        meters = {id(meter): meter for taken in self.book.open.values() for meter in taken.meters}
        for meter in (meters | {id(meter): meter for meter in self.book.meters}).values():
            meter.full_at = {key: full_at + shift for key, full_at in meter.full_at.items()}
        self.now_ns = clock_ns
        self.lost.clear()
        self.scheduler.restore(checkpoint, clock_ns, elapsed_ns)
        self.compare()
        self.join()

    def drain(self) -> None:
        self.step(WorkerGone(WorkerId("x"), "gone"))
        self.step(WorkerGone(WorkerId("y"), "gone"))
        assert not self.book.open, "requests are open in the book and not in the pool"
        limits = self.scheduler._legs.limits
        assert limits.open_count == 0, "charges are left over"
        self.now_ns += 10**16
        self.step(Tick())
        for limit in limits.of(TENANT):
            limit.move("nobody", 0, self.now_ns)
            assert len(limit) <= (0 if limit.per_user else 1), "buckets are left over"

    # What is seen

    def step(self, input: Input) -> None:
        self.hear(self.scheduler.step(input, self.now_ns), input)
        self.compare()

    def hear(self, effects: Sequence[Effect], input: Input | None = None) -> None:
        for effect in effects:
            match effect:
                case Granted(ticket):
                    self.tickets[ticket.request_id] = ticket
                case LegEnded(ticket, outcome):
                    del self.tickets[ticket.request_id]
                    if outcome is LegOutcome.WORKER_LOST:
                        self.lost.append(ticket)
                    if effect.request_continues:
                        continue
                    used = effect.usage.tokens if effect.usage is not None else None
                    is_lost = outcome is LegOutcome.WORKER_LOST
                    self.book.end(ticket.request_id, 0 if is_lost else used, is_lost, self.now_ns)
                case Refused(request_id=request_id) if request_id in self.book.open:
                    reason = effect.refusal.reason
                    assert reason in (RefusalReason.CANCELLED, RefusalReason.DEADLINE, RefusalReason.NO_WORKER)
                    is_late = isinstance(input, Settle)
                    whole = reason is RefusalReason.NO_WORKER
                    self.book.end(request_id, None if is_late else 0, whole, self.now_ns)
                case _:
                    pass

    def compare(self) -> None:
        limits = self.scheduler._legs.limits
        mine = {meter.name: meter for meter in self.book.meters}
        assert [limit.name for limit in limits.of(TENANT)] == list(mine)
        assert limits.open_count <= len(self.book.open)
        for limit in limits.of(TENANT):
            meter = mine[limit.name]
            for user in USERS:
                key = meter.key(user)
                level = meter.level(user, self.now_ns)
                assert limit.remaining(key, self.now_ns) == math.floor(level), (limit.name, user, float(level))
                full_ns = math.ceil(max(Fraction(0), (meter.burst - level) * meter.each))
                assert limit.wait_ns(key, limit.burst, self.now_ns) == full_ns, (limit.name, user, full_ns)
