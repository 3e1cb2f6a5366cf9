"""The package without its extras: what works, and what the errors say of the rest.

The packages are installed here, so each test has a process that does not find them.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, Final

import pytest

from batchmaker.errors import DeviceError, MissingExtraError, OptionError, needing

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY / "tests" / "server"))
from server_process import RunningServer  # noqa: E402

PROJECT: Final[dict[str, Any]] = tomllib.loads((REPOSITORY / "pyproject.toml").read_text("utf-8"))["project"]
LIMIT_S: Final = 600.0
NO_COMMANDS: Final = {"all", "dev", "docs", "examples"}
"""Extras that no error names: sums of others, and what is for developers and examples."""

MODULES: Final = {
    "cuda-core": "cuda", "cuda-bindings": "cuda", "nvidia-cuda-nvrtc": "nvidia",
    "grpcio": "grpc", "protobuf": "google",
    "httptools": "httptools", "httpx": "httpx", "matplotlib": "matplotlib", "onnx": "onnx",
    "onnxruntime": "onnxruntime", "orjson": "orjson", "prometheus-client": "prometheus_client",
    "python-multipart": "python_multipart", "ray": "ray", "starlette": "starlette", "uvicorn": "uvicorn",
    "uvloop": "uvloop", "websockets": "websockets",
}  # fmt: skip
"""The module of each package that an extra brings."""

WITHOUT: Final = """
import sys

class Without:
    def __init__(self, finder, names):
        self.finder, self.names = finder, names

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in self.names else self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path = [Without(finder, frozenset(%r)) for finder in sys.meta_path]
"""
"""Code after which these modules are not there: what finds modules finds none of them."""

MAIN: Final = "from batchmaker.cli.main import main; main()"


def packages_of(extra: str) -> set[str]:
    """The packages of an extra, and of the extras in it."""
    found = set()
    for wanted in PROJECT["optional-dependencies"][extra]:
        inner = re.fullmatch(r"batchmaker\[(.*)\]", wanted)
        if inner:
            found |= set().union(*map(packages_of, inner[1].split(",")))
        else:
            found.add(re.match(r"[\w.-]+", wanted)[0])
    return found


def start(code: str, extras: str = "all") -> list[str]:
    """The command of a Python process in which no package of these extras can be imported."""
    return [sys.executable, "-c", WITHOUT % (sorted({MODULES[name] for name in packages_of(extras)}),) + code]


def run(code: str, *arguments: object, cwd: Path, status: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [*start(code), *map(str, arguments)], capture_output=True, text=True, timeout=LIMIT_S, cwd=cwd
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done


def test_the_package_itself_asks_for_few():
    names = [re.match(r"[\w.-]+", wanted)[0] for wanted in PROJECT["dependencies"]]
    assert names == ["torch", "numpy", "numba", "safetensors", "msgspec", "typer", "rich"]


def test_all_is_the_sum_of_the_extras_that_errors_name():
    named = set(PROJECT["optional-dependencies"]) - NO_COMMANDS
    assert packages_of("all") == set().union(*map(packages_of, named)) == MODULES.keys()


def test_every_extra_that_an_error_names_is_one_of_the_package():
    sources = [path.read_text("utf-8") for path in (REPOSITORY / "src").rglob("*.py")]
    named = {extra for text in sources for extra in re.findall(r'\bneeding\(\s*"(\w+)"', text)}
    assert named == set(PROJECT["optional-dependencies"]) - NO_COMMANDS
    elsewhere = {extra for text in sources for extra in re.findall(r"pip install 'batchmaker\\*\[(\w+)\\*\]", text)}
    assert elsewhere <= named


ENGINE = """
import batchmaker as bm
from torch import nn

class Sentence(bm.Model):
    example_request = [1, 2]

    def __init__(self):
        self.step = bm.Cell(nn.LSTMCell(4, 4), max_batch=8)
        self.embed = bm.Cell(nn.Embedding(9, 4), max_batch=8)

    def unfold(self, words):
        return self.step.run(self.embed.map(words))[0]

with bm.Engine(Sentence()) as engine:
    print(*[tuple(each.shape) for each in engine.map([[1, 2, 3], [4]], progress=False)])
from batchmaker.lab import zoo

bm.save(zoo.make("lstm", hidden=4, vocabulary_size=9), "saved")
bm.load("saved")

def tried(do):
    try:
        do()
    except bm.errors.BatchmakerError as error:
        print(type(error).__name__, isinstance(error, ImportError), error)

def server():
    import batchmaker.server

def serving_classes():
    from batchmaker.server import Completions

def client():
    import batchmaker.client

def fleet():
    import batchmaker.fleet
    batchmaker.fleet.map

def picture():
    from batchmaker.lab.plots.pictures import draw_profile
    draw_profile("x.png", [], "")

def gpu():
    from batchmaker.kernels.found import found_device
    found_device()

for do in (server, serving_classes, client, fleet, picture, lambda: bm.onnx(b""), gpu):
    tried(do)
"""


def test_the_package_imports_and_an_engine_runs_and_each_error_names_the_command(tmp_path):
    lines = run(ENGINE, cwd=tmp_path).stdout.splitlines()
    assert lines[0] == "(4,) (4,)"
    told = [re.fullmatch(r"(\w+) (True|False) (.*): pip install 'batchmaker\[(\w+)\]'", line) for line in lines[1:]]
    assert all(told), lines
    assert [(one[1], one[2], one[4]) for one in told] == [
        ("MissingExtraError", "True", "server"), ("MissingExtraError", "True", "server"),
        ("MissingExtraError", "True", "client"), ("MissingExtraError", "True", "ray"),
        ("MissingExtraError", "True", "plots"), ("ModelError", "False", "onnx"), ("DeviceError", "False", "cuda"),
    ]  # fmt: skip
    assert "No module named 'starlette'" in told[0][3] or "No module named 'uvloop'" in told[0][3]


def test_help_tells_of_every_command(tmp_path):
    assert "serve" in run(MAIN, "--help", cwd=tmp_path).stdout
    every = """
from typer.testing import CliRunner
from batchmaker.cli.main import COMMANDS, app
for name in COMMANDS:
    done = CliRunner().invoke(app, [name, "--help"])
    assert done.exit_code == 0, done.output
    print(name)
"""
    assert "serve" in run(every, cwd=tmp_path).stdout.split()


@pytest.mark.slow
def test_commands_that_draw_do_the_rest_of_their_work(tmp_path):
    shown = run(MAIN, "demo", "--seconds", 0.5, "--hidden", 16, "--rate", 100, cwd=tmp_path).stdout
    assert "padded" in shown
    assert "A picture needs packages" in shown
    assert shown.rstrip().endswith("pip install 'batchmaker[plots]'")
    assert not (tmp_path / "timeline.png").exists()
    asked = ("--hidden", 16, "--max", 2, "--seconds", 0.01)
    said = run(MAIN, "profile", "lstm", *asked, "--png", "x.png", cwd=tmp_path, status=2).stderr
    assert said.startswith("error: A picture needs packages that are not installed (No module named 'matplotlib')")
    assert run(MAIN, "profile", "lstm", *asked, cwd=tmp_path).stdout


@pytest.mark.slow
def test_run_and_bench_need_no_extra(tmp_path):
    (tmp_path / "text.txt").write_text("the cat sat\non the mat\n", "utf-8")
    run(MAIN, "run", "lstm", "--input", "text.txt", "--output", "out.jsonl", "--hidden", 8, cwd=tmp_path)
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 2
    few = ("--hidden", 8, "--rate", 50, "--seconds", 0.5, "--policy", "cellular")
    assert "cellular" in run(MAIN, "bench", "lstm", *few, cwd=tmp_path).stdout


@pytest.mark.slow
def test_serve_says_what_it_needs_in_one_line(tmp_path):
    (said,) = run(MAIN, "serve", "lstm", cwd=tmp_path, status=2).stderr.splitlines()
    assert re.fullmatch(r"error: The server needs packages .*: pip install 'batchmaker\[server\]'", said)


@pytest.mark.slow
def test_without_grpc_a_server_serves_http_unless_grpc_was_asked_for(tmp_path):
    command = [*start(MAIN, "grpc"), "serve"]
    asked = [*command, "lstm:hidden=4,vocabulary_size=9", "--port", "0", "--grpc-port", "0"]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 2, done.stdout
    assert "gRPC (grpc_port) needs packages" in done.stderr
    assert done.stderr.rstrip().endswith("pip install 'batchmaker[grpc]'")
    server = RunningServer(("lstm:hidden=4,vocabulary_size=9",), tmp_path / "log", command)
    try:
        assert server.post("/v2/models/lstm/generate", {"input_0": [1, 2]}).status == 200
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(LIMIT_S) == 0
    finally:
        server.process.kill()
        server.process.stdout.close()


def test_a_defect_of_the_package_is_not_told_as_a_missing_extra():
    with pytest.raises(ImportError, match="cannot import name") as told, needing("server", "The server"):
        from batchmaker.errors import nothing_of_this_name  # noqa: F401
    assert not isinstance(told.value, MissingExtraError)


def test_of_extras_in_each_other_the_outer_is_told():
    with (
        pytest.raises(OptionError, match=r"A fleet needs .*No module named 'none_such'.*'batchmaker\[ray\]'$") as told,
        needing("ray", "A fleet"),
        needing("server", "The server"),
    ):
        import none_such  # noqa: F401
    assert "server" not in str(told.value)


def test_the_error_may_be_of_another_class():
    with pytest.raises(DeviceError, match=r"pip install 'batchmaker\[cuda\]'"), needing("cuda", "A GPU", DeviceError):
        import none_such  # noqa: F401


@pytest.mark.slow
def test_a_fleet_without_its_packages_says_what_to_install(tmp_path):
    done = subprocess.run(
        [*start(MAIN, "grpc"), "serve", "lstm", "--replicas", "2"],
        capture_output=True, text=True, timeout=LIMIT_S, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith("error: A fleet needs packages that are not installed")
    assert done.stderr.rstrip().endswith("pip install 'batchmaker[ray]'")
