"""Continuous batching as vLLM's V1 engine does it, without a clock.

One step computes, in this order: one token for every decoding request, the next chunk of the request in
the middle of its prefill, then as much of the waiting requests' prompts as the token budget allows. The
caller is told how long the step took and advances its own time.

::

    duration = base + prefill_token · (prompt tokens computed) + running_sequence · (requests in the step)

Rules taken from the real engine:

- the head of the waiting queue is admitted if a sequence slot is free, tokens are left in the budget, and
  its *whole* prompt fits into the free blocks (cached blocks nobody holds count as free, and are used up);
- cached tokens are whole blocks, at most ``(tokens − 1) // block_size`` of them: the last token is always
  computed, so a wholly cached prompt recomputes its last block;
- a prompt's blocks are findable from the moment they are scheduled, so identical prompts admitted in one
  step share; output blocks become findable as they fill;
- when a decoding request needs a block and none is free, the latest admitted request is preempted: it loses
  its blocks, goes to the front of the queue and computes prompt and output so far again;
- nothing is admitted in a step that preempted.

Holds always: running ≤ ``sequences_max``; tokens in a step ≤ ``batched_tokens_max``; held blocks ≤ blocks
− 1; every submitted request ends in exactly one of *finished* and *cancelled*. Only the latest admitted
request can be in the middle of its prefill, because admission stops once the budget is spent and decodes
never need more than it (``sequences_max <= batched_tokens_max``).

Why a heap: a decoding request changes something only when it enters a block, fills one, or ends. Each has
one entry, at the step of its next such event. A step without any costs O(1) whatever the number of
sequences, and ``advance`` runs many of them at once; the result is the same as step by step, to the block.

With ``prefill_apart`` the engine admits as older ones do, see there: a step then computes whole prompts alone, in
``max(base, prefill_token · tokens)``, or decodes alone.

Not modelled: speculative decoding, tensor parallelism, CUDA graphs, asynchronous scheduling (which
publishes a filled output block up to one step later).
"""

from dataclasses import dataclass
from heapq import heappop, heappush

from evenhand.core.errors import InvalidConfig, InvalidRequest
from evenhand.engine.block_pool import BlockPool
from evenhand.engine.events import KvEvent
from evenhand.engine.limits import EngineLimits, StepTime
from evenhand.engine.prefill_apart import KvNeed, PrefillApart, fullest_tokens
from evenhand.engine.request import EngineRequest, RequestState
from evenhand.engine.waiting import Fcfs, WaitingOrder


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one ``step`` did, or several pure decode steps in one ``advance``.

    Each running request that is past its prefill produced ``steps`` tokens; those in ``first_tokens``
    produced one. Things happen at the end of ``duration_ns``. A step of an idle engine has ``steps`` 0, and so has
    one that computed prompts apart.
    """

    duration_ns: int
    steps: int
    prefill_tokens: int
    output_tokens: int
    admitted: tuple[EngineRequest, ...]
    first_tokens: tuple[EngineRequest, ...]
    finished: tuple[EngineRequest, ...]
    preempted: tuple[EngineRequest, ...]
    events: tuple[KvEvent, ...]


_Due = tuple[int, int, EngineRequest]
"""(decode step, admission number, request): when a decoding request next touches the pool or ends."""


@dataclass(slots=True)
class _Step:
    """What has happened so far in the step under way."""

    budget_tokens: int
    duration_ns: int = 0
    steps: int = 0
    prefill_tokens: int = 0
    output_tokens: int = 0


class Engine:
    """One engine: a pool, a batch, a waiting queue. Deterministic; one caller.

    Example::

        engine = Engine(EngineLimits(), StepTime())
        engine.submit(EngineRequest("r1", BlockContent([1, 2, 3], block_size=16), 50, 20))
        while engine.has_work:
            now_ns += engine.advance(until_ns - now_ns).duration_ns
    """

    def __init__(
        self,
        limits: EngineLimits,
        step_time: StepTime,
        *,
        order: WaitingOrder | None = None,
        prefill_apart: PrefillApart | None = None,
        emit_events: bool = True,
        coalesce_removals: bool = False,
    ) -> None:
        if prefill_apart is not None:
            needed = limits.model_tokens_max + prefill_apart.adapter_tokens
            if needed >= prefill_apart.kv_tokens_max or limits.model_tokens_max > limits.batched_tokens_max:
                raise InvalidConfig(
                    f"model_tokens_max is {limits.model_tokens_max}, but one whole request and its adapter must "
                    f"stay below kv_tokens_max ({prefill_apart.kv_tokens_max}), and its prompt within "
                    f"batched_tokens_max ({limits.batched_tokens_max})."
                )
        self.limits = limits
        self.step_time = step_time
        self.prefill_apart = prefill_apart
        self.pool = BlockPool(limits.blocks, emit_events=emit_events, coalesce_removals=coalesce_removals)
        self.waiting: WaitingOrder = Fcfs() if order is None else order
        self._running: dict[int, EngineRequest] = {}
        """By admission number, so in admission order."""
        self._decoding = 0
        self._prefilling: EngineRequest | None = None
        self._due: list[_Due] = []
        self._decode_step = 0
        self._admissions = 0
        self._blocked_at = -1
        """``pool.version`` when the head last did not fit; no need to try again until it changes."""
        self._blocked: EngineRequest | None = None
        """The request that did not fit then; an order may name another one since."""
        self._decodes_since_admission = 0
        self._departures = 0
        """Requests that left the batch."""
        self._fits_from = 0
        """The decode step before which the blocked request cannot fit unless another one leaves."""
        self._ending: list[EngineRequest] = []
        """Requests that reach the end of their prompt or output in the step under way."""
        self._admitted: list[EngineRequest] = []
        self._first_tokens: list[EngineRequest] = []
        self._finished: list[EngineRequest] = []
        self._preempted: list[EngineRequest] = []

    # ---- what the caller sees

    @property
    def running(self) -> int:
        """Requests that hold blocks."""
        return len(self._running)

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._running) or len(self.waiting) > 0

    def running_requests(self) -> tuple[EngineRequest, ...]:
        """In order of admission."""
        return tuple(self._running.values())

    def output_tokens(self, request: EngineRequest) -> int:
        """Tokens the request has produced so far."""
        if request.state is RequestState.DECODE:
            return request.output_tokens + self._decode_step - request.decoding_since
        return request.output_tokens

    def submit(self, request: EngineRequest) -> None:
        """Queue a fresh request. InvalidRequest if it can never run here."""
        assert request.state is RequestState.WAITING, "a request is submitted once"
        assert not request.block_ids, "a request is submitted once"
        if request.prompt_tokens < 1:
            raise InvalidRequest("The prompt is empty, but must have at least one token.")
        if request.output_tokens_max < 1:
            raise InvalidRequest(f"max_tokens is {request.output_tokens_max}, but must be at least 1.")
        total = request.prompt_tokens + request.output_tokens_max
        if total > self.limits.model_tokens_max:
            raise InvalidRequest(
                f"This model's maximum context length is {self.limits.model_tokens_max} tokens, but the "
                f"request has {request.prompt_tokens} prompt tokens and asks for "
                f"{request.output_tokens_max} output tokens."
            )
        self.waiting.push(request)
        self._blocked_at = -1

    def cancel(self, request: EngineRequest) -> bool:
        """End a request at once and free its blocks. False if it had already ended."""
        if request.state in (RequestState.FINISHED, RequestState.CANCELLED):
            return False
        if request.state is RequestState.WAITING:
            self.waiting.remove(request)
        else:
            self._leave(request)
        request.state = RequestState.CANCELLED
        self._blocked_at = -1
        return True

    def reset_prefix_cache(self) -> bool:
        """Forget everything cached; False, and nothing done, while a request runs."""
        return self.pool.reset()

    def step(self) -> StepResult:
        """One step. Without work it takes no time and changes nothing; a reset's event waits for the next."""
        step = _Step(self.limits.batched_tokens_max)
        if not self.has_work:
            return self._result(step)
        if self.prefill_apart is not None:
            return self._step_apart(step, self.prefill_apart)
        self._decode(step)
        if self._prefilling is not None:
            self._prefill(self._prefilling, step)
        if not self._preempted:
            self._admit(step)
        self._end_step(step)
        return self._result(step)

    def advance(self, duration_ns_max: int) -> StepResult:
        """Like ``step``, then go on while only decoding happens and less than ``duration_ns_max`` has passed.

        Ends with the step in which a request is admitted, preempted or finished.
        A step that has begun is completed, so the duration can exceed the limit by less than one step.
        """
        if self.prefill_apart is not None or self._prefilling is not None or not self._decoding:
            return self.step()
        if self._can_admit():
            return self.step()
        step = _Step(self.limits.batched_tokens_max)
        step_ns = self.step_time.duration_ns(0, self._decoding)
        while step.duration_ns < duration_ns_max or not step.steps:
            steps_left = max(1, -(-(duration_ns_max - step.duration_ns) // step_ns))
            quiet = min(self._next_due() - self._decode_step, steps_left)
            if quiet > 0:
                self._decode_step += quiet
                step.steps += quiet
                step.duration_ns += quiet * step_ns
                step.output_tokens += quiet * self._decoding
                continue
            self._decode(step)
            if not self._preempted and self._can_admit():
                self._admit(step)
            self._end_step(step)
            if self._preempted or self._finished or self._admitted:
                break
        return self._result(step)

    def _step_apart(self, step: _Step, rule: PrefillApart) -> StepResult:
        """Whole prompts alone if it is time and any fits, else decoding alone."""
        if not self._decoding or self._decodes_since_admission >= rule.decode_steps_min:
            self._admit(step)
        if self._admitted:
            self._decodes_since_admission = 0
            step.duration_ns = max(self.step_time.base_ns, self.step_time.prefill_token_ns * step.prefill_tokens)
            self._sample(step)
        else:
            self._decode(step)
            self._decodes_since_admission += 1
            self._end_step(step)
        return self._result(step)

    # ---- the phases of a step

    def _decode(self, step: _Step) -> None:
        """Let the decoding requests whose turn it is enter a block, fill one, or end."""
        due, pool, now, block_size = self._due, self.pool, self._decode_step, self.limits.block_size
        while due and due[0][0] <= now:
            _at, admission, request = heappop(due)
            if request.admission != admission:
                continue
            elapsed = now - request.decoding_since
            computed = request.computed_tokens + elapsed
            block, offset = divmod(computed, block_size)
            if not offset:
                if not pool.free_blocks and not self._make_room(request, 1):
                    continue
                request.block_ids += pool.allocate(1)
            if offset == block_size - 1 and block < request.content.nameable_blocks:
                pool.store(request.content, request.block_ids, block, block + 1)
                request.stored_blocks = block + 1
            output_tokens = request.output_tokens + elapsed + 1
            if output_tokens == request.output_tokens_max:
                self._ending.append(request)
            else:
                self._schedule_due(request, now + 1, computed + 1, output_tokens)
        step.budget_tokens = self.limits.batched_tokens_max - self._decoding
        step.output_tokens += self._decoding

    def _prefill(self, request: EngineRequest, step: _Step) -> None:
        """Compute the next chunk of the one request in the middle of its prefill."""
        chunk = min(request.target_tokens - request.computed_tokens, step.budget_tokens)
        blocks = -(-(request.computed_tokens + chunk) // self.limits.block_size) - len(request.block_ids)
        if not self._make_room(request, blocks):
            return
        request.block_ids += self.pool.allocate(blocks)
        self._compute(request, chunk, step)

    def _admit(self, step: _Step) -> None:
        """Take requests from the head of the waiting queue while sequences, tokens and blocks last."""
        while step.budget_tokens > 0 and len(self._running) < self.limits.sequences_max:
            request = self.waiting.head(self.pool)
            if request is None or self._still_blocked(request):
                return
            if self.prefill_apart is not None and request.total_tokens > step.budget_tokens:
                return
            if not self._try_admit(request, step):
                self._blocked = request
                self._blocked_at = self.pool.version if self.prefill_apart is None else self._departures
                return

    def _still_blocked(self, request: EngineRequest) -> bool:
        """Whether nothing has changed since it last did not fit that could let it fit."""
        if self._blocked is not request:
            return False
        if self.prefill_apart is None:
            return self._blocked_at == self.pool.version
        return self._blocked_at == self._departures and self._decode_step < self._fits_from

    def _fits_apart(self, request: EngineRequest, rule: PrefillApart) -> bool:
        """Whether the memory holds every output to its end."""
        needs = [KvNeed(request.total_tokens + 1, request.output_tokens_max - request.output_tokens - 1)]
        for running in self._running.values():
            produced = self.output_tokens(running) if running.state is RequestState.DECODE else 1
            needs.append(KvNeed(running.prompt_tokens + produced, running.output_tokens_max - produced - 1))
        adapters = {request.label, *(running.label for running in self._running.values())}
        missing = fullest_tokens(needs) + rule.adapter_tokens * len(adapters) + 1 - rule.kv_tokens_max
        # Whoever is admitted a step later has one token less at each later moment, so without a departure the
        # fullest moment falls by at most one token a step.
        self._fits_from = self._decode_step + max(0, missing)
        return missing <= 0

    def _try_admit(self, request: EngineRequest, step: _Step) -> bool:
        if self.prefill_apart is not None and not self._fits_apart(request, self.prefill_apart):
            return False
        pool, block_size, total = self.pool, self.limits.block_size, request.total_tokens
        usable = min(request.content.nameable_blocks, (total - 1) // block_size)
        hits = pool.match(request.content.names(usable), usable)
        if request.full_report:
            pool.report(request.content, len(hits))
        whole = -(-total // block_size)
        if whole - len(hits) + pool.unheld(hits) > pool.free_blocks:
            return False
        cached = len(hits) * block_size
        chunk = min(total - cached, step.budget_tokens)
        pool.touch(hits)
        request.block_ids = hits + pool.allocate(-(-(cached + chunk) // block_size) - len(hits))
        request.stored_blocks = len(hits)
        request.computed_tokens = cached
        request.target_tokens = total
        if request.cached_tokens < 0:
            request.cached_tokens = cached
        request.state = RequestState.PREFILL
        request.admission = self._admissions
        self._running[self._admissions] = request
        self._admissions += 1
        self.waiting.remove(request)
        self._admitted.append(request)
        self._compute(request, chunk, step)
        return True

    def _compute(self, request: EngineRequest, chunk: int, step: _Step) -> None:
        """Book a chunk of a prefill, whose blocks are there; what it fills is findable at once."""
        request.computed_tokens += chunk
        step.budget_tokens -= chunk
        step.prefill_tokens += chunk
        full = min(request.computed_tokens // self.limits.block_size, request.content.nameable_blocks)
        if full > request.stored_blocks:
            self.pool.store(request.content, request.block_ids, request.stored_blocks, full)
            request.stored_blocks = full
        if request.computed_tokens == request.target_tokens:
            self._prefilling = None
            self._ending.append(request)
        else:
            self._prefilling = request

    def _end_step(self, step: _Step) -> None:
        step.steps += 1
        step.duration_ns += self.step_time.duration_ns(step.prefill_tokens, len(self._running))
        self._decode_step += 1
        self._sample(step)

    def _sample(self, step: _Step) -> None:
        """One token for whoever reached the end of prompt or output in this step, in admission order."""
        for request in self._ending:
            if request.state is RequestState.DECODE:
                self._sync(request)
            else:
                self._start_decode(request)
                step.output_tokens += 1
            if request.output_tokens == request.output_tokens_max:
                self._leave(request)
                request.state = RequestState.FINISHED
                self._finished.append(request)
        self._ending.clear()

    # ---- moves of one request

    def _start_decode(self, request: EngineRequest) -> None:
        request.output_tokens += 1
        if request.output_tokens == 1:
            self._first_tokens.append(request)
        request.state = RequestState.DECODE
        request.decoding_since = self._decode_step
        self._decoding += 1
        if request.output_tokens < request.output_tokens_max:
            self._schedule_due(request, self._decode_step, request.computed_tokens, request.output_tokens)

    def _schedule_due(self, request: EngineRequest, at: int, computed: int, output_tokens: int) -> None:
        """Queue the next step, from ``at`` on, in which the request enters a block, fills one, or ends."""
        block_size = self.limits.block_size
        block, offset = divmod(computed, block_size)
        wait = block_size - 1 - offset
        if block >= request.content.nameable_blocks:
            wait += 1
        if not offset:
            wait = 0
        left = request.output_tokens_max - output_tokens - 1
        heappush(self._due, (at + min(left, wait), request.admission, request))

    def _make_room(self, request: EngineRequest, blocks: int) -> bool:
        """Preempt the latest admitted until ``blocks`` are free. False if that hit ``request`` itself."""
        while self.pool.free_blocks < blocks:
            victim = self._running[next(reversed(self._running))]
            self._leave(victim)
            victim.state = RequestState.WAITING
            victim.computed_tokens = 0
            victim.preemptions += 1
            self.waiting.requeue(victim)
            self._preempted.append(victim)
            if victim is request:
                return False
        return True

    def _leave(self, request: EngineRequest) -> None:
        """Take a running request out of the batch and free its blocks."""
        if request.state is RequestState.DECODE:
            self._sync(request)
            self._decoding -= 1
        if request is self._prefilling:
            self._prefilling = None
        del self._running[request.admission]
        self._departures += 1
        self.pool.free(request.block_ids)
        request.block_ids = []
        request.stored_blocks = 0
        request.admission = -1

    def _sync(self, request: EngineRequest) -> None:
        elapsed = self._decode_step - request.decoding_since
        request.computed_tokens += elapsed
        request.output_tokens += elapsed
        request.decoding_since = self._decode_step

    def _can_admit(self) -> bool:
        return (
            len(self.waiting) > 0
            and len(self._running) < self.limits.sequences_max
            and self._blocked_at != self.pool.version
        )

    def _next_due(self) -> int:
        """The decode step of the earliest live entry; entries of requests that left are dropped."""
        due = self._due
        while due[0][2].admission != due[0][1]:
            heappop(due)
        return due[0][0]

    def _result(self, step: _Step) -> StepResult:
        result = StepResult(
            step.duration_ns,
            step.steps,
            step.prefill_tokens,
            step.output_tokens,
            tuple(self._admitted),
            tuple(self._first_tokens),
            tuple(self._finished),
            tuple(self._preempted),
            self.pool.take_events() if step.steps or self._admitted else (),
        )
        self._admitted.clear()
        self._first_tokens.clear()
        self._finished.clear()
        self._preempted.clear()
        return result
