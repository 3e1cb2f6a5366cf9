"""Servers as processes, one for each module that asks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from served_models import Counter, Gated, Rooted, Sums
from server_process import RunningServer

import batchmaker as bm


@pytest.fixture(scope="session")
def saved_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the saved models `counter`, `rooted` and `sums`."""
    folder = tmp_path_factory.mktemp("saved")
    bm.save(Counter(), folder / "counter")
    bm.save(Rooted(), folder / "rooted")
    bm.save(Sums(), folder / "sums")
    return folder


@pytest.fixture
def gated(tmp_path: Path) -> tuple[Path, Path]:
    """A folder with the saved model `gated`, and the file that lets its requests go on."""
    folder, gate = tmp_path / "models", tmp_path / "open"
    folder.mkdir()
    bm.save(Gated(str(gate)), folder / "gated")
    return folder, gate


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., RunningServer]]:
    """Start servers; they are ended with the module."""
    running: list[RunningServer] = []

    def start(*arguments: object) -> RunningServer:
        log = tmp_path_factory.mktemp("log") / "server.log"
        running.append(RunningServer(tuple(map(str, arguments)), log))
        return running[-1]

    yield start
    for server in running:
        server.close()
