"""What every test stands on: one thread, repeatable examples in CI, skips for what this machine lacks."""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
from pathlib import Path

import pytest
from hypothesis import settings

REPOSITORY = Path(__file__).resolve().parent

settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")

os.environ.setdefault("OMP_NUM_THREADS", "1")  # engines have one worker, however many processors there are
HAS_CUDA = False
if importlib.util.find_spec("torch") is not None:
    import torch

    torch.set_num_threads(1)
    HAS_CUDA = torch.cuda.is_available()


def pytest_sessionstart(session: pytest.Session) -> None:
    """Compile the loops once, on all cores: the processes of a long run would each compile all of them."""
    config = session.config
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None) or "torch" not in sys.modules:
        return
    if any(Path(given.partition("::")[0]).is_dir() for given in config.args):
        import batchmaker as bm
        from batchmaker.engine.setup import prepare_scheduler
        from batchmaker.lab import zoo
        from batchmaker.policies.auto import AutoPolicy

        sizes = {"vocabulary_size": 4, "embedding": 2, "hidden": 2}
        prepare_scheduler(AutoPolicy(), [zoo.make("lstm", dtype=name, **sizes) for name in ("float32", "bfloat16")])
        with bm.Engine(zoo.make("early-exit", width=2), threads=1) as engine:
            engine.submit(torch.zeros(2)).result()  # the loops of decisions, at the first request that needs them


def pytest_collection_finish() -> None:
    """Keep what is imported and collected out of the garbage collector: each full pass would look at all of it."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if HAS_CUDA:
        return
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The directory of real data sets beside the repository. Skips the test where there is none."""
    path = REPOSITORY.parent / "shared" / "data"
    if not path.is_dir():
        pytest.skip(f"no data sets at {path}")
    return path
