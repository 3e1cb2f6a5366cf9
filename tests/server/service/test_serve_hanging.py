"""A model's function that hangs: probes, metrics and the log say so, deadlines are answered, and two signals end it."""

from __future__ import annotations

import signal

import pytest
from server_process import read_head, request_bytes

GENERATE = "/v2/models/gated/generate"


@pytest.fixture
def hung(serve, gated):
    """A server one of whose models hangs, the file that lets it go on, and the request that waits."""
    folder, gate = gated
    server = serve(folder, "lstm:hidden=4,vocabulary_size=9", "--drain-seconds", 0.2)
    waiting = server.connect()
    begin = {"sequence_id": 7, "sequence_start": True}
    waiting.sendall(request_bytes(GENERATE, {"input_0": 9, "parameters": begin}))
    server.wait_for(lambda: server.metric("nv_inference_pending_request_count") == 1)
    return server, gate, waiting


def test_a_model_that_hangs_is_not_ready_until_it_goes_on(hung):
    server, gate, waiting = hung
    server.wait_for(lambda: server.get("/v2/health/ready").status == 503)
    assert server.get("/v2/health/live").status == 200
    assert server.get("/v2/models/gated/ready").status == 503
    assert server.get("/v2/models/lstm/ready").status == 200
    assert server.metric("batchmaker_engine_up", model="gated") == 0
    assert server.metric("batchmaker_engine_up", model="lstm") == 1
    assert server.metric("batchmaker_engine_turn_seconds", model="gated") >= 5
    refused = server.post(GENERATE, {"input_0": 1})
    assert (refused.status, refused.json) == (503, {"error": "model 'gated' does not respond now"})
    assert "retry-after" in refused.headers
    assert server.post("/v2/models/lstm/generate", {"input_0": [3, 4]}).status == 200
    server.wait_for(lambda: "busy with one turn" in server.log.read_text())
    (told,) = [line for line in server.log.read_text().splitlines() if "busy with one turn" in line]
    assert "served_models.py" in told, "the stack, wherever the model's function just is"
    gate.touch()
    server.wait_for(lambda: server.get("/v2/health/ready").status == 200)
    assert read_head(waiting).startswith(b"HTTP/1.1 200")
    assert server.post(GENERATE, {"input_0": 2}).status == 200
    assert server.metric("batchmaker_engine_up") == 2
    assert server.terminate() == 0


@pytest.mark.slow
def test_one_signal_leaves_a_model_that_hangs_behind(hung):
    server, _, waiting = hung
    assert server.terminate() == 1
    assert read_head(waiting).startswith(b"HTTP/1.1 503")
    assert "left behind" in server.log.read_text()


@pytest.mark.slow
def test_a_second_signal_ends_a_server_that_hangs_at_once(hung):
    server, _, _ = hung
    for _ in range(2):
        server.process.send_signal(signal.SIGTERM)
        server.wait_for(lambda: '"event":"stopping"' in server.log.read_text())
    assert server.process.wait(60) == 1


@pytest.mark.slow
def test_deadlines_are_answered_while_a_model_hangs(serve, gated):
    folder, gate = gated
    server = serve(folder)
    waiting = server.connect()
    begin = {"sequence_id": 7, "sequence_start": True}
    waiting.sendall(request_bytes(GENERATE, {"input_0": 9, "parameters": begin}))
    server.wait_for(lambda: server.metric("nv_inference_pending_request_count") == 1)
    late = server.post(GENERATE, {"input_0": 1, "parameters": {"deadline_ms": 100}})
    assert late.status == 504
    gate.touch()
    assert read_head(waiting).startswith(b"HTTP/1.1 200")


@pytest.fixture(scope="module")
def plain(serve, saved_models):
    return serve(saved_models)


@pytest.mark.parametrize("priority", [2**62, "high", -1, True, 1.5])
def test_a_priority_that_cannot_be_is_refused(plain, priority):
    answer = plain.post("/v2/models/counter/generate", {"input_0": 2, "parameters": {"priority": priority}})
    assert answer.status == 400
    assert "priority" in answer.json["error"]
    assert plain.post("/v2/models/counter/generate", {"input_0": 2, "parameters": {"priority": 1}}).status == 200
