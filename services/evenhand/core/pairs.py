"""What one user may run at one worker: its best pair there, head by head, and whether that is declined.

A pair is declined while a worker without room holds ``cold_decline_tokens`` more of the prompt. Among workers that
are alike for a user it is worked out once. Written here: what is remembered of users' heads, and who waits.
"""

from evenhand.core.choice import Choice
from evenhand.core.cold_waits import NEVER_NS, ColdWaits
from evenhand.core.facts import SchedulerConfig
from evenhand.core.fitting import Fitting
from evenhand.core.heads import Heads
from evenhand.core.queued import BestHead
from evenhand.core.tenant import User
from evenhand.core.worker import Worker


class Pairs:
    """Looks at pairs of one user and one worker."""

    def __init__(self, config: SchedulerConfig, fitting: Fitting, heads: Heads, cold_waits: ColdWaits) -> None:
        self._decline_tokens = config.cold_decline_tokens
        self._fitting = fitting
        self._heads = heads
        self._cold_waits = cold_waits

    def runs_at(self, user: User, worker: Worker, waiting_too: bool, now_ns: int) -> bool:
        """May something of a user be dispatched to an open worker now?

        With ``waiting_too``, what waits for a warmer worker may not, and nothing of whom has waited long may. Whom
        headroom alone holds back may for a while: in a pool that is full that is so again and again, and is over
        as soon as one of the others' legs ends.
        """
        head = self._heads.at(user, worker)
        blocks_max, blocks_free = (
            self._fitting.blocks_allowed(user.tenant, worker),
            self._fitting.blocks_free(worker),
        )
        if blocks_max < blocks_free and self._runs_within(head, user, worker, blocks_free, waiting_too, now_ns):
            if self._runs_within(head, user, worker, blocks_max, waiting_too, now_ns):
                return True
            self._cold_waits.note_barred(user)
            return not self._cold_waits.is_long(user, now_ns)
        return self._runs_within(head, user, worker, blocks_max, waiting_too, now_ns)

    def _runs_within(
        self, head: BestHead, user: User, worker: Worker, blocks_max: int, waiting_too: bool, now_ns: int
    ) -> bool:
        """As ``runs_at``, within so many KV blocks."""
        if head.blocks_min > blocks_max:
            return False
        if head.plain and head.blocks <= blocks_max:
            return True
        waiting_too = waiting_too or self._cold_waits.is_long(user, now_ns)
        if waiting_too and head.waits_until_ns > now_ns and head.is_declined():
            self._cold_waits.note(user, head.waits_until_ns)
            return False
        found = self.in_full(user, worker, 0.0, blocks_max, now_ns)
        if found is None:
            return False
        if waiting_too and found.declined and found.waits_until_ns > now_ns:
            self.note_declined(head, user, worker, now_ns)
            self._cold_waits.note(user, found.waits_until_ns)
            return False
        return True

    def in_full_once(
        self, user: User, worker: Worker, penalty: float, known: dict[User, Choice | None] | None, now_ns: int
    ) -> Choice | None:
        """As ``in_full``; among workers that are alike for the user, worked out for the first one only."""
        if known is None or user not in known:
            found = self.in_full(user, worker, penalty, self._fitting.blocks_allowed(user.tenant, worker), now_ns)
            if known is not None:
                known[user] = found
            return found
        found = known[user]
        if found is None:
            return None
        choice = Choice(user, found.queued, worker, 0, -penalty)
        choice.declined, choice.waits_until_ns = found.declined, found.waits_until_ns
        return choice

    def in_full(self, user: User, worker: Worker, penalty: float, blocks_max: int, now_ns: int) -> Choice | None:
        """The user's best fitting pair at a worker, head by head: not declined, else one that need not wait."""
        worker_id, size, capacity_tokens = (
            worker.spec.worker_id,
            worker.spec.block_size_tokens,
            worker.capacity_tokens,
        )
        decline_tokens = self._decline_tokens
        free: Choice | None = None
        declined: Choice | None = None
        waits_until_ns = NEVER_NS
        for queued in self._heads.of(user):
            tokens, prompt_tokens = queued.cached.get(worker_id, 0), queued.prompt_tokens
            score = tokens / prompt_tokens - penalty
            if free is not None and score <= free.score:
                continue
            blocks = -(-(prompt_tokens - tokens + queued.output_tokens_estimated) // size)
            if blocks > blocks_max or queued.tokens_total > capacity_tokens:
                continue
            if queued.excluded and self._fitting.is_excluded(queued, worker):
                continue
            is_declined = queued.cached_best - tokens >= decline_tokens and self._fitting.warmer_without_room(
                user.tenant, queued, worker, tokens, decline_tokens
            )
            if not is_declined:
                free = Choice(user, queued, worker, tokens, score)
                continue
            until_ns = self._cold_waits.until_ns(queued, tokens, now_ns)
            waits_until_ns = min(waits_until_ns, until_ns)
            may_be_taken = until_ns <= now_ns
            if declined is None or (may_be_taken, score) > (declined.waits_until_ns <= now_ns, declined.score):
                declined = Choice(user, queued, worker, tokens, score)
                declined.declined, declined.waits_until_ns = True, until_ns
        if free is None and declined is not None:
            declined.waits_until_ns = waits_until_ns
        return free or declined

    def note_declined(self, head: BestHead, user: User, worker: Worker, now_ns: int) -> None:
        """If all heads of a user are declined at a worker, remember by what, and until when none may be taken."""
        heads, worker_id = self._heads.of(user), worker.spec.worker_id
        head.warmer = self._fitting.warmer_for_each(heads, worker, self._decline_tokens)
        if head.warmer:
            head.waits_until_ns = min(
                self._cold_waits.until_ns(queued, queued.cached.get(worker_id, 0), now_ns) for queued in heads
            )
