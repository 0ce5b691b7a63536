"""What a simulated engine is told at start: parsed once, validated once, frozen.

Each field is a command-line option of the same name (``block_size`` is ``--block-size``) and is documented
below it. An unknown option or an impossible value raises InvalidConfig with one sentence that names it.
"""

import argparse
import ast
import inspect
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import NoReturn

from evenhand.core.errors import InvalidConfig
from evenhand.engine.content import HashForm
from evenhand.engine.kv_events import EventForm, PublisherConfig
from evenhand.engine.limits import EngineLimits, StepTime
from evenhand.loopback import is_loopback

ORDERS = ("fcfs", "longest-prefix")
PORT_MAX = 65_535
EMPTY_TOPIC = "-"


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of one simulated engine. Port 0 takes any free port."""

    name: str = "engine"
    """Names the engine in its event topic, ``kv@NAME@MODEL``."""
    model: str = "sim"
    """The model name requests must give."""
    lora: tuple[str, ...] = ()
    """LoRA adapters served beside the base model, each under its own model name. Repeatable."""
    host: str = "127.0.0.1"
    """Address to listen on, for HTTP and events."""
    allow_remote: bool = False
    """Permit a host beyond loopback. A simulated engine has neither TLS nor authentication."""
    port: int = 8000
    """HTTP port."""
    kv_events_port: int = 5557
    """Port of the event PUB socket."""
    kv_replay_port: int = 5657
    """Port of the replay ROUTER socket."""
    topic: str = ""
    """Event topic, in place of ``kv@NAME@MODEL``; ``-`` for the empty one, a stock engine's default."""
    event_form: str = "map"
    """``map``, or ``array`` as older engines send."""
    hash_form: str = "int"
    """Block hashes as ``int`` (64 bits) or ``bytes`` (32 bytes)."""
    data_parallel_rank: int = 0
    """The rank stamped on event batches."""
    block_size: int = 16
    """Tokens in a KV block."""
    kv_blocks: int = 2_048
    """KV blocks, the null block included."""
    max_num_seqs: int = 64
    """Most requests in a batch."""
    max_num_batched_tokens: int = 2_048
    """Most tokens computed in a step."""
    max_model_len: int = 16_384
    """Most tokens of one request, prompt and output together."""
    max_queued: int = 10_000
    """Most requests waiting; more get 503."""
    order: str = "fcfs"
    """Admission order: ``fcfs`` or ``longest-prefix``."""
    step_base_ms: float = 6.0
    """Time of a step, whatever is in it."""
    prefill_token_us: float = 60.0
    """Time a step takes more for each prompt token it computes."""
    running_sequence_us: float = 60.0
    """Time a step takes more for each request in it."""

    def __post_init__(self) -> None:
        for name in ("port", "kv_events_port", "kv_replay_port"):
            if not 0 <= getattr(self, name) <= PORT_MAX:
                raise InvalidConfig(f"{name} is {getattr(self, name)}, but a port lies between 0 and {PORT_MAX}.")
        ports = [port for port in (self.port, self.kv_events_port, self.kv_replay_port) if port]
        if len(set(ports)) != len(ports):
            raise InvalidConfig("port, kv_events_port and kv_replay_port must differ from one another.")
        for name in ("step_base_ms", "prefill_token_us", "running_sequence_us"):
            if not 0 <= getattr(self, name) <= 1e6:
                raise InvalidConfig(f"{name} is {getattr(self, name)}, but must lie between 0 and 1000000.")
        if self.step_base_ms < 0.05:
            raise InvalidConfig(f"step_base_ms is {self.step_base_ms}, but a step takes at least 0.05 ms.")
        if self.max_queued < 1 or self.data_parallel_rank < 0:
            raise InvalidConfig("max_queued must be at least 1 and data_parallel_rank at least 0.")
        for name, allowed in (
            ("order", ORDERS),
            ("event_form", tuple(form.value for form in EventForm)),
            ("hash_form", tuple(form.value for form in HashForm)),
        ):
            if getattr(self, name) not in allowed:
                raise InvalidConfig(f"{name} is {getattr(self, name)!r}, but must be one of {', '.join(allowed)}.")
        if not self.allow_remote and not is_loopback(self.host):
            raise InvalidConfig(
                f"host {self.host} is not loopback and a simulated engine has no authentication; "
                "--allow-remote permits it."
            )
        _ = self.limits

    @property
    def limits(self) -> EngineLimits:
        """The limits of the batch and the pool. InvalidConfig where they contradict each other."""
        return EngineLimits(
            block_size=self.block_size,
            blocks=self.kv_blocks,
            sequences_max=self.max_num_seqs,
            batched_tokens_max=self.max_num_batched_tokens,
            model_tokens_max=self.max_model_len,
        )

    @property
    def step_time(self) -> StepTime:
        """The step-time model in nanoseconds."""
        return StepTime(
            base_ns=round(self.step_base_ms * 1e6),
            prefill_token_ns=round(self.prefill_token_us * 1e3),
            running_sequence_ns=round(self.running_sequence_us * 1e3),
        )

    @property
    def publisher(self) -> PublisherConfig:
        """Where and how events go out."""
        return PublisherConfig(
            host=self.host,
            port=self.kv_events_port,
            replay_port=self.kv_replay_port,
            topic="" if self.topic == EMPTY_TOPIC else self.topic or f"kv@{self.name}@{self.model}",
            form=EventForm(self.event_form),
            data_parallel_rank=self.data_parallel_rank,
        )


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InvalidConfig(f"{message[:1].upper()}{message[1:]}; --help lists the options.")


def parse_arguments(argv: Sequence[str]) -> EngineConfig:
    """The configuration a command line asks for. InvalidConfig with one sentence if it cannot be."""
    parser = _Parser(prog="evenhand engine", description="Run a simulated vLLM engine.", allow_abbrev=False)
    texts = option_texts()
    for field in fields(EngineConfig):
        option = f"--{field.name.replace('_', '-')}"
        text = texts[field.name].replace("``", "").replace("%", "%%")
        if field.type is bool:
            parser.add_argument(option, action="store_true", help=text)
        elif field.name == "lora":
            parser.add_argument(option, action="append", default=[], metavar="NAME", help=text)
        else:
            text = f"{text} Default: {field.default or 'none'}." if field.default != 0 else text
            parser.add_argument(
                option, type=type(field.default), default=field.default, metavar="VALUE", help=text
            )
    values = vars(parser.parse_args(list(argv)))
    values["lora"] = tuple(values["lora"])
    return EngineConfig(**values)


def option_texts() -> dict[str, str]:
    """What stands below each field of EngineConfig, by field name."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(EngineConfig)))
    assert isinstance(tree.body[0], ast.ClassDef)
    texts: dict[str, str] = {}
    for before, after in pairwise(tree.body[0].body):
        if isinstance(before, ast.AnnAssign) and isinstance(after, ast.Expr):
            assert isinstance(before.target, ast.Name)
            texts[before.target.id] = str(ast.literal_eval(after.value))
    return texts
