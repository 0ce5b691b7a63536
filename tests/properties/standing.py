"""Who stands where in an oracle's own book: the tree of bands, tenants and users, A, F_i, windows and shares.

F_i is worked out as a set of workers, from what each could ever run. Of the scheduler it takes the rate at which
the pool does its work, which windows and guarantees are parts of.
"""

from collections.abc import Iterator

from tests.properties.clock_book import Siblings
from tests.properties.clock_nodes import Moment, Node
from tests.properties.tenant_book import Band, Book, Leg, Line, Place, Waiting, could_run

from evenhand.core.facts import SchedulerConfig, TenantSpec, WorkerRole, WorkerSpec
from evenhand.core.ids import TenantId, TicketId, WorkerId
from evenhand.core.presence import Presence
from evenhand.core.scheduler import PoolScheduler


class Standing:
    def __init__(
        self, scheduler: PoolScheduler, config: SchedulerConfig, presence: Presence, exact: bool = True
    ) -> None:
        self.config = config
        self.exact = exact
        self.moment = Moment()
        self.pool = Siblings(self.moment, exact)
        self.members = 0
        self.bands = {name: Band(name, weight, self.pool) for name, weight in config.bands}
        self.books: dict[TenantId, Book] = {}
        self.old_bands: list[Siblings] = []
        self.places: dict[WorkerId, Place] = {}
        self.legs: dict[TicketId, Leg] = {}
        self.now_ns = 0
        self.work = 0.0
        """Cost that the pool has delivered so far, by the rate of each time: the clock of all guarantees."""
        self.work_rate_per_s = 0.0
        """The rate since the last step."""
        self.work_rate_most = 0.0
        self._reaches: dict[int, int] = {}
        self._bit_next = 1
        self._bits_known: dict[WorkerId, int] = {}
        self.attach(scheduler, presence)

    def attach(self, scheduler: PoolScheduler, presence: Presence) -> None:
        self.scheduler, self.presence = scheduler, presence
        self.core = scheduler._legs

    def siblings(self) -> Iterator[Siblings]:
        """All nodes' children."""
        yield self.pool
        for band in self.bands.values():
            yield band.tenants
        for book in self.books.values():
            yield book.users

    # What is told

    def tenant_changed(self, spec: TenantSpec) -> None:
        self.moment.now += 1
        book = self.books.get(spec.tenant_id)
        if book is None:
            self.books[spec.tenant_id] = Book(spec, self.bands[spec.band])
            return
        if spec.band != book.spec.band:
            before = book.band
            before.tenants.placed(book.node, 0.0, False, 0)
            self.place_band(before, 0.0)
            book.band = self.bands[spec.band]
            book.node = Node(spec.tenant_id, spec.weight, book.band.tenants)
        share_before = self.guaranteed_share(book)
        weights = dict(spec.user_weights)
        for line in book.lines.values():
            line.node.weight = weights.get(line.name, 1.0)
        book.spec = spec
        share = self.guaranteed_share(book)
        if share_before and share and share != share_before:
            book.guarantee.share_changed(book.legs.values(), share_before / share, self.work)
        book.node.weight = spec.weight
        self.place_tenant(book, 0.0, 0.0)

    def bands_changed(self, bands: tuple[tuple[str, float], ...]) -> None:
        self.moment.now += 1
        wanted = dict(bands)
        for name in tuple(self.bands):
            if name not in wanted:
                self.old_bands.append(self.bands.pop(name).tenants)
        for name, weight in bands:
            band = self.bands.get(name)
            if band is None:
                self.bands[name] = band = Band(name, weight, self.pool)
            band.node.weight = weight

    def joined(self, spec: WorkerSpec) -> None:
        place = self.places.get(spec.worker_id)
        if place is None:
            bit = self._bits_known.get(spec.worker_id, 0)
            if not bit:
                bit = self._bits_known[spec.worker_id] = self._bit_next
                self._bit_next <<= 1
            self.places[spec.worker_id] = place = Place(spec, bit)
            for ticket_id, leg in self.legs.items():
                ticket = leg.ticket
                if not leg.ended and (ticket.worker_id, ticket.epoch) == (spec.worker_id, spec.epoch):
                    place.legs[ticket_id] = leg
                    place.kv_blocks += leg.kv_blocks
        elif spec.epoch < place.spec.epoch:
            return
        elif spec.epoch > place.spec.epoch:
            place.load = None
        place.spec = spec
        self.members_changed()

    def gone(self, worker_id: WorkerId) -> None:
        if self.places.pop(worker_id, None) is not None:
            self._bits_known.pop(worker_id)
            self.members_changed()

    def drain(self, worker_id: WorkerId, draining: bool) -> None:
        place = self.places.get(worker_id)
        if place is not None and place.draining != draining:
            place.draining = draining
            self.members_changed()

    def members_changed(self) -> None:
        self.moment.now += 1
        self._reaches.clear()
        self.members = 0
        for place in self.places.values():
            if not place.draining and place.spec.role is WorkerRole.BOTH:
                self.members |= place.bit
        for siblings in (*self.siblings(), *self.old_bands):
            siblings.members = self.members
        for book in self.books.values():
            lines = book.lines.values()
            book.users.refresh([(line.node, bool(line.queue), self.reach_of(line)) for line in lines])
        for band in self.bands.values():
            changes = []
            for book in self.books.values():
                if book.band is band:
                    reach = 0
                    if book.may_run:
                        for node in book.users.nodes:
                            reach |= node.reach
                    changes.append((book.node, book.may_run, reach))
            band.tenants.refresh(changes)
        changes = []
        for band in self.bands.values():
            nodes = [node for node in band.tenants.nodes if node.in_a]
            reach = 0
            for node in nodes:
                reach |= node.reach
            changes.append((band.node, bool(nodes), reach))
        self.pool.refresh(changes)

    # A and F

    def reach_of(self, line: Line) -> int:
        reach = 0
        for waiting in line.queue[: self.config.requests_considered_max]:
            tokens = waiting.tokens_total
            known = self._reaches.get(tokens)
            if known is None:
                known = 0
                for place in self.places.values():
                    if place.bit & self.members and could_run(waiting, place.spec):
                        known |= place.bit
                self._reaches[tokens] = known
            reach |= known
        return reach

    def place(self, line: Line, by_user: float = 0.0, by_tenant: float = 0.0, by_band: float = 0.0) -> None:
        """Book to a user, its tenant and its band, and put each where it belongs."""
        book = line.book
        book.users.placed(line.node, by_user, bool(line.queue), self.reach_of(line))
        self.place_tenant(book, by_tenant, by_band)

    def place_tenant(self, book: Book, by_tenant: float, by_band: float) -> None:
        in_a = book.may_run
        reach = 0
        if in_a:
            for node in book.users.nodes:
                reach |= node.reach
        book.band.tenants.placed(book.node, by_tenant, in_a, reach)
        self.place_band(book.band, by_band)

    def place_band(self, band: Band, by: float) -> None:
        in_a, reach = False, 0
        for node in band.tenants.nodes:
            if node.in_a:
                in_a = True
                reach |= node.reach
        self.pool.placed(band.node, by, in_a, reach)

    # Windows and shares

    def windows(self, book: Book) -> tuple[float, float, float]:
        """T among bands, among the tenants of the band, among the users of the tenant.

        Fixed, or a time's worth of what the pool's rate leaves to the parent, by the weights of those in A.
        """
        if self.config.window_fixed is not None:
            return (self.config.window_fixed,) * 3
        rate, band = self.core.cost_rate.per_s * self.config.window_delay_ms / 1000.0, book.band
        bands = weight_in_a(self.pool)
        of_band = rate * band.node.weight / (bands if band.node.in_a else bands + band.node.weight)
        tenants = weight_in_a(band.tenants)
        of_tenant = of_band * book.spec.weight / (tenants if book.node.in_a else tenants + book.spec.weight)
        users = weight_in_a(book.users)
        return (
            rate / bands if bands else 0.0,
            of_band / tenants if tenants else 0.0,
            of_tenant / users if users else 0.0,
        )

    def work_to(self, now_ns: int) -> None:
        """Time has passed; the first step begins it."""
        self.work += self.work_rate_per_s * (now_ns - self.now_ns) / 1e9
        self.now_ns = now_ns

    def guaranteed_share(self, book: Book) -> float:
        """A part of the pool's rate, scaled down where all parts are more than may be promised."""
        share, most = book.spec.guaranteed_share, self.config.guaranteed_share_sum_max
        if not share:
            return 0.0
        shares = sum([other.spec.guaranteed_share for other in self.books.values()])
        return share * min(1.0, most / shares)

    def burst(self, rate_per_s: float) -> float:
        """Work of the time for which a guarantee that was not asked for is kept."""
        return rate_per_s * self.config.guarantee_burst_ms / 1_000.0

    def is_excluded(self, waiting: Waiting, place: Place) -> bool:
        """Excluded by name, while another worker could take it some day."""
        return place.spec.worker_id in waiting.excluded and any(
            other.bit & self.members
            and other.spec.worker_id not in waiting.excluded
            and could_run(waiting, other.spec)
            for other in self.places.values()
        )

    def in_headroom(self, place: Place, kv_blocks: int) -> bool:
        spec, part = place.spec, self.config.headroom_divisor
        return (
            len(place.legs) >= spec.slots - spec.slots // part
            or place.kv_blocks + kv_blocks > spec.kv_blocks - spec.kv_blocks // part
        )

    def below_share(self, book: Book, slack: float) -> bool:
        """At equality floats decide; ``slack`` says to which side a check looks away."""
        if not book.legs:
            return True
        active = [other for other in self.books.values() if other.node.in_a or other.legs]
        if len(active) < 2:
            return True
        total = tenants_weight = bands_weight = 0.0
        bands = []
        for other in active:
            total += other.outstanding
            if other.band is book.band:
                tenants_weight += other.spec.weight
            if other.band not in bands:
                bands.append(other.band)
                bands_weight += other.band.node.weight
        share = book.band.node.weight / bands_weight * book.spec.weight / tenants_weight
        return book.outstanding < share * total * slack


def weight_in_a(siblings: Siblings) -> float:
    """Σφ(A)."""
    return sum([node.weight for node in siblings.nodes if node.in_a])
