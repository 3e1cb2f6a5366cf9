"""The routes of connections that carry one sequence, or many."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, final

from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.types import Receive, Scope, Send

from batchmaker.server.access.sender import sender_of
from batchmaker.server.http.routes.endpoint import Endpoint, named_model
from batchmaker.server.service.served_model import ServedModel
from batchmaker.server.service.site import Site
from batchmaker.server.ws.many_sequences import SequencesSocket
from batchmaker.server.ws.one_sequence import ChunkSocket
from batchmaker.server.ws.protocol import SOCKET, SocketProtocol

_Chunks = ChunkSocket | SequencesSocket

PROTOCOL: Final = "batchmaker"
"""The subprotocol that a client may name, and gets as the answer."""


def chunk_routes(site: Site) -> list[BaseRoute]:
    """`sequence` and `sequences`, for the newest version of a model or one that is named."""

    async def plain(request: Request) -> Response:
        raise HTTPException(426, "this is a WebSocket: connect with one", {"Upgrade": "websocket"})

    routes: list[BaseRoute] = []
    for prefix in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
        for name, begin in (("sequence", _one_sequence), ("sequences", _many_sequences)):
            path = f"{prefix}/{name}"
            routes += (WebSocketRoute(path, _Connect(site, begin)), Route(path, Endpoint(plain), methods=["GET"]))
    return routes


@final
class _Connect:
    """One connection as an ASGI application. The middleware answers exceptions before the handshake.

    begin: makes the conversation, or raises ServiceError.
    """

    def __init__(self, site: Site, begin: Callable[[Site, ServedModel, Scope], _Chunks]) -> None:
        self._site = site
        self._begin = begin

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service = self._site.service
        served = service.connect(*named_model(HTTPConnection(scope)))
        try:
            chunks = self._begin(self._site, served, scope)
        except BaseException:
            service.disconnect()
            raise
        try:
            await receive()  # "websocket.connect"
            spoken = PROTOCOL if PROTOCOL in scope["subprotocols"] else None
            await send({"type": "websocket.accept", "subprotocol": spoken, "headers": []})
        except BaseException:
            chunks.lost("it was never open", 1006)
            raise
        socket: SocketProtocol = scope["extensions"][SOCKET]
        socket.hand_over(chunks)


def _one_sequence(site: Site, served: ServedModel, scope: Scope) -> ChunkSocket:
    query = HTTPConnection(scope).query_params
    form = served.chunk_form(query, nulls=site.service.nulls)
    sender = sender_of(scope, site.keys)
    sequence = served.connect(sender, form.priority)
    socket: SocketProtocol = scope["extensions"][SOCKET]
    return ChunkSocket(site, served, sequence, form, socket, key=scope["state"]["key"], sender=sender)


def _many_sequences(site: Site, served: ServedModel, scope: Scope) -> SequencesSocket:
    served.check_kept()
    form = served.chunk_form(HTTPConnection(scope).query_params, nulls=site.service.nulls)
    socket: SocketProtocol = scope["extensions"][SOCKET]
    sender = sender_of(scope, site.keys)
    return SequencesSocket(site, served, form, socket, key=scope["state"]["key"], sender=sender)
