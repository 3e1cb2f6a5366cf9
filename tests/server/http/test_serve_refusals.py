"""A server without room refuses on the head of a call, before its body, and loses nothing by it."""

from __future__ import annotations

import json
import socket

import pytest
from served_models import Gated, Sums
from server_process import read_head, request_bytes

import batchmaker as bm

LONG = 90_000
GENERATE = "/v2/models/counter/generate"
KEY = "a-key-of-some-length"
LIMITS = "[limits]\nmax_in_flight = 1\ndrain_seconds = 0\nhung_seconds = 1e6"  # who waits counts as hung otherwise


@pytest.fixture(scope="module")
def patient_models(tmp_path_factory):
    """A folder with the saved models `counter`, whose requests for more than 2 wait to the end of the tests, and
    `sums`."""
    folder = tmp_path_factory.mktemp("patient")
    gate = folder / "open"
    bm.save(Gated(str(gate)), folder / "models" / "counter")
    bm.save(Sums(), folder / "models" / "sums")
    yield folder / "models"
    gate.touch()


@pytest.fixture(scope="module")
def full(serve, patient_models, tmp_path_factory):
    """A server for one request at a time, which has that one until the end of the tests."""
    path = tmp_path_factory.mktemp("config") / "server.toml"
    path.write_text(f"{LIMITS}\nbody_seconds = 1")
    return occupied(serve(patient_models, "--config", path))


def occupied(server, *headers):
    server.connect().sendall(request_bytes(GENERATE, {"input_0": 9}, *headers))
    server.wait_for(
        lambda: server.get("/v2/models/counter/stats", X_API_Key=KEY).json["model_stats"][0] and busy(server)
    )
    return server


def busy(server):
    for line in server.get("/metrics", X_API_Key=KEY).content.decode().splitlines():
        if line.startswith("nv_inference_pending_request_count{") and 'model="counter"' in line:
            return float(line.rpartition(" ")[2]) == 1
    return False


def refused(server):
    return server.metric("nv_inference_request_failure", model="counter", reason="REJECTED")


def read_answer(connection):
    """Return the head of an answer, in lower case, and its body."""
    head, _, body = read_head(connection).partition(b"\r\n\r\n")
    (length,) = [int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    while len(body) < length:
        body += connection.recv(65536)
    return head.lower(), body


def test_a_refusal_says_when_to_try_again_and_carries_the_calls_id(full):
    answer = full.post(GENERATE, {"input_0": 1}, X_Request_Id="mine")
    assert answer.status == 503
    assert (answer.headers["retry-after"], answer.headers["x-request-id"]) == ("1", "mine")
    assert answer.headers["content-type"] == "application/json"
    assert "takes no more now" in answer.json["error"]


def test_every_refusal_is_counted_once(full):
    before = refused(full)
    for path in (GENERATE, "/v2/models/counter/infer", "/v2/models/counter/versions/1/generate"):
        assert full.post(path, {"input_0": 1}).status == 503
    assert refused(full) == before + 3


def test_what_is_wrong_otherwise_is_still_said(full):
    assert full.post("/v2/models/nobody/generate", {"input_0": 1}).status == 404
    assert full.post("/v2/models/counter/versions/7/generate", {"input_0": 1}).status == 404
    assert full.get(GENERATE).status == 405
    assert full.post("/v2/models/sums/generate", {"rows": [[1, 2]], "start": [0, 0]}).status == 200


def test_the_refusal_comes_before_the_body_and_the_connection_stays_open(full):
    with full.connect() as connection:
        connection.sendall(f"POST {GENERATE} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50\r\n\r\n".encode())
        head, body = read_answer(connection)
        assert head.startswith(b"http/1.1 503")
        assert b"connection: close" not in head
        assert set(json.loads(body)) == {"error"}
        connection.sendall(b" " * 50 + request_bytes("/v2/models/sums/generate", {"rows": [[1, 2]], "start": [0, 0]}))
        head, body = read_answer(connection)
        assert head.startswith(b"http/1.1 200")
        assert json.loads(body)["total"] == [1, 2]


def test_a_body_that_never_ends_after_a_refusal_is_given_up(full):
    with full.connect() as connection:
        connection.sendall(f"POST {GENERATE} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50\r\n\r\n{{".encode())
        assert read_answer(connection)[0].startswith(b"http/1.1 503")
        assert connection.recv(1) == b""


def test_pipelined_refusals_are_answered_in_order(full):
    calls = [request_bytes(GENERATE, {"input_0": 1}, f"X-Request-Id: call-{number}") for number in range(5)]
    with full.connect() as connection:
        connection.sendall(b"".join(calls))
        received = b""
        while received.count(b"x-request-id") < 5 or not received.endswith(b"}"):
            received += connection.recv(65536)
    assert [f"call-{number}".encode() in part for number, part in enumerate(received.split(b"HTTP/1.1 503")[1:])] == [
        True
    ] * 5


@pytest.mark.parametrize("head", ["HTTP/1.0\r\n", "HTTP/1.1\r\nConnection: close\r\n"])
def test_a_client_that_wants_its_connection_closed_gets_that(full, head):
    with full.connect() as connection:
        connection.sendall(f"POST {GENERATE} {head}Content-Length: 0\r\n\r\n".encode())
        head, _ = read_answer(connection)
        assert head.startswith(b"http/1.1 503")
        assert b"connection: close" in head
        assert connection.recv(1) == b""


def test_refusals_are_not_logged_one_by_one(full):
    for _ in range(3):
        assert full.post(GENERATE, {"input_0": 1}, X_Request_Id="unlogged").status == 503
    assert "unlogged" not in full.log.read_text()


@pytest.mark.slow
def test_who_has_no_key_hears_that_first(serve, patient_models, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text(f"ann:{KEY}")
    path = tmp_path / "server.toml"
    path.write_text(LIMITS)
    server = occupied(serve(patient_models, "--api-keys", keys, "--config", path), f"X-API-Key: {KEY}")
    assert server.post(GENERATE, {"input_0": 1}).status == 401
    assert server.post(GENERATE, {"input_0": 1}, X_API_Key=KEY).status == 503


@pytest.mark.slow
def test_a_client_that_takes_nothing_is_left_in_the_end(serve, saved_models, tmp_path):
    """Its stream is given up, and its rows are freed, once it has taken nothing for as long as is allowed."""
    path = tmp_path / "server.toml"
    path.write_text("[limits]\nwrite_seconds = 1")
    server = serve(saved_models, "--config", path)
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect((server.host, server.port))
        slow.sendall(request_bytes("/v2/models/counter/generate_stream", {"input_0": LONG}))
        server.wait_for(lambda: server.metric("nv_inference_request_failure", reason="CANCELED") == 1)
        server.wait_for(lambda: server.metric("batchmaker_open_streams") == 0)
    server.wait_idle()
