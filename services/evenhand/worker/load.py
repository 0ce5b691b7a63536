"""Polling an engine: is it healthy, how loaded is it, what is it.

The answer to one poll is one ``EnginePolled``. An engine that does not answer is unhealthy, which is a fact like
another: polls never raise. ``/health`` and ``/metrics`` are asked together each time, ``/v1/models`` until it has
answered and again after each new process.
"""

import asyncio
import json
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import aiohttp

from evenhand.wire.kv_codec import INT32_MAX, NAME_CHARACTERS_MAX
from evenhand.worker.engine_metrics import EngineMetrics, read_metrics

POLL_TIMEOUT_S = 2.0
PAGE_BYTES_MAX = 8 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class EngineModel:
    """The base model an engine serves."""

    name: str
    model_length_max_tokens: int
    """0 where the engine does not say."""


@dataclass(frozen=True, slots=True)
class EnginePolled:
    """One poll's answer. ``metrics`` is None where that page did not answer or made no sense."""

    healthy: bool
    metrics: EngineMetrics | None
    model: EngineModel | None


class EnginePoller:
    """Polls one engine; an async context manager. Not safe to share between tasks."""

    def __init__(self, address: str, data_parallel_rank: int = 0) -> None:
        """``address`` is ``http://HOST:PORT``."""
        self._address = address.rstrip("/")
        self._rank = data_parallel_rank
        self._session: aiohttp.ClientSession | None = None
        self._model: EngineModel | None = None
        self._process_started_at_ms = 0

    async def __aenter__(self) -> Self:
        # Names are resolved anew for each connection: a worker behind a DNS name may move.
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=POLL_TIMEOUT_S),
            connector=aiohttp.TCPConnector(limit=4, ttl_dns_cache=5),
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def poll(self) -> EnginePolled:
        """Ask once; returns within about ``POLL_TIMEOUT_S``."""
        health, page = await asyncio.gather(self._get("/health"), self._get("/metrics"))
        metrics = None if page is None else read_metrics(page, self._rank)
        if metrics is not None and metrics.process_started_at_ms != self._process_started_at_ms:
            self._process_started_at_ms = metrics.process_started_at_ms
            self._model = None
        if self._model is None and health is not None:
            self._model = base_model(await self._get("/v1/models"))
        return EnginePolled(health is not None, metrics, self._model)

    async def _get(self, path: str) -> str | None:
        """The body of a 200, as text; None for anything else."""
        assert self._session is not None, "the poller is not entered"
        try:
            async with self._session.get(self._address + path) as response:
                if response.status != 200:
                    return None
                body = await response.content.read(PAGE_BYTES_MAX)
                while not response.content.at_eof() and len(body) < PAGE_BYTES_MAX:
                    body += await response.content.read(PAGE_BYTES_MAX - len(body))
                return body.decode("utf-8", "replace")
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
            return None


def base_model(page: str | None) -> EngineModel | None:
    """The first model that is no adapter of another; None where its name could not be announced."""
    try:
        entries: Any = json.loads(page or "")["data"]
        for entry in entries:
            if not entry.get("parent"):
                name, length = str(entry["id"]), entry.get("max_model_len")
                name.encode()  # raises for half a surrogate pair, which JSON can spell
                if not 1 <= len(name) <= NAME_CHARACTERS_MAX or "\0" in name:
                    return None
                return EngineModel(name, length if type(length) is int and 0 < length <= INT32_MAX else 0)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return None
