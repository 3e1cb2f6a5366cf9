"""The scripts of `benchmarks/` and `papers/benchmarks/` as modules, for tests of what they compute and write."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = tuple(str(ROOT / folder) for folder in ("benchmarks", "papers/benchmarks"))


@contextmanager
def imported(*names: str) -> Iterator[dict[str, ModuleType]]:
    """Import scripts; afterwards modules, paths to look in, environment and torch's threads are as before."""
    modules, paths, threads = set(sys.modules), list(sys.path), torch.get_num_threads()
    try:
        with pytest.MonkeyPatch.context() as patch:
            for folder in FOLDERS:
                patch.syspath_prepend(folder)
            patch.setenv("OMP_NUM_THREADS", "1")
            yield {name: importlib.import_module(name) for name in names}
    finally:
        sys.path[:] = paths
        torch.set_num_threads(threads)
        for name in set(sys.modules) - modules:
            if str(getattr(sys.modules[name], "__file__", "")).startswith(FOLDERS):
                del sys.modules[name]
