"""What is tried against a server, tried against the front of a fleet: it answers or closes, and all others are served.

The same attacks on one server are in tests/server; docs/operations.md has the list.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import struct

import msgspec
import numpy as np
import pytest
import tritonclient.grpc as triton
from fleets_in_process import LIMIT_S, RunningFleet, fleet_config, played
from served_models import Leaving
from server_process import request_bytes
from triton_calls import given

import batchmaker as bm
from batchmaker.server.config import FleetConfig
from batchmaker.server.limits import Limits

COUNTER = "/v2/models/counter/generate"
STREAM = "/v2/models/counter/generate_stream"
GATED = "/v2/models/gated/generate"


@pytest.fixture
def gate(models):
    models[1].unlink(missing_ok=True)
    yield models[1]
    models[1].touch()


def small(**limits: object) -> Limits:
    return msgspec.structs.replace(Limits(drain_seconds=LIMIT_S, sequence_idle_seconds=3600), **limits)


def of_shape(shape: list[int]) -> dict[str, object]:
    return {"inputs": [{"name": "input_0", "shape": shape, "datatype": "INT64", "data": []}]}


async def connected(
    fleet: RunningFleet, address: str = "127.0.0.1"
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Return a connection from this address."""
    host, _, port = fleet.http.removeprefix("http://").rpartition(":")
    return await asyncio.open_connection(host, int(port), local_addr=(address, 0))


async def connected_narrowly(fleet: RunningFleet) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Return a connection for which the kernels of both ends keep little: short segments, and a small window."""
    host, _, port = fleet.http.removeprefix("http://").rpartition(":")
    narrow = socket.socket()
    narrow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    narrow.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)
    narrow.setblocking(False)
    await asyncio.get_running_loop().sock_connect(narrow, (host, int(port)))
    return await asyncio.open_connection(sock=narrow)


async def said_to(fleet: RunningFleet, data: bytes, most: int = -1) -> bytes:
    """Send bytes on a connection of their own, and return all that comes until it is closed, or the first of it."""
    reader, writer = await connected(fleet)
    try:
        writer.write(data)
        await writer.drain()
        return await reader.read(most)
    except ConnectionError:
        return b""
    finally:
        writer.close()


async def serves(fleet: RunningFleet) -> None:
    """Whoever asks gets their own answer, nothing is held for those who have gone, and no replica was lost."""
    answers = await asyncio.gather(*(fleet.generate("counter", n) for n in range(1, 9)))
    assert [answer.json()["output_0"] for answer in answers] == [list(range(1, n + 1)) for n in range(1, 9)]
    front, balancer = fleet.server.front, fleet.server.balancer
    await fleet.wait_for(lambda: not front.num_active and not front.access.bodies.held)
    assert all(not one.num_requests and not one.work_us for one in balancer.replicas.values())
    assert sorted(balancer.replicas) == [0, 1]


# --- what is sent -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"\x16\x03\x01 nonsense\r\n\r\n", 400),
        (b"GET / HTTP/9.9\r\n\r\n", 400),
        (
            b"POST %s HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET"
            % b"/v2",
            400,
        ),
        (b"POST /v2 HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n12345", 400),
        (b"GET /v2 HTTP/1.1\r\nHost: localhost\r\nAccept: a\x00b\r\n\r\n", 400),
        (b"GET /v2 HTTP/1.1\r\nX-Padding: " + b"x" * 70_000 + b"\r\n\r\n", 431),
    ],
)
def test_what_is_no_request_is_refused_at_the_front(models, sent, status):
    async def scenario(fleet):
        answer = await said_to(fleet, sent)
        assert answer.startswith(b"HTTP/1.1 %d" % status)
        assert b"application/json" in answer
        await serves(fleet)

    played(scenario, fleet_config(models[0] / "counter"))


def test_two_hundred_mutated_requests_harm_nobody_and_reach_no_replica_in_two_parts(models):
    rng = random.Random(0)
    whole = request_bytes(COUNTER, {"input_0": 2}, "Connection: close")

    def mutated() -> bytes:
        data = bytearray(whole)
        for _ in range(rng.randint(1, 8)):
            at = rng.randrange(len(data))
            how = rng.randrange(4)
            if how == 0:
                data[at] = rng.randrange(256)
            elif how == 1:
                del data[at : at + rng.randint(1, 9)]
            elif how == 2:
                data[at:at] = bytes(rng.randrange(256) for _ in range(rng.randint(1, 9)))
            else:
                data[at:at] = rng.choice([b"\r\n", b"\r\n\r\n", b"\x00", b"chunked", b"Content-Length: 7\r\n", b" "])
            if not data:
                data = bytearray(whole)
        return bytes(data)

    async def scenario(fleet):
        for _ in range(8):
            answers = await asyncio.gather(*(said_to(fleet, mutated(), most=1000) for _ in range(25)))
            assert all(not answer or answer.startswith(b"HTTP/1.1 ") for answer in answers)
            assert not any(answer.startswith(b"HTTP/1.1 500") for answer in answers)
        await serves(fleet)

    played(scenario, fleet_config(models[0] / "counter", limits=small(body_seconds=1)))


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v2/models/scales/infer", of_shape([2**62, 0]), 400),
        ("/v2/models/scales/infer", of_shape([2**62] * 50_000), 400),
        (COUNTER, {"input_0": 2, "parameters": {"priority": 2**62}}, 400),
        (COUNTER, {"input_0": 2, "parameters": {"priority": "high"}}, 400),
        (COUNTER, {"input_0": 2, "parameters": {"deadline_ms": "inf"}}, 400),
        ("/v2/models/..%2f..%2fetc/generate", {"input_0": 2}, 404),
        (f"{COUNTER}%0a", {"input_0": 2}, 404),
        (f"/v2/replicas/{'9' * 5000}/metrics", {}, 404),
    ],
)  # fmt: skip
def test_a_wrong_request_is_told_so(models, path, body, status):
    async def scenario(fleet):
        answer = await fleet.client.post(path, json=body)
        assert (answer.status_code, set(answer.json())) == (status, {"error"})
        await serves(fleet)

    played(scenario, fleet_config(models[0] / "counter", models[0] / "scales"))


@pytest.mark.parametrize(
    "path",
    [
        "/v2/repository/models/counter/unload",
        "/v2/repository/models/counter/unload%0a",
        "/v2%2frepository/models/counter/unload",
        "/v2/replicas/0/v2/repository/models/counter/unload",
        "/v2/replicas/0/v2/repository/models/counter/unload%0a",
        "/v2/replicas/0/v2%2frepository%2fmodels%2fcounter%2funload",
        "/v2/replicas%2f0%2fx/x/v2/repository/models/counter/unload",
        "/v2/replicas%2f0/x/v2/repository/models/counter/unload",
    ],
)
def test_no_way_of_writing_a_path_unloads_a_model_of_one_replica(models, path):
    async def scenario(fleet):
        answer = await said_to(fleet, request_bytes(path, {}, "Connection: close"))
        assert answer.startswith((b"HTTP/1.1 501", b"HTTP/1.1 404"))
        for number in fleet.replicas:
            ready = await fleet.client.get(f"/v2/replicas/{number}/v2/models/counter/ready")
            assert ready.status_code == 200
        await serves(fleet)

    played(scenario, fleet_config(models[0] / "counter"))


def test_bodies_that_are_too_large_are_refused_declared_or_not(models):
    async def scenario(fleet):
        declared = await fleet.client.post(COUNTER, content=b" " * 200_000)
        assert declared.status_code == 413
        head = f"POST {COUNTER} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
        pieces = b"".join(b"2710\r\n" + b" " * 10_000 + b"\r\n" for _ in range(11))
        assert (await said_to(fleet, head + pieces)).startswith(b"HTTP/1.1 413")
        packed = await fleet.client.post(COUNTER, content=b"{}", headers={"content-encoding": "gzip"})
        assert packed.status_code == 415
        await serves(fleet)

    played(scenario, fleet_config(models[0] / "counter", limits=small(max_body_bytes=100_000, body_seconds=2)))


HALF_A_BODY = f"POST {COUNTER} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 90000\r\n\r\n".encode() + b" " * 80_000


def test_unfinished_bodies_of_one_client_leave_room_for_others(models):
    async def scenario(fleet):
        mine = [await connected(fleet, "127.0.0.2") for _ in range(17)]
        for number, (reader, writer) in enumerate(mine):
            writer.write(HALF_A_BODY)
            if number < 5:  # half of all
                await fleet.wait_for(lambda many=number + 1: fleet.server.front.access.bodies.held == 80_000 * many)
            else:
                assert (await reader.readline()).split()[1] == b"503"
        answer = await fleet.client.post(COUNTER, content=b'{"input_0": 2}' + b" " * 80_000)
        assert answer.json()["output_0"] == [1, 2]
        for _, writer in mine:
            writer.transport.abort()
        await serves(fleet)

    played(
        scenario,
        fleet_config(models[0] / "counter", limits=small(max_body_bytes=100_000, max_total_body_bytes=800_000)),
    )


def test_bytes_of_all_clients_together_are_bounded(models):
    async def scenario(fleet):
        held = [await connected(fleet, f"127.0.0.{number}") for number in (2, 3, 4)]
        for _, writer in held:
            writer.write(HALF_A_BODY)
        await fleet.wait_for(lambda: fleet.server.front.access.bodies.held == 240_000)
        refused = await fleet.client.post(COUNTER, content=b'{"input_0": 2}' + b" " * 80_000)
        assert (refused.status_code, "as many bytes" in refused.json()["error"]) == (503, True)
        for _, writer in held:
            writer.transport.abort()  # half a body, and gone
        await serves(fleet)

    played(
        scenario,
        fleet_config(models[0] / "counter", limits=small(max_body_bytes=100_000, max_total_body_bytes=300_000)),
    )


# --- how slowly -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "half",
    [
        b"POST ",
        b"POST /v2/models/counter/generate HTTP/1.1\r\nHost: a",
        b"POST /v2/models/counter/generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50\r\n\r\n{",
    ],
)
def test_a_client_that_sends_half_is_given_up(models, half):
    async def scenario(fleet):
        assert (await said_to(fleet, half)).startswith(b"HTTP/1.1 408")
        await serves(fleet)

    played(scenario, fleet_config(models[0] / "counter", limits=small(body_seconds=0.5)))


def test_who_does_not_read_a_stream_holds_up_nobody_and_is_left_in_the_end(models):
    async def scenario(fleet):
        readers = [await connected_narrowly(fleet) for _ in range(3)]
        for _, writer in readers:
            writer.transport.pause_reading()
            writer.write(request_bytes(STREAM, {"input_0": 90_000}))
        balancer = fleet.server.balancer
        await fleet.wait_for(lambda: sum(one.routed for one in balancer.replicas.values()) >= 3)
        assert (await fleet.generate("counter", 2)).status_code == 200
        await serves(fleet)
        for reader, writer in readers:
            writer.transport.resume_reading()
            sent = bytearray()
            with contextlib.suppress(ConnectionError):
                while part := await reader.read(65536):
                    sent += part
            assert b"90000]" not in sent, "the stream was not left, it ended"
            writer.transport.abort()

    played(scenario, fleet_config(models[0] / "counter", limits=small(write_seconds=1, drain_seconds=5)))


def test_clients_that_vanish_leave_nothing_behind(models):
    async def scenario(fleet):
        for sent in (request_bytes(STREAM, {"input_0": 90_000}), request_bytes(COUNTER, {"input_0": 5000})):
            for _ in range(20):
                _, writer = await connected(fleet)
                writer.get_extra_info("socket").setsockopt(1, 13, struct.pack("ii", 1, 0))  # SO_LINGER: a reset
                writer.write(sent)
                await asyncio.sleep(0)
                writer.close()
        await serves(fleet)

    played(scenario, fleet_config(models[0] / "counter"))


# --- how many ---------------------------------------------------------------------------------------------------------


def test_connections_that_do_nothing_keep_nobody_out(models):
    async def scenario(fleet):
        held = [await connected(fleet) for _ in range(30)]
        assert (await fleet.client.get("/v2/health/ready")).status_code == 200
        assert await held[0][0].read() == b"", "the one idle longest was closed"
        await serves(fleet)
        for _, writer in held:
            writer.close()

    played(scenario, fleet_config(models[0] / "counter", limits=small(max_connections=16)))


def test_one_address_has_no_more_connections_than_one_may(models):
    async def scenario(fleet):
        held = [await connected(fleet) for _ in range(20)]
        answer = await said_to(fleet, b"")
        assert answer.startswith(b"HTTP/1.1 503")
        for _, writer in held:
            writer.close()
        await serves(fleet)

    played(scenario, fleet_config(models[0] / "counter", limits=small(max_client_connections=20)))


# --- who --------------------------------------------------------------------------------------------------------------


def test_pages_of_other_sites_are_refused(models):
    async def scenario(fleet):
        for headers in (
            {"Origin": "https://elsewhere.example"},
            {"Sec-Fetch-Site": "cross-site"},
            {"Host": "elsewhere.example"},
        ):
            for path in (COUNTER, "/v2/repository/models/counter/unload", "/v2/replicas/0/metrics"):
                answer = await fleet.client.post(path, json={"input_0": 2}, headers=headers)
                assert answer.status_code == 403
        await serves(fleet)

    played(scenario, fleet_config(models[0] / "counter"))


def test_after_many_wrong_keys_the_right_one_is_served(models, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text(f"ann:{'a' * 20}\n")

    async def scenario(fleet):
        wrong = [
            (await fleet.client.get("/v2", headers={"x-api-key": f"{'b' * 20}{n}"})).status_code for n in range(300)
        ]
        assert set(wrong) <= {401, 429}, "which of the two depends on the time that they take"
        assert (await fleet.client.get("/v2/replicas")).status_code == 401
        assert (await fleet.client.get("/metrics")).status_code == 401
        fleet.client.headers["x-api-key"] = "a" * 20
        await serves(fleet)

    config = fleet_config(models[0] / "counter")
    played(scenario, msgspec.structs.replace(config, auth=msgspec.structs.replace(config.auth, keys=str(keys))))


# --- models -----------------------------------------------------------------------------------------------------------


def test_a_model_that_raises_the_end_of_the_process_fails_one_request(models, tmp_path):
    bm.save(Leaving(), tmp_path / "leaving")

    async def scenario(fleet):
        answers = await asyncio.gather(
            *(fleet.generate("leaving", 13 if n % 10 == 0 else 3) for n in range(60)),
        )
        assert [answer.status_code for answer in answers] == [400 if n % 10 == 0 else 200 for n in range(60)]
        assert sorted(fleet.server.balancer.replicas) == [0, 1]
        assert fleet.server.front.num_retried == 0

    played(scenario, fleet_config(tmp_path / "leaving"))


def test_a_replica_that_hangs_gets_nothing_until_it_goes_on_and_deadlines_are_answered(models, gate):
    async def scenario(fleet):
        balancer = fleet.server.balancer
        late = await fleet.generate("gated", 3, deadline_ms=300)
        assert late.status_code == 504, "answered while the function hangs"
        await fleet.wait_for(lambda: any(one.state == "suspended" for one in balancer.replicas.values()))
        assert [(await fleet.generate("counter", 2)).status_code for _ in range(4)] == [200] * 4
        assert (await fleet.client.get("/v2/health/ready")).status_code == 200
        gate.touch()
        await fleet.wait_for(lambda: all(one.state == "open" for one in balancer.replicas.values()))
        await serves(fleet)

    played(
        scenario,
        fleet_config(
            models[0] / "counter", models[0] / "gated", limits=small(hung_seconds=0.5), fleet=FleetConfig(replicas=2)
        ),
    )


# --- over gRPC --------------------------------------------------------------------------------------------------------


def test_wrong_messages_over_grpc_harm_nobody(models):
    import grpc
    from tritonclient.grpc import service_pb2

    rng = random.Random(0)
    asked = service_pb2.ModelInferRequest(model_name="scales")
    tensor = asked.inputs.add(name="input_0", datatype="INT64", shape=[2])
    tensor.contents.int64_contents.extend([1, 2])
    whole = asked.SerializeToString()

    def attack(address):
        codes = set()
        with grpc.insecure_channel(address) as channel:
            infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
            for _ in range(300):
                data = bytearray(whole)
                for _ in range(rng.randint(1, 6)):
                    data[rng.randrange(len(data))] = rng.randrange(256)
                try:
                    infer(bytes(data), timeout=LIMIT_S)
                except grpc.RpcError as error:
                    failed = error.code() is grpc.StatusCode.INTERNAL and "model failed" in error.details()
                    codes.add(None if failed else error.code())  # a number can make this cell raise
            huge = service_pb2.ModelInferRequest(model_name="scales")
            huge.inputs.add(name="input_0", datatype="INT64", shape=[2**62] * 50_000)
            for wrong in (huge.SerializeToString(), b"\xff" * 100):
                with pytest.raises(grpc.RpcError) as caught:
                    infer(wrong, timeout=LIMIT_S)
                codes.add(caught.value.code())
                assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, caught.value.details()
        return codes

    def late(address):
        with triton.InferenceServerClient(address) as client:
            for value in (float("inf"), float("nan"), "soon"):
                with pytest.raises(triton.InferenceServerException) as caught:
                    client.infer("scales", given(3), parameters={"deadline_ms": value})
                assert "INVALID_ARGUMENT" in str(caught.value.status())

    async def scenario(fleet):
        codes = await asyncio.to_thread(attack, fleet.grpc)
        assert not codes & {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.UNAVAILABLE}
        await asyncio.to_thread(late, fleet.grpc)
        assert fleet.server.front.num_retried == 0
        await serves(fleet)

    played(scenario, fleet_config(models[0] / "counter", models[0] / "scales", grpc_port=0))


def test_arrays_in_a_json_body_that_never_close_are_refused(models):
    async def scenario(fleet):
        for content in (b"[" * 100_000, b'{"input_0":' * 20_000, json.dumps({"input_0": np.inf}).encode()):
            answer = await fleet.client.post(COUNTER, content=content)
            assert answer.status_code == 400
        await serves(fleet)

    played(scenario, fleet_config(models[0] / "counter"))
