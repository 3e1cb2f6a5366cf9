"""Keys, TLS and the command line, as users meet them."""

from __future__ import annotations

import http.client
import json
import logging
import shutil
import ssl
import subprocess

import pytest
from server_process import LIMIT_S
from typer.testing import CliRunner

from batchmaker.cli.main import app
from batchmaker.errors import OptionError

ANN, BOB = "a" * 24, "b" * 24


@pytest.fixture(scope="module")
def server(serve, saved_models, tmp_path_factory):
    folder = tmp_path_factory.mktemp("secrets")
    (folder / "keys").write_text(f"ann:{ANN}\nbob:{BOB}\n")
    config = folder / "server.toml"
    config.write_text('[auth]\nkeys = "keys"\nrate = 0.001\nburst = 12\ncontrol_keys = ["ann"]\n')
    return serve(saved_models, "--config", config, "--access-log")


def test_calls_need_a_key_but_probes_do_not(server):
    assert server.get("/v2/health/live").status == server.get("/v2/health/ready").status == 200
    refused = server.get("/v2")
    assert (refused.status, refused.headers["www-authenticate"]) == (401, "Bearer")
    assert server.get("/metrics").status == 401
    assert server.get("/v2", X_API_Key="wrong" * 5).status == 401
    assert server.get("/v2", X_API_Key=ANN).status == 200
    assert server.get("/v2", Authorization=f"Bearer {ANN}").status == 200


def test_only_some_keys_load_and_unload(server):
    assert server.post("/v2/repository/models/sums/unload", {}, X_API_Key=BOB).status == 403
    assert server.post("/v2/repository/models/sums/unload", {}, X_API_Key=ANN).status == 200
    assert server.post("/v2/repository/models/sums/load", {}, X_API_Key=ANN).status == 200


def test_a_key_has_its_rate(server):
    answers = [server.get("/v2", X_API_Key=BOB) for _ in range(13)]
    assert answers[-1].status == 429
    assert int(answers[-1].headers["retry-after"]) >= 1


def test_calls_are_logged_with_their_ids_and_without_keys(server):
    server.get("/v2", X_Request_Id="find-me")
    server.wait_for(lambda: "find-me" in server.log.read_text())
    lines = [json.loads(line) for line in server.log.read_text().splitlines()]
    (line,) = [line for line in lines if line.get("request_id") == "find-me"]
    assert (line["event"], line["status"], line["path"], line["method"]) == ("call", 401, "/v2", "GET")
    assert ANN not in server.log.read_text()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make a certificate")
def test_tls_is_spoken_with_a_certificate(serve, tmp_path):
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", cert],
        check=True, capture_output=True,
    )  # fmt: skip
    server = serve("lstm:hidden=4,vocabulary_size=9", "--tls-cert", cert, "--tls-key", key)
    assert server.scheme == "https"
    trusted = ssl.create_default_context(cafile=str(cert))
    connection = http.client.HTTPSConnection(server.host, server.port, context=trusted, timeout=LIMIT_S)
    connection.request("POST", "/v2/models/lstm/generate", json.dumps({"input_0": [1, 2]}))
    assert len(json.loads(connection.getresponse().read())["output_0"]) == 4
    connection.close()


@pytest.fixture
def refused():
    """Run `batchmaker serve ARGUMENTS` in this process and return what it says why it does not."""
    loggers = [logging.getLogger(name) for name in ("batchmaker", "uvicorn")]
    kept = [(logger.handlers, logger.propagate, logger.level) for logger in loggers]

    def run(*arguments) -> str:
        done = CliRunner().invoke(app, ["serve", *map(str, arguments)])
        assert isinstance(done.exception, OptionError), done.output
        return str(done.exception)

    yield run
    for logger, (logger.handlers, logger.propagate, level) in zip(loggers, kept, strict=True):
        logger.setLevel(level)


def test_what_cannot_be_served_is_said(server, refused, tmp_path):
    none = tmp_path / "none"
    assert "there is nothing to serve" in refused()
    assert "Did you mean 'lstm'" in refused("lstn")
    assert "cannot be used" in refused("lstm:hidden=4", "--port", server.port)
    assert "both a certificate and its key" in refused("lstm", "--tls-cert", none)
    assert "certificate or key cannot be used" in refused("lstm", "--tls-cert", none, "--tls-key", none, "--port", 0)
    assert "API keys cannot be read" in refused("lstm", "--api-keys", none)
    assert "Invalid enum value 'loud'" in refused("lstm", "--log-level", "loud")
