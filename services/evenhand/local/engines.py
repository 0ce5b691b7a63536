"""A fleet of simulated engines, each a process of its own on free loopback ports."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import aiohttp

from evenhand.local.process import ManagedProcess
from evenhand.local.stack import evenhand
from evenhand.local.stack_file import StackWorker

RESET_SECONDS_MAX = 10.0


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """Engines of one kind. Times as ``evenhand engine --help`` explains them."""

    engines: int = 4
    model: str = "sim"
    block_size: int = 16
    kv_blocks: int = 1_280
    slots: int = 8
    step_base_ms: float = 24.0
    prefill_token_us: float = 120.0
    running_sequence_us: float = 200.0
    batched_tokens_max: int = 1_024


class EngineFleet:
    """``async with EngineFleet(config, logs) as fleet``: all engines answer inside the block."""

    def __init__(self, config: FleetConfig, logs: Path) -> None:
        self.config = config
        self.workers: tuple[StackWorker, ...] = ()
        self.processes = [
            ManagedProcess(f"engine-{number}", self._command(number), logs / f"engine-{number}.log")
            for number in range(config.engines)
        ]

    def _command(self, number: int) -> tuple[str, ...]:
        config = self.config
        return evenhand(
            "engine", "--name", f"engine-{number}", "--model", config.model,
            "--port", "0", "--kv-events-port", "0", "--kv-replay-port", "0",
            "--block-size", str(config.block_size), "--kv-blocks", str(config.kv_blocks),
            "--max-num-seqs", str(config.slots), "--max-num-batched-tokens", str(config.batched_tokens_max),
            "--step-base-ms", str(config.step_base_ms), "--prefill-token-us", str(config.prefill_token_us),
            "--running-sequence-us", str(config.running_sequence_us),
        )  # fmt: skip

    async def __aenter__(self) -> Self:
        try:
            await asyncio.gather(*(process.start(_ready(process.log_file)) for process in self.processes))
            self.workers = tuple(
                StackWorker(worker_id=process.name, slots=self.config.slots, **_addresses(process.log_file) or {})
                for process in self.processes
            )
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stop()

    async def _stop(self) -> None:
        await asyncio.gather(*(process.stop() for process in self.processes))

    async def reset_caches(self, http: aiohttp.ClientSession) -> None:
        """Empty every engine's prefix cache, so that the next run starts cold.

        An engine refuses while requests run; those cancelled just now are given ``RESET_SECONDS_MAX`` to end.
        """
        async with asyncio.timeout(RESET_SECONDS_MAX):
            for worker in self.workers:
                while not await self._reset(worker, http):  # noqa: ASYNC110 - another process tells no event
                    await asyncio.sleep(0.05)

    async def _reset(self, worker: StackWorker, http: aiohttp.ClientSession) -> bool:
        async with http.post(f"{worker.address}/reset_prefix_cache") as response:
            response.raise_for_status()
            return bool((await response.json())["success"])


def _addresses(log_file: Path) -> dict[str, str] | None:
    """What the engine's ready line says; None before it has said it."""
    for line in log_file.read_text(errors="replace").splitlines():
        if line.startswith('{"event": "ready"'):
            said = json.loads(line)
            return {"address": said["url"], "kv_events": said["kv_events"], "replay": said["kv_replay"]}
    return None


def _ready(log_file: Path) -> Callable[[], Awaitable[bool]]:
    async def ready() -> bool:
        return _addresses(log_file) is not None

    return ready
