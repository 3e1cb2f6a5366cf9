"""One client's connection to the gRPC port, on its way to gRPC's core.

The core accepts connections, reads messages and keeps what has arrived of them without telling anybody. So clients
connect here, where connections, calls and bytes are counted as over HTTP, and all frames are passed on as they are. One
thing is added: each call gets a header by which the function that answers it finds its RpcStream.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
from collections.abc import Callable
from typing import Any, Final, cast, final

from batchmaker.server.access.connections import Connections
from batchmaker.server.access.request_body import BodyBudget, HeldBytes
from batchmaker.server.faults import ServiceError
from batchmaker.server.rpc import frames
from batchmaker.server.rpc.frames import FrameScanner, Piece

STREAM: Final = "batchmaker-stream"
"""The header that names a call's RpcStream. Nobody can guess one; the last of several counts, and it is the last."""

_numbers = itertools.count()

Dial = Callable[["CoreEnd"], "asyncio.Future[Any]"]
"""Connects to gRPC's core."""


@final
class RpcStream:
    """One call, as the connection sees it.

    held: bytes of messages that have arrived, without those that were taken. refusal: done if the call must end, with
    the reason. num_sent: bytes of answers that have been sent to the client.
    """

    __slots__ = (
        "_connection", "_has_ended", "_is_busy", "_on_end", "_timer", "client", "connection", "held", "num_sent",
        "refusal",
    )  # fmt: skip

    def __init__(self, connection: RpcConnection, bodies: BodyBudget) -> None:
        self._connection = connection
        self._is_busy = self._has_ended = False
        self._on_end: Callable[[], None] = lambda: None
        self._timer: asyncio.TimerHandle | None = None
        self.num_sent = 0
        self.client, self.connection = connection.client, connection.name
        self.held = HeldBytes(bodies, connection.client)
        self.refusal: asyncio.Future[ServiceError] = asyncio.get_running_loop().create_future()

    def arrived(self, count: int) -> None:
        """Count bytes of a message. The call is refused if the client may not hold them."""
        self.held.resize(self.held.size + count)
        try:
            self.held.check_room()
        except ServiceError as fault:
            self.refuse(fault)

    def refuse(self, fault: ServiceError) -> None:
        """Have the call end with this error."""
        if not self.refusal.done():
            self.refusal.set_result(fault)

    @property
    def is_busy(self) -> bool:
        """Whether the call has work in progress. One that waits for its client, or only watches, has none."""
        return self._is_busy

    @is_busy.setter
    def is_busy(self, busy: bool) -> None:
        if busy is not self._is_busy:
            self._is_busy = busy
            self._connection.on_busy(1 if busy else -1)

    def answered(self, within_s: float, on_end: Callable[[], None]) -> None:
        """Have `on_end` called once the client has taken the answer, which the core holds until then.

        The connection is closed if the client takes nothing of it for `within_s`.
        """
        if self._has_ended:
            on_end()
            return
        self._on_end = on_end
        self._wait(within_s)

    def _wait(self, within_s: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(within_s, self._look, within_s, self.num_sent)

    def _look(self, within_s: float, num_sent: int) -> None:
        if self.num_sent > num_sent:
            self._wait(within_s)
        else:
            self._connection.close()

    def release(self) -> None:
        """Give back what it holds."""
        self._has_ended = True
        if self._timer is not None:
            self._timer.cancel()
        self.is_busy = False
        self.held.release()
        self._on_end()


@final
class RpcConnection(asyncio.Protocol):
    """The client's end. It is counted by `accept`, and until it is lost.

    A client has `body_seconds` to begin, and a head of a call may be `max_head_bytes` long. Nothing is read while the
    other end takes nothing.
    """

    def __init__(self, client: str, connections: Connections, bodies: BodyBudget, dial: Dial) -> None:
        """client: its address. dial: called once the client has begun to speak HTTP/2."""
        self.client = client
        self.name = f"grpc {next(_numbers)}"
        self.token = secrets.token_hex(16)
        self.streams: dict[int, RpcStream] = {}
        self.on_lost: Callable[[], None] = lambda: None
        self.handshake: asyncio.Task[Any] | None = None
        self._connections = connections
        self._bodies = bodies
        self._dial = dial
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._core = CoreEnd(self)
        self._dialling: asyncio.Future[Any] | None = None
        self._before = b""  # the core is connected
        self._frames = FrameScanner()
        self._last_stream = 0
        self._heading = 0  # the call whose head is arriving
        self._head_bytes = 0
        self._num_busy = 0
        self._closing = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if self._closing:
            self._transport.close()
            return
        self._timer = asyncio.get_running_loop().call_later(self._bodies.limits.body_seconds, self.close)

    def connection_lost(self, exc: Exception | None) -> None:
        """Release what its calls hold, and end the connection to the core of gRPC."""
        self._disarm()
        self._connections.closed(self)
        for stream in self.streams.values():
            stream.release()
        self.streams.clear()
        if self._dialling is not None:
            self._dialling.cancel()
        self._core.close()
        self.on_lost()

    def data_received(self, data: bytes) -> None:
        """Pass bytes on to the core. Before the core is connected, check that the client speaks HTTP/2."""
        if self._core.transport is not None:
            self._pass_on(data)
            return
        self._before += data
        if not self._before.startswith(frames.PREFACE[: len(self._before)]):
            self.close()
        elif self._dialling is None and len(self._before) >= len(frames.PREFACE):
            self._disarm()
            self.pause_reading()
            self._dialling = self._dial(self._core)

    def core_connected(self) -> None:
        """Pass on what has arrived meanwhile."""
        assert self._core.transport is not None
        self._core.transport.write(frames.PREFACE)
        self.resume_reading()
        data, self._before = self._before[len(frames.PREFACE) :], b""
        if data:
            self._pass_on(data)

    def close_idle(self) -> None:
        """Close the connection to make room for others. Calls that are on their way may be tried again elsewhere."""
        if self._transport is not None and self._core.is_between_frames:
            self._transport.write(frames.goaway(self._last_stream, frames.NO_ERROR, "closed to make room for others"))
        self.close()

    def close(self) -> None:
        """Close the connection when what was written to it has been sent."""
        self._closing = True
        if self._transport is not None:
            self._transport.close()
        elif self.handshake is not None:
            self.handshake.cancel()

    def send(self, data: bytes) -> None:
        """Send the client what the core says."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def sent(self, number: int, count: int) -> None:
        """Count what a call's client was sent."""
        if (stream := self.streams.get(number)) is not None:
            stream.num_sent += count

    def stream_ended(self, number: int) -> None:
        """Note that a call has ended."""
        stream = self.streams.pop(number, None)
        if stream is not None:
            stream.release()

    def on_busy(self, change: int) -> None:
        """Count calls with work in progress: without one the connection is idle."""
        self._num_busy += change
        if not self._num_busy:
            self._connections.idle(self)
        elif self._num_busy == change:
            self._connections.busy(self)

    def pause_writing(self) -> None:
        self._core.pause_reading()

    def resume_writing(self) -> None:
        self._core.resume_reading()

    def pause_reading(self) -> None:
        """Read no more from the client for now."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Read on."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _pass_on(self, data: bytes) -> None:
        assert self._core.transport is not None
        data, pieces = self._frames.read(data)
        parts: list[bytes] = []
        at = 0  # all before has been added to the parts
        for piece in pieces:
            if piece.kind == frames.DATA:
                stream = self.streams.get(piece.stream)
                if stream is not None:
                    stream.arrived(piece.payload_bytes)
            elif piece.kind in (frames.HEADERS, frames.CONTINUATION):
                self._head_bytes += piece.end - piece.begin
                if self._head_bytes > self._bodies.limits.max_head_bytes:
                    self.close()
                    return
                if piece.begins and piece.kind == frames.HEADERS and piece.stream > self._last_stream:
                    self._heading = self._last_stream = piece.stream
                if not piece.flags & frames.END_HEADERS:
                    continue
                if self._heading and piece.stream == self._heading:
                    at = self._named(data, piece, at, parts)
                if piece.ends:
                    self._head_bytes = self._heading = 0
            elif piece.kind == frames.RST_STREAM and piece.ends:
                self.stream_ended(piece.stream)
        if parts:
            parts.append(data[at:])
            data = b"".join(parts)
        self._core.transport.write(data)

    def _named(self, data: bytes, piece: Piece, at: int, parts: list[bytes]) -> int:
        """Add the piece to the parts, as one that does not end the head, and a frame that does. Returns its end.

        The added frame continues the head (RFC 9113, section 6.10), so nothing of what the client sent need be read.
        """
        if piece.begins:
            flags = piece.begin + 4
            parts += (data[at:flags], bytes((piece.flags & ~frames.END_HEADERS,)))
            at = flags + 1
        parts.append(data[at : piece.end])
        if piece.ends:
            name = frames.literal_header(STREAM, f"{self.token}.{piece.stream}")
            parts.append(frames.frame(frames.CONTINUATION, frames.END_HEADERS, piece.stream, name))
            stream = self.streams[piece.stream] = RpcStream(self, self._bodies)
            stream.is_busy = True
        return piece.end


@final
class CoreEnd(asyncio.Protocol):
    """The end towards gRPC's core, which knows when a call is over."""

    def __init__(self, connection: RpcConnection) -> None:
        self._connection = connection
        self._frames = FrameScanner()
        self.transport: asyncio.Transport | None = None

    @property
    def is_between_frames(self) -> bool:
        """Whether another frame may be sent to the client now."""
        return self._frames.is_between_frames

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._connection.core_connected()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connection.close()

    def data_received(self, data: bytes) -> None:
        """Send bytes of the core to the client, and note what was sent of each stream, and which has ended."""
        data, pieces = self._frames.read(data)
        if data:
            self._connection.send(data)
        for piece in pieces:
            if piece.kind == frames.DATA:
                self._connection.sent(piece.stream, piece.payload_bytes)
            if piece.ends and (
                piece.kind == frames.RST_STREAM
                or (piece.kind in (frames.DATA, frames.HEADERS) and piece.flags & frames.END_STREAM)
            ):
                self._connection.stream_ended(piece.stream)

    def pause_writing(self) -> None:
        self._connection.pause_reading()

    def resume_writing(self) -> None:
        self._connection.resume_reading()

    def pause_reading(self) -> None:
        """Read no more from the core for now: the client takes nothing."""
        if self.transport is not None and not self.transport.is_closing():
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        """Read on."""
        if self.transport is not None and not self.transport.is_closing():
            self.transport.resume_reading()

    def close(self) -> None:
        """Let the core know that the client has gone."""
        if self.transport is not None:
            with contextlib.suppress(OSError):
                self.transport.abort()
