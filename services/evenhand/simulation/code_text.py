"""What code does, as text: its syntax tree without docstrings, so that comments and layout do not count either.

Digests over it tell by which code something was measured or run, and do not change because a sentence about the
code was mended.
"""

import ast


def code_text(source: bytes) -> str:
    """The syntax tree of a Python file; raises ``SyntaxError`` for what is none."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [each for each in node.body if not _is_text(each)]
    return ast.dump(tree)


def _is_text(statement: ast.stmt) -> bool:
    """A docstring, of whatever it stands after."""
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )
