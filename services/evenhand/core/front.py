"""Who may be dispatched to a worker now: C_w, the same selection at each level.

Of the bands that reach the worker, those with v ≤ lo_w + T; of each such band the first K tenants with v ≤ lo_w +
T among its own; of each such tenant its first users, alike. Beside the first K, the last S tenants that were
served on the worker stay candidates as long as they lie inside their band's window: so a long queue of tenants
does not cost the prefixes that are warm there.

Where the most behind is held up, the same is built of the others (``beside``): who is held up is left out at each
level, and the windows lie about the least clock of those that are not. So it is with the users of a tenant whose
guarantee is due (``first_found``).

While every child of every node reaches every worker, the front is one for all workers. This module reads clocks
and order; it looks at no room and no request.
"""

import math
from collections.abc import Callable
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

from evenhand.core.estimator import CostRate
from evenhand.core.facts import SchedulerConfig
from evenhand.core.fair_tree import BANDS_MAX, FairTree, path_v
from evenhand.core.held_up import HELD_UP_MAX, HELD_UP_USERS_MAX, HeldUp
from evenhand.core.ids import TenantId
from evenhand.core.outstanding import Outstanding
from evenhand.core.tenant import Band, Tenant, User
from evenhand.core.worker import Worker

if TYPE_CHECKING:
    from evenhand.core.choice import Choice

Found = TypeVar("Found")


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
        self.passed: dict[User, None] = {}
        """Users that the looks for one tenant leave out: the looks before found nothing for them."""
        self._looked: dict[User, None] = {}
        """Users that the last looks for one tenant were for."""

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
        """The users of one tenant but for those ``passed``, inside the windows of each other; None: none."""
        if tenant.reach_tokens > worker.capacity_tokens:
            return None
        front = Front()
        front.tenants_count = 1
        front.bands[tenant.band.node_id] = BandFront(tenant.band, tenant.v, None)
        if self.passed:
            self._users_past(tenant, worker, front.users)
        else:
            self.add_users(tenant, worker, front.users)
        self._looked.update(dict.fromkeys(front.users))
        return front if front.users else None

    def first_found(
        self, tenant: Tenant, look: Callable[[], Found | None], is_barred: Callable[[User], bool]
    ) -> Found | None:
        """What a look for one tenant finds, past those of its users for whom the looks before found nothing.

        Nobody who ``is_barred`` is passed. At most the first ``HELD_UP_USERS_MAX`` users are looked at, and those
        that are inside the window of the first.
        """
        self.passed, self._looked = {}, {}
        found = look()
        while found is None:
            passed_before = len(self.passed)
            self.passed.update({user: None for user in self._looked if not is_barred(user)})
            if not passed_before < len(self.passed) < len(tenant.users):
                return None
            self._looked = {}
            found = look()
        return found

    def beside(self, worker: Worker, held_up: HeldUp, seen: Front | None, is_tight: bool) -> Front | None:
        """As ``of``, without those that are held up; None: none is left, or known to be.

        Nor those of a front that has been ``seen`` for all workers in vain, though the windows may lie about them;
        nor, where only headroom is left (``is_tight``), those that may not use it.
        """
        fair, rate, capacity_tokens = self._fair, self._cost_rate.per_s, worker.capacity_tokens
        front = Front()
        v_max = math.inf
        for v, _, band in fair.pool.in_order():
            if v > v_max or held_up.is_spent:
                break
            if band.reach_tokens > capacity_tokens:
                continue
            seen_band = seen.bands.get(band.node_id) if seen is not None else None
            is_there = self._tenants_beside(band, worker, held_up, front, seen_band, is_tight)
            if is_there and v_max == math.inf:
                v_max = v + fair.window_of_bands(rate)
        return front if front.users else None

    def _tenants_beside(
        self,
        band: Band,
        worker: Worker,
        held_up: HeldUp,
        front: Front,
        seen: BandFront | None,
        is_tight: bool,
    ) -> bool:
        """Add the first K tenants of a band that are not held up, with v ≤ the least of them + T.

        Is there one that reaches the worker and is not held up, added or not? Also where not all were asked.
        """
        capacity_tokens, count, v_max = worker.capacity_tokens, 0, math.inf
        per_weight = self._outstanding.per_weight(band)
        # Those that do not reach the worker have no claim there, and use nothing of the look up.
        reaching = (place for place in band.tenants.in_order() if place[2].reach_tokens <= capacity_tokens)
        for v, tenant_id, tenant in islice(reaching, self._tenants_max + HELD_UP_MAX):
            if v > v_max or held_up.is_spent:
                break
            # Of one that was seen there is more to find only among users whose own most-behind is held up.
            is_seen = seen is not None and v <= seen.v_max and (seen.last is None or (v, tenant_id) < seen.last)
            is_vain = is_seen and len(tenant.users.order) == 1
            if is_tight and not is_vain and tenant.granted:
                is_vain = tenant.outstanding >= tenant.weight * per_weight
            if (is_vain and v_max < math.inf) or held_up.tenant_at(tenant, worker):
                continue
            if v_max == math.inf:
                v_max = v + self._fair.window_of_tenants(band, self._cost_rate.per_s)
                front.bands[band.node_id] = BandFront(band, v_max, None)
            if is_vain:
                continue
            if count == self._tenants_max:
                front.bands[band.node_id].last = (v, tenant_id)
                front.is_cut = True
                break
            count += 1
            self._users_beside(tenant, worker, held_up, front.users)
        front.tenants_count += count
        return v_max < math.inf or next(reaching, None) is not None

    def _users_beside(self, tenant: Tenant, worker: Worker, held_up: HeldUp, users: list[User]) -> None:
        """Add the first users of a tenant that are not held up, with v ≤ the least of them + T."""
        order = tenant.users.order
        if len(order) == 1:
            users.append(order[0][2])
            return
        window = self._fair.window_of_users(tenant, self._cost_rate.per_s)
        capacity_tokens, count, v_max = worker.capacity_tokens, 0, math.inf
        for v, _, user in order[:HELD_UP_USERS_MAX]:
            if v > v_max or held_up.is_spent or count == self._users_max:
                return
            if user.reach_tokens > capacity_tokens or held_up.user(user):
                continue
            v_max, count = min(v_max, v + window), count + 1
            users.append(user)

    def mark_guaranteed(self, choice: "Choice") -> None:
        """A due guarantee takes this: outside the windows of tenant and band by its ledger, else in its turn.

        One in its turn that lies outside its user's window has passed users of its own tenant, and lifts them.
        """
        choice.guaranteed = not self.is_inside(choice.user, choice.worker)
        choice.backfilled = not choice.guaranteed and not self.is_user_inside(choice.user, choice.worker)

    def _users_past(self, tenant: Tenant, worker: Worker, users: list[User]) -> None:
        """Add the first users of a tenant that are not ``passed``, with v ≤ the least of them + T."""
        window = self._fair.window_of_users(tenant, self._cost_rate.per_s)
        capacity_tokens, count, v_max = worker.capacity_tokens, 0, math.inf
        for v, _, user in tenant.users.order[:HELD_UP_USERS_MAX]:
            if v > v_max or count == self._users_max:
                return
            if user.reach_tokens <= capacity_tokens and user not in self.passed:
                v_max, count = min(v_max, v + window), count + 1
                users.append(user)

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

    def is_all_inside(self, user: User, worker: Worker) -> bool:
        """Does a user, at all levels, lie inside the windows of the siblings at a worker?"""
        return self.is_inside(user, worker) and self.is_user_inside(user, worker)

    def is_user_inside(self, user: User, worker: Worker) -> bool:
        """Does a user lie inside the window of its tenant's at a worker?"""
        lo = user.tenant.users.lo(worker)
        return lo is not None and user.v <= lo + self._fair.window_of_users(user.tenant, self._cost_rate.per_s)

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
