"""Facts the scheduler decides upon: tenants, workers, requests, what they cost and what they used.

All frozen. Token counts are whole tokens; costs are floats in cost tokens (see ``CostWeights``); times are
integer nanoseconds of one monotonic clock.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from evenhand.core.ids import Epoch, PoolId, RequestId, TenantId, TicketId, WorkerId
from evenhand.core.setting_bounds import check_settings


@dataclass(frozen=True, slots=True)
class CostWeights:
    """Cost of work: ``uncached·u + cached·c + output·o`` cost tokens, never below ``floor``.

    Cached tokens are never free: a tenant whose prompts are all cached still holds slots and KV memory.
    """

    uncached: float = 1.0
    cached: float = 0.1
    output: float = 2.0
    floor: float = 1.0

    def cost(self, uncached_tokens: int, cached_tokens: int, output_tokens: int) -> float:
        """Cost of one leg, in cost tokens."""
        weighed = self.uncached * uncached_tokens + self.cached * cached_tokens + self.output * output_tokens
        return max(self.floor, weighed)


class TenantState(Enum):
    ACTIVE = "active"
    DRAINING = "draining"
    """Nothing new is admitted; what is queued or running goes on."""
    SUSPENDED = "suspended"
    """Nothing new is admitted and nothing queued is dispatched; what runs goes on."""


@dataclass(frozen=True, slots=True)
class RateLimits:
    """How much may be admitted a minute, refilled smoothly; 0 in a rate: no limit.

    A burst is what a bucket holds at most; 0: one second's worth of its rate, at least 1.
    """

    requests_per_minute: int = 0
    requests_burst: int = 0
    tokens_per_minute: int = 0
    """Prompt tokens, cached or not, and output tokens: estimated at admission, settled to the truth at the end."""
    tokens_burst: int = 0


WEIGHT_MIN, WEIGHT_MAX = 1e-2, 1e2
"""A clock is a cost divided by a weight, and all clocks of a node are compared. One of the least weight that has
had a cost of 10¹² (three years at 10,000 a second) stands at 10¹⁴, where floats are 1/64 apart; a request of 500
moves one of the most weight by 5 there, booked to within 1/6 of a percent. Farther apart, shares would
follow rounding."""


@dataclass(frozen=True, slots=True)
class TenantSpec:
    """What an administrator says of a tenant in a pool."""

    tenant_id: TenantId
    weight: float = 1.0
    concurrency_max: int = 0
    """Open tickets at once; 0: no limit. A tenant at its limit leaves A until a ticket closes."""
    queue_length_max: int = 1_000
    queue_bytes_max: int = 64 * 1024 * 1024
    """Sum of the packed sizes of its queued requests."""
    cache_domain: str = ""
    """Empty: the tenant alone."""
    state: TenantState = TenantState.ACTIVE
    band: str = "default"
    """The band of the pool that the tenant stands in; it must be one of ``SchedulerConfig.bands``."""
    user_weights: tuple[tuple[str, float], ...] = ()
    """Weights of the tenant's users among themselves; a user that is not named weighs 1."""
    guaranteed_share: float = 0.0
    """Part of the pool's cost rate R that the tenant gets whenever it asks for it; 0: no guarantee."""
    rate_limits: RateLimits = RateLimits()
    """Of the tenant as a whole."""
    user_rate_limits: RateLimits = RateLimits()
    """Of each of its users; requests that name no user share one bucket."""


class WorkerState(Enum):
    READY = "ready"
    DRAINING = "draining"
    STALE = "stale"
    """Nothing has been heard of it for too long; no candidate, its tickets go on."""
    INCOMPLETE = "incomplete"
    """Its map has a gap and a snapshot is asked for; a candidate, with what is known."""


class WorkerRole(Enum):
    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """What a worker is able to do."""

    worker_id: WorkerId
    pool_id: PoolId
    address: str
    epoch: Epoch
    slots: int
    kv_blocks: int
    block_size_tokens: int
    role: WorkerRole = WorkerRole.BOTH
    data_parallel_rank: int = 0
    model_length_max_tokens: int = 0
    """0: unknown."""
    sends_events: bool = True


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """What the engine last said of its load; ``heard_at_ns`` on the scheduler's monotonic clock."""

    running: int
    waiting: int
    kv_used_fraction: float
    heard_at_ns: int


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt to place. Immutable; where it stands in its life is the scheduler's own state."""

    request_id: RequestId
    tenant_id: TenantId
    block_keys: Sequence[int]
    """Keys of all whole blocks of the prompt, first to last; may be empty (no affinity)."""
    prompt_tokens: int
    output_tokens_max: int
    output_tokens_expected: int | None = None
    """The client's own estimate; None: the scheduler's estimator decides."""
    deadline_ns: int | None = None
    """Past this it is refused with DEADLINE_EXCEEDED; None: no deadline."""
    user: str = ""
    size_bytes: int = 0
    """Packed size, for the tenant's bound in bytes."""
    excluded_workers: tuple[WorkerId, ...] = ()
    """Workers the client has just seen fail; no candidates for this request while another is."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Work a leg truly did, from the engine's ``usage``; never negative."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Part of ``prompt_tokens``, as the engine reports it."""
    output_tokens: int = 0
    cached_known: bool = True
    """False: the engine did not say; ``cached_tokens`` is then taken as predicted, and refutes nothing."""

    @property
    def uncached_tokens(self) -> int:
        return self.prompt_tokens - self.cached_tokens

    @property
    def tokens(self) -> int:
        """Prompt and output, as limits per minute count them."""
        return self.prompt_tokens + self.output_tokens


class RefusalReason(Enum):
    """Why a request ends without a grant. The value is the ErrorInfo reason on the wire."""

    INVALID = "INVALID_REQUEST"
    TOO_LARGE = "REQUEST_TOO_LARGE_FOR_POOL"
    UNKNOWN_TENANT = "UNKNOWN_TENANT"
    TENANT_SUSPENDED = "TENANT_NOT_ACTIVE"
    QUEUE_FULL = "TENANT_QUEUE_FULL"
    RATE_LIMITED = "TENANT_RATE_LIMITED"
    NO_WORKER = "NO_WORKER_IN_POOL"
    DEADLINE = "DEADLINE_PASSED"
    CANCELLED = "CANCELLED_BY_CLIENT"
    SHUTTING_DOWN = "SCHEDULER_SHUTTING_DOWN"
    REQUEST_ID_REUSED = "REQUEST_ID_REUSED"


@dataclass(frozen=True, slots=True)
class Refusal:
    """A request's end without a grant; ``sentence`` is for people and names no other tenant."""

    reason: RefusalReason
    sentence: str
    retry_after_ms: int | None = None
    limit: str = ""
    """With RATE_LIMITED: the limit that bound, such as ``user_tokens_per_minute``."""
    remaining: int | None = None
    """With RATE_LIMITED: what that limit had left, in whole requests or tokens; negative where tokens are owed."""


class LegOutcome(Enum):
    """How a ticket ends; each ticket has exactly one."""

    SETTLED = "settled"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    WORKER_LOST = "worker_lost"


@dataclass(frozen=True, slots=True)
class Ticket:
    """A granted place on a worker, held until it is settled, cancelled, expired or the worker is lost.

    ``weight`` is φ frozen at dispatch: every later correction of this leg divides by it.
    """

    ticket_id: TicketId
    request_id: RequestId
    tenant_id: TenantId
    worker_id: WorkerId
    epoch: Epoch
    leg: int
    """1 for the first try of a request, one more after each lost worker."""
    term: int
    """The scheduler's term of office that granted it."""
    charge: float
    """Cost tokens booked to v at dispatch."""
    weight: float
    prompt_tokens: int
    predicted_cached_tokens: int
    output_tokens_estimated: int
    output_tokens_max: int
    granted_at_ns: int
    prefill_worker_id: WorkerId | None = None
    """Free seat: the worker that prefills where prefill and decode are apart."""
    band: str = "default"
    """Band in which the leg was charged; corrections go to the same clock."""
    band_weight: float = 1.0
    """φ of the band, frozen at dispatch."""
    user: str = ""
    user_weight: float = 1.0
    """φ of the user within its tenant, frozen at dispatch."""
    guaranteed: bool = False
    """Booked to the guarantee ledger, charge and corrections alike, and to no clock."""
    backfilled: bool = False
    """Outside the window, while those that it would have had to wait for were held up; booked as any other."""


class ChoiceReason(Enum):
    """What decided a placement."""

    ONLY_CANDIDATE = "only_candidate"
    """The pool has one worker."""
    AFFINITY = "affinity"
    """The best cached worker, inside the window."""
    LOAD = "load"
    """No useful prefix anywhere: the least loaded worker."""
    FAIRNESS = "fairness"
    """Not where more of the prompt is cached: that worker has no room, and waiting for it was over or did not pay.
    Whether affinity wanted another tenant's request is told by ``Decision.affinity``, whatever the reason."""
    OVERTAKE_CAP = "overtake_cap"
    """The user's oldest request had been overtaken as often as allowed."""
    GUARANTEE = "guarantee"
    """Outside the window, by the tenant's guaranteed share."""
    ADOPTED = "adopted"
    """Granted by an earlier term of the scheduler; the reasons are in that term's records."""


class Candidate(NamedTuple):
    """One worker as it looked for the chosen request at the moment of decision."""

    worker_id: WorkerId
    cached_tokens: int
    score: float
    predicted_ttft_ms: float
    slots_used: int
    slots: int
    pending_prefill_tokens: int


class LevelChoice(NamedTuple):
    """How one level chose: pool among bands, band among tenants, tenant among users."""

    considered: int
    """Children that were looked at for the chosen worker."""
    virtual_time: float
    """v of the chosen child before the charge."""
    lo: float
    """Least v among the children that reach the worker."""
    window: float
    weight: float
    """φ of the chosen child."""


@dataclass(frozen=True, slots=True)
class AffinityWish:
    """The best pair that affinity alone would have taken: no window, no turn, no keeping."""

    worker_id: WorkerId
    tenant_ordinal: int
    """Its tenant's place in the order of its band, 0 the most behind; −1: the chosen tenant itself."""
    cached_tokens: int
    score: float


@dataclass(frozen=True, slots=True)
class Decision:
    """Why a request was placed where it was; the seed of its record."""

    request_id: RequestId
    tenant_id: TenantId
    reason: ChoiceReason
    candidates: tuple[Candidate, ...]
    """The best eight, best first; the chosen one is among them."""
    excluded: tuple[tuple[str, int], ...]
    """How many workers were no candidates, by reason, sorted by reason."""
    tenants_considered: int
    virtual_time_before: float
    virtual_time_after: float
    lo: float
    """Least virtual time among the tenants eligible for the chosen worker."""
    window: float
    wait_ms: float
    fairness_overrode_affinity: bool
    levels: tuple[LevelChoice, ...] = ()
    """Bands, tenants, users: what fairness allowed at each."""
    affinity: AffinityWish | None = None
    """What affinity wanted, where something better than the choice was seen; None: it got its way."""
    guaranteed: bool = False
    """The tenant's guarantee gave it this place, outside the window."""
    backfilled: bool = False
    """Outside the window, while those that are more behind had no use for the rooms that were open."""


class OutputEstimatorKind(Enum):
    """What stands for the output length of a request that does not tell it: learned of each tenant apart."""

    MEAN = "mean"
    """The decayed mean of its finished lengths."""
    ZERO = "zero"
    """Nothing ahead but the one token that every answer has; output is paid for as usage tells of it."""
    DECAYED_MAX = "decayed_max"
    """The largest finished length, forgotten slowly."""
    P75 = "p75"
    """The 75th percentile of its latest finished lengths."""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Settings of one pool's scheduler. Every field is explained below it."""

    pool_id: PoolId
    cost: CostWeights = field(default_factory=CostWeights)
    window_delay_ms: float = 750.0
    """Affinity may reach ``delay · R / Σφ(A)`` of virtual time past the most-behind tenant."""
    window_fixed: float | None = None
    """A constant window in virtual time instead (tests, properties); None: scaled as above."""
    tenants_considered_max: int = 32
    """K: tenants of each band looked at for each worker, by (v, id)."""
    users_considered_max: int = 4
    """Users looked at for each tenant and worker, by (v, id)."""
    sticky_tenants_max: int = 16
    """S: the last distinct tenants served on a worker, looked at beside the first K."""
    requests_considered_max: int = 32
    """H: first requests of each user's queue that are looked at."""
    overtakes_max: int = 128
    """Times a user's oldest request may be passed by its own user's; then it is the only one looked at."""
    prefill_pending_max_tokens: int = 2_048
    """A worker has prefill room while its pending uncached tokens are below this."""
    engine_full_fraction: float = 0.97
    """A worker whose engine reports at least this part of its KV in use gets nothing more until a later report;
    one whose engine has requests waiting of its own, already from 9/10 of that. 0: reports close no worker."""
    cold_decline_tokens: int = 512
    """A pair is declined if a worker without room holds at least this many more of its tokens."""
    cold_wait_factor: float = 4.0
    """If nothing else is left, a declined pair is taken once its request has been declined for this many times
    what the tokens that it lacks there take to compute; 0: at once."""
    cold_wait_ms_max: int = 5_000
    """Longest such wait of a request."""
    cold_wait_backlog_factor: float = 1.0
    """Nor does such a wait last longer than this · the time in which the pool works off what waits in it: where
    hardly anything else waits, a spared prefill serves nobody. 0: the backlog does not matter."""
    load_penalty: float = 0.05
    """Score: cached share of the prompt − this · load; the load is the fuller of slots and KV."""
    prefill_penalty: float = 1.0
    """Score: − this · prefill pending at the worker ÷ ``prefill_pending_max_tokens``. What is cached and what must
    be computed first are weighed alike: both are time to the first token."""
    fill_penalty: float = 0.01
    """Score: − this · the filled part of the worker's cache, so that what must be computed anew is put where it
    evicts least; small against ``load_penalty`` and against any real prefix."""
    headroom_divisor: int = 8
    """The last ⌊slots ÷ this⌋ slots and ⌊KV blocks ÷ this⌋ blocks of each worker go only to tenants below their
    share, while two or more are active."""
    bands: tuple[tuple[str, float], ...] = (("default", 1.0),)
    """Bands of the pool and their weights: they share it as tenants share a band, and none comes first."""
    guarantee_burst_ms: float = 1_000.0
    """A guarantee that was not asked for is kept for so long, no longer."""
    guaranteed_share_sum_max: float = 0.9
    """Guaranteed shares that sum to more than this part of R are scaled down to it."""
    ticket_ttl_ms: int = 30_000
    """A ticket that is not renewed for so long ends."""
    leg_ms_max: int = 3_600_000
    """A leg ends so long after its grant, however often it is renewed; it keeps a place on a worker meanwhile."""
    ticket_confirm_ms: int = 4_000
    """An open ticket of an earlier term ends so long after the take-over unless its holder is heard of: it may
    have been settled since the checkpoint, and would hold a place that nobody uses."""
    taken_over_wait_max_ms: int = 600_000
    """A request known from a ticket of an earlier term alone has no deadline of its own: when it loses its worker,
    it waits at most so long for another place. No client waits longer for an answer by the daemon's own limit."""
    worker_stale_after_ms: int = 5_000
    """A worker unheard of for this long is no candidate."""
    worker_lost_after_ms: int = 15_000
    """A worker unheard of for this long is lost: its legs end."""
    output_estimator: OutputEstimatorKind = OutputEstimatorKind.MEAN
    """What stands for the output length of a request that does not tell it."""
    output_estimate_default_tokens: int = 256
    """Estimate for a tenant that has finished nothing yet, capped by the request's own limit."""
    queued_total_max: int = 100_000
    """Requests in all queues of the pool."""
    legs_max: int = 16
    """Tries of one request; when the last of them loses its worker too, the request is refused."""
    outcomes_remembered_max: int = 100_000
    """Closed tickets whose outcome is still known, so that a second settle is answered with it."""
    matches_refresh_ms: int = 500
    """A queued request's cached tokens are looked up again at most this often while the map changes; the
    chosen one is always looked up afresh before it is charged."""
    prefill_rate_default_tokens_per_s: float = 8_000.0
    """Assumed of a worker until the first times to first token are known."""
    output_token_default_ms: float = 20.0
    """Assumed time per output token of a worker until its first legs have settled."""
    cost_rate_default_per_s: float = 10_000.0
    """R, the pool's cost rate, assumed until legs have settled."""
    retry_after_default_ms: int = 1_000
    """Told to a refused client where nothing better is known."""

    def __post_init__(self) -> None:
        """Raise ``InvalidConfig`` for an impossible value; what bands may be is checked where they also change."""
        check_settings(self)
