"""Many calls over one connection, answered in any order: how the front of a fleet asks its replicas.

A connection of the HTTP server becomes one by an Upgrade to PROTOCOL, with the key of the fleet itself. Then each side
sends frames: the length of a message in 4 bytes, big-endian, and the message in msgpack. All that becomes ready in one
turn of the event loop leaves in one write, or a few, and is read in one. For small models, system calls and waking
another process are most of what a call costs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar, final
from urllib.parse import unquote

import msgspec
from starlette.types import ASGIApp, Message, Scope

from batchmaker.server.access.departure import DEPARTURE, Departure
from batchmaker.server.access.request_body import WHOLE
from batchmaker.server.http.joined_writes import JoinedWrites

PROTOCOL: Final = b"batchmaker-calls"
MOST_BODY_BYTES: Final = 1 << 16
"""Larger bodies have a connection of their own, so that nobody waits for them."""

MOST_JOINED: Final = 8
"""Frames that leave together. With all of a turn in one write, either side would wait while the other one works."""

_LENGTH_BYTES: Final = 4
_ROOM_BYTES: Final = 1 << 12
"""What a frame may have beside its call's head and body."""

_FAILED: Final = b'{"error":"the server failed; its log says more under this request\'s id"}'
_Message = TypeVar("_Message")
Headers = list[tuple[bytes, bytes]]


class Call(msgspec.Struct, frozen=True, array_like=True, tag=0, gc=False):
    """A POST. number: the caller's, not used by another call in progress. target: path and query, as in a request."""

    number: int
    target: bytes
    headers: Headers
    body: bytes


class GiveUp(msgspec.Struct, frozen=True, array_like=True, tag=1, gc=False):
    """Nobody waits for the answer to this call any more."""

    number: int


class Answered(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The whole answer to a call."""

    number: int
    status: int
    headers: Headers
    body: bytes


_ENCODER: Final = msgspec.msgpack.Encoder()


def framed(message: msgspec.Struct) -> bytes:
    """Return a message as a frame."""
    frame = bytearray(_LENGTH_BYTES)
    _ENCODER.encode_into(message, frame, _LENGTH_BYTES)
    frame[:_LENGTH_BYTES] = (len(frame) - _LENGTH_BYTES).to_bytes(_LENGTH_BYTES, "big")
    return bytes(frame)


@final
class FrameReader(Generic[_Message]):
    """Puts messages together from what arrives. most_bytes: of one message."""

    def __init__(self, kind: Any, most_bytes: int) -> None:
        self._decoder = msgspec.msgpack.Decoder(kind)
        self._most_bytes = most_bytes
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[_Message]:
        """Return the messages that are complete now. ValueError for what is no message, or too long a one."""
        self._rest += data
        messages: list[_Message] = []
        at = 0
        with memoryview(self._rest) as view:
            while len(view) >= at + _LENGTH_BYTES:
                begin = at + _LENGTH_BYTES
                end = begin + int.from_bytes(view[at:begin], "big")
                if end - begin > self._most_bytes:
                    raise ValueError(f"a message of {end - begin} bytes; at most {self._most_bytes} are taken")
                if end > len(view):
                    break
                messages.append(self._decoder.decode(view[begin:end]))  # DecodeError is a ValueError
                at = end
        del self._rest[:at]
        return messages


@final
class SharedConnection(asyncio.Protocol):
    """The replica's end. Every call goes through the ASGI application, as if it had come over HTTP.

    scope: of the call that asked for the upgrade. state: uvicorn's, which waits for tasks and closes connections when
    the server ends. on_lost: called at the end of the connection.
    """

    def __init__(
        self,
        app: ASGIApp,
        scope: Scope,
        transport: JoinedWrites,
        state: Any,
        most_head_bytes: int,
        on_lost: Callable[[], None],
    ) -> None:
        self._app = app
        self._transport = transport
        transport.most_parts = MOST_JOINED
        self._state = state
        self._on_lost = on_lost
        self._common = {key: scope[key] for key in ("asgi", "http_version", "server", "client", "scheme", "root_path")}
        self._reader: FrameReader[Call | GiveUp] = FrameReader(
            Call | GiveUp, most_head_bytes + MOST_BODY_BYTES + _ROOM_BYTES
        )
        self._running: dict[int, Departure] = {}
        self._ending = False
        state.connections.add(self)

    def data_received(self, data: bytes) -> None:
        """Begin the calls, and give up those that are given up. Closes the connection if a frame is malformed."""
        try:
            messages = self._reader.feed(data)
        except ValueError:
            self._transport.close()
            return
        for message in messages:
            if isinstance(message, GiveUp):
                if (departure := self._running.get(message.number)) is not None:
                    departure.happened()
            elif message.number in self._running:
                self._transport.close()
            else:
                self._begin(message)

    def connection_lost(self, exc: Exception | None) -> None:
        self._state.connections.discard(self)
        for departure in tuple(self._running.values()):
            departure.happened()
        self._on_lost()

    def shutdown(self) -> None:
        """Close when all calls are answered. Called by uvicorn when the server ends."""
        self._ending = True
        if not self._running:
            self._transport.close()

    def _begin(self, call: Call) -> None:
        departure = self._running[call.number] = Departure(_nothing)
        task = asyncio.get_running_loop().create_task(self._answer(call, departure))
        self._state.tasks.add(task)
        self._state.total_requests += 1
        task.add_done_callback(self._state.tasks.discard)

    async def _answer(self, call: Call, departure: Departure) -> None:
        status, headers, parts, complete = 0, [], [], False

        async def send(message: Message) -> None:
            nonlocal status, headers, complete
            if message["type"] == "http.response.start":
                status, headers = message["status"], list(message["headers"])
            else:
                parts.append(message.get("body", b""))
                complete = not message.get("more_body", False)

        try:
            await self._app(self._scope(call, departure), _receive(call.body), send)
        except ConnectionError:
            complete = False
        finally:
            del self._running[call.number]
            if complete:
                self._transport.write(framed(Answered(call.number, status, headers, b"".join(parts))))
            elif not departure.has_happened:
                headers = [(b"content-type", b"application/json")]
                self._transport.write(framed(Answered(call.number, 500, headers, _FAILED)))
            if self._ending and not self._running:
                self._transport.close()

    def _scope(self, call: Call, departure: Departure) -> Scope:
        raw_path, _, query = call.target.partition(b"?")
        path = raw_path.decode("ascii", "replace")
        return {
            "type": "http",
            "method": "POST",
            "path": unquote(path) if "%" in path else path,
            "raw_path": raw_path,
            "query_string": query,
            "headers": call.headers,
            "extensions": {DEPARTURE: departure, WHOLE: True},
            **self._common,
        }


def _receive(body: bytes) -> Callable[[], Any]:
    """Return what gives the application the body; asked for more, it waits for ever."""
    was_received = False

    async def receive() -> Message:
        nonlocal was_received
        if was_received:
            await asyncio.get_running_loop().create_future()
        was_received = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive


def _nothing() -> None:
    """A shared connection is always read."""
