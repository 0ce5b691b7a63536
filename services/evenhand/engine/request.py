"""One request inside an engine: what it asks for and how far it is.

::

    WAITING ──admitted──▶ PREFILL ──last chunk──▶ DECODE ──last token──▶ FINISHED
       ▲                     │                       │
       └──── preempted ──────┴───────────────────────┘        any ──cancel──▶ CANCELLED

Only the engine changes a request; everybody else reads.
"""

from enum import Enum

from evenhand.engine.block_pool import BlockId
from evenhand.engine.content import Content


class RequestState(Enum):
    """Where a request stands."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"
    CANCELLED = "cancelled"


class EngineRequest:
    """Progress of one request.

    ``cached_tokens`` is what the first admission found in the cache, as the engine reports it in ``usage``;
    a later re-admission after a preemption does not change it. ``computed_tokens`` and ``output_tokens`` of
    a decoding request are brought up to date lazily: read them through ``Engine.output_tokens``.
    """

    __slots__ = (
        "admission",
        "block_ids",
        "cached_tokens",
        "computed_tokens",
        "content",
        "decoding_since",
        "full_report",
        "label",
        "output_tokens",
        "output_tokens_max",
        "preemptions",
        "prompt_tokens",
        "request_id",
        "state",
        "stored_blocks",
        "target_tokens",
    )

    def __init__(
        self,
        request_id: str,
        content: Content,
        prompt_tokens: int,
        output_tokens_max: int,
        *,
        full_report: bool = False,
        label: object = None,
    ) -> None:
        self.request_id = request_id
        self.content = content
        self.prompt_tokens = prompt_tokens
        self.output_tokens_max = output_tokens_max
        self.full_report = full_report
        self.label = label
        """Whatever the caller wants to find again on the request: a tenant, a connection."""
        self.state = RequestState.WAITING
        self.block_ids: list[BlockId] = []
        self.computed_tokens = 0
        self.target_tokens = 0
        """Tokens the prefill must reach: the prompt, and after a preemption the output so far."""
        self.output_tokens = 0
        self.stored_blocks = 0
        self.cached_tokens = -1
        self.preemptions = 0
        self.admission = -1
        """Number of its latest admission; the order among running requests."""
        self.decoding_since = 0
        """The engine's decode step at which ``computed_tokens`` and ``output_tokens`` were exact."""

    @property
    def total_tokens(self) -> int:
        """Prompt and output so far; exact whenever the request is not decoding."""
        return self.prompt_tokens + self.output_tokens
