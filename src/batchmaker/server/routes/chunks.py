"""The route that turns a connection into a sequence."""

from __future__ import annotations

from typing import Final, final

from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.types import Receive, Scope, Send

from batchmaker.server.chunk_socket import ChunkSocket
from batchmaker.server.parts import Endpoint, Site, named_model, sender_of
from batchmaker.server.socket_protocol import SOCKET, SocketProtocol

PROTOCOL: Final = "batchmaker"
"""The subprotocol that a client may name, and gets as the answer."""


def chunk_routes(site: Site) -> list[BaseRoute]:
    """`sequence`, for the newest version of a model or one that is named."""

    async def plain(request: Request) -> Response:
        raise HTTPException(426, "this is a WebSocket: connect with one", {"Upgrade": "websocket"})

    paths = [f"{prefix}/sequence" for prefix in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}")]
    sockets = [WebSocketRoute(path, _Connect(site)) for path in paths]
    return [*sockets, *(Route(path, Endpoint(plain), methods=["GET"]) for path in paths)]


@final
class _Connect:
    """One connection as an ASGI application. The Gate answers exceptions before the handshake."""

    def __init__(self, site: Site) -> None:
        self._site = site

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        site, asked = self._site, HTTPConnection(scope)
        model, version = named_model(asked)
        served = site.service.connect(model, version)
        try:
            form = served.chunk_form(asked.query_params, nulls=site.service.nulls)
            sender, key = sender_of(scope, site.keys), scope["state"]["key"]
            sequence = served.connect(sender, form.priority)
        except BaseException:
            site.service.disconnect()
            raise
        socket: SocketProtocol = scope["extensions"][SOCKET]
        chunks = ChunkSocket(site, served, sequence, form, socket, key=key, client=sender.client)
        try:
            await receive()  # "websocket.connect"
            spoken = PROTOCOL if PROTOCOL in scope["subprotocols"] else None
            await send({"type": "websocket.accept", "subprotocol": spoken, "headers": []})
        except BaseException:
            chunks.lost("it was never open", 1006)
            raise
        socket.hand_over(chunks)
