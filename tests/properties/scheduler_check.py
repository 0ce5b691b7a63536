"""The scheduler's own clocks and counters beside those of an oracle's book, after each step and at the end."""

from tests.properties.broken import SLACK, at_most, demand
from tests.properties.clock_nodes import Node, bits
from tests.properties.standing import Standing
from tests.properties.tenant_book import Line

from evenhand.core.fair_queue import FairChild
from evenhand.core.tenant import Tenant, User


class Comparison:
    def __init__(self, standing: Standing) -> None:
        self.standing = standing
        self._watched: list[tuple[Node, FairChild]] | None = None
        self._users_watched: list[tuple[Tenant, dict[str, User]]] = []

    def watch_again(self) -> None:
        """Nodes came or went."""
        self._watched = None

    def clocks(self) -> None:
        """P5: a clock moves by what is booked, and beyond that only upwards, and only on arrival."""
        if self._watched is None or any(known.users_known is not users for known, users in self._users_watched):
            self._watch()
        assert self._watched is not None
        for node, known in self._watched:
            if known.v != node.v or node.v != node.base or node.newly:
                node.siblings.told(node, known.v)
            if known.in_a is not node.in_a:
                demand(False, "A", "{} in A: {}", node.key, known.in_a)

    def _watch(self) -> None:
        """Find the scheduler's own nodes again."""
        bands = self.standing.core.fair.bands
        self._watched = [(band.node, bands[name]) for name, band in self.standing.bands.items()]
        self._users_watched = []
        for tenant_id, known in self.standing.core.outstanding.tenants.items():
            book = self.standing.books[tenant_id]
            self._watched.append((book.node, known))
            self._users_watched.append((known, known.users_known))
            for name, line in book.lines.items():
                if name in known.users_known:
                    self._watched.append((line.node, known.users_known[name]))
                elif line.node.v:
                    self.forgotten(line)

    def forgotten(self, line: Line) -> None:
        """A user at rest is forgotten only where that forgives it nothing: whoever enters is lifted that far."""
        demand(not line.queue and not line.legs_open, "P7", "user {} was forgotten with something open", line.name)
        times = [line.node.siblings.virtual_times.get(bit, 0.0) for bit in bits(self.standing.members)]
        if self.standing.exact and times:
            demand(at_most(line.node.v, min(times)), "P5", "user {} was forgiven", line.name)
        line.node.v = line.node.base = 0.0

    def counters(self) -> None:
        core, open_legs = self.standing.core, 0
        for worker_id, place in self.standing.places.items():
            worker = core.rooms.workers[worker_id]
            here = len(place.legs)
            if len(worker.tickets) != here or worker.kv_reserved_blocks != place.kv_blocks:
                demand(False, "counters", "{}: {} slots, {} legs; KV too", worker_id, len(worker.tickets), here)
        queued = 0
        for book in self.standing.books.values():
            queued += book.waiting_count
            open_legs += len(book.legs)
        if self.standing.scheduler._requests.queued_total != queued:
            demand(False, "counters", "{} queued, {} wait", self.standing.scheduler._requests.queued_total, queued)
        in_a = sum(len(tenant.queue) for tenant in core.outstanding.tenants.values() if tenant.in_a)
        demand(core.outstanding.queued_in_a == in_a, "counters", "{} of A wait", in_a)
        if len(core.book) != open_legs:
            demand(False, "counters", "{} tickets, {} open legs", len(core.book), open_legs)
        if not open_legs:
            demand(core.outstanding.total == 0.0, "counters", "outstanding cost is not zero")

    def guarantees(self) -> None:
        """Tags, by how far each is ahead of the pool's work."""
        standing = self.standing
        for tenant_id, known in standing.core.outstanding.tenants.items():
            book = standing.books[tenant_id]
            if standing.exact and book.spec.guaranteed_share:
                # Beside the work of the whole run, as far as which the sums of floats reach.
                ahead = standing.work + known.guarantee_tag - standing.core.guarantees.clock
                right = at_most(abs(ahead - book.guarantee.tag), SLACK * standing.work)
                demand(
                    right, "guarantee", "the tag of {} is {}, by the book {}", tenant_id, ahead, book.guarantee.tag
                )

    def drained(self) -> None:
        """Costs are as they were booked, and memory is where it was."""
        standing = self.standing
        for tenant in standing.scheduler.status(0).tenants:
            book = standing.books[tenant.tenant_id]
            demand(not book.waiting_count and not book.legs, "P7", "{} is not drained", tenant.tenant_id)
            demand(
                at_most(abs(tenant.cost_got - book.true_cost), 0.0), "P5", f"{tenant.cost_got} {book.true_cost}"
            )
            guaranteed = standing.core.outstanding.tenants[tenant.tenant_id].cost_guaranteed
            right = at_most(abs(guaranteed - book.guaranteed_cost), 0.0)
            demand(right, "P5", "{} is booked to the guarantee, {} was got", guaranteed, book.guaranteed_cost)
            backfilled = standing.core.outstanding.tenants[tenant.tenant_id].cost_backfilled
            right = at_most(abs(backfilled - book.backfilled_cost), 0.0)
            demand(right, "P5", "{} is told as backfilled, {} was got", backfilled, book.backfilled_cost)
            idled = standing.core.outstanding.tenants[tenant.tenant_id].cost_idled
            demand(
                at_most(abs(idled - book.idle_cost), 0.0), "P5", "{} idled, {} were told", idled, book.idle_cost
            )
            demand(tenant.cost_outstanding == 0.0, "counters", "{} outstanding", tenant.cost_outstanding)
        presumed = standing.presence.ticket_count
        demand(presumed == 0, "presence", "{} tickets still presumed", presumed)
        for worker_id in standing.places:
            assumed = standing.presence.assumed_count(worker_id)
            demand(assumed == 0, "presence", "{} keys of {} still presumed", assumed, worker_id)
