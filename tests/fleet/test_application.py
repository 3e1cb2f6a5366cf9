"""Settings of a fleet: from a command line, from `serve run`, and as a file for `serve deploy`."""

from __future__ import annotations

import importlib.util

import msgspec
import pytest
import yaml
from typer.testing import CliRunner

from batchmaker.cli.main import app
from batchmaker.errors import OptionError
from batchmaker.fleet.on_ray import cpus_of
from batchmaker.fleet.serve_application import application, read_settings, write_application
from batchmaker.fleet.server import check_fleet, replica_config
from batchmaker.server.config import Config, FleetConfig, ModelEntry, TlsConfig

HAS_RAY = importlib.util.find_spec("ray") is not None
LSTM = ModelEntry(source="lstm")


def test_settings_of_serve_run_are_texts():
    config = read_settings({"models": "lstm b=gru:hidden=8", "replicas": "3", "grpc_port": "0"})
    assert [model.source for model in config.models] == ["lstm", "b=gru:hidden=8"]
    assert (config.fleet.replicas, config.port, config.grpc_port) == (3, 0, 0)
    assert read_settings({"models": "lstm"}).fleet.replicas == 1


def test_settings_that_cannot_be_used_are_named():
    with pytest.raises(OptionError, match="nothing to serve"):
        read_settings({})
    with pytest.raises(OptionError, match="unknown field `replcas`"):
        read_settings({"models": "lstm", "replcas": 2})


def test_a_written_file_holds_the_same_settings(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    config = Config(models=[LSTM, ModelEntry(source="m=mine")], port=9000, fleet=FleetConfig(replicas="auto"))
    write_application(config, tmp_path / "serve.yaml")
    content = yaml.safe_load((tmp_path / "serve.yaml").read_text())
    assert content["proxy_location"] == "Disabled"
    (entry,) = content["applications"]
    assert entry["import_path"] == "batchmaker.fleet:application"
    (front,) = entry["deployments"]
    again = msgspec.convert(front["user_config"], Config)
    assert [model.source for model in again.models] == ["lstm", f"m={tmp_path / 'mine'}"]
    assert (again.port, again.fleet) == (9000, config.fleet)
    assert "args" not in entry, "where these change, Serve replaces the front"
    assert front["graceful_shutdown_timeout_s"] > config.limits.drain_seconds


def test_the_command_writes_it(tmp_path):
    file = tmp_path / "serve.yaml"
    done = CliRunner().invoke(app, ["serve", "lstm", "--replicas", "2", "--write-config", str(file)])
    assert done.exit_code == 0, done.output
    content = yaml.safe_load(file.read_text())
    assert content["applications"][0]["deployments"][0]["user_config"]["fleet"]["replicas"] == 2


def test_wrong_options_are_refused_before_anything_starts():
    for text in ("0", "many", "-1"):
        done = CliRunner().invoke(app, ["serve", "lstm", "--replicas", text])
        assert isinstance(done.exception, OptionError)
        assert "above 0, or auto" in str(done.exception)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Config(models=[LSTM], admin_port=1, fleet=FleetConfig(replicas=1)), "no admin port"),
        (Config(models=[LSTM], fleet=FleetConfig(replicas=0)), "at least 1"),
        (Config(models=[LSTM], fleet=FleetConfig(cpus=0)), "above 0"),
        (Config(models=[LSTM], fleet=FleetConfig(autoscale="wrok:target=1")), "work"),
    ],
)
def test_a_fleet_that_cannot_be_is_refused(config, message):
    with pytest.raises(OptionError, match=message):
        check_fleet(config)


@pytest.mark.skipif(HAS_RAY, reason="Ray is installed")
def test_without_ray_the_error_says_how_to_get_it():
    with pytest.raises(OptionError, match=r"pip install 'batchmaker\[ray\]'"):
        application({"models": "lstm"})
    done = CliRunner().invoke(app, ["serve", "lstm", "--replicas", "2"])
    assert "pip install" in str(done.exception)


def test_replicas_get_what_is_not_the_fronts():
    config = Config(models=[LSTM], grpc_port=8001, tls=TlsConfig(cert="c", key="k"), page="p", hosts=["h"])
    one = replica_config(config, has_keys=False)
    assert (one.port, one.grpc_port, one.tls.cert, one.page, one.hosts) == (0, 0, None, None, [])
    assert one.limits.max_key_sequences == config.limits.max_sequences
    assert one.limits.max_client_connections == config.limits.max_connections


def test_a_replica_has_a_core_for_each_compute_thread():
    models = [ModelEntry(source="lstm", workers=2, threads=3), LSTM]
    assert cpus_of(Config(models=models)) == 6
    assert cpus_of(Config(models=models, fleet=FleetConfig(cpus=0.5))) == 0.5
