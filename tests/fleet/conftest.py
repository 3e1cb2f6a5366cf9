"""Processes of Ray import the tests' models, as those of servers do."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

MODELS = Path(__file__).resolve().parent.parent / "server"


@pytest.fixture(scope="module")
def models_in_reach() -> Iterator[None]:
    """Python processes that are started meanwhile find served_models.py."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(MODELS), os.environ.get("PYTHONPATH")])))
        yield
