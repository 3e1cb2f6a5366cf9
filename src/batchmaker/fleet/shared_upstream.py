"""One connection from the front to a replica for all small calls at once; see `server/shared_connection`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count
from typing import Any, Final, final

from batchmaker.fleet.upstream import CONNECT_S, Headers, NoAnswerError, UpstreamAnswer
from batchmaker.server.http.joined_writes import JoinedWrites
from batchmaker.server.http.shared_connection import (
    MOST_JOINED,
    PROTOCOL,
    Answered,
    Call,
    FrameReader,
    GiveUp,
    framed,
)

_MOST_BYTES: Final = (1 << 32) - 1
"""What the length of a frame can say: answers are as large as the model makes them."""

_MOST_HEAD: Final = 1 << 16
_HEAD_END: Final = b"\r\n\r\n"


@final
class SharedUpstream:
    """A replica's calls without streams. Used from one event loop. key: makes the fleet's own key."""

    def __init__(self, host: str, port: int, key: Callable[[], str]) -> None:
        self._host, self._port = host, port
        self._key = key
        self._connection: _ReplicaLink | None = None
        self._connecting: asyncio.Task[_ReplicaLink] | None = None
        self._closed = False

    async def call(self, target: bytes, headers: Headers, body: bytes) -> UpstreamAnswer:
        """Send a POST; return its whole answer.

        NoAnswerError if the replica cannot be reached, or the connection ends before that. Cancelled, it gives the
        request up.
        """
        connection = self._connection
        if connection is None or connection.is_closed:
            connection = await self._connected()
        return await connection.call(target, headers, body)

    def close(self) -> None:
        """Close the connection: calls in progress get NoAnswerError."""
        self._closed = True
        if self._connecting is not None:
            self._connecting.cancel()
        if self._connection is not None:
            self._connection.close()

    async def _connected(self) -> _ReplicaLink:
        """Return the connection; all calls that come before there is one wait for the same."""
        if self._closed:
            raise NoAnswerError("the replica has ended", sent=False)
        if self._connecting is None:
            self._connecting = asyncio.create_task(self._connect())
        try:
            return await asyncio.shield(self._connecting)
        except asyncio.CancelledError:
            if self._closed:
                raise NoAnswerError("the replica has ended", sent=False) from None
            raise

    async def _connect(self) -> _ReplicaLink:
        connection: _ReplicaLink | None = None
        try:
            async with asyncio.timeout(CONNECT_S):
                loop = asyncio.get_running_loop()
                _, connection = await loop.create_connection(lambda: _ReplicaLink(loop), self._host, self._port)
                await connection.shared(self._key())
            self._connection = connection  # not before: calls on their way would overtake the upgrade
            return connection
        except BaseException as error:
            if connection is not None:
                connection.close()
            if isinstance(error, OSError):  # TimeoutError is one
                raise NoAnswerError(f"{self._host}:{self._port} cannot be reached: {error}", sent=False) from error
            raise
        finally:
            self._connecting = None


@final
class _ReplicaLink(asyncio.Protocol):
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._transport: Any = None
        self._head: bytes | None = b""
        self._ready: asyncio.Future[None] = loop.create_future()
        self._reader: FrameReader[Answered] = FrameReader(Answered, _MOST_BYTES)
        self._waiting: dict[int, asyncio.Future[UpstreamAnswer]] = {}
        self._numbers = count()
        self.is_closed = False

    async def shared(self, key: str) -> None:
        """Ask for the upgrade, and wait for it."""
        head = (
            f"GET / HTTP/1.1\r\nhost: replica\r\nx-api-key: {key}\r\n"
            f"connection: upgrade\r\nupgrade: {PROTOCOL.decode()}{_HEAD_END.decode()}"
        )
        self._transport.write(head.encode("latin-1"))
        await self._ready

    async def call(self, target: bytes, headers: Headers, body: bytes) -> UpstreamAnswer:
        """See SharedUpstream."""
        if self.is_closed:  # while the caller waited for the connection
            raise NoAnswerError("the replica closed the connection", sent=False)
        number = next(self._numbers)
        future: asyncio.Future[UpstreamAnswer] = self._loop.create_future()
        self._waiting[number] = future
        self._transport.write(framed(Call(number, target, headers, body)))
        try:
            return await future
        except asyncio.CancelledError:
            if self._waiting.pop(number, None) is not None and not self.is_closed:
                self._transport.write(framed(GiveUp(number)))
            raise

    def close(self) -> None:
        """End the connection; who waits gets NoAnswerError."""
        if self._transport is not None:
            self._transport.abort()
        self._lost()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = JoinedWrites(transport, self._loop)  # type: ignore[arg-type]
        self._transport.most_parts = MOST_JOINED

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost()

    def data_received(self, data: bytes) -> None:
        if self._head is not None:
            self._head += data
            head, end, data = self._head.partition(_HEAD_END)
            if end and head.startswith(b"HTTP/1.1 101 "):
                self._head = None
                self._ready.set_result(None)
            elif end or len(head) > _MOST_HEAD:
                self.close()
                return
            else:
                return
        try:
            answers = self._reader.feed(data)
        except ValueError:
            self.close()
            return
        for answer in answers:
            future = self._waiting.pop(answer.number, None)
            if future is not None and not future.done():
                future.set_result(UpstreamAnswer(answer.status, answer.headers, answer.body))

    def _lost(self) -> None:
        self.is_closed = True
        waiting, self._waiting = self._waiting, {}
        if not self._ready.done():
            self._ready.set_exception(NoAnswerError("the replica closed the connection", sent=False))
        for future in waiting.values():
            if not future.done():
                future.set_exception(NoAnswerError("the replica closed the connection"))
        if not self._ready.cancelled():
            self._ready.exception()  # nobody may wait for it
