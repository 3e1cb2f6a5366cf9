"""Continuous batching for any dynamic PyTorch model: cells, an unfold function, an engine that batches them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from batchmaker.cells.cell import Cell
    from batchmaker.cells.layers import layers
    from batchmaker.cells.model import Model
    from batchmaker.cells.onnx_model import onnx
    from batchmaker.cells.opaque import opaque
    from batchmaker.cells.recurrent_layers import recurrent
    from batchmaker.cells.saved import load
    from batchmaker.cells.trees import tree
    from batchmaker.engine.engine import Engine
    from batchmaker.engine.save import save

__version__ = "0.1.0"

__all__ = ["Cell", "Engine", "Model", "__version__", "layers", "load", "onnx", "opaque", "recurrent", "save", "tree"]

_HOMES = {
    "Cell": "batchmaker.cells.cell",
    "Engine": "batchmaker.engine.engine",
    "Model": "batchmaker.cells.model",
    "layers": "batchmaker.cells.layers",
    "load": "batchmaker.cells.saved",
    "onnx": "batchmaker.cells.onnx_model",
    "opaque": "batchmaker.cells.opaque",
    "recurrent": "batchmaker.cells.recurrent_layers",
    "save": "batchmaker.engine.save",
    "tree": "batchmaker.cells.trees",
}
"""Where each name is, for when it is first used: what needs no torch, such as `batchmaker.client`, comes without it."""


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
