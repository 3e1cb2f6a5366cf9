"""uvicorn's WebSocket protocol, with limits on a client's partial, unread and stored messages."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame

from batchmaker.server.faults import ServiceError
from batchmaker.server.request_body import BodyBudget, HeldBytes

_PIECE: Final = 16_384
"""Bytes that are parsed at once: a read may hold thousands of messages, each larger in memory than on the wire."""


def limited_socket_protocol(budget: BodyBudget) -> type[WebSocketsSansIOProtocol]:
    """Return the protocol class for uvicorn, which makes one object for each connection."""

    class SocketProtocol(LimitedSocketProtocol):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(budget, *args, **kwargs)

    return SocketProtocol


class LimitedSocketProtocol(WebSocketsSansIOProtocol):
    """A protocol that stores little beyond its application's reads, and counts it in the budget of bodies.

    After an unread message nothing more is parsed. Reading stops only if more data then comes, since each stop and
    start is a call of the system. A message has `body_seconds` to arrive in, unless the application lets it wait.
    Fragments are joined as they come, however small. Pings of a client that does not read are not answered.
    """

    def __init__(self, budget: BodyBudget, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._budget = budget
        self._unparsed = b""
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
        self._held.release()
        self.on_lost()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unparsed = self._unparsed + data if self._unparsed else data
        if self.read_paused and not self._stopped:
            self._stopped = True
            self.transport.pause_reading()
        self._parse()
        if not self.handshake_initiated and not self.transport.is_closing():
            self._refuse_handshake()

    async def receive(self) -> Any:
        """Return the next message for the application; then look at the unread rest again."""
        message = await self.queue.get()
        if self.read_paused and self.queue.empty():
            self.read_paused = False
            if self._unparsed:
                self._parse()
            if self._stopped and not self.read_paused:
                self._stopped = False
                self.transport.resume_reading()
        return message

    def send_receive_event_to_app(self) -> None:
        if not self.close_sent:  # a message after the close is thrown away
            self.read_paused = True  # before uvicorn does, which would stop reading
        super().send_receive_event_to_app()

    def _parse(self) -> None:
        data, at = memoryview(self._unparsed), 0
        while at < len(data) and not self.read_paused and not self.transport.is_closing():
            super().data_received(data[at : at + _PIECE])  # type: ignore[arg-type]
            at += _PIECE
        self._unparsed = b"" if self.transport.is_closing() else bytes(data[at:])
        self._note_unread()

    def _note_unread(self) -> None:
        """Count the bytes of an incomplete message, and limit the time for its rest."""
        partial = len(self.conn.reader.buffer) + sum(map(len, self.frames))
        unread = 0 if self.disconnected else partial + len(self._unparsed)
        self._held.resize(unread)
        if unread > _PIECE and not self._has_room():
            self._fail(1013, "the server holds as many bytes as it may; try again")
        elif not partial:
            self._disarm()
        elif self._timer is None:
            self._timer = self.loop.call_later(self._budget.limits.body_seconds, self._too_slow)

    def _has_room(self) -> bool:
        try:
            self._held.check_room()
        except ServiceError:
            return False
        return True

    def _too_slow(self) -> None:
        self._timer = None
        if self.read_paused:
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
