"""A client's WebSocket, carried to the replica that holds its sequence."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Final

from starlette.types import Receive, Scope, Send
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus
from websockets.typing import Subprotocol

from batchmaker.fleet.balancer import Balancer, Replica
from batchmaker.fleet.links import Link
from batchmaker.server.answers import STATUS
from batchmaker.server.faults import FaultKind, ServiceError
from batchmaker.server.request_ids import HEADER
from batchmaker.server.routes.chunks import PROTOCOL

_CONNECT_S: Final = 10.0
_NO_CODE, _GONE = 1005, 1006
"""How a connection ended without a code, or without a word (RFC 6455); neither is sent."""

_KINDS: Final = {status: kind for kind, status in STATUS.items()}


async def relay_socket(
    balancer: Balancer, on_suspect: Callable[[Replica], None], scope: Scope, receive: Receive, send: Send
) -> None:
    """Carry a connection's messages both ways, to the replica with the fewest sequences, until either side closes.

    Raises ServiceError before the handshake, the replica's own if it refuses. If the replica ends, the connection is
    closed with 1011 and the reason.
    """
    replica = balancer.connect()
    link: Link = replica.link
    try:
        try:
            socket = await _connected(link, scope)
        except (OSError, InvalidHandshake) as error:
            on_suspect(replica)
            raise ServiceError(FaultKind.UNAVAILABLE, "the replica has ended; connect anew", 1.0) from error
        link.sockets.add(socket)
        try:
            await receive()  # "websocket.connect"
            await send({"type": "websocket.accept", "subprotocol": socket.subprotocol, "headers": []})
            await _relay(socket, receive, send)
        except OSError:
            pass  # the client has gone
        finally:
            link.sockets.discard(socket)
            with contextlib.suppress(Exception):
                await socket.close()
    finally:
        balancer.disconnect(replica)


async def _connected(link: Link, scope: Scope) -> ClientConnection:
    """Return the replica's end of a connection. Raises its refusal as ServiceError, OSError if it has ended."""
    state, query = scope["state"], scope["query_string"].decode("latin-1")
    path = (scope.get("raw_path") or scope["path"].encode()).decode("latin-1")
    try:
        return await connect(
            f"ws://{link.http.host}:{link.http.port}{path}" + (f"?{query}" if query else ""),
            additional_headers={"X-API-Key": link.key_of(state["caller"]), HEADER: state["request_id"]},
            subprotocols=[Subprotocol(PROTOCOL)] if PROTOCOL in scope["subprotocols"] else None,
            compression=None,
            ping_interval=None,
            open_timeout=_CONNECT_S,
            max_size=None,
            proxy=None,
            user_agent_header=None,
        )
    except InvalidStatus as error:
        answer = error.response
        said = (answer.body or b"").decode("utf-8", "replace")
        message = said.partition('"error":"')[2].rpartition('"')[0] or f"the replica answered {answer.status_code}"
        after = answer.headers.get("retry-after")
        kind = _KINDS.get(answer.status_code, FaultKind.INTERNAL)
        raise ServiceError(kind, message, None if after is None else float(after)) from None


async def _relay(socket: ClientConnection, receive: Receive, send: Send) -> None:
    async def up() -> None:
        while True:
            message = await receive()
            if message["type"] == "websocket.disconnect":
                code = message.get("code") or 1000
                await socket.close(1001 if code in (_NO_CODE, _GONE) else code, message.get("reason") or "")
                return
            data = message.get("bytes")
            await socket.send(message["text"] if data is None else data)

    async def down() -> None:
        while True:
            said = await socket.recv()
            await send({"type": "websocket.send", "text" if isinstance(said, str) else "bytes": said})

    rising, falling = asyncio.create_task(up()), asyncio.create_task(down())
    try:
        await asyncio.wait((rising, falling), return_when=asyncio.FIRST_COMPLETED)
        if rising.done() and rising.exception() is None:
            return  # the client has closed
        with contextlib.suppress(ConnectionClosed, OSError):
            await falling if falling.done() else await asyncio.wait_for(falling, _CONNECT_S)
    finally:
        for task in (rising, falling):
            task.cancel()
        await asyncio.gather(rising, falling, return_exceptions=True)
    code, reason = socket.close_code or _GONE, socket.close_reason or ""
    if code == _GONE:
        code, reason = 1011, "the replica that held the sequence has ended: connect anew"
    await send({"type": "websocket.close", "code": code, "reason": reason})
