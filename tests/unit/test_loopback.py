"""Which hosts count as this machine alone, asked in one place by all parts."""

import ast
from pathlib import Path

import evenhand
from evenhand.loopback import is_loopback


def test_which_hosts_are_loopback() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.8.8.8", "::1", "localhost")))
    outside = ("0.0.0.0", "::", "10.0.0.1", "example.org", "localhost.example.org", "")
    assert not any(map(is_loopback, outside))


def test_it_is_asked_in_one_place() -> None:
    askers = [
        path.name
        for path in Path(evenhand.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr == "is_loopback"
    ]
    assert askers == ["loopback.py"]
