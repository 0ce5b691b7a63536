"""A digest of what code does, for runs that are recorded by it."""

import hashlib
from collections.abc import Iterable
from pathlib import Path

from evenhand.simulation.code_text import code_text


def code_digest(paths: Iterable[Path], root: Path) -> str:
    """Of Python files under ``root``, in order of their names; 16 hexadecimal digits."""
    sha = hashlib.sha256()
    for path in sorted(paths):
        sha.update(f"{path.relative_to(root)}\0{code_text(path.read_bytes())}\0".encode())
    return sha.hexdigest()[:16]
