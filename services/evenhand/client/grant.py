"""A granted place on a worker, as its holder sees it.

::

    open ──settled──────────────▶ closed      the holder told what was used
      ├────the scheduler says so▶ worker lost  the leg is over, the request waits for another
      └────its time ran out─────▶ closed       no renewal got through for the ticket's time to live

Always: everything here is safe to call from any thread and never waits, but for ``wait_ended``. What is recorded
is told to the scheduler with the next renewal and, finally, with the settlement.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

from evenhand.client.usage import Usage, usage_of
from evenhand.wire.generated import scheduler_pb2 as pb


class Outcome(Enum):
    """How a leg ended."""

    COMPLETED = pb.OUTCOME_COMPLETED
    CANCELLED = pb.OUTCOME_CANCELLED
    FAILED = pb.OUTCOME_FAILED
    WORKER_LOST = pb.OUTCOME_WORKER_LOST


class TicketState(Enum):
    """Where a ticket is in its life."""

    OPEN = "open"
    WORKER_LOST = "worker lost"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker the scheduler weighed."""

    worker_id: str
    cached_tokens: int
    score: float
    predicted_ttft_ms: float
    slots_used: int
    slots: int
    pending_prefill_tokens: int


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why this worker, and why now. ``virtual_time_*`` and ``window`` are in cost tokens per unit of weight."""

    decision_id: str
    reason: str
    sentence: str
    wait_ms: float
    virtual_time_before: float
    virtual_time_after: float
    virtual_time_least: float
    window: float
    fairness_overrode_affinity: bool
    tenants_considered: int
    candidates: tuple[Candidate, ...]
    excluded_workers_by_reason: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Settlement:
    """What became of telling the scheduler how a leg ended."""

    outcome: Outcome
    delivered: bool
    """False where the scheduler did not take it: the ticket had ended before, or could not be reached in time."""
    sentence: str = ""
    """Why it was not delivered."""
    correction: float = 0.0
    """Attained minus charged, in cost tokens."""
    attained_cost: float = 0.0
    request_continues: bool = False
    """The request waits for another leg."""


class Grant:
    """A place on a worker, held until the block that acquired it is left."""

    def __init__(self, response: pb.AcquireResponse) -> None:
        self._response = response
        self._granted_at_ns = time.monotonic_ns()
        self._usage: Usage | None = None
        self._ttft_ms = 0.0
        self._tell_first_token: Callable[[], None] = nobody
        self._worker_failed = False
        self._state = TicketState.OPEN
        self._end_sentence = ""
        self._ended = asyncio.Event()
        # Kept by the client, in its loop:
        self._settlement: Settlement | None = None
        self._usage_told: Usage | None = None
        self._renew_at_s = 0.0
        self._alive_until_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._renewing = False
        self._renew_again = False

    def __repr__(self) -> str:
        return f"<Grant {self.request_id} leg {self.leg} on {self.worker_id}: {self._state.value}>"

    @property
    def request_id(self) -> str:
        return self._response.request_id

    @property
    def ticket(self) -> str:
        """Opaque and signed."""
        return self._response.ticket

    @property
    def worker_id(self) -> str:
        return self._response.worker.worker_id

    @property
    def address(self) -> str:
        """The worker's address as it announced it, ``http://10.0.0.7:8000`` for instance."""
        return self._response.worker.address

    @property
    def base_url(self) -> str:
        """The worker's OpenAI-compatible base URL: the address with a scheme and ``/v1``."""
        address = self.address.rstrip("/")
        url = address if "://" in address else f"http://{address}"
        return url if url.endswith("/v1") else f"{url}/v1"

    @property
    def data_parallel_rank(self) -> int:
        return self._response.worker.data_parallel_rank

    @property
    def prefill_address(self) -> str:
        """Where to prefill, if prefill and decode run apart; empty otherwise."""
        return self._response.prefill_worker.address

    @property
    def cache_salt(self) -> str:
        """Send it to the worker as ``cache_salt``. A secret of the cache domain."""
        return self._response.cache_salt

    @property
    def salt_generation(self) -> int:
        return self._response.salt_generation

    @property
    def predicted_cached_tokens(self) -> int:
        return self._response.predicted_cached_tokens

    @property
    def predicted_ttft_ms(self) -> float:
        return self._response.predicted_ttft_ms

    @property
    def ttl_ms(self) -> int:
        """The ticket ends this long after the grant or its last renewal."""
        return self._response.ttl_ms

    @property
    def leg(self) -> int:
        """1 for the first try of the request, one more after each lost worker."""
        return self._response.leg

    @property
    def charged_cost(self) -> float:
        return self._response.charged_cost

    @property
    def explanation(self) -> Explanation:
        """Why this worker, and why now."""
        why = self._response.explanation
        return Explanation(
            decision_id=why.decision_id,
            reason=why.reason,
            sentence=why.sentence,
            wait_ms=why.wait_ms,
            virtual_time_before=why.virtual_time_before,
            virtual_time_after=why.virtual_time_after,
            virtual_time_least=why.virtual_time_least,
            window=why.window,
            fairness_overrode_affinity=why.fairness_overrode_affinity,
            tenants_considered=why.tenants_considered,
            candidates=tuple(
                Candidate(
                    one.worker_id,
                    one.cached_tokens,
                    one.score,
                    one.predicted_ttft_ms,
                    one.slots_used,
                    one.slots,
                    one.pending_prefill_tokens,
                )
                for one in why.candidates
            ),
            excluded_workers_by_reason=dict(why.excluded_workers_by_reason),
        )

    @property
    def usage(self) -> Usage | None:
        """What was recorded last."""
        return self._usage

    @property
    def settlement(self) -> Settlement | None:
        """What became of the settlement; None until the scheduler has answered it or could not be reached."""
        return self._settlement

    @property
    def state(self) -> TicketState:
        return self._state

    @property
    def end_sentence(self) -> str:
        """Why the ticket ended without this holder's doing; empty while it is open or after a settlement."""
        return self._end_sentence

    def record_usage(
        self,
        reported: object = None,
        *,
        prompt_tokens: int | None = None,
        cached_tokens: int | None = None,
        output_tokens: int | None = None,
    ) -> None:
        """Record what was used so far; the last record counts.

        ``reported`` is an OpenAI usage (object or mapping); ``None`` alone is ignored, as most chunks of a stream
        carry none. Counts may be given instead, and replace only what they name. Raises ``InvalidRequest`` for
        counts that cannot be.
        """
        if reported is not None:
            self._usage = usage_of(reported)
        counts = {"prompt_tokens": prompt_tokens, "cached_tokens": cached_tokens, "output_tokens": output_tokens}
        named = {name: count for name, count in counts.items() if count is not None}
        if named:
            before = self._usage or Usage()
            whole = {name: named.get(name, getattr(before, name)) for name in counts}
            self._usage = Usage(**whole)

    def first_token(self) -> None:
        """Say that the first token is here; once counts.

        The scheduler is told at once: the worker has room for another prefill. The time since the grant is told
        with the settlement.
        """
        if not self._ttft_ms:
            self._ttft_ms = (time.monotonic_ns() - self._granted_at_ns) / 1e6
            self._tell_first_token()

    def worker_failed(self) -> None:
        """Say that the worker did not answer or broke off: leaving the block settles ``WORKER_LOST``."""
        self._worker_failed = True

    async def wait_ended(self) -> TicketState:
        """Wait until the ticket ends, by whoever's doing. Only in the loop of an ``AsyncClient``."""
        await self._ended.wait()
        return self._state

    def _end(self, state: TicketState, sentence: str) -> None:
        """The ticket is over; the first end counts. Runs in the client's loop."""
        if self._state is not TicketState.OPEN:
            return
        self._state, self._end_sentence = state, sentence
        self._ended.set()
        if self._timer is not None:
            self._timer.cancel()


def nobody() -> None:
    """Until the grant is held, and after its end, nobody wants to know."""


def usage_so_far(grant: Grant) -> pb.Usage | None:
    """As a renewal tells it: with a token of output once the first is here, whatever was recorded."""
    message = usage_message(grant.usage)
    if grant._ttft_ms and (message is None or message.output_tokens == 0):
        message = message if message is not None else pb.Usage()
        message.output_tokens = 1
    return message


def usage_message(usage: Usage | None) -> pb.Usage | None:
    """As it travels; None, absent on the wire, where nothing is known."""
    if usage is None:
        return None
    return pb.Usage(
        prompt_tokens=usage.prompt_tokens, cached_tokens=usage.cached_tokens, output_tokens=usage.output_tokens
    )
