"""A WebSocket's protocol without a network: what is stored ahead of the application, and what is answered meanwhile."""

from __future__ import annotations

import asyncio
import logging
import struct
from typing import Any

import pytest
from uvicorn.server import ServerState

from batchmaker.server.access.request_body import BodyBudget
from batchmaker.server.limits import Limits
from batchmaker.server.ws.call import SocketCall
from batchmaker.server.ws.deadlines import Watch
from batchmaker.server.ws.protocol import SocketSite
from waiting import pass_time, run_in_virtual_time, until

HEADERS = [
    (b"host", b"a"), (b"upgrade", b"websocket"), (b"connection", b"Upgrade"), (b"sec-websocket-version", b"13"),
    (b"sec-websocket-key", b"AAAAAAAAAAAAAAAAAAAAAA=="),
]  # fmt: skip
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

    def abort(self) -> None:
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
        self.state = ServerState()
        site = SocketSite(self.bodies, Watch(), self.state)
        scope = {"asgi": {}, "scheme": "http", "server": None, "client": None, "root_path": "", "headers": HEADERS}
        self.call = SocketCall(self._app, site, self.wire, scope, lambda _: None)
        self.protocol = self.call.protocol

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

    def asks(self) -> None:
        """The client asks for a WebSocket."""
        self.call.begin("GET", b"/")

    async def opened(self) -> None:
        self.asks()
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
        there.asks()
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
        there.asks()
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
        there.asks()
        there.protocol.shutdown()
        await settled()
        there.protocol.connection_lost(None)

    with caplog.at_level(logging.WARNING):
        asyncio.run(body())
    assert caplog.records == []


def test_a_client_that_reads_nothing_for_too_long_is_cut_off() -> None:
    async def body() -> None:
        there = Connection(write_seconds=0.05)
        await there.opened()
        there.protocol.pause_writing()
        await pass_time(0.03)
        assert not there.wire.is_closed
        await pass_time(0.03)
        assert there.wire.is_closed

    run_in_virtual_time(body())


def test_a_client_that_reads_again_is_not() -> None:
    async def body() -> None:
        there = Connection(write_seconds=0.05)
        await there.opened()
        there.protocol.pause_writing()
        there.protocol.resume_writing()
        await pass_time(0.15)
        assert not there.wire.is_closed

    run_in_virtual_time(body())


@pytest.mark.parametrize("pieces", [1, 40])
def test_a_message_that_comes_too_slowly_ends_the_connection(pieces: int) -> None:
    async def body() -> None:
        there = Connection(body_seconds=0.1)
        await there.opened()
        message = frame(BINARY, bytes(200))
        for place in range(pieces):
            there.protocol.data_received(message[place : place + 1])
            await pass_time(0.005)
        await pass_time(0.1)
        assert there.wire.is_closed
        assert b"the message came too slowly" in there.wire.written
        await there.reads_next()
        assert there.read[-1] == "websocket.disconnect"

    run_in_virtual_time(body())


def test_whole_messages_whose_ends_fall_into_other_reads_are_never_too_slow() -> None:
    async def body() -> None:
        there = Connection(body_seconds=0.2)
        await there.opened()
        messages = b"".join(frame(BINARY, b"%d" % number) for number in range(40))
        for begin in range(0, len(messages), 7):  # each read but the last ends within a message
            there.protocol.data_received(messages[begin : begin + 7])
            await pass_time(0.01)
        await there.reads_next(40)
        assert there.read[1:] == [b"%d" % number for number in range(40)]

    run_in_virtual_time(body())


def test_many_messages_in_one_read_do_not_hold_up_others() -> None:
    """They are handled in turns of the event loop, in order, and pings among them are answered."""

    async def body() -> None:
        there = Connection()
        await there.opened()
        await there.reads_next(1)
        for _ in range(1000):
            there.reads.release()
        there.protocol.data_received(
            b"".join(frame(BINARY, b"%d" % number) for number in range(1000)) + frame(PING, b"")
        )
        assert len(there.read) < 1000
        assert there.wire.written == b""
        await until(lambda: len(there.read) == 1001)
        await settled()
        assert there.read[1:] == [b"%d" % number for number in range(1000)]
        assert there.wire.written == bytes([0x80 | PONG, 0])
        assert there.bodies.held == 0

    asyncio.run(body())


@pytest.mark.parametrize("behind", [b"", frame(BINARY, b"late"), b"\x00" * 100])
def test_what_comes_after_the_server_has_closed_is_not_read(behind: bytes) -> None:
    async def body() -> None:
        there = Connection()
        await there.opened()
        there.protocol.close(1001, "over")
        assert there.wire.written == b"\x88\x06\x03\xe9over"
        there.protocol.data_received(behind)
        assert there.wire.is_closed == behind.startswith(b"\x00")  # what is no frame ends it at once
        there.protocol.data_received(frame(CLOSE, struct.pack("!H", 1001)))
        assert there.wire.is_closed
        assert there.wire.written == b"\x88\x06\x03\xe9over"

    asyncio.run(body())
