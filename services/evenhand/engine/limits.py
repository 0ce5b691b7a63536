"""What an engine can hold, and how long its steps take.

The step-time model has three terms, because three things cost time on a real accelerator: reading the
weights once a step (``base``), computing prompt tokens (compute-bound, so linear in them), and reading each
running request's KV cache and sampling its token (``running_sequence``)::

    duration = base + prefill_token · (prompt tokens computed) + running_sequence · (requests in the step)

It leaves out that a long context costs more to read than a short one, and every effect of batch size on
kernels; to resemble an engine, fit the three numbers to its measured prefill and decode rates.
"""

from dataclasses import dataclass

from evenhand.core.errors import InvalidConfig

STEP_PART_NS_MAX = 10_000_000_000
"""Longest that any of the three terms may be."""
BLOCKS_MAX = 16_777_216
"""Blocks of one engine: beyond what any accelerator holds, and each costs memory here, too."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """How long a step takes, in nanoseconds. Defaults resemble an 8B model on one large GPU."""

    base_ns: int = 6_000_000
    prefill_token_ns: int = 60_000
    running_sequence_ns: int = 60_000

    def __post_init__(self) -> None:
        for name in ("base_ns", "prefill_token_ns", "running_sequence_ns"):
            if not getattr(self, name) >= 0:
                raise InvalidConfig(f"{name} is {getattr(self, name)}, but cannot be negative.")
            if getattr(self, name) > STEP_PART_NS_MAX:
                raise InvalidConfig(f"{name} is {getattr(self, name)}, but may be {STEP_PART_NS_MAX} at most.")
        if not self.base_ns + min(self.prefill_token_ns, self.running_sequence_ns) > 0:
            raise InvalidConfig("A step must take some time, but base_ns and another of its times are 0.")

    def duration_ns(self, prefill_tokens: int, sequences: int) -> int:
        """Time of a step that computes ``prefill_tokens`` prompt tokens for ``sequences`` requests."""
        return self.base_ns + self.prefill_token_ns * prefill_tokens + self.running_sequence_ns * sequences


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What an engine can hold and do at once."""

    block_size: int = 16
    blocks: int = 2_048
    """KV blocks, the null block included."""
    sequences_max: int = 64
    batched_tokens_max: int = 2_048
    model_tokens_max: int = 16_384
    """Prompt and output of one request together."""

    def __post_init__(self) -> None:
        for name in ("block_size", "sequences_max", "batched_tokens_max", "model_tokens_max"):
            if getattr(self, name) < 1:
                raise InvalidConfig(f"{name} is {getattr(self, name)}, but must be at least 1.")
        if self.sequences_max > self.batched_tokens_max:
            raise InvalidConfig(
                f"batched_tokens_max ({self.batched_tokens_max}) must be at least sequences_max "
                f"({self.sequences_max}), so that every running request can decode in each step."
            )
        if self.blocks > BLOCKS_MAX:
            raise InvalidConfig(f"blocks is {self.blocks}, but may be {BLOCKS_MAX} at most.")
        needed = -(-self.model_tokens_max // self.block_size) + 1
        if self.blocks < needed:
            raise InvalidConfig(
                f"blocks is {self.blocks}, but one request of model_tokens_max ({self.model_tokens_max}) tokens "
                f"and the null block need {needed} blocks of {self.block_size} tokens."
            )
