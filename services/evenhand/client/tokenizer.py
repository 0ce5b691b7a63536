"""Prompts to token ids as vLLM makes them, so that ``acquire(tokens=…)`` computes the keys the engine will.

Needs the extra ``tokenize``; transformers is imported by ``Tokenizer.load`` and not before. Beyond the tokenizer's
own work, this does what vLLM does to a chat request before its template sees it: arguments of tool calls become
objects, and tools take the field order of the engine's schema.

Always: a folder is read from disk alone. A model's name is looked up in the local cache and fetched from its hub
where it is not there; with ``HF_HUB_OFFLINE=1`` in the environment nothing is ever fetched.

Does not: know what the engine was started with (what ``--chat-template`` names must be given as ``chat_template``,
default template arguments as arguments), use templates that vLLM carries for models without their own, or count
tokens of images and sound. Message contents should be text: vLLM rearranges lists of parts by what the template
takes. A difference costs cache affinity and nothing else, unless the ids themselves are what the engine is sent.
"""

import importlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from evenhand.client.errors import InvalidConfig, InvalidRequest

_TOOL_FIELDS = ("name", "description", "parameters")
"""Of a tool's function, in the engine's order; each is there, as None where the caller left it out."""


class Tokenizer:
    """A model's tokenizer and chat template. Safe to share between tasks; make one for each thread."""

    __slots__ = ("_model", "_tokenizer")

    def __init__(self, tokenizer: Any, model: str) -> None:
        """``tokenizer``: one of transformers' own. ``model``: its name, for sentences."""
        self._tokenizer = tokenizer
        self._model = model

    @classmethod
    def load(
        cls, model_or_folder: str | Path, *, trust_remote_code: bool = False, revision: str | None = None
    ) -> Self:
        """The tokenizer of a folder, or of a model by its hub name; blocks while it reads or fetches.

        ``trust_remote_code``: run Python found with the model. ``revision``: branch, tag or commit of the hub.
        Raises ``InvalidConfig`` where transformers is not installed or there is no such tokenizer.
        """
        name = str(model_or_folder)
        try:
            transformers: Any = importlib.import_module("transformers")
            importlib.import_module("jinja2")
        except ImportError as error:
            raise InvalidConfig(
                "Turning prompts into token ids needs transformers: pip install 'evenhand[tokenize]'."
            ) from error
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(
                name,
                trust_remote_code=trust_remote_code,
                revision=revision or "main",
                local_files_only=Path(name).is_dir(),
            )
        except (OSError, ValueError, ImportError) as error:
            raise InvalidConfig(f"No tokenizer can be loaded from {name!r}: {_first_line(error)}.") from error
        return cls(tokenizer, name)

    def completion(self, text: str) -> list[int]:
        """Token ids of a prompt of ``/v1/completions``, special tokens such as the leading one included."""
        return _ids(self._tokenizer.encode(text, add_special_tokens=True))

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        **template_arguments: Any,
    ) -> list[int]:
        """Token ids of a prompt of ``/v1/chat/completions``; only the template adds special tokens.

        All arguments as in the body of the request, ``template_arguments`` as in its ``chat_template_kwargs``. To
        continue the last message, say ``add_generation_prompt=False`` too, as to the engine. Raises
        ``InvalidRequest`` where the model has no chat template or its template refuses the messages.
        """
        jinja2: Any = importlib.import_module("jinja2")
        try:
            return _ids(
                self._tokenizer.apply_chat_template(
                    [_message(message) for message in messages],
                    tools=[_tool(tool) for tool in tools] if tools else None,
                    chat_template=chat_template,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                    tokenize=True,
                    return_dict=False,
                    **template_arguments,
                )
            )
        except (ValueError, jinja2.TemplateError) as error:
            raise InvalidRequest(
                f"The chat template of {self._model!r} makes no prompt of these messages: {_first_line(error)}."
            ) from error


def _ids(found: Sequence[int]) -> list[int]:
    return [int(token) for token in found]


def _first_line(error: Exception) -> str:
    """What the error says first, without its end: the rest is advice for others."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(". ")


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message as the engine shows it to a template."""
    shown = dict(message)
    calls = shown.get("tool_calls")
    if shown.get("role") != "assistant" or not isinstance(calls, list):
        return shown
    if calls:
        shown["tool_calls"] = [_tool_call(call) for call in calls]
    else:
        del shown["tool_calls"]
    return shown


def _tool_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, Mapping):
        raise InvalidRequest("A tool call of a message names no function.")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except json.JSONDecodeError:
            arguments = {}  # as the engine does: a conversation with one bad call must go on
    if not isinstance(arguments, Mapping):
        arguments = {}
    return {**call, "function": {**function, "arguments": arguments}}


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """The tool as the engine's schema writes it: templates print it, so the order of fields counts."""
    function = tool.get("function")
    if not isinstance(function, Mapping) or "name" not in function:
        raise InvalidRequest("A tool has no function with a name.")
    shown: dict[str, Any] = {field: function.get(field) for field in _TOOL_FIELDS}
    if function.get("strict") is not None:
        shown["strict"] = function["strict"]
    return {"type": tool.get("type", "function"), "function": shown}
