"""A workload as a file of JSON lines, to write once and run anywhere.

The first line says what engines it is for and who its tenants are; each further line is one arrival. Reading what
was written gives an equal workload. A line that is not what it should be ends in ``InvalidInput``: one sentence
that names its number.
"""

import dataclasses
import json
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from evenhand.core.errors import InvalidInput
from evenhand.engine.limits import EngineLimits, StepTime
from evenhand.policies.policy import Arrival
from evenhand.simulation.lines import json_object
from evenhand.simulation.trials.workload import TenantPlan, Workload

Made = TypeVar("Made")

FORM = "evenhand.workload.v1"
_HEAD = ("form", "name", "limits", "step_time", "tenants")
_CALLED: dict[type, str] = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}
_BLOCKS = ("block_names", "output_block_names")
_DEFAULTS = {
    field.name: field.default for field in dataclasses.fields(Arrival) if field.default is not dataclasses.MISSING
}
_TYPES: dict[str, tuple[type, ...]] = {
    field.name: typing.get_args(field.type) or (typing.cast("type", field.type),)
    for field in dataclasses.fields(Arrival)
    if field.name not in _BLOCKS
}


def write_workload(workload: Workload, path: Path) -> None:
    """Write it, replacing what is there. Fields at their defaults are left out."""
    head = {
        "form": FORM,
        "name": workload.name,
        "limits": dataclasses.asdict(workload.limits),
        "step_time": dataclasses.asdict(workload.step_time),
        "tenants": [dataclasses.asdict(tenant) for tenant in workload.tenants],
    }
    try:
        with path.open("w", encoding="utf-8") as lines:
            lines.write(json.dumps(head, separators=(",", ":")) + "\n")
            for arrival in workload.arrivals:
                fields = {
                    field.name: value
                    for field in dataclasses.fields(arrival)
                    if (value := getattr(arrival, field.name)) != _DEFAULTS.get(field.name, dataclasses.MISSING)
                }
                lines.write(json.dumps(fields, separators=(",", ":")) + "\n")
    except OSError as error:
        raise InvalidInput(f"The trace {path} cannot be written: {error.strerror}.") from error


def read_workload(path: Path) -> Workload:
    """Read what ``write_workload`` wrote."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise InvalidInput(f"The trace {path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise InvalidInput(f"The trace {path} is no text in UTF-8.") from error
    if not lines:
        raise InvalidInput(f"The trace {path} is empty; its first line names engines and tenants.")
    head = json_object(f"Line 1 of the trace {path}", lines[0])
    if head.get("form") != FORM:
        raise InvalidInput(f"Line 1 of the trace {path} does not say that its form is {FORM!r}.")
    unknown = sorted(head.keys() - _HEAD)
    if unknown:
        raise InvalidInput(f"Line 1 of the trace {path} is broken: {unknown[0]!r} is none of its fields.")
    try:
        name = _typed(str, "name", head["name"])
        limits, step_time = _made(EngineLimits, head["limits"]), _made(StepTime, head["step_time"])
        tenants = tuple(_made(TenantPlan, tenant) for tenant in head["tenants"])
    except (KeyError, TypeError, AttributeError, InvalidInput) as error:
        raise InvalidInput(f"Line 1 of the trace {path} is broken: {_reason(error)}.") from error
    if len(lines) < 2:
        raise InvalidInput(f"The trace {path} has no arrival in it.")
    arrivals = [_arrival(path, number, line) for number, line in enumerate(lines[1:], 2)]
    return Workload(name, tenants, tuple(arrivals), limits, step_time)


def _made(kind: Callable[..., Made], fields: dict[str, Any]) -> Made:
    """One of the head's parts, each field of the type that it is declared with."""
    for name, declared in typing.get_type_hints(kind).items():
        if name in fields:
            _typed(declared, name, fields[name])
    return kind(**fields)


def _typed(declared: type[Made], name: str, value: Any) -> Made:
    if type(value) is not declared and not (declared is float and type(value) is int):
        raise InvalidInput(f"{name} is {value!r}, but must be {_CALLED[declared]}")
    return typing.cast("Made", value)


def _reason(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"it lacks {error}"
    if isinstance(error, InvalidInput):
        return str(error).rstrip(".")
    return "limits, step_time and tenants are not what they should be"


def _arrival(path: Path, number: int, line: str) -> Arrival:
    fields = json_object(f"Line {number} of the trace {path}", line)
    for key, value in fields.items():
        if key in _BLOCKS:
            right = isinstance(value, list) and all(type(name) is int and 0 <= name < 1 << 64 for name in value)
            fields[key] = tuple(value) if right else value
        else:
            right = type(value) in _TYPES.get(key, ()) or (type(value) is int and float in _TYPES.get(key, ()))
        if not right:
            known = "has an impossible value" if key in _BLOCKS or key in _TYPES else "is no field of an arrival"
            raise InvalidInput(f"Line {number} of the trace {path} is broken: {key!r} {known}.")
    try:
        return Arrival(**fields)
    except TypeError as error:
        missing = str(error).split(":", 1)[-1].strip()
        raise InvalidInput(f"Line {number} of the trace {path} is broken: it lacks {missing}.") from error
