"""Files of JSON lines, each an object: what is wrong with one is a sentence that names its line."""

import json
from typing import Any

from evenhand.core.errors import InvalidInput


def json_object(where: str, line: str) -> dict[str, Any]:
    """The object that a line is; ``InvalidInput`` that begins with ``where`` for anything else."""
    try:
        value = json.loads(line)
    except ValueError as error:
        raise InvalidInput(f"{where} is no JSON: {error}.") from error
    except RecursionError as error:
        raise InvalidInput(f"{where} is nested too deep.") from error
    if not isinstance(value, dict):
        raise InvalidInput(f"{where} is no JSON object.")
    return value
