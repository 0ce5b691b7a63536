"""A digest of what code does: of its syntax tree, so that comments, docstrings and layout do not count.

Runs that are recorded by it need not be repeated because a sentence about the code was mended.
"""

import ast
import hashlib
from collections.abc import Iterable
from pathlib import Path


def code_digest(paths: Iterable[Path], root: Path) -> str:
    """Of Python files under ``root``, in order of their names; 16 hexadecimal digits."""
    sha = hashlib.sha256()
    for path in sorted(paths):
        tree = ast.parse(path.read_bytes())
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                node.body = [each for each in node.body if not _is_text(each)]
        sha.update(str(path.relative_to(root)).encode() + b"\0" + ast.dump(tree).encode() + b"\0")
    return sha.hexdigest()[:16]


def _is_text(statement: ast.stmt) -> bool:
    """A docstring, of whatever it stands after."""
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )
