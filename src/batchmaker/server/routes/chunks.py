"""The route that turns a connection into a sequence."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final, final

from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.types import Receive, Scope, Send

from batchmaker.server.chunk_form import ChunkForm
from batchmaker.server.chunk_socket import ChunkSocket, Closing
from batchmaker.server.parts import Endpoint, Site, named_model, sender_of

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
        signature = site.service.repository.get(model, version).signature
        form = ChunkForm(signature, asked.query_params, site.service.limits, nulls=site.service.nulls)
        sender, key = sender_of(scope, site.keys), scope["state"]["key"]
        with site.service.connected(model, version, sender, form.priority) as (served, sequence):
            socket = ChunkSocket(site, served, sequence, form, key=key, client=sender.client)
            await receive()  # "websocket.connect"
            spoken = PROTOCOL if PROTOCOL in scope["subprotocols"] else None
            try:
                await send({"type": "websocket.accept", "subprotocol": spoken, "headers": []})
            except OSError:
                return  # it has already gone
            closing = await socket.run(receive, send)
            if closing is not None:
                await _close(send, closing, site.service.limits.write_seconds)


async def _close(send: Send, closing: Closing, write_seconds: float) -> None:
    with contextlib.suppress(OSError):  # it has gone, or reads nothing (TimeoutError): nobody listens
        async with asyncio.timeout(write_seconds):
            await send({"type": "websocket.close", "code": closing.code, "reason": closing.reason})
