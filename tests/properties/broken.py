"""How a property that does not hold is told; and what counts as equal among sums of floats."""

SLACK = 1e-6
"""For the rounding of sums of floats, relative to their size."""


class Broken(AssertionError):
    """A property does not hold; the message begins with its name."""


def demand(holds: bool, name: str, what: str, *values: object) -> None:
    """``what`` is a template for ``values``: to write it out costs more than most checks, and is rarely needed."""
    if not holds:
        raise Broken(f"{name}: {what.format(*values) if values else what}")


def at_most(small: float, large: float) -> bool:
    return small <= large + SLACK * (1.0 + abs(small) + abs(large))
