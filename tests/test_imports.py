"""What imports what: no circles, and nothing is loaded that was not asked for."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
MOST_OF_AN_ENGINE = 230
"""Modules of the package that `bm.Engine` loads: it was 183 when an engine loaded baselines, NPU and GPUs."""


def modules_below(root: Path, package: str) -> dict[str, Path]:
    """Every module by its full name."""
    found = {}
    for path in root.rglob("*.py"):
        parts = [*([package] if package else []), *path.relative_to(root).with_suffix("").parts]
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_of(path: Path, known: dict[str, Path]) -> Iterator[str]:
    """The known modules that one imports, anywhere in it: in functions and for types alone, too."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in known else node.module for name in inner if {name, node.module} & known.keys())


def circle_in(known: dict[str, Path]) -> list[str]:
    """One circle of imports, empty if there is none."""
    imports = {name: set(imports_of(path, known)) - {name} for name, path in known.items()}
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return error.args[1]
    return []


@pytest.mark.parametrize("root", ["src/batchmaker", "benchmarks", "papers/benchmarks", "examples"])
def test_no_import_goes_in_a_circle(root):
    known = modules_below(REPOSITORY / root, "batchmaker" if root == "src/batchmaker" else "")
    assert len(known) > 3
    assert circle_in(known) == []


def test_a_circle_is_found_though_it_is_deferred_and_for_types_alone(tmp_path):
    (tmp_path / "one.py").write_text("def f():\n    import two\n", "utf-8")
    (tmp_path / "two.py").write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from one import f\n", "utf-8"
    )
    assert set(circle_in(modules_below(tmp_path, ""))) == {"one", "two"}


def loaded_by(code: str) -> set[str]:
    show = "import sys; print(*sorted(sys.modules), sep='\\n')"
    done = subprocess.run([sys.executable, "-c", f"{code}; {show}"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_the_package_alone_loads_nothing():
    loaded = loaded_by("import batchmaker")
    assert {name for name in loaded if name.startswith("batchmaker")} == {"batchmaker"}
    assert loaded.isdisjoint({"torch", "numpy", "numba"})


def test_errors_are_found_from_the_package_and_load_nothing_else():
    loaded = loaded_by("import batchmaker as bm; assert issubclass(bm.errors.DeadlineError, bm.errors.BatchmakerError)")
    assert {name for name in loaded if name.startswith("batchmaker")} == {"batchmaker", "batchmaker.errors"}


def test_an_engine_loads_the_runtime_and_no_more():
    loaded = loaded_by("import batchmaker as bm; bm.Engine, bm.Cell, bm.Model")
    own = {name for name in loaded if name.split(".")[0] == "batchmaker"}
    elsewhere = ("batchmaker.lab", "batchmaker_papers", "batchmaker.server", "batchmaker.cli")
    assert [name for name in own if name.startswith(elsewhere)] == []
    assert loaded.isdisjoint({"matplotlib", "typer", "rich", "fastapi", "starlette", "grpc", "onnx"})
    assert len(own) <= MOST_OF_AN_ENGINE
