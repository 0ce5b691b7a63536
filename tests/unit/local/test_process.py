"""Child processes: ready or refused with a sentence, stopped, killed, and gone with their parent."""

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from evenhand.core.errors import Unavailable
from evenhand.local.process import ManagedProcess


def python(name: str, code: str, folder: Path) -> ManagedProcess:
    return ManagedProcess(name, (sys.executable, "-c", code), folder / f"{name}.log")


def runs(child: ManagedProcess) -> bool:
    return child.running


def ready_when(path: Path) -> Callable[[], Awaitable[bool]]:
    async def ready() -> bool:
        return path.exists()

    return ready


async def test_a_child_is_ready_then_stopped(tmp_path: Path) -> None:
    mark = tmp_path / "ready"
    child = python(
        "child", f"import pathlib, signal; pathlib.Path({str(mark)!r}).touch(); signal.pause()", tmp_path
    )
    await child.start(ready_when(mark))
    assert runs(child)
    await child.stop()
    assert not runs(child)
    await child.stop()


async def test_a_child_that_ends_is_reported_with_its_last_words(tmp_path: Path) -> None:
    child = python("child", "raise SystemExit('port 7 is in use')", tmp_path)
    with pytest.raises(Unavailable, match=r"The child ended with exit code 1; its log .*\n.*port 7 is in use"):
        await child.start(ready_when(tmp_path / "never"))


async def test_a_child_that_never_gets_ready_is_stopped(tmp_path: Path) -> None:
    child = python("child", "import signal; signal.pause()", tmp_path)
    with pytest.raises(Unavailable, match="was not ready within"):
        await child.start(ready_when(tmp_path / "never"), timeout_s=0.3)
    assert not runs(child)


async def test_a_deaf_child_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evenhand.local.process.STOP_SECONDS_MAX", 0.2)
    mark = tmp_path / "ready"
    deaf = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    code = f"import pathlib, signal, time; {deaf}; pathlib.Path({str(mark)!r}).touch()\nwhile True: time.sleep(9)"
    child = python("child", code, tmp_path)
    await child.start(ready_when(mark))
    await child.stop()
    assert await child.wait() == -signal.SIGKILL


async def test_a_child_dies_with_its_parent(tmp_path: Path) -> None:
    pid_file = tmp_path / "grandchild"
    parent_code = f"""
import asyncio, pathlib, sys
from evenhand.local.process import ManagedProcess
async def main():
    child = ManagedProcess("child", (sys.executable, "-c", "import signal; signal.pause()"),
                           pathlib.Path({str(tmp_path / "grandchild.log")!r}))
    async def ready(): return True
    await child.start(ready)
    pathlib.Path({str(pid_file)!r}).write_text(str(child.pid))
    await asyncio.Event().wait()
asyncio.run(main())
"""
    parent = python("parent", parent_code, tmp_path)
    await parent.start(ready_when(pid_file))
    async with asyncio.timeout(10):
        while not (text := pid_file.read_text()):
            await asyncio.sleep(0)
    assert parent.pid is not None
    os.kill(parent.pid, signal.SIGKILL)
    await parent.wait()
    async with asyncio.timeout(10):
        while _alive(int(text)):
            await asyncio.sleep(0)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    return state != "Z"
