"""A seeded adversary: tenants, workers and affinities as unkind as the interface allows, against one scheduler.

Every choice comes from one ``random.Random(seed)``; a run is replayed by its seed. What each leg truly uses is
decided at its grant, far from the estimate in either direction, and the engine's cached tokens are not those
predicted. A run goes on until so many requests were granted, and ends by draining: nothing new is submitted and
everything that is open ends. Worlds are small on purpose: where few compete for little, every rule is at its edge.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from tests.properties.fairness_oracle import Oracle

from evenhand.core.cache_map import CacheMap
from evenhand.core.facts import (
    LegOutcome,
    OutputEstimatorKind,
    RateLimits,
    Request,
    SchedulerConfig,
    TenantSpec,
    TenantState,
    Ticket,
    Usage,
    WorkerLoad,
    WorkerSpec,
)
from evenhand.core.fold import fold
from evenhand.core.ids import Epoch, PoolId, RequestId, Seq, TenantId, WorkerId
from evenhand.core.kv import KvBatch, Removed, Stored
from evenhand.core.presence import Presence
from evenhand.core.scheduler import PoolScheduler
from evenhand.core.steps import (
    BandsChanged,
    Cancel,
    Effect,
    Granted,
    Input,
    LegEnded,
    MapChanged,
    Renew,
    Settle,
    Submit,
    TenantChanged,
    Tick,
    WakeAt,
    WorkerDrained,
    WorkerGone,
    WorkerHeard,
    WorkerJoined,
)

POOL = PoolId("pool")
BLOCK = 16
MS = 1_000_000
STEPS_PER_GRANT_MAX = 12
"""A run whose world lets too little through ends by its steps."""

GRANTS = 200


@dataclass(frozen=True)
class Unkindness:
    """What the adversary may do besides submitting and settling."""

    workers_max: int = 3
    tenants_max: int = 5
    slots: tuple[int, ...] = (1, 2, 3, 4, 9)
    grants: int = GRANTS
    worker_loss: bool = False
    worker_sizes: bool = False
    """Workers of different KV size and length, requests that fit only some."""
    weight_changes: bool = False
    limits: bool = False
    """Concurrency limits and suspended tenants."""
    cancels: bool = False
    expiry: bool = False
    deadlines: bool = False
    retries: bool = False
    """Requests that are open are submitted again."""
    scaled_window: bool = False
    tight_kv: bool = False
    client_estimates: bool = True
    restarts: bool = False
    """The scheduler is replaced by a successor that has only its checkpoint."""
    bands: bool = False
    """Several bands, tenants that move between them, bands that come and go and weigh otherwise."""
    users: bool = False
    """Tenants with several users of different weights."""
    guarantees: bool = False
    """Tenants that are guaranteed a part of the pool, more than there is at times."""
    rate_limits: bool = False
    """Limits per minute, of tenants and of their users, tight enough to bind at times."""
    approximate: bool = False
    """Workers that send no events."""
    held_up: bool = False
    """Requests that need a whole worker or exclude all workers but one: they have no use for most open rooms."""
    engine_loads: bool = False
    """Engines that report themselves full, or nearly and with requests waiting, and otherwise again later."""
    one_sided: bool = False
    """The first tenant is charged far too much for each leg, the others what they use."""


FEATURES = (
    "worker_loss",
    "worker_sizes",
    "weight_changes",
    "limits",
    "cancels",
    "expiry",
    "deadlines",
    "retries",
    "scaled_window",
    "tight_kv",
    "restarts",
    "bands",
    "users",
    "guarantees",
    "rate_limits",
    "approximate",
    "held_up",
    "engine_loads",
)
"""What a seed turns on or off by itself."""

FEATURES_APART = ("held_up", "engine_loads")
"""Drawn apart: worlds without them are what they are without these features."""

FEATURE_PROBABILITY = 0.3
LARGE_PROBABILITY = 0.04


def only(*features: str) -> Unkindness:
    """A world in which these features are on, and no others."""
    on: dict[str, Any] = dict.fromkeys(features, True)
    return Unkindness(**on)


def unkindness_of(seed: int) -> Unkindness:
    """The world that a seed stands for, by the seed alone."""
    rng = random.Random(f"world {seed}")
    on: dict[str, Any] = {
        feature: rng.random() < FEATURE_PROBABILITY for feature in FEATURES[: -len(FEATURES_APART)]
    }
    for feature in FEATURES_APART:
        on[feature] = random.Random(f"{feature.replace('_', ' ')} {seed}").random() < FEATURE_PROBABILITY
    if rng.random() < LARGE_PROBABILITY:
        return Unkindness(workers_max=6, tenants_max=12, **on)
    if rng.random() < 0.05:
        return Unkindness(one_sided=True)
    return Unkindness(workers_max=rng.choice([1, 2, 3, 5]), tenants_max=rng.choice([2, 3, 4, 6]), **on)


def play(seed: int) -> "Adversary":
    """Run the world of a seed; raises ``Broken`` where a property does not hold."""
    adversary = Adversary(seed, unkindness_of(seed))
    adversary.run()
    return adversary


class Adversary:
    def __init__(self, seed: int, unkindness: Unkindness, exact: bool = True) -> None:
        self.rng = rng = random.Random(seed)
        self.unkind = unkindness
        self.config = SchedulerConfig(
            POOL,
            window_fixed=None if unkindness.scaled_window else rng.choice([0.0, 50.0, 300.0, 2_000.0]),
            tenants_considered_max=rng.choice([1, 2, 32]),
            sticky_tenants_max=rng.choice([1, 2, 16]),
            requests_considered_max=rng.choice([1, 3, 8]),
            cold_decline_tokens=rng.choice([32, 64, 512]),
            overtakes_max=rng.choice([0, 1, 4, 32]),
            prefill_pending_max_tokens=rng.choice([200, 2_048, 1 << 31]),
            headroom_divisor=rng.choice([2, 8, 1 << 40]),
            ticket_ttl_ms=400 if unkindness.expiry else 1 << 30,
            worker_stale_after_ms=1 << 30,
            worker_lost_after_ms=1 << 31,
            matches_refresh_ms=0,
            guarantee_burst_ms=rng.choice([0.0, 100.0, 1_000.0]),
            users_considered_max=rng.choice([1, 2, 4]),
            bands=(("default", 1.0), ("high", 4.0), ("low", 0.5)) if unkindness.bands else (("default", 1.0),),
            output_estimate_default_tokens=rng.choice([1, 64, 400]),
            output_estimator=rng.choice(list(OutputEstimatorKind)),
        )
        self.bands = dict(self.config.bands)
        self.map = CacheMap()
        self.presence = Presence(self.map)
        self.scheduler = PoolScheduler(self.config, self.presence)
        self.oracle = Oracle(self.scheduler, self.config, self.presence, exact)
        self.now_ns = 0
        self.tenants: dict[TenantId, TenantSpec] = {}
        self.workers: dict[WorkerId, WorkerSpec] = {}
        self.seqs: dict[WorkerId, int] = {}
        self.running: dict[str, Ticket] = {}
        self.truth: dict[str, Usage] = {}
        self.count = self.key = 0
        self.wake_at_ns: int | None = None
        self.families = [self._chain(family) for family in range(rng.randrange(1, 5))]
        self.on: dict[TenantId, bool] = {}
        self.on_effects: Callable[[tuple[Effect, ...]], object] = lambda effects: None

    def run(self) -> None:
        rng = self.rng
        for index in range(rng.randrange(2, self.unkind.tenants_max + 1)):
            tenant_id = TenantId(f"t{index}")
            weight, band = rng.choice([0.25, 1.0, 1.0, 3.0]), rng.choice(list(self.bands))
            guaranteed = rng.choice([0.0, 0.0, 0.1, 0.5]) if self.unkind.guarantees else 0.0
            spec = TenantSpec(tenant_id, weight, band=band, guaranteed_share=guaranteed)
            if self.unkind.rate_limits:
                spec = replace(spec, rate_limits=self._rates(), user_rate_limits=self._rates())
            self._tenant(replace(spec, user_weights=self._user_weights()))
            self.on[tenant_id] = True
        self.ids = list(self.on)
        for index in range(rng.randrange(1, self.unkind.workers_max + 1)):
            self._join(WorkerId(f"w{index}"))
        for _ in range(self.unkind.grants * STEPS_PER_GRANT_MAX):
            if self.oracle.grants >= self.unkind.grants:
                break
            self.now_ns += int(rng.random() * 20 * MS)
            self._act()
        self._drain()
        self.oracle.judge_bounds()
        self.oracle.drained()

    # Acts

    def _act(self) -> None:
        rng, unkind = self.rng, self.unkind
        roll = rng.random()
        if roll < 0.46:
            self._submit()
        elif roll < 0.86:
            self._settle()
        elif roll < 0.88:
            tenant_id = rng.choice(self.ids)
            self.on[tenant_id] = not self.on[tenant_id]
        elif roll < 0.90:
            self._events()
        elif roll < 0.91:
            self._step(Tick())
        elif roll < 0.92 and self.running:
            ticket = rng.choice(list(self.running.values()))
            truth = self.truth[ticket.ticket_id]
            self._step(Renew(ticket.ticket_id, replace(truth, output_tokens=truth.output_tokens // 2)))
        elif roll < 0.94 and unkind.cancels:
            self._cancel()
        elif roll < 0.95 and unkind.weight_changes:
            spec = rng.choice(list(self.tenants.values()))
            weight = rng.choice([0.25, 1.0, 3.0])
            guaranteed = rng.choice([0.0, 0.3]) if unkind.guarantees else 0.0
            spec = replace(spec, weight=weight, guaranteed_share=guaranteed)
            self._tenant(replace(spec, user_weights=self._user_weights()))
        elif roll < 0.957 and unkind.bands:
            self._change_bands()
        elif roll < 0.965 and unkind.limits:
            spec = rng.choice(list(self.tenants.values()))
            state = rng.choice([TenantState.ACTIVE, TenantState.ACTIVE, TenantState.SUSPENDED])
            self._tenant(replace(spec, concurrency_max=rng.choice([0, 1, 2]), state=state))
        elif roll < 0.975 and unkind.retries:
            self._retry()
        elif roll < 0.978 and unkind.restarts:
            self._restart()
        elif unkind.worker_loss:
            self._shake_worker()

    def _submit(self) -> None:
        rng = self.rng
        ids = [tenant_id for tenant_id, is_on in self.on.items() if is_on] or self.ids
        self.count += 1
        family = rng.choice(self.families)
        blocks, own = int(rng.random() * 12), int(rng.random() * 5)
        self.key += own
        keys = family[:blocks] + tuple(range(1_000_000 + self.key, 1_000_000 + self.key + own))
        prompt = len(keys) * BLOCK + 1 + int(rng.random() * (BLOCK - 1))
        output = rng.choice([1, 30, 300])
        if self.unkind.worker_sizes and rng.random() < 0.2:
            prompt, output = 1_500 + rng.randrange(600), 30
        tenant_id = rng.choice(ids)
        expected = rng.choice([None, 1, 200]) if self.unkind.client_estimates else None
        if self.unkind.one_sided:
            output, expected = (2_000, 2_000) if tenant_id == "t0" else (1, 1)
        request = Request(
            RequestId(f"r{self.count}"),
            tenant_id,
            keys,
            prompt,
            output,
            expected,
            deadline_ns=self.now_ns + rng.choice([1, 50, 500]) * MS if self._sometimes("deadlines", 0.3) else None,
            user=rng.choice(["", "u0", "u1", "u2"]) if self.unkind.users else "",
            size_bytes=8 * len(keys),
            excluded_workers=tuple(rng.sample(list(self.workers), 1)) if rng.random() < 0.05 else (),
        )
        if self._sometimes("held_up", 0.06):
            whole = max(spec.kv_blocks for spec in self.workers.values()) * BLOCK - 30
            request = replace(request, prompt_tokens=max(prompt, whole), output_tokens_max=30)
        elif self._sometimes("held_up", 0.1):
            others = tuple(rng.sample(list(self.workers), len(self.workers) - 1))
            request = replace(request, excluded_workers=others)
        self._step(Submit(request))

    def _sometimes(self, feature: str, probability: float) -> bool:
        return bool(getattr(self.unkind, feature)) and self.rng.random() < probability

    def _rates(self) -> RateLimits:
        """None, or some that bind at times: a run lasts some seconds."""
        rng = self.rng
        if rng.random() < 0.5:
            return RateLimits()
        return RateLimits(
            rng.choice([0, 2_000]), rng.choice([0, 20]), rng.choice([0, 600_000]), rng.choice([0, 9_000])
        )

    def _user_weights(self) -> tuple[tuple[str, float], ...]:
        if not self.unkind.users:
            return ()
        return tuple((user, self.rng.choice([0.5, 2.0])) for user in ("u0", "u1") if self.rng.random() < 0.5)

    def _change_bands(self) -> None:
        """A tenant moves, a band weighs otherwise, comes or goes."""
        rng, roll = self.rng, self.rng.random()
        if roll < 0.5:
            spec = rng.choice(list(self.tenants.values()))
            self._tenant(replace(spec, band=rng.choice(list(self.bands))))
            return
        used = {spec.band for spec in self.tenants.values()}
        name = rng.choice(["default", "high", "low", "other"])
        if name in self.bands and name not in used and len(self.bands) > 1 and roll < 0.75:
            del self.bands[name]
        else:
            self.bands[name] = rng.choice([0.5, 1.0, 4.0])
        self._step(BandsChanged(tuple(self.bands.items())))

    def _retry(self) -> None:
        waiting = [w.request for book in self.oracle.books.values() for w in book.admitted.values()]
        if waiting:
            self._step(Submit(self.rng.choice(waiting)))

    def _settle(self) -> None:
        if not self.running:
            return
        rng = self.rng
        ticket = rng.choice(list(self.running.values()))
        truth = self.truth[ticket.ticket_id]
        outcome = LegOutcome.SETTLED
        if self.unkind.worker_loss and rng.random() < 0.05:
            outcome = LegOutcome.WORKER_LOST
        usage = None if rng.random() < 0.05 else truth
        self._step(Settle(ticket.ticket_id, usage, outcome))
        if rng.random() < 0.05:
            self._step(Settle(ticket.ticket_id, truth))

    def _cancel(self) -> None:
        rng = self.rng
        asked = [(t.tenant_id, t.request_id) for t in self.running.values()]
        asked += [(t, r) for t, book in self.oracle.books.items() for r in book.admitted if r not in book.legs]
        if asked:
            tenant_id, request_id = rng.choice(asked)
            usage = rng.choice([None, Usage(), Usage(40, 0, 3)])
            self._step(Cancel(tenant_id, request_id, usage))

    def _events(self) -> None:
        """A worker's cache changes: a family's prefix appears, or goes."""
        if not self.workers:
            return
        rng = self.rng
        worker_id = rng.choice(list(self.workers))
        keys = rng.choice(self.families)[: rng.randrange(1, 12)]
        operation = Stored(keys) if rng.random() < 0.7 else Removed(keys)
        self.seqs[worker_id] = self.seqs.get(worker_id, 0) + 1
        batch = KvBatch(worker_id, self.workers[worker_id].epoch, Seq(self.seqs[worker_id]), (operation,))
        self._woken()  # before the map changes: who is woken is told of the change after it
        fold(self.map, batch)
        self._step(MapChanged(worker_id))

    def _shake_worker(self) -> None:
        rng = self.rng
        roll = rng.random()
        if roll < 0.3 and len(self.workers) > 1:
            worker_id = rng.choice(list(self.workers))
            del self.workers[worker_id]
            self._step(WorkerGone(worker_id, "It left."))
        elif roll < 0.6:
            self._join(WorkerId(f"w{rng.randrange(self.unkind.workers_max + 1)}"))
        elif len(self.workers) > 1:
            self._step(WorkerDrained(rng.choice(list(self.workers)), rng.random() < 0.5))

    def _join(self, worker_id: WorkerId) -> None:
        """Join, or come back with a later epoch."""
        rng = self.rng
        known = self.workers.get(worker_id)
        resized = self._sometimes("worker_sizes", 0.5)
        kv_blocks = 60 if self.unkind.tight_kv else 4_000
        if self.unkind.worker_sizes:
            kv_blocks = rng.choice([60, 140, 4_000])
        spec = WorkerSpec(
            worker_id,
            POOL,
            "http://w",
            Epoch(known.epoch + 1 if known else self.count + 1),
            known.slots if known and not resized else rng.choice(self.unkind.slots),
            known.kv_blocks if known and not resized else kv_blocks,
            BLOCK,
            sends_events=not self._sometimes("approximate", 0.6),
        )
        self.seqs[worker_id] = 0
        self.workers[worker_id] = spec
        self._step(WorkerJoined(spec))

    def _restart(self) -> None:
        checkpoint = self.scheduler.checkpoint(self.now_ns)
        self.presence = Presence(self.map)
        self.wake_at_ns = None
        config = replace(self.config, bands=tuple(self.bands.items()))
        self.scheduler = PoolScheduler(config, self.presence, checkpoint.term + 1)
        self.scheduler.restore(checkpoint, self.now_ns)
        self.oracle.restarted(self.scheduler, self.presence, self.now_ns)
        for spec in self.workers.values():
            self._one(WorkerJoined(spec))

    def _tenant(self, spec: TenantSpec) -> None:
        self.tenants[spec.tenant_id] = spec
        self._step(TenantChanged(spec))

    def _drain(self) -> None:
        for spec in tuple(self.tenants.values()):
            self._tenant(replace(spec, state=TenantState.ACTIVE))
        for worker_id in tuple(self.workers):
            self._step(WorkerDrained(worker_id, False))
        if self.unkind.held_up or self.unkind.engine_loads:
            self.unkind = replace(self.unkind, held_up=False, engine_loads=False)
            for worker_id in tuple(self.workers):
                self._step(WorkerHeard(worker_id, WorkerLoad(0, 0, 0.0, self.now_ns)))
        for _ in range(20_000):
            if not any(book.admitted for book in self.oracle.books.values()):
                break
            self.now_ns += 50 * MS
            if self.running:
                ticket = next(iter(self.running.values()))
                self._step(Settle(ticket.ticket_id, self.truth[ticket.ticket_id]))
            else:
                self._step(Tick())
        else:
            raise AssertionError("the run does not drain")
        self.now_ns += 130_000 * MS  # longer than anything is assumed of a worker
        self._step(Tick())

    def _step(self, input: Input) -> tuple[Effect, ...]:
        if self.unkind.worker_loss and self.workers and self.rng.random() < 0.04:
            load = WorkerLoad(0, 0, 0.0, self.now_ns)
            self._one(WorkerHeard(self.rng.choice(list(self.workers)), load))
        if self.workers and self._sometimes("engine_loads", 0.06):
            used = self.rng.choice([0.0, 0.0, 0.5, 0.9, 0.96, 0.97, 1.0])
            load = WorkerLoad(self.rng.choice([0, 3]), self.rng.choice([0, 0, 2]), used, self.now_ns)
            self._one(WorkerHeard(self.rng.choice(list(self.workers)), load))
        if self.workers and self._sometimes("held_up", 0.05):
            load = WorkerLoad(0, 0, self.rng.choice([0.0, 0.0, 1.0]), self.now_ns)
            self._one(WorkerHeard(self.rng.choice(list(self.workers)), load))
        return self._one(input)

    def _woken(self) -> None:
        if self.wake_at_ns is not None and self.wake_at_ns <= self.now_ns:
            self._one(Tick())

    def _one(self, input: Input) -> tuple[Effect, ...]:
        """As a shell does: whoever asked to be woken is woken first."""
        if not isinstance(input, Tick):
            self._woken()
        if self.wake_at_ns is not None and self.wake_at_ns <= self.now_ns:
            self.wake_at_ns = None
        effects = self.scheduler.step(input, self.now_ns)
        for effect in effects:
            match effect:
                case Granted(ticket):
                    if ticket.ticket_id not in self.truth:
                        self.running[ticket.ticket_id] = ticket
                        self.truth[ticket.ticket_id] = self._true_usage(ticket)
                case LegEnded(ticket):
                    del self.running[ticket.ticket_id]
                case WakeAt(at_ns):
                    if self.wake_at_ns is None or at_ns < self.wake_at_ns:
                        self.wake_at_ns = at_ns
                case _:
                    pass
        self.on_effects(effects)
        self.oracle.observe(input, effects, self.now_ns)
        return effects

    def _true_usage(self, ticket: Ticket) -> Usage:
        rng = self.rng
        if self.unkind.one_sided:
            return Usage(ticket.prompt_tokens, ticket.predicted_cached_tokens, 1)
        cached = rng.choice([0, ticket.predicted_cached_tokens, ticket.prompt_tokens])
        return Usage(ticket.prompt_tokens, cached, int(rng.random() * (ticket.output_tokens_max + 1)))

    def _chain(self, family: int) -> tuple[int, ...]:
        return tuple(family * 1_000 + i + 1 for i in range(12))
