"""The driver: simulated engines under one policy and one workload, from event to event.

Nothing here waits: the next instant is the earliest of the next arrival, the end of an engine's step, a map
message that arrives, a fault, and the policy's own wake-up. Within an instant the order is fixed: steps that end
(by worker), messages, faults and cancels, arrivals, then one ``place``, then idle engines with work begin a step.

An engine may run many pure decode steps in one go (``Engine.advance``), but never past the next instant at which
somebody could send it something: the next arrival, cancel, fault or sample, and while a policy holds a backlog
also the end of any other engine's step. For a policy that is told of maps or output the step that crosses that
instant is made by itself, so that all before it is known by then. So the result is that of single steps.

A request that its client gives up in the middle of a step leaves at the step's end, as in a real engine.

Holds always: same policy, workload and settings, same result, in every process; every arrival ends exactly once.
"""

import random
from collections.abc import Callable
from heapq import heappop, heappush

from evenhand.core.errors import InvalidInput
from evenhand.core.facts import Usage
from evenhand.core.kv import KvBatch, SnapshotPart
from evenhand.engine.batching import Engine, StepResult
from evenhand.engine.content import BlockContent
from evenhand.engine.request import EngineRequest, RequestState
from evenhand.policies.policy import Arrival, FleetWorker, Placed, Policy
from evenhand.simulation.trials.engine_orders import TrialOrder, engine_order
from evenhand.simulation.trials.flights import Flight, TrialWorker
from evenhand.simulation.trials.map_feed import MapFeed
from evenhand.simulation.trials.record import Outcome, TenantSeries, TrialResult
from evenhand.simulation.trials.settings import (
    FOREVER_NS,
    Intervention,
    TrialSettings,
    WorkerFailure,
    check_settings,
)
from evenhand.simulation.trials.workload import Workload

NOTHING = Usage()


class PolicyStuck(InvalidInput):
    """A policy broke the contract: it holds requests though nothing else can happen, or wakes without end."""


def run_trial(policy: Policy, workload: Workload, settings: TrialSettings | None = None) -> TrialResult:
    """Run a workload to its end under a fresh policy. ``InvalidInput`` for settings that make no sense."""
    return Trial(policy, workload, settings or TrialSettings()).run()


class Trial:
    """One run. Built, run once, thrown away."""

    def __init__(self, policy: Policy, workload: Workload, settings: TrialSettings) -> None:
        check_settings(settings)
        self.policy, self.workload, self.settings = policy, workload, settings
        self.random = random.Random(f"trial/{settings.seed}")  # noqa: S311 - no secret
        self.workers = [TrialWorker(index) for index in range(settings.workers)]
        self.by_id = {worker.worker_id: worker for worker in self.workers}
        self.series = {plan.name: TenantSeries(plan) for plan in workload.tenants}
        self.outcomes = [Outcome(arrival) for arrival in workload.arrivals]
        self.flights: dict[int, Flight] = {}
        """Arrivals that have come and not ended, by id."""
        self.steps: list[tuple[int, int, int, TrialWorker, int, StepResult]] = []
        """Steps under way: (end, worker, number, worker, epoch, result)."""
        self.outside: list[tuple[int, int, Callable[[int], None]]] = []
        """What comes from outside: (time, number, what to do)."""
        self.messages: list[tuple[int, int, KvBatch | SnapshotPart]] = []
        self.numbers = 0
        self.next_arrival = 0
        self.next_arrival_ns = workload.arrivals[0].at_ns if workload.arrivals else FOREVER_NS
        self.next_sample_ns = settings.sample_ns or FOREVER_NS
        self.idle: list[TrialWorker] = []
        """Workers that may have work and have no step under way."""
        self.unplaced = 0
        """Of the flights, those that no worker has."""
        self.watches = policy.wants_map or policy.wants_progress
        """The policy is told what happens within a request's life, beyond its ends."""
        self.preemptions = 0
        self.last_end_ns = 0

    # ---- the loop

    def run(self) -> TrialResult:
        """From the first arrival to the last end."""
        for worker in self.workers:
            self._start(worker, 0)
        for failure in self.settings.failures:
            self._later(failure.at_ns, self._failing(failure))
        for intervention in self.settings.interventions:
            self._later(intervention.at_ns, self._acting(intervention))
        now_ns, woken_ns = 0, -1
        while self.flights or self.next_arrival_ns < FOREVER_NS:
            wake_ns = self.policy.wake_at_ns()
            at_ns = self._next_ns()
            woken = wake_ns is not None and wake_ns <= at_ns
            if wake_ns is not None and wake_ns < at_ns:
                at_ns = max(now_ns, wake_ns)
                if at_ns == woken_ns:
                    raise PolicyStuck(f"The policy {self.policy.name!r} wakes without end at {at_ns} ns.")
                woken_ns = at_ns
            if at_ns >= FOREVER_NS:
                raise PolicyStuck(
                    f"The policy {self.policy.name!r} holds {len(self.flights)} requests, but nothing more comes."
                )
            if at_ns > self.settings.until_ns:
                break
            now_ns = at_ns
            self._instant(now_ns, woken)
        while self.next_sample_ns <= self.last_end_ns:
            self._sample()
        return self._result()

    def _next_ns(self) -> int:
        at_ns = self.next_arrival_ns
        if self.steps and self.steps[0][0] < at_ns:
            at_ns = self.steps[0][0]
        if self.messages and self.messages[0][0] < at_ns:
            at_ns = self.messages[0][0]
        if self.outside and self.outside[0][0] < at_ns:
            at_ns = self.outside[0][0]
        return at_ns

    def _instant(self, now_ns: int, woken: bool) -> None:
        """Everything that happens at one moment, in its fixed order."""
        while self.next_sample_ns < now_ns:
            self._sample()
        steps, messages, outside = self.steps, self.messages, self.outside
        while steps and steps[0][0] <= now_ns:
            _at, _index, _number, worker, epoch, result = heappop(steps)
            if worker.engine is not None and worker.epoch == epoch:
                self._step_ended(worker, worker.engine, result, now_ns)
        while messages and messages[0][0] <= now_ns:
            self.policy.map_changed(heappop(messages)[2], now_ns)
        while outside and outside[0][0] <= now_ns:
            heappop(outside)[2](now_ns)
        while self.next_arrival_ns <= now_ns:
            self._arrive(now_ns)
        if self.unplaced or woken:
            for placed in self.policy.place(now_ns):
                self._placed(placed, now_ns)
            if self.policy.refuses:
                for arrival in self.policy.take_refused():
                    self._refused(arrival, now_ns)
        if self.idle:
            self._begin_steps(now_ns)

    def _begin_steps(self, now_ns: int) -> None:
        """Let every idle engine with work begin a step, or as many as nothing can come between."""
        idle, self.idle = self.idle, []
        horizon_ns = min(self.next_arrival_ns, self.next_sample_ns + 1)
        if self.outside and self.outside[0][0] < horizon_ns:
            horizon_ns = self.outside[0][0]
        if self.policy.holds_backlog:
            wake_ns = self.policy.wake_at_ns()
            if wake_ns is not None and wake_ns < horizon_ns:
                horizon_ns = wake_ns
            if self.unplaced:
                for heap in (self.steps, self.messages):
                    if heap and heap[0][0] < horizon_ns:
                        horizon_ns = heap[0][0]
                if len(idle) > 1:
                    # What one of them ends in may send something to another.
                    horizon_ns = now_ns
        told_ns = horizon_ns
        for worker in idle:
            engine = worker.engine
            worker.busy = False
            if engine is None or not engine.has_work:
                continue
            if self.watches:
                # What the steps before the last one did must be known at the horizon.
                told_ns = horizon_ns - self.workload.step_time.duration_ns(0, engine.running)
            result = engine.advance(max(1, told_ns - now_ns))
            assert result.steps, "an engine with work makes a step"
            worker.busy = True
            self.numbers += 1
            end_ns = now_ns + result.duration_ns
            heappush(self.steps, (end_ns, worker.index, self.numbers, worker, worker.epoch, result))

    def _later(self, at_ns: int, act: Callable[[int], None]) -> None:
        self.numbers += 1
        heappush(self.outside, (at_ns, self.numbers, act))

    def _sample(self) -> None:
        for series in self.series.values():
            series.sample()
        self.next_sample_ns += self.settings.sample_ns

    # ---- arrivals and placements

    def _arrive(self, now_ns: int) -> None:
        arrivals = self.workload.arrivals
        arrival = arrivals[self.next_arrival]
        outcome = self.outcomes[self.next_arrival]
        self.next_arrival += 1
        self.unplaced += 1
        more = self.next_arrival < len(arrivals)
        self.next_arrival_ns = arrivals[self.next_arrival].at_ns if more else FOREVER_NS
        series = self.series[arrival.tenant]
        series.waiting += 1
        self.flights[arrival.arrival_id] = Flight(arrival, outcome, series)
        if arrival.cancel_after_ns is not None:
            self._later(arrival.at_ns + arrival.cancel_after_ns, self._cancelling(arrival))
        self.policy.submit(arrival, now_ns)

    def _placed(self, placed: Placed, now_ns: int) -> None:
        flight = self.flights[placed.arrival.arrival_id]
        worker = self.by_id[placed.worker_id]
        assert flight.worker is None, "an arrival is placed once"
        assert worker.engine is not None, "an arrival is placed on a worker that is there"
        arrival = flight.arrival
        names = arrival.block_names
        if arrival.output_block_names:
            names += arrival.output_block_names
        content = BlockContent(names, block_size=self.workload.limits.block_size)
        request = EngineRequest(
            str(arrival.arrival_id), content, arrival.prompt_tokens, arrival.output_tokens, label=flight
        )
        flight.worker, flight.request = worker, request
        flight.base = 0
        self.unplaced -= 1
        outcome = flight.outcome
        outcome.placed_ns, outcome.worker = now_ns, worker.index
        outcome.legs += 1
        worker.flights[arrival.arrival_id] = flight
        worker.engine.submit(request)
        if not worker.busy:
            self.idle.append(worker)
            worker.busy = True

    def _refused(self, arrival: Arrival, now_ns: int) -> None:
        flight = self.flights.pop(arrival.arrival_id)
        self.unplaced -= 1
        flight.outcome.refused = True
        flight.outcome.finished_ns = self.last_end_ns = now_ns
        flight.series.left_waiting()

    # ---- the end of a step

    def _step_ended(self, worker: TrialWorker, engine: Engine, result: StepResult, now_ns: int) -> None:
        """Book what was done, tell the policy, publish what the cache did."""
        policy = self.policy
        worker.steps += result.steps
        worker.prompt_tokens += result.prefill_tokens
        for tenant, count in worker.decoding_of.items():
            self.series[tenant].output_tokens += result.steps * count
        produced: list[tuple[Arrival, int]] = []
        if policy.wants_progress or worker.order is not None:
            steps = result.steps
            produced = [(flight.arrival, steps) for flight in worker.decoding.values()]
        for request in result.admitted:
            self._admitted(worker, request)
        for request in result.preempted:
            self._preempted(worker, request, produced)
        if worker.resuming:
            for request in tuple(worker.resuming):
                self._resume(worker, request, produced)
        for request in result.first_tokens:
            flight: Flight = request.label  # type: ignore[assignment]
            self._decodes(worker, flight, 1)
            flight.series.output_tokens += 1
            flight.outcome.first_token_ns = now_ns
            produced.append((flight.arrival, 1))
            policy.first_token(flight.arrival, worker.worker_id, request.cached_tokens, now_ns)
        if worker.order is not None:
            worker.order.produced(produced)
        if policy.wants_progress and produced:
            policy.progress(worker.worker_id, produced, now_ns)
        for request in result.finished:
            self._finished(worker, request, now_ns)
        if worker.cancels:
            for arrival_id in worker.cancels:
                flight_left = worker.flights.get(arrival_id)
                if flight_left is not None:
                    self._cancel_running(worker, engine, flight_left, now_ns)
            worker.cancels.clear()
        if worker.feed is not None and result.events:
            self._publish(worker.feed, worker.feed.batch(result.events), now_ns)
        self.idle.append(worker)

    def _admitted(self, worker: TrialWorker, request: EngineRequest) -> None:
        flight: Flight = request.label  # type: ignore[assignment]
        if request.preemptions:
            worker.resuming.append(request)
            return
        flight.admitted = True
        flight.series.admitted(request.prompt_tokens, request.cached_tokens)
        flight.series.left_waiting()
        flight.outcome.cached_tokens = request.cached_tokens

    def _preempted(self, worker: TrialWorker, request: EngineRequest, produced: list[tuple[Arrival, int]]) -> None:
        """It left the batch within the step: take back what was booked for the rest of it."""
        flight: Flight = request.label  # type: ignore[assignment]
        self.preemptions += 1
        if request in worker.resuming:
            worker.resuming.remove(request)
        if worker.decoding.pop(flight.arrival.arrival_id, None) is None:
            return
        excess = self._booked(worker, flight) - request.output_tokens
        flight.series.output_tokens -= excess
        flight.base = request.output_tokens
        self._stop_decoding(worker, flight)
        if excess and produced:
            at = next(i for i, (arrival, _) in enumerate(produced) if arrival is flight.arrival)
            produced[at] = (flight.arrival, produced[at][1] - excess)

    def _resume(self, worker: TrialWorker, request: EngineRequest, produced: list[tuple[Arrival, int]]) -> None:
        """Look whether a request that was preempted decodes again; then its prefill gave one token."""
        if request.state in (RequestState.DECODE, RequestState.FINISHED):
            flight: Flight = request.label  # type: ignore[assignment]
            worker.resuming.remove(request)
            if flight.outcome.first_token_ns >= 0:
                flight.series.output_tokens += 1
                produced.append((flight.arrival, 1))
                self._decodes(worker, flight, flight.base + 1)

    def _decodes(self, worker: TrialWorker, flight: Flight, output_tokens: int) -> None:
        flight.base, flight.since = output_tokens, worker.steps
        worker.decoding[flight.arrival.arrival_id] = flight
        tenant = flight.arrival.tenant
        worker.decoding_of[tenant] = worker.decoding_of.get(tenant, 0) + 1

    def _stop_decoding(self, worker: TrialWorker, flight: Flight) -> None:
        tenant = flight.arrival.tenant
        left = worker.decoding_of[tenant] - 1
        if left:
            worker.decoding_of[tenant] = left
        else:
            del worker.decoding_of[tenant]

    def _booked(self, worker: TrialWorker, flight: Flight) -> int:
        """Output tokens booked of a decoding request so far."""
        return flight.base + worker.steps - flight.since

    def _finished(self, worker: TrialWorker, request: EngineRequest, now_ns: int) -> None:
        flight: Flight = request.label  # type: ignore[assignment]
        usage = Usage(request.prompt_tokens, request.cached_tokens, request.output_tokens)
        self._ended(worker, flight, request.output_tokens, now_ns)
        self.policy.finished(flight.arrival, worker.worker_id, usage, now_ns)

    def _ended(self, worker: TrialWorker, flight: Flight, output_tokens: int, now_ns: int) -> None:
        arrival_id = flight.arrival.arrival_id
        if worker.decoding.pop(arrival_id, None) is not None:
            self._stop_decoding(worker, flight)
        del worker.flights[arrival_id], self.flights[arrival_id]
        flight.outcome.output_tokens = output_tokens
        flight.outcome.finished_ns = self.last_end_ns = now_ns

    # ---- the map

    def _publish(self, feed: MapFeed, batch: KvBatch | None, now_ns: int) -> None:
        if batch is None:
            return
        faults = self.settings.map_faults
        if faults.lost and self.random.random() < faults.lost:
            if faults.snapshot_after_ns:
                self._later(now_ns + faults.snapshot_after_ns, self._healing(feed))
            return
        self._deliver(batch, now_ns, faults.lag_ns)
        if faults.doubled and self.random.random() < faults.doubled:
            self._deliver(batch, now_ns, 2 * faults.lag_ns)

    def _deliver(self, message: KvBatch | SnapshotPart, now_ns: int, lag_ns: int) -> None:
        if not lag_ns:
            self.policy.map_changed(message, now_ns)
            return
        self.numbers += 1
        heappush(self.messages, (now_ns + lag_ns, self.numbers, message))

    def _healing(self, feed: MapFeed) -> Callable[[int], None]:
        def heal(now_ns: int) -> None:
            if self.by_id[feed.worker_id].feed is feed:
                self._deliver(feed.snapshot(), now_ns, self.settings.map_faults.lag_ns)

        return heal

    # ---- cancels, failures, interventions

    def _cancelling(self, arrival: Arrival) -> Callable[[int], None]:
        def cancel(now_ns: int) -> None:
            flight = self.flights.get(arrival.arrival_id)
            if flight is None:
                return
            worker = flight.worker
            if worker is None:
                self._cancel_waiting(flight, now_ns)
            elif worker.engine is not None and worker.busy:
                worker.cancels.append(arrival.arrival_id)
            elif worker.engine is not None:
                self._cancel_running(worker, worker.engine, flight, now_ns)

        return cancel

    def _cancel_waiting(self, flight: Flight, now_ns: int) -> None:
        del self.flights[flight.arrival.arrival_id]
        self.unplaced -= 1
        flight.series.left_waiting()
        flight.outcome.cancelled = True
        flight.outcome.finished_ns = self.last_end_ns = now_ns
        self.policy.cancelled(flight.arrival, None, NOTHING, now_ns)

    def _cancel_running(self, worker: TrialWorker, engine: Engine, flight: Flight, now_ns: int) -> None:
        """Take it out of its engine, between two steps."""
        request = flight.request
        assert request is not None
        output_tokens = engine.output_tokens(request)
        prompt_tokens = request.prompt_tokens
        if request.cached_tokens < 0:
            prompt_tokens = 0
            flight.series.left_waiting()
        elif request.state is RequestState.PREFILL and not output_tokens:
            prompt_tokens = request.computed_tokens
        engine.cancel(request)
        if request in worker.resuming:
            worker.resuming.remove(request)
        usage = Usage(prompt_tokens, max(0, min(request.cached_tokens, prompt_tokens)), output_tokens)
        self._ended(worker, flight, output_tokens, now_ns)
        flight.outcome.cancelled = True
        self.policy.cancelled(flight.arrival, worker.worker_id, usage, now_ns)

    def _failing(self, failure: WorkerFailure) -> Callable[[int], None]:
        def fail(now_ns: int) -> None:
            worker = self.workers[failure.worker]
            if worker.engine is None:
                return
            returned = sorted(worker.flights.values(), key=lambda flight: flight.arrival.arrival_id)
            for flight in returned:
                self._take_back(worker, flight)
            worker.engine = worker.feed = None
            if failure.back_after_ns:
                self._later(now_ns + failure.back_after_ns, lambda at_ns: self._start(worker, at_ns))
            self.policy.worker_lost(worker.worker_id, [flight.arrival for flight in returned], now_ns)

        return fail

    def _take_back(self, worker: TrialWorker, flight: Flight) -> None:
        """Un-book what a lost worker had done for a request, which waits again."""
        series = flight.series
        booked = flight.arrival.arrival_id in worker.decoding
        series.output_tokens -= self._booked(worker, flight) if booked else flight.base
        if flight.admitted:
            series.admitted(-flight.arrival.prompt_tokens, -flight.outcome.cached_tokens)
            series.waiting += 1
        flight.admitted = False
        flight.outcome.cached_tokens, flight.outcome.first_token_ns = 0, -1
        flight.worker = flight.request = None
        flight.base = 0
        self.unplaced += 1

    def _start(self, worker: TrialWorker, now_ns: int) -> None:
        """A worker comes to life, with an empty cache."""
        limits, wants_map = self.workload.limits, self.policy.wants_map
        order = engine_order(self.policy)
        worker.order = order if isinstance(order, TrialOrder) else None
        worker.engine = Engine(
            limits, self.workload.step_time, order=order, emit_events=wants_map, coalesce_removals=True
        )
        worker.epoch += 1
        worker.feed = MapFeed(worker.worker_id, worker.epoch) if wants_map else None
        worker.begin()
        joined = FleetWorker(
            worker.worker_id,
            limits.sequences_max,
            limits.blocks - 1,
            limits.block_size,
            limits.batched_tokens_max,
            worker.epoch,
        )
        self.policy.worker_joined(joined, now_ns)

    def _acting(self, intervention: Intervention) -> Callable[[int], None]:
        return lambda now_ns: intervention.act(self.policy, now_ns)

    # ---- the end

    def _result(self) -> TrialResult:
        arrivals = self.workload.arrivals
        return TrialResult(
            policy=self.policy.name,
            workload=self.workload.name,
            workers=len(self.workers),
            outcomes=tuple(self.outcomes),
            series=self.series,
            sample_ns=self.settings.sample_ns,
            ended_ns=self.last_end_ns,
            arrivals_ended_ns=arrivals[-1].at_ns if arrivals else 0,
            preemptions=self.preemptions,
            worker_prompt_tokens=tuple(worker.prompt_tokens for worker in self.workers),
        )
