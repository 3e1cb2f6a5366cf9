"""Continuous batching for any dynamic PyTorch model: cells, an unfold function, and an engine that batches across requests."""

from batchmaker.cells.cell import Cell
from batchmaker.cells.model import Model
from batchmaker.engine.engine import Engine

__version__ = "0.1.0"

__all__ = ["Cell", "Engine", "Model", "__version__"]
