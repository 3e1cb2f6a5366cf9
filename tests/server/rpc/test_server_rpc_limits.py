"""What clients may hold of gRPC's server: connections, calls, health checks and bytes; and what attackers send it."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import subprocess

import grpc
import pytest
from rpc_in_process import (
    CHECK,
    INFER,
    LIMIT_S,
    LIVE,
    PING,
    SERVING,
    STREAM,
    WATCH,
    RawClient,
    closing,
    data,
    framed,
    head,
    head_block,
    infer_message,
    reset,
    running,
)

from batchmaker.server.config import GrpcConfig, TlsConfig
from batchmaker.server.rpc import connection, frames
from batchmaker.server.rpc.schema import MESSAGES
from insides import core_of
from waiting import until

OTHER = "127.0.0.2"
"""Another client's address."""


async def status_of(client: RawClient, stream: int) -> str:
    """Return the trailers of a call. HPACK may write them in short; what is looked for is not."""
    while True:
        _, flags, of, payload = await client.next(frames.HEADERS)
        if of == stream and flags & frames.END_STREAM:
            return payload.decode("latin-1")


async def failed(call) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as caught:
        await call
    return caught.value


# --- pings ------------------------------------------------------------------------------------------------------------


async def pinged(client: RawClient, times: int) -> int:
    """Ping, each time after the answer to the last one. Returns how many were answered before the connection ended."""
    for answered in range(times):
        client.send(frames.frame(PING, 0, 0, answered.to_bytes(8, "big")))
        kind, _, _, payload = await client.next(PING, frames.GOAWAY)
        if kind == frames.GOAWAY:
            assert b"too_many_pings" in payload
            return answered
    return times


@pytest.mark.parametrize(
    ("pings", "least", "most"),
    [
        (GrpcConfig(), 2, 4),
        (GrpcConfig(http2_max_ping_strikes=9), 9, 11),
        (GrpcConfig(http2_max_ping_strikes=0), 100, 100),
        (GrpcConfig(http2_min_recv_ping_interval_without_data_ms=0), 100, 100),
    ],
)
@pytest.mark.parametrize("with_call", [False, True])
def test_a_client_may_ping_as_often_as_the_settings_say(pings, least, most, with_call):
    async def work():
        async with running(pings=pings) as there:
            with closing(there.connected()) as (client,):
                if with_call:
                    client.call(1, WATCH, b"")
                    await client.next(frames.DATA)
                assert least <= await pinged(client, 100) <= most
            await there.serves()

    asyncio.run(work())


def test_by_default_a_client_that_pings_every_ten_seconds_is_no_nuisance():
    assert GrpcConfig().http2_min_recv_ping_interval_without_data_ms <= 10_000
    assert GrpcConfig().keepalive_permit_without_calls


@pytest.mark.parametrize("is_thrown_off", [False, True])
def test_real_clients_that_ping_keep_their_connection_if_they_may(is_thrown_off):
    options = [("grpc.keepalive_time_ms", 50), ("grpc.keepalive_permit_without_calls", 1)]
    options += [("grpc.http2.max_pings_without_data", 0), ("grpc.use_local_subchannel_pool", 1)]

    async def work():
        least_ms = 1_000_000 if is_thrown_off else 0
        async with running(pings=GrpcConfig(http2_min_recv_ping_interval_without_data_ms=least_ms)) as there:
            channel = grpc.aio.insecure_channel(there.address, options=options)
            await channel.channel_ready()
            watching = channel.unary_stream(WATCH)(b"", timeout=LIMIT_S if is_thrown_off else 2.0)
            assert await watching.read() == SERVING
            error = await failed(watching.read())
            await channel.close()
        assert error.code() is (grpc.StatusCode.UNAVAILABLE if is_thrown_off else grpc.StatusCode.DEADLINE_EXCEEDED)
        assert ("Too many pings" in error.details()) == is_thrown_off

    asyncio.run(work())


# --- connections ------------------------------------------------------------------------------------------------------


def test_one_address_has_no_more_connections_than_one_may():
    async def work():
        async with running(max_client_connections=3, max_connections=10) as there:
            mine = [there.connected() for _ in range(3)]
            await until(lambda: there.connections.num_open == 3)
            with closing(*mine, there.connected(), there.connected(OTHER)) as (*_, refused, other):
                _, _, _, reason = await refused.next(frames.GOAWAY)
                assert b"your address has as many connections open as one may" in reason
                assert await refused.ended()
                other.call(1, LIVE, b"")
                assert (await other.next(frames.DATA))[3]
                mine[0].close()
                await until(lambda: there.connections.num_open == 3)
                await there.serves()
            assert there.connections.num_refused == 1

    asyncio.run(work())


def test_when_all_connections_are_open_the_one_idle_longest_gives_way_and_calls_go_on():
    async def work():
        async with running(max_client_connections=9, max_connections=3) as there:
            there.open.clear()
            busy, idle, watching = (there.connected() for _ in range(3))
            newcomers: list[RawClient] = []
            with closing(busy, idle, watching):
                busy.call(1, INFER, infer_message())
                await until(lambda: there.num_begun == 1)
                idle.call(1, LIVE, b"")
                await idle.next(frames.DATA)
                watching.call(1, WATCH, b"")
                await watching.next(frames.DATA)
                for closed in (idle, watching):  # a client that only watches keeps nobody out
                    newcomers.append(there.connected())
                    newcomers[-1].call(1, LIVE, b"")
                    assert (await newcomers[-1].next(frames.DATA))[3]
                    _, _, _, reason = await closed.next(frames.GOAWAY)
                    assert b"closed to make room" in reason
                    assert await closed.ended()
                there.open.set()
                assert (await busy.next(frames.DATA))[2] == 1
            with closing(*newcomers):
                assert there.connections.num_closed_idle == 2

    asyncio.run(work())


@pytest.mark.parametrize(
    "sent", [b"", b"PRI * HT", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"]
)
def test_whoever_does_not_begin_to_speak_is_left(sent):
    async def work():
        async with running(body_seconds=1) as there:
            host, _, port = there.address.rpartition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(sent)
            assert await reader.read() == b""
            writer.close()
            await until(lambda: not there.connections.num_open)
            await there.serves()

    asyncio.run(work())


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make a certificate")
def test_half_a_handshake_of_tls_is_counted_and_left(tmp_path):
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost",
         "-keyout", tmp_path / "key.pem", "-out", tmp_path / "cert.pem"], check=True, capture_output=True,
    )  # fmt: skip
    tls = TlsConfig(cert=str(tmp_path / "cert.pem"), key=str(tmp_path / "key.pem"))

    async def work():
        async with running(tls=tls, body_seconds=5, max_client_connections=2) as there:
            host, _, port = there.address.rpartition(":")
            ends = [await asyncio.open_connection(host, int(port)) for _ in range(2)]
            await until(lambda: there.connections.num_open == 2)
            refused, refused_writer = await asyncio.open_connection(host, int(port))
            assert await refused.read() == b""
            for reader, writer in ends:
                assert await reader.read() == b""
                writer.close()
            refused_writer.close()
            await until(lambda: not there.connections.num_open)
            credentials = grpc.ssl_channel_credentials((tmp_path / "cert.pem").read_bytes())
            options = [("grpc.ssl_target_name_override", "localhost")]
            async with grpc.aio.secure_channel(there.address, credentials, options=options) as channel:
                assert await channel.unary_unary(LIVE)(b"", timeout=LIMIT_S)

    asyncio.run(work())


# --- calls ------------------------------------------------------------------------------------------------------------


def test_watchers_take_nothing_from_others_and_are_limited_for_each_address():
    async def work():
        async with running(max_client_connections=5, max_connections=20) as there:
            with closing(there.connected(), there.connected(OTHER)) as (client, other):
                for number in range(5):
                    client.call(2 * number + 1, WATCH, b"")
                    await client.next(frames.DATA)
                client.call(11, LIVE, b"")  # calls do not wait for watchers
                assert (await client.next(frames.DATA))[2] == 11
                other.call(1, WATCH, b"")
                assert (await other.next(frames.DATA))[2] == 1
                with closing(there.connected()) as (again,):
                    again.call(1, WATCH, b"")
                    assert "as many health checks open as one may" in await status_of(again, 1)
                    client.send(reset(1))
                    await until(lambda: there.num_idle == 0)
                there.ready = False
                assert [(await client.next(frames.DATA))[3][-1] for _ in range(4)] == [2] * 4

    asyncio.run(work())


def test_one_address_has_no_more_calls_than_one_may_over_all_its_connections():
    async def work():
        async with running(max_client_connections=4, max_connections=20) as there:
            there.open.clear()
            with closing(there.connected(), there.connected(), there.connected(OTHER)) as (first, second, other):
                for client in (first, second):
                    client.call(1, INFER, infer_message())
                    client.call(3, STREAM)
                    client.send(data(3, framed(infer_message())))
                await until(lambda: there.num_begun == 4)
                second.call(5, INFER, infer_message())
                assert "your address has as many calls open as one may" in await status_of(second, 5)
                other.call(1, INFER, infer_message())
                await until(lambda: there.num_begun == 5)
                there.open.set()
                assert (await other.next(frames.DATA))[2] == 1

    asyncio.run(work())


def test_when_all_calls_are_open_a_stream_that_waits_for_its_client_gives_way():
    async def work():
        async with running(max_client_connections=3, max_connections=3) as there:
            there.open.clear()
            with closing(there.connected(), there.connected(OTHER)) as (client, other):
                client.call(1, INFER, infer_message())
                client.call(3, STREAM)
                client.send(data(3, framed(infer_message())))
                await until(lambda: there.num_begun == 2)
                client.call(5, STREAM)
                await until(lambda: there.num_idle == 1)
                other.call(1, INFER, infer_message())
                assert "ended to make room for others" in await status_of(client, 5)
                await until(lambda: there.num_begun == 3)
                other.call(3, INFER, infer_message())
                assert "as many calls are open as may be" in await status_of(other, 3)
                there.open.set()
                assert {(await client.next(frames.DATA))[2] for _ in range(2)} == {1, 3}
                assert (await other.next(frames.DATA))[2] == 1

    asyncio.run(work())


@pytest.mark.parametrize("path", [CHECK, WATCH, LIVE, INFER])
def test_a_call_that_sends_no_message_is_given_up(path):
    async def work():
        async with running(body_seconds=0.25) as there:
            with closing(there.connected()) as (client,):
                client.call(1, path)
                assert "did not arrive within 0.25 seconds" in await status_of(client, 1)
                client.call(3, path)
                client.send(data(3, framed(b"abc", length=9)))
                assert "did not arrive within 0.25 seconds" in await status_of(client, 3)
            await until(lambda: not there.bodies.held)

    asyncio.run(work())


def test_a_message_of_a_stream_must_arrive_in_time_but_the_next_may_take_long_to_begin():
    async def work():
        async with running(body_seconds=1) as there:
            with closing(there.connected(), there.connected()) as (client, patient):
                patient.call(1, STREAM)
                client.call(1, STREAM)
                client.send(data(1, framed(infer_message())))
                assert (await client.next(frames.DATA))[2] == 1
                client.send(data(1, framed(infer_message())[:-1]))
                assert "did not arrive within 1 seconds" in await status_of(client, 1)
                patient.send(data(1, framed(infer_message())))
                assert (await patient.next(frames.DATA))[2] == 1

    asyncio.run(work())


# --- bytes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [INFER, STREAM])
@pytest.mark.parametrize("ends", ["reset", "lost", "whole"])
def test_what_has_arrived_of_a_message_is_counted_until_the_call_is_over(path, ends):
    message = framed(infer_message(40_000))

    async def work():
        async with running() as there:
            there.open.clear()
            with closing(there.connected()) as (client,):
                client.call(1, path)
                client.send(data(1, message[:30_000]))
                await until(lambda: there.bodies.held == 30_000)
                assert there.bodies.held_by("127.0.0.1") == 30_000
                if ends == "reset":
                    client.send(reset(1))
                elif ends == "lost":
                    client.close()
                else:
                    client.send(data(1, message[30_000:], end=True))
                    await until(lambda: there.num_begun == 1)
                    assert there.bodies.held == len(message)
                    there.open.set()
                    assert (await client.next(frames.DATA))[2] == 1
                await until(lambda: there.bodies.held == 0)
                assert there.bodies.held_by("127.0.0.1") == 0

    asyncio.run(work())


def test_unfinished_messages_of_one_client_leave_room_for_others():
    size = 50_000

    async def work():
        async with running(max_body_bytes=size, max_total_body_bytes=10 * size) as there:
            mine = [there.connected() for _ in range(17)]
            with closing(*mine, there.connected(OTHER)) as (*_, other):
                for number, client in enumerate(mine):
                    client.call(1, INFER)
                    client.send(data(1, framed(b"x" * (size - 10), length=size)))
                    if number < 5:  # half of all
                        await until(lambda many=number + 1: there.bodies.held == many * (size - 5))
                    else:
                        assert "as many bytes of requests as it may" in await status_of(client, 1)
                await until(lambda: there.bodies.held == 5 * (size - 5))
                other.call(1, INFER, infer_message(size - 100))
                assert (await other.next(frames.DATA))[2] == 1
                mine[0].send(data(1, b"x" * 10, end=True))
                assert (await mine[0].next(frames.DATA))[2] == 1

    asyncio.run(work())


def test_bytes_are_counted_for_the_holder_of_a_key_wherever_he_calls_from():
    keys = {"ann": "a" * 24, "bob": "b" * 24}

    async def work():
        async with running(keys=keys) as there:
            with closing(there.connected(), there.connected(OTHER), there.connected()) as (first, second, nobody):
                for client in (first, second):
                    client.call(1, INFER, x_api_key=keys["ann"])
                    client.send(data(1, framed(b"x" * 1_000, length=2_000)))
                await until(lambda: there.bodies.held_by("ann") == 2 * 1_005)
                nobody.call(1, INFER)
                nobody.send(data(1, framed(b"x" * 1_000, length=2_000)))
                assert "no API key was sent" in await status_of(nobody, 1)
                await until(lambda: there.bodies.held == 2 * 1_005)

    asyncio.run(work())


def test_requests_of_a_stream_count_until_they_are_answered_also_those_refused():
    keys = {"ann": "a" * 24}
    message = framed(infer_message(20_000))

    async def work():
        async with running(keys=keys, max_body_bytes=100_000) as there:
            there.open.clear()
            with closing(there.connected()) as (client,):
                client.call(1, STREAM, x_api_key=keys["ann"])
                client.send(data(1, message))
                await until(lambda: there.num_begun == 1)
                there.keys.replace({"ann": "c" * 24})  # from now on requests are refused
                client.send(data(1, message), data(1, message))
                await until(lambda: there.bodies.held == 3 * len(message))
                assert there.num_begun == 1
                there.open.set()
                answers = [(await client.next(frames.DATA))[3] for _ in range(3)]
                assert [b"this API key is not known" in answer for answer in answers] == [False, True, True]
                await until(lambda: there.bodies.held == 0)

    asyncio.run(work())


def test_a_stream_that_is_sent_too_fast_is_slowed_down_and_nothing_of_it_is_lost():
    size, many = 200_000, 40
    asked = infer_message(size)

    async def work():
        async with running(max_body_bytes=2 * size, max_total_body_bytes=8 * size) as there:
            there.open.clear()
            most = 0

            async def requests():
                for _ in range(many):
                    yield asked

            async with grpc.aio.insecure_channel(there.address) as channel:
                streaming = channel.stream_stream(STREAM)(requests(), timeout=LIMIT_S)
                await until(lambda: there.num_begun >= 2)
                there.open.set()
                answered = 0
                async for answer in streaming:
                    assert not MESSAGES["ModelStreamInferResponse"].FromString(answer).error_message
                    most = max(most, there.bodies.held)
                    answered += 1
            assert answered == many
            assert most < 8 * size
            await until(lambda: there.bodies.held == 0)

    asyncio.run(work())


NO_WINDOW = frames.frame(frames.SETTINGS, 0, 0, b"\0\4" + bytes(4))
"""Settings of a client that takes nothing of an answer."""


def test_answers_that_a_client_does_not_take_count_as_calls_and_end_its_connection():
    async def work():
        async with running(max_client_connections=3, write_seconds=2) as there:
            with closing(there.connected(), there.connected(), there.connected(OTHER)) as (client, more, other):
                client.send(NO_WINDOW)
                for number in (1, 3, 5):
                    client.call(number, INFER, infer_message())
                await until(lambda: there.num_begun == 3)
                more.call(1, INFER, infer_message())
                assert "as many calls open as one may" in await status_of(more, 1)
                other.call(1, INFER, infer_message())
                assert (await other.next(frames.DATA))[2] == 1
                with pytest.raises(EOFError):
                    await client.next(frames.DATA)
                more.call(3, INFER, infer_message())
                assert (await more.next(frames.DATA))[2] == 3
            await until(lambda: not there.calls.num_open)

    asyncio.run(work())


# --- what attackers send ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "blocks"),
    [
        ("a head that never ends", [head(1, LIVE, flags=0)] + [frames.frame(9, 0, 1, b"\0\x01a\x01b" * 2_000)] * 10),
        ("a head within a head", [head(1, LIVE, flags=0), head(3, LIVE, end=True)]),
        ("more of a head without its beginning", [frames.frame(9, 4, 1, b"\0\x01a\x01b")]),
        ("a head of no stream", [frames.frame(1, 4, 0, head_block(LIVE))]),
        ("a head that is no HPACK", [frames.frame(1, 4, 1, b"\xff" * 50)]),
        ("a head that is cut off within a header", [frames.frame(1, 5, 1, head_block(LIVE) + b"\0\x01a\x7f\x20bc")]),
        ("data with padding", [head(1, LIVE), frames.frame(0, 0x8, 1, b"\x05" + b"x" * 9)]),
        ("a frame of 16 megabytes", [frames.frame(0, 0, 1, b"x" * ((1 << 24) - 1))]),
        ("a promise", [frames.frame(5, 4, 1, b"\0\0\0\2")]),
        ("a window of nothing", [frames.frame(8, 0, 0, b"\0" * 4)]),
        ("a window too large", [frames.frame(8, 0, 0, b"\x7f\xff\xff\xff")] * 2),
        ("settings of odd length", [frames.frame(4, 0, 0, b"abc")]),
        ("a stream that goes back", [head(9, LIVE, end=True), head(3, LIVE, end=True), head(8, LIVE)]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_no_call_of_grpc_harms_nobody_else(name, blocks):
    async def work():
        async with running() as there:
            with closing(there.connected()) as (client,):
                with contextlib.suppress(OSError):  # it was closed meanwhile
                    await asyncio.to_thread(client.send, *blocks)
                await there.serves()
            await until(lambda: not there.bodies.held and not there.calls.num_open)
            await there.serves()

    asyncio.run(work())


def test_a_small_head_does_not_become_a_large_one():
    """One large header in the table of HPACK, named a thousand times."""
    large = b"\x40\x01a\x7f%s" % (b"\xf1\x1d" + b"x" * 3_952)
    bomb = head_block(LIVE) + large + b"\xbe" * 1_000

    async def work():
        async with running() as there:
            with closing(there.connected()) as (client,):
                client.send(frames.frame(frames.HEADERS, 5, 1, bomb))
                kind = (await client.next(frames.HEADERS, frames.RST_STREAM, frames.GOAWAY))[0]
                assert kind in (frames.HEADERS, frames.RST_STREAM, frames.GOAWAY)
                await there.serves()
            assert not there.answered["grpc", "OK"] - 1

    asyncio.run(work())


def test_calls_that_are_cancelled_at_once_leave_nothing():
    async def work():
        async with running() as there:
            there.open.clear()
            with closing(there.connected()) as (client,):
                for number in range(1, 2_000, 2):
                    client.send(head(number, INFER), data(number, framed(infer_message(10))[:-1]), reset(number))
                    if number % 100 == 1:
                        await asyncio.sleep(0)
                await until(lambda: not there.bodies.held)
                await there.serves()
                await until(lambda: not there.calls.num_open)

    asyncio.run(work())


def test_only_what_comes_by_the_port_is_a_call():
    """Neither a header that a client makes up, nor a connection to gRPC's core itself."""

    async def work():
        async with running() as there:
            (mine,) = await victim(there)
            with closing(mine, there.connected()) as (_, client):
                core, token = core_of(there.server)
                for number, name in enumerate(["x", "x.y", "", f"{'0' * 32}.1", f"{token}.1"]):
                    client.call(2 * number + 1, LIVE, b"", **{connection.STREAM: name})
                    assert (await client.next(frames.DATA))[2] == 2 * number + 1
                async with grpc.aio.insecure_channel(core) as channel:
                    error = await failed(channel.unary_unary(LIVE)(b"", timeout=LIMIT_S))
                    assert error.code() is grpc.StatusCode.CANCELLED

    async def victim(there):
        client = there.connected()
        client.call(1, WATCH, b"")
        await client.next(frames.DATA)
        return (client,)

    asyncio.run(work())
