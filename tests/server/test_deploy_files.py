"""The container, the compose file, the unit of systemd and the runbook say what is true of the server."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from deployed import DEPLOY, METRIC, REPOSITORY, RUNBOOK, documents, exported
from typer.main import get_command

from batchmaker.cli.main import app
from batchmaker.server import listening
from batchmaker.server.config import read_config
from insides import end_within_s

AFTER_THE_DRAIN_S = 2 * end_within_s() + 2 * listening.LAST_WRITES_S
UNIT = DEPLOY / "systemd" / "batchmaker.service"


def flags() -> set[str]:
    """The options of `batchmaker serve`."""
    command = get_command(app)
    serve: Any = command.get_command(None, "serve")
    return {name for parameter in serve.params for name in parameter.opts if name.startswith("--")}


def test_every_flag_in_these_files_is_one_of_the_server():
    used: set[str] = set()
    for path in (UNIT, DEPLOY / "Containerfile"):
        for line in re.findall(r"^(?:ExecStart=|CMD \[\"--).*$", path.read_text(), re.MULTILINE):
            used |= set(re.findall(r"--[a-z][a-z-]+", line))
    for path in ("base/deployment.yaml", "kserve/servingruntime.yaml"):
        spec = documents(f"kubernetes/{path}")[0]["spec"]
        for container in spec.get("containers") or spec["template"]["spec"]["containers"]:
            used |= {one.partition("=")[0] for one in container["args"] if one.startswith("--")}
    assert {"--config", "--admin-port"} <= used
    assert sorted(used - flags()) == []


def test_the_settings_of_the_container_are_those_that_compose_opens_and_prometheus_asks():
    config = read_config(DEPLOY / "server.toml")
    ports = [config.port, config.grpc_port, config.admin_port]
    containerfile = (DEPLOY / "Containerfile").read_text()
    assert re.search(r"^EXPOSE (.+)$", containerfile, re.MULTILINE)[1].split() == [str(port) for port in ports]
    assert f"http://127.0.0.1:{config.admin_port}/v2/health/ready" in containerfile
    (compose,) = documents("compose.yaml")
    server = compose["services"]["batchmaker"]
    assert server["ports"] == [f"127.0.0.1:{port}:{port}" for port in ports[:2]]
    assert float(server["stop_grace_period"].removesuffix("s")) >= config.limits.drain_seconds + AFTER_THE_DRAIN_S
    (asked,) = documents("prometheus/prometheus.yaml")
    (job,) = asked["scrape_configs"]
    assert job["static_configs"] == [{"targets": [f"batchmaker:{config.admin_port}"]}]
    (source,) = documents("grafana/provisioning/datasources/prometheus.yaml")
    assert source["datasources"][0]["url"] == "http://prometheus:9090"


def test_every_file_that_compose_mounts_is_there_and_lies_where_it_is_looked_for():
    (compose,) = documents("compose.yaml")
    mounted = {}
    for service in compose["services"].values():
        for volume in service["volumes"]:
            source, target, *_ = volume.split(":")
            if source.startswith("."):
                assert (DEPLOY / source).exists(), source
                mounted[target] = DEPLOY / source
            else:
                assert source in compose["volumes"]
    (provider,) = documents("grafana/provisioning/dashboards/batchmaker.yaml")
    folder = provider["providers"][0]["options"]["path"]
    assert any(target.startswith(f"{folder}/") for target in mounted)
    command = " ".join(compose["services"]["prometheus"]["command"])
    (settings,) = re.findall(r"--config.file=(\S+)", command)
    assert (mounted[str(Path(settings).parent)] / Path(settings).name).is_file()
    assert (DEPLOY / compose["services"]["batchmaker"]["build"]["context"]).resolve() == REPOSITORY


def test_the_container_installs_what_the_package_asks_for():
    containerfile = (DEPLOY / "Containerfile").read_text()
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    (torch,) = [one for one in project["dependencies"] if one.startswith("torch")]
    assert f"'{torch}'" in containerfile
    extras = re.findall(r"EXTRAS=\[([\w,]+)\]", containerfile)
    assert all({"server", "grpc"} <= set(names.split(",")) <= set(project["optional-dependencies"]) for names in extras)
    assert len(extras) == 2
    copied = [
        word for line in re.findall(r"^COPY ([^-].*)$", containerfile, re.MULTILINE) for word in line.split()[:-1]
    ]
    kept = re.findall(r"^!(\S+)$", (DEPLOY / "Containerfile.dockerignore").read_text(), re.MULTILINE)
    assert sorted(copied) == sorted(kept)
    assert all((REPOSITORY / path).exists() for path in copied)


def test_the_unit_gives_the_server_time_to_end():
    unit = UNIT.read_text()
    (stop,) = re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)
    assert float(stop) >= read_config(DEPLOY / "server.toml").limits.drain_seconds + AFTER_THE_DRAIN_S
    assert "Type=notify\n" in unit


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd")
def test_systemd_finds_no_fault_with_the_unit(tmp_path):
    unit = UNIT.read_text().replace("/opt/batchmaker/bin/batchmaker", sys.executable)
    (tmp_path / UNIT.name).write_text(unit)
    done = subprocess.run(["systemd-analyze", "verify", tmp_path / UNIT.name], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_every_metric_that_the_runbook_names_is_one_of_the_server():
    named = set(METRIC.findall(RUNBOOK.read_text(encoding="utf-8"))) - {"nv_inference_"}
    assert len(named) > 25
    assert sorted(name for name in named if name not in exported() and f"{name}_bucket" not in exported()) == []


def test_every_line_of_the_log_that_the_runbook_quotes_is_one_that_is_written():
    sources = "\n".join(path.read_text() for path in (REPOSITORY / "src" / "batchmaker").rglob("*.py"))
    sources = re.sub(r'"\s*\n\s*f?"', "", sources)  # texts that go over several lines
    runbook = " ".join(RUNBOOK.read_text(encoding="utf-8").split())
    said = set(re.findall(r"`([a-z][a-z_']*(?: [a-z']+)+)`", runbook))
    assert {"not reloaded", "request failed", "the engine has failed"} <= said
    commands = ("kubectl", "systemctl", "ulimit", "batchmaker")
    assert sorted(one for one in said if one not in sources and not one.startswith(commands)) == []
