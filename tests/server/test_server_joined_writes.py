"""What is written at once leaves at once, in order, and not too much is kept back."""

from __future__ import annotations

import asyncio
import socket

import pytest
import uvloop

from batchmaker.server.joined_writes import JoinedWrites


class Recorder:
    """A transport that notes its calls."""

    def __init__(self, extra=None, waiting=0):
        self.calls = []
        self.closed = False
        self.extra = extra or {}
        self.waiting = waiting

    def get_write_buffer_size(self):
        return self.waiting

    def writelines(self, parts):
        self.calls.append(b"".join(parts))

    def close(self):
        self.closed = True

    def is_closing(self):
        return self.closed

    def get_extra_info(self, name):
        return self.extra.get(name)


def run(body, **given):
    transport = Recorder(**given)

    async def whole():
        await body(JoinedWrites(transport, asyncio.get_running_loop()))

    asyncio.run(whole())
    return transport


def test_a_head_and_its_body_are_one_write():
    async def body(joined):
        joined.write(b"head ")
        joined.write(b"body")
        await asyncio.sleep(0)
        joined.write(b"next")
        await asyncio.sleep(0)

    assert run(body).calls == [b"head body", b"next"]


def test_closing_writes_what_waits_and_nothing_after():
    async def body(joined):
        joined.write(b"last")
        joined.close()
        joined.write(b"lost")
        await asyncio.sleep(0)

    transport = run(body)
    assert (transport.calls, transport.closed) == ([b"last"], True)


def test_much_is_written_without_waiting():
    async def body(joined):
        for _ in range(5):
            joined.write(bytes(40_000))

    assert [len(call) for call in run(body).calls] == [80_000, 80_000, 40_000]


def test_all_else_is_the_transports_own():
    async def body(joined):
        assert joined.get_extra_info("peername") == "ann"
        assert not joined.is_closing()

    run(body, extra={"peername": "ann"})


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    for end in (ours, theirs):
        end.setblocking(False)
    with ours, theirs:
        yield ours, theirs


def test_a_complete_answer_leaves_within_the_turn(pair):
    async def body(joined):
        joined.write(b"head ")
        joined.write(b"body")
        joined.send_now()
        assert pair[1].recv(100) == b"head body"
        await asyncio.sleep(0)

    assert run(body, extra={"socket": pair[0]}).calls == []


@pytest.mark.parametrize(("more", "waiting"), [({}, 5), ({"sslcontext": object()}, 0)])
def test_an_answer_behind_others_or_encrypted_goes_the_transports_way(pair, more, waiting):
    async def body(joined):
        joined.write(b"second")
        joined.send_now()
        await asyncio.sleep(0)

    assert run(body, extra={"socket": pair[0], **more}, waiting=waiting).calls == [b"second"]


def test_what_a_client_does_not_take_waits_at_the_transport(pair):
    async def body(joined):
        joined.write(bytes(60_000))
        joined.send_now()
        while True:
            try:
                pair[0].send(bytes(100_000))
            except BlockingIOError:
                break
        joined.write(b"rest")
        joined.send_now()
        pair[1].close()
        joined.write(b"lost")
        joined.send_now()

    assert run(body, extra={"socket": pair[0]}).calls == [b"rest", b"lost"]


def test_answers_of_every_size_arrive_in_order_over_uvloop():
    """What uvloop was given in a turn it sends at its end, so nothing may overtake it."""
    sizes = [10, 70_000, 5, 200_000, 1, 65_537, 3]

    async def whole():
        received = bytearray()

        class Reader(asyncio.Protocol):
            def data_received(self, data):
                received.extend(data)

        loop = asyncio.get_running_loop()
        server = await loop.create_server(Reader, "127.0.0.1", 0)
        transport, _ = await loop.create_connection(asyncio.Protocol, *server.sockets[0].getsockname())
        joined, sent = JoinedWrites(transport, loop), b""
        for turn in range(40):
            for number in range(1 + turn % 3):
                body = bytes([turn * 3 + number]) * sizes[(turn + number) % len(sizes)]
                joined.write(b"head")
                joined.write(body)
                joined.send_now()
                sent += b"head" + body
            joined.write(b"event")  # leaves with the turn, and then the end of an answer comes in the same turn
            loop.call_soon(joined.write, b"end")
            loop.call_soon(joined.send_now)
            sent += b"eventend"
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        async with asyncio.timeout(60):
            while len(received) < len(sent):
                await asyncio.sleep(0.001)
        assert bytes(received) == sent
        transport.close()
        server.close()

    uvloop.run(whole())
