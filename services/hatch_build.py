"""Builds a wheel whose core is compiled by mypyc, where it is asked for; a wheel is pure Python otherwise.

``HATCH_BUILD_HOOKS_ENABLE=1 pip wheel .`` asks for it, and needs a C compiler. The sources of the core go into
the wheel as they are, each compiled module beside its own: what is installed is always of one piece, and nothing
is built into the source tree, where an extension module would hide a source that was changed after it.

The core stays Python that runs uncompiled. ``INTERPRETED`` names what is left so: modules of plain data that
others subclass or read the annotations of, which mypyc does not keep. They only state facts, so little is lost.
"""

import os
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCE = "services"
CORE = "evenhand/core"
INTERPRETED = frozenset(
    {
        "__init__",
        "announcement",
        "checkpoint",
        "errors",
        "estimator",
        "facts",
        "ids",
        "kv",
        "limits",
        "setting_bounds",
        "status",
        "steps",
    }
)
"""Configurations and errors are subclassed; a checkpoint and all it holds is decoded by annotations; and a bound
says what it was given as it was given, where a compiled float parameter would make 1.0 of 1."""


class CompiledCore(BuildHookInterface):  # type: ignore[type-arg]
    """Adds the compiled modules to a wheel, and says that it is of one platform."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called before the wheel is written. An editable install stays pure: its sources are to be changed."""
        if version == "editable":
            return
        self._folder = tempfile.TemporaryDirectory(prefix="evenhand-core-")
        library = Path(self._folder.name, "library")
        build(Path(self.root), library, Path(self._folder.name, "work"))
        for path in sorted(library.rglob("*")):
            if path.is_file():
                build_data["force_include"][str(path)] = str(path.relative_to(library))
        build_data["pure_python"] = False
        build_data["infer_tag"] = True

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Called when the wheel is written."""
        if version != "editable":
            self._folder.cleanup()


def build(root: Path, library: Path, work: Path) -> None:
    """Compile the core of a source tree into ``library``, as one group whose modules call each other directly."""
    # Imported here: who builds a pure wheel has neither.
    from mypyc.build import mypycify
    from setuptools import Distribution
    from setuptools.command.build_ext import build_ext

    here = Path.cwd()
    os.chdir(root / SOURCE)  # mypyc names modules by their paths from here
    try:
        paths = [str(path) for path in sorted(Path(CORE).glob("*.py")) if path.stem not in INTERPRETED]
        extensions = mypycify(
            ["--config-file=", *paths],
            opt_level="2",
            debug_level="0",
            target_dir=str(work / "c"),
            group_name="evenhand.core.compiled",
        )
        command = build_ext(Distribution({"name": "evenhand-core", "ext_modules": extensions}))
        command.build_lib, command.build_temp = str(library), str(work / "objects")
        command.ensure_finalized()
        command.run()
    finally:
        os.chdir(here)
