"""Admission as engines before vLLM's V1 do it: prompts apart from decoding, memory reserved to the end.

LightLLM and S-LoRA (on which VTC was measured) compute either prompts or one token for everybody, never both
in one step; they look at the queue only every few decode steps; and they admit a request only if the batch
would still fit at its fullest moment, with every output as long as its limit. Given to an engine, this
replaces V1's rule (prompts beside decoding, in every step, as far as blocks last).

::

    admitted ──▶ decode × decode_steps_min ──▶ look at the queue at every step ──▶ admitted
                                                    │ nothing fits: decode

How full it gets: sort the running requests by the tokens they have left, most first. When the k-th ends, those
before it still run, and each of the k has grown by what the k-th had left. So the fullest moment needs

    max over k of  (held by the first k) + k · (left of the k-th)

which does not change while all of them decode, only when one comes or goes.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from evenhand.core.errors import InvalidConfig


@dataclass(frozen=True, slots=True)
class KvNeed:
    """One request: tokens it holds, and tokens it may still add."""

    held_tokens: int
    left_tokens: int


@dataclass(frozen=True, slots=True)
class PrefillApart:
    """Prompts apart from decoding, at most every ``decode_steps_min`` decode steps while anything runs.

    A prompt is admitted whole: those of one admission have at most ``EngineLimits.batched_tokens_max`` tokens.
    """

    kv_tokens_max: int
    """The fullest moment of the batch stays below this."""
    decode_steps_min: int = 10
    adapter_tokens: int = 0
    """Memory that each distinct ``label`` in the batch takes beside its KV: S-LoRA keeps adapters there."""

    def __post_init__(self) -> None:
        for name, least in (("kv_tokens_max", 1), ("decode_steps_min", 1), ("adapter_tokens", 0)):
            if getattr(self, name) < least:
                raise InvalidConfig(f"{name} is {getattr(self, name)}, but must be at least {least}.")


def fullest_tokens(needs: Iterable[KvNeed]) -> int:
    """KV tokens held at the fullest moment, if everybody runs to the end and nobody comes; 0 for none."""
    fullest = held = 0
    for count, need in enumerate(sorted(needs, key=lambda need: -need.left_tokens), start=1):
        held += need.held_tokens
        fullest = max(fullest, held + count * need.left_tokens)
    return fullest
