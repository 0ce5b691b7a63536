"""A real vLLM engine on the CPU, as a child process of a test.

The interpreter that can import vLLM is named by ``EVENHAND_TEST_VLLM_PYTHON``; ``tests/e2e/vllm_cpu/install.sh``
makes one. The engine runs with a tiny random model, prefix caching, small KV (so that it evicts) and KV events.
"""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from tests.e2e.ports import free_port

START_SECONDS_MAX = 240.0
MODEL = "tiny"
BLOCK_SIZE = 32
"""A multiple of 32, as the CPU engine demands."""
HERE = Path(__file__).parent


@dataclass(slots=True)
class RealEngine:
    """One running engine and where it is reached."""

    name: str
    port: int
    replay_port: int
    kv_blocks: int
    folder: Path
    process: asyncio.subprocess.Process | None = None

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def kv_events(self) -> str:
        """A socket file: the engine binds a TCP endpoint only on every interface."""
        return f"ipc://{self.folder}/{self.name}.kv"

    @property
    def replay(self) -> str:
        return f"tcp://127.0.0.1:{self.replay_port}"

    async def start(self, python: Path, model: Path) -> None:
        """Start and wait until it answers its health check."""
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": self.kv_events,
            "replay_endpoint": self.replay,
            "topic": f"kv@{self.name}@{MODEL}",
        }
        arguments = [
            str(python.parent / "vllm"), "serve", str(model),
            "--host", "127.0.0.1", "--port", str(self.port), "--served-model-name", MODEL,
            "--dtype", "float32", "--enforce-eager", "--max-model-len", "1024", "--max-num-seqs", "8",
            "--max-num-batched-tokens", "1024", "--block-size", str(BLOCK_SIZE),
            "--num-gpu-blocks-override", str(self.kv_blocks), "--enable-prefix-caching",
            "--enable-prompt-tokens-details", "--kv-events-config", json.dumps(events),
        ]  # fmt: skip
        environment = {
            **os.environ,
            "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_HOST_IP": "127.0.0.1", "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        }  # fmt: skip
        with (self.folder / f"{self.name}.log").open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *arguments, stdout=log, stderr=log, env=environment, start_new_session=True
            )
        async with asyncio.timeout(START_SECONDS_MAX), aiohttp.ClientSession() as http:
            while not await self._healthy(http):
                assert self.process.returncode is None, self._log_tail()
                await asyncio.sleep(0.25)

    async def _healthy(self, http: aiohttp.ClientSession) -> bool:
        try:
            async with http.get(f"{self.address}/health") as response:
                return response.status == 200
        except aiohttp.ClientError:
            return False

    def _log_tail(self) -> str:
        return "\n".join((self.folder / f"{self.name}.log").read_text(errors="replace").splitlines()[-15:])

    async def kill(self) -> None:
        """``kill -9`` of the server and its engine core, which would outlive the server alone."""
        await self._end(signal.SIGKILL)

    async def stop(self) -> None:
        await self._end(signal.SIGTERM)

    async def _end(self, number: signal.Signals) -> None:
        if self.process is None:
            return
        for attempt in (number, signal.SIGKILL):
            try:
                os.killpg(self.process.pid, attempt)
                async with asyncio.timeout(15):
                    await self.process.wait()
            except (ProcessLookupError, TimeoutError):
                continue
        self.process = None


def make_engine(name: str, folder: Path, kv_blocks: int) -> RealEngine:
    """An engine on free ports, not yet started."""
    return RealEngine(name, free_port(), free_port(), kv_blocks, folder)


async def make_model(python: Path, folder: Path) -> Path:
    """The tiny model's folder."""
    model = folder / "model"
    process = await asyncio.create_subprocess_exec(
        str(python), str(HERE / "vllm_cpu" / "make_tiny_model.py"), str(model),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode(errors="replace")
    return model


@asynccontextmanager
async def running(*engines: RealEngine, python: Path, model: Path) -> AsyncIterator[None]:
    """Start engines side by side; whatever happens, none is left."""
    try:
        await asyncio.gather(*(engine.start(python, model) for engine in engines))
        yield
    finally:
        await asyncio.gather(*(engine.stop() for engine in engines))
