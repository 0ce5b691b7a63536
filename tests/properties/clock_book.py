"""The clocks of siblings in an oracle's own book, and the bounds that must hold among them.

Siblings are the nodes below one parent: tenants side by side, or the users of one tenant. For each the book
keeps what is booked to it, which workers it reaches and since when, and works out its clock by the three-step
refresh in full, by sets of workers. Clocks are compared with the scheduler's after every step (``exact``); for a
scheduler that was broken on purpose the book takes the scheduler's clocks as they are and judges the bounds
alone.

P2, P3 and P4 speak of what estimates got wrong, and that is known only when legs have ended. A gap that stays
within the window and one charge needs no more than that; what goes beyond is kept and judged by ``judge`` at the
end (``clock_bounds``). So a step costs a comparison for each sibling, and only where a clock moved.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from tests.properties.broken import SLACK, at_most, demand
from tests.properties.clock_bounds import Drift, Excess, Gap, judge
from tests.properties.clock_nodes import Anchor, Moment, Node, Span, Stretch, bits


@dataclass(slots=True)
class Pair:
    """Two siblings that both stay in A and reach all: how far their services have been apart, either way."""

    since_first: int
    since_second: int
    service_max: float
    service_min: float
    attained_max: float
    attained_min: float


@dataclass(slots=True)
class Siblings:
    """The nodes below one parent. ``members`` is the set of workers that take requests."""

    moment: Moment
    exact: bool = True
    nodes: list[Node] = field(default_factory=list)
    members: int = 0
    virtual_times: dict[int, float] = field(default_factory=dict)
    """V_w, by the worker's bit."""
    gaps: dict[tuple[int, int], Gap] = field(default_factory=dict)
    judged: list[Gap] = field(default_factory=list)
    excesses: list[Excess] = field(default_factory=list)
    drifts: list[Drift] = field(default_factory=list)
    pairs: dict[tuple[int, int], Pair] = field(default_factory=dict)

    # What is told

    def lo(self, worker: int) -> float:
        """lo_w; infinite where nobody reaches it."""
        return min([node.v for node in self.nodes if node.reach & worker], default=float("inf"))

    def dispatched(
        self, node: Node, worker: int, window: float, charge: float, weight: float, lo_told: float
    ) -> Span:
        """A leg begins inside the window; ``placed`` follows. P1 is asked for here."""
        at = self.moment.now
        lo = self.lo(worker) if len(self.nodes) > 1 else node.v
        if not self.exact and not all(map(self._known, self.nodes)):
            lo = max(lo, lo_told)
        if node.v > lo + window:
            what = f"moment {at}: v of {node.key} {node.v} > lo {lo} + T {window}"
            demand(at_most(node.v, lo + window), "P1", what)
        span = Span(at, charge, weight)
        node.spans.append(span)
        node.stretch = None
        node.anchor = Anchor(at, worker, window, span.charge)
        node.anchored.append(node.anchor)
        for other in self.nodes:
            stretch = other.stretch
            if stretch is not None and other.reach & worker and other is not node and self._known(other):
                span.stretches.append(stretch)
                if len(stretch.booked) <= node.index:
                    stretch.grow(self.nodes)
                index = node.index
                stretch.weight_max[index] = max(stretch.weight_max[index], weight)
                stretch.last[index] = at, window + stretch.v_max + span.charge
                self._got(stretch, node, charge)
        return span

    def lift_behind(self, worker: int, v_least: float) -> None:
        """Whoever of A_w is behind ``v_least`` is passed, and lifted that far; they stay in order."""
        passed = [node for node in self.nodes if node.reach & worker and node.v < v_least]
        passed.sort(key=lambda node: (node.v, node.key))
        v = v_least
        for node in passed:
            if not self._known(node):
                node.newly |= worker
            self.lift(node, v, worker)
            node.base = max(node.base, v)
            v = math.nextafter(v, math.inf)
        if passed:
            self._raise()
        for node in passed:
            self._see(node)

    def moved(self, node: Node, span: Span, by: float, ended: bool) -> None:
        """What a leg is booked has changed by ``by`` (cost ÷ φ); with ``ended`` for the last time."""
        span.booked += by
        if span.booked > span.peak:
            span.peak = span.booked
        if by and span.began != self.moment.now:
            for stretch in span.stretches:
                if stretch.node.stretch is stretch:
                    if by > 0.0:
                        self._got(stretch, node, by * span.weight)
                    else:
                        stretch.booked[node.index] += by * span.weight
        if ended:
            span.ended = self.moment.now
            span.stretches = []
            node.attained += span.booked

    def charged(self, node: Node, by: float) -> None:
        """A node is booked what no leg used; ``placed`` follows. Its clock may stand so much higher."""
        anchor = node.anchor
        node.anchor = anchor._replace(charge=anchor.charge + by)
        node.anchored.append(node.anchor)
        node.attained += by

    def placed(self, node: Node, by: float, in_a: bool, reach: int) -> None:
        """A node's clock is booked ``by``, and it stands where its queue and its limits put it."""
        if by:
            node.v += by
            node.base += by
            node.service += by
        if in_a != node.in_a or reach != node.reach:
            self.refresh([(node, in_a, reach)])
        elif by:
            self._raise()
        if by and len(self.nodes) > 1:
            self._compare(node, by)

    def refresh(self, changes: Iterable[tuple[Node, bool, int]]) -> None:
        """The three steps, after a change of places; changes of clocks are booked already."""
        if len(self.nodes) == 1 and self.exact:
            for node, in_a, reach in changes:
                self._refresh_alone(node, in_a, reach)
            return
        before = [node.reach for node in self.nodes]
        arrived: list[Node] = []
        for node, in_a, reach in changes:
            if in_a and not node.in_a:
                arrived.append(node)
                node.entered = self.moment.now
            if not in_a:
                node.stretch = None
            node.in_a, node.reach = in_a, reach
        virtual_times = self.virtual_times
        if self.exact:
            for bit in bits(self.members):
                stayed = [n.v for n in self.nodes if n.reach & before[n.index] & bit]
                if stayed and min(stayed) > virtual_times.setdefault(bit, 0.0):
                    virtual_times[bit] = min(stayed)
        for node in self.nodes:
            newly = node.reach & ~before[node.index]
            full = node.in_a and node.reach == self.members
            if not full:
                node.full_since = -1
            elif node.full_since < 0:
                node.full_since = self.moment.now
            if not newly:
                continue
            node.newly |= newly
            if self.exact:
                lifted = max([virtual_times.get(bit, 0.0) for bit in bits(newly)])
                if lifted > node.v:
                    self.lift(node, lifted, node.newly)
            arrived.append(node)
        self._raise()
        for node in arrived:
            self._see(node)

    def _refresh_alone(self, node: Node, in_a: bool, reach: int) -> None:
        """The same for an only child: nobody else's clock has a part in it."""
        newly, virtual_times = reach & ~node.reach, self.virtual_times
        if in_a and not node.in_a:
            node.entered = self.moment.now
        if node.reach & reach:
            for bit in bits(node.reach & reach):
                virtual_times[bit] = max(virtual_times.get(bit, 0.0), node.v)
        node.in_a, node.reach, node.stretch = in_a, reach, None
        if not in_a or reach != self.members:
            node.full_since = -1
        elif node.full_since < 0:
            node.full_since = self.moment.now
        if newly:
            node.newly |= newly
            lifted = max([virtual_times.get(bit, 0.0) for bit in bits(newly)])
            if lifted > node.v:
                self.lift(node, lifted, node.newly)
        for bit in bits(reach):
            if node.v > virtual_times.get(bit, 0.0):
                virtual_times[bit] = node.v

    def lift(self, node: Node, v: float, workers: int) -> None:
        """Whoever reaches all of these workers was at that moment, or is lifted later, at least as far."""
        node.v = v
        node.anchor = Anchor(self.moment.now, workers, 0.0, 0.0)
        node.anchored.append(node.anchor)
        if node.full_since >= 0:
            node.full_since = self.moment.now
        if node.stretch is not None and v > node.stretch.v_max:
            node.stretch.v_max = v

    def told(self, node: Node, v: float) -> None:
        """The scheduler's clock of a node at the end of a step."""
        if self.exact:
            demand(at_most(abs(v - node.v), 0.0), "clock", "v of {} is {}, by the book {}", node.key, v, node.v)
        else:
            self.follow(node, v)
        demand(at_most(node.base, v), "P5", "v of {} fell to {}, booked {}", node.key, v, node.base)
        demand(bool(node.newly) or at_most(v, node.base), "P5", "v of {} is {}, booked {}", node.key, v, node.base)
        node.base = v
        node.newly = 0
        if not self.exact:
            self._see(node)

    def follow(self, node: Node, v: float) -> None:
        """Take the clock of a broken scheduler as it is."""
        if v > node.v and not at_most(v, node.v):
            self.lift(node, v, node.newly)
        node.v = v

    # Within

    def _known(self, node: Node) -> bool:
        """Whether its clock stands: lifts by a broken scheduler are known at the end of the step only."""
        return self.exact or not node.newly

    def _raise(self) -> None:
        if not self.exact:
            return
        if len(self.nodes) == 1:
            node = self.nodes[0]
            for bit in bits(node.reach):
                if node.v > self.virtual_times.get(bit, 0.0):
                    self.virtual_times[bit] = node.v
            return
        least: dict[int, float] = {}
        for node in self.nodes:
            reach = node.reach
            if reach and node.v < least.get(reach, 1e300):
                least[reach] = node.v
        virtual_times = self.virtual_times
        if len(least) == 1:
            for reach, v in least.items():
                for bit in bits(reach):
                    if v > virtual_times.get(bit, 0.0):
                        virtual_times[bit] = v
            return
        for bit in bits(self.members):
            lows = [v for reach, v in least.items() if reach & bit]
            if lows and min(lows) > virtual_times.get(bit, 0.0):
                virtual_times[bit] = min(lows)

    def _compare(self, node: Node, by: float) -> None:
        """P2 and P4 towards each sibling, after a move."""
        if not node.in_a:
            return
        stretch = node.stretch
        if stretch is None:
            node.stretch = Stretch(node, self.moment.now, self.nodes)
        elif node.v > stretch.v_max:
            stretch.v_max = node.v
        full = node.full_since >= 0
        for other in self.nodes:
            if not other.in_a or other is node:
                continue
            if by > 0.0:
                self._gap(node, other)
            else:
                self._gap(other, node)
            if full and other.full_since >= 0:
                self._drift(node, other)

    def _see(self, node: Node) -> None:
        """P2 in both directions, where a node has newly come or was lifted."""
        if not node.in_a or len(self.nodes) == 1:
            return
        if node.stretch is None:
            node.stretch = Stretch(node, self.moment.now, self.nodes)
        for other in self.nodes:
            if other.in_a and other is not node:
                self._gap(node, other)
                self._gap(other, node)

    def _gap(self, i: Node, j: Node) -> None:
        anchor = i.anchor
        gap = i.v - j.v
        if not (self._known(i) and self._known(j)):
            return
        if gap <= anchor.window + anchor.charge + SLACK or anchor.workers & ~j.reach:
            return
        key = i.index, j.index
        known = self.gaps.get(key)
        if known is None or gap > known.gap or known.anchor is not anchor or known.entered != j.entered:
            self.gaps[key] = found = Gap(i, j, self.moment.now, gap, anchor, j.entered)
            self.judged.append(found)

    def _got(self, stretch: Stretch, j: Node, cost: float) -> None:
        """P3: a sibling is booked more while a node waits."""
        index = j.index
        stretch.booked[index] += cost
        booked, weight = stretch.booked[index], stretch.weight_max[index]
        last, reach = stretch.last[index]
        reach -= stretch.v_start[index]
        if booked > weight * reach + SLACK:
            self.excesses.append(Excess(stretch, j, self.moment.now, last, booked, weight, reach))

    def _drift(self, node: Node, other: Node) -> None:
        """P4: how far the services of two have been apart since both stay."""
        i, j = (node, other) if node.index < other.index else (other, node)
        key = i.index, j.index
        service, attained = i.service - j.service, i.attained - j.attained
        pair = self.pairs.get(key)
        if pair is None or pair.since_first != i.full_since or pair.since_second != j.full_since:
            if (i.anchor.workers | j.anchor.workers) & ~self.members:
                return  # what one of them owes its height to is gone
            self.pairs[key] = Pair(i.full_since, j.full_since, service, service, attained, attained)
            return
        trivial = i.anchor.window + i.anchor.charge + j.anchor.window + j.anchor.charge + SLACK
        since = max(i.full_since, j.full_since)
        entered = i.entered, j.entered
        if service > pair.service_max or service < pair.service_min:
            pair.service_max, pair.service_min = max(service, pair.service_max), min(service, pair.service_min)
            apart = pair.service_max - pair.service_min
            if apart > trivial:
                self.drifts.append(Drift(i, j, entered, since, self.moment.now, apart, False))
        if attained > pair.attained_max or attained < pair.attained_min:
            pair.attained_max, pair.attained_min = (
                max(attained, pair.attained_max),
                min(attained, pair.attained_min),
            )
            apart = pair.attained_max - pair.attained_min
            if apart > trivial:
                self.drifts.append(Drift(i, j, entered, since, self.moment.now, apart, True))

    # At the end

    def judge(self) -> None:
        """P2, P3 and P4, with what estimates got wrong."""
        judge(self.nodes, self.judged, self.excesses, self.drifts)
