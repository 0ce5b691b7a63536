"""What the command lines of all simulations share: a wrong word on them ends in one sentence that names it."""

import argparse
from pathlib import Path
from typing import NoReturn

from evenhand.core.errors import InvalidInput

WHOLE_DIGITS_MAX = 18
"""Longest whole number that an option takes."""
SEEDS_MAX = 1_000
"""Seeds of one run where they are given as a count."""


class SentenceParser(argparse.ArgumentParser):
    """Raises ``InvalidInput`` where the standard parser prints its usage and exits."""

    def error(self, message: str) -> NoReturn:
        """Raise what is wrong with the command line as one sentence."""
        raise InvalidInput(f"{message[:1].upper()}{message[1:]}.")


def whole(text: str) -> int:
    """An option's whole number from 0; ``ArgumentTypeError`` for anything else."""
    if not (text.isascii() and text.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 0")
    if len(text) > WHOLE_DIGITS_MAX:
        raise argparse.ArgumentTypeError(f"{text!r} has more than {WHOLE_DIGITS_MAX} digits")
    return int(text)


def check_within(option: str, value: int, least: int, most: int) -> None:
    """``InvalidInput`` that names the option whose value lies outside of ``least`` … ``most``."""
    if not least <= value <= most:
        raise InvalidInput(f"{option} is {value}, but must lie between {least} and {most}.")


def check_folder(option: str, folder: Path) -> None:
    """Make a folder before anything is computed for it; ``InvalidInput`` if it cannot be written to."""
    probe = folder / ".evenhand-probe"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise InvalidInput(f"{option} is {folder}, which cannot be written to: {error.strerror}.") from error
