"""What code does, as text."""

import pytest

from evenhand.simulation.code_text import code_text

CODE = b'"""A module."""\nX = 1\n"""About X."""\n\n\ndef f(x: int) -> int:\n    """Twice."""\n    return 2 * x\n'


def test_what_is_said_about_code_does_not_count() -> None:
    bare = b"X = 1\ndef f(x: int) -> int:\n    return 2 * x  # at least\n"
    assert code_text(CODE) == code_text(bare)


@pytest.mark.parametrize(
    "change", [(b"2 * x", b"3 * x"), (b"X = 1", b"X = 2"), (b"X = 1", b'X = "1"'), (b"f(x", b"g(x")]
)
def test_what_it_does_counts(change: tuple[bytes, bytes]) -> None:
    assert code_text(CODE) != code_text(CODE.replace(*change))
