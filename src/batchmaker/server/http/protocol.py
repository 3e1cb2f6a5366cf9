"""uvicorn's HTTP protocol, with limits before and after a call."""

from __future__ import annotations

import asyncio
from typing import Any, Final, cast

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from batchmaker.server.access.auth import FRONT, KeyRing
from batchmaker.server.access.connections import Connections
from batchmaker.server.access.departure import DEPARTURE, Departure
from batchmaker.server.access.request_body import WHOLE, BodyBudget
from batchmaker.server.faults import ServiceError
from batchmaker.server.http.joined_writes import JoinedWrites
from batchmaker.server.http.middleware import key_in
from batchmaker.server.http.refusals import Refusals
from batchmaker.server.http.shared_connection import PROTOCOL, SharedConnection
from batchmaker.server.limits import Limits
from batchmaker.server.ws.call import SocketCall
from batchmaker.server.ws.deadlines import Watch
from batchmaker.server.ws.pool import SocketPool
from batchmaker.server.ws.protocol import SocketSite

_LARGE_HEAD: Final = "the head of the request is too large"


def limited_protocol(
    bodies: BodyBudget, connections: Connections, refusals: Refusals | None = None, keys: KeyRing | None = None
) -> type[HttpToolsProtocol]:
    """Return the protocol class for uvicorn, which makes one object for each connection. See LimitedProtocol."""
    watch, pool = Watch(), SocketPool()

    class Protocol(LimitedProtocol):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(bodies, watch, pool, connections, refusals, keys, *args, **kwargs)

    return Protocol


class LimitedProtocol(HttpToolsProtocol):
    """A protocol that writes the head and body of an answer together, and has limits for clients.

    A client has `body_seconds` for the head of a request, which may be `max_head_bytes` long, and again for the rest of
    a body that nobody reads. bodies: the budget of what WebSockets hold. watch: their deadlines. pool: reads and writes
    them. connections: all open ones. refusals: answers calls without room as soon as their heads have arrived; the rest
    of them is thrown away. keys: where the front of a fleet may share a connection among its calls, to know it by.
    Calls find the values DEPARTURE and WHOLE in their scope's extensions.
    """

    def __init__(
        self,
        bodies: BodyBudget,
        watch: Watch,
        pool: SocketPool,
        connections: Connections,
        refusals: Refusals | None,
        keys: KeyRing | None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._limits: Limits = bodies.limits
        self._bodies = bodies
        self._watch = watch
        self._pool = pool
        self._open_connections = connections
        self._refusals = refusals
        self._keys = keys
        self._timer: asyncio.TimerHandle | None = None
        self._in_head = True
        self._begun = False  # a message whose head is not complete
        self._refused = False  # a message whose rest is thrown away
        self._head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(JoinedWrites(transport, self.loop))  # type: ignore[arg-type]
        self._departure = Departure(self.flow.resume_reading)
        refused = self._open_connections.opened(self, self.client[0] if self.client else "")
        if refused is None:
            self._arm()
        else:
            self._refuse(503, refused)

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        self._open_connections.closed(self)
        super().connection_lost(exc)
        self._departure.happened()

    def close_idle(self) -> None:
        """Close the connection to make room for others; no call is in progress."""
        self._disarm()
        self._unset_keepalive_if_required()
        self.transport.close()

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > self._limits.max_head_bytes:
            self._refuse(431, _LARGE_HEAD)
        elif (self._begun or self._refused) and self._timer is None:
            self._arm()  # a message in one piece needs no timer

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {DEPARTURE: self._departure, WHOLE: False}  # type: ignore[dict-item]
        self._begun = True
        self._open_connections.busy(self)
        self._disarm()
        self._unset_keepalive_if_required()

    def on_headers_complete(self) -> None:
        """Check the size of the head, refuse a call without room, or hand the call on. Called by the parser."""
        self._disarm()
        if self._head_bytes > self._limits.max_head_bytes and self._head_size() > self._limits.max_head_bytes:
            self._refuse(431, _LARGE_HEAD)  # it came in one piece
            self._refused = True
            return
        self._in_head = self._begun = False
        self._head_bytes = 0
        if self._refusals is not None and (self.cycle is None or self.cycle.response_complete):
            answer = self._refusals.answer(self.parser.get_method(), self.url, self.headers)
            if answer is not None:
                self._refuse_call(answer)
                return
        super().on_headers_complete()

    def _head_size(self) -> int:
        """The bytes of a call's target and headers, without the other parts of the request line."""
        return len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)

    def on_body(self, body: bytes) -> None:
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """Hand the end of the body on, and count the connection as idle if its answer is complete."""
        if not self._refused:
            self.scope["extensions"][WHOLE] = True  # type: ignore[assignment]
            super().on_message_complete()
        elif not self.transport.is_closing():
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )
        self._refused = False
        self._in_head = True
        self._disarm()
        if not self.transport.is_closing() and (self.cycle is None or self.cycle.response_complete):
            self._open_connections.idle(self)  # the answer was complete before the end of the body

    def _should_upgrade(self) -> bool:
        wanted = self._get_upgrade()
        return wanted == b"websocket" or (self._keys is not None and wanted == PROTOCOL)

    def handle_websocket_upgrade(self) -> None:
        """Hand the connection over, unless an answer is still due on it, which would be lost among the messages."""
        self._disarm()
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.close()
        elif self._keys is not None and self._get_upgrade() == PROTOCOL:
            self._share(self._keys)
        else:
            self._open_socket()

    def _open_socket(self) -> None:
        """Have a WebSocket go on with this connection; nothing here is needed any more."""
        self.connections.discard(self)
        opened = self._open_connections
        transport = self._pool.pooled(cast(JoinedWrites, self.transport).plain())
        site = SocketSite(self._bodies, self._watch, self.server_state)
        call = SocketCall(self.app, site, transport, cast(Scope, self.scope), opened.closed)
        opened.hand_over(self, call.protocol)
        transport.set_protocol(call.protocol)
        call.begin(self.scope["method"], self.url)
        self.parser = self.cycle = None  # type: ignore[assignment] # the parser holds this object, and is held by it

    def _share(self, keys: KeyRing) -> None:
        """Let many calls share this connection from now on, if the front of the fleet asks for it."""
        try:
            caller = keys.caller(key_in(self.headers))
        except ServiceError:
            caller = ""
        if caller != FRONT:
            self._say(403, "only the front of a fleet may share a connection among calls")
            self.transport.close()
            return
        self.connections.discard(self)
        self._open_connections.busy(self)
        transport = cast(JoinedWrites, self.transport)
        transport.write(STATUS_LINE[101] + b"connection: upgrade\r\nupgrade: %s\r\n\r\n" % PROTOCOL)
        shared = SharedConnection(
            self.app,
            cast(Scope, self.scope),
            transport,
            self.server_state,
            self._limits.max_head_bytes,
            lambda: self._open_connections.closed(self),
        )
        transport.set_protocol(shared)

    def _refuse_call(self, answer: bytes) -> None:
        """Refuse one call for lack of room. The connection stays open if the client wants that."""
        self._refused = True
        self.server_state.total_requests += 1
        stays = self.parser.get_http_version() != "1.0" and self.parser.should_keep_alive()
        self.transport.write(STATUS_LINE[503] + (b"" if stays else b"connection: close\r\n") + answer)
        if not stays:
            self.transport.close()

    def on_response_complete(self) -> None:
        """Send what is joined, and wait for the rest of the body, or for the next call."""
        cast(JoinedWrites, self.transport).send_now()
        super().on_response_complete()
        if self.transport.is_closing():
            return
        if not self._in_head:
            self._arm()  # an answer was complete before the end of the body; the rest of the body is thrown away
        elif not self._begun and self.cycle.response_complete:  # and no call waits behind it
            self._open_connections.idle(self)

    def send_400_response(self, msg: str) -> None:
        """Answer data that is not HTTP like every other error, unless an answer is already being sent."""
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            self._say(400, "this is not a valid HTTP request")
        self.transport.close()

    def _arm(self) -> None:
        self._disarm()
        seconds = self._limits.body_seconds
        self._timer = self.loop.call_later(seconds, self._refuse, 408, "the request came too slowly")

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _refuse(self, status: int, message: str) -> None:
        """Close the connection, with a message if no answer is in progress."""
        self._disarm()
        if self.transport.is_closing():
            return
        if self._in_head and (self.cycle is None or self.cycle.response_complete):
            self._say(status, message)
        self.transport.close()

    def _say(self, status: int, message: str) -> None:
        body = b'{"error":"%s"}' % message.encode("ascii")
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[status] + head + body)
