"""A server that is left alone for a night: settings change under it, clients hold on to it, nobody reads its log."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess

import pytest
from server_process import HERE, LIMIT_S, START, RunningServer, read_head, request_bytes

GENERATE = "/v2/models/counter/generate"
ANN, BOB = "a" * 20, "b" * 20


def reload(server: RunningServer, word: str = '"event":"reloaded"') -> None:
    """Send SIGHUP and wait for what the log says."""
    before = server.log.read_text().count(word)
    server.process.send_signal(signal.SIGHUP)
    server.wait_for(lambda: server.log.read_text().count(word) > before)


@pytest.mark.slow
def test_a_signal_takes_over_keys_and_models_while_requests_run(serve, saved_models, tmp_path):
    keys, models = tmp_path / "keys", tmp_path / "models"
    shutil.copytree(saved_models, models)
    keys.write_text(f"ann:{ANN}\n")
    server = serve(models, "--api-keys", keys)
    server.key = ANN
    assert server.post(GENERATE, {"input_0": 2}, X_API_Key=ANN).status == 200
    keys.write_text(f"bob:{BOB}\n")
    shutil.copytree(models / "counter", models / "second")
    shutil.rmtree(models / "sums")
    reload(server)
    server.key = BOB
    assert server.post(GENERATE, {"input_0": 2}, X_API_Key=ANN).status == 401
    assert server.post(GENERATE.replace("counter", "second"), {"input_0": 2}, X_API_Key=BOB).status == 200
    assert server.get("/v2/models/sums", X_API_Key=BOB).status == 404
    assert server.terminate() == 0


@pytest.mark.slow
def test_settings_that_are_wrong_change_nothing_and_those_that_must_wait_are_named(serve, saved_models, tmp_path):
    config = tmp_path / "server.toml"
    config.write_text("[limits]\nmax_in_flight = 100\n")
    server = serve(saved_models, "--config", config)
    config.write_text("[limits]\nmax_in_fight = 100\n")
    reload(server, '"event":"not reloaded"')
    assert server.post(GENERATE, {"input_0": 2}).status == 200
    config.write_text("[limits]\nmax_in_flight = 200\n")
    reload(server)
    said = [json.loads(line) for line in server.log.read_text().splitlines() if '"event":"reloaded"' in line]
    assert said[-1]["waits_for_next_start"] == ["limits.max_in_flight"]
    assert server.metric("batchmaker_limit", limit="max_in_flight") == 100


@pytest.mark.slow
def test_a_port_of_its_own_has_probes_and_metrics_and_nobody_else_has_them(serve, saved_models, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text(f"ann:{ANN}\n")
    server = serve(saved_models, "--api-keys", keys, "--admin-port", 0)
    admin = RunningServer.__new__(RunningServer)
    admin.host, admin.port = server.host, int(server.ready_line.split(" serves ")[0].rpartition(":")[2])
    assert admin.get("/v2/health/live").status == 200
    assert b"batchmaker_engine_up" in admin.get("/metrics").content
    assert admin.post(GENERATE, {"input_0": 2}, X_API_Key=ANN).status == 404
    assert admin.post("/v2/repository/models/sums/unload", {}).status == 401
    assert admin.post("/v2/repository/models/sums/unload", {}, X_API_Key=ANN).status == 200
    assert server.post(GENERATE, {"input_0": 2}, X_API_Key=ANN).status == 200
    for path in ("/metrics", "/v2/trace", "/v2/repository/index"):
        assert server.call("POST" if "repository" in path else "GET", path, X_API_Key=ANN).status == 404


@pytest.mark.slow
def test_connections_that_do_nothing_keep_nobody_out(serve, saved_models, tmp_path):
    config = tmp_path / "server.toml"
    config.write_text("[limits]\nmax_connections = 8\n")
    server = serve(saved_models, "--config", config)
    held = [server.connect() for _ in range(20)]
    assert server.get("/v2/health/live").status == 200
    assert server.post(GENERATE, {"input_0": 2}).status == 200
    assert held[0].recv(1) == b""
    assert server.metric("batchmaker_closed_idle_connections_total") >= 12


@pytest.mark.slow
def test_one_address_has_no_more_connections_than_one_may(serve, saved_models, tmp_path):
    config = tmp_path / "server.toml"
    config.write_text("[limits]\nmax_client_connections = 2\n")
    server = serve(saved_models, "--config", config)
    held = [server.connect() for _ in range(2)]
    for connection in held:
        connection.sendall(request_bytes(GENERATE, {"input_0": 2}))
        assert read_head(connection).startswith(b"HTTP/1.1 200")
    refused = read_head(server.connect())
    assert refused.startswith(b"HTTP/1.1 503")


@pytest.mark.slow
def test_pages_of_other_sites_are_refused_and_keys_allow_them(serve, saved_models, tmp_path):
    server = serve(saved_models)
    foreign = {"Origin": "https://elsewhere.example"}
    assert server.post("/v2/repository/models/sums/unload", {}, **foreign).status == 403
    assert server.post(GENERATE, {"input_0": 2}, **foreign).status == 403
    assert server.get("/v2", Host="elsewhere.example").status == 403
    assert server.get("/v2/models/sums/ready").status == 200
    keys = tmp_path / "keys"
    keys.write_text(f"ann:{ANN}\n")
    with_keys = serve(saved_models, "--api-keys", keys)
    assert with_keys.post(GENERATE, {"input_0": 2}, X_API_Key=ANN, **foreign).status == 200


@pytest.mark.slow
def test_a_head_that_is_too_large_is_refused_however_it_comes(serve, saved_models):
    server = serve(saved_models)
    connection = server.connect()
    connection.sendall(request_bytes(GENERATE, {"input_0": 2}, f"X-Padding: {'x' * 70_000}"))
    assert read_head(connection).startswith(b"HTTP/1.1 431")


@pytest.mark.slow
def test_what_is_no_http_is_answered_as_every_other_error(serve, saved_models):
    server = serve(saved_models)
    connection = server.connect()
    connection.sendall(b"\x16\x03\x01 nonsense\r\n\r\n")
    head = read_head(connection)
    assert head.startswith(b"HTTP/1.1 400")
    assert b"application/json" in head


@pytest.mark.slow
def test_a_model_that_hangs_is_replaced_where_that_is_wanted(serve, gated, tmp_path):
    folder, gate = gated
    config = tmp_path / "server.toml"
    config.write_text("replace_hung = true\n[limits]\nhung_seconds = 0.5\ndrain_seconds = 0.1\n")
    server = serve(folder, "--config", config)
    waiting = server.connect()
    waiting.sendall(request_bytes("/v2/models/gated/generate", {"input_0": 9}))
    assert read_head(waiting).startswith(b"HTTP/1.1 503")
    gate.touch()
    server.wait_for(lambda: server.get("/v2/health/ready").status == 200)
    assert server.post("/v2/models/gated/generate", {"input_0": 2}).status == 200
    assert "model is replaced" in server.log.read_text()


@pytest.mark.slow
def test_a_log_that_nobody_reads_holds_nobody_up(saved_models):
    paths = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    reading, writing = os.pipe()
    command = [*START, str(saved_models), "--port", "0", "--threads", "1", "--access-log"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=writing, text=True, env={**os.environ, "PYTHONPATH": paths}
    ) as process:
        os.close(writing)
        server = RunningServer.__new__(RunningServer)
        server.host, server.port = "127.0.0.1", int(process.stdout.readline().split(" serves ")[0].rpartition(":")[2])
        server.key = None
        path = f"/v2/models/counter?{'x' * 200}"
        for _ in range(600):  # more lines than the pipe has room for
            assert server.get(path).status == 200
        assert server.post(GENERATE, {"input_0": 2}).status == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT_S) == 0
    os.close(reading)
