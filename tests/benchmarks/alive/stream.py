"""The leanest client that can measure a stream: HTTP/1.1 on a kept connection, read as bytes.

A general HTTP client costs more processor time than the routers that are measured. This one knows one request
(``POST /v1/completions``, a JSON body) and one answer (server-sent events in chunks, ``usage`` in the last event),
and anything else is a failure. It never decodes a token: it notes when the first event came and keeps the last
bytes, in which the usage stands.
"""

import asyncio
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

TAIL_BYTES = 4_096
"""Kept of an answer: enough for the last events, with the usage."""
HEAD_BYTES_MAX = 16_384
_USAGE = re.compile(rb'"(prompt_tokens|completion_tokens|cached_tokens)":\s*(\d+)')


class AnswerFailed(Exception):
    """The answer is no stream of events, or broke off. ``status`` 0: the connection did."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(f"{status or 'connection'}: {detail}")
        self.status = status


@dataclass(frozen=True, slots=True)
class StreamUsage:
    """What the engine says it did, from the last event."""

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


class Connection(asyncio.Protocol):
    """One kept connection; one answer at a time."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.usable = True
        self._head = b""
        self._tail = b""
        self._status = 0
        self._seen_first = False
        self._on_first: Callable[[], None] | None = None
        self._done: asyncio.Future[StreamUsage] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport), "TCP gives a stream"
        self.transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self.usable = False
        self._fail(AnswerFailed(0, str(exc or "closed by the peer")))

    def begin(self, request: bytes, on_first: Callable[[], None]) -> "asyncio.Future[StreamUsage]":
        """Send one request; the future holds the usage once the answer is complete."""
        assert self.transport is not None, "connected before it is used"
        self._head, self._tail, self._status, self._seen_first = b"", b"", 0, False
        self._on_first = on_first
        self._done = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return self._done

    def data_received(self, data: bytes) -> None:
        if self._done is None or self._done.done():
            return
        if not self._status:
            self._head += data
            end = self._head.find(b"\r\n\r\n")
            if end < 0:
                if len(self._head) > HEAD_BYTES_MAX:
                    self._fail(AnswerFailed(0, "the head of the answer does not end"))
                return
            self._status = int(self._head[9:12])
            data = self._head[end + 4 :]
        if self._status != 200:
            self._tail = (self._tail + data)[-TAIL_BYTES:]
            self._fail(AnswerFailed(self._status, self._tail[:200].decode(errors="replace")))
            return
        self._tail = (self._tail + data)[-TAIL_BYTES:]
        if not self._seen_first and b"data: {" in self._tail:
            self._seen_first = True
            assert self._on_first is not None, "set with the request"
            self._on_first()
        if self._tail.endswith(b"0\r\n\r\n") and b"[DONE]" in self._tail:
            self._complete()

    def abort(self) -> None:
        """Break off, whatever is under way."""
        self.usable = False
        if self.transport is not None:
            self.transport.abort()

    def _complete(self) -> None:
        assert self._done is not None, "an answer is awaited"
        found = {name: int(value) for name, value in _USAGE.findall(self._tail)}
        if b"prompt_tokens" not in found:
            self._fail(AnswerFailed(200, "the stream ended without usage"))
            return
        self._done.set_result(
            StreamUsage(found[b"prompt_tokens"], found.get(b"cached_tokens", 0), found[b"completion_tokens"])
        )

    def _fail(self, error: AnswerFailed) -> None:
        if self._done is not None and not self._done.done():
            self.usable = False
            self._done.set_exception(error)
            if self.transport is not None:
                self.transport.abort()


class StreamClient:
    """Connections by address, kept between requests."""

    def __init__(self) -> None:
        self._idle: dict[tuple[str, int], list[Connection]] = defaultdict(list)
        self._all: set[Connection] = set()

    async def call(
        self, host: str, port: int, body: bytes, headers: str, on_first: Callable[[], None]
    ) -> StreamUsage:
        """One request and its whole answer; raises ``AnswerFailed``. Cancelled: the connection is broken off."""
        connection = await self._connection(host, port)
        request = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n{headers}\r\n"
        ).encode() + body
        try:
            usage = await connection.begin(request, on_first)
        except BaseException:
            connection.abort()
            self._all.discard(connection)
            raise
        self._idle[host, port].append(connection)
        return usage

    async def _connection(self, host: str, port: int) -> Connection:
        idle = self._idle[host, port]
        while idle:
            connection = idle.pop()
            if connection.usable:
                return connection
            self._all.discard(connection)
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(Connection, host, port)
        except OSError as error:
            raise AnswerFailed(0, str(error)) from error
        self._all.add(connection)
        return connection

    def close(self) -> None:
        """Break off every connection."""
        for connection in self._all:
            connection.abort()
        self._all.clear()
        self._idle.clear()
