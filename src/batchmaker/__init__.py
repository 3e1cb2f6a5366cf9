"""Continuous batching for any dynamic PyTorch model: cells, an unfold function, an engine that batches them."""

from batchmaker.cells.cell import Cell
from batchmaker.cells.layers import layers
from batchmaker.cells.model import Model
from batchmaker.cells.saved import load
from batchmaker.engine.engine import Engine
from batchmaker.engine.save import save

__version__ = "0.1.0"

__all__ = ["Cell", "Engine", "Model", "__version__", "layers", "load", "save"]
