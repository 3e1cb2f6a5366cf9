"""`serve`: what is given on the command line goes before the file, and the exit status tells how it ended."""

from __future__ import annotations

import pytest

import batchmaker.server
from batchmaker.errors import OptionError
from batchmaker.server.config import GrpcConfig


@pytest.fixture
def served(monkeypatch):
    """The settings with which the server would have been run, instead of running it."""
    seen = []

    def serve(config, on_ready, read):
        seen.append(config)
        on_ready(["http://127.0.0.1:1"], ["lstm", "gru"])
        return len(seen) == 1

    monkeypatch.setattr(batchmaker.server, "serve", serve)
    return seen


def test_the_defaults_serve_this_machine_only(command, served):
    done = command("serve", "lstm")
    assert done.exit_code == 0, done.output
    assert done.output == "ready: http://127.0.0.1:1 serves lstm, gru\n"
    (config,) = served
    assert (config.host, config.port, [model.source for model in config.models]) == ("127.0.0.1", 8000, ["lstm"])


def test_the_command_line_goes_before_the_file(command, served, tmp_path):
    path = tmp_path / "server.toml"
    path.write_text(
        'port = 1\nhost = "::1"\n[limits]\nmax_in_flight = 2\nmax_streams = 3\n[[models]]\nsource = "gru"\n'
    )
    options = [
        "--config",
        path,
        "--port",
        0,
        "--max-in-flight",
        5,
        "--max-body-mb",
        2,
        "--max-sequences",
        7,
        "--sequence-idle-seconds",
        1.5,
        "--policy",
        "serial",
        "--access-log",
    ]
    command("serve", "lstm", *options)
    (config,) = served
    assert (config.host, config.port) == ("::1", 0)
    limits = config.limits
    assert (limits.max_in_flight, limits.max_streams, limits.max_body_bytes) == (5, 3, 2 << 20)
    assert (limits.max_sequences, limits.sequence_idle_seconds) == (7, 1.5)
    assert [(model.source, model.policy) for model in config.models] == [("gru", "serial"), ("lstm", "serial")]
    assert config.log.access


def test_the_environment_goes_before_the_file_and_the_command_line_before_both(command, served, tmp_path, monkeypatch):
    path = tmp_path / "server.toml"
    path.write_text('port = 1\nadmin_port = 1\nhost = "::1"\n')
    monkeypatch.setenv("BATCHMAKER_ADMIN_PORT", "2")
    monkeypatch.setenv("BATCHMAKER_PORT", "2")
    monkeypatch.setenv("BATCHMAKER_MODELS", '[{"source": "gru"}]')
    assert command("serve", "--config", path, "--port", 3).exit_code == 0
    (config,) = served
    assert (config.host, config.admin_port, config.port) == ("::1", 2, 3)
    assert [model.source for model in config.models] == ["gru"]


def test_a_misspelt_variable_is_refused(command, monkeypatch):
    monkeypatch.setenv("BATCHMAKER_LOG_LEVEL", "debug")
    error = command("serve", "lstm").exception
    assert isinstance(error, OptionError)
    assert "Did you mean BATCHMAKER_LOG__LEVEL" in str(error)


def test_the_command_line_makes_every_model_deterministic(command, served, tmp_path):
    path = tmp_path / "server.toml"
    path.write_text('[[models]]\nsource = "gru"\n')
    command("serve", "lstm", "--config", path, "--deterministic")
    command("serve", "lstm", "--config", path)
    first, second = ([entry.options.deterministic for entry in config.entries()] for config in served)
    assert (first, second) == ([True, True], [False, False])


def test_pings_of_grpc_are_set_by_the_names_that_triton_has(command, served, tmp_path):
    path = tmp_path / "server.toml"
    path.write_text("[grpc]\nkeepalive_time_ms = 1\nhttp2_max_ping_strikes = 9\n")
    options = [
        "--grpc-keepalive-time", 11, "--grpc-keepalive-timeout", 12, "--no-grpc-keepalive-permit-without-calls",
        "--grpc-http2-max-pings-without-data", 0, "--grpc-http2-min-recv-ping-interval-without-data", 13,
    ]  # fmt: skip
    assert command("serve", "lstm", "--config", path, *options).exit_code == 0
    assert served[0].grpc == GrpcConfig(
        keepalive_time_ms=11, keepalive_timeout_ms=12, keepalive_permit_without_calls=False,
        http2_max_pings_without_data=0, http2_min_recv_ping_interval_without_data_ms=13, http2_max_ping_strikes=9,
    )  # fmt: skip


def test_the_exit_status_tells_what_was_not_finished(command, served):
    assert command("serve", "lstm").exit_code == 0
    assert command("serve", "lstm").exit_code == 1


def test_a_file_with_a_misspelt_option_is_refused(command, tmp_path):
    path = tmp_path / "server.toml"
    path.write_text("[limits]\nmax_stream = 3\n")
    error = command("serve", "lstm", "--config", path).exception
    assert isinstance(error, OptionError)
    assert "Did you mean 'limits.max_streams'" in str(error)


def test_help_teaches_how_to_ask(command):
    text = command("serve", "--help").output
    assert "curl localhost:8000/v2/models/lstm/generate" in text
    assert "SIGTERM" in text
