"""A release: what is built, what is in it, and that it works where nothing but it is installed."""

from __future__ import annotations

import json
import os
import re
import runpy
import signal
import subprocess
import sys
import tarfile
import threading
import tomllib
import urllib.request
import zipfile
from collections.abc import Iterator
from email.parser import Parser
from pathlib import Path
from typing import Any

import pytest
import yaml

REPOSITORY = Path(__file__).resolve().parent.parent
LIMIT_S = 600.0
"""For what a command does in its own time: the first start of an installation compiles."""

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
NO_INDEX = re.compile(r"No matching distribution|Temporary failure in name resolution|Failed to establish|Connection")

WORKFLOWS = sorted((REPOSITORY / ".github" / "workflows").glob("*.yml"))
FORMS = sorted((REPOSITORY / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))


def kept_files() -> list[str]:
    """What git keeps, or would: of a checkout. Skips the test elsewhere."""
    command = ["git", "-c", f"safe.directory={REPOSITORY}", "-C", REPOSITORY, "ls-files", "--cached", "--others"]
    try:
        done = subprocess.run([*command, "--exclude-standard", "--deduplicate"], capture_output=True, text=True)
    except OSError:
        pytest.skip("needs git")
    if done.returncode:
        pytest.skip(f"needs a checkout: {done.stderr.strip()}")
    return [name for name in done.stdout.splitlines() if (REPOSITORY / name).is_file()]


def plain_environment(**more: str) -> dict[str, str]:
    """This process's environment without what would lead to a checkout's sources, or to another environment."""
    left_out = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    return {**{name: value for name, value in os.environ.items() if name not in left_out}, **more}


def torch_range() -> tuple[str, str]:
    """The oldest torch that the package allows, and the newest: one below the first that it does not."""
    (torch,) = [one for one in PROJECT["dependencies"] if one.startswith("torch")]
    oldest, major, minor = re.fullmatch(r"torch>=([\d.]+),<(\d+)\.(\d+)", torch).groups()
    return oldest, f"{major}.{int(minor) - 1}"


def loaded(path: Path) -> dict[Any, Any]:
    return yaml.safe_load(path.read_text("utf-8"))


def jobs(path: Path) -> dict[str, Any]:
    return loaded(path)["jobs"]


def steps_of(path: Path) -> list[dict[str, Any]]:
    return [step for job in jobs(path).values() for step in job["steps"]]


def test_ci_runs_on_every_python_and_both_ends_of_torch_that_the_package_names():
    matrix = jobs(REPOSITORY / ".github/workflows/check.yml")["tests"]["strategy"]["matrix"]
    named = [line.rpartition(" ")[2] for line in PROJECT["classifiers"] if re.search(r"Python :: 3\.\d+$", line)]
    assert matrix["python-version"] == named
    assert PROJECT["requires-python"] == f">={named[0]}"
    assert matrix["torch"] == list(torch_range())
    assert {"include", "exclude"}.isdisjoint(matrix)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_may_do_no_more_than_it_says_and_runs_actions_of_a_fixed_version(path):
    content = loaded(path)
    assert content[True]  # `on`, which YAML 1.1 takes for a truth value
    assert content["permissions"] in ({}, {"contents": "read"})
    for job in content["jobs"].values():
        assert job["timeout-minutes"] <= 60
        assert "write-all" not in job.get("permissions", {})
    used = [step["uses"] for step in steps_of(path) if "uses" in step]
    assert used
    assert [
        one for one in used if not re.fullmatch(r"[\w-]+/[\w.-]+@(v\d+[\w.]*|release/v\d+|[0-9a-f]{40})", one)
    ] == []
    kept = [step for step in steps_of(path) if step.get("uses", "").startswith("actions/checkout")]
    assert all(step["with"]["persist-credentials"] is False for step in kept)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_every_file_that_a_workflow_runs_is_there(path):
    named = {
        word for step in steps_of(path) for word in re.findall(r"(?:\.ci|scripts|tests)/[\w./-]+", step.get("run", ""))
    }
    assert [word for word in named if not (REPOSITORY / word).exists()] == []


def test_nothing_is_published_before_the_wheel_has_been_tried():
    found = jobs(REPOSITORY / ".github/workflows/release.yml")
    assert found["wheel"]["needs"] == "build"
    writing = {name for name, job in found.items() if "write" in job["permissions"].values()}
    assert writing == {name for name, job in found.items() if job.get("needs") == "wheel"}
    assert "python .ci/tag.py" in str(found["build"])


def test_a_tag_must_be_the_version_in_every_place(tmp_path):
    script = runpy.run_path(str(REPOSITORY / ".ci" / "tag.py"))
    found = script["versions"]()
    assert {"pyproject.toml", "src/batchmaker/__init__.py", "CITATION.cff", "CHANGELOG.md"} <= found.keys()
    assert set(found.values()) == {PROJECT["version"]}
    command = [sys.executable, REPOSITORY / ".ci" / "tag.py"]
    assert subprocess.run([*command, f"v{PROJECT['version']}"]).returncode == 0
    refused = subprocess.run([*command, "v9.9.9"], capture_output=True, text=True)
    assert refused.returncode == 1
    assert f"the tag is v9.9.9, and the version is {PROJECT['version']} in pyproject.toml" in refused.stderr


def test_the_citation_is_complete_and_names_the_papers():
    found = loaded(REPOSITORY / "CITATION.cff")
    assert found["cff-version"] == "1.2.0"
    assert {"message", "title", "authors", "version", "license"} <= found.keys()
    assert (str(found["version"]), found["license"]) == (PROJECT["version"], PROJECT["license"])
    assert found["authors"] == [{"name": "The batchmaker authors"}]
    venues = {paper["conference"]["name"] for paper in found["references"]}
    assert venues == {"EuroSys 2018", "AISys 2017", "HPCA 2021", "ICML 2023", "EuroSys 2019"}
    assert all({"type", "title", "authors", "year"} <= paper.keys() for paper in found["references"])


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_an_issue_form_is_one(path):
    content = loaded(path)
    if path.stem == "config":
        assert content == {"blank_issues_enabled": False}
        return
    assert content["name"]
    assert content["description"]
    fields = [field for field in content["body"] if field["type"] != "markdown"]
    names = [field["id"] for field in fields]
    assert len(set(names)) == len(names) > 2
    for field in fields:
        assert field["type"] in ("textarea", "dropdown", "input", "checkboxes")
        assert field["attributes"]["label"]
        assert field["type"] != "dropdown" or field["attributes"]["options"]


def test_the_lowest_versions_are_those_of_the_package_and_of_its_extras():
    command = [sys.executable, REPOSITORY / ".ci" / "lowest.py", REPOSITORY / "pyproject.toml"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert f"torch=={torch_range()[0]}" in lines
    assert {line.partition("==")[0] for line in lines} >= {
        "numpy",
        "starlette",
        "grpcio",
        "httpx",
        "onnx",
        "matplotlib",
    }
    assert len({line.partition("==")[0] for line in lines}) == len(lines)


def test_the_readmes_torch_is_one_that_the_package_allows():
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    asked = re.findall(r"'torch>=([\d.]+),<(\d+)\.(\d+)'", readme)
    oldest, newest = torch_range()
    assert asked
    for lowest, major, minor in asked:
        assert lowest == oldest
        assert (int(major), int(minor) - 1) <= tuple(map(int, newest.split(".")))


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> tuple[Path, Path]:
    """The source distribution, and the wheel that was built from it, in an environment of the build's own."""
    pytest.importorskip("build")
    copy, out = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("dist")
    for name in kept_files():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes((REPOSITORY / name).read_bytes())
    done = subprocess.run(
        [sys.executable, "-m", "build", "--outdir", out, copy],
        capture_output=True, text=True, env=plain_environment(PYTHONPATH=os.pathsep.join(packages())), cwd=out,
    )  # fmt: skip
    said = done.stdout + done.stderr
    if done.returncode and NO_INDEX.search(said):
        pytest.skip("needs an index of packages, for what builds")
    assert done.returncode == 0, said[-4000:]
    (source,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    return source, wheel


def packages() -> list[str]:
    """Where the packages of this environment lie."""
    return [path for path in sys.path if path.endswith("-packages")]


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory) -> Path:
    """The programs of a fresh environment with the wheel. What the wheel asks for is that of this environment."""
    _, wheel = built
    environment = tmp_path_factory.mktemp("fresh") / ".venv"
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    programs = environment / "bin"
    command = [programs / "pip", "install", "--quiet", "--no-deps", "--no-index", wheel]
    subprocess.run(command, check=True, env=plain_environment())
    (folder,) = (environment / "lib").glob("python*/site-packages")
    (folder / "needed.pth").write_text("\n".join(packages()))
    return programs


def run(*command: object, cwd: Path) -> str:
    """What a command says on standard output; its standard error is that of the test."""
    words = list(map(str, command))
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, timeout=LIMIT_S, env=plain_environment(), cwd=cwd)
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.slow
def test_the_wheel_has_every_file_of_the_package_and_nothing_else(built):
    _, wheel = built
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = [name for name in names if name.endswith(".dist-info/METADATA")]
        about = Parser().parsestr(archive.read(metadata).decode())
    package = {name.removeprefix("src/") for name in kept_files() if name.startswith("src/batchmaker/")}
    assert len(package) > 100
    assert {name for name in names if ".dist-info/" not in name} == package
    assert about["Version"] == PROJECT["version"]
    needed = [one for one in about.get_all("Requires-Dist") if "extra ==" not in one]
    assert len(needed) == len(PROJECT["dependencies"])
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


@pytest.mark.slow
def test_the_source_distribution_has_what_operators_and_developers_need(built):
    source, _ = built
    with tarfile.open(source) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"deploy/Containerfile", "deploy/prometheus/alerts.yaml", "deploy/grafana/batchmaker.json"} <= names
    assert {"SECURITY.md", "CITATION.cff"} <= names
    assert {"README.md", "LICENSE", "CHANGELOG.md", "docs/operations.md", "conftest.py", "scripts/check"} <= names


@pytest.mark.slow
def test_what_the_readme_says_of_installing_is_true_of_the_wheel(built, installed):
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    (see, _) = re.findall(r"^```bash\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
    steps = [step.split() for step in see.strip().split(" && ")]
    assert [step[0] for step in steps] == ["python3", ".venv/bin/pip", ".venv/bin/batchmaker"]
    (torch,) = re.findall(r"'torch>=[\d.]+,<[\d.]+'", see)
    assert steps[1] == [".venv/bin/pip", "install", torch, "."]
    assert (installed / "batchmaker").is_file()


@pytest.mark.slow
def test_the_installed_program_is_the_wheels_own_and_shows_the_demo(installed, tmp_path):
    where = run(installed / "python", "-c", "import batchmaker; print(batchmaker.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(installed.parent)
    assert run(installed / "batchmaker", "--version", cwd=tmp_path) == f"batchmaker {PROJECT['version']}\n"
    shown = run(installed / "batchmaker", "demo", cwd=tmp_path)
    assert "cellular" in shown
    assert "padded" in shown


@pytest.fixture
def serving(installed, tmp_path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The address of a server that the wheel has started, and its process."""
    command = [installed / "batchmaker", "serve", "lstm:hidden=4,vocabulary_size=9", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=plain_environment(), cwd=tmp_path) as process:
        timer = threading.Timer(LIMIT_S, process.kill)
        timer.start()
        try:
            yield re.search(r"http://\S+", process.stdout.readline())[0], process
        finally:
            timer.cancel()
            process.kill()


@pytest.mark.slow
def test_the_installed_server_answers_and_ends(serving):
    address, process = serving
    asked = urllib.request.Request(f"{address}/v2/models/lstm/generate", json.dumps({"input_0": [1, 2]}).encode())
    with urllib.request.urlopen(asked, timeout=LIMIT_S) as answer:
        assert len(json.load(answer)["output_0"]) == 4
    with urllib.request.urlopen(f"{address}/metrics", timeout=LIMIT_S) as answer:
        assert f'version="{PROJECT["version"]}"' in answer.read().decode()
    process.send_signal(signal.SIGTERM)
    assert process.wait(LIMIT_S) == 0
