"""The manifests in deploy/kubernetes: against Kubernetes' schemas, against each other, and against a real server.

KServe's schemas do not come as a package: of its ServingRuntime the fields that are used here are checked by name and
type, and its container as that of a pod.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from deployed import DEPLOY, documents, exported
from server_process import RunningServer

from batchmaker.server import listening
from batchmaker.server.config import Config, read_config
from batchmaker.server.environment import with_environment
from batchmaker.server.limits import Limits
from insides import end_within_s

BASE = DEPLOY / "kubernetes" / "base"
OVERLAY = DEPLOY / "kubernetes" / "overlays" / "example"
KUSTOMIZATION = "kustomization.yaml"
MANIFESTS = sorted(path.name for path in BASE.glob("*.yaml") if path.name != KUSTOMIZATION)
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")
KEY = "k" * 20


def deployment() -> dict[str, Any]:
    (found,) = documents("kubernetes/base/deployment.yaml")
    return found


def pod() -> dict[str, Any]:
    return deployment()["spec"]["template"]["spec"]


def container() -> dict[str, Any]:
    (found,) = pod()["containers"]
    return found


def settings_text() -> str:
    (found,) = documents("kubernetes/base/configmap.yaml")
    return found["data"]["server.toml"]


def settings(tmp_path: Path) -> Config:
    (tmp_path / "server.toml").write_text(settings_text())
    return read_config(tmp_path / "server.toml")


def after_the_drain_s() -> float:
    """What ending may take after `drain_seconds`: engines, twice; last answers over HTTP and gRPC."""
    return 2 * end_within_s() + 2 * listening.LAST_WRITES_S


def validate(manifest: dict[str, Any]) -> None:
    schemas = pytest.importorskip("kubernetes_validate")
    schemas.validate(manifest, desired_version=schemas.latest_version(), strict=True)


@pytest.mark.parametrize("path", MANIFESTS)
def test_a_manifest_is_what_kubernetes_takes(path):
    for document in documents(f"kubernetes/base/{path}"):
        validate(document)


def kustomization(folder: Path) -> dict[str, Any]:
    (found,) = documents(str((folder / KUSTOMIZATION).relative_to(DEPLOY)))
    assert (found["apiVersion"], found["kind"]) == ("kustomize.config.k8s.io/v1beta1", "Kustomization")
    return found


def identity(manifest: dict[str, Any]) -> tuple[str, str, str]:
    return manifest["apiVersion"], manifest["kind"], manifest["metadata"]["name"]


def test_the_base_is_every_manifest_beside_it():
    assert kustomization(BASE)["resources"] == MANIFESTS


def test_the_overlay_changes_what_the_base_has():
    found = kustomization(OVERLAY)
    assert [(OVERLAY / path).resolve() for path in found["resources"]] == [BASE]
    known = {identity(one) for path in MANIFESTS for one in documents(f"kubernetes/base/{path}")}
    patches = [patch["path"] for patch in found["patches"]]
    assert sorted([*patches, KUSTOMIZATION]) == sorted(path.name for path in OVERLAY.iterdir())
    for patch in patches:
        (manifest,) = documents(f"kubernetes/overlays/example/{patch}")
        assert identity(manifest) in known
    assert [image["name"] for image in found["images"]] == [container()["image"].partition(":")[0]]


def test_the_overlay_s_variables_are_settings_that_go_before_the_file(tmp_path):
    (patch,) = documents("kubernetes/overlays/example/deployment.yaml")
    (one,) = patch["spec"]["template"]["spec"]["containers"]
    assert one["name"] == container()["name"]
    variables = {variable["name"]: variable["value"] for variable in one["env"]}
    changed = with_environment(settings(tmp_path), variables)
    assert (changed.log.level, changed.limits.max_in_flight) == ("warning", 256)
    assert pod()["enableServiceLinks"] is False


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl")
@pytest.mark.parametrize("folder", [BASE, OVERLAY], ids=lambda folder: folder.name)
def test_kustomize_makes_of_it_what_kubernetes_takes(folder):
    done = subprocess.run(["kubectl", "kustomize", folder], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    made = list(yaml.safe_load_all(done.stdout))
    assert len(made) == sum(len(documents(f"kubernetes/base/{path}")) for path in MANIFESTS)
    for manifest in made:
        validate(manifest)
    images = {one["image"] for manifest in made if manifest["kind"] == "Deployment"
              for one in manifest["spec"]["template"]["spec"]["containers"]}  # fmt: skip
    named = kustomization(folder).get("images", [{}])[0]
    assert images == ({f"{named['newName']}:{named['newTag']}"} if named else {container()["image"]})


def test_the_autoscaler_goes_by_a_gauge_of_the_server_and_alone_says_how_many_pods_there_are():
    (scaler,) = documents("kubernetes/base/horizontalpodautoscaler.yaml")
    spec = scaler["spec"]
    target = spec["scaleTargetRef"]
    assert (target["apiVersion"], target["kind"], target["name"]) == identity(deployment())
    (metric,) = spec["metrics"]
    assert metric["pods"]["metric"]["name"] == "batchmaker_requests_in_flight"
    assert "batchmaker_requests_in_flight" in exported()
    assert float(metric["pods"]["target"]["averageValue"]) < settings_limit()
    assert 2 <= spec["minReplicas"] < spec["maxReplicas"]
    assert "replicas" not in deployment()["spec"]


def settings_limit() -> int:
    """The requests of a model that a server accepts by the settings of the base."""
    return int(tomllib.loads(settings_text())["limits"].get("max_in_flight", Limits().max_in_flight))


def test_a_manifest_with_a_mistake_would_be_found():
    schemas = pytest.importorskip("kubernetes_validate")
    wrong = deployment()
    wrong["spec"]["template"]["spec"]["containers"][0]["readinesProbe"] = {}
    with pytest.raises(schemas.ValidationError, match="readinesProbe"):
        validate(wrong)


def test_everything_is_selected_by_the_labels_of_the_pods():
    labels = deployment()["spec"]["template"]["metadata"]["labels"]
    (budget,) = documents("kubernetes/base/poddisruptionbudget.yaml")
    selectors = [deployment()["spec"]["selector"]["matchLabels"], budget["spec"]["selector"]["matchLabels"]]
    selectors += [service["spec"]["selector"] for service in documents("kubernetes/base/service.yaml")]
    assert all(selector and selector.items() <= labels.items() for selector in selectors)


def test_ports_are_those_of_the_settings_wherever_they_are_named(tmp_path):
    config = settings(tmp_path)
    ports = {port["name"]: port["containerPort"] for port in container()["ports"]}
    assert ports == {"http": config.port, "grpc": config.grpc_port, "admin": config.admin_port}
    services = [port for service in documents("kubernetes/base/service.yaml") for port in service["spec"]["ports"]]
    assert {port["targetPort"] for port in services} == set(ports)
    assert all(port["port"] == ports[port["targetPort"]] for port in services)
    clients, _ = documents("kubernetes/base/service.yaml")
    assert "admin" not in [port["targetPort"] for port in clients["spec"]["ports"]]
    annotations = deployment()["spec"]["template"]["metadata"]["annotations"]
    assert int(annotations["prometheus.io/port"]) == config.admin_port
    assert {container()[probe]["httpGet"]["port"] for probe in PROBES} <= set(ports)


def test_the_pod_is_given_the_time_that_its_server_may_take_to_end(tmp_path):
    command = container()["lifecycle"]["preStop"]["exec"]["command"]
    assert command[0] == "sleep"
    needed = float(command[1]) + settings(tmp_path).limits.drain_seconds + after_the_drain_s()
    assert needed <= pod()["terminationGracePeriodSeconds"]


def test_what_the_settings_name_is_mounted(tmp_path):
    config = settings(tmp_path)
    mounts = {mount["mountPath"]: mount for mount in container()["volumeMounts"]}
    assert {mount["name"] for mount in mounts.values()} == {volume["name"] for volume in pod()["volumes"]}
    assert config.auth.keys is not None
    assert str(Path(config.auth.keys).parent) in mounts
    assert [model.source for model in config.models] == ["/models"]
    assert "/models" in mounts
    assert container()["args"] == ["--config", "/etc/batchmaker/server.toml"]
    assert "/etc/batchmaker" in mounts
    (claim,) = documents("kubernetes/base/models.yaml")
    claims = [
        volume["persistentVolumeClaim"]["claimName"] for volume in pod()["volumes"] if "persistentVolumeClaim" in volume
    ]
    assert claims == [claim["metadata"]["name"]]
    assert not any(inner != outer and inner.startswith(f"{outer}/") for inner in mounts for outer in mounts)


def test_nobody_is_root():
    containerfile = (DEPLOY / "Containerfile").read_text()
    (user,) = re.findall(r"^USER (\d+)$", containerfile, re.MULTILINE)
    assert f"useradd --uid {user} " in containerfile
    assert pod()["securityContext"]["runAsUser"] == runtime_container()["securityContext"]["runAsUser"] == int(user)
    for one in (container(), runtime_container()):
        assert one["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert one["securityContext"]["allowPrivilegeEscalation"] is False


def port_of(server: RunningServer, port: int) -> RunningServer:
    """The same server at another of its ports."""
    other = RunningServer.__new__(RunningServer)
    other.host, other.port = server.host, port
    return other


@pytest.mark.slow
def test_every_path_in_the_manifests_answers_at_its_port_of_a_server_with_these_settings(serve, saved_models, tmp_path):
    (tmp_path / "keys").write_text(f"ann:{KEY}\n")
    text = re.sub(r"(?m)^(\w*port) = \d+", r"\1 = 0", settings_text())
    text = text.replace("0.0.0.0", "127.0.0.1")
    text = text.replace("/run/secrets/batchmaker/keys", str(tmp_path / "keys"))
    text = text.replace('"/models"', f'"{saved_models}"')
    assert tomllib.loads(text)["port"] == 0
    (tmp_path / "server.toml").write_text(text)
    server = serve("--config", tmp_path / "server.toml")
    _, grpc, admin = map(int, re.findall(r"127\.0\.0\.1:(\d+)", server.ready_line))
    ports = {"http": server, "admin": port_of(server, admin)}
    for probe in PROBES:
        asked = container()[probe]["httpGet"]
        assert ports[asked["port"]].get(asked["path"]).status == 200, probe
    annotations = deployment()["spec"]["template"]["metadata"]["annotations"]
    assert b"batchmaker_ready 1" in ports["admin"].get(annotations["prometheus.io/path"]).content
    assert server.post("/v2/models/counter/generate", {"input_0": 2}).status == 401
    assert server.post("/v2/models/counter/generate", {"input_0": 2}, X_API_Key=KEY).status == 200
    assert server.get("/metrics", X_API_Key=KEY).status == 404
    assert server.grpc_address.endswith(f":{grpc}")


class ModelFormat(msgspec.Struct, forbid_unknown_fields=True, rename="camel"):
    name: str
    version: str
    auto_select: bool = False


class RuntimeSpec(msgspec.Struct, forbid_unknown_fields=True, rename="camel"):
    """Fields of KServe's v1alpha1.ServingRuntimeSpec, as far as they are used."""

    containers: list[dict[str, Any]]
    supported_model_formats: list[ModelFormat]
    protocol_versions: list[str]
    annotations: dict[str, str]


def runtime() -> RuntimeSpec:
    (found,) = documents("kubernetes/kserve/servingruntime.yaml")
    assert (found["apiVersion"], found["kind"]) == ("serving.kserve.io/v1alpha1", "ServingRuntime")
    return msgspec.convert(found["spec"], RuntimeSpec)


def runtime_container() -> dict[str, Any]:
    (found,) = runtime().containers
    return found


def test_the_runtime_of_kserve_has_the_container_that_kserve_looks_for():
    assert runtime_container()["name"] == "kserve-container"
    metadata = {"name": "predictor"}
    validate({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": runtime().containers}})
    (service,) = documents("kubernetes/kserve/inferenceservice.yaml")
    predictor = service["spec"]["predictor"]
    (model_format,) = runtime().supported_model_formats
    assert predictor["model"]["modelFormat"]["name"] == model_format.name
    assert predictor["model"]["protocolVersion"] in runtime().protocol_versions
    (drain,) = [
        float(one.partition("=")[2]) for one in runtime_container()["args"] if one.startswith("--drain-seconds=")
    ]
    assert predictor["terminationGracePeriodSeconds"] >= drain + after_the_drain_s()


@pytest.mark.slow
def test_the_runtimes_arguments_serve_a_saved_model_under_the_services_name(serve, saved_models):
    ports = {"--port": None, "--admin-port": None}
    arguments = []
    for argument in runtime_container()["args"]:
        flag, _, value = argument.partition("=")
        if flag in ports:
            ports[flag] = int(value)
            argument = f"{flag}=0"
        given = argument.replace("{{.Name}}", "translator").replace("/mnt/models", str(saved_models / "counter"))
        arguments.append(given.replace("0.0.0.0", "127.0.0.1"))
    assert runtime_container()["ports"][0]["containerPort"] == ports["--port"]
    probe = runtime_container()["readinessProbe"]["httpGet"]
    assert probe["port"] == ports["--port"]
    assert int(runtime().annotations["prometheus.kserve.io/port"]) == ports["--admin-port"]
    server = serve(*arguments)
    assert server.get(probe["path"]).status == 200
    assert server.get("/v2/models/translator/ready").status == 200
    assert server.post("/v2/models/translator/generate", {"input_0": 2}).status == 200
    admin = port_of(server, int(re.findall(r"127\.0\.0\.1:(\d+)", server.ready_line)[-1]))
    assert b"batchmaker_ready 1" in admin.get(runtime().annotations["prometheus.kserve.io/path"]).content
