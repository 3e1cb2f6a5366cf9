"""What the cells of a model cost on LazyBatching's accelerator: the hook of `batchmaker simulate --npu`."""

from __future__ import annotations

from batchmaker.cost.latency import LatencyTable
from batchmaker_papers.npu.accelerator import Npu
from batchmaker_papers.npu.operations import CellModules, registry_operations
from batchmaker_papers.npu.systolic import dataflow_named


def npu_costs(cells: CellModules, max_batch: int, dataflow: str) -> LatencyTable:
    """Return the time of every cell by batch size, up to max_batch. dataflow: ws, os or tpu."""
    return Npu().latency_table(registry_operations(cells), max_batch, dataflow_named(dataflow))
