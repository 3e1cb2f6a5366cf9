"""Sequences over WebSockets: clients of another's making against a server that runs as a process."""

from __future__ import annotations

import base64
import json
import resource
import signal
import socket
import struct
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from served_models import Scales
from server_process import LIMIT_S, RunningServer, read_head, request_bytes
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

import batchmaker as bm

AHEAD = 4
LONG = 90_000
ANN, BOB = "a" * 24, "b" * 24
HANDSHAKE = "\r\n".join(
    [
        "GET /v2/models/{}/sequence HTTP/1.1", "Host: localhost", "Upgrade: websocket", "Connection: Upgrade",
        "Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==", "", "",
    ]
)  # fmt: skip
CHUNKS = [list(map(int, np.random.default_rng(seed).integers(0, 40, size=1 + seed % 5))) for seed in range(12)]


@pytest.fixture(scope="module")
def folder(saved_models, tmp_path_factory):
    folder = tmp_path_factory.mktemp("scales")
    bm.save(Scales(), folder / "scales")
    return folder


@pytest.fixture(scope="module")
def server(serve, saved_models, folder):
    config = folder / "server.toml"
    config.write_text(
        f"""
        [limits]
        max_sequences = 8
        max_chunks_ahead = {AHEAD}
        max_body_bytes = 100_000
        max_total_body_bytes = 150_000
        sequence_idle_seconds = 3600
        """
    )
    return serve(
        "lstm:hidden=8,vocabulary_size=40,seed=1", saved_models, f"scales={folder / 'scales'}", "--config", config
    )


@pytest.fixture(autouse=True)
def nothing_is_left_behind(request):
    """After each test, no connection is open and no row is held."""
    yield
    if "server" in request.fixturenames:
        server = request.getfixturevalue("server")
        for name in ("batchmaker_open_websockets", "batchmaker_open_sequences"):
            server.wait_for(lambda name=name: server.metric(name) == 0)
        server.wait_idle()


def connected(server: RunningServer, model: str, query: str = "", **options: Any) -> ClientConnection:
    options = {"proxy": None, "compression": None, "ping_interval": None, "open_timeout": LIMIT_S} | options
    return connect(f"ws://{server.address}/v2/models/{model}/sequence{query}", close_timeout=LIMIT_S, **options)


def told(connection: ClientConnection) -> Any:
    return json.loads(connection.recv(LIMIT_S))


def counted(connection: ClientConnection, *chunks: int) -> list[list[int]]:
    """Send chunks for the model `counter`, and return what each is answered."""
    for chunk in chunks:
        connection.send(np.int64(chunk).tobytes())
    return [told(connection)["output_0"] for _ in chunks]


def closed(connection: ClientConnection) -> tuple[int, str]:
    """Read up to the end; return its code and reason."""
    with suppress(ConnectionClosed):
        for _ in connection:
            pass
    return connection.close_code, connection.close_reason


def ends_in_the_log(server: RunningServer) -> list[str]:
    """Why each sequence has ended that was not finished."""
    lines = [json.loads(line) for line in server.log.read_text().splitlines() if '"sequence ended"' in line]
    return [line["why"] for line in lines]


def refused(server: RunningServer, model: str, query: str = "", **options: Any) -> tuple[int, str]:
    """Status and message of a handshake that is refused."""
    with pytest.raises(InvalidStatus) as caught:
        connected(server, model, query, **options)
    response = caught.value.response
    assert response.headers["x-request-id"]
    return response.status_code, json.loads(response.body)["error"]


# --- chunks and answers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("answers", ["json", "binary"])
@pytest.mark.parametrize("written", ["json", "binary"])
def test_chunks_of_a_connection_give_what_the_whole_gives(server, written, answers):
    whole = server.post("/v2/models/lstm/generate", {"input_0": [word for chunk in CHUNKS for word in chunk]}).json[
        "output_0"
    ]
    with connected(server, "lstm", f"?answers={answers}") as connection:
        for chunk in CHUNKS:
            connection.send(json.dumps({"input_0": chunk}) if written == "json" else np.array(chunk, "<i8").tobytes())
            got = connection.recv(LIMIT_S)
    got = np.frombuffer(got, "<f4") if answers == "binary" else json.loads(got)["output_0"]
    np.testing.assert_allclose(got, whole, atol=1e-5)


def test_a_text_message_is_what_generate_takes_and_gives(server):
    with connected(server, "counter") as connection:
        connection.send(json.dumps({"input_0": 2, "id": "one", "parameters": {"deadline_ms": 60_000}}))
        assert told(connection) == {"model_name": "counter", "model_version": "1", "id": "one", "output_0": [1, 2]}
        connection.send('{"input_0": 1}')
        assert told(connection)["output_0"] == [3]


def test_a_version_can_be_named(server):
    with connected(server, "counter/versions/1") as connection:
        assert counted(connection, 2, 1) == [[1, 2], [3]]
    assert refused(server, "counter/versions/2")[0] == 404


CHUNK = st.one_of(
    st.integers(0, 4).map(lambda n: ("binary", n)),
    st.integers(0, 4).map(lambda n: ("json", n)),
    st.sampled_from(["fragments", "ping", "bytes", "unknown", "named", "broken"]).map(lambda what: (what, 2)),
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(chunks=st.lists(CHUNK, max_size=12), together=st.booleans())
def test_a_wrong_chunk_is_the_last_whatever_was_sent_behind_it(server, chunks, together):
    """Chunks of all kinds, one after the other or before the first is answered: each has its answer, in its place."""
    expected: list[Any] = []
    count = 0
    with connected(server, "counter") as connection:
        for what, n in chunks:
            with suppress(ConnectionClosed):  # by a wrong one before
                match what:
                    case "binary":
                        connection.send(np.int64(n).tobytes())
                    case "json":
                        connection.send(json.dumps({"input_0": n}))
                    case "fragments":
                        connection.send([bytes([byte]) for byte in np.int64(n).tobytes()])
                    case "ping":
                        connection.ping()
                    case "bytes":
                        connection.send(b"12345")
                    case "unknown":
                        connection.send(json.dumps({"input_1": n}))
                    case "named":
                        connection.send(json.dumps({"input_0": n, "parameters": {"sequence_id": 7}}))
                    case "broken":
                        connection.send('{"input_0"')
            if what == "ping" or 400 in expected:
                continue
            if what in ("binary", "json", "fragments"):
                expected.append(list(range(count + 1, count + n + 1)))
                count += n
            else:
                expected.append(400)
            if not together:
                answer = told(connection)
                assert answer.get("output_0", answer.get("status")) == expected[-1]
        if together:
            answers = [told(connection) for _ in expected]
            assert [answer.get("output_0", answer.get("status")) for answer in answers] == expected
        if 400 in expected:
            assert closed(connection)[0] == 1011


def test_errors_say_what_to_mend(server):
    for chunk, said in (
        (b"12345", "a binary chunk of 5 bytes is no whole number of rows of 8 bytes: input 'input_0' is INT64"),
        ('{"x": 1}', "unknown key 'x'"),
        ('{"input_0": [1], "parameters": {"sequence_id": 3}}', "the connection is the sequence"),
        ('{"input_0": [1.5]}', "data is no INT64"),
    ):
        with connected(server, "lstm") as connection:
            connection.send(chunk)
            answer = told(connection)
            assert (answer["status"], said in answer["error"]) == (400, True), answer
            assert "the sequence has ended with it: connect anew" in answer["error"]


def test_a_chunk_that_fails_ends_the_sequence_and_the_connection(server):
    with connected(server, "scales") as connection:
        for numbers in ([1, 2], [12], [3]):
            connection.send(json.dumps({"input_0": numbers, "id": str(numbers)}))
        assert told(connection)["output_0"] == 5.0
        failed = told(connection)
        assert (failed["status"], failed["id"]) == (500, "[12]")
        assert "the sequence has ended with it: connect anew" in failed["error"]
        assert closed(connection)[0] == 1011


def test_a_missed_deadline_ends_it_too(server):
    with connected(server, "counter", "?deadline_ms=5") as connection:
        connection.send(np.int64(LONG).tobytes())
        assert told(connection)["status"] == 504
        assert closed(connection)[0] == 1011


# --- who may connect --------------------------------------------------------------------------------------------------


def test_what_cannot_be_is_refused_with_a_status_before_the_handshake(server):
    for model, query, status, said in (
        ("nobody", "", 404, "there is no model 'nobody'"),
        ("lstm/infer", "", 404, "there is no GET /v2/models/lstm/infer/sequence"),
        ("lstm", "?answer=binary", 400, "Did you mean 'answers'?"),
        ("lstm", "?answers=xml", 400, "answers must be json or binary"),
        ("lstm", "?output=x", 400, "unknown output 'x'"),
        ("lstm", "?deadline_ms=soon", 400, "deadline_ms must be a number"),
        ("lstm", "?deadline_ms=-1", 400, "must be a number of milliseconds above 0"),
        ("sums", "", 400, "keeps nothing between requests"),
    ):
        got, message = refused(server, model, query)
        assert (got, said in message) == (status, True), message


def test_no_more_sequences_than_may_be_open(server):
    connections = [connected(server, "counter") for _ in range(8)]
    status, said = refused(server, "counter")
    assert (status, "as many sequences are open as may be" in said) == (503, True)
    connections.pop().close()
    server.wait_for(lambda: server.metric("batchmaker_open_sequences") == 7)
    with connected(server, "counter") as connection:
        assert counted(connection, 1) == [[1]]
    for connection in connections:
        connection.close()


def test_a_plain_call_is_told_that_this_is_a_websocket(server):
    answer = server.get("/v2/models/lstm/sequence")
    assert (answer.status, answer.headers["upgrade"]) == (426, "websocket")


@pytest.mark.slow
def test_pages_of_other_servers_may_not_connect(server, serve, tmp_path):
    status, said = refused(server, "counter", origin="https://elsewhere.example")
    assert (status, "auth.origins" in said) == (403, True)
    assert refused(server, "counter", origin="null")[0] == 403
    with connected(server, "counter", origin=f"http://{server.address}") as connection:
        assert counted(connection, 1) == [[1]]
    (tmp_path / "server.toml").write_text('[auth]\norigins = ["null"]')
    other = serve("lstm:hidden=4,vocabulary_size=9", "--config", tmp_path / "server.toml")
    connected(other, "lstm", origin="null").close()
    assert refused(other, "lstm", origin="https://elsewhere.example")[0] == 403


def coded(key: str) -> str:
    return "batchmaker.key." + base64.urlsafe_b64encode(key.encode()).decode().rstrip("=")


@pytest.mark.slow
def test_keys_are_asked_for_and_count_chunks_and_sequences(serve, saved_models, tmp_path):
    (tmp_path / "keys").write_text(f"ann:{ANN}\nbob:{BOB}\n")
    (tmp_path / "server.toml").write_text(
        "[auth]\nkeys = 'keys'\nrate = 0.001\nburst = 3\n[limits]\nmax_key_sequences = 1"
    )
    server = serve(saved_models, "--config", tmp_path / "server.toml")
    assert refused(server, "counter")[0] == 401
    assert refused(server, "counter", additional_headers={"X-API-Key": "x" * 24})[0] == 401
    with connected(server, "counter", additional_headers={"X-API-Key": ANN}, origin="https://any.example") as first:
        status, said = refused(server, "counter", additional_headers={"Authorization": f"Bearer {ANN}"})
        assert (status, "sequences of this API key are open" in said) == (503, True)
        assert counted(first, 1, 1) == [[1], [2]]  # the first came with the connection
        first.send(np.int64(1).tobytes())
        assert told(first)["status"] == 429  # it would wait longer than `write_seconds`
        assert closed(first)[0] == 1011
    protocols = ["batchmaker", coded(BOB)]
    with connected(server, "counter", subprotocols=protocols) as page:
        assert page.subprotocol == "batchmaker"
        assert counted(page, 2) == [[1, 2]]


# --- how it ends ------------------------------------------------------------------------------------------------------


def half(connection: ClientConnection) -> None:
    connection.socket.shutdown(socket.SHUT_WR)


@pytest.mark.parametrize("ending", [ClientConnection.close, half], ids=["closed", "half"])
@pytest.mark.parametrize("chunk", [1, LONG], ids=["idle", "computing"])
def test_however_a_connection_ends_its_sequence_is_over(server, ending, chunk):
    connection = connected(server, "counter")
    assert counted(connection, 1) == [[1]]
    if chunk == LONG:
        connection.send(np.int64(LONG).tobytes())
        server.wait_for(lambda: server.metric("nv_inference_pending_request_count") == 1)
    assert server.metric("batchmaker_open_websockets", model="counter") == 1
    ending(connection)
    server.wait_for(lambda: server.metric("batchmaker_open_sequences") == 0)
    server.wait_idle()
    connection.close()


def test_a_client_that_crashes_frees_its_rows(server):
    """By a bare connection: the library would close it in order."""
    connection = handshaken(server, "counter")
    connection.sendall(frame(2, np.int64(LONG).tobytes()))
    server.wait_for(lambda: server.metric("nv_inference_pending_request_count") == 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def frame(opcode: int, data: bytes, *, fin: bool = True) -> bytes:
    """A frame as a client writes it, masked with zeros."""
    size = bytes([0x80 | len(data)]) if len(data) < 126 else b"\xfe" + struct.pack("!H", len(data))
    return bytes([0x80 * fin | opcode]) + size + bytes(4) + data


@pytest.mark.slow
def test_an_idle_connection_is_closed(serve, saved_models, tmp_path):
    (tmp_path / "server.toml").write_text("[limits]\nsequence_idle_seconds = 0.5")
    server = serve(saved_models, "--config", tmp_path / "server.toml")
    with connected(server, "counter") as connection:
        assert closed(connection) == (1008, "no chunk came for as long as a sequence may be idle")


@pytest.mark.slow
def test_what_is_too_large_too_slow_or_too_much_is_closed(serve, server, saved_models, tmp_path):
    with connected(server, "lstm") as connection:
        connection.send(bytes(100_001))
        assert closed(connection)[0] == 1009
    with connected(server, "lstm") as one, connected(server, "lstm") as other:
        for connection in (one, other):
            connection.socket.sendall(b"\x82\xff" + struct.pack("!Q", 90_000) + bytes(4 + 80_000))
        server.wait_for(lambda: 1013 in (one.close_code, other.close_code))
    (tmp_path / "server.toml").write_text("[limits]\nbody_seconds = 0.5")
    impatient = serve(saved_models, "--config", tmp_path / "server.toml")
    with connected(impatient, "counter") as connection:
        connection.socket.sendall(frame(2, np.int64(2).tobytes())[:-3])
        assert closed(connection) == (1008, "the message came too slowly")


@pytest.mark.slow
def test_unloading_a_model_answers_what_was_read_and_closes(serve, gated, tmp_path):
    folder, gate = gated
    (tmp_path / "server.toml").write_text("[limits]\nhung_seconds = 1e6")
    server = serve(folder, "--config", tmp_path / "server.toml", "--drain-seconds", LIMIT_S)
    with connected(server, "gated") as connection:
        assert counted(connection, 2) == [[1, 2]]
        for n in (3, 1):
            connection.send(np.int64(n).tobytes())
        server.wait_for(lambda: server.metric("nv_inference_pending_request_count") == 2)
        unloading = threading.Thread(target=server.post, args=("/v2/repository/models/gated/unload", {}))
        unloading.start()
        server.wait_for(lambda: server.get("/v2/models/gated/ready").status != 200)
        gate.touch()
        assert [told(connection)["output_0"] for _ in range(2)] == [[3, 4, 5], [6]]
        assert closed(connection) == (1001, "the model is being unloaded")
        unloading.join(LIMIT_S)
    assert ends_in_the_log(server) == ["the model is being unloaded"]


@pytest.mark.slow
def test_a_server_that_stops_lets_connections_go_on_until_they_end(serve, saved_models):
    server = serve(saved_models, "--drain-seconds", 100 * LIMIT_S)
    with connected(server, "counter") as one, connected(server, "counter") as other:
        assert counted(one, 1) == [[1]]
        server.process.send_signal(signal.SIGTERM)
        server.wait_for(lambda: server.get("/v2/health/ready").status == 503)
        assert refused(server, "counter") == (503, "the server is shutting down")
        assert counted(one, 2, 1) == [[2, 3], [4]]
        assert counted(other, 1) == [[1]]
        one.close()
        assert counted(other, 1, 1) == [[2], [3]]
        assert server.process.poll() is None
    assert server.process.wait(LIMIT_S) == 0


@pytest.mark.slow
def test_after_the_drain_what_was_read_is_answered_and_connections_are_closed(serve, gated, tmp_path):
    folder, gate = gated
    (tmp_path / "server.toml").write_text("[limits]\nhung_seconds = 1e6")
    server = serve(folder, "--config", tmp_path / "server.toml", "--drain-seconds", 0.5)
    with connected(server, "gated") as connection:
        assert counted(connection, 1) == [[1]]
        server.process.send_signal(signal.SIGTERM)
        assert closed(connection) == (1001, "the server is being stopped")
    assert server.process.wait(LIMIT_S) == 0
    assert ends_in_the_log(server) == ["the server is being stopped"]
    assert gate.exists() is False


@pytest.mark.slow
def test_a_second_signal_does_not_wait_for_connections(serve, saved_models):
    server = serve(saved_models, "--drain-seconds", 100 * LIMIT_S)
    with connected(server, "counter") as connection:
        assert counted(connection, 1) == [[1]]
        server.process.send_signal(signal.SIGTERM)
        server.wait_for(lambda: server.get("/v2/health/ready").status == 503)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(LIMIT_S) == 1
        assert closed(connection)[0] in (1001, 1006, 1012)


# --- clients that send too much or read too little --------------------------------------------------------------------


@pytest.mark.slow
def test_no_more_chunks_are_read_than_may_be_ahead(serve, gated, tmp_path):
    """A client sends all it has to a model that waits: the engine has a few of them, and all are answered in order."""
    folder, gate = gated
    (tmp_path / "server.toml").write_text(f"[limits]\nmax_chunks_ahead = {AHEAD}\nhung_seconds = 1e6")
    server = serve(folder, "--config", tmp_path / "server.toml")
    with connected(server, "gated", max_queue=None) as connection:
        for n in [3] + [1] * 400:
            connection.send(np.int64(n).tobytes())
        server.wait_for(lambda: server.metric("nv_inference_pending_request_count") == AHEAD)
        server.post("/v2/models/gated/infer", {})  # a call of another client, after which nothing more has been read
        assert server.metric("nv_inference_pending_request_count") == AHEAD
        gate.touch()
        assert [told(connection)["output_0"][-1] for _ in range(401)] == list(range(3, 404))


@pytest.mark.slow
def test_pings_are_answered_though_chunks_wait(serve, gated, tmp_path):
    """As the default of Python's websockets sends them: within a stream of chunks that are read later."""
    folder, gate = gated
    (tmp_path / "server.toml").write_text("[limits]\nmax_chunks_ahead = 2\nhung_seconds = 1e6")
    server = serve(folder, "--config", tmp_path / "server.toml")
    with connected(server, "gated", max_queue=None) as connection:
        for n in [3] + [1] * 400:
            connection.send(np.int64(n).tobytes())
            if n % 50 == 3:
                assert connection.ping().wait(LIMIT_S)
        assert connection.ping().wait(LIMIT_S)
        gate.touch()
        assert [told(connection)["output_0"][-1] for _ in range(401)] == list(range(3, 404))


@pytest.mark.slow
def test_more_chunks_than_the_model_takes_requests_are_all_computed(serve, saved_models, tmp_path):
    """Each connection is ahead of its answers; together they are far above `max_in_flight`."""
    (tmp_path / "server.toml").write_text("[limits]\nmax_in_flight = 8\nmax_sequences = 24\nmax_chunks_ahead = 16")
    server = serve(saved_models, "--config", tmp_path / "server.toml")
    connections = [connected(server, "counter", max_queue=None) for _ in range(24)]
    for _ in range(60):
        for connection in connections:
            connection.send(np.int64(1).tobytes())
    for connection in connections:
        assert [told(connection).get("output_0") for _ in range(60)] == [[n] for n in range(1, 61)]
        connection.close()


@pytest.mark.slow
def test_a_key_whose_rate_is_used_up_is_read_from_more_slowly(serve, saved_models, tmp_path):
    (tmp_path / "keys").write_text(f"ann:{ANN}\n")
    (tmp_path / "server.toml").write_text("[auth]\nkeys = 'keys'\nrate = 100\nburst = 5")
    server = serve(saved_models, "--config", tmp_path / "server.toml")
    with connected(server, "counter", additional_headers={"X-API-Key": ANN}, max_queue=None) as connection:
        assert counted(connection, *[1] * 30) == [[n] for n in range(1, 31)]


@pytest.mark.slow
def test_a_client_that_never_reads_is_not_read_from_and_cut_off(serve, saved_models, tmp_path):
    """It sends for as long as it can: that is what the buffers of two machines hold, and not what it has."""
    (tmp_path / "server.toml").write_text("[limits]\nwrite_seconds = 1")
    server = serve(saved_models, "--config", tmp_path / "server.toml")
    connection, chunks, sent = handshaken(server, "counter"), frame(2, np.int64(1_000).tobytes()) * 500, 0
    try:
        while sent < 200_000_000:
            connection.sendall(chunks)
            sent += len(chunks)
    except OSError:
        pass
    assert sent < 200_000_000
    server.wait_for(lambda: server.metric("batchmaker_open_sequences") == 0)
    assert server.metric("nv_inference_request_success") < sent / len(frame(2, bytes(8)))


def handshaken(server: RunningServer, model: str) -> socket.socket:
    """A bare connection after the handshake."""
    connection = server.connect()
    connection.sendall(HANDSHAKE.format(model).encode())
    assert read_head(connection).startswith(b"HTTP/1.1 101")
    return connection


@pytest.mark.slow
def test_pings_of_a_client_that_does_not_read_cost_no_memory(serve, saved_models, tmp_path):
    server = serve(saved_models)
    connection, pings = handshaken(server, "counter"), frame(9, bytes(100)) * 1000
    before = resident_bytes(server)
    for _ in range(300):  # 30 MB: the answers would be as much
        connection.sendall(pings)
    connection.sendall(frame(2, np.int64(1).tobytes()))
    server.wait_for(lambda: server.metric("nv_inference_request_success") == 1)
    assert resident_bytes(server) - before < 10_000_000
    connection.close()


def resident_bytes(server: RunningServer) -> int:
    pages = Path(f"/proc/{server.process.pid}/statm").read_text().split()[1]
    return int(pages) * resource.getpagesize()


def test_many_small_fragments_are_joined_as_they_come(server):
    connection = handshaken(server, "counter")
    connection.sendall(frame(2, b"", fin=False) + frame(0, b"", fin=False) * 100_000)
    connection.sendall(b"".join(frame(0, bytes([byte]), fin=False) for byte in np.int64(3).tobytes()))
    connection.sendall(frame(0, b""))
    answer = b""
    while not answer.endswith(b"}"):
        answer += connection.recv(65536)
    assert json.loads(answer[2:])["output_0"] == [1, 2, 3]
    connection.close()


def test_a_handshake_behind_a_call_that_is_not_answered_ends_the_connection(server):
    """Its answer would be lost among the messages, and nobody would notice that the client leaves."""
    connection = server.connect()
    connection.sendall(request_bytes("/v2/models/counter/generate", {"input_0": LONG}))
    server.wait_for(lambda: server.metric("nv_inference_pending_request_count") == 1)
    connection.sendall(HANDSHAKE.format("counter").encode())
    assert read_head(connection) == b""
    connection.close()


@pytest.mark.parametrize(
    "change",
    [
        ("GET", "POST"), ("Version: 13", "Version: 12"), ("Sec-WebSocket-Key", "X-Key"),
        ("Host: localhost", "Host: " + "x" * 9000),
    ],
    ids=["method", "version", "key", "head"],
)  # fmt: skip
def test_a_malformed_handshake_is_refused(server, change):
    connection = server.connect()
    connection.sendall(HANDSHAKE.format("counter").replace(*change).encode())
    assert read_head(connection).split()[1] in (b"400", b"405", b"426", b"431")
    connection.close()


@pytest.mark.slow
def test_no_more_connections_than_may_be_open(serve, saved_models, tmp_path):
    (tmp_path / "server.toml").write_text("[limits]\nmax_connections = 4")
    server = serve(saved_models, "--config", tmp_path / "server.toml")
    open_now = [connected(server, "counter") for _ in range(4)]
    host, _, port = server.address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=LIMIT_S) as more:
        try:
            more.sendall(b"GET /v2/models/counter/sequence HTTP/1.1\r\nHost: a\r\n\r\n")
            answer = more.recv(64)
        except ConnectionError:  # closed before it has asked
            answer = b""
    assert not answer or answer.startswith(b"HTTP/1.1 503")
    assert server.process.poll() is None
    for connection in open_now:
        connection.close()


# --- what is counted --------------------------------------------------------------------------------------------------


def test_connections_are_counted(server):
    before = server.metric("batchmaker_websockets_total", model="counter")
    with connected(server, "counter"), connected(server, "counter"), connected(server, "lstm"):
        assert server.metric("batchmaker_open_websockets", model="counter") == 2
        assert server.metric("batchmaker_open_websockets", model="lstm") == 1
    assert server.metric("batchmaker_websockets_total", model="counter") == before + 2
