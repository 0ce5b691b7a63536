"""How far two backlogged tenants drift apart in service, against the bound that the window promises them.

While tenants i and j both wait all the time, on workers that do not change and with weights that do not, the
service booked to each, divided by its tickets' φ, differs over any interval by at most B_i + B_j, where

    B_i = T + ĉ_i + X̂_i + Ô_j

with T the largest window, ĉ_i the largest charge, and X̂, Ô the largest sums by which tickets may be charged too
little or too much; here the most their limits allow, so the bound is met by any correct scheduler. An interval
ends when one of the two waits no more, and all of them when workers come, go, drain or are lost.
"""

from dataclasses import dataclass
from itertools import combinations

from evenhand.core.facts import CostWeights, TenantSpec, Ticket
from evenhand.core.ids import TenantId, TicketId


@dataclass(slots=True)
class _Pair:
    """One interval of two tenants that both wait."""

    least: float
    most: float
    window: float
    under: list[float]
    over: list[float]
    charge: list[float]


class Drift:
    """Service by tenant, and the intervals under way."""

    def __init__(self, cost: CostWeights) -> None:
        self.excess: list[str] = []
        """Intervals that were broken, in words."""
        self.share_max = 0.0
        self._cost = cost
        self._service: dict[TenantId, float] = {}
        self._under: dict[TenantId, dict[TicketId, float]] = {}
        self._over: dict[TenantId, dict[TicketId, float]] = {}
        self._booked: dict[TicketId, float] = {}
        self._specs: dict[TenantId, TenantSpec] = {}
        self._pairs: dict[tuple[TenantId, TenantId], _Pair] = {}
        self._moved = False
        self._waiting: dict[TenantId, int] = {}

    def begin_anew(self) -> None:
        """Workers changed: every interval under way ends."""
        self._pairs.clear()

    def tenant(self, spec: TenantSpec) -> None:
        """A tenant's spec; one that changes ends its intervals."""
        if self._specs.get(spec.tenant_id) != spec:
            self._specs[spec.tenant_id] = spec
            self._pairs.clear()

    def hold(self, ticket: Ticket, booked: bool) -> None:
        """A ticket is open; with ``booked`` its charge was put on the clock here."""
        tenant_id, uncertain = ticket.tenant_id, self._cost
        most = uncertain.cost(ticket.prompt_tokens, 0, ticket.output_tokens_max)
        self._under.setdefault(tenant_id, {})[ticket.ticket_id] = max(0.0, most - ticket.charge) / ticket.weight
        self._over.setdefault(tenant_id, {})[ticket.ticket_id] = ticket.charge / ticket.weight
        self._booked[ticket.ticket_id] = ticket.charge
        if booked:
            self._service[tenant_id] = self._service.get(tenant_id, 0.0) + ticket.charge / ticket.weight
        self._moved = True

    def granted(self, ticket: Ticket, window: float) -> None:
        """An ordinary dispatch, by the window in force."""
        self.hold(ticket, booked=True)
        for tenants, pair in self._pairs.items():
            pair.window = max(pair.window, window)
            if ticket.tenant_id in tenants:
                side = tenants.index(ticket.tenant_id)
                pair.charge[side] = max(pair.charge[side], ticket.charge / ticket.weight)

    def ended(self, ticket: Ticket, attained: float) -> None:
        """A ticket's end corrects what was booked."""
        tenant_id, ticket_id = ticket.tenant_id, ticket.ticket_id
        self._under.get(tenant_id, {}).pop(ticket_id, None)
        self._over.get(tenant_id, {}).pop(ticket_id, None)
        correction = (attained - self._booked.pop(ticket_id, 0.0)) / ticket.weight
        self._service[tenant_id] = self._service.get(tenant_id, 0.0) + correction
        self._moved = True

    def charged(self, tenant_id: TenantId, service: float) -> None:
        """Something was booked to a tenant that is no leg: a worker was kept idle for it."""
        self._service[tenant_id] = self._service.get(tenant_id, 0.0) + service
        for tenants, pair in self._pairs.items():
            if tenant_id in tenants:
                side = tenants.index(tenant_id)
                pair.charge[side] = max(pair.charge[side], service)
        self._moved = True

    def settle_down(self, waiting: dict[TenantId, int]) -> None:
        """A step is over: intervals of tenants that wait no more end, those of tenants that now wait begin."""
        for pair_key in [key for key in self._pairs if not (waiting.get(key[0]) and waiting.get(key[1]))]:
            del self._pairs[pair_key]
        if not self._moved and waiting.keys() == self._waiting.keys():
            return
        self._waiting = dict(waiting)
        self._moved = False
        under = {tenant_id: sum(self._under.get(tenant_id, {}).values()) for tenant_id in waiting}
        over = {tenant_id: sum(self._over.get(tenant_id, {}).values()) for tenant_id in waiting}
        for one, other in combinations(sorted(waiting), 2):
            if not self._are_siblings(one, other):
                continue
            apart = self._service.get(one, 0.0) - self._service.get(other, 0.0)
            pair = self._pairs.get((one, other))
            if pair is None:
                pair = _Pair(apart, apart, 0.0, [0.0, 0.0], [0.0, 0.0], [0.0, 0.0])
                self._pairs[one, other] = pair
            for side, tenant_id in enumerate((one, other)):
                pair.under[side] = max(pair.under[side], under[tenant_id])
                pair.over[side] = max(pair.over[side], over[tenant_id])
            pair.least, pair.most = min(pair.least, apart), max(pair.most, apart)
            self._check(one, other, pair)

    def _check(self, one: TenantId, other: TenantId, pair: _Pair) -> None:
        drift = pair.most - pair.least
        bound = 2 * pair.window + sum(pair.charge) + sum(pair.under) + sum(pair.over)
        if drift > 0.0 and bound > 0.0:
            self.share_max = max(self.share_max, drift / bound)
        if drift > bound * (1 + 1e-9) + 1e-6:
            self.excess.append(f"P4: {one} and {other} drifted {drift:.1f} apart; their bound is {bound:.1f}.")

    def _are_siblings(self, one: TenantId, other: TenantId) -> bool:
        """Of one band, each always in A while it waits, and nothing booked to a guarantee."""
        specs = self._specs.get(one), self._specs.get(other)
        free = [spec for spec in specs if spec and not spec.concurrency_max and not spec.guaranteed_share]
        return len(free) == 2 and free[0].band == free[1].band
