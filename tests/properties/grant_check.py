"""What must hold at a grant: P1 at each level, a guarantee that was due, the order among a user's own, room."""

from collections.abc import Callable

from tests.properties.broken import SLACK, at_most, demand
from tests.properties.clock_nodes import Node, Span
from tests.properties.held_up import HeldUpCheck
from tests.properties.standing import Standing
from tests.properties.tenant_book import Book, Line, Place, Waiting

from evenhand.core.facts import Decision, Ticket


class GrantCheck:
    def __init__(self, standing: Standing, held_up: Callable[[], HeldUpCheck]) -> None:
        self.standing = standing
        self._held_up = held_up

    def spans(self, line: Line, place: Place, ticket: Ticket, decision: Decision) -> tuple[tuple[Node, Span], ...]:
        """P1 at each level; the leg's share of each clock, unless a guarantee pays."""
        book = line.book
        nodes = (book.band.node, book.node, line.node)
        for node in nodes:
            demand(bool(node.reach & place.bit), "A", "{} ran on {} outside F", node.key, ticket.worker_id)
        windows = self.standing.windows(book)
        for node, window, level in zip(nodes, windows, decision.levels, strict=True):
            demand(
                at_most(abs(window - level.window), 0.0), "P1", "T is told as {}, it is {}", level.window, window
            )
            if self.standing.exact:
                right = at_most(abs(level.virtual_time - node.v), 0.0)
                demand(right, "clock", "v of {} was {}, by the book {}", node.key, level.virtual_time, node.v)
            elif node.newly:
                node.siblings.follow(node, level.virtual_time)
                node.base, node.newly = level.virtual_time, 0
        if ticket.guaranteed:
            self._guaranteed(line, place.bit, windows)
            self._held_up().demand_users_held_up(line, place, ticket, windows[2])
            return ()
        lows = [level.lo for level in decision.levels]
        if ticket.backfilled:
            self._held_up().demand_held_up(line, place, ticket, windows)
            for index, (node, window) in enumerate(zip(nodes, windows, strict=True)):
                node.siblings.lift_behind(place.bit, node.v - window)
                lows[index] = max(lows[index], node.v - window)
        weights = (ticket.band_weight, ticket.weight, ticket.user_weight)
        spans = []
        for node, window, weight, lo in zip(nodes, windows, weights, lows, strict=True):
            spans.append((node, node.siblings.dispatched(node, place.bit, window, ticket.charge, weight, lo)))
        return tuple(spans)

    def _guaranteed(self, line: Line, worker: int, windows: tuple[float, float, float]) -> None:
        """A guarantee gave the place: it was due, and it was needed."""
        book = line.book
        demand(self.standing.guaranteed_share(book) > 0.0, "guarantee", "{} has none", book.spec.tenant_id)
        due = book.guarantee.is_due(self.standing.work, SLACK)
        ahead = book.guarantee.tag - self.standing.work
        demand(due, "guarantee", "{} had got what it was guaranteed, and {} more", book.spec.tenant_id, ahead)
        nodes = (book.band.node, book.node, line.node)
        reach = [node.siblings.lo(worker) + window for node, window in zip(nodes, windows, strict=True)]
        if self.standing.exact:
            is_inside = all(
                node.v < far and at_most(node.v, far) for node, far in zip(nodes[:2], reach, strict=False)
            )
            demand(not is_inside, "guarantee", "{} had its turn: its clocks pay", book.spec.tenant_id)

    def order(self, line: Line, waiting: Waiting, ticket: Ticket) -> None:
        """Among the first H, and not past one that was overtaken often enough."""
        heads = line.queue[: self.standing.config.requests_considered_max]
        waiting.waits_since_ns, waiting.waits_ns_max = None, 0
        demand(waiting in heads, "H", "{} is not among the first H", ticket.request_id)
        if heads[0].passed >= self.standing.config.overtakes_max:
            demand(waiting is heads[0], "overtaken", "a head that was overtaken often enough was overtaken again")
        if ticket.leg == 1:
            for before in heads[: heads.index(waiting)]:
                before.passed += 1

    def room(self, book: Book, place: Place, kv_blocks: int) -> None:
        """A slot and KV are free, and the last eighth goes to tenants below their share."""
        full = place.is_engine_full(self.standing.config.engine_full_fraction)
        demand(not full, "engine", "{} has said that it is full", place.spec.worker_id)
        spec = place.spec
        demand(len(place.legs) < spec.slots, "room", "{} has no slot left", spec.worker_id)
        demand(place.kv_blocks + kv_blocks <= spec.kv_blocks, "room", "{} has no KV left", spec.worker_id)
        if self.standing.in_headroom(place, kv_blocks):
            is_due = bool(book.spec.guaranteed_share) and book.guarantee.is_due(self.standing.work, SLACK)
            demand(
                is_due or self.standing.below_share(book, 1.0 + SLACK),
                "headroom",
                f"{book.spec.tenant_id} took headroom of {spec.worker_id} above its share",
            )
