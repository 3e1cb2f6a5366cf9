"""A WebSocket's protocol without a network: what is stored ahead of the application, and what is answered meanwhile."""

from __future__ import annotations

import asyncio
import logging
import struct
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from batchmaker.server.limits import Limits
from batchmaker.server.request_body import BodyBudget
from batchmaker.server.socket_protocol import LimitedSocketProtocol

HANDSHAKE = (
    b"GET / HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
)
BINARY, CLOSE, PING, PONG = 2, 8, 9, 10
MIB = 1 << 20


def frame(opcode: int, data: bytes) -> bytes:
    """A frame as a client writes it, masked with zeros."""
    if len(data) < 126:
        size = bytes([0x80 | len(data)])
    else:
        size = b"\xfe" + struct.pack("!H", len(data)) if len(data) < 1 << 16 else b"\xff" + struct.pack("!Q", len(data))
    return bytes([0x80 | opcode]) + size + bytes(4) + data


class Wire(asyncio.Transport):
    """The client's side: what was written to it, and whether it is read from."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.is_read = True
        self.is_closed = False

    def write(self, data: Any) -> None:
        self.written += data

    def pause_reading(self) -> None:
        self.is_read = False

    def resume_reading(self) -> None:
        self.is_read = True

    def close(self) -> None:
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed


class Connection:
    """A connection whose application accepts it and then reads only when it is told to."""

    def __init__(self, status: int = 101, **limits: Any) -> None:
        self.status = status
        self.bodies = BodyBudget(Limits(**limits))
        self.reads = asyncio.Semaphore(0)
        self.read: list[Any] = []
        self.wire = Wire()
        config = uvicorn.Config(
            self._app, interface="asgi3", log_config=None, ws_ping_interval=None, lifespan="off", ws_max_size=16 * MIB
        )
        config.load()
        self.protocol = LimitedSocketProtocol(self.bodies, config, ServerState(), {})
        self.protocol.connection_made(self.wire)

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        self.read.append((await receive())["type"])
        if self.status != 101:
            await send({"type": "websocket.http.response.start", "status": self.status, "headers": []})
            await send({"type": "websocket.http.response.body", "body": b"no"})
            return
        await send({"type": "websocket.accept"})
        while True:
            await self.reads.acquire()
            message = await receive()
            self.read.append(message.get("bytes", message["type"]))
            if message["type"] == "websocket.disconnect":
                return

    async def opened(self) -> None:
        self.protocol.data_received(HANDSHAKE)
        await settled()
        self.wire.written = b""

    async def reads_next(self, count: int = 1) -> None:
        for _ in range(count):
            self.reads.release()
        await settled()


async def settled() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


def test_a_ping_behind_messages_that_wait_is_answered() -> None:
    async def body() -> None:
        there = Connection()
        await there.opened()
        for number in range(300):
            there.protocol.data_received(frame(BINARY, b"%d" % number) + frame(PING, b"%d" % number))
        assert there.wire.written == b"".join(bytes([0x80 | PONG, len(b"%d" % n)]) + b"%d" % n for n in range(300))
        assert there.read == ["websocket.connect"]
        assert there.wire.is_read
        await there.reads_next(300)
        assert there.read[1:] == [b"%d" % number for number in range(300)]
        assert there.bodies.held == 0

    asyncio.run(body())


@pytest.mark.parametrize("size", [0, 1, 1000, 5 * MIB])
def test_a_client_far_ahead_is_not_read_from_until_its_messages_are(size: int) -> None:
    async def body() -> None:
        there = Connection()
        await there.opened()
        message, sent = frame(BINARY, bytes(size)), 0
        while there.wire.is_read:
            there.protocol.data_received(message)
            sent += 1
            assert sent < 10_000
        assert 1 <= sent <= 2 + MIB // (size + 512)
        assert there.bodies.held >= min(MIB, size)
        await there.reads_next(sent)
        assert there.read[1:] == [bytes(size)] * sent
        assert there.wire.is_read
        assert there.bodies.held == 0

    asyncio.run(body())


def test_where_memory_is_short_one_message_is_stored_and_no_connection_is_closed() -> None:
    async def body() -> None:
        there = Connection(max_total_body_bytes=20_000)
        there.bodies.held = 15_000  # of other clients
        await there.opened()
        for _ in range(3):
            there.protocol.data_received(frame(BINARY, bytes(100)))
        assert (there.wire.is_read, there.wire.is_closed) == (False, False)
        await there.reads_next(3)
        assert there.read[1:] == [bytes(100)] * 3
        assert (there.wire.is_read, there.bodies.held) == (True, 15_000)

    asyncio.run(body())


def test_what_a_client_sends_before_it_is_accepted_is_read_after_that() -> None:
    async def body() -> None:
        there = Connection()
        there.protocol.data_received(HANDSHAKE)
        there.protocol.data_received(frame(BINARY, b"1") + frame(PING, b"2"))
        assert there.wire.written == b""
        await there.reads_next()
        assert there.read == ["websocket.connect", b"1"]
        assert there.wire.written.endswith(bytes([0x80 | PONG, 1]) + b"2")
        assert there.wire.is_read

    asyncio.run(body())


@pytest.mark.parametrize("ending", ["close", "lost"])
def test_what_a_client_that_has_gone_left_unread_is_dropped(ending: str) -> None:
    async def body() -> None:
        there = Connection()
        await there.opened()
        there.protocol.data_received(frame(BINARY, b"1") * 50)
        if ending == "close":
            there.protocol.data_received(frame(CLOSE, struct.pack("!H", 1000)))
        there.protocol.connection_lost(None)
        await there.reads_next()
        assert there.read == ["websocket.connect", "websocket.disconnect"]
        assert there.bodies.held == 0

    asyncio.run(body())


@pytest.mark.parametrize("behind", [b"", frame(BINARY, b"1"), frame(CLOSE, b""), b"nonsense" * 100])
@pytest.mark.parametrize("status", [400, 503])
def test_a_refused_handshake_is_no_error_in_the_log(
    status: int, behind: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async def body() -> bytes:
        there = Connection(status)
        there.protocol.data_received(HANDSHAKE)
        if behind:
            there.protocol.data_received(behind)
        await settled()
        assert there.wire.is_closed
        there.protocol.connection_lost(None)
        return there.wire.written

    with caplog.at_level(logging.WARNING):
        written = asyncio.run(body())
    assert written.startswith(b"HTTP/1.1 %d " % status)
    assert written.endswith(b"no")
    assert caplog.records == []


def test_a_client_that_leaves_before_it_is_refused_is_no_error_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        there = Connection(403)
        there.protocol.data_received(HANDSHAKE)
        there.protocol.shutdown()
        await settled()
        there.protocol.connection_lost(None)

    with caplog.at_level(logging.WARNING):
        asyncio.run(body())
    assert caplog.records == []
