"""uvicorn's WebSocket protocol, with limits on a client's partial, unread and stored messages."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.exceptions import InvalidState
from websockets.frames import Frame

from batchmaker.server.request_body import BodyBudget, HeldBytes

_PIECE: Final = 16_384
"""Bytes that are parsed at once: a read may hold thousands of messages, each larger in memory than on the wire."""

_AHEAD: Final = 1 << 20
"""Bytes of messages that one connection stores before its application reads them."""

_OBJECT: Final = 512
"""Bytes that a stored message takes in memory beside its own."""


def limited_socket_protocol(budget: BodyBudget) -> type[WebSocketsSansIOProtocol]:
    """Return the protocol class for uvicorn, which makes one object for each connection."""

    class SocketProtocol(LimitedSocketProtocol):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(budget, *args, **kwargs)

    return SocketProtocol


class LimitedSocketProtocol(WebSocketsSansIOProtocol):
    """A protocol that stores a bounded number of bytes ahead of its application, and counts them in the budget.

    Messages are parsed before they are read, so pings among them are answered though the messages wait. Parsing stops
    with `_AHEAD` bytes stored, or with any if half of the budget is used or its client holds as much as it may. Reading
    from the client stops only if more data then comes, since each stop and start is a call of the system. A message has
    `body_seconds` to arrive in, unless the application lets it wait. Fragments are joined as they come, however small.
    Pings of a client that does not read are not answered. What a client that has gone left unread is dropped.
    """

    def __init__(self, budget: BodyBudget, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._budget = budget
        self._unparsed = b""
        self._sizes: deque[int] = deque()  # of the stored messages
        self._stored = 0
        self._held = HeldBytes(budget, "")
        self._stopped = False
        self._timer: asyncio.TimerHandle | None = None
        self.on_lost: Callable[[], None] = lambda: None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._held.client = self.client[0] if self.client else ""

    def connection_lost(self, exc: Exception | None) -> None:
        self._unparsed = b""
        self._disarm()
        self._drop_stored()
        self._held.release()
        self.on_lost()
        super().connection_lost(exc)

    def handle_close(self, event: Frame) -> None:
        self._drop_stored()
        super().handle_close(event)

    def _drop_stored(self) -> None:
        """Forget what the application has not read: nobody waits for its answers."""
        kept = [self.queue.get_nowait() for _ in range(self.queue.qsize())]
        for message in kept:
            if message["type"] != "websocket.receive":
                self.queue.put_nowait(message)
        self._sizes.clear()
        self._stored = 0

    def data_received(self, data: bytes) -> None:
        self._unparsed = self._unparsed + data if self._unparsed else data
        if self._is_full and not self._stopped:
            self._stopped = True
            self.transport.pause_reading()
        self._parse()
        if not self.handshake_initiated and not self.transport.is_closing():
            self._refuse_handshake()

    async def receive(self) -> Any:
        """Return the next message for the application; then look at the rest again, if there is room for it."""
        message = await self.queue.get()
        was_full = self._is_full
        if message["type"] == "websocket.receive" and self._sizes:
            size = self._sizes.popleft()
            self._stored -= size
            self._held.resize(self._held.size - size)
        if was_full and not self._is_full:
            self._go_on()
        return message

    async def send(self, message: Any) -> None:
        if self.transport.is_closing():
            raise ClientDisconnected
        try:
            await super().send(message)
        except InvalidState as error:  # the client's own mistake; uvicorn expects it of some messages only
            raise ClientDisconnected from error
        if self.close_sent:
            self.handshake_complete = True  # by a refusal, too
        if message["type"] in ("websocket.accept", "websocket.close"):
            self._go_on()  # to what came before the handshake was complete, or to the client's own close

    def send_500_response(self) -> None:
        if not self.transport.is_closing():
            super().send_500_response()

    def send_receive_event_to_app(self) -> None:
        self.read_paused = True  # before uvicorn does, which would stop reading
        before = self.queue.qsize()
        size = _OBJECT + sum(map(len, self.frames))
        super().send_receive_event_to_app()
        if self.queue.qsize() > before:  # else it came after the close, or was no text
            self._sizes.append(size)
            self._stored += size

    @property
    def _is_full(self) -> bool:
        """Whether nothing more may be parsed until the application reads, or has answered the handshake."""
        if self.handshake_initiated and not self.handshake_complete:
            return True
        if not self._stored or self.close_sent:
            return False
        bodies = self._budget
        return self._stored >= _AHEAD or bodies.is_scarce or not bodies.fits(self._held.client, 0)

    def _go_on(self) -> None:
        """Parse what has come, and read on if there is room after that."""
        self._parse()
        if self._stopped and not self._is_full and not self.transport.is_closing():
            self._stopped = False
            self.transport.resume_reading()

    def _parse(self) -> None:
        data, at = memoryview(self._unparsed), 0
        while at < len(data) and not self._is_full and not self.transport.is_closing():
            super().data_received(data[at : at + _PIECE])  # type: ignore[arg-type]
            at += _PIECE
        self._unparsed = b"" if self.transport.is_closing() else bytes(data[at:])
        self._note_unread()

    def _note_unread(self) -> None:
        """Count the bytes of unread and incomplete messages, and limit the time for the rest of one."""
        partial = 0 if self.disconnected else len(self.conn.reader.buffer) + sum(map(len, self.frames))
        self._held.resize(0 if self.disconnected else partial + len(self._unparsed) + self._stored)
        if partial > _PIECE and not self._budget.fits(self._held.client, 0):
            self._fail(1013, "the server holds as many bytes as it may; try again")
        elif not partial:
            self._disarm()
        elif self._timer is None:
            self._timer = self.loop.call_later(self._budget.limits.body_seconds, self._too_slow)

    def _too_slow(self) -> None:
        self._timer = None
        if self._is_full:
            self._timer = self.loop.call_later(self._budget.limits.body_seconds, self._too_slow)
        else:
            self._fail(1008, "the message came too slowly")

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _fail(self, code: int, reason: str) -> None:
        """Close the connection because of a client's fault."""
        self._disarm()
        if not self.close_sent and not self.transport.is_closing():
            self.queue.put_nowait({"type": "websocket.disconnect", "code": code, "reason": reason})
            self.conn.fail(code, reason)
            self.transport.write(b"".join(self.conn.data_to_send()))
            self.close_sent = True
            self.transport.close()

    def _refuse_handshake(self) -> None:
        head = b"content-type: application/json\r\nconnection: close\r\n"
        body = b'{"error":"the request for a WebSocket is malformed"}'
        self.transport.write(b"HTTP/1.1 400 Bad Request\r\n%scontent-length: %d\r\n\r\n%s" % (head, len(body), body))
        self.handshake_initiated = self.handshake_complete = self.close_sent = True
        self.transport.close()

    def handle_cont(self, event: Frame) -> None:
        parts: list[Any] = self.frames
        if not isinstance(parts[0], bytearray):
            parts[0] = bytearray(parts[0])
        parts[0] += event.data
        if event.fin:
            self.send_receive_event_to_app()

    def handle_ping(self) -> None:
        if self.writable.is_set():
            super().handle_ping()
        else:
            self.conn.data_to_send()  # thrown away: it would be stored until the client reads
