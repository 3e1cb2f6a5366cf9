"""gRPC with keys, TLS and clients that are slow, as users meet them."""

from __future__ import annotations

import shutil
import signal
import ssl
import subprocess
import threading
from contextlib import closing

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from server_process import LIMIT_S, START, make_certificate
from tritonclient.grpc import service_pb2

LONG = 90_000
SERVICE = "inference.GRPCInferenceService"
ANN, BOB, EVE = "a" * 24, "b" * 24, "e" * 24


@pytest.fixture(scope="module")
def secure(serve, saved_models, tmp_path_factory):
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl to make a certificate")
    folder = tmp_path_factory.mktemp("secrets")
    make_certificate(folder, "localhost")
    (folder / "keys").write_text(f"ann:{ANN}\nbob:{BOB}\neve:{EVE}\n")
    config = folder / "server.toml"
    config.write_text(
        """
        grpc_port = 0
        auth = {keys = "keys", rate = 0.001, burst = 12, control_keys = ["ann"]}
        tls = {cert = "cert.pem", key = "key.pem"}
        log = {access = true}
        limits = {body_seconds = 3, write_seconds = 3}
        """
    )
    return serve(saved_models, "--config", config), (folder / "cert.pem").read_bytes()


@pytest.fixture
def secure_channel(secure):
    server, certificate = secure
    credentials = grpc.ssl_channel_credentials(certificate)
    small = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]
    with grpc.secure_channel(server.grpc_address, credentials, options=small) as channel:
        yield channel


def test_calls_need_tls_and_a_key_but_probes_no_key(secure, secure_channel):
    server, _ = secure
    assert "grpcs://" in server.ready_line
    assert secure_channel.unary_unary(f"/{SERVICE}/ServerReady")(b"", timeout=LIMIT_S)
    metadata = secure_channel.unary_unary(f"/{SERVICE}/ServerMetadata")
    for wrong in ([], [("x-api-key", "wrong" * 5)]):
        with pytest.raises(grpc.RpcError) as caught:
            metadata(b"", metadata=wrong, timeout=LIMIT_S)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert metadata(b"", metadata=[("x-api-key", ANN)], timeout=LIMIT_S)
    assert metadata(b"", metadata=[("authorization", f"Bearer {ANN}"), ("x-request-id", "mine")], timeout=LIMIT_S)
    server.wait_for(lambda: '"request_id":"mine","method":"gRPC"' in server.log.read_text())
    assert ANN not in server.log.read_text()


def test_only_some_keys_load_and_each_has_its_rate(secure_channel):
    load = secure_channel.unary_unary(f"/{SERVICE}/RepositoryModelLoad")
    asked = service_pb2.RepositoryModelLoadRequest(model_name="sums").SerializeToString()
    seen = []
    for _ in range(14):
        with pytest.raises(grpc.RpcError) as caught:
            load(asked, metadata=[("x-api-key", BOB)], timeout=LIMIT_S)
        seen.append(caught.value.code())
    assert seen[0] is grpc.StatusCode.PERMISSION_DENIED
    assert seen[-1] is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_every_request_of_a_stream_counts_for_its_key(secure_channel):
    asked = service_pb2.ModelInferRequest(model_name="counter")
    asked.inputs.add(name="input_0", datatype="INT64", shape=[1], contents={"int64_contents": [1]})
    streaming = secure_channel.stream_stream(
        f"/{SERVICE}/ModelStreamInfer", response_deserializer=service_pb2.ModelStreamInferResponse.FromString
    )
    requests = iter([asked.SerializeToString()] * 20)
    errors = [answer.error_message for answer in streaming(requests, metadata=[("x-api-key", EVE)], timeout=LIMIT_S)]
    assert errors[:12] == [""] * 12
    assert "too many requests" in errors[-1]
    assert len(errors) == 20


def test_a_request_that_does_not_arrive_is_given_up(secure_channel):
    slow = secure_channel.stream_unary(f"/{SERVICE}/ModelInfer")
    never = threading.Event()

    def nothing():
        never.wait(LIMIT_S)
        yield b""

    with pytest.raises(grpc.RpcError, match="did not arrive within") as caught:
        slow(nothing(), metadata=[("x-api-key", ANN)], timeout=LIMIT_S)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    never.set()


def test_a_client_that_does_not_read_its_stream_is_given_up(secure, secure_channel):
    server, certificate = secure
    asked = service_pb2.ModelInferRequest(model_name="counter")
    asked.inputs.add(name="input_0", datatype="INT64", shape=[1], contents={"int64_contents": [LONG]})
    asked.parameters["triton_enable_empty_final_response"].bool_param = True
    streaming = secure_channel.stream_stream(f"/{SERVICE}/ModelStreamInfer")
    metadata = [("x-api-key", ANN), ("x-request-id", "never-read")]
    never_read = streaming(iter([asked.SerializeToString()]), metadata=metadata, timeout=LIMIT_S)
    server.wait_for(lambda: '"request_id":"never-read"' in server.log.read_text())
    never_read.cancel()
    credentials, key = grpc.ssl_channel_credentials(certificate), {"x-api-key": ANN}
    one = triton.InferInput("input_0", [1], "INT64")
    one.set_data_from_numpy(np.array([1]))
    with closing(triton.InferenceServerClient(server.grpc_address, ssl=True, creds=credentials)) as client:
        client.infer("counter", [one], headers=key)  # the engine has seen what came before
        (entry,) = client.get_inference_statistics("counter", headers=key).model_stats
    assert entry.inference_stats.fail.count == 1


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make certificates")
def test_a_new_certificate_is_used_after_a_signal_and_open_connections_go_on(serve, saved_models, tmp_path):
    make_certificate(tmp_path, "first")
    server = serve(
        saved_models, "--grpc-port", 0, "--tls-cert", tmp_path / "cert.pem", "--tls-key", tmp_path / "key.pem"
    )
    host, port = server.grpc_address.split(":")
    first = (tmp_path / "cert.pem").read_text()
    assert ssl.get_server_certificate((host, int(port))) == first
    with grpc.secure_channel(server.grpc_address, grpc.ssl_channel_credentials(first.encode())) as channel:
        live = channel.unary_unary(f"/{SERVICE}/ServerLive")
        assert live(b"", timeout=LIMIT_S)
        (tmp_path / "key.pem").write_text("no key")
        said_of(server, '"event":"not reloaded"')
        assert ssl.get_server_certificate((host, int(port))) == first
        make_certificate(tmp_path, "second")
        said_of(server, '"event":"reloaded"')
        second = (tmp_path / "cert.pem").read_text()
        assert ssl.get_server_certificate((host, int(port))) == second != first
        assert live(b"", timeout=LIMIT_S)
    with grpc.secure_channel(server.grpc_address, grpc.ssl_channel_credentials(second.encode())) as channel:
        assert channel.unary_unary(f"/{SERVICE}/ServerLive")(b"", timeout=LIMIT_S)


def said_of(server, word):
    """Send SIGHUP and wait for what the log says of it."""
    server.process.send_signal(signal.SIGHUP)
    server.wait_for(lambda: word in server.log.read_text())


@pytest.mark.slow
def test_one_port_is_not_shared_by_two_servers(secure):
    server, _ = secure
    port = server.grpc_address.rpartition(":")[2]
    command = [*START, "lstm:hidden=4,vocabulary_size=9", "--port", "0", "--grpc-port", port]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 2
    said = " ".join((done.stderr + done.stdout).split())
    assert f"127.0.0.1:{port} cannot be used" in said
    assert "--grpc-port" in said
