"""``evenhand up`` as a user runs it: for engines of one's own, until Ctrl-C."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio
from tests.fixtures.command import CommandProcess
from tests.fixtures.stack import MODEL, Engine, fixed_port

from evenhand.cli import main
from evenhand.client import AsyncClient

KEY = r"tenant\s+(\S+)\s+EVENHAND_ADDRESS=(\S+) EVENHAND_API_KEY=(\S+)"
REFUSALS = [
    (("--worker", "nowhere"), "address"),
    (("--worker", "http://a:1", "--kv-events", "nowhere"), "kv_events endpoint 'nowhere'"),
    (("--worker", "http://a:1", "--slots", "many"), "slots"),
    (("--kv-events", "tcp://a:1"), "stands before the --worker"),
    (("--worker", "http://a:1", "--listen", "0.0.0.0:7077"), "listens on loopback only, not on 0.0.0.0:7077"),
    (("--worker", "http://a:1", "--listen", "7077"), "must be HOST:PORT, not '7077'"),
    ((), "Name your engines with --worker, or with --file"),
    (("--file", "absent.yaml"), "absent.yaml cannot be read"),
    (("--file", "bad.yaml"), "bad.yaml is no YAML"),
    (("--file", "wrong.yaml"), "workers.0.address"),
    (("--worker", "http://a:1", "--listen", "127.0.0.1:0", "--data-dir", "bad.yaml/x"), "yaml/x cannot be used"),
]

pytestmark = pytest.mark.timeout(240)


@pytest_asyncio.fixture
async def engines(tmp_path: Path) -> AsyncIterator[list[Engine]]:
    """Two engines, of which only the first is started."""
    fleet = [Engine(f"engine-{number}", tmp_path) for number in range(2)]
    await fleet[0].start()
    yield fleet
    for engine in fleet:
        await engine.process.stop()


def up(folder: Path, engines: list[Engine], port: int) -> CommandProcess:
    workers = [engine.worker for engine in engines]
    options = [
        option
        for worker in workers
        for option in ("--worker", worker.address, "--kv-events", worker.kv_events, "--replay", worker.replay)
    ]
    where = ("--data-dir", str(folder / "data"), "--listen", f"127.0.0.1:{port}")
    return CommandProcess("up", *options, "--slots", "4", *where)


async def ask(address: str, key: str) -> str:
    """One request with the printed key; the engine's answer."""
    async with (
        AsyncClient(address, pool="default", api_key=key) as client,
        aiohttp.ClientSession() as http,
        client.acquire(tokens=list(range(1, 100)), max_output_tokens=4) as grant,
    ):
        body = {"model": MODEL, "prompt": list(range(1, 100)), "max_tokens": 4, "cache_salt": grant.cache_salt}
        async with http.post(f"{grant.address}/v1/completions", json=body) as response:
            answer = await response.json()
        grant.record_usage(answer["usage"])
        return str(answer["choices"][0]["text"])


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


async def test_it_serves_until_ctrl_c_and_a_second_run_has_the_same_keys(
    tmp_path: Path, engines: list[Engine]
) -> None:
    """One engine does not answer at first: that fails nothing, is said, and ends by itself."""
    first, late = engines
    names = [engine.worker.address.removeprefix("http://").replace(":", "-") for engine in engines]
    port = fixed_port()
    async with up(tmp_path, engines, port) as command:
        tenant, address, key = (await command.says(KEY)).groups()
        assert (tenant, address) == ("default", f"127.0.0.1:{port}")
        await command.says(f"{names[0]}   takes requests at {first.worker.address}")
        assert await ask(address, key)
        await command.says(f"{names[1]}   does not answer at {late.worker.address}; its edge keeps asking")
        await late.start()
        await command.says(f"{names[1]}   takes requests at {late.worker.address}")
        status = (await command.says(r"status\s+(http\S+)"))[1]
        async with aiohttp.ClientSession() as http, http.get(status) as response:
            page = await response.json()
        assert page["workers_known"] == sorted(names)
        ports = [int((await command.says(rf"{what}\s+\S*127\.0\.0\.1:(\d+)"))[1]) for what in ("status", "kafka")]

        family = "\n".join(command.note_family())
        assert all(part in family for part in ("postgres", "broker", "scheduler", "state", "worker-edge"))
        command.interrupt()
        assert await command.ends() == 0
        await command.leaves_nothing()
        assert all(map(is_free, (port, *ports)))

    kept = tmp_path / "data" / "api_keys.json"
    assert json.loads(kept.read_text()) == {"default": key}
    assert kept.stat().st_mode & 0o077 == 0
    logs = "".join(path.read_text(errors="replace") for path in (tmp_path / "data" / "logs").iterdir())
    assert key not in logs

    async with up(tmp_path, engines, port) as command:
        assert (await command.says(KEY)).groups() == ("default", f"127.0.0.1:{port}", key)
        await command.says(f"{names[1]}   takes requests")
        assert await ask(address, key)
        async with up(tmp_path, engines, fixed_port()) as another:
            assert await another.ends() == 1
            assert "in use by another process" in another.said
            await another.leaves_nothing()
        async with up(tmp_path / "else", engines, port) as another:
            assert await another.ends() == 1
            assert f"The scheduler cannot listen on 127.0.0.1:{port}: Address already in use." in another.said
        command.interrupt()
        assert await command.ends() == 0
        await command.leaves_nothing()


async def test_ctrl_c_while_it_starts_leaves_nothing(tmp_path: Path, engines: list[Engine]) -> None:
    async with up(tmp_path, engines, fixed_port()) as command:
        await command.says("starting")
        async with asyncio.timeout(30):
            while not any("postgres" in line for line in command.note_family()):
                await asyncio.sleep(0.01)
        command.interrupt()
        assert await command.ends() == 0
        await command.leaves_nothing()


async def test_killed_with_kill_9_it_takes_everything_with_it(tmp_path: Path, engines: list[Engine]) -> None:
    async with up(tmp_path, engines, fixed_port()) as command:
        await command.says(KEY)
    await command.leaves_nothing()


@pytest.mark.parametrize(("options", "sentence"), REFUSALS)
def test_a_wrong_setting_is_one_sentence(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: tuple[str, ...],
    sentence: str,
) -> None:
    (tmp_path / "bad.yaml").write_text("workers: [")
    (tmp_path / "wrong.yaml").write_text("workers: [{address: 'gpu'}]")
    monkeypatch.chdir(tmp_path)
    try:
        code = main(["up", "--data-dir", str(tmp_path / "data"), *options])
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 0
    assert code in (1, 2)
    told = capsys.readouterr().err.strip().splitlines()[-1]
    assert told.startswith("evenhand up: ")
    assert sentence in told
    assert not (tmp_path / "data").exists()


async def test_a_first_start_that_is_killed_half_way_loses_no_key(tmp_path: Path, engines: list[Engine]) -> None:
    """The key is in the file before anything can be told of it; the next start has that very key."""
    data = tmp_path / "data"
    async with up(tmp_path, engines, fixed_port()) as command:
        async with asyncio.timeout(60):
            while not (data / "logs" / "scheduler.log").exists():
                await asyncio.sleep(0.01)
        command.note_family()
        assert "EVENHAND_API_KEY" not in command.said
    async with up(tmp_path, engines, fixed_port()) as command:
        key = (await command.says(KEY))[3]
        assert json.loads((data / "api_keys.json").read_text()) == {"default": key}
        await command.says(f"takes requests at {engines[0].worker.address}")
        assert await ask((await command.says(KEY))[2], key)
        command.interrupt()
        assert await command.ends() == 0
