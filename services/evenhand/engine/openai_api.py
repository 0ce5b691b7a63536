"""The OpenAI-compatible dialect, as far as an engine without a model can speak it: JSON in, JSON out.

Understood: ``model``, ``prompt`` (text or token ids, one), ``messages`` (text parts), ``max_tokens`` /
``max_completion_tokens``, ``stream``, ``stream_options.include_usage``, ``cache_salt``, ``session_id``,
``return_token_ids``, ``vllm_xargs.kv_cache_report_mode``. Accepted and without effect, since output is a
function of the prompt: sampling parameters, ``stop``, ``ignore_eos``, ``seed``, ``user`` and the like.

The output has exactly ``max_tokens`` tokens and ends with ``length``. A completion without it gets 16
tokens, as with OpenAI; a chat gets a length between 16 and 271 drawn from the prompt.

Everything that cannot be served raises InvalidRequest with one sentence, or UnknownModel.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from evenhand.core.errors import InvalidRequest
from evenhand.engine import tokenizer

COMPLETION_TOKENS_DEFAULT = 16
CHAT_TOKENS_MIN, CHAT_TOKENS_SPREAD = 16, 256
TOKEN_ID_MAX = 2**32 - 1

Json = dict[str, Any]


class UnknownModel(InvalidRequest):
    """The model asked for is not served here."""


class Dialect(Enum):
    """Which of the two endpoints speaks."""

    COMPLETION = "completion"
    CHAT = "chat"


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One request, parsed. ``output_tokens_max`` None: the engine chooses by the prompt."""

    dialect: Dialect
    model: str
    lora_name: str | None
    token_ids: tuple[int, ...]
    output_tokens_max: int | None
    stream: bool
    include_usage: bool
    cache_salt: str | None
    session_id: str | None
    full_report: bool
    return_token_ids: bool


def parse_request(
    dialect: Dialect, body: object, headers: Mapping[str, str], model: str, loras: Sequence[str]
) -> GenerationRequest:
    """Read a request body. InvalidRequest or UnknownModel if it cannot be served."""
    fields = _object(body, "The request body")
    asked = fields.get("model") or model
    if asked != model and asked not in loras:
        raise UnknownModel(f"The model `{asked}` does not exist.")
    if fields.get("n") not in (None, 1):
        raise InvalidRequest("n must be 1: a simulated engine gives one choice.")
    options = fields.get("stream_options")
    xargs = fields.get("vllm_xargs")
    return GenerationRequest(
        dialect=dialect,
        model=asked,
        lora_name=asked if asked != model else None,
        token_ids=tuple(prompt_tokens(fields) if dialect is Dialect.COMPLETION else chat_tokens(fields)),
        output_tokens_max=_output_tokens(dialect, fields),
        stream=_boolean(fields, "stream"),
        include_usage=options is not None and _boolean(_object(options, "stream_options"), "include_usage"),
        cache_salt=_text(fields, "cache_salt"),
        session_id=_text(fields, "session_id") or headers.get("X-Session-ID"),
        full_report=xargs is not None and _object(xargs, "vllm_xargs").get("kv_cache_report_mode") == "full",
        return_token_ids=_boolean(fields, "return_token_ids"),
    )


def prompt_tokens(fields: Json) -> list[int]:
    """The token ids of ``prompt``: text, token ids, or a list of exactly one of these."""
    prompt = fields.get("prompt")
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        if len(prompt) != 1:
            raise InvalidRequest("prompt holds several prompts, but a simulated engine takes one a request.")
        prompt = prompt[0]
    if isinstance(prompt, str):
        return tokenizer.encode_prompt(prompt)
    if isinstance(prompt, list) and all(type(token) is int and 0 <= token <= TOKEN_ID_MAX for token in prompt):
        return prompt
    raise InvalidRequest("prompt must be a string or a list of non-negative token ids.")


def chat_tokens(fields: Json) -> list[int]:
    """The token ids of ``messages`` under the chat template."""
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise InvalidRequest("messages must be a non-empty list.")
    pairs: list[tuple[str, str]] = []
    for message in messages:
        role = _object(message, "Each message").get("role")
        if not isinstance(role, str) or not role:
            raise InvalidRequest("Each message must have a role.")
        pairs.append((role, _message_text(message.get("content"))))
    return tokenizer.encode_chat(pairs)


def chosen_output_tokens(request: GenerationRequest, seed: int, room_tokens: int) -> int:
    """How many tokens to answer with: what was asked for, or a length drawn from the prompt that fits."""
    if request.output_tokens_max is not None:
        return request.output_tokens_max
    return max(1, min(room_tokens, CHAT_TOKENS_MIN + seed % CHAT_TOKENS_SPREAD))


def usage_of(prompt: int, output: int, cached: int) -> Json:
    """The ``usage`` object."""
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + output,
        "completion_tokens": output,
        "prompt_tokens_details": {"cached_tokens": max(0, cached)},
    }


def error_body(message: str, kind: str, code: int) -> Json:
    """An error as OpenAI clients expect it."""
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


class Answer:
    """Shapes one request's answer, whole or in chunks."""

    def __init__(self, request: GenerationRequest, answer_id: str, created_s: int) -> None:
        self._request = request
        self._chat = request.dialect is Dialect.CHAT
        self._head = {"id": f"{'chatcmpl' if self._chat else 'cmpl'}-{answer_id}", "created": created_s}
        self._head["model"] = request.model

    def whole(self, token_ids: list[int], cached: int) -> Json:
        """The body of a request that does not stream."""
        text = tokenizer.decode(token_ids)
        choice: Json = {"index": 0, "logprobs": None, "finish_reason": "length", "stop_reason": None}
        body = {**self._head, "object": "chat.completion" if self._chat else "text_completion"}
        if self._chat:
            choice["message"] = {"role": "assistant", "content": text, "tool_calls": []}
        else:
            choice["text"] = text
        if self._request.return_token_ids:
            choice["token_ids"] = token_ids
            (body if self._chat else choice)["prompt_token_ids"] = list(self._request.token_ids)
        body["choices"] = [choice]
        body["usage"] = usage_of(len(self._request.token_ids), len(token_ids), cached)
        return body

    def opening(self) -> Json | None:
        """The first chunk: a chat says who speaks. A completion has none."""
        if not self._chat:
            return None
        body = self._chunk({"delta": {"role": "assistant", "content": ""}}, None)
        if self._request.return_token_ids:
            body["prompt_token_ids"] = list(self._request.token_ids)
        return body

    def piece(self, token_ids: list[int], last: bool) -> Json:
        """A chunk of output."""
        text = tokenizer.decode(token_ids)
        choice: Json = {"delta": {"content": text}} if self._chat else {"text": text}
        if self._request.return_token_ids:
            choice["token_ids"] = token_ids
        return self._chunk(choice, "length" if last else None)

    def closing(self, output: int, cached: int) -> Json | None:
        """The chunk with ``usage``, if it was asked for."""
        if not self._request.include_usage:
            return None
        body = self._chunk({}, None)
        body["choices"] = []
        body["usage"] = usage_of(len(self._request.token_ids), output, cached)
        return body

    def _chunk(self, choice: Json, finish_reason: str | None) -> Json:
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        whole = {"index": 0, **choice, "logprobs": None, "finish_reason": finish_reason, "stop_reason": None}
        return {**self._head, "object": kind, "choices": [whole]}


def _output_tokens(dialect: Dialect, fields: Json) -> int | None:
    for name in ("max_completion_tokens", "max_tokens"):
        value = fields.get(name)
        if value is not None:
            if type(value) is not int or value < 1:
                raise InvalidRequest(f"{name} must be a positive integer, got {value!r}.")
            return value
    return COMPLETION_TOKENS_DEFAULT if dialect is Dialect.COMPLETION else None


def _message_text(content: object) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
        if len(texts) == len(content) and all(isinstance(text, str) for text in texts):
            return "".join(text for text in texts if text)
    raise InvalidRequest("A message's content must be text or a list of text parts.")


def _object(value: object, what: str) -> Json:
    if not isinstance(value, dict):
        raise InvalidRequest(f"{what} must be a JSON object.")
    return value


def _boolean(fields: Json, name: str) -> bool:
    value = fields.get(name)
    if value is None or isinstance(value, bool):
        return bool(value)
    raise InvalidRequest(f"{name} must be true or false.")


def _text(fields: Json, name: str) -> str | None:
    value = fields.get(name)
    if value is None:
        return None
    if not isinstance(value, str) or not value:
        raise InvalidRequest(f"{name} must be a non-empty string.")
    return value
