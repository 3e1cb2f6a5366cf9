"""HTTP connections from the front to one replica, kept open between calls."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator
from typing import Any, Final, final

import httptools

Headers = list[tuple[bytes, bytes]]

CONNECT_S: Final = 5.0
_FRESH_S: Final = 30.0
"""Seconds after which an idle connection is not used again. Replicas keep them longer, so none is just being closed."""

_MUCH: Final = 1 << 18
"""Bytes of a streamed answer that wait for a slow client; beyond it the replica is not read from."""

_STREAMED: Final = b"text/event-stream"


@final
class NotDoneError(Exception):
    """A replica does not do what the front has asked of it, such as to hand a sequence over."""


class NoAnswerError(Exception):
    """The connection failed before the answer was complete: the replica has ended, or cannot be reached.

    sent: whether the replica may have got the request, and so may have ended because of it.
    """

    def __init__(self, message: str, *, sent: bool = True) -> None:
        super().__init__(message)
        self.sent = sent


@final
class UpstreamAnswer:
    """An answer: whole in `body`, or, if it is a stream of events, to be read from `parts`.

    parts: pieces as they arrive. NoAnswerError if the connection fails. Closed early, it closes the connection.
    """

    __slots__ = ("body", "headers", "parts", "status")

    def __init__(
        self, status: int, headers: Headers, body: bytes | None, parts: AsyncGenerator[bytes] | None = None
    ) -> None:
        self.status = status
        self.headers = headers
        self.body = body
        self.parts = parts


@final
class Upstream:
    """One replica's HTTP server. Used from one event loop."""

    def __init__(self, host: str, port: int) -> None:
        self.host, self.port = host, port
        self._idle: deque[_Connection] = deque()
        self._all: set[_Connection] = set()
        self._closed = False

    async def call(self, head: bytes, body: bytes = b"") -> UpstreamAnswer:
        """Send a whole request, whose head ends with an empty line; return its answer.

        A stream of events is returned when its head is there, other answers when they are whole. NoAnswerError if the
        replica cannot be reached, or the connection ends before that. Cancelled, it closes the connection, which gives
        the request up.
        """
        connection = await self._connection()
        try:
            connection.send(head + body)
            await connection.head()
            if connection.streamed:
                return UpstreamAnswer(connection.status, connection.headers, None, self._parts(connection))
            body = await connection.whole()
            answer = UpstreamAnswer(connection.status, connection.headers, body)
            self._put_back(connection)
            return answer
        except BaseException:
            connection.close()
            raise

    def close(self) -> None:
        """Close all connections: calls in progress get NoAnswerError."""
        self._closed = True
        for connection in tuple(self._all):
            connection.close()

    async def _parts(self, connection: _Connection) -> AsyncGenerator[bytes]:
        try:
            while not (connection.complete and not connection.parts):
                yield await connection.part()
        finally:
            self._put_back(connection)

    def _put_back(self, connection: _Connection) -> None:
        """A call is over: keep the connection for the next if it can be used."""
        if connection.reusable and not self._closed:
            connection.idle_since_s = time.monotonic()
            self._idle.append(connection)
        else:
            connection.close()

    async def _connection(self) -> _Connection:
        fresh_s = time.monotonic() - _FRESH_S
        while self._idle:
            connection = self._idle.pop()
            if connection.idle_since_s >= fresh_s and not connection.is_closed:
                return connection
            connection.close()
        if self._closed:
            raise NoAnswerError("the replica has ended", sent=False)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_S):
                _, connection = await loop.create_connection(lambda: _Connection(self._all), self.host, self.port)
        except OSError as error:  # TimeoutError is one
            raise NoAnswerError(f"{self.host}:{self.port} cannot be reached: {error}", sent=False) from error
        return connection


@final
class _Connection(asyncio.Protocol):
    """One connection, with one call at a time. The parser calls the methods that begin with `on_`."""

    def __init__(self, among: set[_Connection]) -> None:
        self._among = among
        self._transport: Any = None
        self._waiter: asyncio.Future[None] | None = None
        self._paused = False
        self.is_closed = False
        self.idle_since_s = 0.0
        self._reset()

    def _reset(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._has_head = self._stays = self.streamed = False
        self.complete = True
        self.status = 0
        self.headers: Headers = []
        self.parts: deque[bytes] = deque()
        self._size = 0

    @property
    def reusable(self) -> bool:
        """Whether another call may be sent."""
        return self.complete and not self.is_closed and self._stays

    def send(self, data: bytes) -> None:
        """Begin a call."""
        self._reset()
        self.complete = False
        self._transport.write(data)

    async def head(self) -> None:
        """Wait for status and headers."""
        while not self._has_head:
            await self._more()

    async def whole(self) -> bytes:
        """Wait for the whole body."""
        while not self.complete:
            await self._more()
        body = self.parts[0] if len(self.parts) == 1 else b"".join(self.parts)
        self.parts.clear()
        return body

    async def part(self) -> bytes:
        """Return what has arrived of a body, after waiting for something; b"" at its end."""
        while not self.parts and not self.complete:
            await self._more()
        piece = b"".join(self.parts)
        self.parts.clear()
        self._size = 0
        if self._paused and not self.is_closed:
            self._paused = False
            self._transport.resume_reading()
        return piece

    def close(self) -> None:
        """End the connection; who waits gets NoAnswerError."""
        if self._transport is not None:
            self._transport.abort()
        self._lost()

    async def _more(self) -> None:
        if self.is_closed:
            raise NoAnswerError("the replica closed the connection")
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _lost(self) -> None:
        self.is_closed = True
        self._among.discard(self)
        self._wake()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._among.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost()

    def data_received(self, data: bytes) -> None:
        if self.complete:
            self.close()  # nothing was asked
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.close()
            return
        if self._size > _MUCH and self.streamed and not self._paused and not self.complete:
            self._paused = True
            self._transport.pause_reading()
        self._wake()

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        self.headers.append((name, value))
        if name == b"content-type":
            self.streamed = value.startswith(_STREAMED)

    def on_headers_complete(self) -> None:
        self._has_head = True
        self.status = self._parser.get_status_code()
        self._stays = self._parser.should_keep_alive()  # at the end of the message the parser knows its length no more

    def on_body(self, body: bytes) -> None:
        self.parts.append(body)
        self._size += len(body)

    def on_message_complete(self) -> None:
        self.complete = True
