"""Faults on demand: what ``/sim/faults`` understands.

=============  ===================================================================================
``restart``    true: a restart in place, now: requests lost, cache empty, sequence numbers from 0,
               another process start time; the sockets stay
``silent``     true: no events are sent or numbered, until false
``full_report``  true: every request repeats the stores of the blocks it reused, until false
``duplicate``  true: each batch is sent twice, until false
``drop_next``  the next N batches are lost on the wire; the replay socket still has them
``delay_ms``   batches are sent this much later, until 0
``unhealthy``  true: ``/health`` answers 503, until false
=============  ===================================================================================

Settings that are not named stay as they are; an unknown or impossible one changes nothing at all.
"""

from typing import Any

from evenhand.core.errors import InvalidRequest
from evenhand.engine.runtime import EngineRuntime

DELAY_MS_MAX = 60_000
DROP_NEXT_MAX = 1_000_000
_SWITCHES = ("restart", "silent", "full_report", "duplicate", "unhealthy")


def current_faults(runtime: EngineRuntime) -> dict[str, Any]:
    """The settings in force."""
    wire = runtime.publisher.faults
    return {
        "silent": wire.silent,
        "full_report": runtime.faults.full_report,
        "duplicate": wire.duplicate,
        "drop_next": wire.drop_next,
        "delay_ms": wire.delay_ms,
        "unhealthy": runtime.faults.unhealthy,
    }


def apply_faults(runtime: EngineRuntime, body: object) -> None:
    """Change the settings a request names. InvalidRequest, and nothing changed, if one is wrong."""
    if not isinstance(body, dict):
        raise InvalidRequest("Faults must be a JSON object.")
    for name, value in body.items():
        _check(name, value)
    wire = runtime.publisher.faults
    wire.silent = body.get("silent", wire.silent)
    wire.duplicate = body.get("duplicate", wire.duplicate)
    wire.drop_next = body.get("drop_next", wire.drop_next)
    wire.delay_ms = body.get("delay_ms", wire.delay_ms)
    runtime.faults.full_report = body.get("full_report", runtime.faults.full_report)
    runtime.faults.unhealthy = body.get("unhealthy", runtime.faults.unhealthy)
    if body.get("restart"):
        runtime.restart()


def _check(name: str, value: object) -> None:
    if name in _SWITCHES:
        if not isinstance(value, bool):
            raise InvalidRequest(f"The fault {name} must be true or false.")
    elif name == "drop_next":
        if type(value) is not int or not 0 <= value <= DROP_NEXT_MAX:
            raise InvalidRequest(f"The fault drop_next must be a whole number from 0 to {DROP_NEXT_MAX}.")
    elif name == "delay_ms":
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= DELAY_MS_MAX:
            raise InvalidRequest(f"The fault delay_ms must be a number from 0 to {DELAY_MS_MAX}.")
    else:
        raise InvalidRequest(f"There is no fault {name!r}.")
