"""What a server of saved models loads before it is ready."""

from __future__ import annotations

import re

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
