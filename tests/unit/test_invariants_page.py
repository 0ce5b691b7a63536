"""The page of invariants names tests that exist, and none of its rows is without one."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/invariants.md"
REFERENCE = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def rows(page: str) -> list[tuple[str, str]]:
    """Both cells of each row of each table, heads and rules left out."""
    found = []
    for line in page.splitlines():
        if not line.startswith("|") or set(line) <= set("|-"):
            continue
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        assert len(cells) == 2, f"a row of two cells was expected: {line}"
        if cells[1] != "held by":
            found.append((cells[0], cells[1]))
    return found


@cache
def names_in(path: Path) -> frozenset[str]:
    """Names of the test functions, and of the test cases that a module binds or defines."""
    names: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) if name.startswith("test_"):
                names.add(name)
            case ast.ClassDef(name=name) if name.startswith("Test"):
                names.add(name)
            case ast.Assign(targets=[ast.Name(id=name)]) if name.startswith("Test"):
                names.add(name)
            case _:
                pass
    return frozenset(names)


def faults_of(page: str) -> list[str]:
    """What is wrong with a page, one sentence each."""
    faults = []
    for what, tests in rows(page):
        references = REFERENCE.findall(tests)
        if not references or REFERENCE.sub("", tests).strip():
            faults.append(f"the row {what!r} names no test, or something else beside")
        for path, name in references:
            if not (ROOT / path).is_file():
                faults.append(f"{path} does not exist")
            elif name not in names_in(ROOT / path):
                faults.append(f"{path} has no test {name}")
    return faults


def test_every_test_that_is_named_exists() -> None:
    page = PAGE.read_text()
    assert faults_of(page) == []
    assert len(rows(page)) > 80
    assert page.count("`tests/") == len(REFERENCE.findall(page)) + page.count(
        "`tests/unit/test_invariants_page.py`"
    )


def test_no_behaviour_is_named_twice() -> None:
    named = [what for what, _ in rows(PAGE.read_text())]
    assert len(named) == len(set(named))


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ("| a thing | |", "names no test"),
        ("| a thing | soon |", "names no test"),
        ("| a thing | `tests/unit/test_nowhere.py::test_a` |", "does not exist"),
        ("| a thing | `tests/unit/test_tidy.py::test_nothing_of_the_kind` |", "has no test"),
        ("| a thing | `tests/unit/test_tidy.py::test_no_file` and more |", "something else beside"),
    ],
)
def test_a_page_that_is_wrong_is_seen(row: str, fault: str) -> None:
    (told,) = faults_of(f"| behaviour | held by |\n|---|---|\n{row}\n")
    assert fault in told
