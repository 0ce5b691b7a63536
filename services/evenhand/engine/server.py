"""The HTTP face of a simulated engine, and its one composition root.

=============================  =====================================================================
``POST /v1/completions``       text or token ids; streaming or not
``POST /v1/chat/completions``  messages; streaming or not
``POST /tokenize``             prompt or messages to token ids
``GET /v1/models``             the base model and its LoRA adapters
``GET /health`` ``/load``      liveness; requests in flight
``GET /metrics``               vLLM's names
``POST /reset_prefix_cache``   forget the cache; the event goes out with the next step
``GET,POST /sim/faults``       faults on demand, from loopback only
=============================  =====================================================================

A client that goes away frees its request at once: aiohttp cancels the handler, and leaving it cancels the
stream. Several servers live side by side in one process; nothing here is global.
"""

import os
import time
import uuid
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any

import msgspec
from aiohttp import web

from evenhand.core.errors import InvalidConfig, InvalidRequest, Unavailable
from evenhand.engine import tokenizer
from evenhand.engine.config import EngineConfig
from evenhand.engine.content import HashForm, TokenContent
from evenhand.engine.faults import apply_faults, current_faults
from evenhand.engine.kv_events import EventPublisher
from evenhand.engine.openai_api import (
    Answer,
    Dialect,
    Json,
    UnknownModel,
    chat_tokens,
    chosen_output_tokens,
    error_body,
    parse_request,
    prompt_tokens,
)
from evenhand.engine.runtime import EngineRuntime, Progress, Stream, StreamState
from evenhand.loopback import is_loopback

BODY_BYTES_MAX = 32 * 1024 * 1024
SHUTDOWN_S = 1.0
"""How long open responses may take to end once the server stops; their streams are lost before that."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class EngineServer:
    """One simulated engine: ``await start()``, use its addresses, ``await stop()``."""

    def __init__(self, config: EngineConfig, *, now_s: Callable[[], float] = time.time) -> None:
        self.config = config
        self._now_s = now_s
        self.publisher = EventPublisher(config.publisher, now_s)
        self.runtime = EngineRuntime(config, self.publisher, now_s)
        self._runner: web.AppRunner | None = None
        self.base_url = ""
        """``http://HOST:PORT`` once started."""

    @property
    def kv_events_endpoint(self) -> str:
        """The PUB socket's address once started."""
        return self.publisher.endpoint

    @property
    def kv_replay_endpoint(self) -> str:
        """The ROUTER socket's address once started."""
        return self.publisher.replay_endpoint

    def addresses(self) -> Json:
        """What others need to reach this engine."""
        return {
            "name": self.config.name,
            "model": self.config.model,
            "url": self.base_url,
            "kv_events": self.kv_events_endpoint,
            "kv_replay": self.kv_replay_endpoint,
            "topic": self.config.publisher.topic,
        }

    async def start(self) -> None:
        """Bind all ports and begin. InvalidConfig, and nothing left open, if one is taken."""
        try:
            self.publisher.start()
            await self._listen()
        except InvalidConfig:
            await self.stop()
            raise
        self.runtime.start()

    async def stop(self) -> None:
        """Lose what is open, close all ports. Safe to call twice."""
        await self.runtime.stop()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
        await self.publisher.stop()

    async def _listen(self) -> None:
        app = web.Application(client_max_size=BODY_BYTES_MAX, middlewares=[_errors_as_json])
        app.add_routes(
            [
                web.post("/v1/completions", self._completions),
                web.post("/v1/chat/completions", self._chat_completions),
                web.post("/tokenize", self._tokenize),
                web.get("/v1/models", self._models),
                web.get("/health", self._health),
                web.get("/load", self._load),
                web.get("/metrics", self._metrics),
                web.post("/reset_prefix_cache", self._reset_prefix_cache),
                web.get("/sim/faults", self._show_faults),
                web.post("/sim/faults", self._set_faults),
            ]
        )
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=SHUTDOWN_S)
        await self._runner.setup()
        host, port = self.config.host, self.config.port
        try:
            await web.TCPSite(self._runner, host, port, reuse_address=True).start()
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else str(error)
            raise InvalidConfig(f"The HTTP server cannot listen on {host}:{port}: {reason}.") from error
        bound = self._runner.addresses[0]
        self.base_url = f"http://{bound[0]}:{bound[1]}"

    # ---- generation

    async def _completions(self, http: web.Request) -> web.StreamResponse:
        return await self._generate(http, Dialect.COMPLETION)

    async def _chat_completions(self, http: web.Request) -> web.StreamResponse:
        return await self._generate(http, Dialect.CHAT)

    async def _generate(self, http: web.Request, dialect: Dialect) -> web.StreamResponse:
        request = parse_request(dialect, await _json(http), http.headers, self.config.model, self.config.lora)
        content = TokenContent(
            request.token_ids,
            block_size=self.config.block_size,
            hash_form=HashForm(self.config.hash_form),
            cache_salt=request.cache_salt,
            lora_name=request.lora_name,
            session_id=request.session_id,
        )
        room = self.config.max_model_len - content.prompt_tokens
        output_tokens = chosen_output_tokens(request, content.seed, room)
        stream = self.runtime.submit(content, output_tokens, full_report=request.full_report)
        answer_id = http.headers.get("X-Request-Id") or uuid.uuid4().hex
        answer = Answer(request, answer_id, int(self._now_s()))
        try:
            if request.stream:
                return await _stream_answer(http, answer, stream)
            return await _whole_answer(answer, stream)
        finally:
            self.runtime.cancel(stream)

    # ---- everything else

    async def _tokenize(self, http: web.Request) -> web.Response:
        fields = await _json(http)
        if not isinstance(fields, dict):
            raise InvalidRequest("The request body must be a JSON object.")
        if "messages" in fields:
            tokens = chat_tokens(fields)
        elif isinstance(fields.get("prompt"), str) and fields.get("add_special_tokens") is False:
            tokens = tokenizer.encode(fields["prompt"])
        else:
            tokens = prompt_tokens(fields)
        return _respond({"count": len(tokens), "max_model_len": self.config.max_model_len, "tokens": tokens})

    async def _models(self, _http: web.Request) -> web.Response:
        models = [
            {
                "id": name,
                "object": "model",
                "created": int(self._now_s()),
                "owned_by": "vllm",
                "root": self.config.model,
                "parent": None if name == self.config.model else self.config.model,
                "max_model_len": self.config.max_model_len,
            }
            for name in (self.config.model, *self.config.lora)
        ]
        return _respond({"object": "list", "data": models})

    async def _health(self, _http: web.Request) -> web.Response:
        return web.Response(status=503 if self.runtime.faults.unhealthy else 200)

    async def _load(self, _http: web.Request) -> web.Response:
        return _respond({"server_load": len(self.runtime.open_streams)})

    async def _metrics(self, _http: web.Request) -> web.Response:
        content_type = "text/plain; version=0.0.4; charset=utf-8"
        return web.Response(body=self.runtime.metrics.page(), headers={"Content-Type": content_type})

    async def _reset_prefix_cache(self, _http: web.Request) -> web.Response:
        return _respond({"success": self.runtime.reset_prefix_cache()})

    async def _show_faults(self, http: web.Request) -> web.Response:
        _require_loopback(http)
        return _respond(current_faults(self.runtime))

    async def _set_faults(self, http: web.Request) -> web.Response:
        _require_loopback(http)
        apply_faults(self.runtime, await _json(http))
        return _respond(current_faults(self.runtime))


async def _whole_answer(answer: Answer, stream: Stream) -> web.Response:
    token_ids: list[int] = []
    while True:
        progress = await stream.wait()
        token_ids += progress.token_ids
        if progress.state is StreamState.FINISHED:
            return _respond(answer.whole(token_ids, stream.request.cached_tokens))
        if progress.state is not StreamState.OPEN:
            return _lost()


async def _stream_answer(http: web.Request, answer: Answer, stream: Stream) -> web.StreamResponse:
    progress = await stream.wait()
    if progress.state in (StreamState.LOST, StreamState.CANCELLED):
        return _lost()
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    response.headers["Cache-Control"] = "no-cache"
    await response.prepare(http)

    if not await _stream_chunks(response, answer, stream, progress) and http.transport is not None:
        # The engine died: the connection breaks off, as it does when a process ends.
        http.transport.abort()
    return response


async def _stream_chunks(response: web.StreamResponse, answer: Answer, stream: Stream, progress: Progress) -> bool:
    """Send all chunks; False if the stream was lost on the way."""

    async def send(chunk: Json | None) -> None:
        if chunk is not None:
            await response.write(b"data: " + msgspec.json.encode(chunk) + b"\n\n")

    await send(answer.opening())
    produced = 0
    while True:
        produced += len(progress.token_ids)
        match progress.state:
            case StreamState.OPEN:
                await send(answer.piece(progress.token_ids, last=False))
                progress = await stream.wait()
            case StreamState.FINISHED:
                await send(answer.piece(progress.token_ids, last=True))
                await send(answer.closing(produced, stream.request.cached_tokens))
                await response.write(b"data: [DONE]\n\n")
                await response.write_eof()
                return True
            case StreamState.LOST | StreamState.CANCELLED:
                return False


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except UnknownModel as error:
        return _fail(HTTPStatus.NOT_FOUND, "NotFoundError", str(error))
    except InvalidRequest as error:
        return _fail(HTTPStatus.BAD_REQUEST, "BadRequestError", str(error))
    except Unavailable as error:
        return _fail(HTTPStatus.SERVICE_UNAVAILABLE, "ServiceUnavailableError", str(error))
    except web.HTTPException as error:
        return _fail(HTTPStatus(error.status), "HTTPError", f"{error.reason}.")


async def _json(http: web.Request) -> Any:
    try:
        return msgspec.json.decode(await http.read())
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest("The request body is not valid JSON.") from error


def _respond(body: Json) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")


def _fail(status: HTTPStatus, kind: str, message: str) -> web.Response:
    body = msgspec.json.encode(error_body(message, kind, status.value))
    return web.Response(status=status.value, body=body, content_type="application/json")


def _lost() -> web.Response:
    return _fail(
        HTTPStatus.INTERNAL_SERVER_ERROR, "InternalServerError", "The engine restarted; the request is lost."
    )


def _require_loopback(http: web.Request) -> None:
    if http.remote is None or not is_loopback(http.remote):
        raise web.HTTPForbidden(reason="Faults are set from loopback only")
