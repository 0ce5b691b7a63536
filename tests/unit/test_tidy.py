"""Style that matters is a test: sizes, purity, honesty of the tree. Reads the files; runs none of them."""

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODULE_LINES_MAX = 500
FUNCTION_LINES_MAX = 70
WORLD = {
    "asyncio",
    "datetime",
    "logging",
    "os",
    "pathlib",
    "random",
    "secrets",
    "socket",
    "threading",
    "time",
    "uuid",
}
INDEX_HOSTS = re.compile(r"pythonhosted|pypi\.org/(simple|packages)|registry\.npmjs|deb\.debian", re.IGNORECASE)
MACHINE_PATHS = re.compile(r"(?<![\w./])/(work|farm|root)/")
LEFT_UNDONE = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b|NotImplementedError")
NO_HISTORY = re.compile(r"#.*\b(no longer|previously|used to be|was renamed|formerly)\b", re.IGNORECASE)
OTHER_PAGES = re.compile(r"\b(FAULTS|DESIGN|STYLE|RIVALS)\.md\b")
"""Pages that are none of this repository's."""
HERE = Path(__file__).resolve()


def tracked() -> list[Path]:
    """Files of the tree: git's where there is git, everything but hidden and built folders elsewhere."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    names = listed.stdout.splitlines()
    if listed.returncode or not names:
        names = [str(path.relative_to(ROOT)) for path in ROOT.rglob("*") if not path.parts[-1].startswith(".")]
    return [path for name in names if (path := ROOT / name).is_file()]


def texts() -> Iterator[tuple[Path, str]]:
    for path in tracked():
        if path == HERE or path.stat().st_size > 2_000_000:
            continue
        try:
            yield path, path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue


def ours() -> Iterator[tuple[Path, str, ast.Module]]:
    """Python that people write here: generated code left out."""
    for path, text in texts():
        if path.suffix == ".py" and "generated" not in path.parts:
            yield path, text, ast.parse(text)


def test_modules_and_functions_keep_their_size() -> None:
    too_long = []
    for path, text, tree in ours():
        is_test = path.name.startswith("test_")  # one beside the other, and read one at a time
        if (lines := text.count("\n")) > MODULE_LINES_MAX and not is_test:
            too_long.append(f"{path.relative_to(ROOT)}: {lines} lines")
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > FUNCTION_LINES_MAX:
                    too_long.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {lines} lines")
    assert not too_long, "\n".join(too_long)


def test_every_module_says_what_it_is_for() -> None:
    silent = [
        str(path.relative_to(ROOT))
        for path, text, tree in ours()
        if text.strip() and ast.get_docstring(tree) is None
    ]
    assert not silent, silent


def test_the_core_knows_nothing_of_the_world() -> None:
    guilty = []
    for path, _, tree in ours():
        if "core" not in path.parts or "tests" in path.relative_to(ROOT).parts:
            continue
        for node in ast.walk(tree):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            elif (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in ("print", "open")
            ):
                guilty.append(f"{path.relative_to(ROOT)}:{node.lineno} calls {node.func.id}")
            guilty += [f"{path.relative_to(ROOT)} imports {n}" for n in names if n.split(".")[0] in WORLD]
            if isinstance(node, ast.AsyncFunctionDef | ast.Await):
                guilty.append(f"{path.relative_to(ROOT)}:{node.lineno} is asynchronous")
    assert not guilty, guilty


@pytest.mark.parametrize(
    ("pattern", "what"),
    [
        (INDEX_HOSTS, "names a package index's host"),
        (MACHINE_PATHS, "holds a path of one machine"),
        (LEFT_UNDONE, "is left undone"),
        (NO_HISTORY, "tells history in a comment"),
        (OTHER_PAGES, "names a page that is not here"),
    ],
)
def test_no_file(pattern: re.Pattern[str], what: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number} {what}: {line.strip()[:100]}"
        for path, text in texts()
        if not {"captures", "generated"} & set(path.parts) and path.name != "LICENSE"
        for number, line in enumerate(text.splitlines(), 1)
        if pattern.search(line)
    ]
    assert not found, "\n".join(found[:20])


def test_everything_is_caught_only_at_the_top_of_a_task() -> None:
    """A handler of every exception must hand it on: log it, keep it, or raise."""
    swallowed = []
    for path, _, tree in ours():
        if "services" not in path.relative_to(ROOT).parts:
            continue
        for node in ast.walk(tree):
            if not isinstance(node, ast.ExceptHandler):
                continue
            caught = node.type.id if isinstance(node.type, ast.Name) else None
            if node.type is not None and caught not in ("Exception", "BaseException"):
                continue
            handed_on = any(isinstance(inner, ast.Raise | ast.Call) for inner in ast.walk(node))
            if not handed_on:
                swallowed.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not swallowed, swallowed


def test_tests_assert_something() -> None:
    empty = []
    for path, _, tree in ours():
        if not path.name.startswith("test_"):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                work = (ast.Assert, ast.With, ast.AsyncWith, ast.Call)
                if not any(isinstance(inner, work) for part in node.body for inner in ast.walk(part)):
                    empty.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}")
    assert not empty, empty


def test_the_top_level_holds_what_it_should() -> None:
    allowed = {
        ".ci", ".gitignore", "CHANGELOG.md", "LICENSE", "Makefile", "README.md", "docker-compose.yml", "docs",
        "migrations", "pyproject.toml", "requirements-dev.txt", "requirements-server.txt", "requirements.txt",
        "schemas", "services", "tests", ".dockerignore",
    }  # fmt: skip
    assert {path.relative_to(ROOT).parts[0] for path in tracked()} <= allowed
