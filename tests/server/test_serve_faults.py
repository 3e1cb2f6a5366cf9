"""Clients that leave, stall, send half or send nonsense: the server frees what they held and goes on."""

from __future__ import annotations

import http.client
import json
import select
import socket
import struct
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from server_process import LIMIT_S, Answer, read_head, request_bytes

MAX_IN_FLIGHT = 48
LONG = 90_000
STREAM = "/v2/models/counter/generate_stream"
GENERATE = "/v2/models/counter/generate"


@pytest.fixture(scope="module")
def server(serve, saved_models, tmp_path_factory):
    path = tmp_path_factory.mktemp("config") / "server.toml"
    path.write_text(
        f"""
        [limits]
        max_in_flight = {MAX_IN_FLIGHT}
        max_body_bytes = 100_000
        max_total_body_bytes = 300_000
        max_head_bytes = 8_000
        max_sequence = 1_000
        """
    )
    return serve(saved_models, "lstm:hidden=8,vocabulary_size=40", "--config", path)


@pytest.fixture(scope="module")
def impatient(serve, tmp_path_factory):
    """A server that soon gives up on a client that sends half; only such clients should call it."""
    path = tmp_path_factory.mktemp("config") / "server.toml"
    path.write_text("[limits]\nbody_seconds = 1\nmax_head_bytes = 8_000")
    return serve("lstm:hidden=4,vocabulary_size=9", "--config", path)


@pytest.fixture(autouse=True)
def nothing_is_left_behind(server):
    """After each test, every row is free again and the server answers as before."""
    yield
    server.wait_idle()
    assert server.metric("batchmaker_open_streams") == 0
    assert server.post(GENERATE, {"input_0": 2}).json["output_0"] == [1, 2]


def leave(connection):
    """Close with a reset, as a client that crashes does."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def start_streams(server, count):
    """Open streams that would last, and read the first event of each."""
    connections = [server.connect() for _ in range(count)]
    for connection in connections:
        connection.sendall(request_bytes(STREAM, {"input_0": LONG}))
    for connection in connections:
        assert read_head(connection).startswith(b"HTTP/1.1 200")
    return connections


@pytest.mark.parametrize("leaving", [socket.socket.close, leave])
def test_clients_that_vanish_in_mid_stream_free_their_rows(server, leaving):
    before = server.metric("nv_inference_request_failure", reason="CANCELED")
    for connection in start_streams(server, 20):
        leaving(connection)
    server.wait_idle()
    assert server.metric("nv_inference_request_failure", reason="CANCELED") == before + 20


def test_a_client_that_does_not_wait_for_its_answer_frees_its_rows(server):
    before = server.metric("nv_inference_request_failure", reason="CANCELED")
    with server.connect() as connection:
        connection.sendall(request_bytes(GENERATE, {"input_0": LONG}))
        server.wait_for(lambda: server.metric("nv_inference_pending_request_count") == 1)
    server.wait_idle()
    assert server.metric("nv_inference_request_failure", reason="CANCELED") == before + 1


@pytest.mark.slow
def test_a_thousand_clients_that_vanish_leave_nothing(serve, saved_models):
    roomy = serve(saved_models, "--max-in-flight", 2000, "--config", _roomy(saved_models))
    for connection in start_streams(roomy, 1000):
        leave(connection)
    roomy.wait_idle()
    assert roomy.metric("nv_inference_request_failure", reason="CANCELED") == 1000


def _roomy(folder):
    path = folder.parent / "roomy.toml"
    path.write_text("[limits]\nmax_streams = 2000")
    return path


def test_overload_is_refused_with_when_to_try_again(server):
    connections = start_streams(server, MAX_IN_FLIGHT)
    refused = server.post(GENERATE, {"input_0": 1})
    assert refused.status == 503
    assert int(refused.headers["retry-after"]) >= 1
    assert "try again" in refused.json["error"]
    assert server.get("/v2/health/ready").status == 200
    for connection in connections:
        connection.close()
    server.wait_idle()


def test_under_overload_every_call_is_answered_or_refused(server):
    def ask(n) -> Answer:
        return server.post(GENERATE, {"input_0": 100 + n % 7})

    with ThreadPoolExecutor(3 * MAX_IN_FLIGHT) as threads:
        answers = list(threads.map(ask, range(5 * MAX_IN_FLIGHT)))
    assert {answer.status for answer in answers} <= {200, 503}
    assert all(len(answer.json["output_0"]) == 100 + n % 7 for n, answer in enumerate(answers) if answer.status == 200)
    assert sum(answer.status == 200 for answer in answers) >= MAX_IN_FLIGHT


@pytest.mark.slow
def test_a_slow_reader_holds_up_nobody_else(server):
    with server.connect() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.sendall(request_bytes(STREAM, {"input_0": 1000}))
        for _ in range(5):
            assert server.post(GENERATE, {"input_0": 3}).json["output_0"] == [1, 2, 3]
        received = b""
        while b"\r\n0\r\n\r\n" not in received[-16:]:
            received += slow.recv(65536)
    assert received.count(b"data: ") == 1000


@pytest.mark.slow
@pytest.mark.parametrize("sent", [b"", b'{"input_0"'])
def test_a_body_that_never_ends_is_given_up(impatient, sent):
    with impatient.connect() as connection:
        path = GENERATE.replace("counter", "lstm")
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50\r\n\r\n".encode()
        connection.sendall(head + sent)
        answer = read_head(connection)
        assert answer.startswith(b"HTTP/1.1 408")
        assert b"connection: close" in answer.lower()


def test_a_client_that_leaves_within_its_body_is_forgotten(server):
    with server.connect() as connection:
        connection.sendall(f"POST {GENERATE} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50\r\n\r\n{{".encode())


@pytest.mark.parametrize("sent", [b"", b"POST /v2", b"GET /v2 HTTP/1.1\r\nHost: localhost\r\n"])
def test_a_head_that_never_ends_is_given_up(impatient, sent):
    with impatient.connect() as connection:
        connection.sendall(sent)
        assert read_head(connection).startswith(b"HTTP/1.1 408")
        assert connection.recv(10) == b"" or b"}" in connection.recv(1000) + b"}"


def test_a_head_without_end_is_cut_off(server):
    with server.connect() as connection:
        connection.sendall(b"GET /v2 HTTP/1.1\r\n" + b"x: y\r\n" * 5000)
        assert b"431" in read_head(connection)[:20]


def test_bodies_together_are_bounded(server):
    """Four bodies of 90 000 bytes are more than may be held at once, whoever sends them."""
    head = f"POST {GENERATE} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 95000\r\n\r\n".encode()
    connections = [server.connect() for _ in range(6)]
    for connection in connections:
        connection.sendall(head + b" " * 90_000)
    answered, _, _ = select.select(connections, [], [], LIMIT_S)
    assert read_head(answered[0]).startswith(b"HTTP/1.1 503")
    for connection in connections:
        connection.close()


def test_pipelined_calls_are_answered_in_order(server):
    with server.connect() as connection:
        connection.sendall(b"".join(request_bytes(GENERATE, {"input_0": n}) for n in (3, 1, 2)))
        received = b""
        while received.count(b"output_0") < 3:
            received += connection.recv(65536)
    lengths = [len(json.loads(part[: part.index(b"}") + 1])["output_0"]) for part in received.split(b"\r\n\r\n")[1:]]
    assert lengths == [3, 1, 2]


@pytest.mark.parametrize(
    "sent", [b"\x16\x03\x01\x02\x00", b"GET\r\n\r\n", b"POST /v2 HTTP/1.1\r\nContent-Length: x\r\n\r\n"]
)
def test_what_is_no_http_is_refused(server, sent):
    with server.connect() as connection:
        connection.sendall(sent)
        assert read_head(connection).startswith(b"HTTP/1.1 400")


# --- nonsense in good HTTP ------------------------------------------------------------------------------------------

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
JUNK = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
)
DATATYPES = st.sampled_from(["INT64", "INT32", "UINT64", "FP32", "FP64", "BOOL", "BYTES", "BF16", "INT65"])
SHAPE = st.lists(st.integers(-1, 5) | st.just(1 << 62), max_size=3)
NUMBERS = st.lists(st.integers(-3, 50) | st.floats(), max_size=6)


def almost(good):
    """What is good, or junk in its place."""
    return st.one_of(good, good, good, good, JUNK)


TENSOR = st.fixed_dictionaries(
    {
        "name": almost(st.sampled_from(["input_0", "rows", "start", "x"])),
        "shape": almost(SHAPE),
        "datatype": almost(DATATYPES),
    },
    optional={
        "data": almost(NUMBERS),
        "parameters": almost(st.fixed_dictionaries({"binary_data_size": almost(st.integers(-1, 60))})),
    },
)
INFER = st.fixed_dictionaries(
    {"inputs": almost(st.lists(TENSOR, max_size=3))},
    optional={
        "id": almost(st.text(max_size=3)),
        "parameters": almost(
            st.dictionaries(
                st.sampled_from(
                    ["timeout", "deadline_ms", "priority", "sequence_id", "sequence_start", "sequence_end", "x"]
                ),
                SCALARS,
            )
        ),
        "outputs": almost(st.lists(st.fixed_dictionaries({"name": almost(st.just("output_0"))}), max_size=2)),
    },
)
GENERATED = st.dictionaries(st.sampled_from(["input_0", "rows", "start", "id", "parameters", "x"]), NUMBERS | JUNK)
BODY = st.one_of(INFER, INFER, GENERATED, JUNK).map(lambda content: json.dumps(content).encode()) | st.binary(
    max_size=60
)
PATHS = st.one_of(
    st.tuples(
        st.sampled_from(["counter", "sums", "lstm", "%2e%2e", "x", "sums/versions/1", "sums/versions/9"]),
        st.sampled_from(["infer", "generate", "generate_stream"]),
    ).map(lambda parts: f"/v2/models/{parts[0]}/{parts[1]}"),
    st.sampled_from(["/v2/repository/index", "/v2/nowhere"]),
)


@st.composite
def calls(draw):
    body = draw(BODY) + draw(st.just(b"") | st.binary(max_size=40))
    headers = {}
    if draw(st.booleans()):
        length = draw(st.just(str(len(body))) | st.integers(-1, 99).map(str) | st.sampled_from(["x", "9" * 30]))
        headers["Inference-Header-Content-Length"] = length
    return draw(PATHS), body, headers


def check_call(connection, call):
    """An answer that blames the client or says what is not supported: 4xx, 501; or a good one to a good call."""
    path, body, headers = call
    connection.request("POST", path, body, headers)
    response = connection.getresponse()
    content = response.read()
    assert response.status < 500 or response.status in (501, 503, 504), (response.status, content)
    if response.status != 200:
        assert set(json.loads(content)) == {"error"}
        assert b"Traceback" not in content


def fuzz(server, num_examples):
    connection = http.client.HTTPConnection(server.host, server.port, timeout=LIMIT_S)

    @settings(max_examples=num_examples, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(calls())
    def check(call):
        check_call(connection, call)

    check()
    connection.close()


def test_malformed_requests_are_the_clients_fault(server):
    fuzz(server, 150)


@pytest.mark.slow
def test_ten_thousand_malformed_requests_are_the_clients_fault(server):
    fuzz(server, 10_000)


def test_unfinished_bodies_of_one_client_leave_room_for_others(server):
    head = f"POST {GENERATE} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 90000\r\n\r\n".encode()
    mine = [
        socket.create_connection((server.host, server.port), LIMIT_S, source_address=("127.0.0.2", 0))
        for _ in range(17)
    ]
    for connection in mine:
        connection.sendall(head + b" " * 80_000)
    waiting = list(mine)
    while len(waiting) > 1:  # two would be more than is free beside them
        (refused, *_), _, _ = select.select(waiting, [], [], LIMIT_S)
        assert read_head(refused).startswith(b"HTTP/1.1 503")
        waiting.remove(refused)
    answer = server.call("POST", GENERATE, b'{"input_0": 2}' + b" " * 80_000)
    assert (answer.status, answer.json["output_0"]) == (200, [1, 2])
    waiting[0].sendall(b" " * 10_000)
    assert read_head(waiting[0]).startswith(b"HTTP/1.1 400")  # it is no JSON, but it is whole
    for connection in mine:
        connection.close()
