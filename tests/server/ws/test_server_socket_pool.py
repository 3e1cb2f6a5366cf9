"""Sockets that are read and written together: all that is sent arrives, in order, whoever else is slow or gone."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Awaitable, Callable

import pytest
import uvloop

from batchmaker.server.ws.pool import PIECE, SOCKETS, PooledTransport, SocketPool
from insides import num_pooled
from waiting import until

LOOPS = (asyncio.new_event_loop, uvloop.new_event_loop)


class Kept(asyncio.Protocol):
    """Keeps what comes. connections: where it enters itself. echoes: it sends it back, too."""

    def __init__(self, pool: SocketPool, connections: list[Kept], *, echoes: bool = False) -> None:
        self.pool = pool
        self.connections = connections
        self.echoes = echoes
        self.data = b""
        self.reads = 0
        self.is_writable = True
        self.lost = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.Transport) -> None:
        self.transport = transport
        asyncio.get_running_loop().call_soon(self._begin, transport)  # as after a handshake: it is being read

    def _begin(self, transport: asyncio.Transport) -> None:
        self.transport = self.pool.pooled(transport)
        self.transport.set_protocol(self)
        self.connections.append(self)

    def data_received(self, data: bytes) -> None:
        self.data += data
        self.reads += 1
        if self.echoes:
            self.transport.write(data)

    def pause_writing(self) -> None:
        self.is_writable = False

    def resume_writing(self) -> None:
        self.is_writable = True

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport.abort()
        if not self.lost.done():
            self.lost.set_result(exc)


class Site:
    """A server with a pool, and its connections in the order of their making."""

    def __init__(self, *, echoes: bool = False) -> None:
        self.pool = SocketPool()
        self.connections: list[Kept] = []
        self.echoes = echoes

    def _made(self) -> Kept:
        return Kept(self.pool, self.connections, echoes=self.echoes)

    @property
    def num_pooled(self) -> int:
        return num_pooled(self.pool)

    async def __aenter__(self) -> Site:
        self.server = await asyncio.get_running_loop().create_server(self._made, "127.0.0.1", 0)
        self.address = self.server.sockets[0].getsockname()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.server.close()
        for one in self.connections:
            one.transport.abort()


def played(case: Callable[[], Awaitable[None]], new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    async def within() -> None:
        async with asyncio.timeout(60):
            await case()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(within())


@pytest.mark.parametrize("new_loop", LOOPS)
def test_what_many_clients_send_comes_back_whole_and_in_order(new_loop) -> None:
    async def case() -> None:
        rng = random.Random(0)
        async with Site(echoes=True) as site:

            async def client(number: int) -> None:
                reader, writer = await asyncio.open_connection(*site.address)
                sent = [rng.randbytes(rng.choice((1, 100, PIECE - 1, PIECE, 3 * PIECE, 200_000))) for _ in range(6)]

                async def send() -> None:
                    for part in sent:
                        writer.write(part)
                        await writer.drain()
                        await asyncio.sleep(0)

                back, _ = await asyncio.gather(reader.readexactly(sum(map(len, sent))), send())
                assert back == b"".join(sent)
                writer.close()

            await asyncio.gather(*[client(number) for number in range(SOCKETS + 20)])
            assert all(type(one.transport) is PooledTransport for one in site.connections)

    played(case, new_loop)


@pytest.mark.parametrize("new_loop", LOOPS)
def test_the_writes_of_a_turn_leave_in_order_behind_what_the_client_has_not_read(new_loop) -> None:
    async def case() -> None:
        async with Site() as site:
            reader, writer = await asyncio.open_connection(*site.address, limit=1 << 16)
            await until(lambda: len(site.connections) == 1)
            one, expected = site.connections[0], b""
            rng = random.Random(1)
            while one.is_writable:  # more than the system stores: the rest is the transport's
                for size in (1, 5000, 70_000, 3):
                    part = rng.randbytes(size)
                    one.transport.write(part)
                    expected += part
                await asyncio.sleep(0)
                assert len(expected) < 1 << 28
            one.transport.write(b"last")
            expected += b"last"
            assert await reader.readexactly(len(expected)) == expected
            await until(lambda: one.is_writable)
            writer.close()

    played(case, new_loop)


@pytest.mark.parametrize("new_loop", LOOPS)
def test_a_client_that_goes_is_noticed_and_its_number_can_be_another_ones(new_loop) -> None:
    async def case() -> None:
        async with Site() as site:
            for number in range(5):
                with socket.create_connection(site.address) as client:
                    client.send(b"here")
                    await until(lambda number=number: len(site.connections) > number)
                    one = site.connections[number]
                    await until(lambda one=one: one.data == b"here")
                await one.lost
                assert not site.num_pooled

    played(case, new_loop)


@pytest.mark.parametrize("new_loop", LOOPS)
def test_what_is_written_before_a_close_arrives_and_nothing_after_an_abort(new_loop) -> None:
    async def case() -> None:
        async with Site() as site:
            for number, ends in enumerate(("close", "abort")):
                reader, writer = await asyncio.open_connection(*site.address)
                await until(lambda number=number: len(site.connections) > number)
                transport = site.connections[number].transport
                transport.write(b"last word")
                getattr(transport, ends)()
                assert transport.is_closing()
                transport.write(b"too late")
                try:
                    said = await reader.read()
                except ConnectionResetError:
                    said = b""
                assert said == (b"last word" if ends == "close" else b"")
                writer.close()

    played(case, new_loop)


@pytest.mark.parametrize("new_loop", LOOPS)
def test_nothing_is_read_between_pause_and_resume(new_loop) -> None:
    async def case() -> None:
        async with Site() as site:
            _, writer = await asyncio.open_connection(*site.address)
            await until(lambda: len(site.connections) == 1)
            _, behind = await asyncio.open_connection(*site.address)
            await until(lambda: len(site.connections) == 2)
            one, other = site.connections
            one.transport.pause_reading()
            for each in (writer, behind):
                each.write(b"later")
                await each.drain()
            await until(lambda: other.data == b"later")  # what came before it was there to be read
            assert one.data == b""
            one.transport.resume_reading()
            await until(lambda: one.data == b"later")
            for each in (writer, behind):
                each.close()
            await asyncio.gather(one.lost, other.lost)

    played(case, new_loop)


def test_sockets_with_data_are_read_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    async def case() -> None:
        async with Site() as site:
            clients = [socket.create_connection(site.address) for _ in range(50)]
            await until(lambda: len(site.connections) == 50)
            module, calls = "batchmaker.server.ws.pool.receive", []
            from batchmaker.server.ws.pool import receive

            monkeypatch.setattr(module, lambda files, room: calls.append(len(files)) or receive(files, room))
            for client in clients:  # the event loop does not run meanwhile
                client.send(b"frame")
            await until(lambda: all(one.data == b"frame" for one in site.connections))
            assert calls == [50]
            for client in clients:
                client.close()

    played(case, uvloop.new_event_loop)


@pytest.mark.parametrize("new_loop", LOOPS)
def test_a_connection_that_fails_ends_alone_and_what_others_sent_is_not_lost(new_loop, caplog) -> None:
    async def case() -> None:
        async with Site() as site:
            clients = [socket.create_connection(site.address) for _ in range(20)]
            await until(lambda: len(site.connections) == 20)

            def fail(data: bytes) -> None:
                raise RuntimeError("a defect")

            failing = site.connections[3]
            failing.data_received = fail  # type: ignore[method-assign]
            for client in clients:  # the event loop does not run meanwhile: they are read together
                client.send(b"frame")
            await failing.lost
            await until(lambda: all(one.data == b"frame" for one in site.connections if one is not failing))
            assert site.num_pooled == 19
            for client in clients:
                client.close()

    played(case, new_loop)
    assert [record.exc_info[1].args for record in caplog.records] == [("a defect",)]


def test_a_connection_with_tls_stays_with_the_event_loop() -> None:
    class Secured:
        def get_extra_info(self, name: str) -> object:
            return object()

    secured = Secured()
    assert SocketPool().pooled(secured) is secured  # type: ignore[arg-type]
