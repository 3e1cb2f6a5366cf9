"""What a server of saved models loads before it is ready."""

from __future__ import annotations

import logging
import re

from batchmaker.executor.processors import Processors
from batchmaker.server import run
from batchmaker.server.config import Config, ModelEntry

TRACERS = {
    "sympy", "networkx", "torch._dynamo", "torch._inductor", "torch._export.serde.serialize", "torch.export._trace",
    "torch.fx.experimental.symbolic_shapes",
}  # fmt: skip
"""What torch.export and its reader of graphs consist of: as long to import as torch itself."""


def test_a_server_of_saved_models_never_imports_what_traces_them(monkeypatch, serve, saved_models):
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")
    server = serve(saved_models)
    imported = set(re.findall(r"^import time: .*\| +(\S+)$", server.log.read_text("utf-8"), re.MULTILINE))
    assert "torch" in imported
    assert "batchmaker.saved.graph_reader" in imported
    assert imported.isdisjoint(TRACERS)
    assert '"event":"1 compute thread: the settings say so"' in server.log.read_text("utf-8")


def test_the_log_says_how_many_threads_compute_and_why(monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(run, "found_processors", lambda: Processors(16, 16, 2.5))
    monkeypatch.setattr(run.torch, "set_num_threads", lambda threads: said.append(f"torch: {threads}"))
    monkeypatch.setattr(logging.getLogger("batchmaker.server"), "info", said.append)
    models = [ModelEntry(source="lstm"), ModelEntry(source="gru"), ModelEntry(source="treelstm", workers=1)]
    run.set_threads(Config(models=models))
    assert said == [
        "torch: 2",
        "1 compute thread for each of 2 workers: the cgroup's quota is 2.5 processors of 16",
        "2 compute threads: the cgroup's quota is 2.5 processors of 16",
    ]
