"""A fleet's front as a process: signals, TLS, and a log that nobody reads. Its replicas are servers in its threads."""

from __future__ import annotations

import http.client
import os
import signal
import ssl
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from server_process import LIMIT_S, RunningServer, make_certificate, request_bytes

HERE = Path(__file__).resolve().parent
START = [sys.executable, str(HERE / "front_in_a_process.py"), "serve", "--replicas", "1"]
GENERATE = "/v2/models/counter/generate"
ANN, BOB = "a" * 24, "b" * 24

pytestmark = pytest.mark.slow


@pytest.fixture
def front(tmp_path):
    running = []

    def start(*arguments):
        running.append(RunningServer(tuple(map(str, arguments)), tmp_path / f"log{len(running)}", START))
        return running[-1]

    yield start
    for server in running:
        server.close()


@pytest.fixture
def gate(models):
    models[1].unlink(missing_ok=True)
    yield models[1]
    models[1].touch()


def routed(server):
    return sum(one["routed"] for one in server.get("/v2/replicas").json)


def test_one_signal_finishes_what_was_accepted(front, models, gate):
    server = front(models[0])
    waiting = server.connect()
    waiting.sendall(request_bytes("/v2/models/gated/generate", {"input_0": 3}))
    server.wait_for(lambda: routed(server) == 1)
    server.process.send_signal(signal.SIGTERM)
    server.wait_for(lambda: server.get("/v2/health/ready").status == 503)
    assert server.post(GENERATE, {"input_0": 2}).status == 503
    gate.touch()
    assert waiting.recv(65536).startswith(b"HTTP/1.1 200")
    assert server.process.wait(LIMIT_S) == 0


@pytest.mark.parametrize("numbers", [(signal.SIGTERM, signal.SIGTERM), (signal.SIGINT, signal.SIGTERM)])
def test_a_second_signal_ends_a_front_that_drains_for_a_model_that_hangs(front, models, gate, numbers):
    server = front(models[0], "--drain-seconds", 3600)
    server.connect().sendall(request_bytes("/v2/models/gated/generate", {"input_0": 3}))
    server.wait_for(lambda: routed(server) == 1)
    server.process.send_signal(numbers[0])
    server.wait_for(lambda: server.get("/v2/health/ready").status == 503)
    server.process.send_signal(numbers[1])
    assert server.process.wait(60) == 1


def test_a_second_signal_ends_a_front_whose_replica_never_starts(tmp_path):
    loading = tmp_path / "loading"
    (tmp_path / "slow.py").write_text(
        f"import pathlib, time\npathlib.Path({str(loading)!r}).touch()\ntime.sleep(3600)\n"
    )
    paths = os.pathsep.join(filter(None, [str(HERE.parent / "server"), os.environ.get("PYTHONPATH")]))
    with subprocess.Popen([*START, str(tmp_path / "slow.py")], env={**os.environ, "PYTHONPATH": paths}) as process:
        RunningServer.wait_for(None, loading.exists)
        for _ in range(2):
            process.send_signal(signal.SIGTERM)
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.5)  # signals that come together are one
        assert process.wait(60) != 0


def test_a_signal_takes_over_keys_and_models_and_a_mistake_can_be_mended(front, models, tmp_path):
    config, keys = tmp_path / "server.toml", tmp_path / "keys"
    keys.write_text(f"ann:{ANN}\nbob:{BOB}\n")

    def settings(*sources):
        config.write_text(
            f"auth = {{keys = {str(keys)!r}}}\nfleet = {{replicas = 1}}\nport = 0\n"
            + "".join(f"[[models]]\nsource = {str(source)!r}\n" for source in sources)
        )

    settings(models[0] / "counter")
    server = front("--config", config)
    assert server.post(GENERATE, {"input_0": 2}, X_API_Key=BOB).status == 200
    assert server.post("/v2/models/scales/generate", {"input_0": [2]}, X_API_Key=ANN).status == 404

    settings(models[0] / "counter", tmp_path / "nothing")
    server.process.send_signal(signal.SIGHUP)
    server.wait_for(lambda: "did not start" in server.log.read_text() or "not updated" in server.log.read_text())
    assert server.post(GENERATE, {"input_0": 2}, X_API_Key=ANN).status == 200

    keys.write_text(f"ann:{ANN}\n")
    settings(models[0] / "counter", models[0] / "scales")
    server.process.send_signal(signal.SIGHUP)
    server.wait_for(lambda: server.post(GENERATE, {"input_0": 2}, X_API_Key=BOB).status == 401)
    seen = set()
    while "fleet is updated" not in server.log.read_text():
        seen.add(server.post(GENERATE, {"input_0": 2}, X_API_Key=ANN).status)
    assert seen <= {200}
    assert server.post("/v2/models/scales/generate", {"input_0": [2]}, X_API_Key=ANN).status == 200
    assert server.terminate() == 0


def test_tls_ends_at_the_front_and_a_new_certificate_is_taken_over(front, models, tmp_path):
    make_certificate(tmp_path, "first")
    (tmp_path / "server.toml").write_text('tls = {cert = "cert.pem", key = "key.pem"}\n')
    server = front(models[0], "--grpc-port", 0, "--config", tmp_path / "server.toml")
    assert server.scheme == "https"

    def calls_with(certificate):
        context = ssl.create_default_context(cadata=certificate.decode())
        connection = http.client.HTTPSConnection(server.host, server.port, timeout=LIMIT_S, context=context)
        connection.request("POST", GENERATE, b'{"input_0": 3}')
        answer = connection.getresponse()
        assert (answer.status, b'"output_0":[1,2,3]' in answer.read()) == (200, True)
        connection.close()
        with grpc.secure_channel(server.grpc_address, grpc.ssl_channel_credentials(certificate)) as channel:
            assert channel.unary_unary("/inference.GRPCInferenceService/ServerReady")(b"", timeout=LIMIT_S)

    first = (tmp_path / "cert.pem").read_bytes()
    calls_with(first)
    plain = server.connect()
    plain.sendall(b"GET /v2/health/ready HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert b"200" not in plain.recv(65536)
    make_certificate(tmp_path, "second")
    server.process.send_signal(signal.SIGHUP)
    server.wait_for(lambda: "fleet is updated" in server.log.read_text())
    calls_with((tmp_path / "cert.pem").read_bytes())
    with pytest.raises(ssl.SSLError):
        calls_with(first)


def test_a_log_that_nobody_reads_holds_nobody_up(models):
    paths = os.pathsep.join(filter(None, [str(HERE.parent / "server"), os.environ.get("PYTHONPATH")]))
    reading, writing = os.pipe()
    command = [*START, str(models[0]), "--port", "0", "--threads", "1", "--access-log"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=writing, text=True, env={**os.environ, "PYTHONPATH": paths}
    ) as process:
        os.close(writing)
        server = RunningServer.__new__(RunningServer)
        server.host, server.port = "127.0.0.1", int(process.stdout.readline().split(" serves ")[0].rpartition(":")[2])
        for _ in range(600):  # more lines than the pipe has room for
            assert server.get(f"/v2/models/counter?{'x' * 200}").status == 200
        assert server.post(GENERATE, {"input_0": 2}).status == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT_S) == 0
    os.close(reading)
