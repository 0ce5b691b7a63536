"""The published routers, each in a virtual environment of its own under the user's cache folder.

They are installed from whatever index this machine's installer is set up with. What cannot be installed is a
sentence for its row, not a failure of the run.
"""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

INSTALL_SECONDS_MAX = 600

VLLM_ROUTER = ("vllm-router", "0.1.17")
SGLANG_ROUTER = ("sglang-router", "0.3.2")
KVWARDEN = ("kvwarden", "0.1.6")


class NotInstallable(Exception):
    """One sentence that says why a wheel is not there."""


@dataclass(frozen=True, slots=True)
class Wheel:
    """An installed wheel."""

    name: str
    version: str
    folder: Path

    def command(self, name: str) -> str:
        """Path of one of its commands."""
        return str(self.folder / "bin" / name)


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "evenhand" / "alive"


def installed(wheel: tuple[str, str]) -> Wheel:
    """The wheel in its environment, installed if need be; raises ``NotInstallable``."""
    name, version = wheel
    folder = cache_folder() / f"{name}-{version}"
    done = folder / "installed"
    if not done.exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            _run([sys.executable, "-m", "venv", str(folder)])
            _run([str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", f"{name}=={version}"])
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NotInstallable(f"{name} {version} could not be installed: {error}.") from error
        except subprocess.CalledProcessError as error:
            lines = (error.stderr or "").strip().splitlines() or ["the installer said nothing"]
            raise NotInstallable(f"{name} {version} could not be installed: {lines[-1][:200]}") from error
        done.touch()
    return Wheel(name, version, folder)


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=INSTALL_SECONDS_MAX)
