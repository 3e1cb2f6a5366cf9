"""OpenAI's realtime API: a WebSocket of events, for transcription."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final, final

from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.types import Receive, Scope, Send

from batchmaker.errors import unknown_name
from batchmaker.server.access.sender import sender_of
from batchmaker.server.faults import invalid
from batchmaker.server.http.routes.endpoint import Endpoint
from batchmaker.server.service.site import Site
from batchmaker.server.ws.protocol import SOCKET, SocketProtocol
from batchmaker.server.ws.realtime import Farewell, RealtimeSession

_PATH: Final = "/v1/realtime"
PROTOCOL: Final = "realtime"
"""The subprotocol that browsers name, and get as the answer."""

_QUERY: Final = ("model", "intent")


def realtime_routes(site: Site) -> list[BaseRoute]:
    """Sessions of live sound."""

    async def plain(request: Request) -> Response:
        raise HTTPException(426, "this is a WebSocket: connect with one", {"Upgrade": "websocket"})

    return [WebSocketRoute(_PATH, _Listen(site)), Route(_PATH, Endpoint(plain), methods=["GET"])]


@final
class _Listen:
    """One connection as an ASGI application. The middleware answers exceptions before the handshake."""

    def __init__(self, site: Site) -> None:
        self._site = site

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        site, model = self._site, _model_in(HTTPConnection(scope))
        socket: SocketProtocol = scope["extensions"][SOCKET]
        with site.service.conversation():
            sender, key = sender_of(scope, site.keys), scope["state"]["key"]
            session = RealtimeSession(site, sender, key, model, lambda: socket.is_gone)
            with contextlib.closing(session):
                await receive()  # "websocket.connect"
                spoken = PROTOCOL if PROTOCOL in scope["subprotocols"] else None
                try:
                    await send({"type": "websocket.accept", "subprotocol": spoken, "headers": []})
                except OSError:
                    return  # it has already gone
                farewell = await session.run(receive, send)
            if farewell is not None:
                await _close(send, farewell, site.service.limits.write_seconds)


def _model_in(connection: HTTPConnection) -> str | None:
    """Return the model that the query names. INVALID for a query that asks for another kind of session."""
    for name in connection.query_params:
        if name not in _QUERY:
            raise invalid(str(unknown_name("query parameter", name[:64], _QUERY)))
    intent = connection.query_params.get("intent", "transcription")
    if intent != "transcription":
        raise invalid(f"intent {intent[:32]!r} is not implemented; leave it out, or connect with intent=transcription")
    return connection.query_params.get("model")


async def _close(send: Send, farewell: Farewell, write_seconds: float) -> None:
    with contextlib.suppress(OSError):  # it has gone, or reads nothing (TimeoutError): nobody listens
        async with asyncio.timeout(write_seconds):
            await send({"type": "websocket.close", "code": farewell.code, "reason": farewell.reason})
