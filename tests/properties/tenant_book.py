"""What an oracle's own book holds of a pool: requests, workers, legs, bands, users and tenants."""

from dataclasses import dataclass

from tests.properties.clock_book import Siblings
from tests.properties.clock_nodes import Node, Span
from tests.properties.guarantee_book import GuaranteeBook

from evenhand.core.facts import Request, TenantSpec, TenantState, Ticket, WorkerLoad, WorkerSpec
from evenhand.core.ids import RequestId, TenantId, TicketId, WorkerId


class Waiting:
    """An admitted request, from its admission to its one outcome."""

    __slots__ = (
        "age",
        "estimate",
        "excluded",
        "passed",
        "request",
        "tokens_total",
        "waits_ns_max",
        "waits_since_ns",
        "was_kept_for",
    )

    def __init__(self, request: Request, age: int, estimate: int) -> None:
        self.request = request
        self.age = age
        self.estimate = estimate
        self.passed = 0
        """Times it was overtaken by its own tenant's."""
        self.excluded: tuple[WorkerId, ...] = request.excluded_workers
        self.tokens_total = request.prompt_tokens + request.output_tokens_max
        self.waits_since_ns: int | None = None
        """Since when it was seen to wait for a warmer worker beside an idle one; None: it was not."""
        self.waits_ns_max = 0
        """The longest that it was seen to be allowed to."""
        self.was_kept_for = False
        """A worker was kept for it."""


class Place:
    """A worker, and what the oracle knows to be reserved there."""

    __slots__ = ("bit", "draining", "kv_blocks", "legs", "load", "served", "spec")

    def __init__(self, spec: WorkerSpec, bit: int) -> None:
        self.spec = spec
        self.bit = bit
        self.draining = False
        self.legs: dict[TicketId, Leg] = {}
        self.kv_blocks = 0
        self.served: list[TenantId] = []
        """Distinct tenants served there, the latest last."""
        self.load: WorkerLoad | None = None
        """What its engine said last."""

    def is_engine_full(self, full_fraction: float) -> bool:
        """So much of its KV is used, or 9/10 of that while something waits there for more; 0: never."""
        load = self.load
        if load is None:
            return False
        return 0.0 < full_fraction <= load.kv_used_fraction / (0.9 if load.waiting else 1.0)


@dataclass(slots=True)
class Leg:
    ticket: Ticket
    waiting: Waiting
    line: "Line"
    booked: float
    """Cost on the clocks, or on the guarantee, now."""
    kv_blocks: int
    spans: tuple[tuple[Node, Span], ...]
    """On the clocks of its band, its tenant and its user; none where a guarantee pays."""
    guarantee_share: float
    """By which its cost moves its tenant's tag; 0: it does not."""
    tag_moved: float
    """How far it has."""
    ended: bool = False


class Band:
    """A band, and the tenants side by side in it."""

    __slots__ = ("node", "tenants")

    def __init__(self, name: str, weight: float, bands: Siblings) -> None:
        self.node = Node(name, weight, bands)
        self.tenants = Siblings(bands.moment, bands.exact, members=bands.members)


class Line:
    """One user of a tenant, and what of it waits."""

    __slots__ = ("book", "legs_open", "name", "node", "queue")

    def __init__(self, name: str, weight: float, book: "Book") -> None:
        self.name = name
        self.book = book
        self.node = Node(name, weight, book.users)
        self.queue: list[Waiting] = []
        self.legs_open = 0


class Book:
    """One tenant, as the oracle knows it."""

    __slots__ = (
        "admitted",
        "backfilled_cost",
        "band",
        "guarantee",
        "guaranteed_cost",
        "idle_cost",
        "legs",
        "lines",
        "node",
        "outstanding",
        "spec",
        "true_cost",
        "users",
        "waiting_count",
    )

    def __init__(self, spec: TenantSpec, band: Band) -> None:
        self.spec = spec
        self.band = band
        self.node = Node(spec.tenant_id, spec.weight, band.tenants)
        self.users = Siblings(band.tenants.moment, band.tenants.exact, members=band.tenants.members)
        self.lines: dict[str, Line] = {}
        self.waiting_count = 0
        self.admitted: dict[RequestId, Waiting] = {}
        """Without an outcome yet."""
        self.legs: dict[RequestId, Leg] = {}
        """Open ones."""
        self.outstanding = self.true_cost = self.guaranteed_cost = self.idle_cost = 0.0
        self.backfilled_cost = 0.0
        self.guarantee = GuaranteeBook()

    def line(self, name: str) -> Line:
        line = self.lines.get(name)
        if line is None:
            line = self.lines[name] = Line(name, dict(self.spec.user_weights).get(name, 1.0), self)
        return line

    @property
    def may_run(self) -> bool:
        """Something waits, and the tenant is inside its own limits."""
        limit = self.spec.concurrency_max
        if not self.waiting_count or self.spec.state is TenantState.SUSPENDED:
            return False
        return limit == 0 or len(self.legs) < limit


def could_run(waiting: "Waiting", spec: WorkerSpec) -> bool:
    """Could the worker ever run it, empty as it may be?"""
    tokens = waiting.tokens_total
    longest = spec.model_length_max_tokens or tokens
    return tokens <= min(longest, spec.kv_blocks * spec.block_size_tokens)
