"""Who may be dispatched to a worker now: C_w, the same selection at each level.

Of the bands that reach the worker, those with v ≤ lo_w + T; of each such band the first K tenants with v ≤ lo_w +
T among its own; of each such tenant its first users, alike. Beside the first K, the last S tenants that were
served on the worker stay candidates as long as they lie inside their band's window: so a long queue of tenants
does not cost the prefixes that are warm there.

While every child of every node reaches every worker, the front is one for all workers. This module reads clocks
and order; it looks at no room and no request.
"""

from evenhand.core.estimator import CostRate
from evenhand.core.facts import SchedulerConfig
from evenhand.core.fair_tree import BANDS_MAX, FairTree, path_v
from evenhand.core.ids import TenantId
from evenhand.core.outstanding import Outstanding
from evenhand.core.tenant import Band, Tenant, User
from evenhand.core.worker import Worker


class BandFront:
    """The first K tenants of one band inside the window of a worker, and how far they reach into the order."""

    __slots__ = ("band", "last", "v_max")

    def __init__(self, band: Band, v_max: float, last: tuple[float, str] | None) -> None:
        self.band = band
        self.v_max = v_max
        """lo_w + T."""
        self.last = last
        """Place of the first tenant inside the window that is not among the K; None: all are."""


class Front:
    """The candidates of a worker, those lately served there aside; in order, the most behind first."""

    __slots__ = ("bands", "below_share", "is_cut", "share_limits", "tenants_count", "users")

    def __init__(self) -> None:
        self.users: list[User] = []
        self.bands: dict[str, BandFront] = {}
        self.tenants_count = 0
        self.is_cut = False
        """A band has more tenants inside the window than K."""
        self.below_share: list[User] | None = None
        """Those of ``users`` whose tenants may use headroom; None: not asked yet."""
        self.share_limits: dict[str, float] = {}
        """Outstanding cost per weight below which a tenant of a band may use headroom, as of ``below_share``."""


class Fronts:
    """Builds fronts from the tree as it is."""

    def __init__(
        self, config: SchedulerConfig, fair: FairTree, outstanding: Outstanding, cost_rate: CostRate
    ) -> None:
        self._tenants_max = config.tenants_considered_max
        self._users_max = config.users_considered_max
        self._fair = fair
        self._outstanding = outstanding
        self._cost_rate = cost_rate

    def of(self, worker: Worker) -> Front | None:
        """C_w without those lately served there; None: A_w is empty."""
        fair, rate = self._fair, self._cost_rate.per_s
        bands = fair.pool.first_inside(worker, fair.window_of_bands(rate), BANDS_MAX)
        if not bands:
            return None
        front = Front()
        for _, _, band in bands:
            window = fair.window_of_tenants(band, rate)
            places = band.tenants.first_inside(worker, window, self._tenants_max + 1)
            last: tuple[float, str] | None = None
            v_max = places[0][0] + window
            if len(places) > self._tenants_max:
                last = places.pop()[:2]
                front.is_cut = True
            front.bands[band.node_id] = BandFront(band, v_max, last)
            front.tenants_count += len(places)
            users = front.users
            for _, _, tenant in places:
                order = tenant.users.order
                if len(order) == 1:
                    users.append(order[0][2])
                else:
                    self.add_users(tenant, worker, users)
        return front

    def of_tenant(self, tenant: Tenant, worker: Worker) -> Front | None:
        """The users of one tenant alone, inside the windows of each other; None: it does not reach the worker."""
        if tenant.reach_tokens > worker.capacity_tokens:
            return None
        front = Front()
        front.tenants_count = 1
        front.bands[tenant.band.node_id] = BandFront(tenant.band, tenant.v, None)
        self.add_users(tenant, worker, front.users)
        return front

    def is_inside(self, user: User, worker: Worker) -> bool:
        """Do the tenant and its band of a chosen user lie inside the windows of their siblings at a worker?"""
        fair, rate, tenant, band = self._fair, self._cost_rate.per_s, user.tenant, user.tenant.band
        bands_lo, tenants_lo = fair.pool.lo(worker), band.tenants.lo(worker)
        return (
            bands_lo is not None
            and tenants_lo is not None
            and band.v <= bands_lo + fair.window_of_bands(rate)
            and tenant.v <= tenants_lo + fair.window_of_tenants(band, rate)
        )

    def add_users(self, tenant: Tenant, worker: Worker, users: list[User]) -> None:
        """Add the users of a tenant that may be served at a worker, the most behind first."""
        node = tenant.users
        if len(node) == 1:
            only = node.first()
            assert only is not None
            users.append(only)
            return
        window = self._fair.window_of_users(tenant, self._cost_rate.per_s)
        users += [user for _, _, user in node.first_inside(worker, window, self._users_max)]

    def below_share(self, front: Front) -> list[User]:
        """Those of the front whose tenants may use headroom."""
        if front.below_share is None:
            limits = {name: self._outstanding.per_weight(each.band) for name, each in front.bands.items()}
            front.share_limits = limits
            front.below_share = [
                user
                for user in front.users
                if not (tenant := user.tenant).granted
                or tenant.guarantee_takes
                or tenant.outstanding < tenant.weight * limits[tenant.band.node_id]
            ]
        return front.below_share

    def sticky(self, front: Front, worker: Worker, tight: bool) -> list[User]:
        """Users of the tenants served last at a worker inside the window, but beyond the first K; in order."""
        users: list[User] = []
        capacity_tokens = worker.capacity_tokens
        for band_front in front.bands.values():
            last = band_front.last
            if last is None:
                continue
            band, last_v, v_max = band_front.band, last[0], band_front.v_max
            found = [
                tenant
                for tenant in worker.served.values()
                if last_v <= tenant.v <= v_max and tenant.in_a and tenant.band is band
            ]
            if tight:
                limit = front.share_limits[band.node_id]
                found = [each for each in found if not each.granted or each.outstanding < each.weight * limit]
            for tenant in found:
                is_of_front = tenant.v == last_v and (last_v, tenant.node_id) < last
                if is_of_front or tenant.reach_tokens > capacity_tokens:
                    continue
                order = tenant.users.order
                if len(order) == 1:
                    users.append(order[0][2])
                else:
                    self.add_users(tenant, worker, users)
        if len(users) > 1:
            users.sort(key=path_v)
        return users


def tenants_counted(users: list[User]) -> int:
    """How many tenants the users are of; users of one tenant stand side by side."""
    count, last = 0, TenantId("")
    for user in users:
        if user.tenant.spec.tenant_id != last:
            count, last = count + 1, user.tenant.spec.tenant_id
    return count
