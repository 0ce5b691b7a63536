"""Which code a measured number depends on, as a digest: kept numbers hold until that code changes.

The code behind a policy is its module and all modules of this package that it imports, directly or not, read and
never run; docstrings, comments and layout do not count. So a change to the scheduler's core makes the numbers of
its own policies void, and not those of a rival that does not import it.
"""

import ast
import functools
import hashlib
import importlib.util
from collections.abc import Iterable
from pathlib import Path

from evenhand.simulation.code_text import code_text

PACKAGE = "evenhand"
REGISTRIES = frozenset({"evenhand.policies.table"})
"""Modules that import all policies: whoever asks one of them for a policy names that policy's own module."""


@functools.lru_cache(maxsize=1_024)
def _source(module: str) -> Path | None:
    """The file of a module of this package, by its name; None if there is none."""
    root = importlib.util.find_spec(PACKAGE)
    assert root is not None, "this package is installed"
    assert root.origin is not None, "this package has files"
    base = Path(root.origin).parent.joinpath(*module.split(".")[1:])
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.is_file():
            return path
    return None


@functools.lru_cache(maxsize=1_024)
def _imports(module: str) -> tuple[str, ...]:
    path = _source(module)
    if path is None:
        return ()
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return tuple(name for name in names if name.split(".")[0] == PACKAGE and _source(name) is not None)


@functools.lru_cache(maxsize=1_024)
def _code(module: str) -> bytes:
    """What a module that has a file does: each is behind many cells, and parsing it takes a while."""
    path = _source(module)
    assert path is not None, "only modules with a file are behind others"
    return code_text(path.read_bytes()).encode()


def modules_behind(modules: Iterable[str]) -> tuple[str, ...]:
    """These modules and all of this package that they import, in order of name; nothing behind ``REGISTRIES``."""
    seen: set[str] = set()
    left = [module for module in modules if _source(module) is not None]
    while left:
        module = left.pop()
        if module not in seen and module not in REGISTRIES:
            seen.add(module)
            left += _imports(module)
    return tuple(sorted(seen))


def digest_of(modules: Iterable[str]) -> str:
    """Twelve hex digits over what the code does of ``modules_behind``."""
    digest = hashlib.sha256()
    for module in modules_behind(modules):
        digest.update(f"{module}\n".encode())
        digest.update(_code(module))
    return digest.hexdigest()[:12]
