"""How far two backlogged tenants drift apart in service, against the bound that the window promises them.

While tenants i and j both wait all the time, on workers that do not change and with weights that do not, the
service booked to each, divided by its tickets' φ, differs over any interval by at most B_i + B_j, where

    B_i = T + ĉ_i + X̂_i + Ô_j

with T the largest window, ĉ_i the largest charge, X̂ and Ô the largest sums by which open legs were charged too
little or too much (P4, which follows from P2 at both ends; a tenant that gets nothing is what P3 forbids). What a
leg was charged wrongly is known once it has ended: intervals that exceed the windows and charges alone are kept
and judged at the end of the run, by what their legs came to. A leg that never ended here counts with the most that
its limits allow.

Service is counted here as charged until a leg ends; the scheduler's clock knows of an undercharge as soon as usage
tells of it, so X̂ counts twice. The last dispatch before an interval lies in its bound, too. After a take-over the
clocks at the beginning stand for dispatches that this term has not seen: the largest window and charge of the term
before count for them. An interval ends when one of the two waits no more, and all of them when workers come, go,
are heard of again, drain or are lost. Those of a band end when one of its tenants passes others that are held up:
who is passed is lifted, and nobody tells whom.
"""

from dataclasses import dataclass, field
from itertools import combinations

from evenhand.core.facts import CostWeights, TenantSpec, TenantState, Ticket
from evenhand.core.ids import TenantId, TicketId


@dataclass(slots=True)
class _Side:
    """One tenant's service and what its clock is owed to."""

    service: float = 0.0
    window: float = 0.0
    """In force at its last dispatch."""
    charge: float = 0.0
    """Of its last dispatch, ÷ φ."""
    dispatched_at: int = 0
    legs: "list[_Leg]" = field(default_factory=list)


@dataclass(slots=True)
class _Leg:
    """One leg: from which step to which, and how wrong its charge was, ÷ φ."""

    began: int
    charge: float
    weight: float
    under: float
    over: float
    ended: int | None = None


@dataclass(slots=True)
class _Pair:
    """One interval of two tenants that both wait."""

    began: int
    since: int
    """Of the earlier of their last dispatches before."""
    least: float
    most: float
    window: list[float]
    charge: list[float]
    lasted: int = 0


@dataclass(slots=True)
class _Excess:
    one: TenantId
    other: TenantId
    pair: _Pair
    at_ms: int


class Drift:
    """Service by tenant, and the intervals under way."""

    def __init__(self, cost: CostWeights, window: float = 0.0, charge: float = 0.0) -> None:
        """``window`` and ``charge``: the most of earlier terms, whose clocks go on."""
        self.share_max = 0.0
        """Largest drift seen, as a share of its bound; of intervals that exceed windows and charges only."""
        self.window_max, self.charge_max = window, charge
        self._cost = cost
        self._first = (0.0, 2 * window, 2 * charge, 0)
        self._sides: dict[TenantId, _Side] = {}
        self._open: dict[TicketId, _Leg] = {}
        self._specs: dict[TenantId, TenantSpec] = {}
        self._pairs: dict[tuple[TenantId, TenantId], _Pair] = {}
        self._exceeding: list[_Excess] = []
        self._step = 0
        self._moved = False
        self._waiting: frozenset[TenantId] = frozenset()

    def begin_anew(self) -> None:
        """Workers changed: every interval under way ends."""
        self._pairs.clear()
        self._moved = True

    def lifted(self, band: str) -> None:
        """A tenant is about to pass others of its band, which are lifted: its intervals end."""
        for pair in [pair for pair in self._pairs if self._specs[pair[0]].band == band]:
            del self._pairs[pair]
        self._moved = True

    def tenant(self, spec: TenantSpec) -> None:
        """A tenant's spec; one that changes ends its intervals."""
        if self._specs.get(spec.tenant_id) != spec:
            self._specs[spec.tenant_id] = spec
            self.begin_anew()

    def forget(self, tenant_id: TenantId) -> None:
        """A tenant is deleted: one that comes back under its name is another."""
        self._specs.pop(tenant_id, None)
        self._sides.pop(tenant_id, None)
        self.begin_anew()

    def hold(self, ticket: Ticket) -> None:
        """A ticket is open; until its end it may be wrong by as much as its limits allow."""
        cost, phi = self._cost, ticket.weight
        most = cost.cost(ticket.prompt_tokens, 0, ticket.output_tokens_max)
        leg = _Leg(self._step, ticket.charge, phi, max(0.0, most - ticket.charge) / phi, ticket.charge / phi)
        self._open[ticket.ticket_id] = leg
        self._side(ticket.tenant_id).legs.append(leg)

    def granted(self, ticket: Ticket, window: float) -> None:
        """An ordinary dispatch, by the window in force."""
        self.hold(ticket)
        side, charge = self._side(ticket.tenant_id), ticket.charge / ticket.weight
        side.service += charge
        side.window, side.charge, side.dispatched_at = window, charge, self._step
        self.window_max, self.charge_max = max(self.window_max, window), max(self.charge_max, charge)
        self._raise(ticket.tenant_id, window, charge)

    def ended(self, ticket: Ticket, attained: float) -> None:
        """A ticket's end corrects what was booked."""
        leg = self._open.pop(ticket.ticket_id, None)
        if leg is None:
            return
        by = (attained - leg.charge) / leg.weight
        leg.under, leg.over, leg.ended = max(0.0, by), max(0.0, -by), self._step
        if not ticket.guaranteed:
            self._side(ticket.tenant_id).service += by
        self._moved = True

    def charged(self, tenant_id: TenantId, service: float) -> None:
        """Something was booked to a tenant that is no leg: a worker was kept idle for it."""
        self._side(tenant_id).service += service
        self._raise(tenant_id, 0.0, service)

    def settle_down(self, waiting: dict[TenantId, int], now_ms: int) -> None:
        """A step is over: intervals of tenants that wait no more end, those of tenants that now wait begin."""
        self._step += 1
        if not self._moved and waiting.keys() == self._waiting:
            return
        for key in [key for key in self._pairs if key[0] not in waiting or key[1] not in waiting]:
            del self._pairs[key]
        self._waiting, self._moved = frozenset(waiting), False
        for one, other in combinations(sorted(waiting), 2):
            if not self._are_siblings(one, other):
                continue
            sides = self._side(one), self._side(other)
            apart = sides[0].service - sides[1].service
            pair = self._pairs.get((one, other))
            if pair is None:
                since = min(side.dispatched_at for side in sides)
                windows, charges = [side.window for side in sides], [side.charge for side in sides]
                pair = _Pair(self._step, since, apart, apart, windows, charges)
                self._pairs[one, other] = pair
            if apart < pair.least or apart > pair.most:
                pair.least, pair.most = min(pair.least, apart), max(pair.most, apart)
                if pair.most - pair.least > sum(pair.window) + sum(pair.charge):
                    if not pair.lasted:
                        self._exceeding.append(_Excess(one, other, pair, now_ms))
                    pair.lasted = self._step

    def judge(self) -> list[str]:
        """Intervals that were broken, in words, by what their legs came to."""
        found = []
        for excess in self._exceeding:
            pair, sides = excess.pair, (self._sides.get(excess.one), self._sides.get(excess.other))
            drift, bound = pair.most - pair.least, sum(pair.window) + sum(pair.charge)
            for side in sides:
                if side is None:  # deleted since
                    bound = drift
                    continue
                bound += 2 * _most_open(side.legs, pair, under=True) + _most_open(side.legs, pair, under=False)
            self.share_max = max(self.share_max, drift / bound)
            if drift > bound * (1 + 1e-9) + 1e-6:
                found.append(
                    f"P4: {excess.one} and {excess.other} drifted {drift:.1f} apart from {excess.at_ms} ms on; "
                    f"their bound is {bound:.1f}."
                )
        return found

    # ---- within

    def _side(self, tenant_id: TenantId) -> _Side:
        side = self._sides.get(tenant_id)
        if side is None:
            side = self._sides[tenant_id] = _Side(*self._first)
        return side

    def _raise(self, tenant_id: TenantId, window: float, charge: float) -> None:
        self._moved = True
        for tenants, pair in self._pairs.items():
            if tenant_id in tenants:
                at = tenants.index(tenant_id)
                pair.window[at], pair.charge[at] = max(pair.window[at], window), max(pair.charge[at], charge)

    def _are_siblings(self, one: TenantId, other: TenantId) -> bool:
        """Of one band, each always in A while it waits, and nothing booked to a guarantee."""
        specs = self._specs.get(one), self._specs.get(other)
        free = [
            spec
            for spec in specs
            if spec
            and not spec.concurrency_max
            and not spec.guaranteed_share
            and spec.state is not TenantState.SUSPENDED
        ]
        return len(free) == 2 and free[0].band == free[1].band


def _most_open(legs: list[_Leg], pair: _Pair, under: bool) -> float:
    """The largest sum of what was charged too little, or too much, that was open at once in an interval."""
    changes: list[tuple[int, float]] = []
    for leg in legs:
        wrong = leg.under if under else leg.over
        if not wrong or leg.began > pair.lasted or (leg.ended is not None and leg.ended < pair.since):
            continue
        changes.append((leg.began, wrong))
        if leg.ended is not None:
            changes.append((leg.ended + 1, -wrong))
    total = most = 0.0
    for _, change in sorted(changes):
        total += change
        most = max(most, total)
    return most
