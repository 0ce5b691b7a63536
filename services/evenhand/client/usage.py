"""What a leg used, read from whatever the worker's client library gives.

Always: counts are not negative and ``cached_tokens`` is at most ``prompt_tokens``.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from evenhand.client.errors import InvalidRequest

TOKENS_MAX = 2**32 - 1


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one leg. ``cached_tokens`` is the part of ``prompt_tokens`` the engine took from its cache.

    None: the engine does not say (vLLM does with ``--enable-prompt-tokens-details``). The scheduler then takes its
    own prediction for it.
    """

    prompt_tokens: int = 0
    cached_tokens: int | None = None
    output_tokens: int = 0

    def __post_init__(self) -> None:
        for name in ("prompt_tokens", "cached_tokens", "output_tokens"):
            value = getattr(self, name)
            if value is None and name == "cached_tokens":
                continue
            if not isinstance(value, int) or not 0 <= value <= TOKENS_MAX:
                raise InvalidRequest(f"{name} must be a whole number from 0 to {TOKENS_MAX}, not {value!r}.")
        if self.cached_tokens is not None and self.cached_tokens > self.prompt_tokens:
            raise InvalidRequest(
                f"cached_tokens must be at most prompt_tokens, not {self.cached_tokens} of {self.prompt_tokens}."
            )


def usage_of(reported: object) -> Usage:
    """Read an OpenAI usage, as object or mapping, of completions, chat completions or responses.

    Understands ``prompt_tokens`` / ``input_tokens``, ``completion_tokens`` / ``output_tokens`` and
    ``cached_tokens`` in ``prompt_tokens_details`` / ``input_tokens_details`` or beside them. Raises
    ``InvalidRequest`` where neither prompt nor output is found.
    """
    if isinstance(reported, Usage):
        return reported
    prompt = _first(reported, "prompt_tokens", "input_tokens")
    output = _first(reported, "completion_tokens", "output_tokens")
    if prompt is None and output is None:
        kind = type(reported).__name__
        raise InvalidRequest(f"A usage names prompt_tokens or completion_tokens; {kind} has neither.")
    details = _first(reported, "prompt_tokens_details", "input_tokens_details")
    cached = _first(details, "cached_tokens") if details is not None else _first(reported, "cached_tokens")
    return Usage(prompt or 0, cached, output or 0)  # type: ignore[arg-type]  # Usage checks its fields


def _first(source: object, *names: str) -> object:
    for name in names:
        value = source.get(name) if isinstance(source, Mapping) else getattr(source, name, None)
        if value is not None:
            return value
    return None
