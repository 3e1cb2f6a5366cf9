"""Saved models for fleets, and the models in reach of processes of Ray, as for those of servers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from served_models import Counter, Gated, Scales

import batchmaker as bm

MODELS = Path(__file__).resolve().parent.parent / "server"


@pytest.fixture(scope="module")
def models_in_reach() -> Iterator[None]:
    """Python processes that are started meanwhile find served_models.py."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(MODELS), os.environ.get("PYTHONPATH")])))
        yield


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    """A folder with the saved models `counter`, `scales` and `gated`, and the gate of the last."""
    folder, gate = tmp_path_factory.mktemp("models"), tmp_path_factory.mktemp("gate") / "open"
    bm.save(Counter(), folder / "counter")
    bm.save(Scales(), folder / "scales")
    bm.save(Gated(str(gate)), folder / "gated")
    yield folder, gate
    gate.touch()
