"""A client's WebSocket, carried to the replica that holds its sequence, or its many."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from collections.abc import Callable
from typing import Any, Final, final
from urllib.parse import quote

from starlette.types import Receive, Scope, Send
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus
from websockets.typing import Subprotocol

from batchmaker.fleet.balancer import Balancer, Replica
from batchmaker.fleet.links import Link
from batchmaker.fleet.upstream import NoAnswerError, NotDoneError
from batchmaker.server.faults import STATUS, FaultKind, ServiceError
from batchmaker.server.http.routes import chunks, realtime
from batchmaker.server.observe.request_ids import HEADER

_CONNECT_S: Final = 10.0
_STATE_S: Final = 60.0
"""Seconds for the states of sequences, which come after the answers to what was sent before."""
_NO_CODE, _GONE = 1005, 1006
"""How a connection ended without a code, or without a word (RFC 6455); neither is sent."""

_STAYS: Final = (
    OSError, InvalidHandshake, ConnectionClosed, ServiceError, NotDoneError, NoAnswerError, ValueError, KeyError,
)  # fmt: skip
"""Why sequences cannot go on at another replica."""

_PROTOCOLS: Final = (chunks.PROTOCOL, realtime.PROTOCOL)
_KINDS: Final = {status: kind for kind, status in STATUS.items()}


async def relay_socket(
    balancer: Balancer, on_suspect: Callable[[Replica], None], scope: Scope, receive: Receive, send: Send
) -> None:
    """Carry a connection's messages both ways, to the replica with the fewest sequences, until either side closes.

    Sequences are handed over; a session of OpenAI's realtime API ends with its replica.

    Raises ServiceError before the handshake, the replica's own if it refuses. If the replica ends, the connection is
    closed with 1011 and the reason. If it leaves, the sequences are handed over; see Relay.
    """
    replica, socket = await _opened(balancer, on_suspect, scope)
    relay = Relay(balancer, replica, socket, scope)
    try:
        await receive()  # "websocket.connect"
        await send({"type": "websocket.accept", "subprotocol": socket.subprotocol, "headers": []})
        await relay.run(receive, send)
    except OSError:
        pass  # the client has gone
    finally:
        try:
            await relay.close()
        finally:
            balancer.disconnect(relay.replica)


async def _opened(
    balancer: Balancer, on_suspect: Callable[[Replica], None], scope: Scope
) -> tuple[Replica, ClientConnection]:
    """Return a replica that stays, and a connection to it."""
    while True:
        replica = balancer.connect()
        try:
            socket = await _connected(replica.link, scope)
        except BaseException as error:
            balancer.disconnect(replica)
            if not isinstance(error, OSError | InvalidHandshake):
                raise
            on_suspect(replica)
            raise ServiceError(FaultKind.UNAVAILABLE, "the replica has ended; connect anew", 1.0) from error
        if replica.state != "draining":
            return replica, socket
        balancer.disconnect(replica)  # it has begun to leave meanwhile, and does not hand this one over
        await socket.close()


@final
class Relay:
    """Carries the messages of one client's connection to the replica that has its sequences, and the answers back.

    A replica that leaves is asked for the state after what was sent: with it the sequence goes on at another replica,
    whose connection takes the place of the first. The client notices nothing; what it sends meanwhile waits. Each
    message about one sequence has one answer, in order, so the answer that is one too many is the state. The answer
    about many has an id that clients do not know.
    """

    def __init__(self, balancer: Balancer, replica: Replica, socket: ClientConnection, scope: Scope) -> None:
        self.replica = replica
        self._balancer = balancer
        self._socket = socket
        self._scope = scope
        self._carries = scope["path"].rpartition("/")[2]
        self._num_sent = self._num_answered = 0
        self._steady = asyncio.Event()
        self._steady.set()
        self._id = secrets.token_hex(16)
        self._state_at = 0
        self._state: asyncio.Future[str | bytes] | None = None
        self._is_closed = False
        self._enter()

    def _enter(self) -> None:
        link: Link = self.replica.link
        link.sockets.add(self._socket)
        link.relays.add(self)

    def _leave(self) -> None:
        link: Link = self.replica.link
        link.sockets.discard(self._socket)
        link.relays.discard(self)

    async def run(self, receive: Receive, send: Send) -> None:
        """Carry messages until either side closes."""
        rising, falling = asyncio.create_task(self._up(receive)), asyncio.create_task(self._down(send))
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
        code, reason = self._socket.close_code or _GONE, self._socket.close_reason or ""
        if code == _GONE:
            code, reason = 1011, "the replica that had this connection has ended: connect anew"
        await send({"type": "websocket.close", "code": code, "reason": reason})

    async def close(self) -> None:
        """End the connection to the replica."""
        self._is_closed = True
        self._leave()
        with contextlib.suppress(Exception):
            await self._socket.close()

    async def _up(self, receive: Receive) -> None:
        while True:
            message = await receive()
            if message["type"] == "websocket.disconnect":
                code = message.get("code") or 1000
                await self._socket.close(1001 if code in (_NO_CODE, _GONE) else code, message.get("reason") or "")
                return
            data = message.get("bytes")
            while not self._steady.is_set():
                await self._steady.wait()
            self._num_sent += 1
            await self._socket.send(message["text"] if data is None else data)

    async def _down(self, send: Send) -> None:
        while True:
            socket = self._socket
            try:
                said = await socket.recv()
            except ConnectionClosed:
                if socket is not self._socket:
                    continue  # the sequence has moved
                raise
            if self._state is not None and self._is_state(said):
                state, self._state = self._state, None
                if not state.done():
                    state.set_result(said)
                await self._steady.wait()
                continue
            self._num_answered += 1
            await send({"type": "websocket.send", "text" if isinstance(said, str) else "bytes": said})

    def _is_state(self, said: str | bytes) -> bool:
        """Whether a message is the state that was asked for."""
        if self._carries == "sequence":
            return self._num_answered == self._state_at
        return isinstance(said, str) and self._id in said

    async def move(self) -> int | None:
        """Let all sequences go on at another replica. Returns how many, None if they stay where they are."""
        if self._state is not None or not self._steady.is_set() or self._carries not in ("sequence", "sequences"):
            return None
        try:
            new = self._balancer.connect()
        except ServiceError:
            return None
        self._steady.clear()
        try:
            socket, count = await self._opened_at(new)
            if self._is_closed:
                await socket.close()
                raise NotDoneError("the client has closed its connection meanwhile")
        except BaseException as error:  # cancelled, too: the time for leaving is over
            self._balancer.disconnect(new)
            if not isinstance(error, _STAYS):
                raise
            return None
        else:
            old, before = self.replica, self._socket
            self._leave()
            self.replica, self._socket = new, socket
            self._enter()
            self._balancer.moved(old, count)
            with contextlib.suppress(Exception):
                await before.close()
            return count
        finally:
            self._steady.set()

    async def _opened_at(self, new: Replica) -> tuple[ClientConnection, int]:
        """Return a connection to another replica, and how many sequences go on there. Raises where one cannot."""
        state = await self._asked_state()
        socket = await _connected(new.link, self._scope)
        try:
            async with asyncio.timeout(_CONNECT_S):
                await socket.send(json.dumps({"open": {"state": state["state"]}}))
                said = json.loads(await socket.recv())
            if "error" in said:
                raise NotDoneError(said["error"])
        except BaseException:
            await socket.close()
            raise
        return socket, state.get("sequences", 1)

    async def _asked_state(self) -> dict[str, Any]:
        """Return the state after what was sent. Raises where there is none, and if the connection ends before."""
        is_one = self._carries == "sequence"
        if is_one and not await self._has_plain_names():
            raise NotDoneError("an input of the model has the name of a control")
        answer = self._state = asyncio.get_running_loop().create_future()
        self._state_at = self._num_sent
        ended = asyncio.ensure_future(self._socket.wait_closed())
        try:
            await self._socket.send('{"state":true}' if is_one else json.dumps({"state": True, "id": self._id}))
            async with asyncio.timeout(_STATE_S):
                done, _ = await asyncio.wait((answer, ended), return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended.cancel()
        if answer not in done:
            raise NotDoneError("the replica has closed the connection")
        state: dict[str, Any] = json.loads(answer.result())
        if "state" not in state:
            raise NotDoneError(state.get("error", ""))
        return state

    async def _has_plain_names(self) -> bool:
        """Whether no input of the model is named as a control is: such a message would be a chunk."""
        link: Link = self.replica.link
        path = self._scope["path"].removesuffix("/sequence")
        head = f"GET {quote(path)}/config HTTP/1.1\r\nhost: replica\r\nx-api-key: {link.key_of('')}\r\n\r\n"
        answer = await link.http.call(head.encode(), b"")
        return not {"state", "open"} & {one["name"] for one in json.loads(answer.body or b"{}").get("input", ())}


async def _connected(link: Link, scope: Scope) -> ClientConnection:
    """Return the replica's end of a connection. Raises its refusal as ServiceError, OSError if it has ended."""
    state, query = scope["state"], scope["query_string"].decode("latin-1")
    path = (scope.get("raw_path") or scope["path"].encode()).decode("latin-1")
    try:
        return await connect(
            f"ws://{link.http.host}:{link.http.port}{path}" + (f"?{query}" if query else ""),
            additional_headers={"X-API-Key": link.key_of(state["caller"]), HEADER: state["request_id"]},
            subprotocols=[Subprotocol(name) for name in _PROTOCOLS if name in scope["subprotocols"]] or None,
            compression=None,
            ping_interval=None,
            open_timeout=_CONNECT_S,
            max_size=None,
            proxy=None,
            user_agent_header=None,
        )
    except InvalidStatus as error:
        answer = error.response
        message = f"the replica answered {answer.status_code}"
        with contextlib.suppress(ValueError, KeyError, TypeError):
            said = json.loads(answer.body or b"")["error"]
            message = said["message"] if isinstance(said, dict) else said  # OpenAI's form, or the usual one
        after = answer.headers.get("retry-after")
        kind = _KINDS.get(answer.status_code, FaultKind.INTERNAL)
        raise ServiceError(kind, message, None if after is None else float(after)) from None
