"""A WebSocket as a call of an ASGI application: its handshake, and messages unless a conversation takes them over."""

from __future__ import annotations

import asyncio
import http
import logging
from collections.abc import Callable, Sequence
from typing import Final, final
from urllib.parse import unquote

from starlette.types import ASGIApp, Message, Scope
from websockets.datastructures import Headers
from websockets.http11 import Request
from websockets.server import ServerProtocol

from batchmaker.server.ws.message_reader import framed
from batchmaker.server.ws.protocol import SOCKET, SocketProtocol, SocketSite

_LOG = logging.getLogger("batchmaker.server")
_MOST_VALUE_BYTES: Final = 8192
"""Of one header."""

_ABNORMAL: Final = 1006
"""How a connection has ended that was not open (RFC 6455, section 7.4.1)."""

RawHeaders = Sequence[tuple[bytes, bytes]]


@final
class SocketCall:
    """The handshake of one connection, and its ASGI application: `Conversation` for its protocol.

    An application that reads its messages one by one gets each when it asks for it. One that needs no task for each
    connection takes `SOCKET` out of the extensions of its scope, accepts, hands a conversation over, and returns.
    """

    def __init__(
        self,
        app: ASGIApp,
        site: SocketSite,
        transport: asyncio.Transport,
        scope: Scope,
        on_lost: Callable[[SocketProtocol], None],
    ) -> None:
        """scope: of the request for a WebSocket, with its headers; `target` is added by `begin`."""
        self._app = app
        self._site = site
        client = scope.get("client")
        self.protocol = SocketProtocol(site, transport, client[0] if client else "", self, on_lost)
        self._http_scope = scope
        self._accepted: Headers | None = None
        self._refusal: tuple[int, RawHeaders] | None = None
        self._body = b""
        self._connected = False
        self._end: Message | None = None
        self._message: bytes | str | None = None
        self._waits: asyncio.Future[None] | None = None
        self._sends: asyncio.Future[None] | None = None

    def begin(self, method: str, target: bytes) -> None:
        """Answer the request, in a task. target: path and query, as sent."""
        headers: RawHeaders = self._http_scope["headers"]
        answer = _answer(method, target, headers)
        if isinstance(answer, bytes):
            self.protocol.answer_handshake(answer, opened=False)
            return
        self._accepted = answer
        task = asyncio.get_running_loop().create_task(self._run(target))
        self._site.state.tasks.add(task)
        task.add_done_callback(self._site.state.tasks.discard)

    async def _run(self, target: bytes) -> None:
        try:
            await self._app(self._scope(target), self._receive, self._send)
        except ConnectionError:
            pass  # the client has gone
        except BaseException:
            _LOG.exception("a WebSocket failed")
        if self._accepted is not None and self._refusal is None and not self.protocol.is_gone:
            self._refuse(500, [], b"")
        elif self.protocol.is_taken_by(self):
            self.protocol.close(1000, "")

    def _scope(self, target: bytes) -> Scope:
        raw_path, _, query = target.partition(b"?")
        http = self._http_scope
        path = unquote(raw_path.decode("ascii", "replace"))
        subprotocols = [
            token.strip()
            for name, value in http["headers"]
            if name == b"sec-websocket-protocol"
            for token in value.decode("latin-1").split(",")
        ]
        return {
            "type": "websocket",
            "asgi": http["asgi"],
            "http_version": "1.1",
            "scheme": "wss" if http["scheme"] == "https" else "ws",
            "server": http["server"],
            "client": http["client"],
            "root_path": http["root_path"],
            "path": http["root_path"] + path,
            "raw_path": http["root_path"].encode("ascii") + raw_path,
            "query_string": query,
            "headers": http["headers"],
            "subprotocols": subprotocols,
            "state": {},
            "extensions": {"websocket.http.response": {}, SOCKET: self.protocol},
        }

    # --- for the application -----------------------------------------------------------------------------------------

    async def _receive(self) -> Message:
        if not self._connected:
            self._connected = True
            return {"type": "websocket.connect"}
        if self._message is None and self._end is None:
            self._waits = asyncio.get_running_loop().create_future()
            self.protocol.go_on()
            try:
                await self._waits
            finally:
                self._waits = None
        message, self._message = self._message, None
        if message is None:
            assert self._end is not None
            return self._end
        return {"type": "websocket.receive", "text" if isinstance(message, str) else "bytes": message}

    async def _send(self, message: Message) -> None:
        kind = message["type"]
        while not self.protocol.writable and not self.protocol.is_gone:
            self._sends = asyncio.get_running_loop().create_future()
            await self._sends
        if self.protocol.is_gone:
            raise ConnectionAbortedError("the client has gone")
        if kind == "websocket.accept":
            self._accept(message)
        elif kind == "websocket.send":
            data = message.get("bytes")
            self.protocol.write(framed(message["text"] if data is None else data))
        elif kind == "websocket.close" and self._accepted is not None:
            self._refuse(403, [], b"")
        elif kind == "websocket.close":
            self._end = {"type": "websocket.disconnect", "code": message.get("code", 1000)}
            self.protocol.close(message.get("code", 1000), message.get("reason") or "")
        elif kind == "websocket.http.response.start":
            self._refusal = (message["status"], message.get("headers", ()))
        else:
            self._body += message.get("body", b"")
            if self._refusal is not None and not message.get("more_body", False):
                self._refuse(*self._refusal, self._body)

    def _accept(self, message: Message) -> None:
        accepted, self._accepted = self._accepted, None
        assert accepted is not None
        lines = [b"HTTP/1.1 101 Switching Protocols\r\n"]
        lines += [f"{name}: {value}\r\n".encode("latin-1") for name, value in accepted.raw_items()]
        lines += [b"%s: %s\r\n" % header for header in message.get("headers", ())]
        if message.get("subprotocol"):
            lines.append(b"Sec-WebSocket-Protocol: %s\r\n" % message["subprotocol"].encode("latin-1"))
        self.protocol.answer_handshake(b"".join((*lines, b"\r\n")), opened=True)

    def _refuse(self, status: int, headers: RawHeaders, body: bytes) -> None:
        self._accepted = None
        self._end = self._end or {"type": "websocket.disconnect", "code": _ABNORMAL}
        self.protocol.answer_handshake(_response(status, headers, body), opened=False)

    # --- for the protocol --------------------------------------------------------------------------------------------

    @property
    def takes(self) -> bool:
        """Whether the application waits for a message. See Conversation."""
        return self._waits is not None and self._message is None and not self._waits.done()

    def received(self, message: bytes | str) -> None:
        """Wake the application with a message."""
        self._message = message
        self._wake(self._waits)

    def writable(self) -> None:
        """Let the application go on that waits with a message for the client."""
        self._wake(self._sends)

    def lost(self, why: str, code: int) -> None:
        """Tell the application that the connection has ended."""
        self._end = self._end or {"type": "websocket.disconnect", "code": code, "reason": why}
        self._wake(self._waits)
        self._wake(self._sends)

    def look(self, now_s: float) -> float | None:
        """See Conversation: an application has its own deadlines."""
        return None

    @staticmethod
    def _wake(sleeps: asyncio.Future[None] | None) -> None:
        if sleeps is not None and not sleeps.done():
            sleeps.set_result(None)


def _answer(method: str, target: bytes, headers: RawHeaders) -> Headers | bytes:
    """Return the headers that accept a request for a WebSocket, or the whole answer that refuses a malformed one."""
    if method != "GET":
        return _refusal(405, "a WebSocket begins with GET")
    if any(len(value) > _MOST_VALUE_BYTES for _, value in headers):
        return _refusal(431, "a header of the request for a WebSocket is too long")
    request_headers = Headers([(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers])
    answer = ServerProtocol().accept(Request(target.decode("latin-1"), request_headers))
    if answer.status_code != http.HTTPStatus.SWITCHING_PROTOCOLS:
        more = [(b"sec-websocket-version", b"13")] if answer.status_code == http.HTTPStatus.UPGRADE_REQUIRED else []
        return _refusal(answer.status_code, "the request for a WebSocket is malformed", more)
    del answer.headers["Date"]
    return answer.headers


def _refusal(status: int, message: str, headers: RawHeaders = ()) -> bytes:
    body = b'{"error":"%s"}' % message.encode("ascii")
    return _response(status, [(b"content-type", b"application/json"), *headers], body)


def _response(status: int, headers: RawHeaders, body: bytes) -> bytes:
    """Return a whole answer of HTTP, after which the connection is closed."""
    reason = http.HTTPStatus(status).phrase if status in http.HTTPStatus._value2member_map_ else ""
    lines = [b"HTTP/1.1 %d %s\r\nconnection: close\r\n" % (status, reason.encode("ascii"))]
    if not any(name.lower() == b"content-length" for name, _ in headers):
        lines.append(b"content-length: %d\r\n" % len(body))
    lines += [b"%s: %s\r\n" % (name, value) for name, value in headers]
    return b"".join((*lines, b"\r\n", body))
