"""Which of the waiting requests goes where next: one (request, worker) pair, or none.

For each worker with room, C_w is looked at (``front``): the users, of tenants, of bands, that lie inside the
windows of their siblings. Of each user the first H requests count. The best score over all of them wins; the
score is the cached share of the prompt − load_penalty · load − prefill_penalty · pending prefill − fill_penalty
· filling. The load is the fuller of the worker's slots and KV, pending prefill is told as a part of its room:
requests load a worker by tokens, not only by their number. The filling is how much of its cache holds something
that would be evicted. Ties go to the most behind (lower v of band, then tenant, then user), then the older
request, then the lower predicted time to first token, then the lower id. (Least time to first token *across
requests* would be shortest-first; it only chooses among workers.)

A pair is declined while a worker without room holds ``cold_decline_tokens`` more of the prompt. If nothing else is
left, the most-behind user takes its best declined pair, but not before waiting cannot be called the cheaper way
any more: its request has been declined, or its user has had something waiting beside an idle worker, for some
times what the missing tokens cost to compute (``Fitting.cold_wait_ns``, at most ``cold_wait_ms_max``). So
declining leaves a worker idle for that long at most; and a user whose requests all come to the one warm worker in
time, one after another, has another worker warmed all the same.

If the most-behind user fits nowhere for want of room, the worker predicted free first is kept for it. One that
only headroom holds back keeps nothing: the headroom is there for others than it.

If nothing is found at all, and the most-behind has no use for the rooms that are open (``held_up``), it must not
stop those who have: further looks leave out who is held up, with windows about the least clock of the others. Who
waits for a warmer worker is left out where a worker is hardly used (``IDLE_LOAD_MAX``), and anywhere once it has
waited for ``window_delay_ms``. What that look finds outside the windows as they are is *backfilled*: those that it
passes are lifted, so that the windows reach it, and then it is charged as always (``FairTree.lift_passed``).

What this does not do: it changes no clock, reserves nothing, and never looks at a request beyond the first H.
"""

from collections.abc import Sequence
from functools import partial

from evenhand.core.choice import Choice, View
from evenhand.core.cold_waits import ColdWaits
from evenhand.core.estimator import CostRate
from evenhand.core.facts import SchedulerConfig
from evenhand.core.fair_tree import FairTree, path_v
from evenhand.core.fitting import Fitting
from evenhand.core.front import Front, Fronts
from evenhand.core.heads import Heads
from evenhand.core.held_up import HeldUp
from evenhand.core.keeping import Keeping
from evenhand.core.outstanding import Outstanding
from evenhand.core.pairs import Pairs
from evenhand.core.presence import Presence
from evenhand.core.queued import BestHead
from evenhand.core.rooms import Rooms
from evenhand.core.tenant import Tenant, User
from evenhand.core.waiting import Waiting
from evenhand.core.worker import Worker

IDLE_LOAD_MAX = 0.25
"""Up to so much load (the fuller of slots and KV) a worker is filled past those that wait for a warmer one. Above
it there is work to do, and what is put before them costs more fairness than it brings work."""


class Placement:
    """Reads queues, clocks, rooms and presence; writes only the look-ups cached on requests and users."""

    def __init__(
        self,
        config: SchedulerConfig,
        presence: Presence,
        fair: FairTree,
        rooms: Rooms,
        outstanding: Outstanding,
        cost_rate: CostRate,
    ) -> None:
        self._config = config
        self._fair = fair
        self._rooms = rooms
        self._tenants = outstanding.tenants
        self.fitting = Fitting(config, fair, rooms, outstanding)
        self._fitting_version = 0
        self.heads = Heads(config, presence, fair, rooms, self.fitting)
        self.cold_waits = ColdWaits(config, self.fitting)
        self._pairs = Pairs(config, self.fitting, self.heads, self.cold_waits)
        self.fronts = Fronts(config, fair, outstanding, cost_rate)
        self.keeping = Keeping(fair, rooms, self.fitting, self.heads, self.fronts, cost_rate)
        self._pass = 0
        """Number of the pass over the workers with room: while it lasts, no worker closes or opens."""
        self._seen: Front | None = None
        """The front that the last look found for all workers alike; None: it found none, or not one for all."""
        self._seen_tight = True
        """The last look met no worker with more than headroom left, but for one that is kept."""

    def begin(self) -> None:
        """Forget what earlier looks found to wait, and what was worked out for other workers than there are."""
        if self.fitting.version != self._fitting_version:
            self._fitting_version = self.fitting.version
            for tenant in self._tenants.values():
                tenant.forget_best()
        self.cold_waits.begin()

    def choose(self, now_ns: int, only: Tenant | None = None) -> Choice | None:
        """The next pair to dispatch, with cached tokens as they are now; None if nothing fits anywhere.

        With ``only``, the best pair of one tenant, wherever its clock and its band's stand.
        """
        # Each further pass has looked one more request up afresh, so the passes end.
        while True:
            self.keeping.look(now_ns)
            choice = self._best(now_ns, only)
            if choice is None and only is None:
                choice = self._best_beside(now_ns)
            if choice is None or choice.queued.map_version == self.heads.map_version:
                return choice
            if not self.heads.look_up(choice.queued):
                return choice
            choice.user.forget_best()

    # What is considered

    def choose_guaranteed(self, tenants: Sequence[Tenant], now_ns: int) -> Choice | None:
        """The best pair of the first of these tenants that has one; inside the window it is an ordinary one."""
        for tenant in tenants:
            tenant.guarantee_takes = True
            look = partial(self.choose, now_ns, tenant)
            choice = self.fronts.first_found(tenant, look, partial(self.cold_waits.is_brief, now_ns=now_ns))
            tenant.guarantee_takes = False
            if choice is not None:
                self.fronts.mark_guaranteed(choice)
                return choice
        return None

    def _front(self, worker: Worker, now_ns: int, only: Tenant | None, held_up: HeldUp | None) -> Front | None:
        """The candidates of a worker, their look-ups not older than allowed; None: there are none."""
        if held_up is not None:
            front = self.fronts.beside(worker, held_up, None, False)
        else:
            front = self.fronts.of(worker) if only is None else self.fronts.of_tenant(only, worker)
        if front is not None:
            self.heads.refresh_due(front.users, now_ns)
        return front

    def _candidates(self, worker: Worker, front: Front, tight: bool, is_ordinary: bool, now_ns: int) -> list[User]:
        """C_w; where only headroom is left, those of C_w that may use it."""
        users = self.fronts.below_share(front) if tight else front.users
        kept = self.keeping.kept
        if kept is not None and kept.worker is worker:
            if kept.is_drained and is_ordinary:
                return [kept.user]  # Inside the windows, but perhaps beyond the first K.
            return [user for user in users if user is kept.user]
        if not front.is_cut:
            return users
        sticky = self.fronts.sticky(front, worker, tight)
        if not sticky:
            return users
        self.heads.refresh_due(sticky, now_ns)
        return users + sticky

    # What is best

    def _best_beside(self, now_ns: int) -> Choice | None:
        """The best pair past those that fit nowhere; then, at workers hardly used, past those that wait too."""
        seen, is_tight = self._seen, self._seen_tight
        choice = self._best_past(False, seen, is_tight, now_ns)
        if choice is None and any(worker.load_share <= IDLE_LOAD_MAX for worker in self._rooms.open.values()):
            choice = self._best_past(True, seen, False, now_ns)
        if choice is not None:
            choice.backfilled = not self.fronts.is_all_inside(choice.user, choice.worker)
        return choice

    def _best_past(self, waiting_too: bool, seen: Front | None, is_tight: bool, now_ns: int) -> Choice | None:
        def runs_at(user: User, worker: Worker) -> bool:
            return self._pairs.runs_at(user, worker, waiting_too, now_ns)

        kept, cold_waits = self.keeping.kept, self.cold_waits
        waits = cold_waits.note if waiting_too else None
        kept_worker = kept.worker if kept is not None else None
        held_up = HeldUp(self._rooms, self.heads, runs_at, waits, self.fitting, kept_worker, self._pass, now_ns)
        cold_waits.ask_barred()
        # The look that is over has asked of all of these; but who waits may not fit either, and whom headroom
        # alone holds back is to be told apart.
        for user in (*(seen.users if seen is not None else ()), *((kept.user,) if kept is not None else ())):
            if not self.fitting.is_below_share(user.tenant):
                continue
            if waiting_too or not cold_waits.is_found(user) or cold_waits.is_long(user, now_ns):
                held_up.know(user, True)
            elif kept is not None and kept.user is user and kept.is_drained:
                held_up.know(user, False)
        fair, front = self._fair, None
        if fair.all_universal:
            if not held_up.is_first_held_up(fair.pool):
                return None
            worker = next(iter(self._rooms.open.values()))
            front = self.fronts.beside(worker, held_up, seen, is_tight)
            if front is None:
                return None
            self.heads.refresh_due(front.users, now_ns)
        return self._best(now_ns, None, held_up, front)

    def _best(
        self, now_ns: int, only: Tenant | None = None, held_up: HeldUp | None = None, shared: Front | None = None
    ) -> Choice | None:
        """The best pair that is not declined; if every pair is, the best of the most-behind user.

        With ``held_up``, of those that are not; with ``shared``, of a front for all workers.
        """
        best: Choice | None = None
        views: list[View] = []
        cold: dict[User, Choice | None] = {}
        self._pass += 1
        config, fair, divisor = self._config, self._fair, self._config.headroom_divisor
        kept_worker = self.keeping.kept.worker if self.keeping.kept is not None else None
        all_universal = fair.all_universal
        waiting = Waiting(shared, self._pass, now_ns) if shared is not None else None
        self._seen, self._seen_tight = None, True
        is_ordinary = only is None and held_up is None
        is_for_idle = held_up is not None and held_up.waits is not None
        for worker in self._rooms.open.values():
            if is_for_idle and worker.load_share > IDLE_LOAD_MAX:
                continue
            if shared is None or not all_universal:
                shared = self._front(worker, now_ns, only, held_up)
                if shared is None:
                    continue
                waiting = Waiting(shared, self._pass, now_ns) if all_universal else None
                self._seen = shared if all_universal else None
            spec = worker.spec
            free_blocks = spec.kv_blocks - worker.kv_reserved_blocks
            common_blocks = free_blocks - spec.kv_blocks // divisor
            tight = common_blocks <= 0 or len(worker.tickets) >= spec.slots - spec.slots // divisor
            is_cold_only = False
            if not tight and worker is not kept_worker:
                self._seen_tight = False
            if waiting is None or worker is kept_worker:
                users = looked = self._candidates(worker, shared, tight, is_ordinary, now_ns)
            else:
                users, others = waiting.common() if not tight else waiting.tight(self.fronts)
                looked = others
                if shared.is_cut and (sticky := self.fronts.sticky(shared, worker, tight)):
                    self.heads.refresh_due(sticky, now_ns)
                    users = users + sticky
                    looked = waiting.with_sticky(looked, sticky, worker)
                if waiting.warm_mask & worker.mark:
                    looked = waiting.with_warm(looked, worker, tight)
                if best is not None and looked is others:
                    is_cold_only = waiting.is_cold_only(worker, tight)
            if not looked:
                continue
            penalty = worker.score_penalty(config, now_ns)
            if is_cold_only and best is not None and best.score > -penalty:
                continue  # It holds no part for anyone, and its load is the only score there.
            plain_blocks = free_blocks if tight else common_blocks
            view = View(worker, shared, users, looked, penalty, free_blocks, plain_blocks)
            views.append(view)
            best = self._best_at(view, best, cold, now_ns)
        if best is not None:
            return best
        if waiting is not None:
            for user, until_ns in waiting.found():
                self.cold_waits.note(user, until_ns)
        return self._best_declined(views, cold, now_ns)

    def _best_at(
        self, view: View, best: Choice | None, cold: dict[User, Choice | None], now_ns: int
    ) -> Choice | None:
        """The better of ``best`` and the best pair at one worker that is not declined.

        Who holds a part of a head there is looked at first, the largest share first; then the others in order,
        until one fits that neither age nor id could still beat: they all have the same score.
        """
        worker_id, know, this_pass = view.worker.spec.worker_id, self.heads.at, self._pass
        warm: list[tuple[float, int, User, BestHead]] = []
        others: list[tuple[User, BestHead]] = []
        for user in view.looked:
            head = user.best.get(worker_id)
            if head is None:
                head = user.cold
                if head is None or not head.uniform or worker_id in user.warm_workers:
                    head = know(user, view.worker)
            if head.declined_pass == this_pass:
                continue
            if head.share > 0.0:
                warm.append((-head.share, len(warm), user, head))
            else:
                others.append((user, head))
        warm.sort()
        for share, _, user, head in warm:
            if best is not None and -share - view.penalty < best.score:
                break
            best = self._better(view, user, head, best, cold, now_ns)
        if best is not None and best.score > -view.penalty:
            return best
        in_order = len(view.front.bands) == 1
        for user, head in others:
            if best is not None and best.score == -view.penalty and path_v(user) > path_v(best.user):
                if in_order:
                    break
                continue
            best = self._better(view, user, head, best, cold, now_ns)
        return best

    def _better(
        self,
        view: View,
        user: User,
        head: BestHead,
        best: Choice | None,
        cold: dict[User, Choice | None],
        now_ns: int,
    ) -> Choice | None:
        """The better of ``best`` and what one user may run at a worker without being declined."""
        if head.plain and head.blocks <= view.plain_blocks:
            choice = Choice(user, head.queued, view.worker, head.tokens, head.share - view.penalty)
        else:
            if head.is_declined():
                head.declined_pass = self._pass
                return best
            found = self._at(view, user, head, cold, now_ns)
            if found is None:
                return best
            if found.declined:
                self._pairs.note_declined(head, user, view.worker, now_ns)
                return best
            choice = found
        if best is not None and choice.score <= best.score and not self._wins_tie(choice, best, now_ns):
            return best
        choice.front, choice.candidates = view.front, view.users
        return choice

    def _at(
        self, view: View, user: User, head: BestHead, cold: dict[User, Choice | None], now_ns: int
    ) -> Choice | None:
        """A user's best fitting pair at a worker; among workers that are alike for it, worked out once."""
        if head.blocks_min > view.free_blocks:
            return None
        alike = head is user.cold and head.uniform and head.blocks_max <= view.plain_blocks
        return self._pairs.in_full_once(user, view.worker, view.penalty, cold if alike else None, now_ns)

    def _best_declined(self, views: list[View], cold: dict[User, Choice | None], now_ns: int) -> Choice | None:
        """Where every pair is declined: of the most-behind user that need not wait on, the best pair."""
        best: Choice | None = None
        this_pass = self._pass
        for view in views:
            worker_id = view.worker.spec.worker_id
            for user in view.looked:
                if best is not None and best.user is not user and user.path > best.user.path:
                    continue
                head = user.best.get(worker_id)
                if head is None:
                    head = user.cold
                    if head is None or not head.uniform or worker_id in user.warm_workers:
                        head = self.heads.at(user, view.worker)
                if head.waits_until_ns > now_ns and (head.declined_pass == this_pass or head.is_declined()):
                    head.declined_pass = this_pass
                    self.cold_waits.note(user, head.waits_until_ns)
                    continue
                choice = self._at(view, user, head, cold, now_ns)
                if choice is None:
                    continue
                if choice.waits_until_ns > now_ns:
                    self.cold_waits.note(user, choice.waits_until_ns)
                elif best is None or self._is_better_declined(choice, best, now_ns):
                    best = choice
                    choice.front, choice.candidates = view.front, view.users
        return best

    def _wins_tie(self, choice: Choice, best: Choice, now_ns: int) -> bool:
        if choice.score < best.score:
            return False
        mine_v, its_v = path_v(choice.user), path_v(best.user)
        if mine_v != its_v:
            return mine_v < its_v
        if choice.queued.age != best.queued.age:
            return choice.queued.age < best.queued.age
        prompt_tokens = choice.queued.prompt_tokens
        mine = (choice.worker.ttft_ms(prompt_tokens - choice.cached_tokens, now_ns), choice.worker.spec.worker_id)
        its = (best.worker.ttft_ms(prompt_tokens - best.cached_tokens, now_ns), best.worker.spec.worker_id)
        return mine < its

    def _is_better_declined(self, choice: Choice, fallback: Choice, now_ns: int) -> bool:
        """The most-behind user comes first, then what is best for it."""
        if choice.user is not fallback.user:
            return choice.user.path < fallback.user.path
        return choice.score > fallback.score or self._wins_tie(choice, fallback, now_ns)
