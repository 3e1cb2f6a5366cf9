"""Nothing is compiled while requests wait: every loop is ready after `prepare`, in one form only."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import importlib, pkgutil
from numba.core.dispatcher import Dispatcher
import batchmaker.graph, batchmaker.core
from batchmaker.core.warm_up import prepare

found = {}
for room in (batchmaker.graph, batchmaker.core):
    for module in pkgutil.iter_modules(room.__path__, f"{room.__name__}."):
        for name, value in vars(importlib.import_module(module.name)).items():
            if isinstance(value, Dispatcher) and value.__module__ == module.name:
                found[f"{module.name}.{name}"] = value
of_steps = [loop for name, loop in found.items() if name.startswith("batchmaker.core.")]
assert len(of_steps) > 10
prepare()
assert all(len(loop.signatures) <= 1 for loop in of_steps), "prepare has made several forms of one"
assert sum(len(loop.signatures) for loop in of_steps) > 5  # others are parts of these
ready = {name for name, loop in found.items() if loop.signatures}

from test_scheduler_properties import CELL_POLICIES, play

common = dict(max_batch=4, min_batch=1, max_steps=5, num_requests=8, size=6, waits=True, mishaps=True, spread=5)
common.update(budget_ms=None, most_told=3)
for seed, policy in enumerate(CELL_POLICIES):
    more = dict(seed=seed, policy=policy, num_workers=1 + seed % 2, run_ahead=seed % 3, priorities=(0, 0, 1))
    play(dict(common, **more, num_sequences=2, num_chunks=3, patience=5)).check_replay()
late = {name: loop.signatures for name, loop in found.items() if len(loop.signatures) != (name in ready)}
assert not late, f"compiled while requests waited: {late}"
"""


@pytest.mark.slow
@pytest.mark.skipif(os.environ.get("NUMBA_DISABLE_JIT") == "1", reason="nothing is compiled")
def test_every_loop_is_ready_and_has_one_form_whatever_runs() -> None:
    told = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    assert told.returncode == 0, told.stderr
