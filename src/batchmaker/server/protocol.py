"""uvicorn's HTTP protocol, with limits on what comes before and after a call."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from batchmaker.server.joined import JoinedWrites
from batchmaker.server.limits import Limits


def limited_protocol(limits: Limits) -> type[HttpToolsProtocol]:
    """Return a protocol that writes the head and body of an answer together, and has limits for clients.

    They have `body_seconds` for the head of a request, which may be `max_head_bytes` long, and again for the rest of a
    body that nobody reads.
    """

    class LimitedProtocol(HttpToolsProtocol):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._timer: asyncio.TimerHandle | None = None
            self._in_head = True
            self._head_bytes = 0

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(JoinedWrites(transport, self.loop))  # type: ignore[arg-type]
            self._arm()

        def connection_lost(self, exc: Exception | None) -> None:
            self._disarm()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if self._in_head:
                self._head_bytes += len(data)
            super().data_received(data)
            if self._in_head and self._head_bytes > limits.max_head_bytes:
                self._refuse(431, "the head of the request is too large")

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._arm()

        def on_headers_complete(self) -> None:
            self._disarm()
            self._in_head = False
            self._head_bytes = 0
            super().on_headers_complete()

        def on_message_complete(self) -> None:
            super().on_message_complete()
            self._in_head = True
            self._disarm()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if not self._in_head and not self.transport.is_closing():
                self._arm()  # an answer came before the end of the body; what is left of it is thrown away

        def _arm(self) -> None:
            self._disarm()
            self._timer = self.loop.call_later(limits.body_seconds, self._refuse, 408, "the request came too slowly")

        def _disarm(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _refuse(self, status: int, message: str) -> None:
            """Close the connection, with a word if no answer is under way."""
            self._disarm()
            if self.transport.is_closing():
                return
            if self._in_head and (self.cycle is None or self.cycle.response_complete):
                body = b'{"error":"%s"}' % message.encode("ascii")
                head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
                self.transport.write(STATUS_LINE[status] + head + body)
            self.transport.close()

    return LimitedProtocol
