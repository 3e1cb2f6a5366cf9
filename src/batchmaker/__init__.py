"""Continuous batching for any dynamic PyTorch model: cells, an unfold function, an engine that batches them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from batchmaker import errors, sampling
    from batchmaker.compile.opaque import opaque
    from batchmaker.engine.engine import Engine
    from batchmaker.engine.save import save
    from batchmaker.model.cell import Cell
    from batchmaker.model.decisions import cond, switch, while_loop
    from batchmaker.model.layers import layers
    from batchmaker.model.memory import Memory
    from batchmaker.model.model import Model
    from batchmaker.model.onnx_model import onnx
    from batchmaker.model.ragged import Ragged
    from batchmaker.model.recurrent_layers import recurrent
    from batchmaker.model.trees import tree
    from batchmaker.saved import load

__version__ = "0.1.0"

__all__ = [
    "Cell",
    "Engine",
    "Memory",
    "Model",
    "Ragged",
    "__version__",
    "cond",
    "errors",
    "layers",
    "load",
    "onnx",
    "opaque",
    "recurrent",
    "sampling",
    "save",
    "switch",
    "tree",
    "while_loop",
]

_HOMES = {
    "Cell": "batchmaker.model.cell",
    "Engine": "batchmaker.engine.engine",
    "Memory": "batchmaker.model.memory",
    "Model": "batchmaker.model.model",
    "Ragged": "batchmaker.model.ragged",
    "cond": "batchmaker.model.decisions",
    "layers": "batchmaker.model.layers",
    "load": "batchmaker.saved",
    "onnx": "batchmaker.model.onnx_model",
    "opaque": "batchmaker.compile.opaque",
    "recurrent": "batchmaker.model.recurrent_layers",
    "save": "batchmaker.engine.save",
    "switch": "batchmaker.model.decisions",
    "tree": "batchmaker.model.trees",
    "while_loop": "batchmaker.model.decisions",
}
"""The module of each public name, imported at first use.

Names that need no torch, such as `batchmaker.client`, do not import it.
"""


def __getattr__(name: str) -> Any:
    if name in ("errors", "sampling"):  # the module itself; importing it makes it an attribute
        return importlib.import_module(f"batchmaker.{name}")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
