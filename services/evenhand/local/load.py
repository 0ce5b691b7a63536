"""Sends a plan of arrivals through a router to engines, and accounts for what came back.

Open loop: each arrival starts at its planned time whatever else is under way, and its time to first token counts
from that planned time. When the time is over, what is unfinished is cancelled and its wait so far is counted, so
that a policy cannot look fast by never answering.
"""

import asyncio
import json
import time
from collections.abc import Sequence

import aiohttp

from evenhand.client import ClientError
from evenhand.local.accounting import Ledger
from evenhand.local.routers import Placement, Router
from evenhand.local.workload import Arrival
from evenhand.logs import get_logger

log = get_logger("load")

OPEN_REQUESTS_MAX = 2_000
"""Arrivals under way at once; one more is counted as failed instead of piling up without end."""


class LoadRun:
    """One plan through one router."""

    def __init__(
        self, router: Router, arrivals: Sequence[Arrival], ledger: Ledger, http: aiohttp.ClientSession, model: str
    ) -> None:
        self.router = router
        self.ledger = ledger
        self.model = model
        self._arrivals = arrivals
        self._http = http
        self._started_s = 0.0
        self._waiting: dict[int, Arrival] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def elapsed_ms(self) -> float:
        """Since the load began."""
        return (time.monotonic() - self._started_s) * 1_000

    async def run(self, duration_s: float) -> None:
        """Start every arrival at its time; return after ``duration_s`` with nothing left under way."""
        self._started_s = time.monotonic()
        try:
            for arrival in self._arrivals:
                if arrival.at_ms >= duration_s * 1_000:
                    break
                await self._until(arrival.at_ms)
                self._start(arrival)
            await self._until(duration_s * 1_000)
        finally:
            await self._cancel_all()

    async def _until(self, at_ms: float) -> None:
        await asyncio.sleep(max(0.0, at_ms - self.elapsed_ms) / 1_000)

    def _start(self, arrival: Arrival) -> None:
        account = self.ledger.accounts[arrival.tenant]
        account.arrived += 1
        account.planned_cost += self.ledger.cost.cost(len(arrival.prompt), 0, arrival.output_tokens)
        if len(self._tasks) >= OPEN_REQUESTS_MAX:
            account.failed += 1
            return
        task = asyncio.create_task(self._serve(arrival, account.arrived))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, arrival: Arrival, number: int) -> None:
        account = self.ledger.accounts[arrival.tenant]
        self._waiting[id(arrival)] = arrival
        account.waiting += 1
        try:
            async with self.router.place(arrival) as placement:
                try:
                    await self._call(arrival, placement)
                finally:
                    self._book(arrival, placement)
            account.finished += 1
            account.finished_cost += self._cost_of(placement)
        except (ClientError, aiohttp.ClientError, TimeoutError) as error:
            account.failed += 1
            log.info("request failed", tenant=arrival.tenant, number=number, error=str(error))
        finally:
            if self._waiting.pop(id(arrival), None):
                account.waiting -= 1
            else:
                account.running -= 1

    def _first_token(self, arrival: Arrival) -> None:
        if self._waiting.pop(id(arrival), None):
            account = self.ledger.accounts[arrival.tenant]
            account.waiting -= 1
            account.running += 1
            account.first_token_ms.append(self.elapsed_ms - arrival.at_ms)

    async def _call(self, arrival: Arrival, placement: Placement) -> None:
        body = {
            "model": self.model,
            "prompt": list(arrival.prompt),
            "max_tokens": arrival.output_tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        if placement.cache_salt:
            body["cache_salt"] = placement.cache_salt
        async with self._http.post(f"{placement.address}/v1/completions", json=body) as response:
            response.raise_for_status()
            async for line in response.content:
                if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                    continue
                chunk = json.loads(line[6:])
                if chunk.get("choices"):
                    placement.first_token()
                    self._first_token(arrival)
                if usage := chunk.get("usage"):
                    placement.prompt_tokens = usage["prompt_tokens"]
                    placement.output_tokens = usage["completion_tokens"]
                    details = usage.get("prompt_tokens_details") or {}
                    placement.cached_tokens = details.get("cached_tokens") or 0

    def _book(self, arrival: Arrival, placement: Placement) -> None:
        account = self.ledger.accounts[arrival.tenant]
        if placement.prompt_tokens:
            account.got_cost += self._cost_of(placement)
            account.prompt_tokens += placement.prompt_tokens
            account.cached_tokens += placement.cached_tokens

    def _cost_of(self, placement: Placement) -> float:
        uncached = placement.prompt_tokens - placement.cached_tokens
        return self.ledger.cost.cost(uncached, placement.cached_tokens, placement.output_tokens)

    def waits_ms(self, tenant: str) -> list[float]:
        """Times to first token so far, those still waiting counted with what they have waited."""
        now_ms = self.elapsed_ms
        open_waits = (now_ms - arrival.at_ms for arrival in self._waiting.values() if arrival.tenant == tenant)
        return [*self.ledger.accounts[tenant].first_token_ms, *open_waits]

    async def _cancel_all(self) -> None:
        tasks = list(self._tasks)
        unanswered = list(self._waiting.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        now_ms = self.elapsed_ms
        for arrival in unanswered:
            self.ledger.accounts[arrival.tenant].first_token_ms.append(now_ms - arrival.at_ms)
