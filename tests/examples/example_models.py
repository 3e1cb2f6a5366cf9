"""The examples as their tests get them: built as `batchmaker serve` builds them, or skipped without the package."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

import batchmaker as bm
from batchmaker.saved import python_file

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def example(name: str, package: str) -> bm.Model:
    """Return the model of an example; skips the module where its package is not installed."""
    if find_spec(package) is None:
        pytest.skip(f"needs {package}", allow_module_level=True)
    return python_file.build(EXAMPLES / name / f"{name}.py", {})


def answers(model, asked, **options):
    """Return what clients get."""
    with bm.Engine(model, threads=1) as engine:
        results = engine.map([model.encode(one) for one in asked], progress=False, **options)
    return [model.decode(result, one) for result, one in zip(results, asked, strict=True)]
